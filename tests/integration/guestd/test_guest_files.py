# SPDX-License-Identifier: Apache-2.0
"""guestd on files, run as a service on this machine with a directory as the sandbox's root."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guestd import ANSWER, Guest, GuestError, N, Payload, service, text

APPEND, PARENTS, MODE, USER, RECURSIVE, FOLLOW = 1, 2, 4, 8, 16, 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "etc").mkdir()
    (tmp_path / "root" / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nann:x:1000:1001::/home/ann:/bin/sh\n")
    (tmp_path / "root" / "etc" / "group").write_text("crew:x:77:ann\n")
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "root"


@pytest.fixture
def guest(root: Path) -> Iterator[Guest]:
    with service(root=root) as guest:
        guest.hello()
        yield guest


def who(flags: int = 0, mode: int = 0, user: str = "") -> bytes:
    return struct.pack("<II", flags, mode) + text(user)


def refused(guest: Guest, name: str, payload: bytes) -> int:
    with pytest.raises(GuestError) as caught:
        guest.ask(name, payload)
    return int(caught.value.args[0])


def content(guest: Guest, id: int) -> bytes:
    """A stream out of the guest, to its end."""
    data = b""
    while True:
        for event in list(guest.events):
            if event[2] == id and event[0] in (N["TYPE_DATA"], N["TYPE_EOF"], N["TYPE_CLOSE"]):
                guest.events.remove(event)
                if event[0] == N["TYPE_EOF"]:
                    return data
                assert event[0] == N["TYPE_DATA"], "closed"
                data += event[3]
        event = guest.frame()
        if event[0] == N["TYPE_DATA"]:
            guest.send(N["TYPE_CREDIT"], struct.pack("<I", len(event[3])), flags=event[1], id=event[2])
        guest.events.append(event)


def begin(guest: Guest, name: str, payload: bytes) -> tuple[int, Payload]:
    kind = N[f"TYPE_{name}"]
    id = guest.send(kind, payload)
    return id, Payload(guest.next(kind | ANSWER, id)[1])


def read(guest: Guest, path: str, offset: int = 0, length: int = 2**64 - 1) -> bytes:
    id, _ = begin(guest, "READ", struct.pack("<QQ", offset, length) + text(path))
    return content(guest, id)


def feed(guest: Guest, id: int, data: bytes) -> None:
    """Send within what the guest allows."""
    credit = N["INITIAL_CREDIT"]
    while data:
        if not credit:
            credit += struct.unpack("<I", guest.next(N["TYPE_CREDIT"], id)[1])[0]
        part = data[: min(credit, 65_536)]
        guest.send(N["TYPE_DATA"], part, id=id)
        credit -= len(part)
        data = data[len(part) :]
    guest.send(N["TYPE_EOF"], id=id)


def write(guest: Guest, path: str, data: bytes, flags: int = 0, mode: int = 0, user: str = "", standard: str = "") -> int:
    id, _ = begin(guest, "WRITE", who(flags, mode, user) + text(standard) + text(path))
    feed(guest, id, data)
    return guest.ask("COMMIT", struct.pack("<Q", id)).take("Q")[0]


def records(data: bytes) -> list[tuple[int, dict[str, object], bytes]]:
    found: list[tuple[int, dict[str, object], bytes]] = []
    payload = Payload(data)
    while not payload.over:
        (kind,) = payload.take("I")
        if kind == 3:
            found.append((kind, {"name": payload.text(), "text": payload.text()}, b""))
            continue
        entry = payload.entry()
        body = b""
        if kind == 1 and stat.S_ISREG(int(str(entry["mode"]))):
            size = int(str(entry["size"]))
            body = payload.data[payload.at : payload.at + size]
            payload.at += size
        found.append((kind, entry, body))
    return found


def record(kind: int, name: str | bytes, mode: int, body: bytes = b"", *, target: str = "", uid: int = 0, gid: int = 0) -> bytes:
    numbers = struct.pack("<IIIIIQqQQ", kind, mode, uid, gid, 1, len(body), 1_600_000_000 * 10**9, 0, 0)
    return numbers + text(name) + text(target) + body


# --- looking ---------------------------------------------------------------------------------------------------------


def test_stat_tells_all_of_an_entry_and_follows_links_only_if_asked(guest: Guest, root: Path) -> None:
    (root / "a").write_bytes(b"12345")
    (root / "a").chmod(0o4711)
    os.utime(root / "a", ns=(0, 1_234_567_890_123_456_789))
    (root / "link").symlink_to("/a")
    entry = guest.ask("STAT", struct.pack("<I", 0) + text("/a")).entry()
    assert (entry["mode"], entry["size"], entry["mtime"], entry["name"]) == (0o104711, 5, 1_234_567_890_123_456_789, b"a")
    entry = guest.ask("STAT", struct.pack("<I", 0) + text("/link")).entry()
    assert (stat.S_ISLNK(int(str(entry["mode"]))), entry["target"]) == (True, b"/a")
    assert guest.ask("STAT", struct.pack("<I", FOLLOW) + text("/link")).entry()["size"] == 5
    assert refused(guest, "STAT", struct.pack("<I", 0) + text("/none")) == errno.ENOENT


def test_links_never_lead_out_of_the_root(guest: Guest, root: Path) -> None:
    (root / "up").symlink_to("../../../outside")
    (root / "absolute").symlink_to(root.parent / "outside")
    for path in ("/up", "/absolute", "/../outside"):
        assert refused(guest, "READ", struct.pack("<QQ", 0, 100) + text(path)) == errno.ENOENT


@pytest.mark.slow
def test_list_gives_every_entry_in_as_many_parts_as_it_takes(guest: Guest, root: Path) -> None:
    (root / "d").mkdir()
    for number in range(3000):
        (root / "d" / f"{number:04}-{'x' * 40}").touch()
    (root / "d" / "link").symlink_to("nowhere")
    id = guest.send(N["TYPE_LIST"], struct.pack("<I", 5000) + text("/d"))
    names, parts, flags = [], 0, 1
    while flags:
        flags, data = guest.next(N["TYPE_LIST"] | ANSWER, id)
        payload = Payload(data)
        names += [payload.entry()["name"] for _ in range(payload.take("I")[0])]
        assert payload.over
        parts += 1
    assert len(names) == len(set(names)) == 3001
    assert parts > 3
    assert refused(guest, "LIST", struct.pack("<I", 100) + text("/d")) == errno.EFBIG
    assert refused(guest, "LIST", struct.pack("<I", 100) + text("/etc/passwd")) == errno.ENOTDIR


def test_reading_gives_ranges_and_never_opens_what_is_no_file(guest: Guest, root: Path) -> None:
    data = os.urandom(1_000_000)
    (root / "f").write_bytes(data)
    os.mkfifo(root / "fifo")
    assert read(guest, "/f") == data
    assert read(guest, "/f", 999_990) == data[-10:]
    assert read(guest, "/f", 5, 7) == data[5:12]
    assert read(guest, "/f", 2_000_000) == b""
    assert refused(guest, "READ", struct.pack("<QQ", 0, 1) + text("/fifo")) == errno.ENXIO
    assert refused(guest, "READ", struct.pack("<QQ", 0, 1) + text("/etc")) == errno.EISDIR


def test_a_reader_that_has_enough_ends_the_transfer(guest: Guest, root: Path) -> None:
    (root / "f").write_bytes(bytes(1_000_000))
    guest.auto_credit = False
    id, _ = begin(guest, "READ", struct.pack("<QQ", 0, 2**63) + text("/f"))
    guest.send(N["TYPE_CLOSE"], struct.pack("<I", 0), id=id)
    guest.ask("PING")
    assert sum(len(event[3]) for event in guest.events if event[2] == id) <= N["INITIAL_CREDIT"]
    assert refused(guest, "ABORT", struct.pack("<Q", id)) == errno.ESRCH


# --- changing --------------------------------------------------------------------------------------------------------


def test_a_file_appears_whole_on_commit_and_keeps_what_an_existing_one_had(guest: Guest, root: Path) -> None:
    data = os.urandom(700_000)
    id, answer = begin(guest, "WRITE", who() + text("ann") + text("/new"))
    assert answer.take("I") == (0,)
    feed(guest, id, data)
    guest.ask("PING")
    assert not (root / "new").exists()
    assert guest.ask("COMMIT", struct.pack("<Q", id)).take("Q") == (700_000,)
    st = (root / "new").stat()
    assert ((root / "new").read_bytes(), st.st_uid, st.st_gid, st.st_mode & 0o7777) == (data, 1000, 1001, 0o644)
    (root / "new").chmod(0o4640)
    assert write(guest, "/new", b"short") == 5
    st = (root / "new").stat()
    assert ((root / "new").read_bytes(), st.st_uid, st.st_mode & 0o7777) == (b"short", 1000, 0o640)
    assert write(guest, "/new", b"+", APPEND | MODE | USER, 0o600, "7:crew") == 6
    st = (root / "new").stat()
    assert ((root / "new").read_bytes(), st.st_uid, st.st_gid, st.st_mode & 0o7777) == (b"short+", 7, 77, 0o600)


def test_an_aborted_write_leaves_nothing(guest: Guest, root: Path) -> None:
    (root / "f").write_bytes(b"old")
    id, _ = begin(guest, "WRITE", who() + text("") + text("/f"))
    guest.send(N["TYPE_DATA"], b"new", id=id)
    guest.ask("ABORT", struct.pack("<Q", id))
    assert (root / "f").read_bytes() == b"old"
    assert sorted(os.listdir(root)) == ["etc", "f"]
    id, _ = begin(guest, "WRITE", who() + text("") + text("/g"))
    guest.hello()
    assert sorted(os.listdir(root)) == ["etc", "f"]


def test_writing_follows_links_as_a_shell_does(guest: Guest, root: Path) -> None:
    (root / "link").symlink_to("a/target")
    assert refused(guest, "WRITE", who() + text("") + text("/link")) == errno.ENOENT
    (root / "a").mkdir()
    write(guest, "/link", b"x")
    assert (root / "link").is_symlink() and (root / "a" / "target").read_bytes() == b"x"
    (root / "loop").symlink_to("loop")
    assert refused(guest, "WRITE", who() + text("") + text("/loop")) == errno.ELOOP
    assert refused(guest, "WRITE", who() + text("") + text("/a")) == errno.EISDIR
    write(guest, "/deep/er/file", b"y", PARENTS | USER, 0, "ann")
    assert (root / "deep" / "er").stat().st_uid == 1000
    assert refused(guest, "WRITE", who(USER, 0, "nobody-here") + text("") + text("/f")) == errno.EINVAL


def test_directories_moves_modes_and_removal(guest: Guest, root: Path) -> None:
    entry = guest.ask("MKDIR", who(MODE, 0o1777) + text("/d")).entry()
    assert (entry["mode"], entry["name"]) == (0o041777, b"d")
    assert refused(guest, "MKDIR", who() + text("/d")) == errno.EEXIST
    assert refused(guest, "MKDIR", who() + text("/etc/passwd")) == errno.EEXIST
    assert refused(guest, "MKDIR", who() + text("/no/d")) == errno.ENOENT
    guest.ask("MKDIR", who(PARENTS | USER, 0, "ann") + text("/d/e/f"))
    assert (root / "d/e/f").stat().st_uid == (root / "d/e").stat().st_uid == 1000
    assert guest.ask("MOVE", text("/d/e") + text("/g")).entry()["name"] == b"g"
    assert refused(guest, "MOVE", text("/d/e") + text("/h")) == errno.ENOENT
    entry = guest.ask("CHMOD", who(MODE | USER, 0o2750, "root:crew") + text("/g")).entry()
    assert (entry["mode"], entry["gid"]) == (0o042750, 77)
    assert refused(guest, "REMOVE", struct.pack("<I", 0) + text("/g")) == errno.ENOTEMPTY
    assert refused(guest, "REMOVE", struct.pack("<I", RECURSIVE) + text("/")) == errno.EINVAL
    guest.ask("REMOVE", struct.pack("<I", RECURSIVE) + text("/g"))
    guest.ask("REMOVE", struct.pack("<I", 0) + text("/d"))
    assert sorted(os.listdir(root)) == ["etc"]


@pytest.mark.slow
def test_a_tree_deeper_than_descriptors_go_is_removed(guest: Guest, root: Path) -> None:
    (root / "deep").mkdir()
    fd = os.open(root / "deep", os.O_DIRECTORY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        below = os.open("d", os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    guest.ask("REMOVE", struct.pack("<I", RECURSIVE) + text("/deep"))
    assert not (root / "deep").exists()


# --- trees -----------------------------------------------------------------------------------------------------------


def test_a_walk_is_extracted_as_it_was(guest: Guest, root: Path) -> None:
    tree = root / "tree"
    (tree / "b" / "c").mkdir(parents=True)
    (tree / "b" / "c" / "big").write_bytes(os.urandom(400_000))
    (tree / "a").write_bytes(b"a")
    os.link(tree / "a", tree / "z")
    (tree / "link").symlink_to("nowhere")
    os.mkfifo(tree / "fifo")
    os.chown(tree / "a", 5, 6)
    (tree / "a").chmod(0o4755)
    os.utime(tree / "a", (1_600_000_000, 1_600_000_000))
    id, answer = begin(guest, "WALK", text("/tree"))
    assert stat.S_ISDIR(int(str(answer.entry()["mode"])))
    stream = content(guest, id)
    found = records(stream)
    assert [(kind, entry["name"]) for kind, entry, _ in found] == [
        (1, b"."), (1, b"a"), (1, b"fifo"), (1, b"link"), (2, b"z"), (1, b"b"), (1, b"b/c"), (1, b"b/c/big"),
    ]  # fmt: skip
    id, _ = begin(guest, "EXTRACT", who(PARENTS) + text("/copy"))
    feed(guest, id, stream)
    assert guest.ask("COMMIT", struct.pack("<Q", id)).take("Q") == (400_001,)
    copy = root / "copy"
    assert (copy / "b/c/big").read_bytes() == (tree / "b/c/big").read_bytes()
    st = (copy / "a").stat()
    assert (st.st_mode & 0o7777, st.st_uid, st.st_gid, st.st_mtime, st.st_nlink) == (0o4755, 5, 6, 1_600_000_000, 2)
    assert os.readlink(copy / "link") == "nowhere" and stat.S_ISFIFO((copy / "fifo").stat().st_mode)


def test_a_walk_of_a_file_is_one_record(guest: Guest, root: Path) -> None:
    (root / "f").write_bytes(b"data")
    id, _ = begin(guest, "WALK", text("/f"))
    [(kind, entry, body)] = records(content(guest, id))
    assert (kind, entry["name"], body) == (1, b"f", b"data")


def test_what_is_extracted_stays_beneath_and_replaces_links(guest: Guest, root: Path) -> None:
    (root / "t").mkdir()
    (root / "t" / "evil").symlink_to("/etc/passwd")
    (root / "t" / "out").symlink_to("/etc")
    (root / "t" / "inside").mkdir()
    (root / "t" / "in").symlink_to("inside")

    def extract(data: bytes, flags: int = 0, user: str = "") -> int:
        id, _ = begin(guest, "EXTRACT", who(flags, 0, user) + text("/t"))
        feed(guest, id, data)
        try:
            guest.ask("COMMIT", struct.pack("<Q", id))
        except GuestError as error:
            return int(error.args[0])
        return 0

    assert extract(record(1, "evil", 0o100644, b"x")) == 0
    assert (root / "etc/passwd").read_text().startswith("root") and not (root / "t/evil").is_symlink()
    assert extract(record(1, "out/x", 0o100644, b"x")) == errno.EXDEV
    assert extract(record(1, "in/x", 0o100644, b"x")) == 0 and (root / "t/inside/x").exists()
    assert extract(record(1, "../x", 0o100644, b"x")) == errno.EINVAL
    assert extract(record(1, "/x", 0o100644, b"x")) == errno.EINVAL
    assert extract(record(1, "inside", 0o100644, b"x")) == errno.EISDIR
    assert extract(record(1, "in", 0o040700)) == 0 and (root / "t/in").is_symlink()
    assert extract(record(1, "device", 0o020600)) == errno.EINVAL
    assert extract(record(2, "hard", 0o100644, target="../etc/passwd")) == errno.EINVAL
    assert extract(record(2, "hard", 0o100644, target="out/passwd")) == errno.EXDEV
    assert extract(record(1, "mine", 0o104755, b"x", uid=9), USER, "ann") == 0
    assert ((root / "t/mine").stat().st_uid, (root / "t/mine").stat().st_mode & 0o7777) == (1000, 0o755)
    assert extract(record(1, "cut", 0o100644, b"0123456789")[:-3]) == errno.EINVAL
    assert not (root / "t/cut").exists()
    assert extract(record(1, "a/b/c/d", 0o100644, b"x")) == 0 and (root / "t/a/b/c/d").read_bytes() == b"x"
    assert extract(b"".join(record(1, f"many/{n}", 0o100644, b"%d" % n) for n in range(500))) == 0
    assert len(os.listdir(root / "t/many")) == 500


# --- watches ---------------------------------------------------------------------------------------------------------


def test_a_watch_tells_changes_and_its_directorys_end(guest: Guest, root: Path) -> None:
    (root / "w").mkdir()
    id, _ = begin(guest, "WATCH", text("/w"))
    (root / "w" / "f").write_bytes(b"1")
    (root / "w" / "f").rename(root / "w" / "g")
    (root / "w" / "g").unlink()
    (root / "w").rmdir()
    seen: list[tuple[int, bytes]] = []
    while not seen or seen[-1][0] != 8:
        payload = Payload(guest.next(N["TYPE_WATCHED"], id)[1])
        for _ in range(payload.take("I")[0]):
            event = (payload.take("I")[0], payload.text())
            seen += [event] if seen[-1:] != [event] else []  # one that is told twice was read twice
    assert seen == [(1, b"f"), (2, b"f"), (4, b"f"), (5, b"g"), (3, b"g"), (8, b"")]
    guest.ask("UNWATCH", struct.pack("<Q", id))
    assert refused(guest, "WATCH", text("/etc/passwd")) == errno.ENOTDIR
