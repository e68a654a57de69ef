# SPDX-License-Identifier: Apache-2.0
"""From what the edge decided to what the spawner does: pure functions, whose results can be printed and compared."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence

from opendsec.api.spec import Limits
from opendsec.runtime.backend import ExecPlan, Placement
from opendsec.runtime.container import profile
from opendsec.runtime.scratch import ScratchPlan

Plan = dict[str, object]

PROFILE_NAME = b"container"
MAX_LOCKED_BYTES = 8 << 20
MAX_QUEUE_BYTES = 819_200  # of POSIX message queues: the kernel's default
ZERO_LIMITS = (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE)
CORE_BYTES = 1
"""Not 0: where the host's core_pattern names a program, the kernel runs it, as the host's root, for a process whose limit is 0 as well.
At 1 alone it does not; and a file of one byte it does not write either."""


def group_name(edge_id: str, sandbox_id: str) -> str:
    """The sandbox's cgroup, relative to the hierarchies' roots."""
    return f"{edge_group(edge_id)}/{sandbox_id}"


def edge_group(edge_id: str) -> str:
    return f"opendsec-{edge_id}"


def group_limits(limits: Limits) -> dict[str, float | int]:
    """Limits under the names of `kernel.cgroups`."""
    return {
        "memory_bytes": limits.memory_bytes,
        "cpu_cores": limits.cpu,
        "cpu_weight": limits.cpu_weight,
        "pids": limits.pids + 1,  # PID 1 is ours
    }


def rlimits(limits: Limits) -> list[tuple[int, int, int]]:
    """(resource, soft, hard). Hard limits only ever fall, since the spawner may lack CAP_SYS_RESOURCE."""
    wanted = {
        resource.RLIMIT_CORE: CORE_BYTES,
        **dict.fromkeys(ZERO_LIMITS, 0),
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_MEMLOCK: MAX_LOCKED_BYTES,
        resource.RLIMIT_SIGPENDING: limits.pids * 16 + 1024,
        resource.RLIMIT_MSGQUEUE: MAX_QUEUE_BYTES,
    }
    values = {number: min(value, hard(number)) for number, value in wanted.items()}
    return [(number, value, value) for number, value in values.items()]


def hard(number: int) -> int:
    """This process's own hard limit, which a child cannot exceed."""
    value = resource.getrlimit(number)[1]
    return value if value != resource.RLIM_INFINITY else 1 << 62


def create_plan(placement: Placement, *, edge_id: str, scratch: ScratchPlan, staging: str) -> Plan:
    """What `spawner.do_create` takes. `staging`: a directory of the host to mount the root at, in the child's own namespace."""
    limits = placement.limits
    return {
        "group": group_name(edge_id, placement.sandbox_id),
        "limits": group_limits(limits),
        "uid_base": placement.uid_base,
        "layers": [layer.digest.encode() for layer in placement.layers],
        "scratch": scratch.wire(),
        "staging": raw(staging),
        "hostname": raw(placement.hostname),
        "shm_size": min(profile.SHM_BYTES, max(limits.memory_bytes // 2, 1 << 20)),
        "masked": list(profile.MASKED),
        "read_only": list(profile.READ_ONLY),
        "capabilities": profile.CAPABILITIES,
        "rlimits": rlimits(limits),
        "profile": PROFILE_NAME,
    }


def exec_plan(plan: ExecPlan, *, edge_id: str, sandbox_id: str, limits: Limits, given: Sequence[bool]) -> Plan:
    """What `spawner.do_exec` takes. `given[i]`: whether descriptor i of the command comes along."""
    return {
        "group": group_name(edge_id, sandbox_id),
        "child": plan.process_id,
        "argv": [raw(word) for word in plan.argv],
        "env": environment(plan.env),
        "cwd": raw(plan.cwd),
        "user": raw(plan.user),
        "pty": (plan.pty.rows, plan.pty.cols) if plan.pty else None,
        "given": list(given),
        "capabilities": profile.CAPABILITIES,
        "rlimits": rlimits(limits),
        "profile": PROFILE_NAME,
    }


def environment(env: Mapping[str, str]) -> dict[bytes, bytes]:
    return {raw(name): raw(value) for name, value in env.items()}


def raw(text: str) -> bytes:
    """Bytes for the kernel; surrogate escapes stand for bytes that are not UTF-8."""
    return text.encode("utf-8", "surrogateescape")
