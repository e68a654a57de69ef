# SPDX-License-Identifier: Apache-2.0
"""Headers of tar, as anybody may have written them: numbers, checksums, names, pax records. Pure; for all who read archives.

Errors complete a sentence that begins with "the archive has": whoever reads says which archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

BLOCK = 512
MAX_EXTENSION_BYTES = 1 << 20  # of one pax or long-name header; GNU tar's own largest are a few kB
ZERO = bytes(BLOCK)
"""What ends an archive."""

EXTENSIONS = (b"x", b"g", b"L", b"K", b"X")
"""Kinds of headers that say more about the next one."""


class BadHeader(Exception):
    """A header that makes no sense."""


def string(field: bytes) -> bytes:
    """Up to its first NUL."""
    return field.split(b"\0", 1)[0]


def number(field: bytes) -> int:
    """Octal text, or a big-endian number after a first byte with its top bit set (GNU). Raises BadHeader."""
    if field[0] & 0x80:
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        if field[0] & 0x40:
            value -= 1 << (8 * len(field) - 1)
        if abs(value) >= 1 << 63:
            raise BadHeader("a number out of range in a header")
        return value
    digits = string(field).strip(b" ")
    if not digits:
        return 0
    if digits.strip(b"01234567"):
        raise BadHeader("a number in a header that is not octal")
    return int(digits, 8)


def is_header(block: bytes) -> bool:
    """Whether its checksum is right; some old writers summed signed bytes."""
    try:
        stored = number(block[148:156])
    except BadHeader:
        return False
    plain = sum(block) - sum(block[148:156]) + 8 * 0x20
    return stored == plain or stored == plain - 256 * sum(byte > 127 for byte in block[:148] + block[156:])


def extension_bytes(block: bytes) -> int:
    """The size of an extension header's content. Raises BadHeader."""
    size = number(block[124:136])
    if not 0 <= size <= MAX_EXTENSION_BYTES:
        raise BadHeader(f"an extension header of {size} bytes; at most {MAX_EXTENSION_BYTES}")
    return size


def name_of(block: bytes) -> bytes:
    name = string(block[0:100])
    if block[257:263] == b"ustar\0" and (prefix := string(block[345:500])):
        return prefix + b"/" + name
    return name


def pax_records(data: bytes) -> Iterable[tuple[bytes, bytes]]:
    """Records of the form "LENGTH KEY=VALUE\\n", where LENGTH counts the whole record; in order, since keys of sparse files repeat.
    Raises BadHeader."""
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        digits = data[at:space] if space > at else b""
        length = int(digits) if digits.isdigit() else 0
        record = data[space + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if length == 0 or at + length > len(data) or not equals or not value.endswith(b"\n"):
            raise BadHeader("a pax header that makes no sense")
        yield key, value[:-1]
        at += length


def decimal(records: Mapping[bytes, bytes], key: bytes, default: int, *, fraction: bool = False) -> int:
    """A number of a pax header; with `fraction` it may have one, which is left out. Raises BadHeader."""
    value = records.get(key)
    if not value:  # an empty value takes back a global one; none is taken from there
        return default
    whole = value.partition(b".")[0] if fraction else value
    if len(whole) > 20 or not whole.removeprefix(b"-").isdigit() or abs(int(whole)) >= 1 << 63:
        raise BadHeader(f"a pax header whose {key.decode('ascii', 'replace')} is not a number")
    return int(whole)
