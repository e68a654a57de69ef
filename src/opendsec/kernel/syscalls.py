# SPDX-License-Identifier: Apache-2.0
"""Thin wrappers over system calls, each under its man-page name.

Contract of every function here:

* failure raises `OSError(errno, "<call>: <strerror>", path)`; the path is there whenever the call takes one;
* paths are `str`, `bytes` or `os.PathLike` and reach the kernel byte for byte (`os.fsencode`), non-UTF-8 names included;
* descriptors returned are close-on-exec, where the kernel can do that at all;
* nothing retries, allocates global state or logs.

`clone3` must run with the interpreter lock held, everything else releases it, because mounts and waits may block.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from opendsec.kernel import abi

TYPE_CHECKING = False  # as typing.TYPE_CHECKING, without its 10 ms import; type checkers know the name
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, NoReturn

    StrPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_libc = ctypes.CDLL(None, use_errno=True)
# PyDLL keeps the lock during the call: a child born while another thread holds it would wait for that thread for ever.
_libc_locked = ctypes.PyDLL(None, use_errno=True)


def _syscall_functions(library: ctypes.CDLL) -> list[Any]:
    """`syscall(2)` for 0 to 6 arguments. Every argument is declared as wide as a register: undeclared, ctypes would
    pass an int and cut 64-bit flags. `library["name"]` makes a new function object each time, so prototypes differ."""
    functions = []
    for count in range(7):
        function = library["syscall"]
        function.restype = ctypes.c_long
        function.argtypes = [ctypes.c_long] + [ctypes.c_void_p] * count
        functions.append(function)
    return functions


_syscall_n = _syscall_functions(_libc)
_syscall_locked_n = _syscall_functions(_libc_locked)


def _libc_function(name: str, *argtypes: Any) -> Any:
    function = _libc[name]
    function.restype = ctypes.c_int
    function.argtypes = list(argtypes)
    return function


def raise_errno(call: str, path: StrPath | int | None = None) -> NoReturn:
    """Raise the `OSError` of the last failed call made through this module."""
    code = ctypes.get_errno()
    message = f"{call}: {os.strerror(code)}"
    if path is None:
        raise OSError(code, message)
    raise OSError(code, message, path if isinstance(path, int) else os.fsdecode(path))


def syscall(name: str, *args: Any, path: StrPath | int | None = None) -> int:
    """Make system call `name` (a key of `abi.SYS`). Arguments: int, bytes, None, or a ctypes buffer."""
    result: int = _syscall_n[len(args)](abi.SYS[name], *args)
    if result < 0:
        raise_errno(name, path)
    return result


# --- processes -----------------------------------------------------------------------------------------------------

_CLONE_ARGS = struct.Struct("=11Q")


def clone3(flags: int, *, cgroup_fd: int | None = None, want_pidfd: bool = False, exit_signal: int = abi.SIGCHLD) -> tuple[int, int]:
    """Fork with `flags` (namespaces and so on; no CLONE_VM). Returns (pid, pidfd or -1); in the child (0, -1).

    `cgroup_fd` is a cgroup v2 directory that the child is born in. None of Python's fork hooks run: the caller is
    single-threaded, and its child leaves by exec or `os._exit` only.
    """
    if flags & (abi.CLONE_VM | abi.CLONE_THREAD):
        raise ValueError("clone3: CLONE_VM and CLONE_THREAD cannot work from Python")
    pidfd = ctypes.c_int(-1)
    pidfd_address = 0
    if want_pidfd:
        flags |= abi.CLONE_PIDFD
        pidfd_address = ctypes.addressof(pidfd)
    if cgroup_fd is not None:
        flags |= abi.CLONE_INTO_CGROUP
    args = _CLONE_ARGS.pack(flags, pidfd_address, 0, 0, exit_signal, 0, 0, 0, 0, 0, cgroup_fd or 0)
    pid: int = _syscall_locked_n[2](abi.SYS["clone3"], args, len(args))
    if pid < 0:
        raise_errno("clone3")
    return (pid, pidfd.value) if pid else (0, -1)


_unshare = _libc_function("unshare", ctypes.c_int)
_setns = _libc_function("setns", ctypes.c_int, ctypes.c_int)


def unshare(flags: int) -> None:
    if _unshare(flags) < 0:
        raise_errno("unshare")


def setns(fd: int, flags: int) -> None:
    """Join the namespace behind `fd`, or with a pidfd all those of its process that `flags` names."""
    if _setns(fd, flags) < 0:
        raise_errno("setns")


def pidfd_open(pid: int, flags: int = 0) -> int:
    return syscall("pidfd_open", pid, flags)


def pidfd_send_signal(pidfd: int, signal: int, flags: int = 0) -> None:
    syscall("pidfd_send_signal", pidfd, signal, None, flags)


def pidfd_getfd(pidfd: int, target_fd: int, flags: int = 0) -> int:
    return syscall("pidfd_getfd", pidfd, target_fd, flags)


def _string_array(strings: Iterable[StrPath]) -> Any:
    encoded = [os.fsencode(string) for string in strings]
    for string in encoded:
        if b"\0" in string:
            raise ValueError("embedded null byte")
    return (ctypes.c_char_p * (len(encoded) + 1))(*encoded, None)


def execveat(fd: int, path: StrPath, argv: Sequence[StrPath], envp: Sequence[StrPath], flags: int = 0) -> None:
    """Replace this process; returns only by raising. `envp` holds `NAME=value` strings."""
    argv_array, envp_array = _string_array(argv), _string_array(envp)
    syscall("execveat", fd, _path(path), argv_array, envp_array, flags, path=path)


_prctl = _libc_function("prctl", ctypes.c_int, *[ctypes.c_void_p] * 4)


def prctl(option: int, arg2: int | bytes = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    result: int = _prctl(option, arg2, arg3, arg4, arg5)
    if result < 0:
        raise_errno("prctl")
    return result


_setfsuid, _setfsgid = _libc_function("setfsuid", ctypes.c_uint), _libc_function("setfsgid", ctypes.c_uint)


def setfsuid(uid: int) -> None:
    """Set the user that this thread's file permissions are checked for. The call itself never fails; EPERM if it had no effect."""
    _setfsuid(uid)
    if getfsids()[0] != uid:
        raise OSError(errno.EPERM, f"setfsuid: {os.strerror(errno.EPERM)}")


def setfsgid(gid: int) -> None:
    """As `setfsuid`, for the group."""
    _setfsgid(gid)
    if getfsids()[1] != gid:
        raise OSError(errno.EPERM, f"setfsgid: {os.strerror(errno.EPERM)}")


def getfsids() -> tuple[int, int]:
    """(user, group) that this thread's file permissions are checked for."""
    nobody = 0xFFFF_FFFF  # cannot be set: only tells the present one
    return _setfsuid(nobody) & 0xFFFF_FFFF, _setfsgid(nobody) & 0xFFFF_FFFF


def rt_sigaction_default(number: int) -> None:
    """Set a signal to its default, by the bare call: the C library keeps the first real-time signals to itself."""
    syscall("rt_sigaction", number, bytes(32), None, 8)


_sethostname = _libc_function("sethostname", ctypes.c_char_p, ctypes.c_size_t)


def sethostname(name: bytes) -> None:
    if _sethostname(name, len(name)) < 0:
        raise_errno("sethostname", name)


def capget(pid: int = 0) -> tuple[int, int, int]:
    """(effective, permitted, inheritable) of a process as bit sets."""
    header = struct.pack("=Ii", abi.LINUX_CAPABILITY_VERSION_3, pid)
    data = ctypes.create_string_buffer(24)
    if _capget(header, data) < 0:
        raise_errno("capget")
    low_e, low_p, low_i, high_e, high_p, high_i = struct.unpack("=6I", data.raw)
    return low_e | high_e << 32, low_p | high_p << 32, low_i | high_i << 32


def capset(effective: int, permitted: int, inheritable: int) -> None:
    """Set this thread's capability sets, given as bit sets."""
    header = struct.pack("=Ii", abi.LINUX_CAPABILITY_VERSION_3, 0)
    low = 0xFFFF_FFFF
    sets = (effective & low, permitted & low, inheritable & low, effective >> 32, permitted >> 32, inheritable >> 32)
    if _capset(header, struct.pack("=6I", *sets)) < 0:
        raise_errno("capset")


_capget = _libc_function("capget", ctypes.c_char_p, ctypes.c_char_p)
_capset = _libc_function("capset", ctypes.c_char_p, ctypes.c_char_p)

# --- mounts --------------------------------------------------------------------------------------------------------


def _path(path: StrPath) -> bytes:
    """The bytes of a path. A NUL inside would silently name another file, since C strings end there."""
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise ValueError("embedded null byte")
    return encoded


def _optional_path(path: StrPath | None) -> bytes | None:
    return None if path is None else _path(path)


_mount = _libc_function("mount", *[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)
_umount2 = _libc_function("umount2", ctypes.c_char_p, ctypes.c_int)


def mount(
    source: StrPath | None,
    target: StrPath,
    fstype: str | bytes | None,
    flags: int = 0,
    data: str | bytes | None = None,
) -> None:
    if _mount(_optional_path(source), _path(target), _optional_path(fstype), flags, _optional_path(data)) < 0:
        raise_errno("mount", target)


def umount2(target: StrPath, flags: int = 0) -> None:
    if _umount2(_path(target), flags) < 0:
        raise_errno("umount2", target)


def pivot_root(new_root: StrPath, put_old: StrPath) -> None:
    syscall("pivot_root", _path(new_root), _path(put_old), path=new_root)


def fsopen(fstype: str | bytes, flags: int = abi.FSOPEN_CLOEXEC) -> int:
    """A configuration context for a new superblock. The caller closes it."""
    return syscall("fsopen", _path(fstype), flags, path=fstype)


def _fs_log(fsfd: int) -> str:
    """What the file system had to say about a failure; errno alone is mostly EINVAL. One message a read."""
    lines: list[str] = []
    try:
        while len(lines) < 16:
            # Each begins with its level, as in "e overlay: ...".
            lines.append(os.read(fsfd, 1024).decode("utf-8", "replace").strip().removeprefix("e "))
    except OSError:
        pass  # ENODATA: no more
    return "; ".join(lines)


def _fsconfig(fsfd: int, command: int, key: str | None, value: bytes | None, aux: int) -> None:
    encoded = None if key is None else key.encode()
    if _syscall_n[5](abi.SYS["fsconfig"], fsfd, command, encoded, value, aux) < 0:
        code = ctypes.get_errno()
        detail = _fs_log(fsfd)
        subject = os.fsdecode(value) if value else key
        message = f"fsconfig: {os.strerror(code)}" + (f" ({detail})" if detail else "")
        raise OSError(code, message, subject) if subject else OSError(code, message)


def fsconfig_set_flag(fsfd: int, key: str) -> None:
    _fsconfig(fsfd, abi.FSCONFIG_SET_FLAG, key, None, 0)


def fsconfig_set_string(fsfd: int, key: str, value: StrPath) -> None:
    """The kernel takes at most 255 bytes here; `mount` or a descriptor is the way for longer values."""
    _fsconfig(fsfd, abi.FSCONFIG_SET_STRING, key, _path(value), 0)


def fsconfig_set_fd(fsfd: int, key: str, fd: int) -> None:
    _fsconfig(fsfd, abi.FSCONFIG_SET_FD, key, None, fd)


def fsconfig_create(fsfd: int) -> None:
    _fsconfig(fsfd, abi.FSCONFIG_CMD_CREATE, None, None, 0)


def fsmount(fsfd: int, attrs: int = 0, flags: int = abi.FSMOUNT_CLOEXEC) -> int:
    """A detached mount of the superblock, as an O_PATH descriptor; `attrs` are MOUNT_ATTR_*."""
    return syscall("fsmount", fsfd, flags, attrs)


def open_tree(dirfd: int, path: StrPath, flags: int) -> int:
    """An O_PATH descriptor of a mount, or with OPEN_TREE_CLONE of a detached copy of it."""
    return syscall("open_tree", dirfd, _path(path), flags | abi.OPEN_TREE_CLOEXEC, path=path)


def move_mount(from_fd: int, from_path: StrPath, to_fd: int, to_path: StrPath, flags: int = 0) -> None:
    syscall("move_mount", from_fd, _path(from_path), to_fd, _path(to_path), flags, path=to_path or to_fd)


def mount_setattr(
    fd: int,
    path: StrPath,
    flags: int,
    *,
    set: int = 0,
    clear: int = 0,
    propagation: int = 0,
    userns_fd: int | None = None,
) -> None:
    """Set and clear MOUNT_ATTR_* bits; with `userns_fd` id-map the mount (adds MOUNT_ATTR_IDMAP)."""
    if userns_fd is not None:
        set |= abi.MOUNT_ATTR_IDMAP
    attr = struct.pack("=4Q", set, clear, propagation, userns_fd or 0)
    syscall("mount_setattr", fd, _path(path), flags, attr, len(attr), path=path or fd)


# --- files ---------------------------------------------------------------------------------------------------------


def openat2(dirfd: int, path: StrPath, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """open(2) with RESOLVE_* limits on the walk. EAGAIN: a rename raced with ".."; `fds.beneath` retries."""
    how = struct.pack("=3Q", (flags | os.O_CLOEXEC) & 0xFFFF_FFFF, mode, resolve)
    return syscall("openat2", dirfd, _path(path), how, len(how), path=path)


def close_range(first: int, last: int = 0xFFFF_FFFF, flags: int = 0) -> None:
    syscall("close_range", first, last, flags)


def renameat2(old_dirfd: int, old: StrPath, new_dirfd: int, new: StrPath, flags: int = 0) -> None:
    syscall("renameat2", old_dirfd, _path(old), new_dirfd, _path(new), flags, path=old)


_linkat = _libc_function("linkat", ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int)


def linkat(old_dirfd: int, old: StrPath, new_dirfd: int, new: StrPath, flags: int = 0) -> None:
    """As link(2), with AT_EMPTY_PATH to give a name to an O_TMPFILE."""
    if _linkat(old_dirfd, _path(old), new_dirfd, _path(new), flags) < 0:
        raise_errno("linkat", new)


_fallocate = _libc_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if _fallocate(fd, mode, offset, length) < 0:
        raise_errno("fallocate", fd)


_fstatfs = _libc_function("fstatfs", ctypes.c_int, ctypes.c_void_p)


def fstatfs_type(fd: int) -> int:
    """`f_type` of the file system behind a descriptor (O_PATH will do): one of the *_MAGIC numbers."""
    buffer = ctypes.create_string_buffer(256)
    if _fstatfs(fd, buffer) < 0:
        raise_errno("fstatfs", fd)
    return int.from_bytes(buffer.raw[:8], "little") & 0xFFFF_FFFF


# --- seccomp, Landlock, notification -------------------------------------------------------------------------------


def seccomp(operation: int, flags: int, args: bytes | None = None) -> int:
    """For SECCOMP_SET_MODE_FILTER `args` is the program, an array of `struct sock_filter`; otherwise the raw operand.

    Returns 0, or with SECCOMP_FILTER_FLAG_NEW_LISTENER the notification descriptor (the kernel makes it close-on-exec).
    """
    if operation != abi.SECCOMP_SET_MODE_FILTER or args is None:
        return syscall("seccomp", operation, flags, args)
    if not args or len(args) % 8:
        raise OSError(errno.EINVAL, "seccomp: a program is one or more instructions of 8 bytes")
    buffer = ctypes.create_string_buffer(args, len(args))
    program = struct.pack("@HP", len(args) // 8, ctypes.addressof(buffer))
    return syscall("seccomp", operation, flags, program)


def landlock_create_ruleset(attr: bytes | None, flags: int = 0) -> int:
    return syscall("landlock_create_ruleset", attr, len(attr) if attr else 0, flags)


def landlock_add_rule(ruleset_fd: int, rule_type: int, attr: bytes) -> None:
    syscall("landlock_add_rule", ruleset_fd, rule_type, attr, 0)


def landlock_restrict_self(ruleset_fd: int) -> None:
    syscall("landlock_restrict_self", ruleset_fd, 0)


_inotify_init1 = _libc_function("inotify_init1", ctypes.c_int)
_inotify_add_watch = _libc_function("inotify_add_watch", ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
_inotify_rm_watch = _libc_function("inotify_rm_watch", ctypes.c_int, ctypes.c_int)
_fanotify_init = _libc_function("fanotify_init", ctypes.c_uint, ctypes.c_uint)
_fanotify_mark = _libc_function("fanotify_mark", ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)


def inotify_init1(flags: int = abi.IN_CLOEXEC) -> int:
    fd: int = _inotify_init1(flags)
    if fd < 0:
        raise_errno("inotify_init1")
    return fd


def inotify_add_watch(fd: int, path: StrPath, mask: int) -> int:
    watch: int = _inotify_add_watch(fd, _path(path), mask)
    if watch < 0:
        raise_errno("inotify_add_watch", path)
    return watch


def inotify_rm_watch(fd: int, watch: int) -> None:
    if _inotify_rm_watch(fd, watch) < 0:
        raise_errno("inotify_rm_watch")


def fanotify_init(flags: int, event_flags: int) -> int:
    fd: int = _fanotify_init(flags, event_flags)
    if fd < 0:
        raise_errno("fanotify_init")
    return fd


def fanotify_mark(fd: int, flags: int, mask: int, dirfd: int, path: StrPath | None) -> None:
    if _fanotify_mark(fd, flags, mask, dirfd, _optional_path(path)) < 0:
        raise_errno("fanotify_mark", dirfd if path is None else path)
