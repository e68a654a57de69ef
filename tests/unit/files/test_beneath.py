# SPDX-License-Identifier: Apache-2.0
"""Paths, names and errors, without a kernel."""

from __future__ import annotations

import errno
import os

import pytest

from opendsec.api import errors
from opendsec.runtime.files.beneath import check_path, from_os_error, kind_of, split, text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (b"/a", (b"/", b"a")),
        (b"/a/b", (b"/a", b"b")),
        (b"/a/b/", (b"/a", b"b")),
        (b"//a//b//", (b"/a", b"b")),
        (b"/a/./b/.", (b"/a", b"b")),
        (b"/a/../b", (b"/a/..", b"b")),  # not a: a may be a symlink
        (b"/\xff\n", (b"/", b"\xff\n")),
    ],
)
def test_split(path: bytes, expected: tuple[bytes, bytes]) -> None:
    assert split(path) == expected


@pytest.mark.parametrize("path", [b"/", b"//", b"/.", b"/..", b"/a/.."])
def test_split_refuses_what_names_no_entry(path: bytes) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        split(path, "to")
    assert caught.value.field == "to"


@pytest.mark.parametrize("path", [b"", b"a", b"a/b", b"./a", b"/a\0b", b"/" + b"a" * 256, b"/a" * 2048])
def test_paths_that_cannot_be(path: bytes) -> None:
    with pytest.raises(errors.InvalidRequest):
        check_path(path)


@pytest.mark.parametrize("path", [b"/", b"/" + b"a" * 255, b"/\xff\xfe", b"/a\nb", (b"/a" * 2048)[:4095]])
def test_paths_that_can(path: bytes) -> None:
    assert check_path(path) == path


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOENT, errors.NotFound),
        (errno.EEXIST, errors.Conflict),
        (errno.ENOTDIR, errors.Conflict),
        (errno.EISDIR, errors.Conflict),
        (errno.ENOTEMPTY, errors.Conflict),
        (errno.ELOOP, errors.Conflict),
        (errno.EXDEV, errors.Conflict),
        (errno.EBUSY, errors.Conflict),
        (errno.EAGAIN, errors.Conflict),
        (errno.EPIPE, errors.Conflict),
        (errno.ENOSPC, errors.QuotaExceeded),
        (errno.EDQUOT, errors.QuotaExceeded),
        (errno.EFBIG, errors.QuotaExceeded),
        (errno.EACCES, errors.Denied),
        (errno.EPERM, errors.Denied),
        (errno.EROFS, errors.Denied),
        (errno.EINVAL, errors.InvalidRequest),
        (errno.ENAMETOOLONG, errors.InvalidRequest),
        (errno.ESTALE, errors.SandboxLost),
        (errno.ENOTCONN, errors.SandboxLost),
        (errno.EMFILE, errors.Unavailable),
        (errno.EIO, errors.Internal),
        (errno.EOVERFLOW, errors.Internal),
    ],
)
def test_errors(code: int, kind: type[errors.OpenDSecError]) -> None:
    error = from_os_error(OSError(code, "text"), b"/a\xff\n" + b"b" * 4000)
    assert type(error) is kind
    error.message.encode()
    assert len(error.message) < 400


@pytest.mark.parametrize(
    ("total", "available", "resource"),
    [(100, 0, "inodes"), (100, 1, "disk"), pytest.param(0, 0, "disk", id="btrfs, which counts none")],
)
def test_what_a_full_sandbox_ran_out_of(monkeypatch: pytest.MonkeyPatch, total: int, available: int, resource: str) -> None:
    stats = os.statvfs_result((4096, 4096, 100, 0, 0, total, available, available, 0, 255))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: stats)
    error = from_os_error(OSError(errno.EDQUOT, "text"), b"/a", where=0)
    assert (error.field, error.data["resource"]) == (resource, resource)
    assert ("inodes" in error.message) == (resource == "inodes")


def test_text_is_unicode() -> None:
    assert text(b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"
    assert len(text(b"x" * 1000)) < 210


def test_unknown_kind() -> None:
    assert kind_of(0o644) == "file"
