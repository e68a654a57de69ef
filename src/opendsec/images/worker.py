# SPDX-License-Identifier: Apache-2.0
"""The process that makes one layer: `python -I -m opendsec.images.worker`, started by `build`.

A process of its own, because a build walks, hashes and waits for minutes, and because everything it starts and mounts must be gone
when it is cancelled, when it crashes and when the edge is killed. So it has two halves:

    outer    the edge's child; SIGTERM makes it kill the inner half, wait until that is gone, and exit
    inner    process 1 of a pid namespace, in a mount namespace: with it go all that it started and all that it mounted

Each half dies with its parent (PR_SET_PDEATHSIG). In comes one `Job` as JSON on standard input; out go `Line`s, one JSON object a
line; the last one has `made` or `error`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

import msgspec

from opendsec.api.errors import ErrorBody, InvalidRequest, OpenDSecError, Unavailable
from opendsec.api.images import BuildEvent, DebianSource, DirectorySource, Finding
from opendsec.images import debian, directory, erofs, tree, upper
from opendsec.images.layers import DATA, describe
from opendsec.images.upper import UpperSource
from opendsec.kernel import abi, mounts, procfs, syscalls

OUT = "out"  # the directory of `Job.work` where the files lie at the end


class Job(msgspec.Struct, frozen=True, kw_only=True):
    source: DirectorySource | DebianSource | UpperSource
    exclude: tuple[str, ...]
    work: str  # an empty directory; the store it belongs to lies above
    store: str
    parent: int  # the edge's pid


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What lies in `OUT`, the chunk table with it."""

    digest: str
    entries: int
    meta_bytes: int
    data_bytes: int
    meta_sha256: str
    data_sha256: str
    chunk_bytes: int
    chunks_sha256: str


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    event: BuildEvent | None = None
    found: Finding | None = None
    made: Made | None = None
    error: ErrorBody | None = None


def main() -> int:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    _die_with(job.parent)
    syscalls.unshare(abi.CLONE_NEWNS | abi.CLONE_NEWPID | abi.CLONE_NEWIPC)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # until there is somebody to kill
    inner = os.fork()
    if inner == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _inner(job)

    pidfd = os.pidfd_open(inner)

    def stop(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # The wait for process 1 of a pid namespace ends only when all others in it are gone.
    _, status = os.waitpid(inner, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _die_with(parent: int) -> None:
    syscalls.prctl(abi.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the call


def _inner(job: Job) -> None:
    status = 1
    try:
        # The parent's pid is not visible from in here: 0 as long as it lives.
        _die_with(0)
        os.nice(5)  # after the edge, not after everything
        os.umask(0o022)
        syscalls.mount(None, "/", None, abi.MS_REC | abi.MS_PRIVATE)
        status = _run(job)
    except BaseException:  # not Exception: nothing may leave this process but by _exit
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run(job: Job) -> int:
    try:
        _say(Line(made=_make(job)))
        return 0
    except OpenDSecError as error:
        _say(Line(error=error.body()))
    except tree.TooDeep as error:
        _say(Line(error=InvalidRequest(f"is nested too deep at {error}", field="source.path").body()))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _say(Line(error=Unavailable(f"no space left to build the layer: {error}").body()))
    return 1


def _make(job: Job) -> Made:
    work = Path(job.work)
    out = work / OUT
    out.mkdir(mode=0o755)
    if isinstance(job.source, UpperSource):
        own_proc()
        _event("step", "reading what was written")
        upper.prepare(job.source, log=lambda text: _event("log", text), found=lambda finding: _say(Line(found=finding)))
        _event("step", "packing")
        erofs.pack(upper.stage(job.source, work), out, all_root=False)
        return _checked(out)
    if isinstance(job.source, DebianSource):
        _event("step", "installing the packages")
        root = work / "root"
        debian.bootstrap(job.source, root, work, log=lambda text: _event("log", text))
        debian.finish(root)
        path, prefix, keep_owner = root, "/", True
    else:
        path, prefix, keep_owner = Path(job.source.path), job.source.prefix, job.source.owner == "keep"
    _event("step", "reading the tree")
    root_fd = _open_source(path, Path(job.store), allow=work)
    try:
        with still_there():
            edits = directory.scan(root_fd, exclude=job.exclude, keep_owner=keep_owner, log=lambda text: _event("log", text))
            staged = directory.stage(root_fd, edits, prefix=prefix, work=work)
    finally:
        os.close(root_fd)
    _event("step", "packing")
    erofs.pack(staged, out, all_root=not keep_owner)
    return _checked(out)


def own_proc() -> None:
    """In place of the parent's, in which the processes of this pid namespace have other numbers."""
    proc = mounts.proc()
    try:
        mounts.attach(proc, abi.AT_FDCWD, procfs.PROC)
    finally:
        os.close(proc)


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


def _checked(out: Path) -> Made:
    """What was packed, read back through the kernel: the digest is of what a sandbox sees, not of what the source was meant to be."""
    data_bytes = (out / DATA).stat().st_size
    progress = _Progress("checking", data_bytes)
    digest = erofs.digest(out, progress.at)
    record = describe(out, digest=digest.digest, kind="base", created_at=0.0)  # the last two are for our caller to say
    return Made(
        digest=digest.digest,
        entries=digest.entries,
        meta_bytes=record.meta_bytes,
        data_bytes=record.data_bytes,
        meta_sha256=record.meta_sha256,
        data_sha256=record.data_sha256,
        chunk_bytes=record.chunk_bytes,
        chunks_sha256=record.chunks_sha256,
    )


class _Progress:
    """Progress events, a few a second at most."""

    def __init__(self, message: str, total: int) -> None:
        self.message, self.total, self.next = message, total, 0.0
        _event("step", message)

    def at(self, done: int) -> None:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + 0.25
            _say(Line(event=BuildEvent(kind="progress", message=self.message, done=min(done, self.total), total=self.total)))


def _event(kind: Literal["step", "log"], message: str) -> None:
    _say(Line(event=BuildEvent(kind=kind, message=message)))


def _say(line: Line) -> None:
    data = msgspec.json.encode(line) + b"\n"
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main())
