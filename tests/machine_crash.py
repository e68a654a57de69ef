# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the edge, of a QEMU, or of a machine's guestd, at random moments of whatever machines do. For the test and the benchmark.

Each round has a sandbox that has been there all the time, one with a command under way, and something that happens to it when the blow
falls. Afterwards each must be what it may be after such a blow, whoever asks must be told in the right words, and nothing may be left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Literal

import opendsec as od
from tests.machine_edges import MachineEdge, machine

Victim = Literal["edge", "qemu", "guestd"]
VICTIMS: tuple[Victim, ...] = ("edge", "qemu", "guestd")
ACTS = ("nothing", "create", "run", "files", "pause", "resume", "fork", "snapshot")
MARKER = "/dev/shm/marker"
SETTLE_S = 15.0
TIMEOUT_S = 120.0  # of a round: ten times what it takes on a busy machine
LOST = "lost"

# A guest's kernel gives process 1 no SIGKILL of its own; but its root may take away the code it runs.
KILL_GUESTD = """
with open("/proc/1/maps") as maps:
    first, last = (int(one, 16) for one in next(line.split()[0] for line in maps if " r-xp " in line).split("-"))
with open("/proc/1/mem", "r+b", 0) as memory:
    memory.seek(first)
    memory.write(bytes(last - first))
"""


@dataclass
class Tally:
    """What went wrong: by kind, and in words."""

    counts: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, detail: str) -> None:
        self.counts[kind] += 1
        self.details.append(f"{kind}: {detail}")


class Crashes:
    """Rounds on one edge, which is started already and is running when they end."""

    def __init__(self, edge: MachineEdge, seed: int) -> None:
        self.edge, self.tally = edge, Tally()
        self._rng = random.Random(seed)
        self._veteran = ""
        self._where = ""

    async def run(self, rounds: int) -> Tally:
        async with self.edge.client() as client:
            veteran = await client.create(machine())
            self._veteran = veteran.id
            await veteran.files.write(MARKER, veteran.id)
        try:
            for number in range(rounds):
                victim, act = VICTIMS[number % len(VICTIMS)], self._rng.choice(ACTS)
                self._where = f"round {number} ({victim}, {act})"
                self.tally.rounds[victim] += 1
                async with asyncio.timeout(TIMEOUT_S):
                    await self._round(victim, act)
        finally:
            async with self.edge.client() as client:
                await client.sandbox(self._veteran).kill()
        return self.tally

    def _wrong(self, kind: str, what: str) -> None:
        self.tally.add(kind, f"{self._where}: {what}")

    async def _round(self, victim: Victim, act: str) -> None:
        async with self.edge.client() as client:
            box = await client.create(machine())
            await box.files.write(MARKER, box.id)
            under_way = await box.start(["sleep", "1000"])
            if act == "resume":
                await box.pause()
            waiting = asyncio.ensure_future(under_way.wait())
            doing = asyncio.ensure_future(self._act(client, box, act))
            await asyncio.sleep(self._rng.uniform(0.0, 0.5))  # the moment is what is being varied
            struck = await self._strike(victim, box)
            outcomes = await asyncio.gather(doing, *([] if victim == "edge" else [self._told(box, struck)]), return_exceptions=True)
            for outcome in outcomes:
                self._judge_answer(victim, outcome)
            if victim == "edge" or not struck:
                waiting.cancel()
            ended = (await asyncio.gather(waiting, return_exceptions=True))[0]
            if struck and victim != "edge" and not isinstance(ended, od.SandboxLost):
                self._wrong("misreported", f"the command under way ended as {ended!r}")
        if victim == "edge":
            await asyncio.to_thread(self.edge.start)
        async with self.edge.client() as client:
            await self._check(client, victim, client.sandbox(box.id), under_way.id, lost=struck and victim != "edge")
            await self._clear(client)

    # --- what happens ----------------------------------------------------------------------------------------------------

    async def _act(self, client: od.Client, box: od.Sandbox, act: str) -> None:
        match act:
            case "create":
                await client.create(machine())
            case "run":
                await box.run("head -c 1000000 /dev/zero | md5sum")
            case "files":
                await box.files.write("/root/large", os.urandom(1 << 20))
                await box.files.read_bytes("/root/large")
            case "pause":
                await box.pause()
            case "resume":
                await box.resume()
            case "fork":
                for fork in await box.fork(2):
                    if isinstance(fork, Exception):
                        raise fork
            case "snapshot":
                await box.snapshot("crash")

    async def _strike(self, victim: Victim, box: od.Sandbox) -> bool:
        """Whether the sandbox was struck: a paused one has no process, and so on."""
        if victim == "edge":
            self.edge.kill()
            return True
        if victim == "guestd":
            try:
                await box.run(["python3", "-c", KILL_GUESTD], timeout_s=60)
            except od.SandboxLost:
                return True
            self._wrong("misreported", "a machine without guestd goes on")
            return True
        state = self.edge.store.read_box(box.id)
        if state is None or state.vmm is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.vmm.pid, signal.SIGKILL)
        after = self.edge.store.read_box(box.id)
        return after is not None and after.vmm == state.vmm  # it was not paused meanwhile: then it is the file that counts

    async def _told(self, box: od.Sandbox, struck: bool) -> None:
        """Wait until the edge knows."""
        until = time.monotonic() + SETTLE_S
        while struck and (await box.refresh()).state not in (LOST, "paused") and time.monotonic() < until:
            await asyncio.sleep(0.02)

    def _judge_answer(self, victim: Victim, outcome: object) -> None:
        """One in the middle of it all may have succeeded; else it is told whose fault it is."""
        if isinstance(outcome, BaseException) and not isinstance(outcome, od.SandboxLost | od.Unavailable):
            self._wrong("misreported", f"told {outcome!r}")

    # --- what is then ----------------------------------------------------------------------------------------------------

    async def _check(self, client: od.Client, victim: Victim, box: od.Sandbox, command: str, *, lost: bool) -> None:
        for other in await client.list():
            if other.id not in (box.id, self._veteran):
                await self._alive(other, f"{other.id}, made when it happened,")
        await self._alive(client.sandbox(self._veteran), "the bystander", self._veteran)
        state = (await box.refresh()).state
        if lost:
            if state != LOST:
                self._wrong("state", f"it is {state}, not lost")
            for need in (box.run("true"), box.resume()):
                await self._lost(need)
        elif state not in ("running", "paused"):
            self._wrong("state", f"it is {state}: {box.info.message if box.info else ''}")
        else:
            await self._alive(box, "the sandbox", box.id)
            if victim == "edge" and (outcome := (await box.process(command).wait()).outcome) != "unknown":
                self._wrong("misreported", f"the command that was cut is told as {outcome}")

    async def _alive(self, box: od.Sandbox, who: str, marker: str = "") -> None:
        try:
            said = (await box.run(f"cat {MARKER}" if marker else "true", timeout_s=60)).check().stdout
        except od.OpenDSecError as error:
            self._wrong("state", f"{who} does not answer: {error!r}")
        else:
            if said != marker:
                self._wrong("state", f"{who} remembers {said!r}")

    async def _lost(self, need: Coroutine[None, None, object]) -> None:
        try:
            await need
        except od.SandboxLost:
            return
        except od.OpenDSecError as error:
            self._wrong("misreported", f"of a lost sandbox is told {error!r}")
        else:
            self._wrong("misreported", "a lost sandbox answers")

    async def _clear(self, client: od.Client) -> None:
        """End all but the bystander; what is left then is wrong."""
        for box in await client.list(state="all"):
            if box.id != self._veteran and box.info is not None and box.info.state != "stopped":
                with contextlib.suppress(od.Conflict):
                    await box.kill()
        for snapshot in await client.snapshots.list():
            await client.snapshots.remove(snapshot.name or snapshot.id)
        until = time.monotonic() + SETTLE_S
        while (strays := self.edge.strays([self._veteran])) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        for stray in strays:
            self._wrong("left", stray)
