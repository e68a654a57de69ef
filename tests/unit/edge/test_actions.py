# SPDX-License-Identifier: Apache-2.0
"""Exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Internal, NotFound, Unavailable
from opendsec.api.exec import Captured, ExecResult
from opendsec.api.files import Written
from opendsec.edge.actions import INLINE_BYTES, Action, Actions, request_digest
from opendsec.edge.journal import Journal
from opendsec.edge.log import NullLog

Work = Callable[[Action[Written]], Awaitable[Written]]


class Kit:
    def __init__(self, directory: Path) -> None:
        self.journal = Journal(directory / "journal.db")
        self.results = directory / "results"
        self.results.mkdir()
        self.actions = Actions(self.journal, self.results, lambda: 1.0, NullLog())
        self.ran = 0

    async def once(self, work: Work, action_id: str | None = "a", digest: bytes = b"d") -> Written:
        return await self.actions.once(action_id, work, result=Written, kind="write", digest=lambda: digest)

    async def work(self, action: Action[Written]) -> Written:
        action.begin("", 1.0)
        self.ran += 1
        await asyncio.sleep(0)
        return Written(self.ran)

    async def never(self, action: Action[ExecResult]) -> ExecResult:
        raise AssertionError("it ran again")


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncGenerator[Kit, None]:
    kit = Kit(tmp_path)
    yield kit
    await kit.actions.close()
    kit.journal.close()


async def test_without_an_id_everything_runs(kit: Kit) -> None:
    assert [(await kit.once(kit.work, None)).size_bytes for _ in range(2)] == [1, 2]
    assert kit.journal.pending_actions() == []


async def test_with_an_id_it_runs_once(kit: Kit) -> None:
    together = await asyncio.gather(*(kit.once(kit.work) for _ in range(4)))
    later = await kit.once(kit.work)
    assert {one.size_bytes for one in (*together, later)} == {1} and kit.ran == 1


async def test_another_request_is_refused(kit: Kit) -> None:
    await kit.once(kit.work)
    with pytest.raises(Conflict):
        await kit.once(kit.work, digest=b"other")
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits(action: Action[Written]) -> Written:
        action.begin("", 1.0)
        await gate
        return Written(0)

    running = asyncio.ensure_future(kit.once(waits, "b"))
    await asyncio.sleep(0)
    with pytest.raises(Conflict):
        await kit.once(kit.work, "b", digest=b"other")
    gate.set_result(None)
    await running


async def test_an_error_after_the_beginning_is_a_result(kit: Kit) -> None:
    async def fails(action: Action[Written]) -> Written:
        kit.ran += 1
        action.begin("", 1.0)
        raise Unavailable("no", field="f", data={"n": 1})

    for _ in range(3):
        with pytest.raises(Unavailable) as error:
            await kit.once(fails)
        assert (error.value.message, error.value.field, error.value.data) == ("no", "f", {"n": 1})
    assert kit.ran == 1


async def test_an_error_before_the_beginning_leaves_the_id_free(kit: Kit) -> None:
    async def fails(action: Action[Written]) -> Written:
        raise NotFound("no such box")

    with pytest.raises(NotFound):
        await kit.once(fails)
    assert (await kit.once(kit.work)).size_bytes == 1


async def test_a_bug_after_the_beginning_is_never_run_again(kit: Kit) -> None:
    async def breaks(action: Action[Written]) -> Written:
        action.begin("", 1.0)
        raise KeyError("oops")

    with pytest.raises(KeyError):
        await kit.once(breaks)
    with pytest.raises(Internal) as error:
        await kit.once(kit.work)
    assert error.value.data == {"outcome": "unknown"} and kit.ran == 0


async def test_who_waits_for_one_that_is_cut_off_takes_its_place(kit: Kit) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def cut(action: Action[Written]) -> Written:
        action.begin()
        await gate
        action.forget()
        raise ConnectionError

    first = asyncio.ensure_future(kit.once(cut))
    await asyncio.sleep(0)
    waiting = [asyncio.ensure_future(kit.once(kit.work)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.set_result(None)
    assert {one.size_bytes for one in await asyncio.gather(*waiting)} == {1} and kit.ran == 1
    with pytest.raises(ConnectionError):
        await first


async def test_who_waits_for_one_that_a_bug_ends_learns_that_it_is_unknown(kit: Kit) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def breaks(action: Action[Written]) -> Written:
        action.begin()
        await gate
        raise KeyError("oops")

    first = asyncio.ensure_future(kit.once(breaks))
    await asyncio.sleep(0)
    waiting = asyncio.ensure_future(kit.once(kit.work))
    await asyncio.sleep(0)
    gate.set_result(None)
    with pytest.raises(Internal) as error:
        await waiting
    assert error.value.data == {"outcome": "unknown"} and kit.ran == 0
    with pytest.raises(KeyError):
        await first


async def test_a_caller_who_goes_away_does_not_cut_it(kit: Kit) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def waits(action: Action[Written]) -> Written:
        action.begin("", 1.0)
        await gate
        return Written(7)

    caller = asyncio.ensure_future(kit.once(waits))
    await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait((caller,))
    gate.set_result(None)
    assert (await kit.once(kit.work)).size_bytes == 7 and kit.ran == 0


async def test_forgotten_intents_leave_the_id_free(kit: Kit) -> None:
    async def nothing_came_of_it(action: Action[Written]) -> Written:
        action.begin("", 1.0)
        action.forget()
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await kit.once(nothing_came_of_it)
    assert (await kit.once(kit.work)).size_bytes == 1


class Large(Written, frozen=True):
    padding: str = ""


async def test_large_results_have_a_file(kit: Kit) -> None:
    padding = "x" * INLINE_BYTES

    async def work(action: Action[Large]) -> Large:
        action.begin("", 1.0)
        return Large(1, padding)

    async def once() -> Large:
        return await kit.actions.once("a", work, result=Large, kind="k", digest=lambda: b"")

    first = await once()
    (file,) = kit.results.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    await kit.actions.clear_orphans()
    assert await once() == first
    (kit.results / "orphan.json").write_text("")
    await kit.actions.clear_orphans()
    assert list(kit.results.iterdir()) == [file]
    file.unlink()
    with pytest.raises(Internal, match="cannot be read"):
        await once()


async def test_old_large_results_lose_their_output_not_themselves(kit: Kit) -> None:
    results = []
    for number in range(3):
        output = bytes([number]) * INLINE_BYTES
        result = ExecResult(outcome="exited", exit_code=number, process_id="p", stdout=Captured(output, b"", len(output)))
        results.append(result)

        async def work(action: Action[ExecResult], result: ExecResult = result) -> ExecResult:
            action.begin("", 1.0)
            return result

        await kit.actions.once(f"a{number}", work, result=ExecResult, kind="run", digest=lambda: b"")
    (largest,) = {file.stat().st_size for file in kit.results.iterdir()}
    await kit.actions.trim(largest)

    async def again(number: int) -> ExecResult:
        return await kit.actions.once(f"a{number}", kit.never, result=ExecResult, kind="run", digest=lambda: b"")

    assert await again(2) == results[2]
    trimmed = await again(0)
    assert (trimmed.exit_code, trimmed.stdout) == (0, Captured(total_bytes=INLINE_BYTES)) and trimmed.stdout.truncated
    assert "given up" in trimmed.message
    assert len(list(kit.results.iterdir())) == 1


async def test_close_waits_for_what_ends_and_cuts_what_may_not(kit: Kit) -> None:
    gate = asyncio.Event()

    async def waits(action: Action[Written]) -> Written:
        action.begin("", 1.0)
        await gate.wait()
        return Written(7)

    def outlived() -> Awaitable[Written]:
        return kit.actions.once("run", waits, result=Written, kind="run", digest=lambda: b"", outlived=True)

    short, long = asyncio.ensure_future(kit.once(waits)), asyncio.ensure_future(outlived())
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(kit.actions.close())
    await asyncio.wait((long,))
    assert not closing.done()
    gate.set()
    await closing
    assert short.result().size_bytes == 7 and long.cancelled()
    assert [row.action_id for row in kit.journal.pending_actions()] == ["run"]


def test_digests_tell_parts_apart() -> None:
    assert len({request_digest("a", b"bc"), request_digest("ab", b"c"), request_digest("a", b"b", b"c"), request_digest("a", b"b")}) == 4
