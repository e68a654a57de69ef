# SPDX-License-Identifier: Apache-2.0
"""Loop devices and btrfs: bound, limited, snapshotted, and nothing left bound."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.kernel import btrfs, fds, loop, mounts
from tests.support import requires

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.write_bytes(b"0123456789abcdef" * (MIB // 16))
    return path


@requires("loop")
class TestLoop:
    def test_attach_and_let_go(self, disk: Path) -> None:
        with loop.attach(disk) as device:
            assert loop.backing_file(device.path) == os.fsencode(disk)
            assert loop.attached()[device.path] == os.fsencode(disk)
            assert not os.get_inheritable(device.fd)
            os.pwrite(device.fd, b"written", 0)
            os.fsync(device.fd)
        assert disk.read_bytes().startswith(b"written789abcdef")
        assert loop.backing_file(device.path) != os.fsencode(disk)
        device.close()  # again is fine

    def test_read_only(self, disk: Path) -> None:
        disk.chmod(0o400)
        with loop.attach(disk, read_only=True) as device:
            assert os.pread(device.fd, 4, 0) == b"0123"
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(device.fd, b"x", 0)

    def test_direct_io(self, disk: Path) -> None:
        with loop.attach(disk, direct_io=True, block_bytes=4096) as device:
            assert os.pread(device.fd, 4, 0) == b"0123"

    def test_many_at_once_get_one_each(self, tmp_path: Path) -> None:
        """The number asked for may be taken meanwhile, by others or by ourselves."""
        devices: list[loop.LoopDevice] = []
        start = threading.Barrier(4)

        def work(index: int) -> None:
            start.wait()
            for turn in range(3):
                path = tmp_path / f"disk{index}-{turn}"
                path.write_bytes(bytes(MIB))
                devices.append(loop.attach(path))

        threads = [threading.Thread(target=work, args=[index]) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            assert len({device.path for device in devices}) == 12
            assert all(loop.backing_file(device.path) for device in devices)
        finally:
            for device in devices:
                device.close()

    def test_a_number_that_is_always_taken(self, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loop, "_try_configure", lambda *_: None)
        with pytest.raises(OSError, match="taken by others") as raised:
            loop.attach(disk)
        assert (raised.value.errno, raised.value.filename) == (errno.EBUSY, str(disk))

    def test_errors_name_the_file(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError) as raised:
            loop.attach(tmp_path / "missing")
        assert raised.value.filename == str(tmp_path / "missing")
        with pytest.raises(OSError, match="LOOP_CONFIGURE") as refused:
            loop.attach("/dev/null")
        assert refused.value.filename == "/dev/null"


@pytest.fixture(params=["btrfs", "btrfs_simple_quota"])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    """The root directory of a fresh btrfs with quotas on."""
    image = tmp_path / "pool"
    with open(image, "wb") as file:
        file.truncate(160 * MIB)
    mkfs = shutil.which("mkfs.btrfs", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    assert mkfs
    subprocess.run([mkfs, "-q", image], check=True, capture_output=True)
    with loop.attach(image) as device:
        mount = mounts.new_mount("btrfs", {"source": device.path})
    root = fds.reopen(mount, os.O_RDONLY | os.O_DIRECTORY)
    os.close(mount)
    btrfs.quota_enable(root, simple=request.param == "btrfs_simple_quota")
    if request.param == "btrfs":
        btrfs.quota_rescan_wait(root)
    yield root
    os.close(root)


def fill(directory: int, name: str, most: int) -> int:
    """Write until refused or `most` bytes are there; how many there are."""
    fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
    written = 0
    try:
        while written < most:
            written += os.write(fd, os.urandom(64 << 10))
    except OSError as error:
        assert error.errno == errno.EDQUOT
    finally:
        os.close(fd)
    return written


def open_directory(parent: int, name: str | bytes) -> int:
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)


@requires("btrfs", "btrfs_simple_quota")
class TestBtrfs:
    def test_limit_from_the_start_and_live(self, pool: int) -> None:
        btrfs.subvolume_create(pool, b"box\xff", max_bytes=4 * MIB)
        box = open_directory(pool, b"box\xff")
        number, filesystem = btrfs.subvolume_id(box), btrfs.filesystem_id(pool)
        assert btrfs.is_subvolume(box)
        assert 3 * MIB <= fill(box, "one", 16 * MIB) <= 4 * MIB
        used = btrfs.qgroup_usage(filesystem, number)
        assert used.max_bytes == 4 * MIB
        assert used.referenced_bytes + used.reserved_bytes >= 3 * MIB
        btrfs.qgroup_limit(pool, number, 8 * MIB)
        assert fill(box, "two", 2 * MIB) == 2 * MIB
        btrfs.qgroup_limit(pool, number, None)
        assert fill(box, "three", 9 * MIB) == 9 * MIB
        btrfs.sync(pool)
        used = btrfs.qgroup_usage(filesystem, number)
        assert used.max_bytes is None
        assert used.referenced_bytes >= 14 * MIB
        os.close(box)

    def test_limits_are_apart(self, pool: int) -> None:
        for name in ("one", "two"):
            btrfs.subvolume_create(pool, name, max_bytes=2 * MIB)
        one, two = open_directory(pool, "one"), open_directory(pool, "two")
        assert fill(one, "file", 4 * MIB) < 4 * MIB
        assert fill(two, "file", MIB) == MIB
        os.close(one)
        os.close(two)

    def test_snapshot_shares_and_then_differs(self, pool: int) -> None:
        btrfs.subvolume_create(pool, "origin")
        origin = open_directory(pool, "origin")
        fill(origin, "file", MIB)
        btrfs.snapshot(origin, pool, "copy", max_bytes=8 * MIB)
        btrfs.snapshot(origin, pool, "frozen", read_only=True)
        fill(origin, "later", MIB)
        copy, frozen = open_directory(pool, "copy"), open_directory(pool, "frozen")
        assert os.listdir(copy) == os.listdir(frozen) == ["file"]
        assert btrfs.subvolume_id(copy) != btrfs.subvolume_id(origin)
        assert btrfs.qgroup_usage(btrfs.filesystem_id(pool), btrfs.subvolume_id(copy)).max_bytes == 8 * MIB
        with pytest.raises(OSError, match="Read-only"):
            os.mkdir("x", dir_fd=frozen)
        fill(copy, "own", MIB)
        os.close(origin)
        origin = open_directory(pool, "origin")  # btrfs lists what was there when the directory was opened
        assert sorted(os.listdir(origin)) == ["file", "later"]
        for fd in (origin, copy, frozen):
            os.close(fd)

    @pytest.mark.slow
    def test_destroy_frees(self, pool: int) -> None:
        btrfs.subvolume_create(pool, "box")
        box = open_directory(pool, "box")
        number = btrfs.subvolume_id(box)
        fill(box, "file", 24 * MIB)
        os.close(box)
        btrfs.sync(pool)
        before = os.fstatvfs(pool).f_bfree
        btrfs.subvolume_destroy(pool, "box")
        assert os.listdir(pool) == []
        btrfs.wait_cleaned(pool, [number])
        btrfs.sync(pool)
        assert os.fstatvfs(pool).f_bfree > before
        assert btrfs.qgroup_destroy(pool, number)

    def test_errors_name_the_subvolume(self, pool: int) -> None:
        btrfs.subvolume_create(pool, "box")
        with pytest.raises(FileExistsError, match="SUBVOL_CREATE") as raised:
            btrfs.subvolume_create(pool, "box")
        assert raised.value.filename == "box"
        with pytest.raises(FileNotFoundError, match="SNAP_DESTROY") as missing:
            btrfs.subvolume_destroy(pool, "none")
        assert missing.value.filename == "none"
        os.mkdir("plain", dir_fd=pool)
        plain = open_directory(pool, "plain")
        assert not btrfs.is_subvolume(plain)
        with pytest.raises(OSError, match="SNAP_CREATE"):
            btrfs.snapshot(plain, pool, "copy")
        os.close(plain)
        with pytest.raises(FileNotFoundError):
            btrfs.qgroup_usage(btrfs.filesystem_id(pool), 99_999)


def test_btrfs_calls_on_another_file_system(tmp_path: Path) -> None:
    fd = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for call in (lambda: btrfs.subvolume_create(fd, "x"), lambda: btrfs.filesystem_id(fd), lambda: btrfs.quota_enable(fd)):
        with pytest.raises(OSError, match="BTRFS_IOC") as raised:
            call()
        assert raised.value.errno == errno.ENOTTY
    assert not btrfs.is_subvolume(fd)
    os.close(fd)
