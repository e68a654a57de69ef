# SPDX-License-Identifier: Apache-2.0
"""What the host makes of what a guest's agent says, friendly and hostile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec
import pytest

from opendsec.api.errors import SandboxLost, Unavailable
from opendsec.runtime.guest import qga
from opendsec.runtime.guest.qga import AgentRefused, Line


class Told(msgspec.Struct):
    pid: int


class Agent:
    """Answers by `answer`, which is given each request after the beginning."""

    def __init__(self, answer: Callable[[dict[str, object]], bytes], *, before: bytes = b"", pieces: int = 1 << 20) -> None:
        self.broken: list[str] = []
        self.line = Line(self.take, self.broken.append)
        self.asked: list[dict[str, object]] = []
        self._answer, self._before, self._pieces = answer, before, pieces

    def take(self, data: bytes) -> None:
        asyncio.get_running_loop().call_soon(self._say, data)

    def _say(self, data: bytes) -> None:
        if data.startswith(qga.MARK):
            request = json.loads(data[1:])
            said = self._before + b'\xff{"return": %d}\n' % request["arguments"]["id"]
        else:
            request = json.loads(data)
            said = self._answer(request)
        self.asked.append(request)
        for at in range(0, len(said), self._pieces):
            self.line.heard(said[at : at + self._pieces])


async def call(agent: Agent, **more: int) -> Told:
    return await agent.line.call("guest-exec", {"path": "x"}, Told, **more)


@pytest.mark.parametrize("pieces", (1, 7, 1 << 20))
@pytest.mark.parametrize("before", (b"", b'{"return": 5}\n', b"\xff" * 99, b'\xff{"return": 12}\n\xff{"return"', bytes(100_000), b"\n\n"))
async def test_what_was_said_before_is_skipped(before: bytes, pieces: int) -> None:
    agent = Agent(lambda _: b'{"return": {"pid": 7, "more": []}}\n', before=before, pieces=pieces if len(before) < 1000 else 4096)
    assert (await call(agent)).pid == 7
    assert (await call(agent)).pid == 7
    assert [one["execute"] for one in agent.asked] == ["guest-sync-delimited", "guest-exec", "guest-exec"]
    assert not agent.broken


async def test_refusals_are_the_agents_own() -> None:
    agent = Agent(lambda _: b'{"error": {"class": "CommandNotFound", "desc": "no ' + b"x" * 2000 + b'"}}\n')
    with pytest.raises(AgentRefused) as raised:
        await call(agent)
    assert raised.value.kind == "CommandNotFound" and len(str(raised.value)) <= 500
    assert not agent.broken


@pytest.mark.parametrize(
    "said",
    (
        *(b"\n", b"{}\n", b"[]\n", b"nonsense\n", b"\xff\xfe\n", b'{"return": {}}\n', b'{"return": {"pid": "7"}}\n', b'{"return": 3}\n'),
        *(
            b'{"error": "no"}\n',
            b"[" * 5000 + b"\n",
            b'{"return": {"pid": 1e400}}\n',
            b'{"return": ' + b"[" * 100_000 + b"\n",
            bytes(2 << 20),
        ),
    ),
)
async def test_nonsense_breaks_the_line(said: bytes) -> None:
    agent = Agent(lambda _: said, pieces=64 << 10)
    with pytest.raises(SandboxLost):
        await call(agent)
    assert len(agent.broken) == 1
    with pytest.raises(SandboxLost):
        await call(agent)


async def test_a_flood_instead_of_a_beginning_breaks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qga, "MAX_SKIPPED", 1 << 20)
    agent = Agent(lambda _: b"", before=b"\xff{\n" * (1 << 19), pieces=64 << 10)
    with pytest.raises(SandboxLost):
        await call(agent)
    assert "says much" in agent.broken[0]


async def test_late_answers_are_nobodys() -> None:
    said = iter((b"", b'{"return": {"pid": 2}}\n', b'{"return": {"pid": 3}}\n{"return": {"pid": 4}}\n', b'{"return": {"pid": 5}}\n'))
    agent = Agent(lambda _: next(said))
    with pytest.raises(Unavailable, match="does not answer"):
        await call(agent, timeout_s=0)
    agent.line.heard(b'{"return": {"pid": 1}}\n')
    assert [(await call(agent)).pid for _ in range(3)] == [2, 3, 5]
    assert [one["execute"] for one in agent.asked].count("guest-sync-delimited") == 3
    agent.line.heard(b"unasked")
    assert not agent.broken


async def test_it_stands_still_between_requests() -> None:
    agent = Agent(lambda _: b'{"return": {"pid": 7}}\n')
    await call(agent)
    await agent.line.hold(1)
    await agent.line.hold(1)
    waiting = asyncio.ensure_future(call(agent))
    await asyncio.sleep(0)
    assert len(agent.asked) == 2
    agent.line.reset()
    agent.line.go_on()
    assert (await waiting).pid == 7
    assert [one["execute"] for one in agent.asked][2:] == ["guest-sync-delimited", "guest-exec"]
    silent = Line(lambda _: None, agent.broken.append)
    asking = asyncio.ensure_future(silent.ready(60))
    await asyncio.sleep(0)
    await silent.hold(1)  # does not wait for an agent that is not there
    with pytest.raises(Unavailable):
        await asking
    silent.end()


def test_base64() -> None:
    assert qga.unpacked(qga.packed(b"\0\xff")) == b"\0\xff"
    assert qga.unpacked(None) == b""
    assert qga.unpacked("a") is qga.unpacked("ä===") is None
