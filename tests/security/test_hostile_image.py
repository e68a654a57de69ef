# SPDX-License-Identifier: Apache-2.0
"""T01, T03, T05: layers made to lead the building of a sandbox astray. Each is refused, or is harmless."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.api.errors import Internal
from opendsec.api.exec import Pty
from opendsec.images import erofs
from opendsec.images.layers import DATA, META, LayerRef
from opendsec.kernel import procfs
from tests.boxes import Box, Node

_digests = itertools.count(1)
Build = Callable[[Path], None]


def make_layer(folder: Path, build: Build) -> LayerRef:
    """A layer of the tree that `build` makes, packed as it is: owners, modes and devices included."""
    source, out = folder / "tree", folder / "layer"
    source.mkdir()
    out.mkdir()
    build(source)
    erofs.pack(source, out, all_root=False)
    return LayerRef(f"sha256:{next(_digests):064x}", out / META, out / DATA)


@pytest.fixture
def sandbox_of(node: Node, tmp_path: Path) -> Callable[[Build], Box]:
    """A sandbox with one hostile layer on top of the base; the caller destroys it."""

    def create(build: Build) -> Box:
        return node.create(node.placement(layers=[*node.layers, make_layer(tmp_path, build)]))

    return create


def replace(path: str, make: Callable[[Path], None]) -> Build:
    def build(tree: Path) -> None:
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        make(target)

    return build


def link_to(text: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(text)


def file_there(path: Path) -> None:
    path.write_text("a file")


MOUNT_POINTS = {
    "proc is a link to the root": replace("proc", link_to("/")),
    "proc is a link into /etc": replace("proc", link_to("etc")),
    "proc is a link upwards": replace("proc", link_to("../../../../../../etc")),
    "proc is a link to itself": replace("proc", link_to("proc")),
    "proc is a file": replace("proc", file_there),
    "proc is a FIFO": replace("proc", os.mkfifo),
    "dev is a link into /etc": replace("dev", link_to("/etc")),
    "dev is a link to /proc": replace("dev", link_to("proc/self")),
    "dev is a file": replace("dev", file_there),
}


@pytest.mark.parametrize("build", MOUNT_POINTS.values(), ids=MOUNT_POINTS.keys())
def test_t01_where_something_is_to_be_mounted(node: Node, sandbox_of: Callable[[Build], Box], build: Build) -> None:
    before = procfs.mountinfo()
    with pytest.raises(Internal, match="cannot create the sandbox"):
        sandbox_of(build)
    assert node.backend.leftovers() == []
    assert [mount.mount_id for mount in procfs.mountinfo()] == [mount.mount_id for mount in before]
    with node.box() as box:
        assert box.works()


def masks(tree: Path) -> None:
    """Names that will be covered, already there, in another shape: /proc and /dev of the image are beneath what is mounted."""
    for name in ("proc/keys", "proc/sys", "proc/acpi", "dev/null", "dev/pts", "dev/shm", "dev/fd"):
        path = tree / name
        path.parent.mkdir(exist_ok=True)
        path.symlink_to("/etc/passwd")


def test_what_the_image_has_beneath_a_mount_is_not_seen(sandbox_of: Callable[[Build], Box]) -> None:
    box = sandbox_of(masks)
    try:
        assert box.sh("test -c /dev/null && test -d /dev/pts && test -d /proc/sys/kernel && ! test -L /proc/keys; echo $?").text == "0\n"
        assert box.run("tty", pty=Pty(rows=5, cols=5)).out == b"/dev/pts/0\r\n"
    finally:
        box.destroy()


def without_anything(tree: Path) -> None:
    (tree / "hello").write_text("x")


def test_an_image_without_any_directory(node: Node, tmp_path: Path) -> None:
    """What is to be mounted gets its place; there is nothing to execute, and that is said."""
    box = node.create(node.placement(layers=[make_layer(tmp_path, without_anything)]))
    try:
        result = box.run("sh")
        assert "cannot execute" in result.exit.not_started
        root = procfs.path_of(box.pid, "root")
        assert sorted(os.listdir(root)) == ["dev", "hello", "proc"]
    finally:
        box.destroy()


def devices(tree: Path) -> None:
    (tree / "nodes").mkdir()
    for name, kind, major, minor in (
        ("mem", 0o020000, 1, 1),
        ("null", 0o020000, 1, 3),
        ("disk", 0o060000, 254, 0),
        ("kmsg", 0o020000, 1, 11),
    ):
        os.mknod(tree / "nodes" / name, kind | 0o666, os.makedev(major, minor))
        os.chmod(tree / "nodes" / name, 0o666)


def test_t03_devices_of_a_layer_cannot_be_opened(sandbox_of: Callable[[Build], Box]) -> None:
    box = sandbox_of(devices)
    try:
        source = """
import errno, os
results = set()
for name in ("mem", "null", "disk", "kmsg"):
    assert os.stat("/nodes/" + name).st_rdev
    for flags in (os.O_RDONLY, os.O_WRONLY):
        try: os.open("/nodes/" + name, flags)
        except OSError as error: results.add(errno.errorcode[error.errno])
        else: results.add("opened")
if os.getuid() == 0: os.rename("/nodes/null", "/nodes/moved")  # a copy on the writable side
try: os.open("/nodes/moved", os.O_RDONLY)
except OSError as error: results.add(errno.errorcode[error.errno])
print(results - {"ENOENT"})
"""
        for user in ("nobody", "root"):
            assert box.python(source, user=user).text == "{'EACCES'}\n"
    finally:
        box.destroy()


def privileged(tree: Path) -> None:
    bin_ = tree / "usr" / "local" / "bin"
    bin_.mkdir(parents=True)
    for name, mode in (("suid", 0o6755), ("caps", 0o755)):
        (bin_ / name).write_bytes(Path("/bin/cat").read_bytes())
        os.chmod(bin_ / name, mode)
    every = (1 << 41) - 1
    os.setxattr(bin_ / "caps", "security.capability", struct.pack("<5I", 0x2000001, every & 0xFFFFFFFF, 0, every >> 32, 0))


def test_t05_privileged_programs_of_a_layer(sandbox_of: Callable[[Build], Box]) -> None:
    box = sandbox_of(privileged)
    try:
        assert box.sh("stat -c %a /usr/local/bin/suid").text == "6755\n"
        for program in ("suid", "caps"):
            status = box.run(program, "/proc/self/status", user="nobody").text
            assert "CapEff:\t0000000000000000" in status and "CapPrm:\t0000000000000000" in status
            assert "Uid:\t65534\t65534\t65534\t65534" in status
    finally:
        box.destroy()


def owned_by_many(tree: Path) -> None:
    for uid in (0, 1000, 65_534, 65_535, 65_536, 1_000_000, 2**31):
        (tree / f"of{uid}").write_text("x")
        os.chown(tree / f"of{uid}", uid, uid)


def test_t08_owners_of_a_layer_are_mapped(sandbox_of: Callable[[Build], Box]) -> None:
    """Ids beyond the sandbox's range belong to nobody in it, and never to an id of the host or of another sandbox."""
    box = sandbox_of(owned_by_many)
    try:
        seen = {}
        for uid in (0, 1000, 65_534, 65_535):
            stats = os.stat(f"{procfs.path_of(box.pid, 'root')}/of{uid}")
            seen[uid] = stats.st_uid - box.uid_base
        assert seen == {uid: uid for uid in seen}
        for uid in (65_536, 1_000_000, 2**31):
            assert box.sh(f"stat -c %u /of{uid}").text == "65534\n"
            assert box.sh(f"chown 0 /of{uid} || cat /of{uid} > /dev/null || rm -f /of{uid}; echo x >> /of{uid}").code != 0
    finally:
        box.destroy()


def overlay_marks(tree: Path) -> None:
    """Extended attributes by which overlay leads a name elsewhere, or hides one."""
    folder = tree / "redirected"
    folder.mkdir()
    for name, value in (("redirect", b"/../../../../etc"), ("opaque", b"y"), ("origin", bytes(30)), ("metacopy", b"")):
        os.setxattr(folder, f"trusted.overlay.{name}", value)
    file = tree / "copied"
    file.write_text("")
    os.setxattr(file, "trusted.overlay.metacopy", b"")
    os.setxattr(file, "trusted.overlay.redirect", b"/../../../../../etc/shadow")


def test_t01_overlays_own_marks_in_a_layer(sandbox_of: Callable[[Build], Box]) -> None:
    """They are followed among the layers at most."""
    try:
        box = sandbox_of(overlay_marks)
    except Internal:
        return  # refused
    try:
        box.sh("ls -R /redirected; cat /copied; echo x >> /copied; mv /redirected /elsewhere")
        said = box.sh("cat /redirected/hostname /elsewhere/hostname /copied 2>/dev/null").out
        assert Path("/etc/hostname").read_bytes() not in said or not Path("/etc/hostname").read_bytes().strip()
        assert b"root:" not in said
        assert box.works()
    finally:
        box.destroy()


def programs(tree: Path) -> None:
    """Programs of the image that a command would run by name."""
    bin_ = tree / "usr" / "local" / "bin"
    bin_.mkdir(parents=True)
    (bin_ / "fifo").symlink_to("/pipe")
    os.mkfifo(tree / "pipe", 0o777)
    (bin_ / "loop").symlink_to("loop")
    (bin_ / "terminal").symlink_to("/dev/tty")
    (bin_ / "input").symlink_to("/proc/self/fd/0")
    (bin_ / "root").symlink_to("/proc/self/root")
    (bin_ / "spawner").symlink_to("/proc/self/fd/3")
    (bin_ / "lost").write_text("#!/nonexistent/interpreter\n")
    (bin_ / "endless").write_text("#!/usr/local/bin/endless\n")
    (bin_ / "binary").write_bytes(b"\x7fELF" + bytes(100))
    for name in ("lost", "endless", "binary"):
        os.chmod(bin_ / name, 0o755)


def test_programs_that_are_traps(node: Node, sandbox_of: Callable[[Build], Box]) -> None:
    spawner = node.spawner.pid
    box = sandbox_of(programs)
    try:
        for name in ("fifo", "loop", "terminal", "input", "root", "spawner", "lost", "endless", "binary"):
            result = box.run(name)
            assert result.exit.not_started, (name, result)
            assert result.out == b""
        for cwd in ("/pipe", "/proc/self/fd/0", "/proc/self/fd/3", "/proc/1/root", "/proc/1/cwd"):
            result = box.run("pwd", cwd=cwd)
            assert result.exit.not_started or result.out == b"/\n", (cwd, result)
        assert box.works()
    finally:
        box.destroy()
    assert node.spawner.pid == spawner


CORRUPT = {
    "cut": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "no superblock": lambda data: data[:1024] + bytes(64) + data[1088:],
    "a root that is not there": lambda data: data[: 1024 + 14] + b"\xff\xff" + data[1024 + 16 :],
}


@pytest.mark.parametrize("damage", CORRUPT.values(), ids=CORRUPT.keys())
def test_a_damaged_layer(node: Node, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    """The kernel or the backend refuses it; if the kernel takes it, nothing worse happens than errors inside."""
    layer = make_layer(tmp_path, without_anything)
    layer.meta.write_bytes(damage(layer.meta.read_bytes()))
    try:
        box = node.create(node.placement(layers=[*node.layers, layer]))
    except Internal:
        pass
    else:
        box.destroy()
    assert node.backend.leftovers() == []
    with node.box() as healthy:
        assert healthy.works()
