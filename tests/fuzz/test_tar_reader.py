# SPDX-License-Identifier: Apache-2.0
"""The tar reader on anything: members or InvalidRequest, never another error, never without an end."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.files import tarball
from opendsec.runtime.files.tarball import Member, TarReader

NAMES = st.binary(min_size=1, max_size=300).filter(lambda name: b"\0" not in name and name.strip(b"/"))
MEMBERS = st.builds(
    Member,
    name=NAMES,
    kind=st.sampled_from(("file", "hard_link", "symlink", "directory", "fifo")),
    size=st.integers(0, 2000),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 1 << 31),
    gid=st.integers(0, 1 << 31),
    mtime=st.integers(-(1 << 33), 1 << 40),
    link=NAMES,
)
MUTATIONS = st.lists(st.tuples(st.integers(0, 8000), st.binary(min_size=1, max_size=12)), max_size=8)


def blocks(item: Member) -> bytes:
    item = item._replace(size=item.size if item.kind == "file" else 0, link=item.link if "link" in item.kind else b"")
    return tarball.header(item) + bytes(item.size) + tarball.padding(item.size)


def read(data: bytes) -> list[Member] | None:
    fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        reader = TarReader(fd)
        members = []
        for number, item in enumerate(reader):
            if number % 2:
                reader.content_to(sink)
            members.append(item)
        return members
    except InvalidRequest as error:
        error.message.encode()
        return None
    finally:
        os.close(fd)
        os.close(sink)


@given(st.binary(max_size=4096))
def test_noise(data: bytes) -> None:
    read(data)


@given(st.lists(MEMBERS, max_size=4), MUTATIONS)
def test_damaged_archives(members: list[Member], mutations: list[tuple[int, bytes]]) -> None:
    data = bytearray(b"".join(map(blocks, members)) + tarball.END_OF_ARCHIVE)
    for at, value in mutations:
        data[at : at + len(value)] = value
    for header in range(0, len(data) - 511, 512):  # so that damage gets past the checksum
        if data[header + 257 : header + 262] == b"ustar":
            total = sum(data[header : header + 148]) + 8 * 32 + sum(data[header + 156 : header + 512])
            data[header + 148 : header + 156] = b"%06o\0 " % total
    read(bytes(data))


@given(st.lists(MEMBERS, max_size=4))
def test_whole_archives(members: list[Member]) -> None:
    found = read(b"".join(map(blocks, members)) + tarball.END_OF_ARCHIVE)
    assert found is not None
    assert [item.mode for item in found] == [item.mode for item in members]
    assert [item.mtime for item in found] == [item.mtime for item in members]
