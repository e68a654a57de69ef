# SPDX-License-Identifier: Apache-2.0
"""File systems by descriptor: images, clones, id maps, overlays, tmpfs, proc, devpts."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.kernel import abi, fds, loop, mounts, namespaces, procfs, syscalls
from tests.integration.kernel.children import close_all, in_child, private_mounts
from tests.support import requires

UID = 1_000_000


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole` in one file; `meta` and `data` apart."""
    folder = tmp_path_factory.mktemp("erofs")
    tree = folder / "tree"
    (tree / "directory/inner").mkdir(parents=True)
    (tree / "file").write_bytes(b"content" * 5000)
    (tree / "directory/inner/deep").write_text("deep")
    (tree / "setuid").touch(mode=0o755)
    (tree / "setuid").chmod(0o4755)
    os.chown(tree / "directory", 1000, 100)
    for arguments in (["whole", "tree"], ["--chunksize=4096", "--blobdev=data", "meta", "tree"]):
        subprocess.run(["mkfs.erofs", "--quiet", *arguments], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def layer(images: Path) -> Iterator[int]:
    fd = mounts.mount_erofs(images / "meta", images / "data")
    yield fd
    os.close(fd)


@pytest.fixture
def userns() -> Iterator[int]:
    fd = namespaces.user_namespace([(0, UID, 65_536)])
    yield fd
    os.close(fd)


def read(directory: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        return os.read(fd, 1 << 20)
    finally:
        os.close(fd)


def listing(directory: int) -> list[str]:
    fd = fds.reopen(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return sorted(os.listdir(fd))
    finally:
        os.close(fd)


# --- images


@requires("erofs_device")
def test_erofs_with_data_apart(layer: int) -> None:
    assert listing(layer) == ["directory", "file", "setuid"]
    assert read(layer, "file") == b"content" * 5000
    assert syscalls.fstatfs_type(layer) == abi.EROFS_SUPER_MAGIC_V1
    assert str(os.stat("directory", dir_fd=layer).st_uid) == "1000"
    with pytest.raises(OSError, match="Read-only"):
        os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=layer)


@requires("erofs_file")
def test_erofs_needs_no_loop_device_and_is_attached_nowhere(images: Path) -> None:
    before = loop.attached(), len(procfs.mountinfo())
    fd = mounts.mount_erofs(images / "whole")
    assert (loop.attached(), len(procfs.mountinfo())) == before
    assert read(fd, "directory/inner/deep") == b"deep"
    os.close(fd)


@requires("erofs_device")
def test_erofs_from_a_name_longer_than_fsconfig_takes(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 200) / ("e" * 200)
    folder.mkdir(parents=True)
    for name in ("meta", "data"):
        os.link(images / name, folder / name)
    fd = mounts.mount_erofs(folder / "meta", folder / "data")
    assert read(fd, "file").startswith(b"content")
    os.close(fd)


@requires("erofs_device")
def test_erofs_from_a_name_that_is_no_text(images: Path, tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff, device"
    os.link(images / "whole", name)
    fd = mounts.mount_erofs(name)
    assert read(fd, "file").startswith(b"content")
    os.close(fd)


@requires("loop")
def test_erofs_by_loop_devices_where_files_cannot_be_mounted(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_mount = mounts.new_mount

    def without_files(fstype: str, options: dict[str, str], attrs: int = 0) -> int:
        if not str(options["source"]).startswith("/dev/loop"):
            raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK))
        return new_mount(fstype, options, attrs)

    monkeypatch.setattr(mounts, "new_mount", without_files)
    for meta, data in ((images / "whole", None), (images / "meta", images / "data")):
        fd = mounts.mount_erofs(meta, data)
        assert len([b for b in loop.attached().values() if b.startswith(os.fsencode(images))]) == (2 if data else 1)
        assert read(fd, "file") == b"content" * 5000
        os.close(fd)


def test_erofs_errors_name_the_file(images: Path) -> None:
    for path in (images / "missing", images / "tree/file"):
        with pytest.raises(OSError) as raised:
            mounts.mount_erofs(path)
        assert raised.value.filename == str(path)


# --- clones


@requires("detached_clone", "idmapped_mounts")
def test_idmapped_clone(layer: int, userns: int) -> None:
    clone = mounts.idmapped_clone(layer, userns)
    assert os.stat("file", dir_fd=clone).st_uid == UID
    assert os.stat("directory", dir_fd=clone).st_uid == UID + 1000
    assert os.stat("file", dir_fd=layer).st_uid == 0
    assert os.stat("file", dir_fd=clone).st_dev == os.stat("file", dir_fd=layer).st_dev  # one superblock, one page cache
    with pytest.raises(OSError, match="mount_setattr"):
        mounts.idmapped_clone(clone, userns)  # once only
    with pytest.raises(OSError, match="mount_setattr"):
        mounts.idmapped_clone(layer, layer)
    os.close(clone)


@requires("detached_clone")
def test_clone_of_a_part(layer: int) -> None:
    clone = mounts.clone(layer, "directory")
    assert listing(clone) == ["inner"]
    os.close(clone)
    with pytest.raises(FileNotFoundError) as raised:
        mounts.clone(layer, b"missing\xff")
    assert os.fsencode(raised.value.filename) == b"missing\xff"


def test_bind_readonly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("/etc")
    for path in (tmp_path, tmp_path / "file"):
        bind = mounts.bind_readonly(abi.AT_FDCWD, path)
        flags = os.fstatvfs(bind).f_flag
        assert flags & os.ST_RDONLY
        assert flags & os.ST_NOSUID
        assert flags & os.ST_NODEV
        os.close(bind)
    with pytest.raises(FileNotFoundError):
        mounts.bind_readonly(abi.AT_FDCWD, tmp_path / "missing")
    bind = mounts.bind_readonly(abi.AT_FDCWD, tmp_path / "link")  # the link itself, not where it leads
    assert os.readlink("", dir_fd=bind) == "/etc"
    os.close(bind)


# --- overlays


@pytest.fixture
def upper(userns: int) -> Iterator[tuple[int, int, int]]:
    """(the detached tmpfs, upper, work), all owned by the mapped root."""
    scratch = mounts.tmpfs(1 << 20, 100, 0o700, uid=UID, gid=UID)
    parts = []
    for name in ("upper", "work"):
        os.mkdir(name, dir_fd=scratch)
        os.chown(name, UID, UID, dir_fd=scratch)
        parts.append(fds.open_path(name, dir_fd=scratch, directory=True))
    yield scratch, parts[0], parts[1]
    close_all(scratch, *parts)


@requires("overlay_fd")
def test_overlay_of_a_mapped_layer(layer: int, userns: int, upper: tuple[int, int, int]) -> None:
    scratch, upper_fd, work_fd = upper
    clone = mounts.idmapped_clone(layer, userns)
    root = mounts.overlay([clone], upper_fd, work_fd, attrs=abi.MOUNT_ATTR_NODEV)
    os.close(clone)
    fd = os.open("file", os.O_WRONLY | os.O_CLOEXEC, dir_fd=root)
    os.write(fd, b"CHANGED")
    os.close(fd)
    assert read(root, "file").startswith(b"CHANGEDcontent")
    assert read(layer, "file").startswith(b"contentcontent")
    assert os.stat("upper/file", dir_fd=scratch).st_uid == UID
    # A directory of the image is renamed as on any disk.
    os.rename("directory", "moved", src_dir_fd=root, dst_dir_fd=root)
    assert read(root, "moved/inner/deep") == b"deep"
    os.unlink("setuid", dir_fd=root)
    assert listing(root) == ["file", "moved"]
    os.close(root)


@requires("overlay_fd")
def test_overlay_of_two_layers_with_paths_for_the_upper(layer: int, tmp_path: Path) -> None:
    second = mounts.tmpfs(1 << 20, 10)
    fd = os.open("file", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=second)
    os.write(fd, b"above")
    os.close(fd)
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()
    root = mounts.overlay([second, layer], tmp_path / "upper", os.fsencode(tmp_path / "work"))
    assert read(root, "file") == b"above"
    assert read(root, "directory/inner/deep") == b"deep"
    os.close(root)
    read_only = mounts.overlay([second, layer], None, None)
    with pytest.raises(OSError, match="Read-only"):
        os.mkdir("x", dir_fd=read_only)
    close_all(read_only, second)


def test_overlay_errors(layer: int) -> None:
    with pytest.raises(OSError, match="no lower layer"):
        mounts.overlay([], None, None)
    with pytest.raises(FileNotFoundError) as raised:
        mounts.overlay([layer], "/nowhere/upper", "/nowhere/work")
    assert raised.value.filename == "/nowhere/upper"
    with pytest.raises(OSError, match="fsconfig"):
        mounts.overlay([9999], None, None)


# --- the rest


@requires("tmpfs")
def test_tmpfs_limits_are_exact() -> None:
    fd = mounts.tmpfs(3 * 4096, 4)
    assert mounts.usage(fd)[0] == 3 * 4096
    file = os.open("f", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=fd)
    assert os.write(file, bytes(5 * 4096)) == 3 * 4096
    with pytest.raises(OSError, match="No space") as raised:
        os.write(file, b"x")
    assert raised.value.errno == errno.ENOSPC
    os.mkdir("a", dir_fd=fd)
    os.mkdir("b", dir_fd=fd)
    with pytest.raises(OSError, match="No space"):
        os.mkdir("c", dir_fd=fd)
    assert mounts.usage(fd)[1:] == (0, 4, 0)
    close_all(file, fd)
    for size, inodes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="limit of 0"):
            mounts.tmpfs(size, inodes)


def test_proc_and_devpts_in_namespaces_of_their_own(tmp_path: Path) -> None:
    def body() -> None:
        private_mounts()
        proc = mounts.proc()
        mounts.attach(proc, abi.AT_FDCWD, tmp_path)
        assert [name for name in os.listdir(tmp_path) if name.isdigit()] == ["1"]
        syscalls.umount2(tmp_path, abi.MNT_DETACH)
        hidden = mounts.proc(hidepid="invisible")
        directory = fds.open_path(tmp_path, directory=True)
        mounts.attach(hidden, directory)
        assert "hidepid=invisible" in procfs.mountinfo()[-1].super_options
        pts = mounts.devpts(maximum=1)
        assert listing(pts) == ["ptmx"]

    in_child(body, flags=abi.CLONE_NEWPID | abi.CLONE_NEWNS)
    missing = tmp_path / "missing"
    fd = mounts.tmpfs(4096, 2)
    with pytest.raises(FileNotFoundError) as raised:
        mounts.attach(fd, abi.AT_FDCWD, missing)
    assert raised.value.filename == str(missing)
    os.close(fd)
