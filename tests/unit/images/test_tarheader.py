# SPDX-License-Identifier: Apache-2.0
"""Headers of tar: what both readers of archives go by."""

from __future__ import annotations

import io
import tarfile

import pytest

from opendsec.images.tarheader import BadHeader, decimal, extension_bytes, is_header, name_of, number, pax_records, string


def header(name: str = "a", size: int = 0, format: int = tarfile.USTAR_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        info = tarfile.TarInfo(name)
        info.size = size
        tar.addfile(info, io.BytesIO(bytes(size)))
    return out.getvalue()[:512]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (b"0000644\0", 0o644),
        (b"   644 \0", 0o644),
        (b"\0" * 8, 0),
        (b"12345677", 0o12345677),
        (b"\x80" + bytes(6) + b"\x07", 7),
        (b"\xff" * 8, -1),
        (b"\x80\0\0\0" + (1 << 40).to_bytes(8, "big"), 1 << 40),
    ],
)
def test_numbers(field: bytes, expected: int) -> None:
    assert number(field) == expected


@pytest.mark.parametrize("field", [b"0000689\0", b"-1      ", b"0x10\0\0\0\0", b"\x80\0\0\0" + b"\xff" * 8])
def test_numbers_that_make_no_sense(field: bytes) -> None:
    with pytest.raises(BadHeader):
        number(field)


def test_a_header_is_known_by_its_checksum() -> None:
    block = header("caf\u00e9", 7)
    assert is_header(block)
    signed = sum(byte - 256 * (byte > 127) for byte in block[:148] + block[156:]) + 8 * 0x20
    assert is_header(block[:148] + b"%06o\0 " % signed + block[156:])
    assert not is_header(b"X" + block[1:]) and not is_header(block[:148] + b"nonsense" + block[156:]) and not is_header(b"\xff" * 512)


def test_names() -> None:
    assert name_of(header("d" * 90 + "/" + "f" * 90)) == b"d" * 90 + b"/" + b"f" * 90
    assert string(b"a\0b\0") == b"a" and string(b"ab") == b"ab"


def test_extension_headers_are_bounded() -> None:
    block = header(size=1 << 20)
    assert extension_bytes(block) == 1 << 20
    for field in (b"%011o\0" % ((1 << 20) + 1), b"\xff" * 12):
        with pytest.raises(BadHeader, match="at most 1048576"):
            extension_bytes(block[:124] + field + block[136:])


@pytest.mark.parametrize("rest", [b"x", b"xxxxxxxxxxxx", b"0 k=one\n", b" ", b"\n"])
def test_what_follows_the_last_record_is_no_record_without_end(rest: bytes) -> None:
    records = pax_records(b"8 k=one\n" + rest)
    assert next(iter(records)) == (b"k", b"one")
    with pytest.raises(BadHeader):
        for _ in zip(pax_records(b"8 k=one\n" + rest), range(10), strict=False):
            pass


def test_pax_records_come_in_order_and_any_other_text_is_refused() -> None:
    assert list(pax_records(b"8 k=one\n8 k=two\n5 a=\n" + b"11 b=\0=\n\n\n\n")) == [
        (b"k", b"one"),
        (b"k", b"two"),
        (b"a", b""),
        (b"b", b"\0=\n\n\n"),
    ]
    for data in (b"8 k=one", b"9 k=one\n", b"0 k=one\n", b"k=one\n", b" 8 k=on\n", b"7 k=one\n", b"8 kkone\n", b"-8 k=on\n", b"8 k=one\nx"):
        with pytest.raises(BadHeader, match="pax header that makes no sense"):
            list(pax_records(data))


def test_decimals() -> None:
    records = {b"uid": b"5", b"gid": b"", b"mtime": b"-7.25", b"size": b"9" * 21, b"bad": b"1e3"}
    assert decimal(records, b"uid", 1) == 5 and decimal(records, b"gid", 1) == 1 and decimal(records, b"none", 2) == 2
    assert decimal(records, b"mtime", 1, fraction=True) == -7
    for key in (b"mtime", b"size", b"bad"):
        with pytest.raises(BadHeader, match=f"whose {key.decode()} is not a number"):
            decimal(records, key, 0)
