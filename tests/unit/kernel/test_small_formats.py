# SPDX-License-Identifier: Apache-2.0
"""Id maps, inotify events, btrfs names, Landlock rights: formats small enough for one file."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.kernel import abi, btrfs, inotify, landlock, namespaces


@given(ranges=st.lists(st.tuples(st.integers(0, 1 << 31), st.integers(0, 1 << 31), st.integers(1, 65536)), min_size=1, max_size=20))
def test_id_maps(ranges: list[tuple[int, int, int]]) -> None:
    assert namespaces.parse_map(namespaces.format_map(ranges).encode()) == ranges


@pytest.mark.parametrize(
    "ranges", [[], [(0, 0, 0)], [(-1, 0, 1)], [(0, -1, 1)], [(0, 0xFFFF_FFFF, 1)], [(0xFFFF_FFFF, 0, 1)], [(0, 0, 1)] * 341]
)
def test_id_maps_that_the_kernel_would_refuse(ranges: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="id"):
        namespaces.format_map(ranges)


def event(watch: int, mask: int, cookie: int, name: bytes) -> bytes:
    padded = name + bytes(16 - len(name) % 16) if name else b""
    return struct.pack("=iIII", watch, mask, cookie, len(padded)) + padded


names = st.binary(max_size=50).filter(lambda name: b"\0" not in name)


@given(events=st.lists(st.tuples(st.integers(-1, 9), st.integers(0, 0xFFFF_FFFF), st.integers(0, 9), names), max_size=8))
def test_inotify_events(events: list[tuple[int, int, int, bytes]]) -> None:
    parsed = inotify.parse_events(b"".join(event(*fields) for fields in events))
    assert [(e.watch, e.mask, e.cookie, e.name) for e in parsed] == events


@given(data=st.binary(max_size=100))
def test_inotify_events_cut(data: bytes) -> None:
    try:
        inotify.parse_events(data)
    except ValueError:
        pass


def test_inotify_kinds() -> None:
    (parsed,) = inotify.parse_events(event(1, abi.IN_CREATE | abi.IN_ISDIR, 0, b"d"))
    assert (parsed.kinds, parsed.is_directory) == (["create"], True)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\0b", "x" * 256])
def test_btrfs_names(name: str) -> None:
    with pytest.raises(OSError, match="not a subvolume's name"):
        btrfs.subvolume_create(-1, name)


def test_landlock_rights_grow_with_the_abi() -> None:
    assert landlock.fs_rights(0) == 0
    assert landlock.fs_rights(1) == landlock.MAKE_SYM * 2 - 1
    assert landlock.fs_rights(2) & landlock.REFER
    assert not landlock.fs_rights(2) & landlock.TRUNCATE
    assert landlock.fs_rights(4) == landlock.fs_rights(3) == landlock.TRUNCATE * 2 - 1
    assert landlock.fs_rights(99) == landlock.IOCTL_DEV * 2 - 1
