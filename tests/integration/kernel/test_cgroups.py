# SPDX-License-Identifier: Apache-2.0
"""Groups on the real kernel: what this machine has, v1 alone (by looking away from v2), and v2 passing a controller on."""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from opendsec.kernel import abi, cgroup_files, cgroups, procfs, syscalls
from tests.integration.kernel.children import in_child, waiting_child
from tests.support import requires

pytestmark = requires("cgroup_limits")
needs_v2 = requires("cgroup_v2")

EDGE = f"opendsec-test{os.getpid()}"


def v1_only() -> cgroups.Hierarchies:
    """What a machine without cgroup2 would find."""
    found = cgroups.discover()
    return cgroups.Hierarchies(None, {name: home for name, home in found.homes.items() if home[0] == 1})


@pytest.fixture(params=["as it is", "v1"])
def hierarchies(request: pytest.FixtureRequest) -> Iterator[cgroups.Hierarchies]:
    found = v1_only()
    # On a machine with pure v2 the second run is the first again: there is no v1 to test.
    if request.param == "as it is" or found.missing or "freezer" not in found.homes:
        found = cgroups.discover()
    yield found
    found.group(EDGE).remove()


@pytest.fixture
def group(hierarchies: cgroups.Hierarchies) -> Iterator[cgroups.Group]:
    group = hierarchies.group(f"{EDGE}/box")
    group.create()
    yield group
    group.remove()
    assert not group.exists()


def enter(group: cgroups.Group) -> tuple[int | None, list[int]]:
    return group.open_v2_dir(), group.open_join()


class Inside:
    """Children in a group, killed and reaped at the end."""

    def __init__(self, group: cgroups.Group) -> None:
        self.group = group
        self.pids: list[int] = []

    def start(self, body: str = "wait") -> int:
        directory, join = enter(self.group)
        ready, writing = os.pipe2(os.O_CLOEXEC)
        pid, _ = syscalls.clone3(0, cgroup_fd=directory)
        if pid == 0:
            try:
                cgroups.join_fds(join)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.write(writing, b"x")
                if body == "grow":
                    block = bytearray(256 << 20)
                    os._exit(block[0])
                while body == "spin":
                    pass
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        self.pids.append(pid)
        os.close(writing)
        assert os.read(ready, 1) == b"x"
        for fd in (ready, *join, *([] if directory is None else [directory])):
            os.close(fd)
        return pid

    def reap(self) -> list[int]:
        statuses = [os.waitpid(pid, 0)[1] for pid in self.pids]
        self.pids = []
        return statuses

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
        self.reap()


def test_create_sets_every_limit_and_remove_leaves_nothing(hierarchies: cgroups.Hierarchies) -> None:
    group = hierarchies.group(f"{EDGE}/box")
    group.create({"memory_bytes": 64 << 20, "cpu_cores": 0.5, "cpu_weight": 200, "pids": 9})
    try:
        assert group.exists()
        assert group.usage().pids == 0
        assert not group.populated()
        assert group.procs() == []
        group.update({"memory_bytes": 128 << 20})
        group.update({"memory_bytes": 32 << 20, "cpu_cores": None, "cpu_weight": None, "pids": None})
        group.update({"memory_bytes": None})
        with pytest.raises(FileExistsError):
            group.create()
        with pytest.raises(ValueError, match="unknown limits"):
            group.update({"memory": 1})
    finally:
        group.remove()
    group.remove()  # again is fine
    hierarchies.group(EDGE).remove()
    for home in {*hierarchies.homes.values(), hierarchies.tree}:
        assert not os.path.exists(f"{home[1]}/{EDGE}")


def test_a_failed_create_leaves_nothing(hierarchies: cgroups.Hierarchies) -> None:
    group = hierarchies.group(f"{EDGE}/box")
    for limits, error in (({"pids": -1}, ValueError), ({"memory_bytes": 1 << 80}, ValueError), ({"pids": 1 << 40}, OSError)):
        with pytest.raises(error):
            group.create(limits)
        assert not group.exists()
    hierarchies.group(EDGE).remove_if_empty()
    assert not hierarchies.group(EDGE).exists()


def test_a_child_process_is_in_every_hierarchy(group: cgroups.Group) -> None:
    command = group.child("proc_1")
    command.create()
    directory, join = enter(command)

    def body() -> None:
        cgroups.join_fds(join)
        where = procfs.cgroup()
        version, mount = group.hierarchies.tree
        tree = "" if version == 2 else os.path.basename(mount)
        assert where[tree].endswith(b"/box/proc_1")
        for name in ("memory", "cpu", "pids"):
            if group.hierarchies.homes[name][0] == 1:
                assert where[name].endswith(b"/box")

    in_child(body, cgroup_fd=directory)
    for fd in (*join, *([] if directory is None else [directory])):
        os.close(fd)
    assert [child.name for child in group.children()] == [command.name]


def test_join_by_path(group: cgroups.Group) -> None:
    def body() -> None:
        cgroups.join(group.join_paths())
        for name in ("memory", "cpu", "pids"):
            if group.hierarchies.homes[name][0] == 1:
                assert procfs.cgroup()[name].endswith(b"/box")

    in_child(body)


def test_remove_kills_all_below_and_children_go_first(group: cgroups.Group) -> None:
    command = group.child("proc_1")
    command.create()
    with Inside(command) as inside, Inside(group) as beside:
        pids = {inside.start(), inside.start(), beside.start()}
        assert set(group.procs()) == pids
        assert group.populated()
        assert command.usage().pids == 2
        group.remove()
        assert all(os.WTERMSIG(status) == signal.SIGKILL for status in inside.reap() + beside.reap())
    assert not command.exists()


def test_kill_takes_a_childs_whole_tree_and_no_more(group: cgroups.Group) -> None:
    one, two = group.child("one"), group.child("two")
    one.create()
    two.create()
    with Inside(one) as first, Inside(two) as second:
        first.start()
        survivor = second.start()
        one.kill()
        one.wait_empty()
        assert not one.populated()
        assert group.populated()
        assert group.procs() == [survivor]
        first.reap()


def test_fork_bomb_ends_at_once(group: cgroups.Group) -> None:
    group.update({"pids": 40})
    bomb = group.child("bomb")
    bomb.create()
    directory, join = enter(bomb)
    # In a pid namespace, so that no zombie of it is left for somebody else to reap.
    pid, _ = syscalls.clone3(abi.CLONE_NEWPID, cgroup_fd=directory)
    if pid == 0:
        cgroups.join_fds(join)
        while True:
            try:
                os.fork()
            except OSError:
                continue
    for fd in (*join, *([] if directory is None else [directory])):
        os.close(fd)
    while not group.events().pids_max_hits:
        os.sched_yield()
    bomb.kill()
    bomb.wait_empty()
    os.waitpid(pid, 0)
    assert group.usage().pids == 0
    assert group.procs() == []


def test_freeze_stops_and_thaw_lets_run(group: cgroups.Group) -> None:
    with Inside(group) as inside:
        pid = inside.start("spin")
        group.freeze()
        ticks = procfs.read(f"/proc/{pid}/stat").rsplit(b")", 1)[1].split()[11:13]
        for _ in range(1000):
            os.sched_yield()
        assert procfs.read(f"/proc/{pid}/stat").rsplit(b")", 1)[1].split()[11:13] == ticks
        group.thaw()
        used = group.usage().cpu_us
        if used is not None:
            while group.usage().cpu_us == used:
                os.sched_yield()
        group.freeze()
        group.kill()  # a frozen group dies as well
        group.wait_empty()
        assert os.WTERMSIG(inside.reap()[0]) == signal.SIGKILL


def test_memory_limit_kills_and_is_counted(group: cgroups.Group) -> None:
    group.update({"memory_bytes": 48 << 20})
    with Inside(group) as inside:
        inside.start("grow")
        assert os.WTERMSIG(inside.reap()[0]) == signal.SIGKILL
    events, used = group.events(), group.usage()
    assert events.oom_kills == 1
    assert events.memory_max_hits >= 1
    assert used.memory_peak_bytes is not None
    assert 40 << 20 <= used.memory_peak_bytes <= 48 << 20


def test_lowering_memory_below_use(group: cgroups.Group) -> None:
    """Anonymous memory cannot be reclaimed without swap: v1 says so and keeps the old limit."""
    group.update({"memory_bytes": 512 << 20})
    if group.hierarchies.homes["memory"][0] == 2:
        return  # v2 kills instead; the limit's own test covers that
    block, ready = os.pipe2(os.O_CLOEXEC)

    held: list[bytearray] = []

    def join_and_hold() -> None:
        cgroups.join_fds(join)
        held.append(bytearray(b"x") * (64 << 20))
        os.write(ready, b"x")

    join = group.open_join()
    with waiting_child(join=join_and_hold):
        os.read(block, 1)
        with pytest.raises(OSError, match="limit_in_bytes") as raised:
            group.update({"memory_bytes": 16 << 20})
        assert raised.value.errno == errno.EBUSY
    for fd in (*join, block, ready):
        os.close(fd)


def test_cpu_quota_throttles(group: cgroups.Group) -> None:
    group.update({"cpu_cores": 0.05})
    with Inside(group) as inside:
        inside.start("spin")
        while not group.events().cpu_throttled:
            os.sched_yield()
        assert group.events().cpu_throttled_us >= 0


def test_children_have_no_limits_of_their_own(group: cgroups.Group) -> None:
    child = group.child("x")
    for call in (lambda: child.update({"pids": 1}), child.events):
        with pytest.raises(ValueError, match="sandbox's group"):
            call()


def test_a_missing_group_names_its_path(hierarchies: cgroups.Hierarchies) -> None:
    group = hierarchies.group(f"{EDGE}/none")
    for call in (group.procs, group.populated, group.usage, group.events, group.freeze, group.thaw, group.kill, group.wait_empty):
        with pytest.raises(FileNotFoundError) as raised:
            call()
        assert f"{EDGE}/none" in raised.value.filename


def test_waiting_gives_up(group: cgroups.Group) -> None:
    with Inside(group) as inside:
        inside.start()
        with pytest.raises(TimeoutError) as raised:
            group.wait_empty(0.01)
        assert raised.value.filename == group.tree_path


def test_remove_copes_with_processes_outside_the_tree(group: cgroups.Group) -> None:
    """A process that has joined v1 groups and is not in the tree, as one that failed half-way."""
    paths = [path for path in group.join_paths() if not path.startswith(group.tree_path)]
    with waiting_child(join=lambda: cgroups.join(paths)) as (pid, _):
        group.remove()
        assert not any(os.path.exists(os.path.dirname(path)) for path in paths)
        assert not paths or procfs.stat(pid).state == "Z"


def test_remove_while_groups_are_made_inside(group: cgroups.Group) -> None:
    stop = threading.Event()
    made = 0

    def make() -> None:
        nonlocal made
        while not stop.is_set() and made < 200:
            try:
                os.mkdir(f"{group.tree_path}/late{made % 50}")
                made += 1
            except FileExistsError:
                made += 1
            except OSError:
                return  # the group is gone

    thread = threading.Thread(target=make)
    thread.start()
    while made < 20 and thread.is_alive():
        os.sched_yield()
    try:
        group.remove()
    finally:
        stop.set()
        thread.join()
    assert not group.exists()


def test_many_remove_it_at_once(hierarchies: cgroups.Hierarchies) -> None:
    """Each returns when it is gone, whoever of them took which part away."""
    for _ in range(20):
        group = hierarchies.group(f"{EDGE}/box")
        group.create()
        with Inside(group) as inside, ThreadPoolExecutor(3) as pool:
            inside.start()
            for removing in [pool.submit(group.remove) for _ in range(3)]:
                removing.result()
        assert not group.exists()


@needs_v2
def test_events_can_be_polled() -> None:
    group = cgroups.discover().group(f"{EDGE}/box")
    group.create()
    try:
        events = group.open_events()
        os.pread(events, 4096, 0)
        poller = select.poll()
        poller.register(events, select.POLLPRI)
        with Inside(group) as inside:
            inside.start()
            assert poller.poll(10_000)
            assert cgroup_files.parse_flat(os.pread(events, 4096, 0))["populated"] == 1
            assert not poller.poll(0)
            group.kill()
            assert poller.poll(10_000)
            assert cgroup_files.parse_flat(os.pread(events, 4096, 0))["populated"] == 0
        os.close(events)
    finally:
        group.remove()
        group.hierarchies.group(EDGE).remove()


@needs_v2
def test_v2_passes_controllers_on_to_the_group_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever controller this v2 hierarchy has: only then both the group and its children may hold processes."""
    found = cgroups.discover()
    assert found.v2
    offered = procfs.read(f"{found.v2}/cgroup.controllers").decode().split()
    control = f"{found.v2}/cgroup.subtree_control"
    enabled = procfs.read(control).decode().split()
    name = next((name for name in offered if name in ("hugetlb", "pids", "memory", "cpu")), None)
    if name is None:
        return  # nothing to pass on
    monkeypatch.setattr(cgroups, "CONTROLLERS", (name,))
    hierarchies = cgroups.Hierarchies(found.v2, {name: (2, found.v2)})
    group = hierarchies.group(f"{EDGE}/box")
    try:
        group.create()
        child = group.child("proc_1")
        child.create()
        assert procfs.read(f"{group.tree_path}/cgroup.controllers").decode().split() == [name]
        assert procfs.read(f"{group.tree_path}/cgroup.subtree_control").strip() == b""
        for place in (group, child):
            with Inside(place) as inside:
                inside.start()
                assert place.populated()
    finally:
        group.remove()
        hierarchies.group(EDGE).remove()
        if name not in enabled:
            procfs.write(control, f"-{name}")


@needs_v2
def test_kill_without_cgroup_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on kernels before 5.14: freeze, list, kill."""
    write = procfs.write

    def without_kill(path: str, text: str | bytes) -> None:
        if path.endswith("/cgroup.kill"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        write(path, text)

    group = cgroups.discover().group(f"{EDGE}/box")
    group.create()
    try:
        with Inside(group) as inside:
            inside.start()
            inside.start("spin")
            monkeypatch.setattr(procfs, "write", without_kill)
            group.kill()
            group.wait_empty()
            assert all(os.WTERMSIG(status) == signal.SIGKILL for status in inside.reap())
    finally:
        group.remove()
        group.hierarchies.group(EDGE).remove()


def test_pids_of_other_namespaces_are_never_signalled() -> None:
    """They show as 0, and kill(0) would be our own process group."""
    cgroups._kill_all([0])
    assert abi.SIGKILL == signal.SIGKILL
