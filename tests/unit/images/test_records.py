# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.images import records
from opendsec.images.records import Damaged


class Thing(msgspec.Struct):
    name: str
    count: int = 0


def changed(data: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(data), **fields}).encode()


GOOD = records.encode("opendsec-thing", 2, Thing("a", 1))


def test_a_record_comes_back() -> None:
    assert records.decode(GOOD, "opendsec-thing", 2, Thing) == Thing("a", 1)
    assert records.decode(GOOD, "opendsec-thing", 3, Thing) == Thing("a", 1)  # a newer reader


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a record"),
        (b"{}", "is not a record"),
        (b"\xff\xfe", "is not a record"),
        (changed(GOOD, magic="opendsec-other"), "is a record of 'opendsec-other'"),
        (changed(GOOD, version=9), "format version 9"),
        (changed(GOOD, checksum="sha256:0"), "checksum"),
        (GOOD.replace(b'"a"', b'"b"'), "checksum"),
        (GOOD[:-9], "is not a record"),
        (records.encode("opendsec-thing", 2, msgspec.defstruct("Other", [("count", str)])(count="x")), "wrong shape"),
        (b" " * (records.MAX_BYTES + 1), "larger than"),
    ],
)
def test_readers_refuse_and_say_why(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        records.decode(data, "opendsec-thing", 2, Thing)


@given(st.binary(max_size=60), st.integers(0, len(GOOD)))
def test_reading_is_total(junk: bytes, position: int) -> None:
    try:
        records.decode(GOOD[:position] + junk + GOOD[position:], "opendsec-thing", 2, Thing)
    except Damaged:
        pass


def test_writing_replaces_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "refs" / "x.json"
    temporary = tmp_path / "tmp"
    for folder in (target.parent, temporary):
        folder.mkdir()
    records.write(target, "m", 1, Thing("old"), temporary=temporary)
    with open(target, "rb") as reader:
        records.write(target, "m", 1, Thing("new"), temporary=temporary)
        assert records.decode(reader.read(), "m", 1, Thing) == Thing("old")  # who has it open sees it whole
    assert records.read(target, "m", 1, Thing) == Thing("new")
    assert os.listdir(temporary) == []


def test_a_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    records.write(target, "m", 1, Thing("old"), temporary=tmp_path)
    with pytest.raises(OSError, match="irectory"):
        records.write(tmp_path, "m", 1, Thing("new"), temporary=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["x.json"]
