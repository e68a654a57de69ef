# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept by content: what counts as the same, what is kept, what a damaged file means."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from opendsec.api.fn import FnCall, FnResult, PoolSpec
from opendsec.edge.fn.compiled import Compiler
from opendsec.runtime.fncall.interface import Ended
from tests.unit.edge_fn.conftest import World

MADE = Ended(code=0, stdout=b"warning", stdout_total=7, files={"main": b"binary"})


async def compile_and_run(world: World, source: str, *, compiler: Ended | None, **fields: object) -> FnResult:
    """Call; `compiler` None: it must not be asked."""
    before = len(world.members.jobs)
    given: dict[str, object] = {"source": source, "language": "c", **fields}
    running = asyncio.ensure_future(world.functions.call(FnCall(**given)))  # type: ignore[arg-type]
    if compiler is not None:
        await world.members.until(lambda: len(world.members.jobs) == before + 1)
        assert world.members.jobs[-1][1].argv[0] == "gcc"
        world.members.end(compiler)
        before += 1
        if compiler.code != 0 or not compiler.files or compiler.files_problem:
            return await running
    await world.members.until(lambda: len(world.members.jobs) == before + 1)
    assert world.members.jobs[-1][1].argv == ("./main",)
    world.members.end()
    return await running


def kept(world: World) -> list[Path]:
    return sorted((world.edge.settings.state_dir / "fn" / "compiled").iterdir())


async def test_the_same_program_is_compiled_once(world: World) -> None:
    result = await compile_and_run(world, "int main;", compiler=MADE)
    assert result.compile is not None and result.compile.stdout.data == b"warning"
    assert (await compile_and_run(world, "int main;", compiler=None)).compile == result.compile
    assert len(kept(world)) == 1


async def test_what_goes_in_makes_it_another_program(world: World) -> None:
    await compile_and_run(world, "a", compiler=MADE)
    await compile_and_run(world, "b", compiler=MADE)
    await compile_and_run(world, "a", compiler=MADE, files={"a.h": b""})
    await compile_and_run(world, "a", compiler=MADE, files={"a.h": b"x"})
    await compile_and_run(world, "a", compiler=None, stdin=b"other input")
    assert len(kept(world)) == 4


async def test_it_is_found_again_by_the_next_edge(world: World) -> None:
    first = await compile_and_run(world, "a", compiler=MADE)
    await world.edge.restart()
    assert (await compile_and_run(world, "a", compiler=None)).compile == first.compile


@pytest.mark.parametrize("damage", [b"", b"DSCP", b"DSCP\x01\0\0\0" + bytes(32) + b"x", b"DSCP\x02\0\0\0" + bytes(40)])
async def test_a_damaged_file_is_compiled_anew(world: World, damage: bytes) -> None:
    await compile_and_run(world, "a", compiler=MADE)
    (path,) = kept(world)
    path.write_bytes(damage)
    await world.edge.restart()
    await compile_and_run(world, "a", compiler=MADE)
    (path,) = kept(world)
    assert path.read_bytes() != damage


async def test_refusals_by_the_compiler_are_kept_and_those_of_limits_are_not(world: World) -> None:
    refusal = Ended(code=1, stderr=b"syntax error", stderr_total=12)
    result = await compile_and_run(world, "a", compiler=refusal)
    assert result.outcome == "compile_error" and result.compile is not None and result.compile.stderr.data == b"syntax error"
    again = await asyncio.wait_for(world.functions.call(FnCall(source="a", language="c")), 20)
    assert again.outcome == "compile_error" and len(world.members.jobs) == 1
    for slow in (Ended(signal=9, timed_out="wall"), Ended(signal=9, oom_killed=True), Ended(signal=9, output_exceeded=True)):
        result = await compile_and_run(world, "b", compiler=slow)
        assert result.outcome == "compile_error" and "the compiler was ended" in result.message
    assert (await compile_and_run(world, "b", compiler=MADE)).outcome == "ok"


async def test_a_compiler_that_makes_nothing_is_an_error(world: World) -> None:
    result = await compile_and_run(world, "a", compiler=Ended(code=0))
    assert result.outcome == "compile_error" and "left no main" in result.message


async def test_half_of_what_a_compiler_made_is_not_run(world: World) -> None:
    result = await compile_and_run(
        world, "a", compiler=msgspec.structs.replace(MADE, files_problem="X.class: one of too many output files")
    )
    assert result.outcome == "compile_error" and "too much" in result.message and "X.class" in result.message
    assert len(world.members.jobs) == 1


async def test_a_compiler_that_was_killed_has_refused_nothing(world: World) -> None:
    assert (await compile_and_run(world, "a", compiler=Ended(signal=9))).outcome == "compile_error"
    assert (await compile_and_run(world, "a", compiler=MADE)).outcome == "ok"


async def test_those_who_want_the_same_at_once_wait_for_one_compiler(world: World) -> None:
    running = [asyncio.ensure_future(world.functions.call(FnCall(source="a", language="c"))) for _ in range(3)]
    await world.members.until(lambda: bool(world.members.open))
    world.members.end(MADE)
    for number in range(3):
        await world.members.until(lambda number=number: len(world.members.jobs) >= 2 + number)  # type: ignore[misc]
        await world.members.until(lambda: bool(world.members.running))
        world.members.end()
    assert [(await task).outcome for task in running] == ["ok"] * 3
    assert [job.argv[0] for _, job in world.members.jobs].count("gcc") == 1


async def test_a_caller_who_gives_up_leaves_the_others_their_program(world: World) -> None:
    first = asyncio.ensure_future(world.functions.call(FnCall(source="a", language="c")))
    await world.members.until(lambda: bool(world.members.open))
    second = asyncio.ensure_future(world.functions.call(FnCall(source="a", language="c")))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait((first,))
    await world.members.until(lambda: bool(world.members.running))
    world.members.end(MADE)
    await world.members.until(lambda: world.members.jobs[-1][1].argv == ("./main",))
    world.members.end()
    assert (await second).outcome == "ok"


async def test_of_those_who_wait_the_next_tries_what_failed(world: World) -> None:
    await world.pools.set(PoolSpec(name="p", image="fake", size=1, max=1, memory="2GiB"))
    running = [asyncio.ensure_future(world.functions.call(FnCall(source="a", language="c", pool="p"))) for _ in range(2)]
    await world.members.until(lambda: bool(world.members.running))
    running[0].cancel()
    await asyncio.wait(running[:1])
    await world.members.until(lambda: len(world.members.jobs) == 2 and bool(world.members.running))
    world.members.end(MADE)
    await world.members.until(lambda: len(world.members.jobs) == 3)
    world.members.end()
    assert (await running[1]).outcome == "ok"


async def test_the_least_recently_used_go_first(world: World, tmp_path: Path) -> None:
    compiler = Compiler(world.functions.calls, tmp_path / "cache", 3000, world.pools.node.log)
    world.functions.compiler = compiler
    for source in "abcd":
        await compile_and_run(world, source, compiler=Ended(code=0, files={"main": bytes(900)}))
    files = sorted((tmp_path / "cache").iterdir())
    assert len(files) < 4 and sum(path.stat().st_size for path in files) <= 3000
