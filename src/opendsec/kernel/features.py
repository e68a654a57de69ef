# SPDX-License-Identifier: Apache-2.0
"""What this machine can do, found out by doing it once: never by the kernel's version, never by a file's mere existence.

`probe(name)` tries one feature and remembers; `probe_all()` gives the table that `doctor` prints. Each probe does the real
thing in a forked child, a detached mount or a scratch directory, and leaves nothing behind. Some fork, so probe before the
process starts threads. Not for the spawner: this module may import what it likes.

`OPENDSEC_FORCE_MISSING=name,name` makes features absent for those who ask here, so that fallbacks can be tested.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from opendsec.kernel.probes import groups, isolation, machines, storage
from opendsec.kernel.probes.tools import Missing

FORCE_MISSING = "OPENDSEC_FORCE_MISSING"
SCRATCH_DIR = "/var/tmp"
"""Where probes put files; on a disk, since EROFS and fanotify differ on tmpfs. `probe_all` can be told another place."""

NOTHING = "nothing changes"  # of features that are probed ahead of what will use them


@dataclass(frozen=True, slots=True)
class Feature:
    """`reason` says why it is absent, and may add a detail when it is present (a version, a place)."""

    name: str
    present: bool
    reason: str
    needed_for: str
    without_it: str


@dataclass(frozen=True, slots=True)
class _Probe:
    name: str
    run: Callable[[str], str]
    needed_for: str
    without_it: str


_TABLE: tuple[_Probe, ...] = (
    _Probe("user_namespaces", isolation.user_namespaces, "container sandboxes: root inside is nobody outside", "containers are refused"),
    _Probe(
        "sandbox_namespaces",
        isolation.sandbox_namespaces,
        "container sandboxes: own mounts, processes, ipc, host name, network",
        "containers are refused",
    ),
    _Probe("pidfd", isolation.pidfd, "waiting for, signalling and joining processes without pid reuse races", "containers are refused"),
    _Probe("seccomp_filter", isolation.seccomp_filter, "the system call profile of sandboxes", "containers are refused"),
    _Probe("seccomp_notify", isolation.seccomp_notify, "nothing yet (asking the edge about single system calls)", NOTHING),
    _Probe(
        "landlock",
        isolation.landlock_rules,
        "nothing yet (a second fence around helpers that read hostile files)",
        NOTHING,
    ),
    _Probe("openat2", isolation.openat2, "every file operation: resolving paths beneath a sandbox's root", "containers are refused"),
    _Probe("apparmor", isolation.apparmor, "nothing yet (a mandatory profile around each sandbox)", NOTHING),
    _Probe("bpf_lsm", isolation.bpf_lsm, "nothing yet (audit and policy programs at security hooks)", NOTHING),
    _Probe("erofs_file", storage.erofs_file, "mounting layers straight from files", "layers are mounted through loop devices"),
    _Probe(
        "erofs_device",
        storage.erofs_device,
        "layers whose data lies apart from their metadata",
        "containers are refused",
    ),
    _Probe(
        "detached_clone",
        storage.detached_clone,
        "handing the shared mount of a layer to a sandbox by descriptor",
        "containers are refused (before Linux 6.15 a mount has to be attached to be cloned)",
    ),
    _Probe("idmapped_mounts", storage.idmapped_mounts, "one shared layer for sandboxes with different users", "containers are refused"),
    _Probe(
        "overlay_fd",
        storage.overlay_fd,
        "a sandbox's root: mapped layers given to overlay by descriptor, a writable upper",
        "containers are refused",
    ),
    _Probe(
        "loop",
        storage.loop_device,
        "the pool of scratch disks, and layers where EROFS cannot mount files",
        "scratch lies in memory (tmpfs)",
    ),
    _Probe("tmpfs", storage.tmpfs, "scratch in memory with exact limits on bytes and inodes; /dev and /dev/shm", "containers are refused"),
    _Probe("btrfs", storage.btrfs_quota, "scratch disks with limits", "scratch lies in memory (tmpfs)"),
    _Probe(
        "btrfs_simple_quota",
        storage.btrfs_simple_quota,
        "cheap accounting with many snapshots",
        "classic quota groups, slower as snapshots grow in number",
    ),
    _Probe(
        "fanotify_pre_content",
        storage.fanotify_pre_content,
        "loading layers when they are read, at no cost once they are here",
        "layers are loaded through FUSE",
    ),
    _Probe(
        "fuse",
        storage.fuse_files,
        "loading layers when they are read, where pre-content events are missing",
        "without those too, layers are loaded whole before they are used",
    ),
    _Probe("cgroup_limits", groups.cgroup_limits, "limits of memory, cpu and processes for each sandbox", "containers are refused"),
    _Probe(
        "cgroup_v2",
        groups.cgroup_v2,
        "killing and freezing whole process trees, child groups for each command",
        "the v1 freezer is used, more slowly",
    ),
    _Probe(
        "clone_into_cgroup",
        groups.clone_into_cgroup,
        "starting processes in their group at no cost",
        "processes join the v1 freezer by themselves",
    ),
    _Probe(
        "cgroup_kill",
        groups.cgroup_kill,
        "ending every process of a command, forks in flight included",
        "processes are frozen, listed and killed in turn",
    ),
    _Probe("cgroup_freeze", groups.cgroup_freeze, "packing a sandbox: nothing of it runs while its disk is kept", "packing is refused"),
    _Probe("memfd_exec", isolation.memfd_exec, "nothing yet (programs handed over without a file on disk)", NOTHING),
    _Probe("qemu", machines.qemu, "microVMs and full VMs", "both are refused"),
    _Probe("vm_disks", machines.programs_for_disks, "the disks of microVMs and full VMs", "both are refused"),
    _Probe(
        "process_capture",
        machines.process_capture,
        "emulated microVMs that start with code their template has translated",
        "each translates it anew, which takes a quarter of a second",
    ),
    _Probe(
        "kvm",
        machines.accelerated,
        "microVMs and full VMs at the speed of hardware, behind hardware's walls",
        "they run in QEMU's emulator (TCG): the same, many times slower, and a flaw of the emulator meets the confinement of its process",
    ),
)
_probes: dict[str, _Probe] = {probe.name: probe for probe in _TABLE}
_results: dict[str, Feature] = {}


def names() -> list[str]:
    """Every feature, in the table's order."""
    return list(_probes)


def forced_missing() -> frozenset[str]:
    """The names in OPENDSEC_FORCE_MISSING. Raises ValueError for one that is no feature: a typo must not pass for a test."""
    forced = frozenset(name.strip() for name in os.environ.get(FORCE_MISSING, "").split(",") if name.strip())
    if unknown := forced - _probes.keys():
        raise ValueError(f"{FORCE_MISSING} names no feature: {', '.join(sorted(unknown))}")
    return forced


def probe(name: str, scratch_dir: str | None = None) -> Feature:
    """Try a feature, or give what an earlier try found. Raises KeyError for an unknown name."""
    entry = _probes[name]
    if name in forced_missing():
        return Feature(name, False, f"forced by {FORCE_MISSING}", entry.needed_for, entry.without_it)
    if name not in _results:
        present, reason = True, ""
        try:
            with tempfile.TemporaryDirectory(prefix="opendsec-probe-", dir=scratch_dir or SCRATCH_DIR) as scratch:
                reason = entry.run(scratch)
        except Missing as error:
            present, reason = False, str(error)
        except OSError as error:
            subject = f" ({error.filename})" if isinstance(error.filename, str) else ""
            present, reason = False, f"{error.strerror or error}{subject}"
        _results[name] = Feature(name, present, reason, entry.needed_for, entry.without_it)
    return _results[name]


def probe_all(scratch_dir: str | None = None) -> list[Feature]:
    """The whole table; some 0.2 s the first time."""
    return [probe(name, scratch_dir) for name in _probes]


def forget() -> None:
    """Drop what was found; the next question tries again."""
    _results.clear()
