# SPDX-License-Identifier: Apache-2.0
"""The leak detector: what exists outside the test before and after it, compared.

A snapshot maps each kind to the things of that kind. Some kinds belong to this process; the others are the machine's, and they
say nothing about us while another test session runs beside this one, so `Machine` takes a lock that tells.
"""

from __future__ import annotations

import fcntl
import gc
import os
import re
import tempfile
import threading
import time
from glob import glob
from pathlib import Path

Snapshot = dict[str, dict[str, str]]

OURS = ("descriptors", "children", "threads", "temporary files")
MACHINE = ("processes", "mounts", "cgroups", "loop devices", "network namespaces")

# The kernel finishes some work after the call that asked for it has returned (a cgroup empties, a loop device clears itself).
# Only a test that already looks leaky waits for that, and no longer than this.
SETTLE_S = 8.0

PROJECT = re.compile(r"dsec-(edge|spawner)|opendsec[./](edge|kernel|images)|^/usr/bin/qemu-system-x86_64 -name")


def snapshot() -> Snapshot:
    return {
        "descriptors": descriptors(),
        "children": children(),
        "threads": {str(t.ident): t.name for t in threading.enumerate() if not t.daemon},
        "temporary files": {entry.path: entry.name for entry in os.scandir(tempfile.gettempdir())},
        "processes": project_processes(),
        "mounts": mounts(),
        "cgroups": cgroups(),
        "loop devices": loop_devices(),
        "network namespaces": network_namespaces(),
    }


def descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing
        found[f"{number} {target}"] = target
    return found


def _read(path: str) -> bytes:
    """Of a file that fits into one read. Twice for each test and each process of the machine: pathlib takes a minute of a run."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def _start_time(pid: str) -> str:
    return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[19].decode()


def _command(pid: str) -> str:
    return _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()


def _process(pid: str) -> tuple[str, str]:
    """A name that outlives pid reuse, and what the process is. Raises OSError when it has gone."""
    return f"{pid}@{_start_time(pid)}", _command(pid) or _read(f"/proc/{pid}/comm").decode(errors="replace").strip()


def _of_the_kernel() -> set[str]:
    """Its threads: most of what /proc lists."""
    try:
        return set(_read("/proc/2/task/2/children").decode().split()) if _read("/proc/2/comm") == b"kthreadd\n" else set()
    except OSError:
        return set()


def children() -> dict[str, str]:
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except OSError:
            continue  # a thread that has ended meanwhile
        for pid in pids:
            try:
                key, what = _process(pid)
            except OSError:
                continue
            if "multiprocessing.resource_tracker" not in what:  # the standard library keeps one for the process's life
                found[key] = what
    return found


def project_processes() -> dict[str, str]:
    """Edges, spawners, machine monitors and the first processes of sandboxes, whoever their parent is by now."""
    found = {}
    for pid in set(filter(str.isdigit, os.listdir("/proc"))) - _of_the_kernel():
        try:
            if PROJECT.search(_command(pid)) or os.readlink(f"/proc/{pid}/exe").endswith("/dsec-init"):
                key, what = _process(pid)
                found[key] = what
        except OSError:
            continue  # gone, or a thread of the kernel
    return found


def mounts() -> dict[str, str]:
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        found[f"{fields[0]} {fields[4]}"] = f"{line.split(' - ')[1].split()[0]} on {fields[4]}"
    return found


def cgroups() -> dict[str, str]:
    found: dict[str, str] = {}

    def look(folder: str, below: int, ours: bool) -> None:
        try:
            if os.stat(folder).st_nlink == 2:
                return  # no directory in it: the kernel's files need not be listed
            with os.scandir(folder) as entries:
                inside = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return  # removed meanwhile
        for entry in inside:
            is_ours = ours or entry.name.startswith("opendsec-")
            if is_ours:
                found[entry.path] = entry.path
            if is_ours or below:
                look(entry.path, below - 1, is_ours)

    look("/sys/fs/cgroup", 2, False)
    return found


def loop_devices() -> dict[str, str]:
    found = {}
    for path in glob("/sys/block/loop*/loop/backing_file"):
        try:
            backing = Path(path).read_text().strip()
        except OSError:
            continue
        found[f"{path.split('/')[3]} {backing}"] = backing
    return found


def network_namespaces() -> dict[str, str]:
    try:
        return {name: name for name in os.listdir("/run/netns")}
    except FileNotFoundError:
        return {}


def difference(before: Snapshot, after: Snapshot) -> Snapshot:
    return {kind: new for kind in after if (new := {key: what for key, what in after[kind].items() if key not in before[kind]})}


class Machine:
    """Whether this is the only test session on the machine: each holds a shared lock, so alone is who could make it exclusive."""

    def __init__(self) -> None:
        self._fd = os.open("/tmp/opendsec-tests.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def is_ours(self) -> bool:
        if os.environ.get("CI"):
            return True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._fd, fcntl.LOCK_SH)  # a failed upgrade may have dropped the lock
            return False
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        return True


class LeakDetector:
    """Compares snapshots around each test. Fixtures wider than a function may hold things; they are told apart by watching their set-up."""

    def __init__(self, machine: Machine | None) -> None:
        """Without a `machine`, only what belongs to this process is looked at."""
        self._machine = machine
        self._before: Snapshot = {}
        self._alone = False
        self._held: set[tuple[str, str]] = set()
        self._allowed: list[tuple[str, re.Pattern[str]]] = []

    def allow(self, kind: str, pattern: str) -> None:
        """Let things of this kind whose description matches come and go from here on. For shared fixtures that work lazily."""
        assert kind in OURS + MACHINE, kind
        self._allowed.append((kind, re.compile(pattern)))

    def hold(self, before: Snapshot) -> None:
        """What appeared since `before` belongs to a module's or the session's fixture."""
        for kind, things in difference(before, snapshot()).items():
            self._held.update((kind, key) for key in things)

    def start(self) -> None:
        self._alone = self._machine is not None and self._machine.is_ours()
        self._before = snapshot()

    def leaked(self) -> Snapshot:
        """What the test left behind, by kind; empty when it left nothing."""
        deadline = time.monotonic() + SETTLE_S
        collected = False
        while True:
            new = self._filter(difference(self._before, snapshot()))
            if not new or time.monotonic() > deadline:
                return new
            if collected:
                time.sleep(0.02)
            gc.collect()
            collected = True

    def _filter(self, new: Snapshot) -> Snapshot:
        alone = self._alone and self._machine is not None and self._machine.is_ours()
        result: Snapshot = {}
        for kind in OURS + MACHINE if alone else OURS:
            things = {key: what for key, what in new.get(kind, {}).items() if not self._is_fine(kind, key, what)}
            if things:
                result[kind] = things
        return result

    def _is_fine(self, kind: str, key: str, what: str) -> bool:
        return (kind, key) in self._held or any(kind == k and pattern.search(what) for k, pattern in self._allowed)


def describe(leaked: Snapshot) -> str:
    lines = ["the test left behind:"]
    for kind, things in leaked.items():
        lines += [f"  {kind}: {key}" + (f" ({what})" if what != key else "") for key, what in sorted(things.items())]
    return "\n".join(lines)
