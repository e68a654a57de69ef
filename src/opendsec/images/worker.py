# SPDX-License-Identifier: Apache-2.0
"""The process that makes one layer: `python -I -m opendsec.images.worker`, started by `build`. See `job`."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from opendsec.api.errors import InvalidRequest
from opendsec.api.images import DebianDiskSource, DebianSource, DirectorySource, Finding, LayerKind
from opendsec.images import debian, directory, erofs, job, tree, upper
from opendsec.images.disks import debian as debian_disk
from opendsec.images.layers import DATA, LayerRecord, describe
from opendsec.images.upper import UpperSource

OUT = "out"  # the directory of `Job.work` where the files lie at the end


class Job(job.Job, frozen=True, kw_only=True):
    source: DirectorySource | DebianSource | DebianDiskSource | UpperSource
    exclude: tuple[str, ...]
    kind: LayerKind


class Line(job.Line, frozen=True, kw_only=True, omit_defaults=True):
    found: Finding | None = None
    made: LayerRecord | None = None  # of what lies in `OUT`, the chunk table with it


_telling = job.Telling()


def _work(wanted: Job) -> None:
    try:
        job.say(Line(made=_make(wanted)))
    except tree.TooDeep as error:
        raise InvalidRequest(f"is nested too deep at {error}", field="source.path") from None


def _make(wanted: Job) -> LayerRecord:
    work = Path(wanted.work)
    out = work / OUT
    out.mkdir(mode=0o755)
    if isinstance(wanted.source, UpperSource):
        _telling.step("reading what was written")
        upper.prepare(wanted.source, log=_telling.log, found=lambda finding: job.say(Line(found=finding)))
        _telling.step("packing")
        erofs.pack(upper.stage(wanted.source, work), out, all_root=False)
        return _checked(out, wanted.kind)
    if isinstance(wanted.source, DebianSource):
        _telling.step("installing the packages")
        root = work / "root"
        debian.bootstrap(wanted.source, root, work, log=_telling.log)
        debian.finish(root)
        path, prefix, keep_owner = root, "/", True
    elif isinstance(wanted.source, DebianDiskSource):
        path = debian_disk.make(wanted.source, work, log=_telling.log, step=_telling.step)
        prefix, keep_owner = "/", False
    else:
        path, prefix, keep_owner = Path(wanted.source.path), wanted.source.prefix, wanted.source.owner == "keep"
    _telling.step("reading the tree")
    root_fd = _open_source(path, Path(wanted.store), allow=work)
    try:
        with still_there():
            edits = directory.scan(root_fd, exclude=wanted.exclude, keep_owner=keep_owner, log=_telling.log)
            staged = directory.stage(root_fd, edits, prefix=prefix, work=work)
    finally:
        os.close(root_fd)
    _telling.step("packing")
    erofs.pack(staged, out, all_root=not keep_owner)
    return _checked(out, wanted.kind)


@contextlib.contextmanager
def still_there() -> Iterator[None]:
    """A tree that somebody changes while it is read is no bug of ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
            raise
        where = f": {os.fsdecode(error.filename)!r}" if isinstance(error.filename, str | bytes) else ""
        raise InvalidRequest(f"was changed while it was read{where}", field="source.path") from None


def _open_source(path: Path, store: Path, *, allow: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"cannot be read as a directory: {error.strerror}: {str(path)!r}", field="source.path") from None
    real = path.resolve()
    if real != allow.resolve() / "root" and store.resolve().is_relative_to(real):
        os.close(fd)
        raise InvalidRequest(f"{str(path)!r} contains the image store itself", field="source.path")
    return fd


def _checked(out: Path, kind: LayerKind) -> LayerRecord:
    """What was packed, read back through the kernel: the digest is of what a sandbox sees, not of what the source was meant to be."""
    _telling.step("checking")
    total = (out / DATA).stat().st_size
    digest = erofs.digest(out, lambda done: _telling.bytes("checking", min(done, total), total))
    return describe(out, digest=digest.digest, kind=kind, created_at=time.time())


if __name__ == "__main__":
    sys.exit(job.main(Job, _work))
