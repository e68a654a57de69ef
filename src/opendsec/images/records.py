# SPDX-License-Identifier: Apache-2.0
"""The one form of every small file the image store keeps: a versioned, checksummed envelope in JSON.

    {"magic": "opendsec-layer", "version": 1, "checksum": "sha256:…", "body": {…}}

`checksum` is over the bytes of `body` as they stand. Readers refuse, in this order: a file over the size limit, text that is not
an envelope, another magic, a newer version, a wrong checksum, a body of the wrong shape.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import TypeVar

import msgspec

MAX_BYTES = 1 << 20

T = TypeVar("T", bound=msgspec.Struct)


class Damaged(ValueError):
    """A record that cannot be trusted or understood; the message says why."""


class TooLarge(ValueError):
    """A record that no reader would take."""


class _Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    magic: str
    version: int
    checksum: str
    body: msgspec.Raw


def _checksum(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


def encode(magic: str, version: int, body: msgspec.Struct) -> bytes:
    """Raises TooLarge."""
    raw = msgspec.json.encode(body)
    envelope = _Envelope(magic=magic, version=version, checksum=_checksum(raw), body=msgspec.Raw(raw))
    data = msgspec.json.encode(envelope) + b"\n"
    if len(data) > MAX_BYTES:
        raise TooLarge(f"is larger than {MAX_BYTES} bytes")
    return data


def decode(data: bytes, magic: str, version: int, kind: type[T]) -> T:
    """The body of an envelope. Raises Damaged."""
    if len(data) > MAX_BYTES:
        raise Damaged(f"is larger than {MAX_BYTES} bytes")
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"is not a record: {error}") from None
    if envelope.magic != magic:
        raise Damaged(f"is a record of {envelope.magic[:40]!r}, not of {magic!r}")
    if envelope.version > version:
        raise Damaged(f"has format version {envelope.version}, but this program reads up to {version}")
    raw = bytes(envelope.body)
    if envelope.checksum != _checksum(raw):
        raise Damaged("does not match its checksum")
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"has a body of the wrong shape: {error}") from None


def read(path: Path, magic: str, version: int, kind: type[T]) -> T:
    """The body of the record at `path`. Raises FileNotFoundError, Damaged."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    try:
        return decode(data, magic, version, kind)
    except Damaged as error:
        raise Damaged(f"{path.name} {error}") from None


def write(path: Path, magic: str, version: int, body: msgspec.Struct, *, temporary: Path) -> None:
    """Make `path` this record. `temporary`: a directory of the same file system, cleared at start-up. Raises TooLarge."""
    write_bytes(path, encode(magic, version, body), temporary=temporary)


def write_bytes(path: Path, data: bytes, *, temporary: Path) -> None:
    """Make `path` a file of these bytes, durably and at once: a reader sees the old one or the new one."""
    staged = temporary / f"record-{secrets.token_hex(8)}"
    try:
        with open(staged, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(staged, path)
    except BaseException:
        staged.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
