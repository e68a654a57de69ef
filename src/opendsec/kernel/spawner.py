# SPDX-License-Identifier: Apache-2.0
"""The fork server: a small single-threaded process that makes sandboxes and starts commands in them.

    python -SI -c 'import sys; sys.path.insert(0, SRC); from opendsec.kernel.spawner import main; main(FD)'

Why a process apart. Forking a daemon with threads and an event loop is slow (its page tables are copied) and unsafe (locks held by
threads that the child does not have). This process has neither, and its imports are a tested budget.

Messages are single datagrams on a SOCK_SEQPACKET socket, marshalled dicts with descriptors beside them. The peer is the edge alone
(a socketpair, no address), and both run the same interpreter, so `marshal` is safe, needs no import and carries bytes as they are.
A plan too large for a datagram comes as a memfd, announced by {"memfd": True}.

    edge → spawner   {"id": N, "op": "setup"|"profile"|"layer"|"unlayer"|"create"|"member"|"machine"|"exec"|"ping", …}
    spawner → edge   {"id": N, "ok": True, …} or {"id": N, "error": (step, errno, text)}
                     {"exit": pid, "status": wait status, "cpu_us": N, "max_rss_kib": N}     after the ok of an exec or machine, once

`setup` comes first, and once. `create` answers when PID 1 has settled, `exec` when the command has been executed. Neither blocks the loop
in between, so the children's halves overlap. Whatever is wrong with a plan comes back as an error; nothing a plan says can end this
process. When the edge goes away (end of file) the spawner ends; sandboxes that are complete live on, half-made ones see their channel
close and end.
"""

from __future__ import annotations

import errno
import marshal
import os
import resource
import select
import signal
import socket

from opendsec.kernel import abi, cgroups, enter, machine, mounts, namespaces, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]

MAX_DATAGRAM = 128 << 10
MAX_PLAN_BYTES = 64 << 20
MAX_FDS = 16


class Child:
    """A forked child until it is reaped. `exited` holds its exit until its start has been answered."""

    __slots__ = ("companion", "exited", "is_command", "pid", "pidfd", "report", "request", "started")

    def __init__(self, request: int, pid: int, pidfd: int, report: socket.socket, is_command: bool) -> None:
        self.request, self.pid, self.pidfd, self.report, self.is_command = request, pid, pidfd, report, is_command
        self.started = False
        self.exited: Message | None = None
        self.companion: int | None = None  # goes along with the answer: a command's terminal, a sandbox's upper directory in memory

    def has_spoken(self) -> bool:
        """Whether a report waits to be heard."""
        try:
            return bool(self.report.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


class Spawner:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.layers: dict[bytes, int] = {}  # digest → detached mount
        self.profiles: dict[bytes, bytes] = {}  # name → seccomp program
        self.children: dict[int, Child] = {}
        self.reports: dict[int, Child] = {}
        self.hierarchies = cgroups.discover()
        self.dev = -1  # the shared, read-only /dev
        self.init = -1  # our PID 1
        self.calld = -1  # that of members
        self.own_pid_namespace = os.open(procfs.path_of("self", "ns", "pid"), os.O_RDONLY | os.O_CLOEXEC)
        self.root = os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.proc = os.open(procfs.PROC, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self.poll = select.epoll()
        self.poll.register(control, select.EPOLLIN)
        # SIGCHLD only has to wake the poll; its handler must exist for the wake-up descriptor to be written.
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.wake = wake_read
        self.poll.register(wake_read, select.EPOLLIN)

    def serve(self) -> None:
        """Until the edge goes away."""
        while True:
            for fd, events in self.poll.poll():
                if fd == self.control.fileno():
                    # A dead edge's last requests may still be queued. Its successor is taking stock: make nothing more.
                    if events & (select.EPOLLHUP | select.EPOLLERR) or not self.receive():
                        return
                elif fd == self.wake:
                    os.read(self.wake, 4096)
                    self.reap()
                elif fd in self.reports:
                    self.hear(self.reports[fd])

    # --- requests --------------------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """One request; False at end of file."""
        try:
            data, fds, flags, _ = socket.recv_fds(self.control, MAX_DATAGRAM + 1, MAX_FDS)
        except ConnectionError:
            return False
        if not data:
            return False
        request = -1
        try:
            message = read_message(data, fds, flags)
            request = message["id"]
            operation = getattr(self, "do_" + message["op"])
            operation(request, message, fds)
        except OSError as error:
            name = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
            self.refuse(request, error.errno or 0, f"{error.strerror}{name}")
        except Exception as error:  # a malformed plan, whatever its kind, must not end the spawner
            self.refuse(request, errno.EINVAL, f"malformed plan: {type(error).__name__}: {error}")
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def refuse(self, request: int, code: int, text: str) -> None:
        self.send({"id": request, "error": ("plan", code, text[: enter.MAX_REPORT_TEXT])})

    def do_ping(self, request: int, message: Message, fds: list[int]) -> None:
        self.send({"id": request, "ok": True})

    def do_setup(self, request: int, message: Message, fds: list[int]) -> None:
        """Once at start: the descriptors of PID 1's programs come along; the /dev that all sandboxes share is made here."""
        if self.dev >= 0:
            raise ValueError("set up already")
        self.init = copy_init(fds[0])
        if len(fds) > 1:
            self.calld = copy_init(fds[1])
        self.dev = make_dev()
        self.send({"id": request, "ok": True})

    def do_profile(self, request: int, message: Message, fds: list[int]) -> None:
        name, program = message["name"], message["program"]
        if not isinstance(name, bytes) or not isinstance(program, bytes):
            raise TypeError("name and program are bytes")
        self.profiles[name] = program
        self.send({"id": request, "ok": True})

    def do_layer(self, request: int, message: Message, fds: list[int]) -> None:
        digest: bytes = message["digest"]
        if digest not in self.layers:
            self.layers[digest] = mounts.mount_erofs(message["meta"], message["data"])
        self.send({"id": request, "ok": True})

    def do_unlayer(self, request: int, message: Message, fds: list[int]) -> None:
        """Let go of a layer; the last sandbox that uses it unmounts it."""
        mount = self.layers.pop(message["digest"], None)
        if mount is not None:
            os.close(mount)
        self.send({"id": request, "ok": True})

    def do_create(self, request: int, plan: Message, fds: list[int]) -> None:
        """`fds`: perhaps a pipe on which "1" comes when the scratch is there; its end without a word means that there will be none."""
        self.create(request, plan, fds, enter.enter_sandbox, self.profiles[plan["profile"]], self.init)

    def do_member(self, request: int, plan: Message, fds: list[int]) -> None:
        """As `create`, but what becomes PID 1 is the supervisor of function calls, which makes root file systems itself, one a call.
        `fds`: its end of the edge's channel."""
        self.create(request, plan, [], enter.enter_member, fds[0], self.calld)

    def do_machine(self, request: int, plan: Message, fds: list[int]) -> None:
        """A virtual machine monitor. Like a command it is reaped and reported; like a sandbox it lives on without us."""
        machine.start(self, request, plan, fds)

    def create(self, request: int, plan: Message, fds: list[int], body: Any, *given: Any) -> None:
        layers = [self.layers[digest] for digest in plan["layers"]]
        is_member = body is enter.enter_member
        group = self.hierarchies.group(plan["group"])
        group.create_tree()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        cgroup, joins, facts, child = None, [], [], -1
        try:
            cgroup = group.open_v2_dir()
            # The kernel counts some things (inotify instances, message queues, queued signals) against the owner of the user namespace as
            # well. If that were root, one sandbox could use up what there is for root on this machine. So each is owned by its own root.
            be_owner(plan["uid_base"])
            try:
                child = self.fork(request, enter.SANDBOX_NAMESPACES, cgroup, body, plan, theirs.fileno(), *given, is_command=False)
            finally:
                be_owner(0)
            theirs.close()
            group.create(plan["limits"], has_tree=True)
            joins = group.open_join()
            namespaces.write_id_maps(child, [(0, plan["uid_base"], 65_536)])
            try:
                # Of all in the sandbox PID 1 must never be the one that is killed for want of memory, or it could bring that about.
                procfs.write(procfs.path_of(child, "oom_score_adj"), b"-1000")
            except PermissionError:
                pass  # without CAP_SYS_RESOURCE it stays at ours, and is the smallest by far
            root = dev = -1
            try:
                dev = mounts.clone(self.dev)
                socket.send_fds(ours, [b"mapped"], [dev, *joins])
                if fds and os.read(fds[0], 1) != b"1":
                    raise OSError(errno.ECANCELED, "there is no scratch")
                if is_member:
                    facts = group.open_facts()
                    root = make_base(child, layers, plan)
                else:
                    root, self.children[child].companion = make_root(child, layers, plan)
                socket.send_fds(ours, [b"root"], [root, *facts])
            finally:
                close_all(root, dev)
        except BaseException as error:
            if child > 0:
                if isinstance(error, ConnectionError) or self.children[child].has_spoken():
                    return  # it failed first: what it says is the answer
                self.children[child].request = -1  # the error of the parent's half is the answer; the child's is not heard
                os.kill(child, signal.SIGKILL)
            raise
        finally:
            ours.close()
            theirs.close()
            close_all(-1 if cgroup is None else cgroup, *joins, *facts)

    def do_exec(self, request: int, plan: Message, fds: list[int]) -> None:
        """`fds`: a pidfd of the sandbox's PID 1, then those descriptors of the command that `plan["given"]` marks."""
        profile = self.profiles[plan["profile"]]
        # The group of the sandbox is there while the sandbox is: never make it anew here, after it was taken away.
        group = self.hierarchies.group(plan["group"]).child(plan["child"])
        os.mkdir(group.tree_path, 0o755)
        cgroup, joins = None, []
        try:
            cgroup, joins = group.open_v2_dir(), group.open_join()
            given = (self.proc, fds[0], joins, fds[1:], plan["given"])
            # The pid namespace of children is a property of the parent: set it for this one fork, then set it back.
            syscalls.setns(fds[0], abi.CLONE_NEWPID)
            try:
                # So is the root directory. From its birth the child is in the sandbox's /proc, and /proc/<pid>/mountinfo is anybody's to
                # read: it lists what is mounted beneath that process's root, which is nothing beneath this one.
                change_root(self.dev)
                try:
                    self.fork(request, 0, cgroup, enter.enter_command, plan, profile, *given, is_command=True)
                finally:
                    change_root(self.root)
            finally:
                syscalls.setns(self.own_pid_namespace, abi.CLONE_NEWPID)
        except BaseException:
            os.rmdir(group.tree_path)
            raise
        finally:
            close_all(-1 if cgroup is None else cgroup, *joins)

    def fork(self, request: int, flags: int, cgroup: int | None, body: Any, *args: Any, is_command: bool) -> int:
        """A child in `flags`' namespaces and in the v2 group behind `cgroup`, that runs `body(*args)`. Its pid."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid, pidfd = syscalls.clone3(flags, cgroup_fd=cgroup, want_pidfd=True)
            if pid == 0:
                enter.run_child(theirs.fileno(), body, *args)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        child = Child(request, pid, pidfd, ours, is_command)
        self.children[pid] = self.reports[ours.fileno()] = child
        self.poll.register(ours, select.EPOLLIN)
        return pid

    # --- what children say -----------------------------------------------------------------------------------------

    def hear(self, child: Child) -> None:
        """A report, or its end: the child has been executed, has failed, or was killed on the way."""
        try:
            data, fds, _, _ = socket.recv_fds(child.report, enter.MAX_REPORT_BYTES, 1)
        except ConnectionError:
            data, fds = b"", []
        if data == b"ok":
            child.started = True
            child.companion = fds[0] if fds else child.companion
            return  # exec itself may still fail: the answer is given at end of file
        self.forget_report(child)
        if data:
            self.answer(child, {"id": child.request, "error": read_report(data)})
        elif child.started:
            answer: Message = {"id": child.request, "ok": True, "pid": child.pid, "command": child.is_command}
            self.answer(child, answer, child.pidfd, *([] if child.companion is None else [child.companion]))
        else:
            self.answer(child, {"id": child.request, "error": ("start", 0, "killed before it could start")})
        close_all(child.pidfd, -1 if child.companion is None else child.companion)
        child.pidfd = -1
        child.companion = None
        child.is_command = child.is_command and child.started and not data
        self.finish(child)

    def answer(self, child: Child, message: Message, *fds: int) -> None:
        if child.request >= 0:
            self.send(message, *fds)

    def forget_report(self, child: Child) -> None:
        self.poll.unregister(child.report)
        del self.reports[child.report.fileno()]
        child.report.close()

    def reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self.children.get(pid)
            if child is None:
                continue
            cpu_us = round((usage.ru_utime + usage.ru_stime) * 1e6)
            child.exited = {"exit": pid, "status": status, "cpu_us": cpu_us, "max_rss_kib": usage.ru_maxrss}
            if child.report.fileno() >= 0:
                # Its report is complete, since it is dead: hear it now, so that "started" comes before "ended".
                while child.report.fileno() >= 0:
                    self.hear(child)
            else:
                self.finish(child)

    def finish(self, child: Child) -> None:
        """Once both the start was answered and the child was reaped."""
        if child.exited is not None and child.report.fileno() < 0:
            del self.children[child.pid]
            if child.is_command:
                self.send(child.exited)

    def send(self, message: Message, *fds: int) -> None:
        try:
            socket.send_fds(self.control, [marshal.dumps(message)], fds)
        except ConnectionError:
            pass  # the edge is gone; the next receive says so


def read_message(data: bytes, fds: list[int], flags: int) -> Message:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ValueError("a datagram that is too large")
    message = marshal.loads(data)
    if isinstance(message, dict) and message.get("memfd"):
        fd = fds.pop(0)
        try:
            size = os.fstat(fd).st_size
            if size > MAX_PLAN_BYTES:
                raise ValueError(f"a plan of {size} bytes")
            message = marshal.loads(os.pread(fd, size, 0))
        finally:
            os.close(fd)
    if not isinstance(message, dict) or not isinstance(message.get("id"), int) or not isinstance(message.get("op"), str):
        raise ValueError("no request")
    return message


def read_report(data: bytes) -> tuple[str, int, str]:
    """A child's (step, errno, text). It was forked from us and nothing hostile can write to its channel; still, it must not end us."""
    try:
        step, code, text = marshal.loads(data)
        if isinstance(step, str) and isinstance(code, int) and isinstance(text, str):
            return step, code, text
    except (EOFError, TypeError, ValueError):
        pass
    return "start", 0, f"a report that cannot be read: {data[:64]!r}"


def make_root(child: int, layers: list[int], plan: Message) -> tuple[int, int | None]:
    """The root file system, detached: id-mapped clones of the layers below, the scratch on top. Of a scratch in memory also its upper
    directory, which nobody could reach any more."""
    held: list[int] = []
    try:
        namespace = namespaces.open_namespace(child, "user")
        held.append(namespace)
        for mount in layers:
            held.append(mounts.idmapped_clone(mount, namespace))
        kind, *scratch = plan["scratch"]
        if kind == "tmpfs":
            size_bytes, inodes = scratch
            base = mounts.tmpfs(size_bytes=size_bytes, inodes=inodes, mode=0o700)
            held.append(base)
            for name in (b"upper", b"work"):
                held.append(make_owned(base, name, plan["uid_base"]))
        else:
            upper, work = scratch
            for path in (upper, work):
                held.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        upper, work = held[-2:]
        root = mounts.overlay(held[len(layers) : 0 : -1], upper, work, attrs=abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV)
        return root, os.dup(upper) if kind == "tmpfs" else None
    finally:
        close_all(*held)


def make_base(child: int, layers: list[int], plan: Message) -> int:
    """What a member's PID 1 has for a root, detached: places to mount at, and at l0, l1, … what calls' overlays lie on. Nobody else sees
    it."""
    held: list[int] = []
    try:
        namespace = namespaces.open_namespace(child, "user")
        held.append(namespace)
        below = []
        for mount in layers:
            below.append(mounts.idmapped_clone(mount, namespace))
            held.append(below[-1])
        if len(below) > 1:
            below = merged(below, held)
        base = mounts.tmpfs(size_bytes=1 << 16, inodes=len(layers) + 64, mode=0o700, uid=plan["uid_base"], gid=plan["uid_base"])
        held.append(base)
        for name in (b"proc", b"dev", b"t", b"r"):
            os.close(make_owned(base, name, plan["uid_base"]))
        for number, mount in enumerate(below):
            held.append(make_owned(base, b"l%d" % number, plan["uid_base"]))
            mounts.attach(mount, held[-1])
        held.remove(base)
        return base
    finally:
        close_all(*held)


def merged(layers: list[int], held: list[int]) -> list[int]:
    """The layers as one, read-only. An overlay that a member makes heeds only marks (of opaque directories, of renamed ones) that anybody
    could set; this one heeds those that only the host's root could, and which layers have. Where file systems may not be stacked so high
    (a kernel that counts a file below EROFS as one) the layers stay apart."""
    one = mounts.overlay(layers[::-1], None, None)
    held.append(one)
    probe = mounts.tmpfs(size_bytes=1 << 16, inodes=16)
    held.append(probe)
    upper, work = make_owned(probe, b"u", 0), make_owned(probe, b"w", 0)
    held += (upper, work)
    try:
        held.append(mounts.overlay([one], upper, work))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return layers
    return [one]


def be_owner(uid: int) -> None:
    """Make `uid` the owner of user namespaces made from now on. All else stays root's: capabilities, by the security bit that `main`
    sets, and what file permissions are checked for."""
    os.setresuid(-1, uid, -1)
    if uid:
        syscalls.setfsuid(0)


def change_root(directory: int) -> None:
    os.fchdir(directory)
    os.chroot(b".")


def copy_init(source: int) -> int:
    """A descriptor of a copy of PID 1's program that the host has no path to and that nobody may read or write.

    That it cannot be read has a second effect, which no prctl(2) of the program's own comes early enough for: the kernel then takes the
    process for the host's, from exec on, and lets nothing in the sandbox trace it or look into it, whatever its capabilities there.
    """
    program = b""
    while part := os.pread(source, 1 << 16, len(program)):
        program += part
    mount = mounts.tmpfs(size_bytes=len(program) + (1 << 16), inodes=4, mode=0o700)
    try:
        fd = os.open(b"dsec-init", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700, dir_fd=mount)
        try:
            os.write(fd, program)
            os.fchmod(fd, 0o111)
        finally:
            os.close(fd)
        syscalls.mount_setattr(mount, b"", abi.AT_EMPTY_PATH, set=abi.MOUNT_ATTR_RDONLY)
        return os.open(b"dsec-init", os.O_PATH | os.O_CLOEXEC, dir_fd=mount)
    finally:
        os.close(mount)


def make_owned(parent: int, name: bytes, owner: int) -> int:
    os.mkdir(name, 0o755, dir_fd=parent)
    os.chown(name, owner, owner, dir_fd=parent)
    return os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent)


DEVICES = ((b"null", 1, 3), (b"zero", 1, 5), (b"full", 1, 7), (b"random", 1, 8), (b"urandom", 1, 9), (b"tty", 5, 0))
LINKS = (
    (b"fd", b"/proc/self/fd"),
    (b"stdin", b"/proc/self/fd/0"),
    (b"stdout", b"/proc/self/fd/1"),
    (b"stderr", b"/proc/self/fd/2"),
    (b"ptmx", b"pts/ptmx"),
)


def make_dev() -> int:
    """A /dev for all sandboxes: a detached tmpfs whose nodes only the host's root could make, read-only from then on."""
    dev = mounts.tmpfs(size_bytes=1 << 16, inodes=64, mode=0o755, attrs=abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NOEXEC)
    try:
        mask = os.umask(0)
        for name, major, minor in DEVICES:
            os.mknod(name, 0o666 | 0o020000, os.makedev(major, minor), dir_fd=dev)
        os.umask(mask)
        for name, target in LINKS:
            os.symlink(target, name, dir_fd=dev)
        for name in (b"pts", b"shm"):
            os.mkdir(name, 0o755, dir_fd=dev)
        syscalls.mount_setattr(dev, b"", abi.AT_EMPTY_PATH, set=abi.MOUNT_ATTR_RDONLY)
    except BaseException:
        os.close(dev)
        raise
    return dev


def close_all(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


def default_signals() -> None:
    """Undo what the edge was started with (nohup, a shell's background job): exec hands ignored and blocked signals on, into sandboxes."""
    kept = (signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)  # a command undoes the last three itself
    for number in range(1, 65):
        if number not in kept:
            syscalls.rt_sigaction_default(number)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def main(control_fd: int) -> None:
    import gc

    syscalls.prctl(abi.PR_SET_DUMPABLE, 0)  # children inherit it: see enter.py
    syscalls.prctl(abi.PR_SET_NAME, b"dsec-spawner")
    # What a child shows of itself in the sandbox's /proc before it has joined must not tell of the host.
    syscalls.unshare(abi.CLONE_NEWNET)
    procfs.set_command_line(b"dsec-spawner")
    syscalls.prctl(abi.PR_SET_SECUREBITS, syscalls.prctl(abi.PR_GET_SECUREBITS) | abi.SECBIT_NO_SETUID_FIXUP)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # the plans want it at 1, see runtime/container/plan.py
    except ValueError:
        pass  # it is 0 already, and we may not raise it
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two descriptors a child under way; what it executes gets limits of its own
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the edge's to handle
    default_signals()
    gc.disable()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    control = socket.socket(fileno=control_fd)
    Spawner(control).serve()
