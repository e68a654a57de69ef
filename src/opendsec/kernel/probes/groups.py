# SPDX-License-Identifier: Apache-2.0
"""Control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from opendsec.kernel import cgroup_files, cgroups, procfs
from opendsec.kernel.probes.tools import Missing, closing, in_child, need, waiting_child


@contextmanager
def _group(limits: dict[str, int | float | None] | None = None) -> Iterator[cgroups.Group]:
    group = cgroups.discover().group(f"opendsec-probe-{os.getpid()}")
    group.create(limits)
    try:
        yield group
    finally:
        group.remove()


def cgroup_limits(scratch: str) -> str:
    hierarchies = cgroups.discover()
    need(not hierarchies.missing, f"no hierarchy offers {', '.join(hierarchies.missing)}")
    with _group({"memory_bytes": 64 << 20, "cpu_cores": 1, "cpu_weight": 100, "pids": 100}):
        pass
    return ", ".join(f"{name} on v{hierarchies.homes[name][0]}" for name in cgroup_files.CONTROLLERS)


def cgroup_v2(scratch: str) -> str:
    hierarchies = cgroups.discover()
    need(hierarchies.v2, "no cgroup2 is mounted")
    with _group() as group:
        child = group.child("command")
        child.create()
    return str(hierarchies.v2)


def clone_into_cgroup(scratch: str) -> str:
    with _group() as group:
        directory = group.open_v2_dir()
        if directory is None:
            raise Missing("no cgroup2 is mounted")
        name = f"/{group.name}".encode()

        def body() -> None:
            need(procfs.cgroup()[""].endswith(name), "the child is elsewhere")

        with closing(directory):
            in_child(body, cgroup_fd=directory)
    return ""


def cgroup_kill(scratch: str) -> str:
    with _group() as group:
        directory = group.open_v2_dir()
        if directory is None:
            raise Missing("no cgroup2 is mounted")
        with closing(directory), waiting_child(cgroup_fd=directory):
            procfs.write(f"{group.tree_path}/cgroup.kill", b"1")
            group.wait_empty(5)
    return ""


def cgroup_freeze(scratch: str) -> str:
    with _group() as group:
        directory = group.open_v2_dir()
        if directory is None:
            group.freeze(5)
            group.thaw()
            return "v1 freezer"
        with closing(directory), waiting_child(cgroup_fd=directory):
            group.freeze(5)
            group.thaw()
    return ""
