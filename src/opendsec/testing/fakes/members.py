# SPDX-License-Identifier: Apache-2.0
"""A fake of the members of pools: each call is a plain process of this machine in a directory of its own. Nothing is isolated.

For tests that run their own programs only. What it promises is what its contract suite checks: the whole tree of a call is gone when it has
ended (found by a variable in the environment), limits of time, memory and output are kept (memory by looking at it now and then).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from opendsec.api.errors import InvalidRequest, SandboxLost
from opendsec.api.sandboxes import Capability
from opendsec.kernel import procfs
from opendsec.runtime.fncall.interface import Ended, Job, JobLimits, Member, MemberPlan

MARK = "OPENDSEC_FAKE_CALL"
LOOK_S = 0.01

BOOT = """
import importlib, json, os, sys
spec = json.load(open(sys.argv[1]))
sys.argv = [spec["filename"]]
sys.path.insert(0, os.getcwd())
for name in spec["preload"]:
    importlib.import_module(name)
exec(spec["warmup"], {})
if spec["kind"] == "source":
    exec(compile(spec["source"], spec["filename"], "exec"), sys.modules["__main__"].__dict__)
elif spec["kind"] == "function":
    module, _, name = spec["function"].partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    value = json.dumps(found(*spec["args"], **spec["kwargs"]))
    open(spec["value"], "w").write(value)
"""


class FakeMembers:
    """A FnBackend. `before_create` may raise, or wait, for a test's purposes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.members: dict[str, FakeMember] = {}
        self.before_create: Callable[[MemberPlan], Awaitable[None]] | None = None
        self.created = 0

    def capabilities(self) -> tuple[Capability, ...]:
        return (
            Capability(name="calls", available=True),
            Capability(name="isolation", available=False, reason="this is a fake: calls are plain processes of this machine"),
        )

    async def start(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    async def create(self, plan: MemberPlan) -> Member:
        if self.before_create is not None:
            await self.before_create(plan)
        member = FakeMember(self, plan)
        member.directory.mkdir()
        self.members[plan.member_id] = member
        self.created += 1
        if plan.python and (plan.preload or plan.warmup):
            ended = await member.warm_up()
            if ended.code:
                await member.destroy()
                raise InvalidRequest(
                    f"its interpreter could not be warmed: {ended.stderr.decode(errors='replace')[-500:]}", field="preload"
                )
        return member

    async def clear(self, member_id: str) -> None:
        if (member := self.members.get(member_id)) is not None:
            await member.destroy()
        kill_marked(f"{member_id}/")
        shutil.rmtree(self.root / member_id, ignore_errors=True)

    def leftovers(self) -> Sequence[str]:
        return sorted(os.listdir(self.root)) if self.root.exists() else []

    def layers_in_use(self) -> frozenset[str]:
        return frozenset(layer.digest for member in self.members.values() for layer in member.plan.layers)

    async def close(self) -> None:
        for member in list(self.members.values()):
            await member.destroy()


class FakeMember:
    """One member: a directory."""

    def __init__(self, backend: FakeMembers, plan: MemberPlan) -> None:
        self._backend, self.plan = backend, plan
        self.directory = backend.root / plan.member_id
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.calls = 0
        self._busy = False

    @property
    def member_id(self) -> str:
        return self.plan.member_id

    def memory_bytes(self) -> int:
        return sum(_rss(pid) for pid in marked(f"{self.member_id}/"))

    def processes(self) -> int:
        return len(marked(f"{self.member_id}/"))

    def die(self, reason: str = "its first process ended") -> None:
        """As if its process 1 had been killed."""
        if not self.died.done():
            self.died.set_result(reason)
        kill_marked(f"{self.member_id}/")

    async def destroy(self) -> None:
        self.die("destroyed")
        self._backend.members.pop(self.member_id, None)
        shutil.rmtree(self.directory, ignore_errors=True)

    async def warm_up(self) -> Ended:
        limits = JobLimits(cpu_time_s=30.0, wall_time_s=30.0, memory_bytes=1 << 30, output_bytes=1 << 20, pids=64, disk_bytes=1 << 26)
        return await self._run(Job(kind="source", limits=limits))

    async def call(self, job: Job) -> Ended:
        if self.died.done():
            raise SandboxLost(f"member {self.member_id} is dead: {self.died.result()}")
        assert not self._busy, "a second call before the first has ended"
        self._busy = True
        self.calls += 1
        try:
            ended = await self._run(job)
        finally:
            self._busy = False
        if self.died.done():
            raise SandboxLost(f"member {self.member_id} died: {self.died.result()}")
        return ended

    async def _run(self, job: Job) -> Ended:
        mark = f"{self.member_id}/{self.calls}/"
        folder = self.directory / f"call-{self.calls}"
        work, control = folder / "work", folder / "control"
        work.mkdir(parents=True)
        control.mkdir()
        try:
            return await self._run_in(job, mark, work, control)
        finally:
            kill_marked(mark)
            shutil.rmtree(folder, ignore_errors=True)

    async def _run_in(self, job: Job, mark: str, work: Path, control: Path) -> Ended:
        for file in job.files:
            path = work / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            path.chmod(0o755 if file.executable else 0o644)
        (control / "stdin").write_bytes(job.stdin)
        env = {"PATH": os.defpath, **self.plan.env, **job.env, MARK: mark}
        argv: Sequence[str] = job.argv
        if job.kind != "exec":
            (control / "spec").write_text(json.dumps(_spec(self.plan, job, control)))
            argv = (sys.executable, "-c", BOOT, str(control / "spec"))
        elif "/" not in argv[0] and shutil.which(argv[0], path=env["PATH"]) is None:
            return Ended(not_started=f"no such program: {argv[0]}", caller_fault=True)
        began = time.monotonic()
        try:
            with open(control / "stdin", "rb") as stdin:
                child = subprocess.Popen(
                    argv,
                    cwd=work,
                    env=env,
                    stdin=stdin,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=lambda: _limit(job),
                )
        except (OSError, subprocess.SubprocessError) as error:
            return Ended(not_started=f"cannot run {argv[0]}: {error}", caller_fault=True)
        ended = await _Watched(child, job, mark).ended()
        value = control / "value"
        files = {} if ended.code != 0 and not job.outputs else _collect(work, job)
        return Ended(
            code=ended.code,
            signal=ended.signal,
            stdout=ended.stdout,
            stdout_total=ended.stdout_total,
            stderr=ended.stderr,
            stderr_total=ended.stderr_total,
            value=value.read_bytes() if value.exists() and ended.code == 0 else None,
            files=files,
            cpu_ms=ended.cpu_ms,
            wall_ms=(time.monotonic() - began) * 1000,
            peak_memory_bytes=ended.peak_memory_bytes,
            timed_out=ended.timed_out,
            oom_killed=ended.oom_killed,
            output_exceeded=ended.output_exceeded,
        )


class _Watched:
    """A child and why it was ended, if it was."""

    def __init__(self, child: subprocess.Popen[bytes], job: Job, mark: str) -> None:
        self._child, self._job, self._mark = child, job, mark
        self._loop = asyncio.get_running_loop()
        self._kept: dict[int, bytearray] = {}
        self._total: dict[int, int] = {}
        self._timed_out = self._oom = self._flood = False
        self._peak = 0

    async def ended(self) -> Ended:
        child, job = self._child, self._job
        assert child.stdout is not None and child.stderr is not None
        pipes = [child.stdout.fileno(), child.stderr.fileno()]
        exited = asyncio.Event()
        pidfd = os.pidfd_open(child.pid)
        self._loop.add_reader(pidfd, exited.set)
        for fd in pipes:
            os.set_blocking(fd, False)
            self._kept[fd], self._total[fd] = bytearray(), 0
            self._loop.add_reader(fd, self._read, fd)
        deadline = self._loop.time() + job.limits.wall_time_s
        try:
            while not exited.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(LOOK_S, max(0.0, deadline - self._loop.time()))):
                        await exited.wait()
                self._look(deadline)
        finally:
            kill_marked(self._mark)
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = 0
            for fd in pipes:
                self._read(fd)
                self._loop.remove_reader(fd)
            child.stdout.close()
            child.stderr.close()
        code = os.waitstatus_to_exitcode(status)
        cpu_ms = (used.ru_utime + used.ru_stime) * 1000
        by_cpu = code == -signal.SIGXCPU
        out, err = pipes
        return Ended(
            code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=bytes(self._kept[out]),
            stdout_total=self._total[out],
            stderr=bytes(self._kept[err]),
            stderr_total=self._total[err],
            cpu_ms=cpu_ms,
            peak_memory_bytes=max(self._peak, used.ru_maxrss * 1024),
            timed_out="wall" if self._timed_out else "cpu" if by_cpu else "",
            oom_killed=self._oom,
            output_exceeded=self._flood,
        )

    def _read(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(fd, 65536):
                self._total[fd] += len(data)
                room = self._job.limits.output_bytes - len(self._kept[fd])
                self._kept[fd] += data[: max(0, room)]
                if len(data) > room and not self._flood:
                    self._flood = True
                    kill_marked(self._mark)
            self._loop.remove_reader(fd)

    def _look(self, deadline: float) -> None:
        if self._loop.time() >= deadline and not self._timed_out:
            self._timed_out = True
            kill_marked(self._mark)
        memory = sum(map(_rss, marked(self._mark)))
        self._peak = max(self._peak, memory)
        if memory > self._job.limits.memory_bytes and not self._oom:
            self._oom = True
            kill_marked(self._mark)


def _spec(plan: MemberPlan, job: Job, control: Path) -> dict[str, object]:
    return {
        "preload": plan.preload,
        "warmup": plan.warmup,
        "kind": job.kind,
        "filename": job.filename,
        "source": job.source,
        "function": job.function,
        "args": json.loads(job.args),
        "kwargs": json.loads(job.kwargs),
        "value": str(control / "value"),
    }


def _limit(job: Job) -> None:
    seconds = max(1, int(job.limits.cpu_time_s))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (job.limits.disk_bytes, job.limits.disk_bytes))


def _collect(work: Path, job: Job) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for pattern in job.outputs:
        for path in sorted(work.glob(pattern)):
            if path.is_file() and not path.is_symlink():
                found[str(path.relative_to(work))] = path.read_bytes()
    return found


def _rss(pid: int) -> int:
    try:
        return int(procfs.status(pid).get("VmRSS", "0 kB").split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def marked(prefix: str) -> list[int]:
    """Living processes whose environment says that they belong to a member or a call."""
    mark = f"{MARK}={prefix}".encode()
    found = []
    for pid in procfs.pids():
        try:
            if any(item.startswith(mark) for item in procfs.environ(pid)) and procfs.stat(pid).state not in "ZX":
                found.append(pid)
        except (OSError, ValueError):
            continue
    return found


def kill_marked(prefix: str) -> None:
    while pids := marked(prefix):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
