# SPDX-License-Identifier: Apache-2.0
"""Rungs for tests of function calls: a node of members, members, calls.

def test_something(member: Calls) -> None:                # one member for the whole module, its calls run as `nobody`
    assert member.python("print(6 * 7)").stdout == b"42\\n"
    assert member.exec("sh", "-c", "exit 3").code == 3

def test_another(fn_node: FnNode) -> None:
    with fn_node.member(user="root", preload=("json",)) as calls: ...
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import pytest

from opendsec.api.spec import Container
from opendsec.images.layers import LayerRef
from opendsec.kernel import procfs
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.fncall.backend import FnMembers
from opendsec.runtime.fncall.interface import Ended, File, Job, JobLimits, MemberPlan
from opendsec.runtime.fncall.member import FnMember
from opendsec.runtime.scratch.tmpfs import TmpfsScratch
from tests.boxes import RANGE, STAGING, TIMEOUT_S, UID_BASE
from tests.leaks import LeakDetector

T = TypeVar("T")
MIB = 1 << 20
LIMITS = JobLimits(cpu_time_s=10, wall_time_s=20, memory_bytes=128 * MIB, output_bytes=MIB, pids=32, disk_bytes=16 * MIB)

_numbers = itertools.count()


@dataclass
class Calls:
    """A member, and calls on it."""

    node: FnNode
    member: FnMember
    plan: MemberPlan

    def run(self, job: Job) -> Ended:
        return self.node.wait(self.member.call(job))

    def job(
        self,
        kind: Literal["source", "function", "exec"],
        *,
        source: str = "",
        function: str = "",
        args: object = (),
        kwargs: Mapping[str, object] | None = None,
        argv: Sequence[str] = (),
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        outputs: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **limits: float,
    ) -> Job:
        return Job(
            kind=kind,
            limits=msgspec.structs.replace(LIMITS, **limits),
            source=source,
            function=function,
            args=json.dumps(args).encode(),
            kwargs=json.dumps(dict(kwargs or {})).encode(),
            argv=tuple(argv),
            stdin=stdin,
            files=tuple(File(name, data) for name, data in (files or {}).items()),
            outputs=tuple(outputs),
            env=dict(env or {}),
        )

    def python(self, source: str, **more: object) -> Ended:
        return self.run(self.job("source", source=source, **more))  # type: ignore[arg-type]

    def function(self, function: str, *args: object, **more: object) -> Ended:
        return self.run(self.job("function", function=function, args=args, **more))  # type: ignore[arg-type]

    def exec(self, *argv: str, **more: object) -> Ended:
        return self.run(self.job("exec", argv=argv, **more))  # type: ignore[arg-type]

    def says(self, source: str, **more: object) -> str:
        """What a program that must succeed prints."""
        ended = self.python(source, **more)
        assert (ended.code, ended.stderr) == (0, b""), ended
        return ended.stdout.decode()

    def check(self) -> None:
        """That honest calls are served as ever."""
        first = self.python("import os\nprint(os.getpid(), len(os.listdir('/tmp')), 'x' in globals())\n")
        second = self.exec("echo", "fine")
        assert (first.code, first.stdout, first.spoiled) == (0, b"2 0 False\n", ""), first
        assert (second.code, second.stdout, second.spoiled) == (0, b"fine\n", ""), second

    def kernel_processes(self) -> int:
        return len(self.member.group.procs())


def pythons(calls: Calls) -> list[int]:
    """The interpreter, and a fork of it during a call; oldest first."""
    found = []
    for pid in calls.member.group.procs():
        try:
            stat = procfs.stat(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # one that only joins the namespaces, and is gone
        if stat.comm == b"python3":
            found.append((stat.start_time, pid))
    return [pid for _, pid in sorted(found)]


class FnNode:
    """Members of one's own, with the loop they live in."""

    def __init__(self, folder: Path, layers: Sequence[LayerRef]) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(1))
        self.layers = tuple(layers)
        self.edge_id = f"edge_test{os.getpid()}f{next(_numbers)}"
        self.containers = ContainerBackend(
            edge_id=self.edge_id, scratch=TmpfsScratch(), staging=STAGING, lock=folder / f"{self.edge_id}.lock"
        )
        self.backend = FnMembers(self.containers)
        self._slots = itertools.cycle(range(128, 256))
        self.wait(self.containers.start())
        self.wait(self.backend.start())

    def wait(self, awaitable: Awaitable[T], timeout_s: float = TIMEOUT_S) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(awaitable, timeout_s))

    def plan(
        self,
        *,
        user: str = "nobody",
        workdir: str = "/tmp",
        python: str = "python3",
        preload: Sequence[str] = (),
        warmup: str = "",
        env: Mapping[str, str] | None = None,
        memory: str = "512MiB",
        cpu: float = 2.0,
    ) -> MemberPlan:
        return MemberPlan(
            member_id=f"sb_{next(_numbers):06}",
            uid_base=UID_BASE + next(self._slots) * RANGE,
            limits=Container(image="test", memory=memory, pids=256, open_files=256, cpu=cpu).check(),
            layers=self.layers,
            env=dict(env or {}),
            user=user,
            workdir=workdir,
            python=python,
            preload=tuple(preload),
            warmup=warmup,
        )

    @contextmanager
    def member(self, **more: object) -> Iterator[Calls]:
        plan = self.plan(**more)  # type: ignore[arg-type]
        member = self.wait(self.backend.create(plan))
        try:
            yield Calls(self, member, plan)
        finally:
            self.wait(member.destroy())

    def close(self) -> None:
        leftovers = self.backend.leftovers()
        self.wait(self.backend.close())
        self.wait(self.containers.close())
        self.wait(self.loop.shutdown_default_executor())
        self.loop.close()
        assert leftovers == []


@pytest.fixture(scope="module")
def fn_node(tmp_path_factory: pytest.TempPathFactory, base_layers: tuple[LayerRef, ...], leak_detector: LeakDetector) -> Iterator[FnNode]:
    node = FnNode(tmp_path_factory.mktemp("fn"), base_layers)
    leak_detector.allow("processes", "^calld ")  # a member that tests share has a new envelope after each call
    leak_detector.allow("cgroups", f"/opendsec-{node.edge_id}-fn$")  # made with the first member
    yield node
    node.close()


@pytest.fixture(scope="module")
def member(fn_node: FnNode) -> Iterator[Calls]:
    """Calls as `nobody`, in /tmp."""
    with fn_node.member() as calls:
        calls.check()
        yield calls


@pytest.fixture(scope="module")
def root_member(fn_node: FnNode) -> Iterator[Calls]:
    """Calls as root, in /root."""
    with fn_node.member(user="root", workdir="/root") as calls:
        calls.check()
        yield calls
