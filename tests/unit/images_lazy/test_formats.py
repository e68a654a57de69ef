# SPDX-License-Identifier: Apache-2.0
"""The chunk map, the trace and the board: round trips, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.images.lazy import trace
from opendsec.images.lazy.board import MAX_FDS, RAW_BYTES, Board
from opendsec.images.lazy.chunkmap import ABSENT, HEADER_BYTES, HERE, HINTED, ChunkMap
from opendsec.images.records import Damaged
from opendsec.kernel.fanotify import parse_events

TABLE, OTHER = bytes(range(32)), bytes(32)
BOOT, NEXT_BOOT = "11111111-2222-3333-4444-555555555555", "66666666-2222-3333-4444-555555555555"

# --- the chunk map -------------------------------------------------------------------------------------------------


_opened: list[ChunkMap] = []


@pytest.fixture(autouse=True)
def close_maps() -> Iterator[None]:
    yield
    for one in _opened:
        one.close(clean=False)
    _opened.clear()


def opened(path: Path, *, count: int = 10, table: bytes = TABLE, boot: str = BOOT) -> ChunkMap:
    _opened.append(ChunkMap(path, count=count, table_sha256=table, boot_id=boot))
    return _opened[-1]


def close(one: ChunkMap, *, clean: bool = True) -> None:
    _opened.remove(one)
    one.close(clean=clean)


def test_a_map_closed_in_good_order_is_trusted_in_the_same_boot(tmp_path: Path) -> None:
    first = opened(tmp_path / "map")
    first.set(3, HERE)
    close(first)
    again = opened(tmp_path / "map")
    assert again.trusted and list(again.states) == [HERE if index == 3 else ABSENT for index in range(10)]
    close(again, clean=False)
    third = opened(tmp_path / "map")
    assert not third.trusted and third.states[3] == HINTED
    close(third)
    assert not opened(tmp_path / "map").trusted  # a hint stays a hint


def test_after_a_reboot_everything_is_a_hint(tmp_path: Path) -> None:
    first = opened(tmp_path / "map")
    first.set(3, HERE)
    close(first)
    assert list(opened(tmp_path / "map", boot=NEXT_BOOT).states) == [HINTED if index == 3 else ABSENT for index in range(10)]


@pytest.mark.parametrize("what", ["table", "count", "magic", "version", "header", "state", "short", "long", "noise"])
def test_a_map_that_is_not_ours_says_nothing(tmp_path: Path, what: str) -> None:
    path = tmp_path / "map"
    first = opened(path)
    for index in range(5):
        first.set(index, HERE)
    close(first)
    data = bytearray(path.read_bytes())
    if what == "magic":
        data[0] ^= 1
    elif what == "version":
        data[8] = 2
    elif what == "header":
        data[72] ^= 1
    elif what == "state":
        data[HEADER_BYTES] = 7
    elif what == "short":
        del data[-1:]
    elif what == "long":
        data += b"\1"
    elif what == "noise":
        data = bytearray(b"\xa5" * len(data))
    path.write_bytes(data)
    again = opened(path, table=OTHER if what == "table" else TABLE, count=9 if what == "count" else 10)
    assert again.damaged and not again.trusted and set(again.states) == {HINTED}


def test_a_clean_map_with_a_flipped_state_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "map"
    close(opened(path))
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 4] = 1
    path.write_bytes(data)
    again = opened(path)
    assert not again.trusted and again.states[4] == HINTED


# --- traces --------------------------------------------------------------------------------------------------------


def test_a_trace_comes_back_by_place() -> None:
    data = trace.encode([(5, 2), (1, 0), (3, 7)], TABLE)
    assert trace.decode(data, count=6, table_sha256=TABLE) == [(1, 0), (5, 2), (3, 7)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "bytes"),
        (trace.encode([(1, 0)], TABLE)[:-1], "bytes for"),
        (b"X" + trace.encode([(1, 0)], TABLE)[1:], "not a trace"),
        (trace.encode([(1, 0)], TABLE)[:8] + b"\2" + trace.encode([(1, 0)], TABLE)[9:], "version 2"),
        (trace.encode([(1, 0)], OTHER), "another packing"),
        (trace.encode([(6, 0)], TABLE), "not there"),
        (trace.encode([(1, 0), (1, 1)], TABLE), "twice"),
        (trace.encode([(1, 0)], TABLE)[:-1] + b"\0", "checksum"),
    ],
)
def test_a_trace_that_is_not_right_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        trace.decode(data, count=6, table_sha256=TABLE)


@given(st.binary(max_size=400))
def test_no_bytes_make_the_reader_of_traces_fail_otherwise(data: bytes) -> None:
    with pytest.raises(Damaged):
        trace.decode(data, count=6, table_sha256=TABLE)


# --- the board -----------------------------------------------------------------------------------------------------


def event(fd: int, offset: int = 0, count: int = 4096) -> bytes:
    return struct.pack("=IBBHQii", 48, 3, 0, 24, 0x100000, fd, 77) + struct.pack("=BBHIQQ", 6, 0, 24, 0, offset, count)


def test_whoever_was_read_is_found_by_a_successor_at_every_step() -> None:
    board = Board()
    raw = board.before_read()
    data = event(7, 65536) + event(9)
    raw[: len(data)] = data
    # Killed right after the kernel had written.
    assert [(one.fd, one.offset, one.count) for one in board.recover()] == [(7, 65536, 4096), (9, 0, 4096)]
    board.forget(7)
    assert [one.fd for one in board.recover()] == [9]
    raw = board.before_read()
    assert not any(raw)
    assert [one.fd for one in board.recover()] == [9]  # nothing had come
    raw[: len(event(11))] = event(11)
    assert [one.fd for one in board.after_read(len(event(11)))] == [11]
    assert [one.fd for one in board.recover()] == [9, 11]


def test_kept_files_and_requests_are_apart_from_readers() -> None:
    board = Board()
    board.keep(5)
    board.put_asked(3, unique=1 << 60, node=1 << 50, offset=4096, size=65536)
    assert board.kept() == [5] and board.recover() == []
    assert board.asked() == [(3, 1 << 60, 1 << 50, 4096, 65536)]
    board.forget_asked(3)
    assert board.asked() == []
    with pytest.raises(ValueError, match="beyond"):
        board.keep(MAX_FDS)


@given(st.binary(max_size=RAW_BYTES))
def test_the_parser_of_events_ends(data: bytes) -> None:
    try:
        assert len(list(parse_events(data))) <= len(data) // 24
    except ValueError:
        pass
