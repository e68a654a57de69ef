# SPDX-License-Identifier: Apache-2.0
"""Frames and payloads: the numbers are the header's, and whatever comes is taken apart or refused."""

from __future__ import annotations

import re
import stat
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.runtime.guest import wire
from opendsec.runtime.guest.wire import Entry, Fields, WireError
from tests.support import SRC

READERS: tuple[Callable[[Fields], object], ...] = (
    Fields.u32,
    Fields.string,
    Fields.text,
    Fields.entry,
    wire.ended,
    wire.welcome,
    wire.usage,
    wire.renewed,
    wire.failure,
    lambda fields: fields.list(Fields.entry, limit=1000),
    lambda fields: fields.list(wire.command_row, limit=1000),
)


def constants() -> dict[str, int]:
    """Every number of an enum of native/guest_protocol.h."""
    text = re.sub(r"/\*.*?\*/", "", (SRC.parent.parent / "native/guest_protocol.h").read_text(), flags=re.DOTALL)
    found = {}
    for name, value in re.findall(r"(\w+) = ([0-9x<A-Fa-f ]+?)\s*[,}]", text):
        left, shift, right = value.partition("<<")
        found[name] = int(left, 0) << int(right, 0) if shift else int(left, 0)
    return found


def test_numbers_are_the_headers() -> None:
    names = {
        "GUEST_MAGIC": "MAGIC",
        "GUEST_VERSION": "VERSION",
        "FLAG_MORE": "MORE",
        "TYPE_ERROR": "ERROR",
    }
    there = constants()
    assert len(there) > 70
    for name, value in there.items():
        if name.startswith("WATCH_"):
            assert wire._CHANGES[value - 1] == name.removeprefix("WATCH_").lower()
            continue
        ours = names.get(name) or (name if hasattr(wire, name) else name.removeprefix("TYPE_"))
        assert getattr(wire, ours) == value, name


@given(st.integers(0, 0xFFFF), st.integers(1, 2**64 - 1), st.binary(max_size=100), st.integers(0, 0xFFFF))
def test_headers(kind: int, number: int, payload: bytes, flags: int) -> None:
    data = wire.header(kind, number, len(payload), flags)
    assert len(data) == wire.HEADER_BYTES
    assert wire.parse_header(data) == (len(payload), kind, flags, number)


@pytest.mark.parametrize("at", [0, 3, 7, 12, 15])
def test_headers_that_are_none(at: int) -> None:
    data = bytearray(wire.header(wire.DATA, 1, 5))
    data[at] ^= 0xFF
    with pytest.raises(WireError):
        wire.parse_header(bytes(data))


def test_long_requests_are_cut() -> None:
    payload = bytes(wire.MAX_PAYLOAD) + b"x" * 10
    data = wire.frames(wire.EXEC, 9, payload)
    first = wire.parse_header(data)
    second = wire.parse_header(data, wire.HEADER_BYTES + first.length)
    assert (first.length, first.flags, second.length, second.flags) == (wire.MAX_PAYLOAD, wire.MORE, 10, 0)
    with pytest.raises(ValueError, match="at most"):
        wire.frames(wire.EXEC, 9, bytes(wire.MAX_REQUEST + 1))


@pytest.mark.parametrize("read", READERS)
@given(data=st.binary(max_size=300))
def test_whatever_comes_is_read_or_refused(read: Callable[[Fields], object], data: bytes) -> None:
    try:
        wire.only(data, read)
    except WireError:
        pass


@given(st.binary(max_size=100))
def test_whatever_is_watched_is_read_or_refused(data: bytes) -> None:
    try:
        wire.watched(data)
    except WireError:
        pass


name = st.binary(max_size=40).map(lambda data: data.replace(b"\0", b"_"))
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(st.builds(Entry, u32, u32, u32, u32, u64, st.integers(-(2**63), 2**63 - 1), u64, u64, name, name))
def test_entries(entry: Entry) -> None:
    assert wire.only(entry.packed(), Fields.entry) == entry
    info = entry.info()
    assert info.raw_name == entry.name and info.mode == stat.S_IMODE(entry.mode)


def test_text_is_for_people() -> None:
    said = wire.only(wire.string(b"a\x1b[31m\xff\n" + b"x" * 5000), Fields.text)
    assert (
        said.startswith("a\N{REPLACEMENT CHARACTER}[31m") and "\x1b" not in said and "\n" not in said and len(said) <= wire.MAX_TEXT_BYTES
    )


@pytest.mark.parametrize("data", [b"a\0b", "a\0b"])
def test_no_zero_byte_is_sent(data: bytes | str) -> None:
    with pytest.raises(ValueError, match="zero"):
        wire.string(data)
