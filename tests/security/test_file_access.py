# SPDX-License-Identifier: Apache-2.0
"""Attacks on the file operations: nothing outside the sandbox's root is ever read, written, made, given away or removed.

Two stages. A directory of the host stands for the root, with the bait on the same file system next to it: no namespace
helps, only the way paths are resolved. Then the stand-in for a sandbox, with namespaces, /proc and /dev of its own.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Denied, Internal, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded
from opendsec.kernel import fsuser, syscalls
from opendsec.runtime.files import SandboxFiles, tarball
from opendsec.runtime.files.access import chunks
from opendsec.runtime.files.tarball import Member
from opendsec.runtime.files.walk import Cursor
from tests.integration.files.box import UID_BASE, Box
from tests.support import ROOT, SRC

FLIPS = 15_000
BAIT = b"never to be seen inside"

# --- a directory for a root ----------------------------------------------------------------------------------------


class Jail:
    """`root` is what the sandbox has; `outside` is bait, equal in shape to what is inside."""

    def __init__(self, top: Path) -> None:
        self.root = top / "root"
        self.outside = top / "outside"
        self.root.mkdir()
        self.fill(self.outside, BAIT)
        os.chown(self.root, UID_BASE, UID_BASE)
        self.files = SandboxFiles(self.open_root, UID_BASE)
        self._before = self.look()

    def open_root(self) -> int:
        return os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    @staticmethod
    def fill(folder: Path, content: bytes) -> None:
        (folder / "sub/below").mkdir(parents=True)
        for name in ("file", "sub/file", "sub/below/file"):
            (folder / name).write_bytes(content)
        folder.chmod(0o700)

    def look(self) -> dict[str, tuple[object, ...]]:
        """All about the bait: names, types, modes, owners, links, times of change, content."""
        found: dict[str, tuple[object, ...]] = {}
        for folder, folders, names in os.walk(self.outside):
            for name in [".", *folders, *names]:
                path = os.path.join(folder, name)
                s = os.lstat(path)
                content = Path(path).read_bytes() if stat.S_ISREG(s.st_mode) else b""
                found[path] = (s.st_mode, s.st_uid, s.st_gid, s.st_nlink, s.st_size, s.st_mtime_ns, s.st_ctime_ns, content)
        return found

    def check(self) -> None:
        assert self.look() == self._before


@pytest.fixture
def jail(tmp_path: Path) -> Iterator[Jail]:
    made = Jail(tmp_path)
    yield made
    made.check()


@contextmanager
def racing(jail: Jail, *pairs: str, flips: int = FLIPS) -> Iterator[Callable[[], bool]]:
    """Another process exchanges these names; the yielded function says whether it still does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.security.racer", str(jail.root), str(flips), *pairs],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{SRC.parent}:{ROOT}"},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout as out:
        try:
            assert out.readline() == b"racing\n"
            yield lambda: not select.select([out], [], [], 0)[0]
            assert int(out.readline()) > flips // 20
        finally:
            process.kill()
            process.wait()


def read(files: SandboxFiles, path: bytes) -> bytes:
    reader = files.open_read(path)
    try:
        return b"".join(chunks(reader))
    finally:
        reader.close()


def write(files: SandboxFiles, path: bytes, data: bytes = b"from outside", **options: object) -> None:
    settings: dict[str, object] = {"mode": 0o666, "user": "1:1", "append": False, "parents": False}
    file = files.open_write(path, **{**settings, **options})  # type: ignore[arg-type]
    file.write(data)
    file.commit()


def archive_of(files: SandboxFiles, path: bytes) -> bytes:
    fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    try:
        files.archive(path, fd)
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def extract(files: SandboxFiles, path: bytes, *members: Member, user: str | None = None) -> None:
    fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    try:
        for member in members:
            os.write(fd, tarball.header(member) + bytes(member.size) + tarball.padding(member.size))
        os.write(fd, tarball.END_OF_ARCHIVE)
        os.lseek(fd, 0, os.SEEK_SET)
        files.extract(path, fd, user=user)
    finally:
        os.close(fd)


def entry(name: bytes, kind: tarball.MemberKind = "file", link: bytes = b"", size: int = 0) -> Member:
    return Member(name, kind, size, 0o777, 1, 1, 0, link)


def watch(files: SandboxFiles, path: bytes) -> None:
    files.open_watch(path).close()


def make(jail: Jail, path: bytes) -> None:
    """Something to be removed, made inside; it does not matter if it cannot be made just now."""
    try:
        jail.files.mkdir(path, mode=0o755, user=None, parents=True)
        write(jail.files, path + b"/x")
    except OpenDSecError:
        pass


Operation = Callable[[SandboxFiles], object]
OPERATIONS: dict[str, Operation] = {
    "read": lambda f: read(f, b"/spot/file"),
    "read deeper": lambda f: read(f, b"/spot/sub/below/file"),
    "read with ..": lambda f: read(f, b"/spot/sub/../file"),
    "list": lambda f: f.list(b"/spot/sub"),
    "stat": lambda f: f.stat(b"/spot/file"),
    "write": lambda f: write(f, b"/spot/file"),
    "write new": lambda f: write(f, b"/spot/sub/new"),
    "write with ..": lambda f: write(f, b"/spot/sub/../new"),
    "write with parents": lambda f: write(f, b"/spot/sub/made/for/it", parents=True),
    "append": lambda f: write(f, b"/spot/file", append=True),
    "mkdir": lambda f: f.mkdir(b"/spot/sub/a/b/c", mode=0o777, user="1:1", parents=True),
    "chmod": lambda f: f.chmod(b"/spot/file", mode=0o4777, user="1:1"),
    "chmod directory": lambda f: f.chmod(b"/spot", mode=0o777, user="1:1"),
    "move away": lambda f: f.move(b"/spot/file", b"/taken"),
    "move there": lambda f: f.move(b"/taken", b"/spot/file"),
    "remove": lambda f: f.remove(b"/spot/file", recursive=False),
    "remove tree": lambda f: f.remove(b"/spot/victim", recursive=True),
    "archive": lambda f: archive_of(f, b"/spot"),
    "archive above": lambda f: archive_of(f, b"/"),
    "extract": lambda f: extract(
        f, b"/spot", entry(b"file", size=9), entry(b"sub/file"), entry(b"sub/x/y/z"), entry(b"s", "symlink", b"/")
    ),
    "extract above": lambda f: extract(
        f, b"/", entry(b"spot/file", size=9), entry(b"spot/sub/n/o"), entry(b"h", "hard_link", b"spot/file")
    ),
    "extract links": lambda f: extract(f, b"/", entry(b"spot/file", "hard_link", b"kept/file"), entry(b"spot/sub", "directory")),
    "watch": lambda f: watch(f, b"/spot/sub"),
}
LINKS = {"absolute": "{outside}", "relative": "../../../../../../../../../../../../../../..{outside}", "next door": "../outside"}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_directory_that_becomes_a_link_and_back(jail: Jail, name: str) -> None:
    """Each operation meets links of each kind, in its path and below where its walk already is."""
    jail.fill(jail.root / "spot", b"inside")
    jail.fill(jail.root / "kept", b"inside")
    pairs: list[str] = []
    for number, target in enumerate(LINKS.values()):
        link = jail.root / f"link{number}"
        link.symlink_to(target.format(outside=jail.outside))
        pairs += ["spot", link.name]
    (jail.root / "kept/link").symlink_to(jail.outside / "sub")
    pairs += ["spot/sub", "kept/link"]
    seen = set()
    with racing(jail, *pairs, flips=FLIPS // 4) as still:
        while still():
            make(jail, b"/spot/victim/deeper")
            try:
                result = OPERATIONS[name](jail.files)
                assert BAIT not in (result if isinstance(result, bytes) else b"")
                seen.add("done")
            except OpenDSecError as error:
                assert not isinstance(error, Internal), error
                seen.add(type(error).__name__)
    jail.check()


@pytest.mark.slow
def test_a_file_that_becomes_something_else(jail: Jail) -> None:
    """A regular file, a FIFO, a link out, a socket, all under one name in turn: nothing blocks, nothing else is read."""
    (jail.root / "file").write_bytes(b"inside")
    os.mkfifo(jail.root / "fifo")
    (jail.root / "link").symlink_to("../outside/file")
    here = os.open(jail.root, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/socket")
    os.close(here)
    with racing(jail, "file", "fifo", "file", "link", "file", "socket") as still:
        while still():
            for operation in (
                lambda: read(jail.files, b"/file"),
                lambda: archive_of(jail.files, b"/"),
                lambda: write(jail.files, b"/file", append=True, user=None, mode=None),
                lambda: jail.files.chmod(b"/file", mode=0o644, user=None),
            ):
                try:
                    result = operation()
                    assert BAIT not in (result if isinstance(result, bytes) else b"")
                except OpenDSecError as error:
                    assert not isinstance(error, Internal), error


@pytest.mark.slow
def test_a_tree_that_moves_while_it_is_removed(jail: Jail) -> None:
    """What is removed is what was in the tree. A directory moved out of it must not take the walker along to its new parent."""
    for number in range(50):
        (jail.root / f"precious/{number}").mkdir(parents=True)
        (jail.root / f"precious/{number}/kept").write_bytes(b"")
    for name in ("precious/swap", "precious/7/swap"):
        (jail.root / name).mkdir()
    conflicts = 0
    with racing(jail, "tree/a/b", "precious/swap", "tree/a", "precious/7/swap") as still:
        while still():
            for folder in (b"/tree/a/b/c/d", b"/precious/swap", b"/precious/7/swap"):
                make(jail, folder)
            try:
                jail.files.remove(b"/tree", recursive=True)
            except OpenDSecError as error:
                assert isinstance(error, Conflict | NotFound), error
                conflicts += 1
    assert all((jail.root / f"precious/{number}/kept").exists() for number in range(50))


def test_going_up_from_a_directory_that_was_moved(jail: Jail) -> None:
    (jail.root / "tree/a/b").mkdir(parents=True)
    (jail.root / "other").mkdir()
    root = jail.open_root()
    try:
        with Cursor(root) as cursor:
            for name in (b"tree", b"a", b"b"):
                cursor.enter(name)
            (jail.root / "tree/a/b").rename(jail.root / "other/b")
            with pytest.raises(Conflict, match="moved"):
                cursor.leave()
            # Out of the root altogether, as only the host could: even then not a step further.
            (jail.root / "other/b").rename(jail.outside.parent / "b")
            with pytest.raises(Conflict, match="moved"):
                cursor.leave()
            (jail.outside.parent / "b").rename(jail.root / "tree/a/b")
            cursor.leave()
            assert cursor.depth == 2
    finally:
        os.close(root)


def test_going_down_over_a_link(jail: Jail) -> None:
    (jail.root / "link").symlink_to(jail.outside)
    (jail.root / "here").symlink_to(".")
    root = jail.open_root()
    try:
        with Cursor(root) as cursor:
            for name in (b"link", b"here", b"..", b"../outside"):
                with pytest.raises(OSError) as caught:
                    cursor.enter(name)
                assert caught.value.errno in (errno.ENOTDIR, errno.ELOOP, errno.EXDEV)
            assert os.path.samestat(os.fstat(cursor.fd), os.fstat(root))
    finally:
        os.close(root)


@pytest.mark.parametrize(
    "target", ["{outside}", "../outside", "../../../../../../../../../..{outside}", "sub/../../../outside", "{root}/../outside"]
)
def test_planted_links(jail: Jail, target: str) -> None:
    """No race: every operation, over a link in the middle and one at the end."""
    jail.fill(jail.root / "kept", b"inside")
    text = target.format(outside=jail.outside, root=jail.root)
    (jail.root / "spot").symlink_to(text)
    (jail.root / "end").symlink_to(text + "/file")
    operations = dict(OPERATIONS)
    operations["read end"] = lambda f: read(f, b"/end")
    operations["chmod end"] = lambda f: f.chmod(b"/end", mode=0o777, user="1")
    operations["append end"] = lambda f: write(f, b"/end", append=True)
    operations["write end"] = lambda f: write(f, b"/end")
    operations["write end with parents"] = lambda f: write(f, b"/end", parents=True)
    for name, operation in operations.items():
        try:
            result = operation(jail.files)
        except (NotFound, Conflict, InvalidRequest, Denied):
            continue
        assert name.startswith(("archive", "extract")), f"{name} went through"
        assert BAIT not in (result if isinstance(result, bytes) else b"")


def test_members_go_where_the_archive_says_inside(jail: Jail) -> None:
    """The classic: a link, then a file through it."""
    for link in (b"/", b"..", b"../outside", os.fsencode(jail.outside), b"/../../../../../.." + os.fsencode(jail.outside)):
        for target in (b"/", b"/t"):
            for second in (
                entry(b"l/file", size=5),
                entry(b"l/sub", "directory"),
                entry(b"l/sub/x", "symlink", b"y"),
                entry(b"l/sub/p", "fifo"),
            ):
                try:
                    extract(jail.files, target, entry(b"l", "symlink", link), second)
                except OpenDSecError as error:
                    assert not isinstance(error, Internal), error
            try:
                extract(jail.files, target, entry(b"l", "symlink", link), entry(b"stolen", "hard_link", b"l/file"))
            except OpenDSecError:
                continue
            assert (jail.root / "stolen").read_bytes() != BAIT


def test_devices_are_not_opened(jail: Jail) -> None:
    """/dev/full would say so at the first write, /dev/zero would never end."""
    os.mknod(jail.root / "zero", 0o666 | stat.S_IFCHR, os.makedev(1, 5))
    os.mknod(jail.root / "loop", 0o666 | stat.S_IFBLK, os.makedev(7, 0))
    for name in (b"/zero", b"/loop"):
        with pytest.raises(Conflict, match="device"):
            jail.files.open_read(name)
        for append in (False, True):
            with pytest.raises(Conflict, match="device"):
                write(jail.files, name, append=append)
    assert b"zero" not in archive_of(jail.files, b"/")
    with pytest.raises(InvalidRequest, match="character device") as caught:
        header = tarball.header(entry(b"null"))
        bad = header[:156] + b"3" + header[157:]
        bad = bad[:148] + b"%06o\0 " % (sum(bad[:148]) + 256 + sum(bad[156:])) + bad[156:]
        fd = os.memfd_create("archive", os.MFD_CLOEXEC)
        try:
            os.write(fd, bad + tarball.END_OF_ARCHIVE)
            os.lseek(fd, 0, os.SEEK_SET)
            jail.files.extract(b"/", fd, user=None)
        finally:
            os.close(fd)
    assert caught.value.data["member"] == "null"
    assert not (jail.root / "null").exists()


@pytest.mark.parametrize(
    "passwd",
    [
        b"",
        b"\xff\xfe\0\0" * 1000,
        b"user:x:99999999999999999999999:1::/:/bin/sh\n",
        b"user:x:-1:-1::/:/bin/sh\nuser:x: 5:5::/:\nuser:x:5\n",
        b"user:x:65535:0::/:/bin/sh\n",
        "user:x:\u0661:0::/:/bin/sh\n".encode(),
        b"user:x:0x10:0::/:/bin/sh\n",
        b":" * (2 << 20),
        b"\n" * (2 << 20) + b"user:x:1:1::/:/bin/sh\n",  # beyond what is looked at
    ],
)
def test_a_hostile_passwd(jail: Jail, passwd: bytes) -> None:
    (jail.root / "etc").mkdir()
    (jail.root / "etc/passwd").write_bytes(passwd)
    with pytest.raises(InvalidRequest, match="no user"):
        write(jail.files, b"/new", user="user")
    assert not (jail.root / "new").exists()
    write(jail.files, b"/new", user="root")
    assert (jail.root / "new").stat().st_uid == UID_BASE


@pytest.mark.parametrize("kind", ["fifo", "directory", "link out", "endless", "loop"])
def test_a_passwd_that_is_no_file(jail: Jail, kind: str) -> None:
    (jail.root / "etc").mkdir()
    path = jail.root / "etc/passwd"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link out":
        (jail.outside / "file").write_bytes(b"user:x:7:7::/:/bin/sh\n")
        jail._before = jail.look()
        path.symlink_to(jail.outside / "file")
    elif kind == "endless":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.symlink_to("passwd")
    with pytest.raises(InvalidRequest, match="no user"):
        write(jail.files, b"/new", user="user")


def test_a_directory_with_too_many_entries(jail: Jail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.runtime.files.access.MAX_LISTED", 100)
    for number in range(100):
        (jail.root / str(number)).touch()
    assert len(jail.files.list(b"/")) == 100
    (jail.root / "one-more").touch()
    with pytest.raises(QuotaExceeded, match="more than 100"):
        jail.files.list(b"/")


def test_a_file_of_a_terabyte_is_read_in_pieces(jail: Jail) -> None:
    (jail.root / "sparse").touch()
    os.truncate(jail.root / "sparse", 10**12)
    reader = jail.files.open_read(b"/sparse")
    pieces = chunks(reader)
    assert [len(next(pieces)) for _ in range(3)] == [1 << 20] * 3
    assert b"".join(chunks(reader, 10**12 - 5)) == bytes(5)
    reader.close()


def test_the_thread_is_itself_again(jail: Jail) -> None:
    """Whatever happens inside an operation, credentials of the thread are what they were."""

    def credentials() -> tuple[object, ...]:
        return (syscalls.capget(), Path("/proc/thread-self/status").read_text().split("Uid:")[1].split("Groups:")[0])

    before = credentials()
    for operation in OPERATIONS.values():
        try:
            operation(jail.files)
        except OpenDSecError:
            pass
        assert credentials() == before
    with pytest.raises(ZeroDivisionError), fsuser.FsUser(UID_BASE, UID_BASE) as user, user.bare():
        raise ZeroDivisionError
    assert credentials() == before


# --- a sandbox with namespaces -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box("host") as made:
        yield made


MAGIC = [
    *("/proc/self/root", "/proc/1/root", "/proc/1/cwd", "/proc/thread-self/root", "/proc/1/task/1/root"),
    *("/proc/1/fd/0", "/proc/1/fd/1", "/proc/1/exe", "/proc/1/ns/mnt", "/proc/self/fd/0", "/proc/1/map_files"),
]


@pytest.mark.parametrize("magic", MAGIC)
def test_magic_links(box: Box, magic: str) -> None:
    """They lead where no path does: into descriptors and other mount namespaces."""
    box.run(f"os.chdir('/work')\nif os.path.islink('magic'): os.unlink('magic')\nos.symlink({magic!r}, 'magic')")
    passwd = Path("/etc/passwd").stat()
    for path in (os.fsencode(magic), b"/work/magic"):
        for below in (b"", b"/etc/passwd", b"/", b"/new"):
            for operation in (
                lambda p: read(box.files, p),
                lambda p: write(box.files, p),
                lambda p: write(box.files, p, append=True),
                lambda p: box.files.mkdir(p + b"/d", mode=0o777, user=None, parents=True),
                lambda p: box.files.chmod(p, mode=0o777, user="1"),
                lambda p: box.files.remove(p + b"/etc", recursive=True),
                lambda p: archive_of(box.files, p),
                lambda p: extract(box.files, p, entry(b"x")),
                lambda p: watch(box.files, p),
            ):
                if path == b"/work/magic" and below == b"" and operation.__code__.co_names == ("write", "files"):
                    continue
                with pytest.raises((NotFound, Conflict, Denied, InvalidRequest)):
                    operation(path + below)
    assert Path("/etc/passwd").stat() == passwd
    assert box.run("result = os.readlink('magic')") == magic


HOST_ONLY = ["kcore", "slabinfo", "timer_list", "vmallocinfo", "kpageflags", "kpagecount", "pagetypeinfo", "kmsg", "sysrq-trigger"]


@pytest.mark.parametrize("name", HOST_ONLY)
def test_what_proc_shows_to_the_hosts_root_alone(box: Box, name: str) -> None:
    """The agent plants a link where its results are expected; whoever fetches them must not fetch the host's memory."""
    box.run(f"os.chdir('/work')\nif os.path.islink('out'): os.unlink('out')\nos.symlink('/proc/{name}', 'out')")
    for path in (b"/work/out", b"/proc/" + name.encode()):
        with pytest.raises((Denied, NotFound)):
            read(box.files, path)
        for append in (False, True):
            with pytest.raises((Denied, NotFound)):
                write(box.files, path, append=append)


def test_addresses_of_the_kernel(box: Box) -> None:
    addresses = {line.split(b" ", 1)[0] for line in read(box.files, b"/proc/kallsyms").splitlines()[:-1]}
    assert addresses == {b"0000000000000000"}


@pytest.mark.parametrize(
    "name", ["sys/kernel/core_pattern", "sys/kernel/panic", "1/oom_score_adj", "1/mem", "1/uid_map", "sys/fs/file-max"]
)
def test_proc_is_not_written(box: Box, name: str) -> None:
    """Any of these, written by root of the host, would change the host."""
    before = [Path("/proc/sys", rest).read_bytes() for rest in ("kernel/core_pattern", "kernel/panic", "fs/file-max")]
    path = b"/proc/" + name.encode()
    for append in (False, True):
        with pytest.raises(Denied):
            write(box.files, path, append=append)
    with pytest.raises(Denied):
        box.files.chmod(path, mode=0o666, user=None)
    with pytest.raises(Denied):
        box.files.remove(path, recursive=False)
    assert [Path("/proc/sys", rest).read_bytes() for rest in ("kernel/core_pattern", "kernel/panic", "fs/file-max")] == before


def test_proc_can_be_looked_at(box: Box) -> None:
    assert read(box.files, b"/proc/meminfo").startswith(b"MemTotal")
    assert any(info.name == "1" for info in box.files.list(b"/proc"))
    assert box.files.stat(b"/proc/1/root", follow=False).kind == "symlink"
    assert b"PATH" not in read(box.files, b"/proc/1/status")


def test_nobody_notices_at_the_other_end_of_a_fifo(box: Box) -> None:
    box.run("""
os.mkdir('/work/fifo'); os.chdir('/work/fifo'); os.mkfifo('f'); opened = threading.Event()
def wait():
    fd = os.open('/work/fifo/f', os.O_WRONLY); opened.set(); os.close(fd)
thread = threading.Thread(target=wait); thread.start()
""")
    with pytest.raises(Conflict):
        box.files.open_read(b"/work/fifo/f")
    with pytest.raises(Conflict):
        write(box.files, b"/work/fifo/f", append=True)
    archive_of(box.files, b"/work/fifo")
    box.files.chmod(b"/work/fifo/f", mode=0o600, user=None)
    box.files.list(b"/work/fifo")
    assert box.run("result = opened.is_set()") is False
    assert box.run("os.close(os.open('f', os.O_RDONLY)); thread.join(); result = opened.is_set()") is True


def test_a_tmpfs_with_files_of_the_host_is_not_the_sandboxs(box: Box) -> None:
    """Told apart by owner: a range of ids that is not this sandbox's."""
    box.run("open('/dev/shm/file', 'w').write('x'); os.chmod('/dev/shm/file', 0o600)")
    other = SandboxFiles(box.open_root, UID_BASE + 65_536)
    for append in (False, True):
        with pytest.raises(Denied):
            write(other, b"/dev/shm/file", append=append)
    with pytest.raises(Denied):
        read(other, b"/dev/shm/file")
    with pytest.raises(Denied):
        other.remove(b"/dev/shm/file", recursive=False)
    assert read(box.files, b"/dev/shm/file") == b"x"
    box.run("os.unlink('/dev/shm/file')")


def test_a_mount_that_appears(box: Box) -> None:
    """Something mounted over a name while we hold its directory is not reached: neither written nor removed."""
    box.run("os.makedirs('/work/m/over'); syscalls.mount('proc', '/work/m/over', 'proc', 0, None)")
    try:
        for operation in (
            lambda: box.files.remove(b"/work/m", recursive=True),
            lambda: box.files.remove(b"/work/m/over", recursive=True),
            lambda: extract(box.files, b"/work/m", entry(b"over/x")),
            lambda: box.files.move(b"/work/m/over", b"/work/m/moved"),
        ):
            with pytest.raises(Conflict):
                operation()
        extract(box.files, b"/work/m", entry(b"over", "directory"))
        assert b"over/self" not in archive_of(box.files, b"/work/m")
    finally:
        box.run("syscalls.umount2('/work/m/over', 0)")
