# SPDX-License-Identifier: Apache-2.0
"""What the kernel does, as far as loading on demand is built upon it: see `kernel.fanotify`. If one of these fails, so does the design."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opendsec.images import erofs, layers
from opendsec.kernel import abi, fds, mounts, syscalls
from opendsec.kernel.fanotify import Event, Group, can_watch, parse_events
from tests.lazy import Reader, drop_page_cache, noise

pytestmark = pytest.mark.requires("fanotify_pre_content")

CONTENT = noise(1 << 20, 1)
NAME = "file"


class Lab:
    """A layer whose data file is empty, a group, and a thread that answers."""

    def __init__(self, folder: Path, content: bytes = CONTENT) -> None:
        tree = folder / "tree"
        tree.mkdir()
        (tree / NAME).write_bytes(content)
        (tree / NAME).chmod(0o755)
        erofs.pack(tree, folder, all_root=True)
        self.meta, whole = folder / layers.META, folder / layers.DATA
        self.blob = whole.read_bytes()
        self.data = folder / "sparse"
        self.fd = os.open(self.data, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        os.ftruncate(self.fd, len(self.blob))
        self.group = Group.create()
        self.asked: list[Event] = []
        self._stopping, self._stop = os.pipe()
        self._thread: threading.Thread | None = None
        self._mounts: list[int] = []

    def mount(self) -> int:
        self._mounts.append(mounts.mount_erofs(self.meta, self.data))
        return self._mounts[-1]

    def wait(self) -> list[Event]:
        """The next events, for the test to answer."""
        assert select.select([self.group], [], [], 20)[0]
        buffer = bytearray(4096)
        return list(parse_events(buffer[: self.group.read(buffer)]))

    def fill(self, event: Event) -> None:
        os.pwrite(event.fd, self.blob[event.offset : event.offset + event.count], event.offset)
        self.group.allow(event.fd)
        os.close(event.fd)

    def serve(self, answer: Callable[[Event], None] | None = None) -> None:
        def run() -> None:
            while self._stopping not in select.select([self.group, self._stopping], [], [])[0]:
                for event in self.wait():
                    self.asked.append(event)
                    (answer or self.fill)(event)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def close(self) -> None:
        for fd in self._mounts:
            os.close(fd)
        if self._thread is not None:
            os.close(self._stop)
            self._thread.join()
            os.close(self._stopping)
        else:
            os.close(self._stop)
            os.close(self._stopping)
        os.close(self.fd)
        if self.group.fd >= 0:
            os.close(self.group.fd)


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def read(mount: int) -> bytes | int:
    return Reader(mount, NAME).result()


def test_every_read_that_reaches_the_file_asks_and_the_page_cache_never_does(lab: Lab) -> None:
    lab.group.mark(lab.fd)
    lab.serve()
    first = lab.mount()
    assert read(first) == CONTENT
    count = len(lab.asked)
    assert count > 1 and all(event.count <= 128 << 10 for event in lab.asked)
    assert read(first) == CONTENT and len(lab.asked) == count
    assert read(lab.mount()) == CONTENT and len(lab.asked) > count  # all is there, but this mount's page cache is empty
    count = len(lab.asked)
    drop_page_cache()
    assert read(first) == CONTENT and len(lab.asked) > count


def test_without_the_mark_reads_are_free_and_with_it_again_the_old_mount_asks_again(lab: Lab) -> None:
    lab.group.mark(lab.fd)
    lab.serve()
    mount = lab.mount()
    assert read(mount) == CONTENT
    lab.group.unmark(lab.fd)
    lab.group.unmark(lab.fd)
    lab.asked.clear()
    drop_page_cache()
    assert read(mount) == CONTENT and not lab.asked
    lab.group.mark(lab.fd)
    drop_page_cache()
    assert read(mount) == CONTENT and lab.asked


def test_a_mount_from_before_the_mark_never_asks(lab: Lab) -> None:
    mount = lab.mount()
    lab.group.mark(lab.fd)
    lab.serve()
    assert read(mount) == bytes(len(CONTENT)) and not lab.asked


def test_our_own_writes_ask_nobody_by_a_descriptor_from_before_the_mark_or_of_an_event(lab: Lab) -> None:
    lab.group.mark(lab.fd)
    os.pwrite(lab.fd, b"x", 0)
    syscalls.fallocate(lab.fd, abi.FALLOC_FL_PUNCH_HOLE | abi.FALLOC_FL_KEEP_SIZE, 0, 4096)
    reader = Reader(lab.mount(), NAME)
    event = lab.wait()[0]
    os.pwrite(event.fd, b"x", 0)
    assert lab.group.read(bytearray(4096)) == 0
    lab.fill(event)
    lab.serve()
    assert reader.result() == CONTENT


def test_mapped_and_executed_files_are_right(tmp_path: Path) -> None:
    program = Path("/bin/true").read_bytes()
    lab = Lab(tmp_path, program)
    try:
        lab.group.mark(lab.fd)
        lab.serve()
        mount = lab.mount()
        assert subprocess.run([f"/proc/self/fd/{mount}/{NAME}"], pass_fds=[mount], check=False).returncode == 0
        mapped = "import mmap, sys; f = open(sys.argv[1], 'rb'); sys.stdout.buffer.write(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:])"
        second = lab.mount()
        command = [sys.executable, "-ISc", mapped, f"/proc/self/fd/{second}/{NAME}"]
        assert subprocess.run(command, pass_fds=[second], capture_output=True, check=True).stdout == program
        assert lab.asked
    finally:
        lab.close()


def test_a_denied_read_ahead_is_asked_again_by_the_page_and_then_it_is_an_error(lab: Lab) -> None:
    lab.group.mark(lab.fd)

    def deny(event: Event) -> None:
        lab.group.deny(event.fd, errno.EIO)
        os.close(event.fd)

    lab.serve(deny)
    assert read(lab.mount()) == errno.EIO
    assert len(lab.asked) >= 2 and lab.asked[-1].count == 4096


@pytest.mark.parametrize("code", [errno.EPERM, errno.EIO, errno.EBUSY, errno.ETXTBSY, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT])
def test_a_denial_may_have_a_reason(lab: Lab, code: int) -> None:
    lab.group.mark(lab.fd)
    reader = Reader(lab.mount(), NAME)
    for event in lab.wait():
        assert lab.group.deny(event.fd, code)
        assert not lab.group.deny(event.fd, code)
        os.close(event.fd)
    lab.serve()
    assert reader.result() == CONTENT


def test_the_group_s_end_lets_readers_read_holes(lab: Lab) -> None:
    """The danger that the family of processes is there for."""
    lab.group.mark(lab.fd)
    reader = Reader(lab.mount(), NAME)
    assert select.select([lab.group], [], [], 20)[0]
    os.close(lab.group.fd)
    lab.group.fd = -1
    assert reader.result() == bytes(len(CONTENT))


def test_whoever_has_the_group_can_answer_by_the_number(lab: Lab) -> None:
    lab.group.mark(lab.fd)
    reader = Reader(lab.mount(), NAME)
    events = lab.wait()
    for event in events:
        os.pwrite(lab.fd, lab.blob[event.offset : event.offset + event.count], event.offset)
        os.close(event.fd)  # as by the death of the process that had it
    lab.serve()
    for event in events:
        assert lab.group.allow(event.fd)
    assert reader.result() == CONTENT


def test_a_killed_reader_stops_waiting(lab: Lab) -> None:
    lab.group.mark(lab.fd)
    reader = Reader(lab.mount(), NAME)
    events = lab.wait()
    reader.process.kill()
    assert reader.result() == -signal.SIGKILL
    for event in events:
        lab.group.allow(event.fd)
        os.close(event.fd)


def test_a_child_that_shares_descriptors_leaves_them_to_its_parent(lab: Lab) -> None:
    lab.group.mark(lab.fd)
    reader = Reader(lab.mount(), NAME)
    told, tell = os.pipe()
    pid, pidfd = fds.fork_sharing()
    if pid == 0:
        try:
            (event, *_) = lab.wait()
            os.write(tell, f"{event.fd} {event.offset} {event.count}".encode())
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    fd, offset, count = map(int, os.read(told, 100).split())
    assert os.path.samestat(os.fstat(fd), os.fstat(lab.fd))
    lab.serve()
    lab.fill(Event(fd, 0, offset, count))
    assert reader.result() == CONTENT
    for one in (told, tell, pidfd):
        os.close(one)


def test_a_mount_is_seen_by_trying_to_lease_the_file(lab: Lab) -> None:
    assert not fds.held_by_others(lab.fd)
    mount = lab.mount()
    assert fds.held_by_others(lab.fd)
    os.close(mount)
    lab._mounts.remove(mount)
    assert not fds.held_by_others(lab.fd)


def test_dropping_under_a_mount_is_right_if_it_asks(lab: Lab) -> None:
    lab.group.mark(lab.fd)
    lab.serve()
    mount = lab.mount()
    assert read(mount) == CONTENT
    syscalls.fallocate(lab.fd, abi.FALLOC_FL_PUNCH_HOLE | abi.FALLOC_FL_KEEP_SIZE, 0, len(lab.blob))
    assert read(mount) == CONTENT  # out of its page cache
    drop_page_cache()
    assert read(mount) == CONTENT


def test_not_every_file_system_can_be_watched(tmp_path: Path) -> None:
    assert can_watch(tmp_path)
    fd = mounts.tmpfs(1 << 20, 16)
    try:
        assert not can_watch(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
