# SPDX-License-Identifier: Apache-2.0
"""How members end, on purpose and not: nothing is left, and whoever waits hears why."""

# ruff: noqa: E501  (programs, line by line)
from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.api.errors import Internal, SandboxLost
from opendsec.images.layers import LayerRef
from opendsec.testing.waiting import eventually
from tests.boxes import until
from tests.fnmembers import Calls, FnNode, pythons

pytestmark = pytest.mark.slow

SLEEP = "import time\nprint('on', flush=True)\ntime.sleep(1000)"


def test_destroyed_at_rest_and_during_a_call(fn_node: FnNode) -> None:
    for busy in (False, True):
        with fn_node.member() as calls:

            async def end(calls: Calls = calls, busy: bool = busy) -> None:
                at_rest = calls.kernel_processes()
                task = asyncio.ensure_future(calls.member.call(calls.job("source", source=SLEEP))) if busy else None
                await eventually(lambda: not busy or calls.kernel_processes() > at_rest)
                await asyncio.gather(calls.member.destroy(), calls.member.destroy())
                if task is not None:
                    with pytest.raises(SandboxLost):
                        await task
                assert calls.member.died.done()
                with pytest.raises(SandboxLost):
                    await calls.member.call(calls.job("source", source="1"))
                await calls.member.destroy()

            fn_node.wait(end())
            assert not calls.member.group.exists()
    assert fn_node.backend.leftovers() == [] and fn_node.backend.layers_in_use() == frozenset()


def test_one_call_at_a_time(fn_node: FnNode) -> None:
    with fn_node.member() as calls:

        async def two() -> None:
            first = asyncio.ensure_future(calls.member.call(calls.job("exec", argv=["sleep", "0.2"])))
            await asyncio.sleep(0)
            with pytest.raises(Internal, match="one call at a time"):
                await calls.member.call(calls.job("exec", argv=["true"]))
            assert (await first).code == 0

        fn_node.wait(two())
        calls.check()


def kill_supervisor(calls: Calls) -> None:
    os.kill(calls.member.pid, signal.SIGKILL)


def kill_interpreter(calls: Calls) -> None:
    os.kill(pythons(calls)[0], signal.SIGKILL)


@pytest.mark.parametrize("kill", [kill_supervisor, kill_interpreter])
def test_killed_at_rest(fn_node: FnNode, kill: Callable[[Calls], None]) -> None:
    """Without its interpreter a member that should have one is no member: it ends, and another is made."""
    with fn_node.member() as calls:
        kill(calls)
        assert "ended" in fn_node.wait(asyncio.shield(calls.member.died))
        with pytest.raises(SandboxLost):
            calls.python("1")
        until(lambda: not calls.member.group.procs(), "something lives on")


@pytest.mark.parametrize("kind", ["source", "exec"])
def test_the_supervisor_is_killed_during_a_call(fn_node: FnNode, kind: str) -> None:
    with fn_node.member() as calls:

        async def kill() -> None:
            at_rest = calls.kernel_processes()
            job = calls.job(kind, source=SLEEP, argv=["sleep", "1000"])  # type: ignore[arg-type]
            task = asyncio.ensure_future(calls.member.call(job))
            await eventually(lambda: calls.kernel_processes() > at_rest)
            kill_supervisor(calls)
            with pytest.raises(SandboxLost):
                await task

        fn_node.wait(kill())
        until(lambda: not calls.member.group.procs(), "something lives on")


def test_the_interpreter_is_killed_during_a_call(fn_node: FnNode) -> None:
    """The call goes on by itself; the member says that it is spoiled, and why."""
    with fn_node.member() as calls:

        async def kill() -> None:
            at_rest = calls.kernel_processes()
            source = "import os, time\nwhile not os.path.exists('/dev/shm/go'): time.sleep(0.01); open('/dev/shm/go', 'w')\nprint('end')\ntime.sleep(0.3)"
            task = asyncio.ensure_future(calls.member.call(calls.job("source", source=source)))
            await eventually(lambda: calls.kernel_processes() > at_rest)
            os.kill(pythons(calls)[0], signal.SIGKILL)
            ended = await task
            assert (ended.spoiled, ended.stdout) in (("its interpreter ended", b"end\n"), ("its interpreter ended", b""))

        fn_node.wait(kill())
        assert "ended" in fn_node.wait(asyncio.shield(calls.member.died))


def test_the_spawner_is_killed(tmp_path: Path, base_layers: tuple[LayerRef, ...]) -> None:
    """Members that there are live on; the next one gets a new spawner."""
    node = FnNode(tmp_path, base_layers)
    try:
        with node.member() as calls:
            old = node.wait(node.containers.spawner())
            os.kill(old.pid, signal.SIGKILL)
            node.wait(asyncio.shield(old.died))
            calls.check()
            with node.member() as another:
                another.check()
            calls.check()
    finally:
        node.close()


def test_a_creation_that_is_cancelled_leaves_nothing(fn_node: FnNode) -> None:
    async def give_up(turns: int) -> None:
        task = asyncio.ensure_future(fn_node.backend.create(fn_node.plan()))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        try:
            await (await task).destroy()
        except asyncio.CancelledError:
            pass

    for turns in (0, 1, 3, 8, 20, 50):
        fn_node.wait(give_up(turns))
    assert fn_node.backend.leftovers() == [] and fn_node.backend.layers_in_use() == frozenset()


def test_the_edge_goes_away(fn_node: FnNode) -> None:
    """A member whose edge is gone ends by itself, whatever it is at; what is left is an empty group, for the next edge to clear."""
    with fn_node.member() as calls:

        async def leave() -> None:
            at_rest = calls.kernel_processes()
            task = asyncio.ensure_future(calls.member.call(calls.job("exec", argv=["sh", "-c", "setsid sleep 1000 & sleep 1000"])))
            await eventually(lambda: calls.kernel_processes() >= at_rest + 3)
            calls.member._channel.shutdown(2)
            with pytest.raises(SandboxLost):
                await task

        fn_node.wait(leave())
        until(lambda: not calls.member.group.procs(), "something lives on")
        assert fn_node.backend.leftovers() == [calls.plan.member_id]
        fn_node.wait(fn_node.backend.clear(calls.plan.member_id))
        fn_node.wait(fn_node.backend.clear(calls.plan.member_id))
        assert fn_node.backend.leftovers() == []


def test_a_member_used_once(fn_node: FnNode) -> None:
    """`reuse="never"`: made, used and destroyed, again and again."""
    for number in range(5):
        with fn_node.member() as calls:
            assert calls.says(f"print({number})") == f"{number}\n"
