# SPDX-License-Identifier: Apache-2.0
"""Scratch on disk: a subvolume a sandbox in a btrfs pool (`pool`), `boxes/<sandbox id>` with `upper` and `work`.

Taking one costs 0.15 ms and removing one 0.1 ms (a 2-core machine, Linux 6.18), whatever is in it, so none are kept in stock. What holds:

bytes     A quota group's limit, exact and immediate: a write beyond it fails with EDQUOT. It counts the file system's own structures
          too (an empty file costs about 360 bytes). `BASE_BYTES` come on top for what is there from the start, so that a single
          file can have all of `disk_bytes`. Deleting works at the limit.
          What is freed is seen only when the file system commits. So a reading at the limit starts a commit, and while that runs
          (milliseconds, unless disks are slow) `full` may still tell of space that has just been freed. It never misses.
inodes    btrfs cannot limit them, so they are watched: a sandbox found at its limit is *clamped*, its quota set to what it uses,
          and every further creation (and growth) fails with EDQUOT until it holds fewer. Deleting works. A sandbox can overshoot by
          what it creates between two looks; one comes with every `full`, others by time, the sooner the nearer it is to the limit
          (`_WATCH_S`). What it can create at all is bounded by `disk_bytes` / 360. `usage` gives an upper bound: numbers that were
          used and are free again are told apart only by counting, which is done when it matters.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from opendsec.api.errors import Conflict, SandboxLost, Unavailable
from opendsec.api.spec import Limits
from opendsec.kernel import btrfs
from opendsec.runtime.scratch.driver import BASE_INODES, OpenRoot, ScratchPlan, Snapshot
from opendsec.runtime.scratch.pool import Pool

BASE_BYTES = 128 << 10
BOXES = "boxes"
SNAPSHOTS = "snapshots"

_WATCH_S = (0.25, 5.0)  # between two looks at one sandbox
_CREATIONS_A_SECOND = 50_000  # what a sandbox could do at most in between
_COUNT_AT_ONCE = 5_000  # so many inode numbers are counted on the spot: some 5 ms
_COMMIT_EVERY_S = 0.1
_WRITE_OUTS, _QUICK_S = 4, 0.02  # before a snapshot

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

T = TypeVar("T")


class _Box:
    """What is known of a followed sandbox's inodes: `counted` of them when the highest number was `counted_at`."""

    def __init__(self, subvolume: int, limits: Limits) -> None:
        self.subvolume, self.limits = subvolume, limits
        self.highest = self.counted_at = btrfs.FIRST_FREE_OBJECTID
        self.counted = 1
        self.clamped = False
        self.look_at = 0.0  # monotonic time of the next look
        self.lock = threading.Lock()

    def at_most(self) -> int:
        """No more inodes than this, without what overlay has."""
        return max(self.counted + max(self.highest - self.counted_at, 0) - BASE_INODES, 0)


class BtrfsScratch:
    name = "btrfs"
    in_memory = False

    def __init__(self, state_dir: Path, *, size_bytes: int | None = None) -> None:
        self._pool = Pool(state_dir)
        self._wanted_bytes = size_bytes
        self._boxes = self._snapshots = -1
        self._filesystem = ""
        self._taken: dict[str, int] = {}  # subvolume ids, until followed
        self._followed: dict[str, _Box] = {}
        self._unreaped: deque[int] = deque()
        self._committed_at = 0.0
        self._watching: asyncio.Task[None] | None = None
        # Apart, so that emptying a big one delays no creation, and counting neither.
        self._taking, self._removing, self._looking = (ThreadPoolExecutor(1, f"scratch-{what}") for what in ("take", "remove", "look"))

    @property
    def size_bytes(self) -> int:
        return self._pool.size_bytes()

    async def start(self) -> None:
        await self._in(self._taking, self._open)
        self._watching = asyncio.create_task(self._watch(), name="scratch-watch")

    def _open(self) -> None:
        self._pool.open(self._wanted_bytes)
        for name in (BOXES, SNAPSHOTS):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._pool.fd)
        self._boxes = os.open(BOXES, _FOLDER, dir_fd=self._pool.fd)
        self._snapshots = os.open(SNAPSHOTS, _FOLDER, dir_fd=self._pool.fd)
        self._filesystem = btrfs.filesystem_id(self._pool.fd)
        for left in os.listdir(self._snapshots):  # by an edge that died
            self._drop(left)

    @staticmethod
    async def _in(executor: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    # --- taking and removing ---------------------------------------------------------------------------------------

    def plan(self, sandbox_id: str, limits: Limits) -> ScratchPlan:
        place = self._pool.place / BOXES / sandbox_id
        return ScratchPlan(kind="dir", ref=sandbox_id, upper=place / "upper", work=place / "work")

    async def take(self, sandbox_id: str, uid_base: int, limits: Limits) -> ScratchPlan:
        await self._in(self._taking, lambda: self._take(sandbox_id, uid_base, limits))
        return self.plan(sandbox_id, limits)

    def _take(self, sandbox_id: str, uid_base: int, limits: Limits) -> None:
        try:
            btrfs.subvolume_create(self._boxes, sandbox_id, max_bytes=limits.disk_bytes + BASE_BYTES)
        except FileExistsError:
            raise Conflict(f"{sandbox_id} has scratch already") from None
        except OSError as error:
            raise _unavailable(error) from error
        try:
            fd = os.open(sandbox_id, _FOLDER, dir_fd=self._boxes)
            try:
                for name in ("upper", "work"):
                    os.mkdir(name, 0o755, dir_fd=fd)
                    os.chown(name, uid_base, uid_base, dir_fd=fd)
                self._taken[sandbox_id] = btrfs.subvolume_id(fd)
            finally:
                os.close(fd)
        except BaseException as error:
            self._remove(sandbox_id)
            if isinstance(error, OSError):
                raise _unavailable(error) from error
            raise

    async def remove(self, sandbox_id: str) -> None:
        self._followed.pop(sandbox_id, None)
        self._taken.pop(sandbox_id, None)
        await self._in(self._removing, lambda: self._remove(sandbox_id))

    def _remove(self, sandbox_id: str) -> None:
        try:
            fd = os.open(sandbox_id, _FOLDER, dir_fd=self._boxes)
        except FileNotFoundError:
            return
        try:
            if not btrfs.is_subvolume(fd):
                shutil.rmtree(sandbox_id, dir_fd=self._boxes)
                return
            subvolume = btrfs.subvolume_id(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            btrfs.subvolume_destroy(self._boxes, sandbox_id)
        self._reap(subvolume)

    def _reap(self, subvolume: int) -> None:
        """Drop quota groups of removed sandboxes, which Linux does by itself only since 6.12; not at once, as the kernel first cleans."""
        self._unreaped.append(subvolume)
        for _ in range(min(4, len(self._unreaped))):
            oldest = self._unreaped.popleft()
            if not btrfs.qgroup_destroy(self._pool.fd, oldest):
                self._unreaped.appendleft(oldest)
                return

    def list(self) -> Sequence[str]:
        fd = os.open(
            ".", _FOLDER, dir_fd=self._boxes
        )  # anew: a directory of btrfs shows an old descriptor what was there when it was opened
        try:
            return sorted(os.listdir(fd))
        finally:
            os.close(fd)

    # --- snapshots -------------------------------------------------------------------------------------------------

    def prepare_snapshot(self, sandbox_id: str) -> None:
        """Snapshots that are thrown away: each writes out what this sandbox has in memory only, which the next need not. The real one
        follows when that has become quick, or if a sandbox writes as fast as the disk takes it, anyhow."""
        for _ in range(_WRITE_OUTS):
            begun = time.monotonic()
            self._drop(self._snapshot(sandbox_id))
            if time.monotonic() - begun < _QUICK_S:
                return

    def snapshot(self, sandbox_id: str, uid_base: int, limits: Limits) -> Snapshot:
        name = self._snapshot(sandbox_id)
        try:
            fd = os.open(name, _FOLDER, dir_fd=self._snapshots)
            try:
                os.mkdir("aside", 0o700, dir_fd=fd)
            finally:
                os.close(fd)
        except BaseException as error:
            self._drop(name)
            if isinstance(error, OSError):
                raise _unavailable(error) from error
            raise
        place = self._pool.place / SNAPSHOTS / name
        return Snapshot(ref=name, upper=place / "upper", aside=place / "aside", uid_base=uid_base)

    def _snapshot(self, sandbox_id: str) -> str:
        name = f"{sandbox_id}-{secrets.token_hex(8)}"
        try:
            fd = os.open(sandbox_id, _FOLDER, dir_fd=self._boxes)
        except FileNotFoundError:
            raise SandboxLost(f"the scratch of {sandbox_id} is gone") from None
        try:
            btrfs.snapshot(fd, self._snapshots, name)
        except OSError as error:
            raise _unavailable(error) from error
        finally:
            os.close(fd)
        return name

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        self._drop(snapshot.ref)

    def _drop(self, name: str) -> None:
        try:
            fd = os.open(name, _FOLDER, dir_fd=self._snapshots)
        except FileNotFoundError:
            return
        try:
            subvolume = btrfs.subvolume_id(fd)
        finally:
            os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            btrfs.subvolume_destroy(self._snapshots, name)
        self._removing.submit(self._reap, subvolume)  # only there, as all of that list

    # --- usage -----------------------------------------------------------------------------------------------------

    def keep(self, sandbox_id: str, upper: int) -> None:
        os.close(upper)  # it has a name here

    def follow(self, sandbox_id: str, limits: Limits, open_root: OpenRoot) -> None:
        subvolume = self._taken.pop(sandbox_id, None)
        if subvolume is not None:
            box = _Box(subvolume, limits)
        else:  # an earlier edge process took it
            box = self._adopted(sandbox_id, limits)
        self._followed[sandbox_id] = box

    def _adopted(self, sandbox_id: str, limits: Limits) -> _Box:
        try:
            fd = os.open(sandbox_id, _FOLDER, dir_fd=self._boxes)
        except FileNotFoundError:
            raise SandboxLost(f"the scratch of {sandbox_id} is gone") from None
        try:
            box = _Box(btrfs.subvolume_id(fd), limits)
        finally:
            os.close(fd)
        box.clamped = btrfs.qgroup_usage(self._filesystem, box.subvolume).max_bytes != limits.disk_bytes + BASE_BYTES
        return box

    def usage(self, sandbox_id: str) -> tuple[int, int | None]:
        box = self._followed.get(sandbox_id)
        if box is None:
            return 0, None
        try:
            used = sum(btrfs.qgroup_pending(self._filesystem, box.subvolume))
            self._glance(sandbox_id, box, exact=True)
        except OSError:
            return 0, None  # removed meanwhile
        return used, box.at_most()

    def full(self, sandbox_id: str) -> tuple[bool, bool]:
        box = self._followed.get(sandbox_id)
        if box is None:
            return False, False
        try:
            disk_full = sum(btrfs.qgroup_pending(self._filesystem, box.subvolume)) >= box.limits.disk_bytes
            self._glance(sandbox_id, box, exact=False)
        except OSError:
            return False, False  # removed meanwhile
        if disk_full:
            self._commit_soon()
        if box.at_most() >= box.limits.inodes and not box.clamped:
            box.look_at = 0.0  # too many to count here and now
        return disk_full, box.clamped

    def _commit_soon(self) -> None:
        """What was freed counts only from the next commit on, up to 30 s later."""
        now = time.monotonic()
        if now - self._committed_at >= _COMMIT_EVERY_S:
            self._committed_at = now
            self._removing.submit(self._commit)

    def _commit(self) -> None:
        with contextlib.suppress(OSError):
            btrfs.start_sync(self._pool.fd)

    # --- the limit on inodes ---------------------------------------------------------------------------------------

    def _glance(self, sandbox_id: str, box: _Box, *, exact: bool) -> None:
        """A look that takes no longer than the event loop can bear; none if one is going on."""
        if box.lock.acquire(blocking=False):
            try:
                self._look(sandbox_id, box, count_at_most=_COUNT_AT_ONCE, always=exact)
            finally:
                box.lock.release()

    def look(self, sandbox_id: str) -> None:
        """Count as far as needed, and clamp or free the sandbox accordingly. Blocks: about 1 µs for each inode, when near the limit."""
        box = self._followed.get(sandbox_id)
        if box is None:
            return
        begun = time.monotonic()
        try:
            with box.lock:
                self._look(sandbox_id, box, count_at_most=None, always=False)
        except OSError:
            return  # removed meanwhile
        now = time.monotonic()
        wait_s = min(max((box.limits.inodes - box.at_most()) / _CREATIONS_A_SECOND, _WATCH_S[0]), _WATCH_S[1])
        box.look_at = now + max(wait_s, 20 * (now - begun))  # never more than a twentieth of a core for one sandbox

    def _look(self, sandbox_id: str, box: _Box, *, count_at_most: int | None, always: bool) -> None:
        fd = os.open(sandbox_id, _FOLDER, dir_fd=self._boxes)
        try:
            box.highest = btrfs.highest_inode(fd, box.highest)
            if box.at_most() < box.limits.inodes and not box.clamped and not always:
                return
            if count_at_most is not None and box.highest - btrfs.FIRST_FREE_OBJECTID > count_at_most:
                return
            stop_at = box.limits.inodes + BASE_INODES
            box.counted, box.counted_at = btrfs.count_inodes(fd, stop_at), box.highest
        finally:
            os.close(fd)
        if (box.counted >= stop_at) != box.clamped:
            self._clamp(box, box.counted >= stop_at)

    def _clamp(self, box: _Box, clamped: bool) -> None:
        used = sum(btrfs.qgroup_pending(self._filesystem, box.subvolume))
        allowed = box.limits.disk_bytes + BASE_BYTES
        btrfs.qgroup_limit(self._pool.fd, box.subvolume, min(max(used, 1), allowed) if clamped else allowed)
        box.clamped = clamped

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S[0])
            now = time.monotonic()
            for sandbox_id in [sandbox_id for sandbox_id, box in self._followed.items() if box.look_at <= now]:
                await self._in(self._looking, partial(self.look, sandbox_id))

    # --- the end ---------------------------------------------------------------------------------------------------

    async def close(self, *, remove: bool = False) -> None:
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        for executor in (self._looking, self._taking, self._removing):
            await asyncio.to_thread(executor.shutdown)
        self._followed.clear()
        await asyncio.to_thread(self._close, remove)

    def _close(self, remove: bool) -> None:
        used = False
        if self._boxes >= 0:
            used = bool(self.list())
            for fd in (self._boxes, self._snapshots):
                if fd >= 0:
                    os.close(fd)
            self._boxes = self._snapshots = -1
        if used and not remove:
            self._pool.let_go()
        else:
            self._pool.unmount(remove=remove)


def _unavailable(error: OSError) -> Unavailable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable("the scratch pool is full")
    return Unavailable(f"the scratch pool fails: {error}")
