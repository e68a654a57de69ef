# SPDX-License-Identifier: Apache-2.0
"""What runs function calls: the interface between the edge's pools and the members that serve them.

    MemberPlan   what the edge has decided for a new member
    Member       a living one: a sandbox with, perhaps, a warm interpreter in it, serving one call at a time
    Job          one call, every default resolved
    Ended        how it ended: bare facts; the edge names the outcome

A member's process 1 is ours and trusted; whatever else runs in it is not, and is gone when a call has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from opendsec.api.sandboxes import Capability
from opendsec.api.spec import Limits
from opendsec.images.layers import LayerRef


class MemberPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One member to create. `member_id` has the form of a sandbox id. `uid_base`: the first of the 65,536 host ids that are its own."""

    member_id: str
    uid_base: int
    limits: Limits
    layers: tuple[LayerRef, ...]
    env: Mapping[str, str]
    user: str  # of calls and of the warm interpreter
    workdir: str
    python: str = ""  # "" = no warm interpreter
    preload: tuple[str, ...] = ()
    warmup: str = ""


class File(msgspec.Struct, frozen=True):
    """A file for a call. `data` is its content; an executable one gets mode 0755."""

    path: str  # relative to the working directory
    data: bytes
    executable: bool = False


class JobLimits(msgspec.Struct, frozen=True, kw_only=True):
    cpu_time_s: float
    wall_time_s: float
    memory_bytes: int
    output_bytes: int  # of each stream
    pids: int
    disk_bytes: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One call.

    source    Python text, run as `__main__` by a fork of the warm interpreter
    function  `module:name` with JSON `args` and `kwargs`, likewise
    exec      `argv`, executed
    """

    kind: Literal["source", "function", "exec"]
    limits: JobLimits
    source: str = ""
    filename: str = "main.py"
    function: str = ""
    args: bytes = b"[]"
    kwargs: bytes = b"{}"
    argv: tuple[str, ...] = ()
    stdin: bytes = b""
    files: tuple[File, ...] = ()
    outputs: tuple[str, ...] = ()
    output_files_bytes: int = 64 << 20  # of all files brought back
    env: Mapping[str, str] = {}


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended. Code and signal are of its first process; both None if it never ran, then `not_started` says why."""

    code: int | None = None
    signal: int | None = None
    not_started: str = ""
    caller_fault: bool = False  # of `not_started`: no such program, no such function, …
    stdout: bytes = b""
    stdout_total: int = 0
    stderr: bytes = b""
    stderr_total: int = 0
    value: bytes | None = None  # JSON
    files: Mapping[str, bytes] = {}
    files_problem: str = ""  # an output that could not be brought back, and why
    cpu_ms: float = 0.0  # of the whole tree
    wall_ms: float = 0.0
    peak_memory_bytes: int = 0
    timed_out: Literal["", "cpu", "wall"] = ""
    oom_killed: bool = False
    output_exceeded: bool = False
    pids_denied: bool = False
    disk_full: bool = False
    denied: str = ""  # what a filter ended it for
    spoiled: str = ""  # why the member must not serve another call


class Member(Protocol):
    """A living member. One call at a time: a second `call` before the first has ended is a bug of the caller's."""

    @property
    def member_id(self) -> str: ...
    @property
    def died(self) -> asyncio.Future[str]:
        """Done with a reason once its process 1 is gone."""

    async def call(self, job: Job) -> Ended:
        """Run one call to its end. When this returns nothing of it is left. Cancelled, it kills the call, waits until nothing of it is
        left, and then goes on with the cancellation. Raises SandboxLost if the member died, Internal if it broke its protocol; it must then
        be destroyed."""

    def memory_bytes(self) -> int:
        """What it uses now, all its processes."""

    def processes(self) -> int:
        """Processes in it, besides ours."""

    async def destroy(self) -> None:
        """Kill everything and release everything; may be repeated."""


class FnBackend(Protocol):
    """All members of one edge."""

    def capabilities(self) -> tuple[Capability, ...]: ...
    async def start(self) -> None: ...
    async def create(self, plan: MemberPlan) -> Member:
        """A member whose interpreter is warm. Raises InvalidRequest if the interpreter, `preload` or `warmup` fails (the message carries
        the traceback's end), Unsupported, Unavailable, Internal."""

    async def clear(self, member_id: str) -> None:
        """Remove whatever a half-made or dead member left behind; may be repeated."""

    def leftovers(self) -> Sequence[str]:
        """Ids of members of this edge that have cgroups or processes here."""

    def layers_in_use(self) -> frozenset[str]: ...
    async def close(self) -> None:
        """Destroy all members and release what they share: members do not outlive the edge."""
