# SPDX-License-Identifier: Apache-2.0
"""The posture of a process: everything about its confinement that can be seen from outside, made comparable.

`collect(pid)` asks the kernel, not the process. What differs from run to run (ids, inode numbers, device numbers, the name of the
host's pipe) is replaced by a word that says what it is; the rest stays as the kernel says it. A test compares the whole with a literal,
so that one capability, mount, descriptor or variable more than expected fails it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from opendsec.kernel import capabilities, namespaces, procfs

_KIND = re.compile(rb"^(pipe|socket|anon_inode):")
_FREE_OPTIONS = ("uid=", "gid=", "size=", "nr_inodes=")


@dataclass(frozen=True)
class Posture:
    """See the fields' comments; sets are sorted tuples, so that a difference reads well."""

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
    descriptors: Mapping[int, str]
    limits: Mapping[str, tuple[int | None, int | None]]
    environment: tuple[str, ...]
    cgroups: Mapping[str, str]
    signals_ignored: str
    signals_blocked: str
    oom_score_adj: int
    threads: int
    tracer: int


def collect(pid: int, *, uid_base: int, names: Mapping[str, str] | None = None) -> Posture:
    """The posture of host process `pid`, whose sandbox has the ids from `uid_base`.

    `names`: texts to replace in paths and cgroups by a word (ids of the edge, the sandbox, the command).
    """
    status = procfs.status(pid)
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

    return Posture(
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
            (shown(_text(mount.mount_point)), mount.fstype, ",".join(mount.options), _settings(mount.super_options))
            for mount in procfs.mountinfo(pid)
        ),
        descriptors={number: _descriptor(target) for number, target in sorted(procfs.fds(pid).items())},
        limits=procfs.limits(pid),
        environment=tuple(sorted(shown(_text(item)) for item in procfs.environ(pid))),
        cgroups={name: shown(_text(path)) for name, path in sorted(procfs.cgroup(pid).items())},
        signals_ignored=status["SigIgn"].lstrip("0"),
        signals_blocked=status["SigBlk"].lstrip("0"),
        oom_score_adj=int(procfs.read(procfs.path_of(pid, "oom_score_adj"))),
        threads=int(status["Threads"]),
        tracer=int(status["TracerPid"]),
    )


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _settings(options: tuple[str, ...]) -> str:
    """Options without the numbers that depend on the sandbox."""
    return ",".join(
        f"{option.partition('=')[0]}=*" if option.startswith(_FREE_OPTIONS) else re.sub(r"^(upper|work)dir=.*", r"\1dir=*", option)
        for option in options
    )


def _descriptor(target: bytes) -> str:
    match = _KIND.match(target)
    return match[1].decode() if match else _text(target)
