# SPDX-License-Identifier: Apache-2.0
"""Control groups behind one interface: pure v2, pure v1, and the hybrid of both.

A `Group` is one name that stands for a directory in every hierarchy concerned. One of them is its *tree*: the v2
hierarchy where there is one (else v1 freezer), the only one that has child groups and the one that kill, freeze,
populated and procs speak of. The limits (memory, cpu, pids) live on the group itself, never on its children, wherever the
kernel has bound each controller. A hybrid v2 hierarchy without controllers still kills, freezes and accounts CPU time.

How a process gets in, and what that costs (Linux 6.18, 2 cores):

* Writing a pid to `cgroup.procs` takes a lock whose first use after a pause waits for an RCU grace period: 6 to 14 ms. It
  does not matter who writes, nor which hierarchy.
* `CLONE_INTO_CGROUP` takes no such lock: nothing measurable on top of the fork. It reaches v2 only.
* A single-threaded process that writes "0" (itself) to the v1 file `tasks` takes no such lock either: three hierarchies
  cost 0.12 to 0.3 ms together, nearly all of it the copy-on-write faults of a young fork.

So: clone3 into the tree (`open_v2_dir`), then the child writes "0" to each of `join_paths` late, so that what it allocates
before is not charged to the sandbox. The spawner joining the groups, forking and going back would cost half of that
again, but a group at its memory limit could then have the spawner killed, and a throttled one would stall it.

Nothing here sleeps: emptiness is awaited by poll(2) on `cgroup.events`, or on pidfds where there is no such file.
"""

from __future__ import annotations

import errno
import os
import select
import time

from opendsec.kernel import abi, cgroup_files, procfs, syscalls
from opendsec.kernel.cgroup_files import CONTROLLERS, parse_flat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from opendsec.kernel.cgroup_files import Limit

# The kernel tells of an event a moment after it, and not at all if the group was removed in that moment (by somebody else).
LOOK_AGAIN_S = 0.05


class Hierarchies:
    """Where the kernel has bound what. `v2` is the mount point of cgroup2 or None; `homes` maps each of `CONTROLLERS`
    (and "freezer", "cpuacct", on v1) that there is to (version, mount point)."""

    __slots__ = ("homes", "v2")

    def __init__(self, v2: str | None, homes: dict[str, tuple[int, str]]) -> None:
        self.v2 = v2
        self.homes = homes

    @property
    def mode(self) -> str:
        """ "v2": all controllers there; "hybrid": v2 with controllers elsewhere; "v1"; "none"."""
        versions = {self.homes[name][0] for name in CONTROLLERS if name in self.homes}
        if self.v2 is None:
            return "v1" if versions else "none"
        return "v2" if 1 not in versions else "hybrid"

    @property
    def missing(self) -> list[str]:
        """Controllers that no hierarchy offers; limits of these raise OSError(ENOTSUP)."""
        return [name for name in CONTROLLERS if name not in self.homes]

    @property
    def tree(self) -> tuple[int, str]:
        """(version, mount point) of the hierarchy that holds child groups."""
        if self.v2 is not None:
            return 2, self.v2
        for name in ("freezer", "pids", "memory", "cpu"):
            if name in self.homes:
                return self.homes[name]
        raise OSError(errno.ENOTSUP, "no cgroup hierarchy is mounted")

    def group(self, name: str) -> Group:
        return Group(self, name)


def find_hierarchies(mounts: list[procfs.Mount], v2_controllers: Mapping[str, str]) -> Hierarchies:
    """The pure part of `discover`: mounts, and for each cgroup2 mount point the text of its cgroup.controllers."""
    v2: str | None = None
    homes: dict[str, tuple[int, str]] = {}
    for mount in mounts:
        where = os.fsdecode(mount.mount_point)
        if mount.fstype == "cgroup2" and v2 is None:
            v2 = where
            for name in v2_controllers.get(where, "").split():
                if name in CONTROLLERS:
                    homes[name] = (2, where)
        elif mount.fstype == "cgroup":
            for name in (*CONTROLLERS, "freezer", "cpuacct"):
                if name in mount.super_options:
                    homes.setdefault(name, (1, where))
    return Hierarchies(v2, homes)


def discover() -> Hierarchies:
    """Look at this process's mounts. The answer holds until somebody remounts cgroups; ask once."""
    mounts = procfs.mountinfo()
    offered = {}
    for mount in mounts:
        if mount.fstype == "cgroup2":
            where = os.fsdecode(mount.mount_point)
            offered[where] = procfs.read(f"{where}/cgroup.controllers").decode("ascii", "replace")
    return find_hierarchies(mounts, offered)


def check_name(name: str) -> str:
    """A name is one or more components of letters, digits, `_`, `-` and inner dots. Raises ValueError."""
    for part in name.split("/"):
        if not part or part.startswith(".") or not all(c.isascii() and (c.isalnum() or c in "._-") for c in part):
            raise ValueError(f"not a cgroup name: {name!r}")
    return name


def join(paths: list[str]) -> None:
    """Put the calling process, which must be single-threaded, into groups: see `Group.join_paths`."""
    for path in paths:
        procfs.write(path, b"0")


def join_fds(fds: list[int]) -> None:
    """As `join`, with the descriptors of `Group.open_join`."""
    for fd in fds:
        os.write(fd, b"0")


class Group:
    """A group by its name relative to the roots of the hierarchies, such as `opendsec-e1/s42`. Making one of these
    objects touches nothing; every method looks at the kernel anew, so that objects need not be kept or shared."""

    __slots__ = ("_homes", "_owner", "hierarchies", "name")

    def __init__(self, hierarchies: Hierarchies, name: str, owner: Group | None = None) -> None:
        self.hierarchies = hierarchies
        self.name = check_name(name)
        self._owner = owner  # the group that holds the limits, for a child
        self._homes = {} if owner else self._needed_homes()

    def _needed_homes(self) -> dict[str, tuple[int, str]]:
        """Controller → (version, directory)."""
        needed = {}
        for controller in CONTROLLERS if self.hierarchies.v2 else (*CONTROLLERS, "cpuacct"):
            home = self.hierarchies.homes.get(controller)
            if home:
                needed[controller] = (home[0], f"{home[1]}/{self.name}")
        return needed

    def __repr__(self) -> str:
        return f"Group({self.name!r})"

    # --- directories

    @property
    def tree_path(self) -> str:
        return f"{self.hierarchies.tree[1]}/{self.name}"

    def _v1_paths(self) -> list[str]:
        """Directories outside the tree, each once (cpu and cpuacct often share one)."""
        tree = self.tree_path
        paths = dict.fromkeys(directory for version, directory in self._homes.values() if version == 1)
        return [path for path in paths if path != tree]

    def child(self, name: str) -> Group:
        """A group beneath this one, in the tree alone, without limits of its own."""
        if "/" in name:
            raise ValueError(f"a child's name has one component: {name!r}")
        return Group(self.hierarchies, f"{self.name}/{name}", self._owner or self)

    def children(self) -> list[Group]:
        """The child groups that exist."""
        return [self.child(name) for name in _subdirectories(self.tree_path)]

    def exists(self) -> bool:
        return os.path.isdir(self.tree_path)

    def open_v2_dir(self) -> int | None:
        """A descriptor for CLONE_INTO_CGROUP, or None where there is no v2. The caller closes it."""
        if self.hierarchies.v2 is None:
            return None
        return os.open(self.tree_path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def join_paths(self) -> list[str]:
        """The files a new, single-threaded process writes "0" to, after it was cloned into the v2 directory, to be in all
        of this group (for a child: also in the controllers of the group that holds the limits)."""
        owner = self._owner or self
        paths = [f"{path}/tasks" for path in owner._v1_paths()]
        if self.hierarchies.tree[0] == 1:
            paths.append(f"{self.tree_path}/tasks")
        return paths

    def open_join(self) -> list[int]:
        """`join_paths` opened for `join_fds`, for a child that can no longer open them itself: the kernel judges the
        move by who opened the file. The caller closes them."""
        fds: list[int] = []
        try:
            for path in self.join_paths():
                fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def open_facts(self) -> list[int]:
        """The files that a supervisor in the group reads while it runs: CPU time, memory in use, its peak, OOM kills, refused forks. Opened
        here because it cannot; /dev/null for what this kernel has not. The caller closes them."""
        tree, v2 = self.tree_path, self.hierarchies.v2 is not None
        memory, cpuacct, pids = (self._homes.get(name, (2, "")) for name in ("memory", "cpuacct", "pids"))
        wanted = (
            (f"{tree}/cpu.stat" if v2 else f"{cpuacct[1]}/cpuacct.usage", os.O_RDONLY),
            (f"{memory[1]}/memory.{'current' if memory[0] == 2 else 'usage_in_bytes'}", os.O_RDONLY),
            (f"{memory[1]}/memory.{'peak' if memory[0] == 2 else 'max_usage_in_bytes'}", os.O_RDWR),
            (f"{memory[1]}/memory.{'events' if memory[0] == 2 else 'oom_control'}", os.O_RDONLY),
            (f"{pids[1]}/pids.events", os.O_RDONLY),
        )
        fds: list[int] = []
        try:
            for path, flags in wanted:
                try:
                    fds.append(os.open(path, flags | os.O_CLOEXEC))
                except (FileNotFoundError, PermissionError):  # no such file, or (the peak before 6.12) none to write to
                    fds.append(os.open(os.devnull, flags | os.O_CLOEXEC))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    # --- life

    def create(self, limits: Mapping[str, Limit] | None = None, *, has_tree: bool = False) -> None:
        """Make the directories, parents included, and set limits. All or nothing; FileExistsError if it is there.

        `has_tree`: the directory in the tree was made before, by `create_tree`, and stays whatever happens.
        """
        made: list[str] = []
        try:
            for path in self._v1_paths() if has_tree else (self.tree_path, *self._v1_paths()):
                self._mkdir(path)
                made.append(path)
            if limits:
                self.update(limits)
        except BaseException:
            for path in reversed(made):
                os.rmdir(path)
            raise

    def create_tree(self) -> None:
        """Make the directory in the tree alone: enough to clone a process into, while `create` makes the rest."""
        self._mkdir(self.tree_path)

    def _mkdir(self, path: str) -> None:
        try:
            os.mkdir(path, 0o755)
        except FileNotFoundError:
            self._make_parents(path)
            os.mkdir(path, 0o755)

    def _make_parents(self, path: str) -> None:
        """The directories above, and on v2 the controllers for what is below them (not below the group itself: a group
        that passes controllers on may hold no processes)."""
        version, root = self.hierarchies.tree
        above = root if path == self.tree_path else path[: -len(self.name) - 1]
        wanted = [name for name in CONTROLLERS if self.hierarchies.homes.get(name) == (2, above)] if version == 2 else []
        for part in ("", *self.name.split("/")[:-1]):
            above = f"{above}/{part}" if part else above
            try:
                os.mkdir(above, 0o755)
            except FileExistsError:
                pass
            # A child's owner has no controllers below it.
            if wanted and not (self._owner and len(above) >= len(self._owner.tree_path)):
                enabled = procfs.read(f"{above}/cgroup.subtree_control").decode("ascii", "replace").split()
                for name in wanted:
                    if name not in enabled:
                        procfs.write(f"{above}/cgroup.subtree_control", f"+{name}")

    def remove_if_empty(self) -> bool:
        """Remove the directories unless processes or child groups are in them; whether none is left. Kills nothing."""
        gone = True
        for path in (self.tree_path, *self._v1_paths()):
            try:
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    raise
                gone = False
        return gone

    def remove(self, timeout_s: float = 10.0) -> None:
        """Kill all that is inside, wait until it is gone, remove the directories, children first. Does nothing if the group
        is not there. Raises TimeoutError when processes do not die (one stuck in the kernel cannot)."""
        deadline = time.monotonic() + timeout_s
        if self.exists():
            self._remove_tree(self.tree_path, deadline)
        for path in self._v1_paths():
            self._remove_v1(path, deadline)

    def _remove_tree(self, path: str, deadline: float) -> None:
        while True:
            try:
                for name in _subdirectories(path):
                    self._remove_tree(f"{path}/{name}", deadline)
                os.rmdir(path)
                return
            except FileNotFoundError:
                return
            except OSError as error:
                # EBUSY: populated, or somebody made a child meanwhile. Only then is there something to kill. ENODEV: another remover's.
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY, errno.ENODEV):
                    raise
            try:
                if "cpu" in self._homes:
                    # A throttled process cannot run, so not die either, before the next period begins.
                    cgroup_files.set_limits(self._homes, {"cpu_cores": None})
                self.kill(timeout_s=deadline - time.monotonic())
                self.wait_empty(deadline - time.monotonic())
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):  # ENODEV: removed while a file of it was open
                    raise
            _check(deadline, path)

    def _remove_v1(self, path: str, deadline: float) -> None:
        """What is in the tree is dead by now; left are processes that had joined this group and not (yet) the tree."""
        while True:
            try:
                for name in _subdirectories(path):
                    self._remove_v1(f"{path}/{name}", deadline)
                os.rmdir(path)
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENODEV):
                    raise
            _check(deadline, path)
            try:
                pids = _read_pids(path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
                continue
            _kill_all(pids)
            _wait_exits(pids, deadline, path)
            os.sched_yield()  # an exit that is not quite over keeps the directory busy a little longer

    def kill(self, timeout_s: float = 10.0) -> None:
        """SIGKILL to every process in the tree group and below, also those being forked just now. Does not wait.

        Kernels without `cgroup.kill` get the group frozen first, so that no fork escapes the listing."""
        if self.hierarchies.tree[0] == 2:
            try:
                procfs.write(f"{self.tree_path}/cgroup.kill", b"1")
                return
            except FileNotFoundError:
                if not self.exists():
                    raise
        try:
            self.freeze(timeout_s)
        except (OSError, TimeoutError):
            pass  # no freezer: the loop below has to win the race by repeating
        try:
            killed: set[int] = set()
            while fresh := set(self.procs()) - killed:
                _kill_all(fresh)
                killed |= fresh
        finally:
            try:
                self.thaw()
            except OSError:
                pass

    def freeze(self, timeout_s: float = 10.0) -> None:
        """Stop every process in the group and below, and wait until all have stopped. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        if self.hierarchies.tree[0] == 2:
            procfs.write(f"{self.tree_path}/cgroup.freeze", b"1")
            self._wait_event("frozen", 1, deadline)
            return
        state = f"{self.tree_path}/freezer.state"
        procfs.write(state, b"FROZEN")
        # v1 has no event for this; reading the state is what moves it from FREEZING on.
        while procfs.read(state).strip() != b"FROZEN":
            _check(deadline, state)
            os.sched_yield()

    def thaw(self) -> None:
        """Let the processes run again."""
        if self.hierarchies.tree[0] == 2:
            procfs.write(f"{self.tree_path}/cgroup.freeze", b"0")
        else:
            procfs.write(f"{self.tree_path}/freezer.state", b"THAWED")

    # --- waiting

    def populated(self) -> bool:
        """Whether any live process is in the tree group or below."""
        if self.hierarchies.tree[0] == 2:
            return parse_flat(procfs.read(f"{self.tree_path}/cgroup.events")).get("populated", 0) != 0
        return bool(self.procs())

    def wait_empty(self, timeout_s: float = 10.0) -> None:
        """Return when no live process is in the tree group or below. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        if self.hierarchies.tree[0] == 2:
            self._wait_event("populated", 0, deadline)
            return
        while pids := self.procs():
            _wait_exits(pids, deadline, self.tree_path)

    def open_events(self) -> int:
        """`cgroup.events` open for polling (v2 only): POLLPRI wakes when populated or frozen changes. The caller closes it,
        and re-reads with pread from offset 0, which also arms the next wake-up."""
        return os.open(f"{self.tree_path}/cgroup.events", os.O_RDONLY | os.O_CLOEXEC)

    def _wait_event(self, key: str, value: int, deadline: float) -> None:
        fd = self.open_events()
        try:
            poller = select.poll()
            poller.register(fd, select.POLLPRI)
            while parse_flat(os.pread(fd, 4096, 0)).get(key) != value:
                _check(deadline, self.tree_path)
                poller.poll(min(max(0.0, deadline - time.monotonic()), LOOK_AGAIN_S) * 1000)
        finally:
            os.close(fd)

    def procs(self) -> list[int]:
        """Pids in the tree group and below, as our pid namespace numbers them (0: not visible from here)."""
        pids: list[int] = []
        pending = [self.tree_path]
        while pending:
            path = pending.pop()
            try:
                pids += _read_pids(path)
                pending += [f"{path}/{name}" for name in _subdirectories(path)]
            except OSError as error:
                # A child group may go while we walk (ENODEV for an open file of a removed group).
                if path == self.tree_path or error.errno not in (errno.ENOENT, errno.ENODEV):
                    raise
        return pids

    # --- limits and readings

    def _limited(self) -> dict[str, tuple[int, str]]:
        if self._owner is not None:
            raise ValueError("limits belong to the sandbox's group, not to its children")
        return self._homes

    def update(self, limits: Mapping[str, Limit]) -> None:
        """Set the limits given (see `cgroup_files.LIMITS`), also while processes run; the others stay. Lowering memory below what is in
        use reclaims first; what cannot be reclaimed is EBUSY on v1 and an OOM kill on v2."""
        cgroup_files.set_limits(self._limited(), limits)

    def usage(self) -> cgroup_files.Usage:
        """What the group uses now. For a child: its CPU time and processes only."""
        return cgroup_files.Usage(self._homes, self._cpu_us(), self.procs)

    def held_bytes(self) -> int:
        """Memory that cannot be taken back, 0 without the controller. Dearer than `usage`."""
        return cgroup_files.held_bytes(self._homes) if "memory" in self._homes else 0

    def _cpu_us(self) -> int | None:
        if self.hierarchies.v2 is not None:
            # Every v2 group accounts CPU time, with or without the controller.
            return parse_flat(procfs.read(f"{self.tree_path}/cpu.stat")).get("usage_usec")
        home = self._homes.get("cpuacct")
        return None if home is None else int(procfs.read(f"{home[1]}/cpuacct.usage")) // 1000

    def events(self) -> cgroup_files.Events:
        """What the limits did so far."""
        return cgroup_files.Events(self._limited())


def _check(deadline: float, path: str) -> None:
    if time.monotonic() >= deadline:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)


def _subdirectories(path: str) -> Iterator[str]:
    with os.scandir(path) as entries:
        return iter([entry.name for entry in entries if entry.is_dir(follow_symlinks=False)])


def _read_pids(path: str) -> list[int]:
    return [int(line) for line in procfs.read(f"{path}/cgroup.procs").split()]


def _wait_exits(pids: list[int], deadline: float, path: str) -> None:
    """Until every one of these has exited, by pidfds. What is in the group afterwards is for the caller to look at."""
    poller = select.poll()
    waiting: set[int] = set()
    try:
        for pid in filter(None, pids):
            try:
                fd = syscalls.pidfd_open(pid)
            except ProcessLookupError:
                continue
            waiting.add(fd)
            poller.register(fd, select.POLLIN)
        while waiting:
            _check(deadline, path)
            for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                poller.unregister(fd)
                os.close(fd)
                waiting.discard(fd)
    finally:
        for fd in waiting:
            os.close(fd)


def _kill_all(pids: Iterable[int]) -> None:
    for pid in pids:
        if pid == 0:
            continue  # of a pid namespace that we do not see; kill(0) would be our own process group
        try:
            os.kill(pid, abi.SIGKILL)
        except ProcessLookupError:
            pass
