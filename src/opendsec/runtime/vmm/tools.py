# SPDX-License-Identifier: Apache-2.0
"""Programs that read what others made (disk images, above all), run as QEMU is run: confined, with the files they are given and no others.

root = programs.prepare_tools(parent, ["qemu-img"]).root
ended = await tools.run(spawner, place, ["/usr/bin/qemu-img", "info", "--output=json", "/source"], [Inside(path, "source")])
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from opendsec.api.errors import Internal, Unavailable
from opendsec.kernel import syscalls
from opendsec.runtime.backend import Exit
from opendsec.runtime.spawn import Answer, Spawner, SpawnError, close_all
from opendsec.runtime.vmm import profile
from opendsec.runtime.vmm.arguments import Inside
from opendsec.runtime.vmm.place import Place, plan_of, remove

MAX_OUTPUT_BYTES = 4 << 20


@dataclass(frozen=True)
class Ended:
    """How a tool ended and what it wrote."""

    exit: Exit
    out: bytes
    err: bytes

    def check(self, what: str) -> bytes:
        """Its output. Raises Internal with what it complained of unless it ended well."""
        if self.exit.code == 0:
            return self.out
        last = self.err.decode("utf-8", "replace").strip().splitlines()[-3:]
        why = f"ended with {self.exit.code}" if self.exit.code is not None else f"was killed by signal {self.exit.signal}"
        raise Internal(f"{what} {why}: {' / '.join(last)[-500:]}")


async def start(
    spawner: Spawner,
    place: Place,
    argv: Sequence[str],
    files: Sequence[Inside] = (),
    given: Sequence[tuple[int, int]] = (),
    *,
    rlimits: Sequence[tuple[int, int, int]] = (),
) -> Answer:
    """Start one that stays (a TPM emulator); `given`: (its number, ours), which the caller keeps; `rlimits`: besides those that all have.
    The pidfd in the answer is the caller's, and so is `remove(place)` after its end. On failure nothing is left."""
    await profile.install(spawner)
    try:
        plan = plan_of(place, argv, files, (), [number for number, _ in given])
        return await spawner.call("machine", plan | {"rlimits": [*profile.rlimits(), *rlimits]}, [fd for _, fd in given])
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            await asyncio.shield(spawner.settle())
        await asyncio.shield(remove(place))
        if isinstance(error, SpawnError):
            raise Internal(f"cannot start {argv[0]}: {error}") from error
        raise


async def run(spawner: Spawner, place: Place, argv: Sequence[str], files: Sequence[Inside] = (), *, timeout_s: float = 600.0) -> Ended:
    """Run one to its end, in a place that is its own and is removed. Raises Unavailable after `timeout_s`."""
    reading: list[int] = []
    writing: list[int] = []
    pidfd = -1
    try:
        for _ in range(2):
            near, far = os.pipe2(os.O_CLOEXEC)
            reading.append(near)
            writing.append(far)
        try:
            answer = await start(spawner, place, argv, files, [(1, writing[0]), (2, writing[1])])
        finally:
            close_all(writing)
        pidfd = answer.fds[0]
        assert answer.exited is not None
        outputs = asyncio.gather(*(asyncio.to_thread(read_bounded, fd) for fd in reading))
        try:
            async with asyncio.timeout(timeout_s):
                exit = await asyncio.shield(answer.exited)
        except TimeoutError:
            raise Unavailable(f"{argv[0]} did not end within {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                syscalls.pidfd_send_signal(pidfd, signal.SIGKILL)
            await asyncio.shield(remove(place))  # nobody holds the far ends any more
            out, err = await outputs
        return Ended(exit, out, err)
    finally:
        close_all(reading)
        if pidfd >= 0:
            os.close(pidfd)


def read_bounded(fd: int) -> bytes:
    """All that comes, of which the first MAX_OUTPUT_BYTES are kept."""
    kept = bytearray()
    while part := os.read(fd, 1 << 16):
        kept += part[: MAX_OUTPUT_BYTES - len(kept)]
    return bytes(kept)
