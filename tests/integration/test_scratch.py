# SPDX-License-Identifier: Apache-2.0
"""Scratch on the real kernel: limits that hold, space that comes back, pools that are taken over, nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, SandboxLost, Unavailable, Unsupported
from opendsec.api.spec import Limits
from opendsec.kernel import btrfs, loop, mounts
from opendsec.runtime.scratch import ScratchDriver, ScratchPlan, ScratchSettings, choose
from opendsec.runtime.scratch import pool as pool_module
from opendsec.runtime.scratch.btrfs import BtrfsScratch
from opendsec.runtime.scratch.driver import BASE_INODES
from opendsec.runtime.scratch.tmpfs import TmpfsScratch
from tests.support import requires

MIB = 1 << 20
POOL_BYTES = 512 * MIB


def limits(disk_bytes: int = 16 * MIB, inodes: int = 1000) -> Limits:
    return Limits(cpu=1, cpu_weight=100, memory_bytes=MIB, disk_bytes=disk_bytes, inodes=inodes, pids=10, open_files=10)


def is_mounted(state: Path) -> bool:
    return os.path.ismount(state / "scratch")


def devices(state: Path) -> list[str]:
    return [device for device, backing in loop.attached().items() if backing.startswith(os.fsencode(state.resolve()))]


def no_device(state: Path) -> bool:
    """Whether the pool's device is free. A process that was born meanwhile elsewhere, into a mount namespace of its own, has a copy of
    every mount until it leaves its old root: only if the device looks busy is such a one waited for."""
    deadline = time.monotonic() + 5
    while devices(state) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not devices(state)


def fill(path: Path) -> int:
    """Write to a file until that fails; the bytes written."""
    written = 0
    with open(path, "wb", buffering=0) as file:
        try:
            while True:
                written += file.write(bytes(64 << 10))
        except OSError as error:
            assert error.errno in (errno.ENOSPC, errno.EDQUOT)
    return written


def create(folder: Path, count: int, prefix: str = "f") -> int:
    """Create empty files until that fails; how many."""
    for number in range(count):
        try:
            os.close(os.open(folder / f"{prefix}{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except OSError as error:
            assert error.errno in (errno.ENOSPC, errno.EDQUOT)
            return number
    return count


class Box:
    """The writable root of one sandbox, as the spawner makes it from a plan: an overlay, here without layers of use."""

    def __init__(self, plan: ScratchPlan, lower: Path, stack: ExitStack) -> None:
        kind, *rest = plan.wire()
        with ExitStack() as held:
            if kind == "tmpfs":
                size_bytes, inodes = rest
                assert isinstance(size_bytes, int)
                assert isinstance(inodes, int)
                base = mounts.tmpfs(size_bytes, inodes, 0o700)
                held.callback(os.close, base)
                for name in ("upper", "work"):
                    os.mkdir(name, dir_fd=base)
                folders = [os.open(name, os.O_PATH | os.O_DIRECTORY, dir_fd=base) for name in ("upper", "work")]
            else:
                folders = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in rest if isinstance(path, bytes)]
            lower_fd = os.open(lower, os.O_PATH | os.O_DIRECTORY)
            for fd in (*folders, lower_fd):
                held.callback(os.close, fd)
            self.fd = mounts.overlay([lower_fd], *folders)
        stack.callback(self.close)
        self.root = Path(f"/proc/self/fd/{self.fd}")

    def open_root(self) -> int:
        if self.fd < 0:
            raise SandboxLost("gone")
        return os.dup(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class Rig:
    def __init__(self, driver: ScratchDriver, tmp_path: Path) -> None:
        self.driver, self.lower, self.stack = driver, tmp_path / "lower", ExitStack()
        self.lower.mkdir()

    async def box(self, sandbox_id: str, wanted: Limits, uid_base: int = 100_000) -> Box:
        box = Box(await self.driver.take(sandbox_id, uid_base, wanted), self.lower, self.stack)
        self.driver.follow(sandbox_id, wanted, box.open_root)
        return box


@pytest.fixture
def state(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    state.mkdir()
    return state


@pytest.fixture(
    params=[pytest.param("btrfs", marks=requires("btrfs", "overlay_fd")), pytest.param("tmpfs", marks=requires("tmpfs", "overlay_fd"))]
)
async def rig(request: pytest.FixtureRequest, state: Path, tmp_path: Path) -> AsyncIterator[Rig]:
    driver: ScratchDriver = BtrfsScratch(state, size_bytes=POOL_BYTES) if request.param == "btrfs" else TmpfsScratch()
    await driver.start()
    rig = Rig(driver, tmp_path)
    try:
        yield rig
    finally:
        rig.stack.close()
        await driver.close(remove=True)
    assert os.listdir(state) == []
    assert no_device(state)


@pytest.fixture
async def btrfs_rig(state: Path, tmp_path: Path) -> AsyncIterator[Rig]:
    driver = BtrfsScratch(state, size_bytes=POOL_BYTES)
    await driver.start()
    rig = Rig(driver, tmp_path)
    try:
        yield rig
    finally:
        rig.stack.close()
        await driver.close(remove=True)


# --- both drivers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk_bytes", [MIB, 16 * MIB, 64 * MIB])
async def test_bytes_are_limited_and_told(rig: Rig, disk_bytes: int) -> None:
    box, other = await rig.box("sb_1", limits(disk_bytes)), await rig.box("sb_2", limits(disk_bytes))
    assert rig.driver.full("sb_1") == (False, False)
    written = fill(box.root / "big")
    assert disk_bytes <= written <= disk_bytes * 1.02 + 128 * 1024
    assert rig.driver.full("sb_1") == (True, False)
    assert disk_bytes <= rig.driver.usage("sb_1")[0] <= disk_bytes * 1.02 + 256 * 1024
    assert rig.driver.full("sb_2") == (False, False)
    (other.root / "file").write_bytes(bytes(disk_bytes // 2))  # the neighbour is not hurt
    os.unlink(box.root / "big")  # and it can help itself
    assert fill(box.root / "again") >= disk_bytes


async def test_inodes_are_limited_and_told(rig: Rig) -> None:
    box = await rig.box("sb_1", limits(64 * MIB, inodes=500))
    assert rig.driver.usage("sb_1")[1] == 0
    os.mkdir(box.root / "dir")
    os.symlink("x", box.root / "dir" / "link")
    assert rig.driver.usage("sb_1")[1] == 2
    assert create(box.root / "dir", 497) == 497
    assert rig.driver.full("sb_1") == (False, False)
    assert rig.driver.usage("sb_1")[1] == 499
    assert create(box.root, 1) == 1
    assert rig.driver.full("sb_1") == (False, True)
    assert create(box.root, 2, "more") == 0
    for number in range(100):
        os.unlink(box.root / "dir" / f"f{number}")
    assert rig.driver.full("sb_1") == (False, False)
    assert rig.driver.usage("sb_1")[1] == 400
    assert create(box.root, 50, "more") == 50


async def test_what_was_never_followed_or_is_removed_tells_nothing(rig: Rig) -> None:
    assert rig.driver.full("sb_no") == (False, False)
    assert rig.driver.usage("sb_no") == (0, None)
    box = await rig.box("sb_1", limits())
    fill(box.root / "big")
    box.close()
    await rig.driver.remove("sb_1")
    await rig.driver.remove("sb_1")
    await rig.driver.remove("sb_never")
    assert rig.driver.full("sb_1") == (False, False)
    assert rig.driver.usage("sb_1") == (0, None)
    assert "sb_1" not in rig.driver.list()


async def test_an_id_may_be_used_again(rig: Rig) -> None:
    for _ in range(2):
        box = await rig.box("sb_1", limits())
        assert os.listdir(box.root) == []
        (box.root / "file").touch()
        box.close()
        await rig.driver.remove("sb_1")


# --- the pool ------------------------------------------------------------------------------------------------------


@requires("btrfs")
class TestPool:
    async def test_the_directories_belong_to_the_sandbox(self, btrfs_rig: Rig, state: Path) -> None:
        plan = await btrfs_rig.driver.take("sb_1", 165_536, limits())
        for folder in (plan.upper, plan.work):
            status = folder.stat()
            assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (165_536, 165_536, 0o755)
        assert plan.wire() == ["dir", os.fsencode(plan.upper), os.fsencode(plan.work)]
        assert os.stat(state / "scratch").st_mode & 0o777 == 0o700
        assert plan.ref == "sb_1"

    async def test_one_sandbox_has_one_scratch(self, btrfs_rig: Rig) -> None:
        await btrfs_rig.driver.take("sb_1", 100_000, limits())
        with pytest.raises(Conflict):
            await btrfs_rig.driver.take("sb_1", 100_000, limits())
        assert btrfs_rig.driver.list() == ["sb_1"]

    async def test_a_burst_takes_what_it_should(self, btrfs_rig: Rig) -> None:
        ids = [f"sb_{number}" for number in range(300)]
        await asyncio.gather(*(btrfs_rig.driver.take(sandbox_id, 100_000, limits()) for sandbox_id in ids))
        assert btrfs_rig.driver.list() == sorted(ids)
        await asyncio.gather(*(btrfs_rig.driver.remove(sandbox_id) for sandbox_id in ids))
        assert btrfs_rig.driver.list() == []

    @pytest.mark.slow
    async def test_space_comes_back(self, btrfs_rig: Rig, state: Path) -> None:
        """More is written in turn than the pool holds at once."""
        fd = os.open(state / "scratch", os.O_RDONLY)
        try:
            for number in range(3):
                box = await btrfs_rig.box(f"sb_{number}", limits(200 * MIB))
                assert fill(box.root / "big") >= 200 * MIB
                box.close()
                subvolume_fd = os.open(state / "scratch" / "boxes" / f"sb_{number}", os.O_RDONLY)
                subvolume = btrfs.subvolume_id(subvolume_fd)
                os.close(subvolume_fd)
                await btrfs_rig.driver.remove(f"sb_{number}")
                await asyncio.to_thread(btrfs.wait_cleaned, fd, [subvolume])
        finally:
            os.close(fd)

    async def test_removing_does_not_wait_for_open_files(self, btrfs_rig: Rig) -> None:
        box = await btrfs_rig.box("sb_1", limits())
        with open(box.root / "file", "w+") as file:
            await btrfs_rig.driver.remove("sb_1")
            assert btrfs_rig.driver.list() == []
            file.write("still here")

    @pytest.mark.slow
    async def test_quota_groups_of_removed_sandboxes_go(self, btrfs_rig: Rig, state: Path) -> None:
        fd = os.open(state / "scratch", os.O_RDONLY)
        try:
            groups = Path(f"/sys/fs/btrfs/{btrfs.filesystem_id(fd)}/qgroups")
            before = set(os.listdir(groups))
            subvolumes = []
            for number in range(20):
                await btrfs_rig.driver.take(f"sb_{number}", 100_000, limits())
                subvolume_fd = os.open(state / "scratch" / "boxes" / f"sb_{number}", os.O_RDONLY)
                subvolumes.append(btrfs.subvolume_id(subvolume_fd))
                os.close(subvolume_fd)
                await btrfs_rig.driver.remove(f"sb_{number}")
            await asyncio.to_thread(btrfs.wait_cleaned, fd, subvolumes)
            for _ in range(10):  # each removal drops a few groups, where the kernel does not do it
                await btrfs_rig.driver.take("sb_x", 100_000, limits())
                await btrfs_rig.driver.remove("sb_x")
            await asyncio.to_thread(btrfs.sync, fd)
            assert len(set(os.listdir(groups)) - before) <= 10  # of those just now
        finally:
            os.close(fd)

    async def test_freed_space_is_seen_after_a_commit(self, btrfs_rig: Rig, state: Path) -> None:
        box = await btrfs_rig.box("sb_1", limits())
        fill(box.root / "big")
        assert btrfs_rig.driver.full("sb_1") == (True, False)
        os.unlink(box.root / "big")
        fd = os.open(state / "scratch", os.O_RDONLY)
        try:
            await asyncio.to_thread(btrfs.sync, fd)
        finally:
            os.close(fd)
        assert btrfs_rig.driver.full("sb_1") == (False, False)
        assert btrfs_rig.driver.usage("sb_1")[0] < MIB

    @pytest.mark.slow
    async def test_many_inodes_are_counted_off_the_event_loop(self, btrfs_rig: Rig) -> None:
        driver = btrfs_rig.driver
        assert isinstance(driver, BtrfsScratch)
        box = await btrfs_rig.box("sb_1", limits(128 * MIB, inodes=6000))
        for round_number in range(2):  # numbers used and free again: the bound alone would say full
            create(box.root, 4000, f"r{round_number}-")
            if round_number == 0:
                for number in range(4000):
                    os.unlink(box.root / f"r0-{number}")
        assert driver.full("sb_1") == (False, False)
        await asyncio.to_thread(driver.look, "sb_1")
        assert driver.usage("sb_1")[1] == 4000
        assert driver.full("sb_1") == (False, False)
        assert create(box.root, 2500, "over-") == 2500  # an overshoot, until somebody looks
        await asyncio.to_thread(driver.look, "sb_1")
        assert driver.full("sb_1") == (False, True)
        assert create(box.root, 1, "no-") == 0
        for number in range(1000):
            os.unlink(box.root / f"over-{number}")
        await asyncio.to_thread(driver.look, "sb_1")
        assert driver.full("sb_1") == (False, False)
        assert create(box.root, 1, "yes-") == 1

    async def test_the_watch_finds_a_sandbox_over_its_limit(self, btrfs_rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = btrfs_rig.driver
        assert isinstance(driver, BtrfsScratch)
        looked = asyncio.Event()
        loop_, look = asyncio.get_running_loop(), driver.look
        box = await btrfs_rig.box("sb_1", limits(64 * MIB, inodes=100))
        create(box.root, 200)

        def tell(sandbox_id: str) -> None:
            look(sandbox_id)
            loop_.call_soon_threadsafe(looked.set)

        monkeypatch.setattr(driver, "look", tell)
        await looked.wait()
        assert create(box.root, 1, "no-") == 0


@requires("btrfs")
class TestPoolLives:
    async def test_an_empty_pool_is_unmounted_and_kept(self, state: Path) -> None:
        for _ in range(2):
            driver = BtrfsScratch(state, size_bytes=POOL_BYTES)
            await driver.start()
            assert POOL_BYTES * 0.9 < driver.size_bytes <= POOL_BYTES
            await driver.take("sb_1", 100_000, limits())
            await driver.remove("sb_1")
            await driver.close()
            assert not is_mounted(state)
            assert no_device(state)
            stats = (state / "scratch.img").stat()
            assert stats.st_blocks * 512 >= POOL_BYTES  # all of it stays reserved, after use too
        os.unlink(state / "scratch.img")

    async def test_the_next_edge_takes_a_mounted_pool_over(self, state: Path, tmp_path: Path) -> None:
        first = BtrfsScratch(state, size_bytes=POOL_BYTES)
        await first.start()
        rig = Rig(first, tmp_path)
        wanted = limits(inodes=100)
        box = await rig.box("sb_1", wanted)
        await first.take("sb_half_made", 100_000, limits())
        create(box.root, 100)
        assert first.full("sb_1") == (False, True)
        await first.close()
        assert is_mounted(state)

        second = BtrfsScratch(state, size_bytes=POOL_BYTES)
        await second.start()
        try:
            assert second.list() == ["sb_1", "sb_half_made"]
            second.follow("sb_1", wanted, box.open_root)
            assert second.full("sb_1") == (False, True)
            os.unlink(box.root / "f0")
            assert second.full("sb_1") == (False, False)  # it knows of the clamp that another set
            assert create(box.root, 1, "yes-") == 1
            with pytest.raises(SandboxLost):
                second.follow("sb_gone", limits(), box.open_root)
            await second.remove("sb_half_made")
            assert second.list() == ["sb_1"]
        finally:
            box.close()
            await second.close(remove=True)
        assert os.listdir(state) == []
        assert no_device(state)

    async def test_a_killed_edge_leaves_a_pool_that_the_next_takes_over(self, state: Path) -> None:
        program = f"""
import asyncio, os, signal
from pathlib import Path
from opendsec.api.spec import Container
from opendsec.runtime.scratch.btrfs import BtrfsScratch
async def main():
    driver = BtrfsScratch(Path({os.fspath(state)!r}), size_bytes={POOL_BYTES})
    await driver.start()
    for number in range(50):
        asyncio.create_task(driver.take(f"sb_{{number}}", 100_000, Container(image="x").limits()))
    await driver.take("sb_last", 100_000, Container(image="x").limits())
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
        done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], check=False)
        assert done.returncode == -9
        driver = BtrfsScratch(state, size_bytes=POOL_BYTES)
        await driver.start()
        assert "sb_last" in driver.list()
        for sandbox_id in driver.list():
            await driver.remove(sandbox_id)
        await driver.close(remove=True)
        assert os.listdir(state) == []
        assert no_device(state)

    async def test_a_pool_unmounted_under_living_sandboxes_is_not_mounted_twice(self, state: Path, tmp_path: Path) -> None:
        first = BtrfsScratch(state, size_bytes=POOL_BYTES)
        await first.start()
        box = await Rig(first, tmp_path).box("sb_1", limits())
        await first.close()
        subprocess.run(["umount", state / "scratch"], check=True)  # an operator's hand
        (device,) = devices(state)  # the sandbox's overlay keeps the file system

        second = BtrfsScratch(state, size_bytes=POOL_BYTES)
        await second.start()
        assert devices(state) == [device]
        (box.root / "file").write_text("same file system")
        assert (state / "scratch" / "boxes" / "sb_1" / "upper" / "file").read_text() == "same file system"
        box.close()
        await second.close(remove=True)
        assert no_device(state)

    async def test_removing_works_while_sandboxes_live(self, state: Path, tmp_path: Path) -> None:
        driver = BtrfsScratch(state, size_bytes=POOL_BYTES)
        await driver.start()
        box = await Rig(driver, tmp_path).box("sb_1", limits())
        await driver.close(remove=True)
        assert os.listdir(state) == []
        (box.root / "file").touch()
        box.close()
        assert no_device(state)

    async def test_closing_may_be_repeated_and_need_not_follow_a_start(self, state: Path) -> None:
        driver = BtrfsScratch(state, size_bytes=POOL_BYTES)
        await driver.close()
        await driver.close(remove=True)


@requires("btrfs")
class TestPoolCannotBe:
    async def test_a_pool_file_that_is_none_is_not_thrown_away(self, state: Path) -> None:
        (state / "scratch.img").write_bytes(bytes(POOL_BYTES // 64))
        with pytest.raises(Unavailable, match=r"scratch\.img cannot be used"):
            await started(BtrfsScratch(state))
        assert (state / "scratch.img").stat().st_size == POOL_BYTES // 64
        assert no_device(state)

    async def test_something_else_at_its_place_is_left_alone(self, state: Path) -> None:
        (state / "scratch").mkdir()
        with tmpfs_at(state / "scratch"):
            with pytest.raises(Unavailable, match="something else is mounted"):
                await started(BtrfsScratch(state))
            assert is_mounted(state)

    async def test_a_smaller_pool_is_made_if_there_is_no_room(self, state: Path) -> None:
        with tmpfs_at(state, 300 * MIB):
            driver = BtrfsScratch(state, size_bytes=1100 * MIB)
            await started(driver, keep=True)
            assert 256 * MIB < driver.size_bytes < 275 * MIB
            await driver.close(remove=True)

    async def test_no_room_at_all_is_said(self, state: Path) -> None:
        with tmpfs_at(state, 100 * MIB):
            with pytest.raises(Unavailable, match="256MiB"):
                await started(BtrfsScratch(state, size_bytes=1000 * MIB))
            assert os.listdir(state) == ["scratch"]

    async def test_a_full_pool_is_said_so_and_a_half_made_scratch_does_not_stay(
        self, btrfs_rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def no_space(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "mkdir: no space")

        monkeypatch.setattr(os, "mkdir", no_space)
        with pytest.raises(Unavailable, match="the scratch pool is full"):
            await btrfs_rig.driver.take("sb_1", 100_000, limits())
        monkeypatch.undo()
        assert btrfs_rig.driver.list() == []


async def started(driver: BtrfsScratch, *, keep: bool = False) -> None:
    try:
        await driver.start()
    except BaseException:
        await driver.close()
        raise
    if not keep:
        await driver.close(remove=True)


def tmpfs_at(path: Path, size_bytes: int = MIB) -> AbstractContextManager[ExitStack]:
    stack = ExitStack()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", path], check=True)
    stack.callback(subprocess.run, ["umount", path], check=True)
    return stack


# --- the choice ----------------------------------------------------------------------------------------------------


@requires("btrfs")
async def test_the_pool_is_the_first_choice(state: Path) -> None:
    for wanted, reason in (("auto", "a btrfs pool on disk"), ("btrfs", "a btrfs pool on disk, as configured")):
        choice = await choose(state, ScratchSettings(driver=wanted, size_bytes=POOL_BYTES))  # type: ignore[arg-type]
        await choice.driver.close(remove=True)
        assert (choice.driver.name, choice.reason, choice.driver.in_memory) == ("btrfs", reason, False)


async def test_memory_is_chosen_when_asked_for(state: Path) -> None:
    choice = await choose(state, ScratchSettings(driver="tmpfs"))
    assert (choice.driver.name, choice.reason, choice.driver.in_memory) == ("tmpfs", "memory, as configured", True)
    assert os.listdir(state) == []


Change = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda patch: patch.setattr(shutil, "which", lambda *_, **__: None), "mkfs.btrfs is not installed"),
        (lambda patch: patch.setattr(pool_module.syscalls, "fallocate", refuse(errno.EOPNOTSUPP)), "cannot reserve space"),
        (lambda patch: patch.setattr(pool_module.mounts, "new_mount", refuse(errno.ENODEV)), "cannot be used"),
        (lambda patch: patch.setattr(pool_module.btrfs, "quota_enable", refuse(errno.EOPNOTSUPP)), "cannot be used"),
    ],
)
async def test_memory_is_what_remains(state: Path, monkeypatch: pytest.MonkeyPatch, change: Change, message: str) -> None:
    change(monkeypatch)
    choice = await choose(state, ScratchSettings(size_bytes=POOL_BYTES))
    assert choice.driver.name == "tmpfs"
    assert message in choice.reason
    with pytest.raises((Unavailable, Unsupported), match=message):
        await choose(state, ScratchSettings(driver="btrfs", size_bytes=POOL_BYTES))
    assert not is_mounted(state)
    assert no_device(state)


def refuse(code: int) -> Callable[..., Awaitable[None] | None]:
    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@requires("overlay_fd", "tmpfs")
async def test_overlay_itself_takes_so_many_inodes(tmp_path: Path) -> None:
    with ExitStack() as stack:
        (tmp_path / "lower").mkdir()
        box = Box(ScratchPlan(kind="tmpfs", ref="x", size_bytes=MIB, inodes=100), tmp_path / "lower", stack)
        stats = os.statvfs(box.root)
        assert stats.f_files - stats.f_ffree == BASE_INODES + 1  # an extended attribute counts as one
