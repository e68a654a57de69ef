# SPDX-License-Identifier: Apache-2.0
"""The channel to a guest that has no agent: whatever would need one is Unsupported by name, and what only comes to terms with an agent
(standing still, going on) has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from opendsec.api.errors import SandboxLost, Unsupported
from opendsec.api.spec import Limits
from opendsec.runtime.backend import ExecPlan, Running
from opendsec.runtime.guest import wire
from opendsec.runtime.guest.channel import Channel, Owner, Parts

WHY = "this machine's system has no agent of ours: it has its screen, its keyboard and its disk"
_JUNK = 1 << 16


class SilentChannel(Channel):
    """See the module."""

    why = WHY

    def _refuse(self) -> NoReturn:
        if self.lost:
            raise SandboxLost("the sandbox has ended")
        raise Unsupported(self.why, field="sandbox_id")

    def _on_ready(self) -> None:
        """Whatever the guest writes to the port is nothing to us."""
        sock = self._sock
        if sock is None:
            return
        try:
            if not sock.recv(_JUNK):
                self._unattach()
        except BlockingIOError:
            pass
        except OSError:
            self._unattach()

    # --- what needs an agent -----------------------------------------------------------------------------------------

    async def exec(self, plan: ExecPlan, fds: Sequence[int | None], limits: Limits) -> Running:
        self._refuse()

    def begin(
        self,
        kind: int,
        payload: bytes,
        done: Callable[[Parts | Exception], None] | None,
        *,
        number: int = 0,
        limit: int = 0,
        owner: Owner | None = None,
    ) -> int:
        self._refuse()

    # --- what does not -----------------------------------------------------------------------------------------------

    async def park(self) -> None:
        pass

    def unpark(self) -> None:
        pass

    async def detach(self) -> None:
        self._unattach()

    async def commands(self) -> list[wire.CommandRow]:
        return []

    async def cut(self, names: Sequence[str]) -> int:
        return 0

    async def identity(
        self, *, seed: bytes | None = None, hostname: str = "", machine_id: str = "", boot_id: str = "", wall_clock_ns: int | None = None
    ) -> wire.Renewed:
        return wire.Renewed(0, b"")

    async def clock(self, wall_clock_ns: int | None = None, seed: bytes | None = None) -> None:
        pass

    async def limits(self, *, processes: int) -> None:
        pass

    async def usage(self) -> wire.GuestUsage:
        return wire.GuestUsage(0, 0, 0, 0, 0, 0, 0, 0, self.counters)

    def usage_nowait(self) -> wire.GuestUsage | None:
        return None

    async def freeze_disk(self) -> None:
        pass

    async def thaw_disk(self) -> None:
        pass
