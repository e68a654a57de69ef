# SPDX-License-Identifier: Apache-2.0
"""Starting a virtual machine monitor (or another of our own programs that reads what guests made): both halves, as in `enter`.

What such a process has: a root directory made for it, read-only, that holds the program, its libraries and firmware, a /dev of six nodes
that mean nothing, and those files of the host that the plan names, each alone under the name it says. No /proc. All other files it uses
are open before it starts. One user id, its own on the host and without any capability; namespaces of its own, the network one empty.

The plan:
    group, limits   as for a sandbox
    uid             the host's id; inside it is INNER_UID
    root            the directory; the places for `inside` are in it
    inside          [(path, name, writable)]
    open            [(number, path, writable)]
    given           numbers of the descriptors that come with the request, in their order
    program         what is executed, if it is not argv[0]
    argv, env, rlimits, profile, staging, hostname
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket

from opendsec.kernel import abi, capabilities, cgroups, enter, mounts, namespaces, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from opendsec.kernel.spawner import Spawner

    Plan = dict[str, Any]

INNER_UID = 1000  # nobody is root in there, not even of its own namespace
LAST_NUMBER = 512


def start(spawner: Spawner, request: int, plan: Plan, fds: list[int]) -> None:
    """The spawner's half."""
    from opendsec.kernel.spawner import be_owner, close_all

    profile = spawner.profiles[plan["profile"]]
    group = spawner.hierarchies.group(plan["group"])
    group.create_tree()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    cgroup, joins, child = None, [], -1
    try:
        cgroup = group.open_v2_dir()
        be_owner(plan["uid"])
        try:
            child = spawner.fork(
                request, enter.SANDBOX_NAMESPACES, cgroup, enter_machine, plan, theirs.fileno(), profile, fds, is_command=True
            )
        finally:
            be_owner(0)
        theirs.close()
        group.create(plan["limits"], has_tree=True)
        joins = group.open_join()
        namespaces.write_id_maps(child, [(INNER_UID, plan["uid"], 1)])
        root = -1
        try:
            socket.send_fds(ours, [b"mapped"], joins)
            root = make_root(spawner.dev, plan)
            socket.send_fds(ours, [b"root"], [root])
        finally:
            close_all(root)
    except BaseException as error:
        if child > 0:
            if isinstance(error, ConnectionError) or spawner.children[child].has_spoken():
                return  # it failed first: what it says is the answer
            spawner.children[child].request = -1
            os.kill(child, signal.SIGKILL)
        raise
    finally:
        ours.close()
        theirs.close()
        close_all(-1 if cgroup is None else cgroup, *joins)


def make_root(dev: int, plan: Plan) -> int:
    """The root directory, detached."""
    attrs = abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV
    root = mounts.bind_readonly(abi.AT_FDCWD, plan["root"], attrs=attrs)
    held = []
    try:
        held.append(mounts.clone(dev))
        mounts.attach(held[-1], root, b"dev")
        for path, name, writable in plan["inside"]:
            if writable:
                held.append(syscalls.open_tree(abi.AT_FDCWD, path, abi.OPEN_TREE_CLONE | abi.AT_SYMLINK_NOFOLLOW))
                syscalls.mount_setattr(held[-1], b"", abi.AT_EMPTY_PATH, set=mounts.QUIET)
            else:
                held.append(mounts.bind_readonly(abi.AT_FDCWD, path, attrs=mounts.QUIET))
            mounts.attach(held[-1], root, name)
        return root
    except BaseException:
        os.close(root)
        raise
    finally:
        for fd in held:
            os.close(fd)


def enter_machine(plan: Plan, sync: int, profile: bytes, fds: list[int]) -> None:
    """The child's half."""
    sync, *given = enter.keep(sync, *fds)
    enter.step = "open the files"
    # As the host's root still, in its mount namespace.
    opened = list(zip(plan["given"], given, strict=True))
    for number, path, writable in plan["open"]:
        opened.append((number, os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOCTTY)))
    staging = os.open(plan["staging"], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    enter.step = "mount"
    syscalls.sethostname(plan["hostname"])
    syscalls.mount(None, b"/", None, abi.MS_REC | abi.MS_PRIVATE)
    enter.step = "wait for the id maps"
    with socket.socket(fileno=sync) as parent:
        joins = enter.hear(parent, b"mapped")
        enter.step = "join the cgroups"
        cgroups.join_fds(joins)
        for fd in joins:
            os.close(fd)
        enter.step = "become its user"
        os.setgroups([])
        os.setresgid(INNER_UID, INNER_UID, INNER_UID)
        os.setresuid(INNER_UID, INNER_UID, INNER_UID)
        syscalls.prctl(abi.PR_SET_DUMPABLE, 0)
        os.setsid()
        os.umask(0o077)
        syscalls.unshare(abi.CLONE_NEWCGROUP)
        enter.step = "wait for the root directory"
        (root,) = enter.hear(parent, b"root")
    enter.step = "mount"
    mounts.attach(root, staging)
    enter.step = "pivot"
    os.fchdir(root)
    syscalls.pivot_root(b".", b".")
    syscalls.umount2(b".", abi.MNT_DETACH)
    os.chdir(b"/")
    os.close(root)
    os.close(staging)
    enter.step = "descriptors"
    place(opened)
    enter.step = "restrict"
    capabilities.drop_to(bounding=0)
    for number, soft, hard in plan["rlimits"]:
        resource.setrlimit(number, (soft, hard))
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    # A clone has few pages of its own, scattered: as huge ones they would take several times the memory. This outlasts the exec.
    syscalls.prctl(abi.PR_SET_THP_DISABLE, 1)
    syscalls.prctl(abi.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.seccomp(abi.SECCOMP_SET_MODE_FILTER, 0, profile)
    enter.step = "exec"
    enter.tell(b"ok")
    argv = plan["argv"]
    program = plan.get("program", argv[0])
    try:
        os.execve(program, argv, plan["env"])
    except OSError as error:
        raise OSError(error.errno, f"cannot execute {program!r}: {os.strerror(error.errno or 0)}") from None


def place(opened: list[tuple[int, int]]) -> None:
    """Each descriptor at its number, and none besides (but the channel, which exec closes)."""
    floor = max((number for number, _ in opened), default=2) + 1
    if floor > LAST_NUMBER:
        raise OSError(errno.EMFILE, "too many files")
    floor = max(floor, max((fd for _, fd in opened), default=2) + 1, enter.channel + 1)
    high = [(number, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor)) for number, fd in opened]
    enter.channel = fcntl.fcntl(enter.channel, fcntl.F_DUPFD_CLOEXEC, floor)
    os.closerange(0, floor)
    for number, fd in high:
        os.dup2(fd, number, inheritable=True)
        os.close(fd)
    for number in range(3):
        if all(number != taken for taken, _ in opened):
            null = os.open(b"/dev/null", os.O_RDWR | os.O_CLOEXEC)
            if null == number:  # then dup2 does nothing, and the program would open its first file as its input
                os.set_inheritable(null, True)
            else:
                os.dup2(null, number, inheritable=True)
                os.close(null)
