# SPDX-License-Identifier: Apache-2.0
"""Images, mounts, scratch disks, loading on demand."""

from __future__ import annotations

import base64
import errno
import os
import select
import shutil
import signal
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from opendsec.kernel import abi, btrfs, fds, fuse, loop, mounts, namespaces, procfs, syscalls
from opendsec.kernel.probes.tools import Missing, closing, need

# Two images of a directory with one file, "probe", that holds "opendsec": all in one, and with the data apart.
_EROFS_WHOLE = (
    b"c-muN7zLwX6pU2x=;7A~OK)<yGXvQ?3@QvvSky4m(0&#me(T7@pabRq2Lfby6*$cVXR89)>QJ^i&~<uxdId%KNvXKZU((3Pz=32wvVZamQu9)ZQ<Fzi!YCL8q"
    b"hJ(_f>AIEM!_f;2><{qJr@7"
)
_EROFS_META = (
    b"c-muN7zLwX6pU2x=;7A~5>MDpG6UH>3>pkfSky3*U>*-t2j>v+KMN4Qb!1}Df%5+Y0kXUXlvV+T42-P`WNSm&>OjBh>FE^|<tL?LGoJ&9mozehX%JAr2v5e*L^u"
    b"jY!6+C7qhJ(_f>AIE=mr3$j}Q6"
)
CONTENT = b"opendsec"
IDS = [(0, 1_000_000, 65_536)]


def write_erofs(scratch: str) -> tuple[str, str, str]:
    """(whole, metadata, data) image files."""
    contents = {
        "whole": zlib.decompress(base64.b85decode(_EROFS_WHOLE)),
        "meta": zlib.decompress(base64.b85decode(_EROFS_META)),
        "data": CONTENT.ljust(4096, b"\0"),
    }
    for name, content in contents.items():
        with open(f"{scratch}/{name}", "wb") as file:
            file.write(content)
    return f"{scratch}/whole", f"{scratch}/meta", f"{scratch}/data"


def read_at(mount: int, name: str) -> bytes:
    with closing(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=mount)) as fd:
        return os.read(fd, 100)


@contextmanager
def erofs(scratch: str) -> Iterator[int]:
    """A detached EROFS mount, by whatever means the machine has."""
    with closing(mounts.mount_erofs(write_erofs(scratch)[0])) as fd:
        yield fd


def erofs_file(scratch: str) -> str:
    whole, _, _ = write_erofs(scratch)
    with closing(mounts.new_mount("erofs", {"source": whole, "ro": None}, abi.MOUNT_ATTR_RDONLY)) as mount:
        need(read_at(mount, "probe") == CONTENT, "the file reads wrongly")
    return ""


def erofs_device(scratch: str) -> str:
    _, meta, data = write_erofs(scratch)
    with closing(mounts.mount_erofs(meta, data)) as mount:
        need(read_at(mount, "probe") == CONTENT, "the file reads wrongly")
    return ""


def detached_clone(scratch: str) -> str:
    with erofs(scratch) as mount, closing(mounts.clone(mount)) as copy, closing(mounts.clone(copy)) as second:
        need(read_at(second, "probe") == CONTENT, "the file reads wrongly")
    return ""


def idmapped_mounts(scratch: str) -> str:
    with (
        erofs(scratch) as mount,
        closing(namespaces.user_namespace(IDS)) as userns,
        closing(mounts.idmapped_clone(mount, userns)) as copy,
    ):
        need(os.stat("probe", dir_fd=copy).st_uid == IDS[0][1], "the owner is not mapped")
    return ""


def overlay_fd(scratch: str) -> str:
    with ExitStack() as stack:
        lower = stack.enter_context(erofs(scratch))
        userns = stack.enter_context(closing(namespaces.user_namespace(IDS)))
        copy = stack.enter_context(closing(mounts.idmapped_clone(lower, userns)))
        uid = IDS[0][1]
        upper_fs = stack.enter_context(closing(mounts.tmpfs(1 << 20, 64, uid=uid, gid=uid)))
        directories = []
        for name in ("upper", "work"):
            os.mkdir(name, dir_fd=upper_fs)
            directories.append(stack.enter_context(closing(fds.open_path(name, dir_fd=upper_fs, directory=True))))
        root = stack.enter_context(closing(mounts.overlay([copy], *directories)))
        with closing(os.open("probe", os.O_RDWR | os.O_CLOEXEC, dir_fd=root)) as fd:
            os.write(fd, b"changed!")
        need(read_at(root, "probe") == b"changed!", "the upper does not hold what was written")
        need(os.stat("upper/probe", dir_fd=upper_fs).st_uid == uid, "the copy has the wrong owner")
    return ""


def loop_device(scratch: str) -> str:
    with open(f"{scratch}/disk", "wb") as file:
        file.write(CONTENT.ljust(1 << 20, b"\0"))
    with loop.attach(f"{scratch}/disk") as device:
        need(os.pread(device.fd, 8, 0) == CONTENT, "the device reads wrongly")
        return ""


def tmpfs(scratch: str) -> str:
    with closing(mounts.tmpfs(4096, 3)) as mount:
        with closing(os.open("full", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=mount)) as fd:
            os.write(fd, bytes(4096))
            try:
                os.write(fd, b"x")
            except OSError as error:
                need(error.errno == errno.ENOSPC, "the limit on bytes answers wrongly")
            else:
                raise Missing("the limit on bytes does not hold")
        os.mkdir("second", dir_fd=mount)
        try:
            os.mkdir("third", dir_fd=mount)
        except OSError as error:
            need(error.errno == errno.ENOSPC, "the limit on inodes answers wrongly")
        else:
            raise Missing("the limit on inodes does not hold")
    return ""


def _with_btrfs(scratch: str, *, simple: bool) -> None:
    tool = shutil.which("mkfs.btrfs", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")
    need(tool, "mkfs.btrfs is not installed (btrfs-progs)")
    image = f"{scratch}/disk"
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    made = subprocess.run([str(tool), "-q", image], capture_output=True, text=True, check=False)
    need(made.returncode == 0, f"mkfs.btrfs: {made.stderr.strip()[:200]}")
    with loop.attach(image) as device:
        mount = mounts.new_mount("btrfs", {"source": device.path})
    with closing(mount), closing(fds.reopen(mount, os.O_RDONLY | os.O_DIRECTORY)) as root:
        btrfs.quota_enable(root, simple=simple)
        btrfs.subvolume_create(root, "scratch", max_bytes=1 << 20)
        with closing(os.open("scratch/file", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, dir_fd=root)) as fd:
            try:
                os.posix_fallocate(fd, 0, 4 << 20)
            except OSError as error:
                need(error.errno == errno.EDQUOT, f"the limit answers wrongly: {error.strerror}")
            else:
                raise Missing("the limit on a subvolume does not hold")
        with closing(os.open("scratch", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)) as source:
            btrfs.snapshot(source, root, "copy")


def btrfs_quota(scratch: str) -> str:
    _with_btrfs(scratch, simple=False)
    return ""


def btrfs_simple_quota(scratch: str) -> str:
    _with_btrfs(scratch, simple=True)
    return ""


def fanotify_pre_content(scratch: str) -> str:
    path = f"{scratch}/file"
    with open(path, "wb") as file:
        file.write(CONTENT)

    def reader() -> None:
        with open(path, "rb") as file:
            need(file.read() == CONTENT, "the file reads wrongly")

    flags = abi.FAN_CLASS_PRE_CONTENT | abi.FAN_CLOEXEC | abi.FAN_NONBLOCK
    with closing(syscalls.fanotify_init(flags, os.O_RDWR | os.O_CLOEXEC)) as group:
        syscalls.fanotify_mark(group, abi.FAN_MARK_ADD, abi.FAN_PRE_ACCESS, abi.AT_FDCWD, path)
        pid = os.fork()
        if pid == 0:
            try:
                reader()
            except BaseException:
                os._exit(1)
            os._exit(0)
        try:
            answered = False
            poller = select.poll()
            poller.register(group, select.POLLIN)
            with closing(syscalls.pidfd_open(pid)) as pidfd:
                poller.register(pidfd, select.POLLIN)
                while (ready := dict(poller.poll(5000))) and pidfd not in ready:
                    event = os.read(group, 4096)
                    (fd,) = struct.unpack_from("=i", event, 16)
                    os.write(group, struct.pack("=iI", fd, abi.FAN_ALLOW))
                    os.close(fd)
                    answered = True
        finally:
            # Closing the group lets a reader go that still waits for an answer; this one ends either way.
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
    need(answered and status == 0, "a read of the file asked nobody")
    return ""


def fuse_files(scratch: str) -> str:
    """A child mounts EROFS with its data from a FUSE file that we serve."""
    _, meta, data = write_erofs(scratch)
    with open(data, "rb") as file:
        content = file.read()
    device = fuse.open_device()
    with closing(device), closing(fuse.mount(device)) as mount:

        def reader() -> None:
            with closing(mounts.mount_erofs(meta, f"{procfs.fd_path(mount)}/data")) as erofs_mount:
                need(read_at(erofs_mount, "probe") == CONTENT, "the file reads wrongly")

        pid = os.fork()
        if pid == 0:
            try:
                reader()
            except BaseException:
                os._exit(1)
            os._exit(0)
        buffer, status = bytearray(fuse.REQUEST_BYTES), 0
        try:
            poller = select.poll()
            poller.register(device, select.POLLIN)
            with closing(syscalls.pidfd_open(pid)) as pidfd:
                poller.register(pidfd, select.POLLIN)
                while (ready := dict(poller.poll(5000))) and pidfd not in ready:
                    if fuse.receive(device, buffer):
                        _serve_fuse(device, fuse.Request(buffer), content)
        finally:
            os.kill(pid, signal.SIGKILL)
            # Its mount lets go of the file when it ends, and asks for that.
            while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
                if fuse.receive(device, buffer):
                    _serve_fuse(device, fuse.Request(buffer), content)
                select.select([device], [], [], 0.01)
            status = ended[1]
    need(status == 0, "a file of it cannot be mounted from")
    return ""


def _serve_fuse(device: int, request: fuse.Request, content: bytes) -> None:
    node = 2
    answers: dict[int, Callable[[], bytes]] = {
        fuse.LOOKUP: lambda: fuse.entry(node, len(content)),
        fuse.GETATTR: lambda: fuse.attributes(request.node, None if request.node == fuse.ROOT else len(content)),
        fuse.OPEN: fuse.opened,
        fuse.READ: lambda: content[request.read()[0] :][: request.read()[1]],
        fuse.RELEASE: lambda: b"",
        fuse.INIT: lambda: fuse.init_answer(request),
    }
    if request.opcode in answers:
        fuse.reply(device, request.unique, answers[request.opcode]())
    elif request.opcode not in fuse.SILENT:
        fuse.refuse(device, request.unique, errno.ENOSYS)
