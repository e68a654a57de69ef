# SPDX-License-Identifier: Apache-2.0
"""All members of an edge: made by the spawner that makes containers, of the same mounted layers."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from opendsec.api.errors import Internal, InvalidRequest, SandboxLost, Unavailable, Unsupported
from opendsec.api.sandboxes import Capability
from opendsec.kernel import cgroups
from opendsec.kernel.fds import sealed_memfd
from opendsec.runtime.container import profile as container_profile
from opendsec.runtime.container.backend import ContainerBackend
from opendsec.runtime.container.plan import edge_group, group_limits, raw, rlimits
from opendsec.runtime.fncall import profile, wire
from opendsec.runtime.fncall.interface import MemberPlan
from opendsec.runtime.fncall.member import FnMember
from opendsec.runtime.spawn import SpawnError, close_all

NATIVE = Path(__file__).resolve().parents[2] / "_native"
FORKIN = NATIVE / "dsec-forkin.so"
ZYGOTE = Path(__file__).resolve().parent / "zygote.py"
START = "import os;exec(compile(os.read(4,1<<20),'<opendsec>','exec'))"
WARM_UP_S = 120.0
DISK_BYTES = 64 << 20  # of the interpreter, for its warm-up, and of the envelope that is made before the first call is known
CALLERS_STEPS = frozenset(("find the user",))


def not_built() -> tuple[str, ...]:
    """What of this package's own programs is not there."""
    return tuple(f"{path.name} was not built" for path in (FORKIN, NATIVE / "dsec-calld", ZYGOTE) if not path.exists())


def capabilities(missing: Sequence[str]) -> tuple[Capability, ...]:
    """What members can do on a machine that lacks `missing` of what containers need."""
    reason = "; ".join((*missing, *not_built()))
    return tuple(Capability(name=name, available=not reason, reason=reason) for name in ("call", "warm_python", "judge"))


class FnMembers:
    """See interface.FnBackend. Shares the spawner, the staging directory and the mounted layers of `containers`, which is started before it
    and closed after it."""

    def __init__(self, containers: ContainerBackend) -> None:
        self._containers = containers
        self._missing: tuple[str, ...] = ()
        self._users: Counter[str] = Counter()  # digest → living members
        self._members: set[FnMember] = set()
        self._call_filter, self._warm_filter = profile.call_filter(), profile.warm_filter()
        self._programs: list[bytes] = []

    @property
    def edge_id(self) -> str:
        return self._containers.edge_id

    def group_of(self, member_id: str) -> cgroups.Group:
        return self._containers.hierarchies.group(f"{edge_group(self.edge_id)}-fn/{member_id}")

    def _top(self) -> cgroups.Group:
        return self._containers.hierarchies.group(f"{edge_group(self.edge_id)}-fn")

    # --- shared parts ----------------------------------------------------------------------------------------------

    def capabilities(self) -> tuple[Capability, ...]:
        return capabilities(self._containers.missing)

    async def start(self) -> None:
        self._missing = not_built()
        if not self._missing:
            self._programs = [ZYGOTE.read_bytes(), FORKIN.read_bytes()]

    async def close(self) -> None:
        await asyncio.gather(*(member.destroy() for member in list(self._members)), return_exceptions=True)
        self._top().remove_if_empty()

    def layers_in_use(self) -> frozenset[str]:
        return frozenset(self._users)

    # --- create ----------------------------------------------------------------------------------------------------

    async def create(self, plan: MemberPlan) -> FnMember:
        missing = (*self._containers.missing, *self._missing)
        if missing or not self._programs:
            raise Unsupported(f"this machine cannot run function calls: {'; '.join(missing) or 'not started'}", field="spec.backend")
        digests = tuple(layer.digest for layer in plan.layers)
        self._users.update(digests)
        member: FnMember | None = None
        try:
            spawner = await self._containers.hold_layers(plan.layers)
            try:
                member = await self._spawn(plan)
                problem = await self._set_up(member, plan)
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    await asyncio.shield(spawner.settle())  # else the spawner could make it after we have cleared up
                raise
            if problem:
                raise InvalidRequest(f"the pool's interpreter does not start: {problem}", field="python")
        except BaseException as error:
            if member is None:
                self._drop(digests)
                await asyncio.shield(self.clear(plan.member_id))
            else:
                self._members.add(member)
                await asyncio.shield(member.destroy())
            if isinstance(error, SpawnError):
                if error.step in CALLERS_STEPS:
                    raise InvalidRequest(error.text, field="user") from error
                raise Internal(f"cannot create the member: {error}", data={"step": error.step, "errno": error.errno}) from error
            if isinstance(error, SandboxLost):
                raise Unavailable(f"the member ended while it was made: {error}") from error
            raise
        self._members.add(member)
        return member

    async def _spawn(self, plan: MemberPlan) -> FnMember:
        spawner = await self._containers.spawner()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            with theirs:
                answer = await spawner.call("member", self._wire_plan(plan), [theirs.fileno()])
            return FnMember(self, plan, ours, answer.fds[0], answer.pid)
        except BaseException:
            ours.close()
            raise

    def _wire_plan(self, plan: MemberPlan) -> dict[str, object]:
        """What `spawner.do_member` takes."""
        return {
            "group": self.group_of(plan.member_id).name,
            "limits": group_limits(plan.limits),
            "uid_base": plan.uid_base,
            "layers": [layer.digest.encode() for layer in plan.layers],
            "staging": raw(str(self._containers.staging)),
            "hostname": b"call",
            "shm_size": 0,
            "masked": [],
            "read_only": [],
            "rlimits": rlimits(plan.limits),
            "user": raw(plan.user or "root"),
        }

    async def _set_up(self, member: FnMember, plan: MemberPlan) -> str:
        cores = min(os.cpu_count() or 1, max(1, math.ceil(plan.limits.cpu)))
        body = wire.setup_body(
            argv=(plan.python, "-c", START) if plan.python else (),
            env=plan.env,
            workdir=plan.workdir or "/",
            masked=container_profile.MASKED,
            read_only=container_profile.READ_ONLY,
            call_filter=self._call_filter,
            warm_filter=self._warm_filter,
            cores=cores,
            cpu_is_v1=self._containers.hierarchies.v2 is None,
            disk_bytes=DISK_BYTES,
            patience_s=WARM_UP_S,
        )
        fds: list[int] = []
        try:
            if plan.python:
                for name, data in (
                    ("zygote", self._programs[0]),
                    ("forkin", self._programs[1]),
                    ("warm", wire.warm_config(plan.preload, plan.warmup, plan.workdir or "/", plan.env)),
                ):
                    fds.append(sealed_memfd(name, data, executable=name == "forkin"))
            return await member.setup(body, tuple(fds))
        finally:
            close_all(fds)

    # --- end -------------------------------------------------------------------------------------------------------

    def _drop(self, digests: Sequence[str]) -> None:
        self._containers.release_layers(digests)
        for digest in digests:
            self._users[digest] -= 1
            if self._users[digest] <= 0:
                del self._users[digest]

    def release(self, member: FnMember) -> None:
        """Called by a member that is gone."""
        if member in self._members:
            self._members.discard(member)
            self._drop(tuple(layer.digest for layer in member.plan.layers))

    async def clear(self, member_id: str) -> None:
        try:
            await asyncio.to_thread(self.group_of(member_id).remove)
        except TimeoutError as error:
            raise Unavailable(f"processes of {member_id} do not die: {error}") from error

    def leftovers(self) -> Sequence[str]:
        top = self._top()
        return sorted(group.name.rpartition("/")[2] for group in top.children()) if top.exists() else []
