# SPDX-License-Identifier: Apache-2.0
"""The file operations on a real container: EROFS layers, the overlay, masked /proc, /dev, and an agent inside that races."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Denied, Internal, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded, SandboxLost
from opendsec.runtime.backend import FileAccess
from tests.boxes import Box, Node


def read(files: FileAccess, path: bytes) -> bytes:
    reader = files.open_read(path)
    try:
        return reader.read(0, reader.size_bytes())
    finally:
        reader.close()


def write(files: FileAccess, path: bytes, data: bytes, *, user: str | None = None, append: bool = False, parents: bool = False) -> int:
    file = files.open_write(path, mode=None, user=user, append=append, parents=parents)
    file.write(data)
    return file.commit()


def copy(files: FileAccess, source: bytes, target: bytes) -> int:
    """From the sandbox to the sandbox, by way of a tar stream."""
    fd = os.memfd_create("archive", os.MFD_CLOEXEC)
    try:
        files.archive(source, fd)
        os.lseek(fd, 0, os.SEEK_SET)
        return files.extract(target, fd, user=None)
    finally:
        os.close(fd)


def test_what_is_written_outside_is_there_inside(box: Box) -> None:
    files = box.handle.files
    assert write(files, b"/srv/deep/file", b"hello", user="nobody", parents=True) == 5
    assert box.sh("stat -c '%u %g %a %s' /srv/deep/file; cat /srv/deep/file").text == "65534 65534 644 5\nhello"
    assert box.sh("ls -A /srv/deep").text == "file\n"
    assert write(files, b"/srv/deep/file", b" world", append=True) == 11
    box.sh("echo more >> /srv/deep/file")
    assert read(files, b"/srv/deep/file") == b"hello worldmore\n"
    assert write(files, b"/dev/shm/file", b"x") == 1
    assert box.sh("cat /dev/shm/file").text == "x"


def test_files_and_directories_of_the_image(box: Box) -> None:
    files = box.handle.files
    issue = read(files, b"/etc/debian_version")
    assert write(files, b"/etc/debian_version", issue, append=True) == 2 * len(issue)
    assert box.sh("cat /etc/debian_version").out == issue * 2
    assert write(files, b"/etc/passwd", b"root:x:0:0::/root:/bin/sh\nagent:x:7:8::/:/bin/sh\n") > 0
    assert write(files, b"/x", b"", user="agent") == 0
    assert box.sh("stat -c '%u %g' /x").text == "7 8\n"
    assert files.chmod(b"/usr/bin/env", mode=0o700, user="agent").uid == 7
    assert files.move(b"/usr/lib/python3/dist-packages", b"/packages").kind == "directory"
    assert box.sh("test -e /usr/lib/python3/dist-packages || ls -d /packages").text == "/packages\n"
    names = {info.name for info in files.list(b"/usr/share")}
    assert "perl5" in names or "git-core" in names
    files.remove(b"/usr/share/git-core", recursive=True)
    assert box.sh("test -e /usr/share/git-core || echo gone").text == "gone\n"


def test_a_tree_out_and_in(box: Box) -> None:
    assert copy(box.handle.files, b"/etc", b"/copy/of/etc") > 0
    assert box.sh("diff -r --no-dereference /etc /copy/of/etc").text == ""
    listing = "cd {} && find . -printf '%p %U %G %m %y %l %n\\n' | sort"
    # Hard links of directories differ with the file system; everything else is the same.
    one, other = (box.sh(listing.format(top) + " | sed 's/ d  [0-9]*$/ d/'").text for top in ("/etc", "/copy/of/etc"))
    assert one == other


def test_a_full_disk_is_the_sandboxs_alone(box: Box) -> None:
    files = box.handle.files
    file = files.open_write(b"/large", mode=None, user=None, append=False, parents=False)
    with pytest.raises(QuotaExceeded):
        for _ in range(64):
            file.write(bytes(1 << 20))
    assert box.sh("ls -A / | grep -c -e large -e opendsec").out == b"0\n"
    assert write(files, b"/small", bytes(1 << 20)) == 1 << 20
    for number in range(4_000):
        try:
            write(files, b"/tmp/%d" % number, b"")
        except QuotaExceeded:
            break
    else:
        pytest.fail("4,000 files in 2,000 inodes")
    assert box.works()


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/proc/kcore",
            "/proc/keys",
            "/proc/timer_list",
            "/proc/sysrq-trigger",
            "/proc/kmsg",
            "/proc/1/root/etc/passwd",
            "/proc/1/cwd/etc",
        ),
        *("/proc/self/root/etc/passwd", "/dev/null", "/dev/zero", "/dev/ptmx", "/dev/pts/ptmx", "/dev/stdin", "/dev/tty"),
    ],
)
def test_what_is_not_to_be_had(shared: Box, path: str) -> None:
    files = shared.handle.files
    shared.sh(f"rm -f /tmp/planted; ln -s {path} /tmp/planted")
    for name in (os.fsencode(path), b"/tmp/planted"):
        with pytest.raises((Denied, NotFound, Conflict, InvalidRequest)):
            files.open_read(name)
        with pytest.raises((Denied, NotFound, Conflict, InvalidRequest)):
            write(files, name, b"x", append=True)
        with pytest.raises((Denied, NotFound, Conflict, InvalidRequest)):
            write(files, name, b"x")
    with pytest.raises((Denied, NotFound, Conflict, InvalidRequest)):
        files.remove(os.fsencode(path), recursive=True)


@pytest.fixture(scope="module")
def shared(node: Node) -> Iterator[Box]:
    with node.box() as box:
        yield box


@pytest.mark.parametrize("name", ["kernel/core_pattern", "kernel/panic", "vm/overcommit_memory", "fs/file-max"])
def test_settings_of_the_host(shared: Box, name: str) -> None:
    before = Path("/proc/sys", name).read_bytes()
    shared.sh(f"rm -f /tmp/planted; ln -s /proc/sys/{name} /tmp/planted")
    for path in (b"/tmp/planted", b"/proc/sys/" + name.encode()):
        for append in (False, True):
            with pytest.raises(Denied):
                write(shared.handle.files, path, b"1\n", append=append)
    assert Path("/proc/sys", name).read_bytes() == before


RACER = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
os.makedirs('/w/spot/sub'); os.makedirs('/w/aside')
open('/w/spot/file', 'w').write('inside'); open('/w/spot/sub/file', 'w').write('inside')
links = {'a': '/proc/1/root/etc', 'b': '/proc/self/cwd', 'c': '../../../../../../../../etc', 'd': '/dev', 'e': '/proc/sys/kernel'}
for name, target in links.items(): os.symlink(target, '/w/aside/' + name)
os.mkfifo('/w/aside/fifo')
print('ready', flush=True)
while True:
    for name in links:
        libc.renameat2(-100, b'/w/spot', -100, b'/w/aside/' + name.encode(), 2)
        libc.renameat2(-100, b'/w/spot/sub', -100, b'/w/aside/e', 2)
        libc.renameat2(-100, b'/w/spot/file', -100, b'/w/aside/fifo', 2)
"""


@pytest.mark.slow
def test_an_agent_that_races(box: Box) -> None:
    """Links to where only the host may be, swapped with what is asked for: the host stays as it is, and nothing ever hangs."""
    files = box.handle.files
    racer = box.start_python(RACER)
    racer.expect("ready")
    operations: list[Callable[[], object]] = [
        lambda: read(files, b"/w/spot/file"),
        lambda: write(files, b"/w/spot/new", b"x"),
        lambda: write(files, b"/w/spot/file", b"x", append=True),
        lambda: write(files, b"/w/spot/core_pattern", b"|/bin/false"),
        lambda: files.chmod(b"/w/spot/file", mode=0o600, user="root"),
        lambda: files.mkdir(b"/w/spot/sub/made/deep", mode=0o755, user=None, parents=True),
        lambda: files.remove(b"/w/spot/sub/made", recursive=True),
        lambda: files.list(b"/w/spot"),
        lambda: copy(files, b"/w", b"/tmp/copy"),
        lambda: files.remove(b"/tmp/copy", recursive=True),
        lambda: files.move(b"/w/spot/new", b"/w/spot/newer"),
        lambda: files.open_watch(b"/w/spot").close(),
    ]
    core_pattern = Path("/proc/sys/kernel/core_pattern").read_bytes()
    done: set[int] = set()
    for _ in range(150):
        for number, operation in enumerate(operations):
            try:
                operation()
                done.add(number)
            except OpenDSecError as error:
                assert not isinstance(error, Internal | SandboxLost), error
    assert Path("/proc/sys/kernel/core_pattern").read_bytes() == core_pattern
    assert {0, 2, 7, 8} & done
    racer.running.kill_tree()
    racer.wait()
    assert box.works()


def test_after_the_end(node: Node) -> None:
    with node.box() as box:
        files = box.handle.files
        watch = files.open_watch(b"/tmp")
        file = files.open_write(b"/tmp/file", mode=None, user=None, append=False, parents=False)
        file.write(b"x")
        box.destroy()
        for call in (
            lambda: files.stat(b"/"),
            lambda: read(files, b"/etc/passwd"),
            lambda: write(files, b"/x", b""),
            lambda: files.list(b"/"),
        ):
            with pytest.raises(SandboxLost):
                call()
        file.abort()
        assert select.select([watch], [], [], 10)[0]
        assert [event.kind for event in watch.read()][-1] == "gone"
        watch.close()


def test_the_sandbox_ends_while_an_archive_is_taken(node: Node) -> None:
    """The archive fails or ends; it does not keep anything alive."""
    with node.box() as box:
        files = box.handle.files
        box.sh("mkdir /many && cd /many && seq 1500 | xargs touch; truncate -s 1T sparse")
        reading, writing = os.pipe()
        ended: list[BaseException | None] = []

        def take() -> None:
            try:
                files.archive(b"/many", writing)
                ended.append(None)
            except OpenDSecError as error:
                ended.append(error)

        thread = threading.Thread(target=take)
        thread.start()
        os.read(reading, 1 << 20)
        box.destroy()
        os.close(reading)
        thread.join()
        os.close(writing)
        assert isinstance(ended[0], Conflict | SandboxLost)
