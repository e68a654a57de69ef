# SPDX-License-Identifier: Apache-2.0
"""gzip, zstd or nothing at all, from descriptor to descriptor. Runs confined: see `confine`.

How a layer is packed is seen from its first bytes, as Docker does it; media types are wrong often enough.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from typing import IO, cast

import zstandard

from opendsec.images.oci.tarstream import BadLayer

CHUNK = 1 << 20
_IN = 1 << 16
_GZIP, _ZSTD, _SKIPPABLE = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x2a\x4d\x18"
_OTHERS = {b"BZ": "bzip2", b"\xfd7": "xz", b"PK": "zip"}
MAX_WINDOW = 128 << 20  # of a zstd frame; `zstd --ultra -22 --long=27`


def decompressed(fd: int) -> Iterator[bytes]:
    """The content of a file in pieces of at most `CHUNK` bytes. Raises BadLayer."""
    head = _full(fd, 4)
    if head[:2] == _GZIP:
        yield from _gunzip(fd, head)
    elif head == _ZSTD or (head[1:4] == _SKIPPABLE and head[0] & 0xF0 == 0x50):
        yield from _unzstd(fd, head)
    elif head[:2] in _OTHERS:
        raise BadLayer(f"is packed with {_OTHERS[head[:2]]}; known are gzip and zstd")
    else:
        if head:
            yield head
        while data := os.read(fd, CHUNK):
            yield data


def _full(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := os.read(fd, count - len(data))):
        data += more
    return data


def _gunzip(fd: int, data: bytes) -> Iterator[bytes]:
    """All members of a gzip file. What follows the last may be zeros, as tape drives leave them."""
    while data:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            try:
                out = member.decompress(data, CHUNK)
            except zlib.error as error:
                raise BadLayer(f"is damaged: {error}") from None
            if out:
                yield out
            data = member.unconsumed_tail
            if not data and not member.eof:
                data = os.read(fd, _IN)
                if not data:
                    # What is inside may still come out of the decompressor before it is known to be cut off.
                    while out := member.decompress(b"", CHUNK):
                        yield out
                    if not member.eof:
                        raise BadLayer("is cut off")
        data = member.unused_data or os.read(fd, _IN)
        while data and not data.strip(b"\0"):
            data = os.read(fd, _IN)


class _File:
    def __init__(self, fd: int, head: bytes) -> None:
        self._fd, self._head = fd, head

    def read(self, size: int = -1) -> bytes:
        if self._head:
            head, self._head = self._head, b""
            return head
        return os.read(self._fd, _IN if size < 0 else size)


def _unzstd(fd: int, head: bytes) -> Iterator[bytes]:
    source = cast(IO[bytes], _File(fd, head))  # it needs read() alone
    reader = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(source, read_size=_IN, read_across_frames=True)
    try:
        while data := reader.read(CHUNK):
            yield data
    except zstandard.ZstdError as error:
        raise BadLayer(f"is damaged: {error}") from None


def warm_up() -> None:
    """Load what the functions above load when they are first called."""
    zlib.decompressobj(wbits=31).decompress(zlib.compress(b"x", wbits=31))
    zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompress(zstandard.ZstdCompressor().compress(b"x"))
