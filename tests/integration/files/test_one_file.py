# SPDX-License-Identifier: Apache-2.0
"""Reading, writing and changing single files, as seen from inside a user namespace of its own."""

from __future__ import annotations

import os
import stat

import pytest

from opendsec.api.errors import Conflict, Denied, InvalidRequest, NotFound, QuotaExceeded, SandboxLost
from opendsec.runtime.files import SandboxFiles
from opendsec.runtime.files.access import chunks
from tests.integration.files.box import UID_BASE, Box


def write(box: Box, path: bytes, data: bytes = b"data", **options: object) -> int:
    settings: dict[str, object] = {"mode": None, "user": None, "append": False, "parents": False}
    file = box.files.open_write(path, **{**settings, **options})  # type: ignore[arg-type]
    file.write(data)
    return file.commit()


def read(box: Box, path: bytes, offset: int = 0, length: int | None = None) -> bytes:
    reader = box.files.open_read(path)
    try:
        return reader.read(offset, 1 << 30 if length is None else length)
    finally:
        reader.close()


def inside(box: Box, path: bytes) -> dict[str, int]:
    """lstat, as the sandbox sees it."""
    found = box.run(f"s = os.lstat({path!r}); result = [s.st_mode, s.st_uid, s.st_gid, s.st_size, s.st_nlink, s.st_ino]")
    assert isinstance(found, list)
    return dict(zip(("mode", "uid", "gid", "size", "links", "inode"), found, strict=True))


# --- writing -------------------------------------------------------------------------------------------------------


def test_a_new_file(box: Box, here: bytes) -> None:
    assert write(box, here + b"/new", b"content") == 7
    found = inside(box, here + b"/new")
    assert (stat.S_IMODE(found["mode"]), found["uid"], found["gid"], found["size"]) == (0o644, 0, 0, 7)
    assert read(box, here + b"/new") == b"content"
    assert box.run("result = os.listdir('.')") == ["new"]


@pytest.mark.parametrize(
    ("user", "uid", "gid"),
    [
        ("", 0, 0),
        ("root", 0, 0),
        ("user", 1000, 1001),
        ("1000", 1000, 1001),
        ("1234", 1234, 0),
        ("user:staff", 1000, 50),
        ("0:50", 0, 50),
        ("65534:65534", 65534, 65534),
        (":staff", 0, 50),
    ],
)
def test_owners(box: Box, here: bytes, user: str, uid: int, gid: int) -> None:
    write(box, here + b"/deep/er/file", user=user, mode=0o640, parents=True)
    found = inside(box, here + b"/deep/er/file")
    assert (stat.S_IMODE(found["mode"]), found["uid"], found["gid"]) == (0o640, uid, gid)
    for folder in (b"/deep", b"/deep/er"):
        found = inside(box, here + folder)
        assert (stat.S_IMODE(found["mode"]), found["uid"], found["gid"]) == (0o755, uid, gid)


def test_the_callers_default_owner_is_for_new_files(box: Box, here: bytes) -> None:
    write(box, here + b"/new", default_user="user")
    assert inside(box, here + b"/new")["uid"] == 1000
    write(box, here + b"/new", default_user="root")
    assert inside(box, here + b"/new")["uid"] == 1000


@pytest.mark.parametrize("user", ["nobody-here", "root:nogroup-here", "65535", "1000:65535", "99999999999999999999", "\udcff"])
def test_unknown_owners(box: Box, here: bytes, user: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        write(box, here + b"/new", user=user)
    assert caught.value.field == "user"
    assert box.run("result = os.listdir('.')") == []


@pytest.mark.parametrize("mode", [0o400, 0o777, 0o4755, 0o2755, 0o1777, 0o6711, 0])
def test_modes(box: Box, here: bytes, mode: int) -> None:
    write(box, here + b"/new", mode=mode, user="user")
    assert stat.S_IMODE(inside(box, here + b"/new")["mode"]) == mode


def test_an_existing_file_keeps_owner_and_mode(box: Box, here: bytes) -> None:
    write(box, here + b"/file", b"old content", mode=0o4750, user="user")
    write(box, here + b"/file", b"new")
    found = inside(box, here + b"/file")
    # … but content from outside does not get the rights of what was there before.
    assert (stat.S_IMODE(found["mode"]), found["uid"], found["gid"], found["size"]) == (0o750, 1000, 1001, 3)
    write(box, here + b"/file", b"n", user="root", mode=0o600)
    found = inside(box, here + b"/file")
    assert (stat.S_IMODE(found["mode"]), found["uid"], found["gid"], found["size"]) == (0o600, 0, 0, 1)


def test_the_old_content_stays_until_commit(box: Box, here: bytes) -> None:
    write(box, here + b"/file", b"old")
    for end in ("abort", "commit"):
        file = box.files.open_write(here + b"/file", mode=None, user=None, append=False, parents=False)
        file.write(b"new")
        assert box.run("result = [open('file').read(), os.listdir('.')]") == ["old", ["file"]]
        getattr(file, end)()
        file.abort()
    assert box.run("result = [open('file').read(), os.listdir('.')]") == ["new", ["file"]]


def test_a_file_of_the_layer(box: Box) -> None:
    if box.kind == "inside":
        box.run("os.mkdir('/lower'); open('/lower/file', 'w').write('from the layer')")
    assert read(box, b"/lower/file") == b"from the layer"
    write(box, b"/lower/file", b" and more", append=True)
    assert read(box, b"/lower/file") == b"from the layer and more"
    write(box, b"/lower/file", b"other")
    assert box.run("result = open('/lower/file').read()") == "other"


def test_a_symlink_is_written_through_and_stays(box: Box, here: bytes) -> None:
    box.run("open('target', 'w').write('old'); os.symlink('target', 'one'); os.symlink(os.getcwd() + '/one', 'two')")
    write(box, here + b"/two", b"new")
    assert box.run("result = [open('target').read(), os.readlink('two'), os.readlink('one')]") == ["new", here.decode() + "/one", "target"]
    write(box, here + b"/two", b"er", append=True)
    assert box.run("result = open('target').read()") == "newer"


def test_a_dangling_symlink_gets_its_target(box: Box, here: bytes) -> None:
    box.run("os.mkdir('d'); os.symlink('d/../d/target', 'link')")
    write(box, here + b"/link", b"x")
    assert box.run("result = [os.listdir('d'), os.readlink('link')]") == [["target"], "d/../d/target"]


def test_other_hard_links_keep_the_old_content(box: Box, here: bytes) -> None:
    box.run("open('a', 'w').write('old'); os.link('a', 'b')")
    write(box, here + b"/a", b"new")
    assert box.run("result = [open('a').read(), open('b').read()]") == ["new", "old"]


def test_appending(box: Box, here: bytes) -> None:
    assert write(box, here + b"/log", b"one", append=True, mode=0o600) == 3
    inode = inside(box, here + b"/log")["inode"]
    assert write(box, here + b"/log", b"two", append=True) == 6
    found = inside(box, here + b"/log")
    assert (read(box, here + b"/log"), found["inode"], stat.S_IMODE(found["mode"])) == (b"onetwo", inode, 0o600)
    write(box, here + b"/log", b"", append=True, mode=0o4755, user="user")
    found = inside(box, here + b"/log")
    assert (found["uid"], stat.S_IMODE(found["mode"])) == (1000, 0o4755)


def test_an_aborted_append_is_taken_back(box: Box, here: bytes) -> None:
    write(box, here + b"/log", b"one")
    file = box.files.open_write(here + b"/log", mode=None, user=None, append=True, parents=False)
    file.write(b"two")
    assert read(box, here + b"/log") == b"onetwo"
    file.abort()
    assert read(box, here + b"/log") == b"one"


def test_an_aborted_append_leaves_what_others_wrote(box: Box, here: bytes) -> None:
    write(box, here + b"/log", b"one")
    file = box.files.open_write(here + b"/log", mode=None, user=None, append=True, parents=False)
    file.write(b"two")
    box.run("open('log', 'a').write('three')")
    file.abort()
    assert read(box, here + b"/log") == b"onetwothree"


def test_a_file_cut_while_it_is_appended_to(box: Box, here: bytes) -> None:
    write(box, here + b"/log", b"one")
    file = box.files.open_write(here + b"/log", mode=None, user=None, append=True, parents=False)
    file.write(b"two")
    box.run("os.truncate('log', 0)")
    with pytest.raises(Conflict, match="cut"):
        file.commit()


def test_a_file_that_appears_while_one_is_written(box: Box, here: bytes) -> None:
    for append in (False, True):
        file = box.files.open_write(here + b"/new", mode=None, user=None, append=append, parents=False)
        file.write(b"ours")
        box.run("open('new', 'w').write('theirs')")
        if append:
            with pytest.raises(Conflict, match="exists"):
                file.commit()
            assert read(box, here + b"/new") == b"theirs"
        else:
            assert file.commit() == 4
            assert read(box, here + b"/new") == b"ours"
            box.run("os.unlink('new')")
    assert box.run("result = os.listdir('.')") == ["new"]


def test_a_directory_that_appears_while_a_file_is_written(box: Box, here: bytes) -> None:
    file = box.files.open_write(here + b"/new", mode=None, user=None, append=False, parents=False)
    file.write(b"ours")
    box.run("os.mkdir('new')")
    with pytest.raises(Conflict, match="directory"):
        file.commit()
    assert box.run("result = os.listdir('.')") == ["new"]


def test_the_directory_disappears(box: Box, here: bytes) -> None:
    box.run("os.mkdir('d')")
    file = box.files.open_write(here + b"/d/new", mode=None, user=None, append=False, parents=False)
    file.write(b"ours")
    box.run("os.rmdir('d')")
    with pytest.raises(NotFound):
        file.commit()


def test_without_unnamed_files(box: Box, here: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems without O_TMPFILE take another way, which no file system here would go."""
    real = os.open

    def without(path: bytes, flags: int, *args: int, **options: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", without)
    write(box, here + b"/file", b"old", user="user")
    file = box.files.open_write(here + b"/file", mode=0o600, user=None, append=False, parents=False)
    file.write(b"new")
    names = box.run("result = os.listdir('.')")
    assert isinstance(names, list)
    assert len(names) == 2
    assert read(box, here + b"/file") == b"old"
    file.commit()
    found = inside(box, here + b"/file")
    assert (read(box, here + b"/file"), stat.S_IMODE(found["mode"]), found["uid"]) == (b"new", 0o600, 1000)
    file = box.files.open_write(here + b"/file", mode=None, user=None, append=False, parents=False)
    file.write(b"newer")
    file.abort()
    assert box.run("result = os.listdir('.')") == ["file"]


@pytest.mark.parametrize("append", [False, True])
def test_a_full_disk(append: bool) -> None:
    with Box("host", size_bytes=4 << 20) as box:
        box.run("open('/work/log', 'w').write('one')")
        before = [info for info in box.files.list(b"/work") if info.name != "log"]
        file = box.files.open_write(b"/work/log", mode=None, user=None, append=append, parents=False)
        with pytest.raises(QuotaExceeded) as caught:
            for _ in range(100):
                file.write(bytes(1 << 16))
        assert caught.value.data["resource"] == "disk"
        file.abort()
        assert [info for info in box.files.list(b"/work") if info.name != "log"] == before
        assert read(box, b"/work/log") == b"one"
        assert box.run("s = os.statvfs('/'); result = s.f_bfree * s.f_bsize > 3 << 20") is True
        assert write(box, b"/work/other", bytes(1 << 20)) == 1 << 20


def test_no_inodes_left() -> None:
    with Box("host", inodes=100) as box:
        box.run("os.chdir('/work')\ntry:\n  for i in range(200): open(str(i), 'w').close()\nexcept OSError: pass")
        with pytest.raises(QuotaExceeded, match="inodes") as caught:
            write(box, b"/work/new")
        assert caught.value.data["resource"] == "inodes"
        with pytest.raises(QuotaExceeded):
            box.files.mkdir(b"/work/d", mode=0o755, user=None, parents=False)
        box.files.remove(b"/work/1", recursive=False)
        write(box, b"/work/new")


def test_large(box: Box, here: bytes) -> None:
    file = box.files.open_write(here + b"/large", mode=None, user=None, append=False, parents=False)
    for number in range(16):
        file.write(bytes([number]) * (1 << 20))
    assert file.commit() == 16 << 20
    reader = box.files.open_read(here + b"/large")
    pieces = list(chunks(reader))
    reader.close()
    assert max(map(len, pieces)) == 1 << 20
    assert b"".join(pieces) == b"".join(bytes([number]) * (1 << 20) for number in range(16))
    box.files.remove(here + b"/large", recursive=False)


@pytest.mark.parametrize("where", [b"/d", b"/fifo", b"/socket", b"/to-d", b"/to-fifo", b"/loop", b"/d/", b"/to-root", b"/to-up"])
@pytest.mark.parametrize("append", [False, True])
def test_what_cannot_be_written(box: Box, here: bytes, where: bytes, append: bool) -> None:
    box.run("""
os.mkdir('d'); os.mkfifo('fifo'); os.symlink('d', 'to-d'); os.symlink('fifo', 'to-fifo'); os.symlink('loop', 'loop')
os.symlink('/', 'to-root'); os.symlink('..', 'to-up')
s = socket.socket(socket.AF_UNIX); s.bind('socket'); s.close()
""")
    before = box.run("result = sorted(os.listdir('.'))")
    with pytest.raises((Conflict, InvalidRequest)):
        write(box, here + where, append=append)
    assert box.run("result = sorted(os.listdir('.'))") == before


def test_a_missing_directory(box: Box, here: bytes) -> None:
    with pytest.raises(NotFound):
        write(box, here + b"/no/file")
    with pytest.raises(Conflict):
        box.run("open('file', 'w').close()")
        write(box, here + b"/file/file", parents=True)
    box.run("os.symlink('nowhere', 'dangling')")
    with pytest.raises(Conflict):
        write(box, here + b"/dangling/file", parents=True)
    with pytest.raises(NotFound):
        write(box, here + b"/no/../file", parents=True)


def test_shared_memory_is_the_sandboxs_own(box: Box) -> None:
    write(box, b"/dev/shm/file", b"x", user="user")
    assert box.run("s = os.stat('/dev/shm/file'); os.unlink('/dev/shm/file'); result = [s.st_uid, s.st_size]") == [1000, 1]


# --- reading -------------------------------------------------------------------------------------------------------


def test_ranges(box: Box, here: bytes) -> None:
    write(box, here + b"/file", bytes(range(256)))
    assert read(box, here + b"/file", 250) == bytes(range(250, 256))
    assert read(box, here + b"/file", 10, 5) == bytes(range(10, 15))
    assert read(box, here + b"/file", 250, 100) == bytes(range(250, 256))
    assert read(box, here + b"/file", 1 << 40) == b""
    assert read(box, here + b"/file", 0, 0) == b""


def test_a_file_that_grows_has_an_end(box: Box, here: bytes) -> None:
    write(box, here + b"/file", bytes(2 << 20))
    reader = box.files.open_read(here + b"/file")
    total = 0
    for piece in chunks(reader):
        total += len(piece)
        box.run("open('file', 'ab').write(bytes(2 << 20))")
    reader.close()
    assert total == 2 << 20
    box.files.remove(here + b"/file", recursive=False)


def test_a_file_that_is_cut_while_it_is_read(box: Box, here: bytes) -> None:
    write(box, here + b"/file", bytes(3 << 20))
    reader = box.files.open_read(here + b"/file")
    pieces = chunks(reader)
    next(pieces)
    box.run("os.truncate('file', 0)")
    assert list(pieces) == []
    reader.close()


def test_others_private_files(box: Box, here: bytes) -> None:
    write(box, here + b"/file", b"secret", mode=0o600, user="user")
    assert read(box, here + b"/file") == b"secret"
    write(box, here + b"/none", b"secret", mode=0)
    assert read(box, here + b"/none") == b"secret"


@pytest.mark.parametrize("where", [b"/d", b"/fifo", b"/socket", b"/to-fifo"])
def test_what_cannot_be_read(box: Box, here: bytes, where: bytes) -> None:
    box.run("os.mkdir('d'); os.mkfifo('fifo'); os.symlink('fifo', 'to-fifo')")
    box.run("s = socket.socket(socket.AF_UNIX); s.bind('socket'); s.close()")
    with pytest.raises(Conflict, match="not a regular file"):
        box.files.open_read(here + where)


def test_a_leased_file_makes_nobody_wait(box: Box, here: bytes) -> None:
    """The sandbox may hold a lease on its own file; an ordinary open would wait for its holder, up to 45 seconds."""
    box.run("signal.signal(signal.SIGIO, signal.SIG_IGN); f = open('file', 'w'); fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_WRLCK)")
    with pytest.raises(Conflict, match="lease"):
        box.files.open_read(here + b"/file")
    with pytest.raises(Conflict, match="lease"):
        write(box, here + b"/file", append=True)
    box.run("f.close()")
    assert read(box, here + b"/file") == b""


# --- describing ----------------------------------------------------------------------------------------------------


def test_stat(box: Box, here: bytes) -> None:
    box.run("open('file', 'w').write('12345'); os.chown('file', 7, 8); os.chmod('file', 0o4711); os.utime('file', (1, 1234567890.5))")
    box.run("os.symlink('file', 'link'); os.symlink('gone', 'dangling'); os.mkfifo('fifo', 0o600)")
    info = box.files.stat(here + b"/file")
    assert (info.name, info.raw_name, info.kind, info.size_bytes, info.mode) == ("file", b"file", "file", 5, 0o4711)
    assert (info.uid, info.gid, info.modified_at, info.target) == (7, 8, 1234567890.5, None)
    assert box.files.stat(here + b"/link").kind == "file"
    info = box.files.stat(here + b"/link", follow=False)
    assert (info.kind, info.target, info.name) == ("symlink", b"file", "link")
    with pytest.raises(NotFound):
        box.files.stat(here + b"/dangling")
    assert box.files.stat(here + b"/dangling", follow=False).target == b"gone"
    assert box.files.stat(here + b"/fifo").kind == "fifo"
    assert box.files.stat(b"/").name == "/"
    assert box.files.stat(b"//work//").kind == "directory"


def test_ids_without_meaning_inside(box: Box) -> None:
    assert box.files.stat(b"/proc").uid == 65_534


def test_list(box: Box, here: bytes) -> None:
    names = [b"a", b"\xff\xfe", b"new\nline", b" ", "ü".encode(), b"x" * 255, b"-rf", b"..."]
    box.run(f"for n in {names!r}: open(n, 'w').close()\nos.symlink('a', 'link'); os.mkdir('d')")
    found = box.files.list(here)
    assert [info.raw_name for info in found] == sorted([*names, b"link", b"d"])
    for info in found:
        info.name.encode()
    assert {info.name: info.target for info in found}["link"] == b"a"
    with pytest.raises(Conflict):
        box.files.list(here + b"/a")
    with pytest.raises(NotFound):
        box.files.list(here + b"/none")


def test_odd_names_work_everywhere(box: Box, here: bytes) -> None:
    for name in (b"\xff\xfe", b"new\nline", b" ", b"x" * 255, b"-rf", b"..."):
        path = here + b"/" + name
        write(box, path, name)
        assert read(box, path) == name
        assert box.files.move(path, here + b"/moved").name == "moved"
        assert box.files.move(here + b"/moved", path).raw_name == name
        assert box.files.chmod(path, mode=0o600, user="user").uid == 1000
        box.files.remove(path, recursive=False)
    assert box.run("result = os.listdir('.')") == []


# --- changing ------------------------------------------------------------------------------------------------------


def test_mkdir(box: Box, here: bytes) -> None:
    info = box.files.mkdir(here + b"/d", mode=0o1777, user="user", parents=False)
    assert (info.kind, info.mode, info.uid, info.gid, info.name) == ("directory", 0o1777, 1000, 1001, "d")
    with pytest.raises(Conflict, match="exists"):
        box.files.mkdir(here + b"/d", mode=0o755, user=None, parents=False)
    with pytest.raises(NotFound):
        box.files.mkdir(here + b"/x/y", mode=0o755, user=None, parents=False)
    assert box.files.mkdir(here + b"/x/y", mode=0o700, user="5:6", parents=True).mode == 0o700
    assert inside(box, here + b"/x")["uid"] == 5
    assert box.files.mkdir(here + b"/d", mode=0o700, user="root", parents=True).mode == 0o1777  # it existed: as it was
    box.run("open('file', 'w').close(); os.symlink('d', 'to-d'); os.symlink('none', 'dangling')")
    assert box.files.mkdir(here + b"/to-d", mode=0o700, user=None, parents=True).kind == "directory"
    for name in (b"file", b"dangling", b"to-d"):
        with pytest.raises(Conflict):
            box.files.mkdir(here + b"/" + name, mode=0o700, user=None, parents=False)
    assert box.files.mkdir(b"/", mode=0o700, user=None, parents=True).name == "/"
    with pytest.raises(InvalidRequest):
        box.files.mkdir(b"/", mode=0o700, user=None, parents=False)


def test_move(box: Box, here: bytes) -> None:
    box.run("open('a', 'w').write('a'); open('b', 'w').write('b'); os.mkdir('d'); os.mkdir('full'); open('full/x', 'w').close()")
    box.run("os.symlink('a', 'link')")
    assert box.files.move(here + b"/a", here + b"/b").size_bytes == 1
    assert read(box, here + b"/b") == b"a"
    assert box.files.move(here + b"/link", here + b"/d/link").kind == "symlink"
    with pytest.raises(NotFound) as caught:
        box.files.move(here + b"/a", here + b"/c")
    assert caught.value.field == "path"
    with pytest.raises(NotFound) as caught:
        box.files.move(here + b"/b", here + b"/none/c")
    assert caught.value.field == "to"
    with pytest.raises(Conflict):
        box.files.move(here + b"/b", here + b"/d")
    with pytest.raises(Conflict):
        box.files.move(here + b"/d", here + b"/full")
    with pytest.raises(Conflict):
        box.files.move(here + b"/d", here + b"/b")
    with pytest.raises(InvalidRequest):
        box.files.move(here + b"/d", here + b"/d/below")
    with pytest.raises(Conflict, match="another file system"):
        box.files.move(here + b"/b", b"/dev/shm/b")
    with pytest.raises(InvalidRequest):
        box.files.move(b"/", here + b"/root")
    with pytest.raises(InvalidRequest):
        box.files.move(here + b"/b", b"relative")
    assert sorted(info.name for info in box.files.list(here)) == ["b", "d", "full"]


def test_chmod(box: Box, here: bytes) -> None:
    box.run("open('file', 'w').close(); os.symlink('file', 'link'); os.mkdir('d')")
    assert box.files.chmod(here + b"/file", mode=0o4755, user=None).mode == 0o4755
    info = box.files.chmod(here + b"/file", mode=None, user="user")
    assert (info.mode, info.uid, info.gid) == (0o755, 1000, 1001)
    info = box.files.chmod(here + b"/link", mode=0o2711, user="1:2")
    assert (info.kind, info.mode, info.uid, info.gid) == ("file", 0o2711, 1, 2)
    assert inside(box, here + b"/link")["uid"] == 0
    assert box.files.chmod(here + b"/d", mode=0o3777, user="user").mode == 0o3777


def test_remove(box: Box, here: bytes) -> None:
    box.run("open('file', 'w').close(); os.mkdir('empty'); os.makedirs('full/a/b'); open('full/a/b/c', 'w').close()")
    box.run("os.symlink('full', 'link'); os.symlink('/', 'full/root'); os.mkfifo('full/fifo')")
    with pytest.raises(Conflict, match="not empty"):
        box.files.remove(here + b"/full", recursive=False)
    box.files.remove(here + b"/link", recursive=True)
    assert len(box.files.list(here + b"/full")) == 3
    for name in (b"file", b"empty", b"full"):
        box.files.remove(here + b"/" + name, recursive=name == b"full")
        with pytest.raises(NotFound):
            box.files.remove(here + b"/" + name, recursive=True)
    assert box.run("result = [os.listdir('.'), sorted(os.listdir('/'))[0]]") == [[], "dev"]
    for path in (b"/", b"//", b"/.", b"/work/.."):
        with pytest.raises(InvalidRequest):
            box.files.remove(path, recursive=True)


def test_a_tree_wider_than_what_is_noted_of_it(box: Box, here: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.runtime.files.walk.MAX_SUBDIRECTORIES", 3)
    monkeypatch.setattr("opendsec.runtime.files.walk.MAX_PENDING", 5)
    box.run("for i in range(10):\n  for j in range(10): os.makedirs(f'd/{i}/{j}/x'); open(f'd/{i}/{j}/f', 'w').close()")
    box.files.remove(here + b"/d", recursive=True)
    assert box.run("result = os.listdir('.')") == []


def test_a_mount_point_is_not_removed(box: Box) -> None:
    box.run("open('/dev/shm/kept', 'w').close()")
    for path, recursive in ((b"/dev/shm", False), (b"/dev/shm", True), (b"/dev", True), (b"/proc", True)):
        with pytest.raises((Conflict, Denied)):
            box.files.remove(path, recursive=recursive)
    assert box.run("os.unlink('/dev/shm/kept'); result = os.path.isdir('/proc/1')") is True


def test_a_sandbox_that_has_ended() -> None:
    def gone() -> int:
        raise SandboxLost("the sandbox has ended")

    files = SandboxFiles(gone, UID_BASE)
    for call in (lambda: files.stat(b"/"), lambda: files.list(b"/"), lambda: files.open_read(b"/a"), lambda: files.open_watch(b"/")):
        with pytest.raises(SandboxLost):
            call()


@pytest.mark.parametrize("append", [False, True])
def test_a_sandbox_that_ends_before_the_commit(box: Box, here: bytes, append: bool) -> None:
    """Its file system is still there, through our descriptor, but nobody will ever see it again."""
    dead = False

    def root() -> int:
        if dead:
            raise SandboxLost("the sandbox has ended")
        return box.open_root()

    write(box, here + b"/file", b"x")
    file = SandboxFiles(root, UID_BASE).open_write(here + b"/file", mode=None, user=None, append=append, parents=False)
    file.write(b"x")
    dead = True
    with pytest.raises(SandboxLost):
        file.commit()


def test_a_sandbox_that_ends_while_its_files_are_removed(box: Box, here: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opendsec.runtime.files.walk.ALIVE_EVERY", 10)
    asked = 0

    def root() -> int:
        nonlocal asked
        asked += 1
        if asked > 3:
            raise SandboxLost("the sandbox has ended")
        return box.open_root()

    box.run("os.mkdir('d')\nfor i in range(100): open(f'd/{i}', 'w').close()")
    with pytest.raises(SandboxLost):
        SandboxFiles(root, UID_BASE).remove(here + b"/d", recursive=True)
    assert asked == 4
