# SPDX-License-Identifier: Apache-2.0
"""Archives out of and into a sandbox, and watches."""

from __future__ import annotations

import io
import os
import select
import subprocess
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Denied, InvalidRequest, NotFound, QuotaExceeded, SandboxLost, Unavailable
from opendsec.api.files import WatchEvent
from opendsec.kernel import syscalls
from opendsec.runtime.backend import Watch
from opendsec.runtime.files import SandboxFiles, tarball
from opendsec.runtime.files.tarball import Member
from tests.integration.files.box import UID_BASE, Box


def through_pipe(produce: Callable[[int], None], consume: Callable[[int], object]) -> object:
    """`produce` writes to one end in a thread, `consume` reads from the other; the consumer's result."""
    reading, writing = os.pipe()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            produce(writing)
        except BaseException as error:
            failures.append(error)
        finally:
            os.close(writing)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return consume(reading)
    finally:
        os.close(reading)
        thread.join()
        if failures:
            raise failures[0]


def read_all(fd: int) -> bytes:
    with os.fdopen(os.dup(fd), "rb") as stream:
        return stream.read()


def archived(box: Box, path: bytes, problem: Callable[[bytes, str], None] | None = None) -> bytes:
    result = through_pipe(lambda out: box.files.archive(path, out, problem=problem), read_all)
    assert isinstance(result, bytes)
    return result


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        return {info.name: info for info in tar.getmembers()}


def extract(box: Box, path: bytes, data: bytes, user: str | None = None) -> int:
    """Through a file, which is the slow way for content; the pipe is in `through_pipe`."""
    fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    try:
        tarball.write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        return box.files.extract(path, fd, user=user)
    finally:
        os.close(fd)


def stream(*items: Member | tuple[Member, bytes]) -> bytes:
    out = b""
    for item in items:
        entry, content = item if isinstance(item[0], Member) else (item, b"")
        assert isinstance(entry, Member)
        entry = entry._replace(size=len(content))
        out += tarball.header(entry) + content + tarball.padding(len(content))
    return out + tarball.END_OF_ARCHIVE


def member(name: bytes, kind: tarball.MemberKind = "file", link: bytes = b"", mode: int = 0o644, uid: int = 0, gid: int = 0) -> Member:
    return Member(name, kind, 0, mode, uid, gid, 1_600_000_000, link)


TREE = r"""
os.makedirs('tree/a/b'); os.mkdir('tree/empty'); os.chmod('tree/empty', 0o1770)
open('tree/file', 'w').write('content'); os.chown('tree/file', 7, 8); os.chmod('tree/file', 0o4755); os.utime('tree/file', (1, 1500000000))
open('tree/a/large', 'wb').write(b'x' * 3000000); open('tree/a/b/nothing', 'w').close()
os.link('tree/file', 'tree/a/hard'); os.symlink('../../../../etc/passwd', 'tree/link')
os.link('tree/link', 'tree/a/link', follow_symlinks=False)
os.mkfifo('tree/fifo', 0o620); s = socket.socket(socket.AF_UNIX); s.bind('tree/socket'); s.close()
open(b'tree/\xff\xfe\n', 'w').close(); open('tree/' + 'n' * 255, 'w').write('long'); os.symlink(b'\xfd', b'tree/\xfc')
os.lchown('tree/a', 5, 6)
"""
LOOK = """
def look(top):
    found = {}
    for folder, folders, names in os.walk(os.fsencode(top)):
        for name in folders + names:
            path = os.path.join(folder, name)
            s = os.lstat(path)
            text = ''
            if stat.S_ISREG(s.st_mode): text = str(hash(open(path, 'rb').read()))
            if stat.S_ISLNK(s.st_mode): text = repr(os.readlink(path))
            time = int(s.st_mtime) if stat.S_ISREG(s.st_mode) else 0
            found[repr(path[len(os.fsencode(top)):])] = [s.st_mode, s.st_uid, s.st_gid, s.st_nlink, time, text]
    return found
"""


def test_out_and_in_again(box: Box, here: bytes) -> None:
    box.run(TREE + LOOK)
    problems: list[bytes] = []
    data = archived(box, here + b"/tree", problem=lambda name, what: problems.append(name))
    assert problems == [b"socket"]
    assert extract(box, here + b"/copy/of/it", data) == 3_000_000 + 7 + 4
    box.run("os.unlink('tree/socket')")
    assert box.run("result = look('tree') == look('copy/of/it')") is True
    through_pipe(lambda out: box.files.archive(here + b"/tree", out), lambda into: box.files.extract(here + b"/piped", into, user=None))
    assert box.run("result = look('tree') == look('piped')") is True


def test_names_are_relative_and_sorted(box: Box, here: bytes) -> None:
    box.run("os.makedirs('t/b/c'); os.mkdir('t/a')\nfor n in ('z', 'b/y', 'b/x', 'b/c/w', 'a/v'): open('t/' + n, 'w').close()")
    box.run("os.symlink('t', 'link')")
    expected = [".", "z", "a", "a/v", "b", "b/x", "b/y", "b/c", "b/c/w"]
    data = archived(box, here + b"/t")
    assert list(members(data)) == expected
    assert archived(box, here + b"/link/") == data


def test_a_single_file(box: Box, here: bytes) -> None:
    box.run("open('file', 'w').write('x'); os.symlink('file', 'link'); os.mkfifo('fifo')")
    assert list(members(archived(box, here + b"/file"))) == ["file"]
    (info,) = members(archived(box, here + b"/link")).values()
    assert (info.name, info.isreg(), info.size) == ("link", True, 1)
    with pytest.raises(Conflict):
        archived(box, here + b"/fifo")
    with pytest.raises(NotFound):
        archived(box, here + b"/none")


def test_gnu_tar_agrees(box: Box, here: bytes, tmp_path: Path) -> None:
    box.run(TREE)
    subprocess.run(["tar", "-xf", "-", "-C", tmp_path], input=archived(box, here + b"/tree"), check=True, stderr=subprocess.DEVNULL)
    assert (tmp_path / "file").read_text() == "content"
    assert (tmp_path / "file").stat().st_ino == (tmp_path / "a/hard").stat().st_ino
    assert os.readlink(tmp_path / "link") == "../../../../etc/passwd"
    assert b"\xff\xfe\n" in os.listdir(os.fsencode(tmp_path))
    source = tmp_path / "source"
    source.mkdir()
    (source / ("n" * 200)).mkdir()
    (source / ("n" * 200) / ("m" * 200)).write_text("x")
    os.mkfifo(source / "fifo")
    for form in ("gnu", "pax", "oldgnu"):
        made = subprocess.run(["tar", f"--format={form}", "-cf", "-", "-C", source, "."], check=True, capture_output=True).stdout
        assert extract(box, here + form.encode(), made, user="user") == 1
        assert box.files.stat(here + form.encode() + b"/" + b"n" * 200 + b"/" + b"m" * 200).uid == 1000


def test_mounts_are_left_out(box: Box) -> None:
    box.run("open('/dev/shm/x', 'w').close()")
    found = members(archived(box, b"/"))
    assert "proc" in found
    assert "dev/shm" in found
    assert not [name for name in found if name.startswith(("proc/", "dev/shm/"))]
    assert list(members(archived(box, b"/dev/shm"))) == [".", "x"]
    box.run("os.unlink('/dev/shm/x')")
    with pytest.raises(Denied):
        archived(box, b"/proc")


def test_a_file_that_is_cut_and_one_that_grows(box: Box, here: bytes) -> None:
    """The stream stays well formed: the header said how much would come."""
    box.run("os.mkdir('t'); open('t/1-cut', 'wb').write(b'c' * 9000000); open('t/2-grown', 'wb').write(b'g' * 9000000)")
    problems: list[tuple[bytes, str]] = []

    def consume(fd: int) -> bytes:
        data = os.read(fd, 4096)  # by now the first file is open and its header is written
        box.run("os.truncate('t/1-cut', 5000000); open('t/2-grown', 'ab').write(b'g' * 100)")
        return data + read_all(fd)

    data = through_pipe(lambda out: box.files.archive(here + b"/t", out, problem=lambda *what: problems.append(what)), consume)
    assert isinstance(data, bytes)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        cut, grown = tar.extractfile("1-cut"), tar.extractfile("2-grown")
        assert cut is not None and grown is not None
        assert cut.read() == b"c" * 5_000_000 + bytes(4_000_000)
        assert len(grown.read()) in (9_000_000, 9_000_100)
    assert [name for name, _ in problems] == [b"1-cut"]
    box.files.remove(here + b"/t", recursive=True)


def test_the_reader_goes_away(box: Box, here: bytes) -> None:
    box.run("open('large', 'wb').write(bytes(1 << 20))")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with pytest.raises(Conflict, match="reader"):
            box.files.archive(here + b"/large", writing)
    finally:
        os.close(writing)


# --- in ------------------------------------------------------------------------------------------------------------


def test_owners_and_modes(box: Box, here: bytes) -> None:
    data = stream(
        member(b"theirs", mode=0o4755, uid=12, gid=13),
        member(b"foreign", uid=1_000_000, gid=70_000),
        member(b"new/dir", "directory", mode=0o2775, uid=3, gid=4),
        member(b"made/for/it", uid=9, gid=9),
        member(b"l", "symlink", b"x", uid=3, gid=4),
        member(b"f", "fifo", mode=0o620, uid=3, gid=4),
    )
    extract(box, here + b"/a", data)
    look = "result = [[s.st_mode & 0o7777, s.st_uid, s.st_gid] for s in map(os.lstat, names)]"
    names = "names = [{0!r} + n for n in ('theirs', 'foreign', 'new', 'new/dir', 'made/for', 'l', 'f')];"
    assert box.run(names.format("a/") + look) == [
        [0o4755, 12, 13],
        [0o644, 65534, 65534],
        [0o755, 3, 4],
        [0o2775, 3, 4],
        [0o755, 9, 9],
        [0o777, 3, 4],
        [0o620, 3, 4],
    ]
    extract(box, here + b"/b", data, user="user")
    assert box.run(names.format("b/") + look) == [
        [0o755, 1000, 1001],
        [0o644, 1000, 1001],
        [0o755, 1000, 1001],
        [0o775, 1000, 1001],
        [0o755, 1000, 1001],
        [0o777, 1000, 1001],
        [0o620, 1000, 1001],
    ]


def test_directories_that_exist_are_left_as_they_are(box: Box, here: bytes) -> None:
    box.run("os.mkdir('d'); os.chmod('d', 0o1777)")
    extract(box, here, stream(member(b".", "directory", mode=0), member(b"d", "directory", mode=0, uid=5), member(b"d/x")))
    assert box.files.stat(here + b"/d").mode == 0o1777
    assert box.files.stat(here).mode == 0o777
    assert box.files.stat(here + b"/d/x").kind == "file"


def test_what_is_there_is_replaced(box: Box, here: bytes) -> None:
    box.run("""
for n in 'abcdefg': open(n, 'w').write('kept elsewhere'); os.link(n, n + '2')
for n in 'hijk': os.symlink('a2', n)
os.mkfifo('l'); os.mkdir('m'); open('m/x', 'w').close(); os.mkdir('n')
""")
    kinds = [b"a", b"h", b"l"]
    extract(box, here, stream(*[(member(name), b"new") for name in kinds]))
    extract(box, here, stream(*[member(name, "symlink", b"new") for name in (b"b", b"i")]))
    extract(box, here, stream(*[member(name, "directory") for name in (b"c", b"j")]))
    extract(box, here, stream(*[member(name, "fifo") for name in (b"d", b"k")]))
    extract(box, here, stream((member(b"source"), b"new"), *[member(name, "hard_link", b"source") for name in (b"e", b"f")]))
    assert box.run("result = [open(n).read() for n in ('a', 'h', 'l', 'e', 'f')]") == ["new"] * 5
    assert box.run("result = [os.path.islink(n) for n in ('b', 'i')]") == [True, True]
    assert box.run("result = [os.path.isdir(n) and not os.path.islink(n) for n in ('c', 'j')]") == [True, True]
    assert box.run("result = [stat.S_ISFIFO(os.lstat(n).st_mode) for n in ('d', 'k')]") == [True, True]
    assert box.run("result = [open(n + '2').read() for n in 'abcdefg']") == ["kept elsewhere"] * 7
    for name in (b"m", b"n"):
        with pytest.raises(Conflict, match="directory"):
            extract(box, here, stream((member(name), b"new")))


def test_a_member_twice(box: Box, here: bytes) -> None:
    data = stream((member(b"a"), b"one"), member(b"a", "symlink", b"/etc/passwd"), (member(b"a"), b"three"))
    assert extract(box, here, data) == 8
    assert box.run("result = [open('a').read(), os.path.islink('a')]") == ["three", False]


def test_links_within_the_target_are_followed(box: Box, here: bytes) -> None:
    box.run("os.makedirs('usr/lib'); os.symlink('usr/lib', 'lib')")
    extract(box, here, stream(member(b"lib", "directory"), member(b"lib/x"), member(b"lib/new/y"), member(b"h", "hard_link", b"lib/x")))
    assert box.run("result = [os.path.islink('lib'), sorted(os.listdir('usr/lib')), os.stat('h').st_nlink]") == [True, ["new", "x"], 2]
    extract(box, b"/", stream(member(b"lib/at-root")))
    assert box.run("result = os.path.islink('/lib') and os.path.exists('/usr/lib/at-root')") is True
    box.run("os.symlink('/usr', '/absolute')")
    extract(box, b"/", stream(member(b"absolute/lib/deep/er/still")))
    assert box.run("result = os.path.exists('/usr/lib/deep/er/still')") is True
    box.run("os.unlink('/absolute')")


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([member(b"/etc/passwd")], "absolute"),
        ([member(b"../x")], "'..'"),
        ([member(b"a/../../x")], "'..'"),
        ([member(b"h", "hard_link", b"/etc/passwd")], "absolute"),
        ([member(b"h", "hard_link", b"../../etc/passwd")], "'..'"),
        ([member(b"h", "hard_link", b"none")], "does not exist"),
        ([member(b"d", "directory"), member(b"h", "hard_link", b"d")], "to a directory"),
        ([member(b"h", "hard_link", b"")], "to nothing"),
        ([member(b"s", "symlink", b"")], "to nothing"),
        ([member(b".")], "names no entry"),
        ([member(b"n" * 256)], "255"),
        ([member(b"out", "symlink", b"/etc"), member(b"out/passwd")], "leads to one"),
        ([member(b"out", "symlink", b"../.."), member(b"out/etc/passwd")], "leads to one"),
        ([member(b"out", "symlink", b"/etc"), member(b"h", "hard_link", b"out/passwd")], "leads to one"),
        ([member(b"out", "symlink", b"/proc/1/root"), member(b"out/etc/passwd")], "leads to one"),
        ([member(b"file"), member(b"file/x")], "not a directory"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_members_that_lead_out(box: Box, here: bytes, items: list[Member], words: str) -> None:
    before = box.run(
        "result = [open('/etc/passwd').read(), os.stat('/etc/passwd').st_nlink, sorted(os.listdir('/')), sorted(os.listdir('/etc'))]"
    )
    with pytest.raises((InvalidRequest, Conflict, Denied), match=words) as caught:
        extract(box, here + b"/target", stream(*items))
    assert caught.value.field == "body"
    assert "member" in caught.value.data
    after = box.run(
        "result = [open('/etc/passwd').read(), os.stat('/etc/passwd').st_nlink, sorted(os.listdir('/')), sorted(os.listdir('/etc'))]"
    )
    assert after == before
    assert [info.name for info in box.files.list(here)] == ["target"]


def test_an_archive_that_does_not_fit() -> None:
    with Box("host", size_bytes=4 << 20) as box:
        data = stream((member(b"first"), b"x" * 1000), (member(b"second"), bytes(8 << 20)))
        with pytest.raises(QuotaExceeded) as caught:
            extract(box, b"/work", data)
        assert caught.value.data == {"resource": "disk", "member": "second"}
        assert [info.name for info in box.files.list(b"/work")] == ["first"]
        with pytest.raises(QuotaExceeded):
            through_pipe(
                lambda out: _ignore_broken_pipe(lambda: tarball.write_all(out, data)),
                lambda into: box.files.extract(b"/work", into, user=None),
            )
        assert box.run("s = os.statvfs('/'); result = s.f_bfree * s.f_bsize > 3 << 20") is True


def _ignore_broken_pipe(call: Callable[[], None]) -> None:
    try:
        call()
    except BrokenPipeError:
        pass


@pytest.mark.slow
def test_more_levels_than_a_path_can_have(box: Box, here: bytes) -> None:
    """10,000 directories deep: out, in, compared, and removed, none of it by a path."""
    depth = 10_000
    box.run(f"os.mkdir('deep'); os.chdir('deep')\nfor i in range({depth}): os.mkdir('d'); os.chdir('d')")
    box.run(f"open('bottom', 'w').close(); os.chdir({here!r})")
    data = archived(box, here + b"/deep")
    assert data.count(b"ustar\x0000") > depth
    assert extract(box, here + b"/copy", data) == 0
    count = """
def levels(name):
    os.chdir(name); n = 0
    while True:
        try: os.chdir('d')
        except FileNotFoundError: break
        n += 1
    result = [n, os.listdir('.')]
    os.chdir(HERE)
    return result
"""
    box.run(f"HERE = {here!r}" + count)
    assert box.run("result = levels('copy')") == [depth, ["bottom"]]
    for name in (b"/deep", b"/copy"):
        box.files.remove(here + name, recursive=True)
    assert box.run("result = os.listdir('.')") == []


def test_member_names_longer_than_a_path(box: Box, here: bytes) -> None:
    """Without a directory member on the way: all 1,000 levels are made for it."""
    name = b"/".join([b"directory"] * 1000 + [b"file"])
    assert extract(box, here, stream((member(name), b"x"))) == 1
    assert extract(box, here, stream((member(name), b"xy"), member(b"hard", "hard_link", name))) == 2
    assert box.files.stat(here + b"/hard").size_bytes == 2
    box.files.remove(here + b"/directory", recursive=True)


def test_holes_do_not_fill_memory(box: Box, here: bytes) -> None:
    """A file of 1 TB that takes no space: it streams, and ends when the reader has had enough."""
    box.run("open('sparse', 'w').close(); os.truncate('sparse', 10 ** 12)")
    reading, writing = os.pipe()
    outcome: list[BaseException | None] = []

    def produce() -> None:
        try:
            box.files.archive(here, writing)
            outcome.append(None)
        except Conflict as error:
            outcome.append(error)

    thread = threading.Thread(target=produce)
    thread.start()
    taken = 0
    while taken < 64 << 20:
        taken += len(os.read(reading, 1 << 20))
    os.close(reading)
    thread.join()
    os.close(writing)
    assert isinstance(outcome[0], Conflict)
    box.files.remove(here + b"/sparse", recursive=False)


def test_a_sandbox_that_ends_meanwhile(box: Box, here: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.runtime.files.walk.ALIVE_EVERY", 10)
    asked = 0

    def root() -> int:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise SandboxLost("the sandbox has ended")
        return box.open_root()

    files = SandboxFiles(root, UID_BASE)
    box.run("os.mkdir('d')\nfor i in range(100): open(f'd/{i}', 'w').close()")
    with pytest.raises(SandboxLost):
        through_pipe(lambda out: files.archive(here + b"/d", out), read_all)


# --- watching ------------------------------------------------------------------------------------------------------


def until(watch: Watch, kind: str) -> list[WatchEvent]:
    """What comes up to an event of that kind, which is the last."""
    events: list[WatchEvent] = []
    while not events or events[-1].kind != kind:
        assert select.select([watch], [], [], 10)[0]
        events += watch.read()
    return events


def test_watch(box: Box, here: bytes) -> None:
    watch = box.files.open_watch(here)
    try:
        assert not select.select([watch], [], [], 0)[0]
        assert watch.read() == []
        box.run("open('a', 'w').write('x'); os.mkdir('d'); open('d/below', 'w').close(); os.rename('a', b'\\xff'); os.chmod(b'\\xff', 0)")
        box.run("os.unlink(b'\\xff')")
        assert [(event.kind, event.raw_name, event.name) for event in until(watch, "deleted")] == [
            ("created", b"a", "a"),
            ("modified", b"a", "a"),
            ("created", b"d", "d"),
            ("moved_from", b"a", "a"),
            ("moved_to", b"\xff", "\N{REPLACEMENT CHARACTER}"),
            ("attributes", b"\xff", "\N{REPLACEMENT CHARACTER}"),
            ("deleted", b"\xff", "\N{REPLACEMENT CHARACTER}"),
        ]
    finally:
        watch.close()
        watch.close()


@pytest.mark.parametrize("how", ["os.rmdir('d')", "os.rename('d', 'e')"])
def test_a_watched_directory_that_goes(box: Box, here: bytes, how: str) -> None:
    box.run("os.mkdir('d')")
    watch = box.files.open_watch(here + b"/d")
    try:
        box.run(how)
        assert until(watch, "gone")
        box.run("os.makedirs('d', exist_ok=True); open('d/x', 'w').close()")
        assert watch.read() == []
    finally:
        watch.close()


@pytest.mark.slow
def test_more_events_than_the_kernel_keeps(box: Box, here: bytes) -> None:
    watch = box.files.open_watch(here)
    try:
        box.run("for i in range(20000): os.mkdir('d'); os.rmdir('d')")
        kinds = set()
        while events := watch.read():
            kinds |= {event.kind for event in events}
        assert kinds == {"created", "deleted", "overflow"}
    finally:
        watch.close()


@pytest.mark.slow
def test_a_directory_that_goes_among_more_events_than_the_kernel_keeps(box: Box, here: bytes) -> None:
    box.run("os.mkdir('d')")
    watch = box.files.open_watch(here + b"/d")
    try:
        box.run("for i in range(20000): os.mkdir('d/d'); os.rmdir('d/d')\nos.rmdir('d')")
        kinds: list[str] = []
        while events := watch.read():
            kinds += [event.kind for event in events]
        assert kinds[-2:] == ["overflow", "gone"]
    finally:
        watch.close()


def test_what_cannot_be_watched(box: Box, here: bytes) -> None:
    box.run("open('file', 'w').close()")
    with pytest.raises(Conflict):
        box.files.open_watch(here + b"/file")
    with pytest.raises(NotFound):
        box.files.open_watch(here + b"/none")
    with pytest.raises(Denied):
        box.files.open_watch(b"/proc")


def test_a_watch_ends_with_its_sandbox() -> None:
    with Box("host") as box:
        watch = box.files.open_watch(b"/work")
    try:
        assert select.select([watch], [], [], 10)[0]
        assert [event.kind for event in watch.read()] == ["gone"]
    finally:
        watch.close()


def test_too_many_watches(box: Box, here: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(flags: int = 0) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(syscalls, "inotify_init1", full)
    with pytest.raises(Unavailable):
        box.files.open_watch(here)
