# SPDX-License-Identifier: Apache-2.0
"""Merged disks are what the chain was: read by QEMU's own tools."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from opendsec.api.errors import Unavailable
from opendsec.runtime.vmm import disks, qcow2

MIB = 1 << 20
SIZE = 1100 * MIB  # three L2 tables

needs_qemu = pytest.mark.skipif(shutil.which("qemu-io") is None, reason="no qemu-io")


def node(chain: list[Path]) -> dict[str, object]:
    """The chain, lowest first, the lowest raw."""
    found: dict[str, object] = {"driver": "raw", "file": {"driver": "file", "filename": str(chain[0])}}
    for path in chain[1:]:
        found = {"driver": "qcow2", "file": {"driver": "file", "filename": str(path)}, "backing": found}
    return found


def tool(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


@needs_qemu
def test_a_merged_chain_reads_the_same(tmp_path: Path) -> None:
    dice = random.Random(3)
    base = tmp_path / "base"
    with open(base, "wb") as file:
        file.truncate(SIZE)
        for at in range(0, SIZE, 100 * MIB):
            file.seek(at)
            file.write(os.urandom(200_000))
    chain = [base]
    for number in range(4):
        chain.append(tmp_path / f"{number}.qcow2")
        disks.write_overlay(chain[-1], SIZE)
        commands = []
        for _ in range(12):
            at = dice.randrange(0, SIZE - MIB, 512) if dice.random() < 0.5 else dice.randrange(11) * 100 * MIB
            kind = dice.choice([f"write -P {dice.randrange(1, 256)}", "write -z", "write -z -u", "discard"])
            commands += ["-c", f"{kind} {at} {dice.choice([512, 4096, 65536, 300_032])}"]
        tool("qemu-io", *commands, "json:" + json.dumps(node(chain)))
    merged = tmp_path / "merged.qcow2"
    assert qcow2.merge(chain[1:], merged, SIZE) > 0
    assert "No errors" in tool("qemu-img", "check", "-f", "qcow2", str(merged))
    said = tool("qemu-img", "compare", "json:" + json.dumps(node(chain)), "json:" + json.dumps(node([base, merged])))
    assert "identical" in said
    # And it can lie on the chain that it was made of.
    said = tool("qemu-img", "compare", "json:" + json.dumps(node(chain)), "json:" + json.dumps(node([*chain[:-1], merged])))
    assert "identical" in said


def test_empty_ones_merge_to_an_empty_one(tmp_path: Path) -> None:
    for name in "ab":
        disks.write_overlay(tmp_path / name, 64 * MIB)
    assert qcow2.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c", 64 * MIB) == 0
    with open(tmp_path / "c", "rb") as file:
        assert list(qcow2.clusters(file.fileno(), 64 * MIB)) == []


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, b"QFI\0"),
        (4, struct.pack(">I", 2)),
        (20, struct.pack(">I", 12)),
        (24, struct.pack(">Q", 1 << 62)),  # as large as no disk is: tables for it would not fit into memory
        (32, struct.pack(">I", 1)),  # encrypted
        (36, struct.pack(">I", 1 << 30)),  # L1 entries
        (40, struct.pack(">Q", 1 << 40)),  # L1 table
        (72, struct.pack(">Q", 1)),  # incompatible features
        (3 * disks.CLUSTER, struct.pack(">Q", 1 << 50)),  # an L2 table
        (3 * disks.CLUSTER, struct.pack(">Q", 3 * disks.CLUSTER)),  # the L1 table as L2 table, which names itself: a loop it is not
    ],
)
def test_what_is_not_as_ours_are_is_refused(tmp_path: Path, at: int, value: bytes) -> None:
    path = tmp_path / "bad"
    disks.write_overlay(path, 64 * MIB)
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(value)
    if at == 3 * disks.CLUSTER and value.endswith(b"\0\x03\0\0"):
        assert qcow2.merge([path], tmp_path / "merged", 64 * MIB) == disks.CLUSTER  # its own table as data, nothing else of the host
        return
    with pytest.raises(Unavailable):
        qcow2.merge([path], tmp_path / "merged", 64 * MIB)
    assert not (tmp_path / "merged").exists()
