# SPDX-License-Identifier: Apache-2.0
"""Never more promised than policy allows, and every refusal says how much is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import QuotaExceeded
from opendsec.api.spec import MIB, Limits
from opendsec.edge.admission import Policy, Promised, admit, check_one, promise_for


def limits(memory: int = 64 * MIB, disk: int = 128 * MIB, *, cpu: float = 1.0, pids: int = 64) -> Limits:
    return Limits(cpu=cpu, cpu_weight=100, memory_bytes=memory, disk_bytes=disk, inodes=1000, pids=pids, open_files=100)


POLICY = Policy(memory_bytes=1000 * MIB, disk_bytes=2000 * MIB, sandboxes=10)


def test_what_fits_is_counted() -> None:
    promised = admit(Promised(), limits(), POLICY)
    assert promised == Promised(64 * MIB, 128 * MIB, 1)
    assert promised.minus(promise_for(limits(), POLICY)) == Promised()


@pytest.mark.parametrize(
    ("before", "asked", "resource", "message"),
    [
        (Promised(950 * MIB, 0, 1), limits(), "memory", "64MiB asked for, but of the 1000MiB that this edge may promise 50MiB are left"),
        (Promised(0, 1900 * MIB, 1), limits(), "disk", "128MiB asked for, but of the 2.0GiB that this edge may promise 100MiB are left"),
        (Promised(0, 0, 10), limits(), "sandboxes", "this edge may hold 10 sandboxes and holds 10"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(before: Promised, asked: Limits, resource: str, message: str) -> None:
    with pytest.raises(QuotaExceeded) as refusal:
        admit(before, asked, POLICY)
    assert refusal.value.message == message
    assert refusal.value.data["resource"] == resource
    assert set(refusal.value.data) == {"resource", "asked", "promised", "limit"}


def test_a_tmpfs_scratch_is_memory() -> None:
    policy = Policy(memory_bytes=200 * MIB, disk_bytes=0, sandboxes=10, scratch_is_memory=True)
    promised = admit(Promised(), limits(), policy)
    assert promised == Promised(192 * MIB, 0, 1)
    with pytest.raises(QuotaExceeded, match="192MiB asked for"):
        admit(promised, limits(), policy)
    with pytest.raises(QuotaExceeded, match="memory on this edge"):
        check_one(limits(memory=100 * MIB, disk=101 * MIB), policy)


@pytest.mark.parametrize(
    ("policy", "asked", "resource"),
    [
        (Policy(memory_bytes=10 * MIB, disk_bytes=1 << 40, sandboxes=1), limits(), "memory"),
        (Policy(memory_bytes=1 << 40, disk_bytes=10 * MIB, sandboxes=1), limits(), "disk"),
        (Policy(memory_bytes=1 << 40, disk_bytes=1 << 40, sandboxes=1, max_memory_bytes=10 * MIB), limits(), "memory"),
        (Policy(memory_bytes=1 << 40, disk_bytes=1 << 40, sandboxes=1, max_disk_bytes=10 * MIB), limits(), "disk"),
        (Policy(memory_bytes=1 << 40, disk_bytes=1 << 40, sandboxes=1, max_cpu=0.5), limits(), "cpu"),
        (Policy(memory_bytes=1 << 40, disk_bytes=1 << 40, sandboxes=1, max_pids=10), limits(), "pids"),
    ],
)
def test_one_sandbox_has_a_maximum(policy: Policy, asked: Limits, resource: str) -> None:
    with pytest.raises(QuotaExceeded) as refusal:
        check_one(asked, policy)
    assert refusal.value.data["resource"] == refusal.value.field == resource


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 900)), max_size=40), st.booleans())
def test_promises_never_pass_the_limit(sizes: list[tuple[int, int]], in_memory: bool) -> None:
    policy = Policy(memory_bytes=1000 * MIB, disk_bytes=2000 * MIB, sandboxes=10, scratch_is_memory=in_memory)
    promised, admitted = Promised(), []
    for memory, disk in sizes:
        wanted = limits(memory * MIB, disk * MIB)
        try:
            promised = admit(promised, wanted, policy)
        except QuotaExceeded:
            continue
        admitted.append(wanted)
        assert promised.memory_bytes <= policy.memory_bytes
        assert promised.disk_bytes <= policy.disk_bytes
        assert promised.sandboxes == len(admitted) <= policy.sandboxes
    for wanted in admitted:
        promised = promised.minus(promise_for(wanted, policy))
    assert promised == Promised()
