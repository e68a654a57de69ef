# SPDX-License-Identifier: Apache-2.0
"""The child's side of a plan: from a fresh fork of the spawner to the program inside the sandbox.

Both functions run in a child that leaves by exec or `os._exit` alone. Facts that order the steps:

* The child inherits every descriptor of the spawner: layers, other children's reports, the control socket. It keeps what it was
  given and closes the rest first; a child that hung on something hostile would otherwise hold other children's ends open.
* The spawner is not dumpable and a fork inherits that, so nothing inside a sandbox can trace the child or read its memory between
  joining the namespaces and exec, not even with the same uid.
* From the moment the mount namespace is the sandbox's, every path is hostile: files are opened without following links where that
  matters, never blocking, and checked to be regular before they are read.
* Capabilities are full until the last step, because joining a user namespace grants them all; seccomp comes last but exec, because the
  profile forbids what set-up needs.
* A command's child is seen in the sandbox's /proc from its birth, a moment before it has joined. Anybody there may read its mounts,
  network and command line; so it is born with a root directory that holds nothing (see `Spawner.do_exec`), and until it has joined it
  reaches files by descriptor alone.
* Once it has joined, root inside may send it signals. The spawner's handlers are gone by then.

The report channel carries one datagram: `b"ok"` just before exec (with the terminal, if there is one), or a marshalled
(step, errno, text). After "ok" an exec that fails sends a second one. End of file without "ok" means the child was killed; after "ok" it
means that the command has been executed, or, since PID 1 is left the channel and closes it last, that a sandbox has settled.
"""

from __future__ import annotations

import errno
import fcntl
import marshal
import os
import resource
import signal
import socket
import stat

from opendsec.kernel import abi, capabilities, cgroups, mounts, netlink, syscalls, tty

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    Plan = dict[str, Any]

FIRST_KEPT = 3
SANDBOX_NAMESPACES = (
    abi.CLONE_NEWUSER | abi.CLONE_NEWNS | abi.CLONE_NEWPID | abi.CLONE_NEWIPC | abi.CLONE_NEWUTS | abi.CLONE_NEWNET
)  # the cgroup namespace is unshared later, once the child is in its cgroups: its root is where it stands then
JOINED_NAMESPACES = (SANDBOX_NAMESPACES & ~abi.CLONE_NEWPID) | abi.CLONE_NEWCGROUP
PATH_DEFAULT = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_PASSWD_BYTES = 1 << 20
MAX_TERMINALS = 64  # in one sandbox; the kernel's own limit is for the whole machine
MAX_REPORT_BYTES = 4096
MAX_REPORT_TEXT = 800  # characters, of at most four bytes each

step = "start"  # where the child is, for the report; a module variable, because every step sets it
channel = -1  # the descriptor of the report, which moves as the others are put in order


def shown(name: bytes) -> str:
    """A name of the caller's or the sandbox's, for people."""
    return repr(name[:200].decode("utf-8", "replace"))


class StartError(Exception):
    """The command cannot start, and it is the caller's or the image's doing: (errno, text)."""


def run_child(report: int, body: Any, *args: Any) -> NoReturn:
    """Run `body`, report what goes wrong, never return."""
    global channel
    channel = report
    try:
        signal.set_wakeup_fd(-1)  # that number will soon be another descriptor
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        body(*args)
        complain(0, "ended without exec")
    except StartError as error:
        complain(error.args[0], error.args[1])
    except OSError as error:
        name = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
        complain(error.errno or 0, f"{error.strerror}{name}")
    except BaseException as error:  # a bug of ours: it must reach the edge's log, and the child must not return
        complain(0, f"{type(error).__name__}: {error}")
    finally:
        os._exit(127)


def complain(code: int, text: str) -> None:
    """Report a failure. The text may quote what a caller or an image chose, so its length is bounded here."""
    tell(marshal.dumps((step, code, text[:MAX_REPORT_TEXT])))


def tell(data: bytes, *fds: int) -> None:
    """Send a report. When the spawner is gone there is nobody to tell."""
    try:
        if fds:
            with socket.socket(fileno=os.dup(channel)) as sock:
                socket.send_fds(sock, [data], fds)
        else:
            os.write(channel, data)
    except OSError:
        pass


def keep(*wanted: int) -> list[int]:
    """Move the report's channel and `wanted` to 3, 4, … in order, close-on-exec, and close every other descriptor."""
    global channel
    floor = FIRST_KEPT + 1 + len(wanted)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in (channel, *wanted)]
    for number, fd in enumerate(high, FIRST_KEPT):
        os.dup2(fd, number, inheritable=False)
    channel = FIRST_KEPT
    os.closerange(0, FIRST_KEPT)
    syscalls.close_range(floor)
    return list(range(FIRST_KEPT + 1, floor))


def restrict(plan: Plan, profile: bytes) -> None:
    """Limits, capabilities, no new privileges, and last the system call filter."""
    global step
    step = "restrict"
    for number, soft, hard in plan["rlimits"]:
        resource.setrlimit(number, (soft, hard))
    syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.seccomp(abi.SECCOMP_SET_MODE_FILTER, 0, profile)


# --- a new sandbox -------------------------------------------------------------------------------------------------


def enter_sandbox(plan: Plan, sync: int, profile: bytes, init: int) -> None:
    """Become PID 1 of a new sandbox."""
    global step
    sync, init = keep(sync, init)
    enter_new(plan, sync)
    restrict(plan, profile)
    step = "exec"
    os.set_inheritable(channel, True)  # PID 1 closes it when it has settled: then the sandbox is ready
    tell(b"ok")
    syscalls.execveat(init, b"", [b"init"], [], abi.AT_EMPTY_PATH)


def enter_member(plan: Plan, sync: int, edge: int, calld: int) -> None:
    """Become PID 1 of a new member: see native/calld.c for what it is started with."""
    global step, channel
    sync, edge, calld = keep(sync, edge, calld)
    user: tuple[int, int, list[int], bytes, bytes] = (0, 0, [], b"/", b"root")
    inner, count = -1, 0

    def before_pivot(root: int, proc: int) -> None:
        nonlocal user, inner, count
        global step
        step = "find the user"
        directory = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        count = sum(name.startswith("l") for name in os.listdir(directory))
        os.close(directory)
        user = find_user(plan["user"], lambda path: read_layered(root, count, path))
        step = "make the calls' user namespace"
        inner = inner_namespace(proc, user[0])

    facts = enter_new(plan, sync, before_pivot)
    step = "restrict"
    for number, soft, hard in plan["rlimits"]:
        resource.setrlimit(number, (soft, hard))
    syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
    step = "descriptors"
    wanted = (channel, edge, inner, *facts)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (*wanted, calld)]
    for number, fd in enumerate(high[:-1], FIRST_KEPT):
        os.dup2(fd, number, inheritable=True)
    channel, calld = FIRST_KEPT, high[-1]
    os.closerange(FIRST_KEPT + len(wanted), 64)
    for fd in high[:-1]:
        os.close(fd)
    step = "exec"
    tell(b"ok")
    groups = b",".join(b"%d" % number for number in user[2])
    argv = [b"calld", b"%d" % user[0], b"%d" % user[1], groups, user[3], user[4], b"%d" % count]
    syscalls.execveat(calld, b"", argv, [], abi.AT_EMPTY_PATH)


def inner_namespace(proc: int, owner: int) -> int:
    """A user namespace below ours with the same ids, that belongs to `owner` and holds nobody."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = -1
    try:
        syscalls.prctl(abi.PR_SET_SECUREBITS, abi.SECBIT_NO_SETUID_FIXUP)  # keep the capabilities meanwhile
        os.setresuid(-1, owner, -1)
        try:
            pid, _ = syscalls.clone3(abi.CLONE_NEWUSER)
            if pid == 0:
                try:
                    pair[0].close()
                    syscalls.prctl(abi.PR_SET_DUMPABLE, 1)  # else its entries in /proc are the host's
                    pair[1].send(b"1")
                    pair[1].recv(1)
                finally:
                    os._exit(0)
        finally:
            os.setresuid(-1, 0, -1)
            syscalls.prctl(abi.PR_SET_SECUREBITS, 0)
            syscalls.prctl(abi.PR_SET_DUMPABLE, 0)
        pair[1].close()
        pair[0].recv(1)
        for name in (b"gid_map", b"uid_map"):
            fd = os.open(b"%d/%s" % (pid, name), os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
            try:
                os.write(fd, b"0 0 65536\n")
            finally:
                os.close(fd)
        return os.open(b"%d/ns/user" % pid, os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    finally:
        for end in pair:
            end.close()
        if pid > 0:
            os.waitpid(pid, 0)


def read_layered(root: int, count: int, path: bytes) -> bytes:
    """A small file as the overlay of the layers l0, l1, … beneath `root` would show it, or nothing."""
    for number in reversed(range(count)):
        layer = os.open(b"l%d" % number, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=root)
        try:
            resolve = abi.RESOLVE_IN_ROOT | abi.RESOLVE_NO_MAGICLINKS
            fd = syscalls.openat2(layer, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0, resolve)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            return b""
        finally:
            os.close(layer)
        return read_regular(fd)
    return b""


def enter_new(plan: Plan, sync: int, before_pivot: Any = None) -> list[int]:
    """Into a new sandbox's root, cgroups and ids. Born in all its namespaces but the cgroup one.

    The parent sends /dev and the way into the cgroups over `sync` when the ids are mapped, and then the root; what needs none of it is
    done while it works. Returns what came with the root.
    """
    global step
    step = "find the staging directory"
    # In this mount namespace, and while still the host's root: the sandbox's may not search the directories above.
    staging = os.open(plan["staging"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    step = "network"
    netlink.loopback_up()
    syscalls.sethostname(plan["hostname"])
    step = "mount"
    syscalls.mount(None, b"/", None, abi.MS_REC | abi.MS_PRIVATE)
    if before_pivot is None:
        capabilities.drop_bounding(plan["capabilities"])
    step = "wait for the id maps"
    with socket.socket(fileno=sync) as parent:
        dev, *joins = hear(parent, b"mapped")
        step = "join the cgroups"
        cgroups.join_fds(joins)  # the parent could do it for us, but moving another process waits for an RCU grace period: 6 to 14 ms
        for fd in joins:
            os.close(fd)
        step = "become root inside"
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        syscalls.prctl(abi.PR_SET_DUMPABLE, 0)  # the change of user has set it to what fs.suid_dumpable says
        os.setsid()
        os.umask(0o022)
        syscalls.unshare(abi.CLONE_NEWCGROUP)
        # /proc and /dev are put together while they are attached nowhere, so that all this too is done while the parent works.
        step = "mask"
        proc = mounts.proc()
        mask(proc, dev, plan["masked"], plan["read_only"])
        step = "mount in /dev"
        mounts.attach(mounts.devpts(maximum=MAX_TERMINALS), dev, b"pts")
        if before_pivot is None:  # a member gives each call one
            mounts.attach(mounts.tmpfs(plan["shm_size"], 4096, 0o1777, attrs=mounts.QUIET), dev, b"shm")
        step = "wait for the root file system"
        root, *further = hear(parent, b"root")
    step = "mount"
    mounts.attach(root, staging)
    attach(proc, root, b"proc")
    attach(dev, root, b"dev")
    if before_pivot is not None:
        before_pivot(root, proc)
    step = "pivot"
    os.fchdir(root)
    syscalls.pivot_root(b".", b".")
    syscalls.umount2(b".", abi.MNT_DETACH)
    os.chdir(b"/")
    null = os.open(b"/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(null, number)
    return further


def hear(parent: socket.socket, word: bytes) -> list[int]:
    """Wait for the parent's word and the descriptors that come with it. End here if it gave up or died instead."""
    data, received, _, _ = socket.recv_fds(parent, 16, 8)
    if data != word:
        os._exit(126)
    return received


def attach(mount: int, root: int, where: bytes) -> None:
    """Attach at `where` beneath `root`. An image that has no such directory gets one; one where it is a link is refused."""
    flags, resolve = os.O_PATH | os.O_DIRECTORY, abi.RESOLVE_IN_ROOT | abi.RESOLVE_NO_SYMLINKS | abi.RESOLVE_NO_MAGICLINKS
    try:
        target = syscalls.openat2(root, where, flags, 0, resolve)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        os.mkdir(where, 0o755, dir_fd=root)
        target = syscalls.openat2(root, where, flags, 0, resolve)
    try:
        mounts.attach(mount, target)
    finally:
        os.close(target)


def mask(proc: int, dev: int, masked: list[bytes], read_only: list[bytes]) -> None:
    """Cover what is `masked` in /proc, and make `read_only` so by a mount of itself. What a kernel has not is skipped."""
    for name in masked:
        try:
            target = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=proc)
        except FileNotFoundError:
            continue
        # A directory is covered by the empty one that /dev/shm is before its tmpfs comes: a new tmpfs would cost more than the rest.
        cover = mounts.clone(dev, b"shm" if stat.S_ISDIR(os.fstat(target).st_mode) else b"null")
        mounts.attach(cover, target)
        os.close(cover)
        os.close(target)
    for name in read_only:
        try:
            clone = mounts.clone(proc, name)
        except FileNotFoundError:
            continue
        syscalls.mount_setattr(clone, b"", abi.AT_EMPTY_PATH, set=abi.MOUNT_ATTR_RDONLY)
        mounts.attach(clone, proc, name)
        os.close(clone)


# --- a command in a sandbox ----------------------------------------------------------------------------------------


def enter_command(plan: Plan, profile: bytes, proc: int, sandbox: int, joins: list[int], stdio: list[int], passed: list[bool]) -> None:
    """Become the command. `proc`: the host's; `sandbox`: a pidfd of its PID 1; `joins`: of its cgroups, see `Group.open_join`;
    `passed[i]` says whether descriptor i of the command was given in `stdio`."""
    global step, channel
    proc, sandbox, *others = keep(proc, sandbox, *joins, *stdio)
    joins, given = others[: len(joins)], others[len(joins) :]
    step = "join the cgroups"
    adjust = os.open("self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    os.write(adjust, b"500")
    cgroups.join_fds(joins)
    step = "join the sandbox"
    syscalls.setns(sandbox, JOINED_NAMESPACES)
    for fd in (proc, sandbox, adjust, *joins):
        os.close(fd)
    # The host's root is nobody in here, and what it opened (a terminal) could be given to no user: be the sandbox's root first.
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    syscalls.prctl(abi.PR_SET_DUMPABLE, 0)  # the change of user has set it to what fs.suid_dumpable says
    os.setsid()
    os.umask(0o022)
    step = "find the user"
    user = find_user(plan["user"])
    step = "descriptors"
    terminal = -1
    if plan["pty"]:
        terminal, slave = tty.open_pair(b"/dev/pts/ptmx", rows=plan["pty"][0], columns=plan["pty"][1])
        numbered = [slave, slave, slave]
    else:
        queue = iter(given)
        numbered = [next(queue) if was_passed else os.open(b"/dev/null", os.O_RDWR | os.O_CLOEXEC) for was_passed in passed]
    # Upwards first, so that no target overwrites a source that is still needed.
    floor = FIRST_KEPT + len(given) + len(numbered) + 8
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in numbered]
    channel = fcntl.fcntl(channel, fcntl.F_DUPFD_CLOEXEC, floor)
    if terminal >= 0:
        terminal = fcntl.fcntl(terminal, fcntl.F_DUPFD_CLOEXEC, floor)
    os.closerange(FIRST_KEPT, floor)
    for number, fd in enumerate(high):
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    if terminal >= 0:
        tty.make_controlling(0)
        if user[0]:
            os.fchown(0, user[0], -1)  # so that the user may open /dev/pts/N by name
    step = "become the user"
    capabilities.drop_bounding(plan["capabilities"])
    os.setgroups(user[2])
    os.setresgid(user[1], user[1], user[1])
    os.setresuid(user[0], user[0], user[0])
    syscalls.prctl(abi.PR_SET_DUMPABLE, 0)
    step = "change to the working directory"
    try:
        os.chdir(plan["cwd"])
    except OSError as error:
        raise StartError(error.errno, f"cannot change to the working directory {shown(plan['cwd'])}: {error.strerror}") from None
    environment = dict(plan["env"])
    for name, value in ((b"HOME", user[3]), (b"USER", user[4]), (b"LOGNAME", user[4]), (b"PATH", PATH_DEFAULT)):
        environment.setdefault(name, value)
    if terminal >= 0:
        environment.setdefault(b"TERM", b"xterm-256color")
    restrict(plan, profile)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # Python and the spawner ignore them, and exec would pass that on
    step = "exec"
    if terminal >= 0:
        tell(b"ok", terminal)
    else:
        tell(b"ok")
    exec_program(plan["argv"], environment)


def exec_program(argv: list[bytes], environment: dict[bytes, bytes]) -> NoReturn:
    """execvp(3) with the command's own PATH. Raises StartError."""
    program = argv[0]
    if b"/" in program:
        candidates = [program]
    else:
        candidates = [(part or b".") + b"/" + program for part in environment[b"PATH"].split(b":")]
    code = errno.ENOENT
    for candidate in candidates:
        try:
            os.execve(candidate, argv, environment)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            code = error.errno or code
            if error.errno != errno.EACCES:  # as execvp: a file that may not be executed does not end the search
                break
    raise StartError(code, f"cannot execute {shown(program)}: {os.strerror(code)}")


# --- users, as the sandbox's own files name them -------------------------------------------------------------------


def read_hostile(path: bytes) -> bytes:
    """The text of a small regular file, or nothing. The file may be anything: a link, a FIFO, huge, endless."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return b""
    return read_regular(fd)


def read_regular(fd: int) -> bytes:
    """As `read_hostile`, of a file that is open; closes it."""
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return b""
        data = b""
        while len(data) < MAX_PASSWD_BYTES and (chunk := os.read(fd, 65_536)):
            data += chunk
        return data
    except OSError:
        return b""
    finally:
        os.close(fd)


def rows_of(data: bytes, fields: int, *, holding: bytes) -> Iterator[list[bytes]]:
    """The well-formed lines of a passwd or group file that contain `holding`, split. Most lines are passed over unsplit, because
    every object a fresh fork makes is a page it has to copy."""
    for line in data.split(b"\n"):
        if holding in line and len(row := line.split(b":")) >= fields and is_id(row[2]):
            yield row


def find_user(wanted: bytes, read: Callable[[bytes], bytes] | None = None) -> tuple[int, int, list[int], bytes, bytes]:
    """`name`, `number`, `name:group`, … → (uid, gid, further groups, home, name). Raises StartError if a name is unknown."""
    read = read or read_hostile
    name, _, group = wanted.partition(b":")
    numeric = is_id(name)
    key = 2 if numeric else 0
    known = next((row for row in rows_of(read(b"/etc/passwd"), 6, holding=name) if row[key] == name and is_id(row[3])), None)
    if known:
        uid, gid, home, login = int(known[2]), int(known[3]), known[5] or b"/", known[0]
    elif numeric:
        uid, gid, home, login = int(name), 0, b"/", name
    elif name == b"root":
        uid, gid, home, login = 0, 0, b"/root", name  # an image without a passwd file still has root
    else:
        raise StartError(errno.ENOENT, f"no user {shown(name)} in the sandbox's /etc/passwd")
    if group:
        if is_id(group):
            return uid, int(group), [], home, login
        match = next((row for row in rows_of(read(b"/etc/group"), 4, holding=group) if row[0] == group), None)
        if match is None:
            raise StartError(errno.ENOENT, f"no group {shown(group)} in the sandbox's /etc/group")
        return uid, int(match[2]), [], home, login
    if not uid or not known:
        return uid, gid, [], home, login  # root needs no further groups
    further = [int(row[2]) for row in rows_of(read(b"/etc/group"), 4, holding=login) if login in row[3].split(b",")]
    return uid, gid, further[:64], home, login


def is_id(text: bytes) -> bool:
    return text.isdigit() and len(text) <= 5 and int(text) <= 65_534
