# SPDX-License-Identifier: Apache-2.0
"""Layers made of directories, on the real kernel: what goes in comes out, and nothing else happens."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import py_compile
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.api.errors import Denied, Internal, InvalidRequest, Unavailable
from opendsec.api.images import BuildEvent, BuildRequest, DebianSource, DirectorySource, ImageConfig, ImageInfo, LayerInfo
from opendsec.images import erofs, tree
from opendsec.images.build import build
from opendsec.images.store import ImageStore
from opendsec.kernel import abi, mounts, syscalls
from tests.support import requires

pytestmark = requires("erofs_device")


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    store = ImageStore(tmp_path / "images")
    store.prepare()
    return store


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    source.chmod(0o755)
    return source


class Built:
    def __init__(self) -> None:
        self.events: list[BuildEvent] = []

    def logs(self) -> list[str]:
        return [event.message for event in self.events if event.kind == "log"]


async def make(store: ImageStore, path: Path, built: Built | None = None, **fields: object) -> LayerInfo:
    options = {name: fields.pop(name) for name in ("prefix", "owner") if name in fields}
    request = BuildRequest(
        name="thing",
        kind="workspace",
        source=DirectorySource(path=os.fspath(path), **options),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )
    result = await build(store, request, progress=(built or Built()).events.append, allow_host_paths=True)
    assert isinstance(result, LayerInfo)
    return result


@contextlib.contextmanager
def opened(store: ImageStore, digest: str) -> Iterator[Path]:
    """The root of a layer, mounted but attached nowhere, as a path through its descriptor."""
    ref = store.layer_ref(digest)
    fd = mounts.mount_erofs(ref.meta, ref.data)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def names(root: Path) -> list[bytes]:
    found = []
    for folder, folders, files in os.walk(os.fsencode(root)):
        found += [os.path.relpath(os.path.join(folder, name), os.fsencode(root)) for name in (*folders, *files)]
    return sorted(found)


async def test_everything_of_a_tree_comes_through(store: ImageStore, source: Path) -> None:
    (source / "dir").mkdir(mode=0o2750)
    (source / "dir").chmod(0o2750)
    (source / "dir" / "setuid").write_bytes(b"\x7fELF")
    (source / "dir" / "setuid").chmod(0o4755)
    os.link(source / "dir" / "setuid", source / "hard")
    os.symlink("/etc/passwd", source / "absolute")
    os.symlink("nowhere", source / "broken")
    (source / os.fsdecode(b"bytes-\xff\x01\n")).write_text("named")
    (source / "empty").touch()
    (source / "empty-dir").mkdir()
    os.mkfifo(source / "fifo")
    with open(source / "sparse", "wb") as file:
        file.seek(32 << 20)
        file.write(b"end")
    os.setxattr(source / "empty", "user.note", b"\0value")
    os.setxattr(source / "dir", "trusted.note", b"dir")
    capability = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
    os.setxattr(source / "hard", "security.capability", capability)
    os.chown(source / "empty", 65_535, 1234)
    os.symlink("x", source / "owned-link")
    os.lchown(source / "owned-link", 33, 33)

    layer = await make(store, source, owner="keep")

    with opened(store, layer.digest) as root:
        assert names(root) == names(source)
        for name in names(source):
            ours, theirs = (os.lstat(os.path.join(os.fsencode(top), name)) for top in (root, source))
            assert (ours.st_mode, ours.st_uid, ours.st_gid) == (theirs.st_mode, theirs.st_uid, theirs.st_gid), name
            assert stat.S_ISDIR(ours.st_mode) or (ours.st_size, ours.st_nlink) == (theirs.st_size, theirs.st_nlink), name
        assert os.stat(root / "hard").st_ino == os.stat(root / "dir" / "setuid").st_ino
        assert os.readlink(root / "absolute") == "/etc/passwd"
        assert (root / os.fsdecode(b"bytes-\xff\x01\n")).read_text() == "named"
        assert (root / "sparse").read_bytes()[-4:] == b"\0end"
        assert os.getxattr(root / "empty", "user.note") == b"\0value"
        assert os.getxattr(root / "dir", "trusted.note") == b"dir"
        assert os.getxattr(root / "dir" / "setuid", "security.capability") == capability
        assert {os.lstat(os.path.join(os.fsencode(root), name)).st_mtime for name in names(root)} == {erofs.TIMESTAMP}
    assert layer.data_bytes < 1 << 20  # a hole takes no room
    store.verify(layer.digest)


async def test_the_same_tree_gives_the_same_layer(store: ImageStore, source: Path, tmp_path: Path) -> None:
    for number in range(50):
        (source / f"{number}").write_bytes(bytes([number]) * 5000)
    other = tmp_path / "elsewhere"
    other.mkdir()
    other.chmod(0o755)
    for number in reversed(range(50)):
        (other / f"{number}").write_bytes(bytes([number]) * 5000)
        os.utime(other / f"{number}", (number, number))
    first, second = await make(store, source), await make(store, other)
    assert first.digest == second.digest
    assert len(store.list().layers) == 1
    fd = os.open(source, os.O_RDONLY)
    try:
        assert tree.digest(fd).digest == first.digest  # the source itself has it, if nothing had to be changed
    finally:
        os.close(fd)


async def test_owner_root_is_the_default(store: ImageStore, source: Path) -> None:
    (source / "theirs").touch()
    os.chown(source / "theirs", 100_000, 100_000)
    with opened(store, (await make(store, source)).digest) as root:
        assert (os.stat(root / "theirs").st_uid, os.stat(root / "theirs").st_gid) == (0, 0)


async def test_owners_that_a_sandbox_does_not_have_are_refused(store: ImageStore, source: Path) -> None:
    (source / "theirs").touch()
    os.chown(source / "theirs", 65_536, 0)
    with pytest.raises(InvalidRequest, match="'theirs' belongs to 65536:0") as caught:
        await make(store, source, owner="keep")
    assert caught.value.field == "source.owner"
    assert os.listdir(store.root / "tmp") == []


async def test_a_prefix_puts_the_tree_deeper(store: ImageStore, source: Path) -> None:
    (source / "file").touch()
    source.chmod(0o750)
    with opened(store, (await make(store, source, prefix="/tmp/a b/repo/")).digest) as root:
        assert names(root) == [b"tmp", b"tmp/a b", b"tmp/a b/repo", b"tmp/a b/repo/file"]
        modes = [os.stat(root / path).st_mode & 0o7777 for path in (".", "tmp", "tmp/a b", "tmp/a b/repo")]
        assert modes == [0o755, 0o1777, 0o755, 0o750]  # not a /tmp that only root may write


async def test_patterns_devices_and_sockets_are_left_out(store: ImageStore, source: Path) -> None:
    for path in ("keep/a.py", "keep/a.pyc", ".git/objects/x", "deep/.git/config", "build/x", "keep/build"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).touch()
    (source / "keep").chmod(0o700)
    os.setxattr(source / "keep", "user.note", b"kept")
    os.mknod(source / "keep" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(source / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 0))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(source / "socket"))
        built = Built()
        layer = await make(store, source, built, exclude=(".git", "*.pyc", "/build"))
    with opened(store, layer.digest) as root:
        assert names(root) == [b"deep", b"keep", b"keep/a.py"]
        assert os.stat(root / "keep").st_mode & 0o7777 == 0o700
        assert os.getxattr(root / "keep", "user.note") == b"kept"
    assert sorted(built.logs()) == [
        "left out block device 'disk'",
        "left out character device 'keep/null'",
        "left out socket 'socket'",
    ]
    assert (source / ".git" / "objects" / "x").exists()


async def test_links_are_not_followed_out(store: ImageStore, source: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    os.symlink(tmp_path / "outside", source / "way-out")
    with opened(store, (await make(store, source)).digest) as root:
        assert names(root) == [b"way-out"]
        assert os.readlink(root / "way-out") == os.fspath(tmp_path / "outside")


async def test_what_is_mounted_in_the_source_stays_out(store: ImageStore, source: Path) -> None:
    (source / "mounted").mkdir()
    fd = mounts.tmpfs(1 << 20, 10)
    try:
        os.close(os.open("secret", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=fd))
        mounts.attach(fd, abi.AT_FDCWD, source / "mounted")
    finally:
        os.close(fd)
    built = Built()
    try:
        layer = await make(store, source, built)
    finally:
        syscalls.umount2(source / "mounted")
    with opened(store, layer.digest) as root:
        assert names(root) == [b"mounted"]
    assert built.logs() == ["left empty: something is mounted on 'mounted'"]


async def test_compiled_python_stays_valid(store: ImageStore, source: Path) -> None:
    (source / "module.py").write_text("x = 1\n")
    compiled = Path(py_compile.compile(os.fspath(source / "module.py"), doraise=True))
    os.link(compiled, compiled.with_suffix(".also.pyc"))
    before = compiled.read_bytes()
    with opened(store, (await make(store, source)).digest) as root:
        inside = root / compiled.relative_to(source)
        time, size = struct.unpack("<II", inside.read_bytes()[8:16])
        assert (time, size) == (int((root / "module.py").stat().st_mtime), (root / "module.py").stat().st_size)
        assert inside.read_bytes()[16:] == before[16:]
        assert inside.stat().st_mode == compiled.stat().st_mode
    assert compiled.read_bytes() == before


async def test_a_layer_may_be_empty(store: ImageStore, source: Path) -> None:
    layer = await make(store, source)
    assert layer.data_bytes == 0
    with opened(store, layer.digest) as root:
        assert names(root) == []


async def test_a_base_becomes_an_image(store: ImageStore, source: Path) -> None:
    (source / "file").touch()
    config = ImageConfig(env={"A": "1"}, user="nobody", workdir="/w", entrypoint=("sh",))
    built = Built()
    request = BuildRequest(name="mini:2", source=DirectorySource(path=os.fspath(source)), config=config)
    image = await build(store, request, progress=built.events.append, allow_host_paths=True)
    assert isinstance(image, ImageInfo)
    assert store.resolve("mini:2").config == config
    assert store.list().layers[0].names == ("base:mini@2",)
    assert built.events[-1] == BuildEvent(kind="done", message="mini:2", image=image)
    assert [event.message for event in built.events if event.kind == "step"] == ["reading the tree", "packing", "checking", "publishing"]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": "UPPER"}, "name"),
        ({"name": "x", "version": "a@b"}, "version"),
        ({"exclude": ("ok", "")}, "exclude[1]"),
        ({"exclude": ("a\0b",)}, "exclude[0]"),
        ({"config": ImageConfig(workdir="relative")}, "config.workdir"),
        ({"config": ImageConfig(env={"": "x"})}, "config.env"),
        ({"config": ImageConfig(user="a b")}, "config.user"),
        ({"kind": "toolkit", "config": ImageConfig(workdir="/w")}, "config"),
        ({"source": DirectorySource(path="relative")}, "source.path"),
        ({"source": DirectorySource(path="/x\0y")}, "source.path"),
        ({"source": DirectorySource(path="/", prefix="x")}, "source.prefix"),
        ({"source": DirectorySource(path="/", prefix="/a/../../b")}, "source.prefix"),
        ({"source": DebianSource(suite="--hook")}, "source.suite"),
    ],
)
async def test_bad_requests_name_the_field_and_start_nothing(store: ImageStore, fields: dict[str, object], field: str) -> None:
    request = BuildRequest(**{"name": "x", "source": DirectorySource(path="/usr"), **fields})  # type: ignore[arg-type]
    events: list[BuildEvent] = []
    with pytest.raises(InvalidRequest) as caught:
        await build(store, request, progress=events.append, allow_host_paths=True)
    assert caught.value.field == field
    assert events == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nosuch", "No such file"),
        ("file", "Not a directory"),
        ("images/..", "contains the image store"),
        ("images", "contains the image store"),
    ],
)
async def test_sources_that_cannot_be_are_refused(store: ImageStore, tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match=message) as caught:
        await make(store, tmp_path / path)
    assert caught.value.field == "source.path"
    assert os.listdir(store.root / "tmp") == []


async def test_host_paths_need_leave(store: ImageStore, source: Path) -> None:
    request = BuildRequest(name="x", source=DirectorySource(path=os.fspath(source)))
    with pytest.raises(Denied):
        await build(store, request, progress=Built().events.append, allow_host_paths=False)


async def test_no_space_is_no_fault_of_the_caller(tmp_path: Path, source: Path) -> None:
    (source / "random").write_bytes(os.urandom(4 << 20))
    (tmp_path / "small").mkdir()
    fd = mounts.tmpfs(2 << 20, 100)
    try:
        mounts.attach(fd, abi.AT_FDCWD, tmp_path / "small")
    finally:
        os.close(fd)
    try:
        store = ImageStore(tmp_path / "small" / "images")
        store.prepare()
        with pytest.raises(Unavailable, match="no space left"):
            await make(store, source)
        assert os.listdir(store.root / "tmp") == []
    finally:
        syscalls.umount2(tmp_path / "small")


# --- ends before the end -------------------------------------------------------------------------------------------


def slow(source: Path) -> Path:
    """A source that takes hours to pack."""
    with open(source / "huge", "wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    return source


async def test_cancelling_leaves_nothing(store: ImageStore, source: Path) -> None:
    slow(source)
    packing = asyncio.Event()

    def progress(event: BuildEvent) -> None:
        if event.message == "packing":
            packing.set()

    request = BuildRequest(name="x", source=DirectorySource(path=os.fspath(source)), exclude=("nothing-*",))
    task = asyncio.create_task(build(store, request, progress=progress, allow_host_paths=True))
    await packing.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(store.root / "tmp") == []
    assert store.list().images == ()


async def test_a_worker_that_dies_is_our_fault_and_leaves_nothing(store: ImageStore, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(source)
    workers: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def remember(*arguments: object, **options: object) -> asyncio.subprocess.Process:
        workers.append(await start(*arguments, **options))  # type: ignore[arg-type]
        return workers[0]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", remember)

    def progress(event: BuildEvent) -> None:
        if event.message == "packing":
            workers[0].send_signal(signal.SIGKILL)

    request = BuildRequest(name="x", source=DirectorySource(path=os.fspath(source)))
    with pytest.raises(Internal, match="status -9"):
        await build(store, request, progress=progress, allow_host_paths=True)
    assert os.listdir(store.root / "tmp") == []


async def test_a_failing_listener_stops_the_build(store: ImageStore, source: Path) -> None:
    slow(source)

    def progress(event: BuildEvent) -> None:
        raise ConnectionResetError("the client went away")

    request = BuildRequest(name="x", source=DirectorySource(path=os.fspath(source)))
    with pytest.raises(ConnectionResetError):
        await build(store, request, progress=progress, allow_host_paths=True)
    assert os.listdir(store.root / "tmp") == []


KILLED_EDGE = """
import asyncio, os, signal, sys
from pathlib import Path
from opendsec.api.images import BuildRequest, DirectorySource
from opendsec.images.build import build
from opendsec.images.store import ImageStore

def progress(event):
    if event.message == "packing":
        os.kill(os.getpid(), signal.SIGKILL)

store, source = sys.argv[1:]
request = BuildRequest(name="x", source=DirectorySource(path=source))
asyncio.run(build(ImageStore(Path(store)), request, progress=progress, allow_host_paths=True))
"""


async def test_a_killed_edge_takes_its_builds_along(store: ImageStore, source: Path) -> None:
    slow(source)
    edge = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED_EDGE, os.fspath(store.root), os.fspath(source))
    assert await edge.wait() == -signal.SIGKILL
    (workspace,) = os.listdir(store.root / "tmp")
    fd = os.open(store.root / "tmp" / workspace, os.O_RDONLY)
    try:
        await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)  # everything of the build holds this lock: now all of it is gone
    finally:
        os.close(fd)
    ImageStore(store.root).prepare()
    assert os.listdir(store.root / "tmp") == []
