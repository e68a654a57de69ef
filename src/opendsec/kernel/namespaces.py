# SPDX-License-Identifier: Apache-2.0
"""Namespaces of a process: naming, opening and comparing them, and the id maps of a user namespace."""

from __future__ import annotations

import os

from opendsec.kernel import abi, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

FLAGS: dict[str, int] = {
    "cgroup": abi.CLONE_NEWCGROUP,
    "ipc": abi.CLONE_NEWIPC,
    "mnt": abi.CLONE_NEWNS,
    "net": abi.CLONE_NEWNET,
    "pid": abi.CLONE_NEWPID,
    "time": abi.CLONE_NEWTIME,
    "user": abi.CLONE_NEWUSER,
    "uts": abi.CLONE_NEWUTS,
}
"""Name under /proc/<pid>/ns → CLONE_NEW* flag."""


def namespace_ids(pid: int | str = "self") -> dict[str, int]:
    """Name → inode number; two processes share a namespace exactly if these are equal. Kinds the kernel lacks are left out."""
    ids = {}
    for name in FLAGS:
        try:
            ids[name] = os.stat(procfs.path_of(pid, "ns", name)).st_ino
        except FileNotFoundError:
            if name == "mnt":
                raise  # every kernel has that one: the process is gone
    return ids


def open_namespace(pid: int | str, name: str) -> int:
    """A descriptor that keeps the namespace alive and can be given to setns. The caller closes it."""
    return os.open(procfs.path_of(pid, "ns", name), os.O_RDONLY | os.O_CLOEXEC)


IdRange = tuple[int, int, int]
"""(first id inside, first id outside, how many)."""


def format_map(ranges: Sequence[IdRange]) -> str:
    """The text for uid_map. Raises ValueError for what the kernel would refuse as EINVAL without saying why."""
    if not 1 <= len(ranges) <= 340:
        raise ValueError("an id map has 1 to 340 ranges")
    for inside, outside, count in ranges:
        # 2^32 - 1 is "no id" and cannot be mapped.
        if count < 1 or min(inside, outside) < 0 or max(inside, outside) + count > 0xFFFF_FFFF:
            raise ValueError(f"not an id range: {(inside, outside, count)}")
    return "".join(f"{inside} {outside} {count}\n" for inside, outside, count in ranges)


def parse_map(data: bytes) -> list[IdRange]:
    ranges = []
    for line in data.splitlines():
        inside, outside, count = map(int, line.split())
        ranges.append((inside, outside, count))
    return ranges


def write_id_maps(pid: int, uids: Sequence[IdRange], gids: Sequence[IdRange] | None = None) -> None:
    """Map the user namespace of `pid` (which made it and waits), once and for all. `gids` left out: as `uids`.

    The writer needs CAP_SETUID and CAP_SETGID over the mapped ids. setgroups stays allowed, as a system with users needs.
    """
    uid_text = format_map(uids)
    procfs.write(procfs.path_of(pid, "gid_map"), uid_text if gids is None else format_map(gids))
    procfs.write(procfs.path_of(pid, "uid_map"), uid_text)


def deny_setgroups(pid: int) -> None:
    """Forbid setgroups(2) in the namespace, as unprivileged maps of gids demand; before `write_id_maps`."""
    procfs.write(procfs.path_of(pid, "setgroups"), "deny")


def user_namespace(uids: Sequence[IdRange], gids: Sequence[IdRange] | None = None) -> int:
    """A descriptor of a new user namespace in which no process is left: good for id-mapped mounts. The caller closes it."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = -1
    try:
        pid, _ = syscalls.clone3(abi.CLONE_NEWUSER)
        if pid == 0:
            try:
                os.close(writing)
                os.read(reading, 1)  # the end of file: the parent is done, or dead
            finally:
                os._exit(0)
        write_id_maps(pid, uids, gids)
        return open_namespace(pid, "user")
    finally:
        os.close(writing)
        os.close(reading)
        if pid > 0:
            os.waitpid(pid, 0)
