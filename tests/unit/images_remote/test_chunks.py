# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.images import chunks
from opendsec.images.chunks import Builder, ChunkTable
from opendsec.images.records import Damaged


def table_of(data: bytes, chunk_bytes: int = 4096) -> ChunkTable:
    builder = Builder(chunk_bytes)
    builder.add(data)
    return builder.finish()[0]


def sealed(body: bytes) -> bytes:
    return body + hashlib.sha256(body).digest()


def header(
    version: int = 1, chunk_bytes: int = 4096, data_bytes: int = 0, count: int = 0, reserved: int = 0, magic: bytes = b"DSECCHNK"
) -> bytes:
    return struct.pack("<8sIIQII", magic, version, chunk_bytes, data_bytes, count, reserved)


@given(st.binary(max_size=20_000), st.lists(st.integers(1, 9000), max_size=5))
def test_a_table_does_not_depend_on_how_the_bytes_came(data: bytes, cuts: list[int]) -> None:
    builder, left = Builder(4096), data
    for cut in cuts:
        builder.add(left[:cut])
        left = left[cut:]
    builder.add(left)
    table, whole = builder.finish()
    assert whole == hashlib.sha256(data).hexdigest()
    assert table == table_of(data)
    assert [table.digest(i) for i in range(table.count)] == [hashlib.sha256(data[i : i + 4096]).digest() for i in range(0, len(data), 4096)]
    assert chunks.decode(table.encode()) == table


def test_numbers_of_chunks() -> None:
    data = bytes(10_000)
    table = table_of(data)
    assert (table.count, table.data_bytes) == (3, 10_000)
    assert [table.span(index) for index in range(3)] == [(0, 4096), (4096, 4096), (8192, 1808)]
    assert table.span(1, 2) == (4096, 5904)
    assert [list(table.covering(*range_)) for range_ in [(0, 1), (4095, 2), (8192, 9999), (10_000, 5), (5, 0)]] == [
        [0],
        [0, 1],
        [2],
        [],
        [],
    ]
    for first, count in [(3, 1), (-1, 1), (0, 0), (2, 2)]:
        with pytest.raises(IndexError):
            table.span(first, count)
    with pytest.raises(IndexError):
        table.digest(-1)


def test_wrong_bytes_are_found() -> None:
    data = bytes(range(256)) * 40
    table = table_of(data)
    assert table.first_mismatch(0, data) is None
    assert table.first_mismatch(1, data[4096:8192]) is None
    changed = bytearray(data)
    changed[5000] ^= 1
    assert table.first_mismatch(0, changed) == 1
    assert table.first_mismatch(1, changed[4096:]) == 1
    assert not table.matches(2, data[8192:-1])
    assert not table.matches(2, data[8192:] + b"\0")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "which no chunk table has"),
        (b"x" * 40, "which no chunk table has"),
        (b"x" * (chunks.MAX_BYTES + 1), "which no chunk table has"),
        (sealed(header(magic=b"DSECCHNX")), "is not a chunk table"),
        (sealed(header(version=2)), "format version 2"),
        (sealed(header(version=0)), "has 0 chunks"),
        (sealed(header(chunk_bytes=0)), "chunks of 0 bytes"),
        (sealed(header(chunk_bytes=4097)), "chunks of 4097 bytes"),
        (sealed(header(chunk_bytes=8 << 20)), "chunks of 8388608 bytes"),
        (sealed(header(data_bytes=1)), "has 0 chunks for 1 bytes"),
        (sealed(header(count=1) + bytes(32)), "has 1 chunks for 0 bytes"),
        (sealed(header(reserved=1)), "has 0 chunks"),
        (sealed(header(data_bytes=1 << 60, count=0xFFFFFFFF)), "chunks for"),
        (sealed(header(data_bytes=4096, count=1)), "bytes for 1 chunks"),
        (sealed(header(data_bytes=4096, count=1) + bytes(64)), "bytes for 1 chunks"),
        (header(data_bytes=4096, count=1) + bytes(64), "checksum"),
    ],
)
def test_readers_refuse_and_say_why(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        chunks.decode(data)


@given(st.binary(max_size=80), st.integers(0, 200))
def test_reading_is_total(junk: bytes, position: int) -> None:
    good = table_of(bytes(9000)).encode()
    try:
        chunks.decode(good[:position] + junk + good[position + len(junk) :])
    except Damaged:
        pass


def test_files(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(200_000))
    table, whole = chunks.compute(tmp_path / "data")
    assert (table.chunk_bytes, table.count, whole) == (65536, 4, hashlib.sha256(bytes(200_000)).hexdigest())
    assert chunks.write(tmp_path / "table", table) == hashlib.sha256((tmp_path / "table").read_bytes()).hexdigest()
    assert chunks.read(tmp_path / "table") == table
    with pytest.raises(FileExistsError):
        chunks.write(tmp_path / "table", table)
    (tmp_path / "table").write_bytes(b"x")
    with pytest.raises(Damaged, match="table has 1 bytes"):
        chunks.read(tmp_path / "table")
    empty, _ = chunks.compute(Path("/dev/null"))
    assert (empty.count, chunks.decode(empty.encode())) == (0, empty)
