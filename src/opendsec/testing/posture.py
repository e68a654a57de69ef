# SPDX-License-Identifier: Apache-2.0
"""The posture of a process: everything about its confinement that can be seen from outside, made comparable.

`collect(pid)` asks the kernel, not the process. What differs from run to run (ids, inode numbers, device numbers, the name of the
host's pipe) is replaced by a word that says what it is; the rest stays as the kernel says it. A test compares the whole with a literal,
so that one capability, mount, descriptor or variable more than expected fails it; `differences` says which.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from opendsec.kernel import capabilities, namespaces, procfs

_KIND = re.compile(rb"^(pipe|socket|anon_inode):")
_FREE_OPTIONS = ("uid=", "gid=", "size=", "nr_inodes=", "upperdir=", "workdir=")  # the number or place differs from box to box
_SILENT_OPTIONS = ("uuid=on", "inode64")  # some kernels say these; they confine nothing
_SCHEDULERS = {os.SCHED_OTHER: "other", os.SCHED_BATCH: "batch", os.SCHED_IDLE: "idle", os.SCHED_FIFO: "fifo", os.SCHED_RR: "rr"}


@dataclass(frozen=True)
class Posture:
    """See the fields' comments; sets are sorted tuples, so that a difference reads well."""

    program: str  # its executable file, as it is named inside
    own_namespaces: tuple[str, ...]  # which differ from ours
    shared_namespaces: tuple[str, ...]
    uid_map: tuple[tuple[int, str, int], ...]  # (first inside, "base" or the host's number, how many)
    gid_map: tuple[tuple[int, str, int], ...]
    ids: Mapping[str, tuple[str, ...]]  # uid and gid: real, effective, saved, file system; as inside
    groups: tuple[str, ...]
    capabilities: Mapping[str, tuple[str, ...]]  # inheritable, permitted, effective, bounding, ambient
    no_new_privileges: bool
    seccomp: str  # "off", "strict", "filter"
    seccomp_filters: int
    mounts: tuple[tuple[str, str, str, str], ...]  # (where, type, mount options, options of the file system)
    root: str
    directory: str  # the working directory
    descriptors: Mapping[int, str]
    limits: Mapping[str, tuple[int | None, int | None]]
    environment: tuple[str, ...]
    cgroups: Mapping[str, str]
    umask: str
    signals_ignored: str
    signals_blocked: str
    signals_pending: str
    oom_score_adj: int
    scheduling: tuple[str, int]  # policy, nice
    personality: str
    session_leader: bool
    terminal: bool  # whether it has a controlling one
    threads: int
    tracer: int


def collect(pid: int, *, uid_base: int, names: Mapping[str, str] | None = None) -> Posture:
    """The posture of host process `pid`, whose sandbox has the ids from `uid_base`.

    `names`: texts to replace in paths and cgroups by a word (ids of the edge, the sandbox, the command).
    """
    status, stat = procfs.status(pid), procfs.stat(pid)
    ours, its = namespaces.namespace_ids(), namespaces.namespace_ids(pid)

    def shown(text: str) -> str:
        for found, word in (names or {}).items():
            text = text.replace(found, word)
        return text

    def inside(number: str) -> str:
        host = int(number)
        return str(host - uid_base) if 0 <= host - uid_base < 65_536 else f"host {host}"

    def id_map(name: str) -> tuple[tuple[int, str, int], ...]:
        rows = namespaces.parse_map(procfs.read(procfs.path_of(pid, name)))
        return tuple((first, "base" if host == uid_base else str(host), count) for first, host, count in rows)

    def link(name: str) -> str:
        return shown(os.readlink(procfs.path_of(pid, name)))

    return Posture(
        program=link("exe"),
        own_namespaces=tuple(sorted(name for name in its if its[name] != ours[name])),
        shared_namespaces=tuple(sorted(name for name in its if its[name] == ours[name])),
        uid_map=id_map("uid_map"),
        gid_map=id_map("gid_map"),
        ids={name.lower(): tuple(inside(number) for number in status[name].split()) for name in ("Uid", "Gid")},
        groups=tuple(inside(number) for number in status["Groups"].split()),
        capabilities={
            name: tuple(capabilities.names(int(status[key], 16)))
            for name, key in (
                ("inheritable", "CapInh"),
                ("permitted", "CapPrm"),
                ("effective", "CapEff"),
                ("bounding", "CapBnd"),
                ("ambient", "CapAmb"),
            )
        },
        no_new_privileges=status["NoNewPrivs"] == "1",
        seccomp=("off", "strict", "filter")[int(status["Seccomp"])],
        seccomp_filters=int(status.get("Seccomp_filters", "-1")),
        mounts=tuple(
            sorted(
                (shown(_text(mount.mount_point)), mount.fstype, ",".join(mount.options), _settings(mount.super_options))
                for mount in procfs.mountinfo(pid)
            )
        ),
        root=link("root"),
        directory=link("cwd"),
        descriptors={number: _descriptor(target) for number, target in sorted(procfs.fds(pid).items())},
        limits=procfs.limits(pid),
        environment=tuple(sorted(shown(_text(item)) for item in procfs.environ(pid))),
        cgroups={name: shown(_text(path)) for name, path in sorted(procfs.cgroup(pid).items())},
        umask=status["Umask"],
        signals_ignored=_bits(status["SigIgn"]),
        signals_blocked=_bits(status["SigBlk"]),
        signals_pending=_bits(status["ShdPnd"]),
        oom_score_adj=int(procfs.read(procfs.path_of(pid, "oom_score_adj"))),
        scheduling=(_SCHEDULERS.get(os.sched_getscheduler(pid), "?"), os.getpriority(os.PRIO_PROCESS, pid)),
        personality=_bits(procfs.read(procfs.path_of(pid, "personality")).decode()),
        session_leader=stat.session == stat.pid,
        terminal=stat.tty != 0,
        threads=stat.threads,
        tracer=int(status["TracerPid"]),
    )


def differences(expected: Posture, found: Posture) -> list[str]:
    """What `found` has and `expected` has not ("+"), and the reverse ("-"), a line each, named by field; empty if they are equal."""
    lines = []
    for field in fields(Posture):
        wanted, got = getattr(expected, field.name), getattr(found, field.name)
        if wanted != got:
            before, after = Counter(_items(wanted)), Counter(_items(got))
            found_here = [f"- {field.name}: {text}" for text in before - after] + [f"+ {field.name}: {text}" for text in after - before]
            lines += found_here or [f"~ {field.name}: {got}"]  # the same in another order
    return lines


def _items(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            if isinstance(one, tuple) and all(isinstance(part, str) for part in one):
                yield from (f"{key}: {part}" for part in one)
            else:
                yield f"{key} = {one}"
    elif isinstance(value, tuple):
        yield from map(str, value)
    else:
        yield str(value)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _bits(hexadecimal: str) -> str:
    return hexadecimal.strip().lstrip("0")


def _settings(options: tuple[str, ...]) -> str:
    """Options without the numbers that depend on the sandbox."""
    shown = [f"{option.partition('=')[0]}=*" if option.startswith(_FREE_OPTIONS) else option for option in options]
    return ",".join(option for option in shown if option not in _SILENT_OPTIONS)


def _descriptor(target: bytes) -> str:
    match = _KIND.match(target)
    return match[1].decode() if match else _text(target)
