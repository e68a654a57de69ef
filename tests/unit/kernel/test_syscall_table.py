# SPDX-License-Identifier: Apache-2.0
"""The tables of system calls: complete, unambiguous, and in agreement with the numbers that the wrappers use."""

from __future__ import annotations

import pytest

from opendsec.kernel import abi
from opendsec.kernel.syscall_table import ALL_NAMES, BY_ARCH


@pytest.mark.parametrize("arch", list(BY_ARCH))
def test_numbers_are_unique_and_newer_ones_shared(arch: str) -> None:
    table = BY_ARCH[arch]
    assert len(set(table.values())) == len(table)
    # From 424 on every machine has the same calls under the same numbers, without a gap.
    newer = {number: name for name, number in table.items() if number >= 424}
    assert newer == {number: name for name, number in BY_ARCH["x86_64"].items() if number >= 424}
    assert sorted(newer) == list(range(424, 470))


@pytest.mark.parametrize(
    ("arch", "name", "number"),
    [
        ("x86_64", "read", 0),
        ("x86_64", "execve", 59),
        ("x86_64", "openat", 257),
        ("x86_64", "rseq", 334),
        ("x86_64", "uprobe", 336),
        ("x86_64", "open_tree_attr", 467),
        ("aarch64", "io_setup", 0),
        ("aarch64", "openat", 56),
        ("aarch64", "newfstatat", 79),
        ("aarch64", "clone", 220),
        ("aarch64", "execve", 221),
        ("aarch64", "mmap", 222),
        ("aarch64", "prlimit64", 261),
        ("aarch64", "kexec_file_load", 294),
    ],
)
def test_known_numbers(arch: str, name: str, number: int) -> None:
    assert BY_ARCH[arch][name] == number


def test_the_wrappers_use_the_same_numbers() -> None:
    for arch, special in (("x86_64", abi._SYS_X86_64), ("aarch64", abi._SYS_AARCH64)):
        for name, number in {**special, **abi._SYS_COMMON}.items():
            assert BY_ARCH[arch][name] == number
    assert abi.SYS.keys() <= ALL_NAMES


def test_aarch64_has_nothing_that_x86_64_lacks() -> None:
    assert BY_ARCH["aarch64"].keys() <= BY_ARCH["x86_64"].keys()
    assert {"open", "fork", "time", "arch_prctl"}.isdisjoint(BY_ARCH["aarch64"])
