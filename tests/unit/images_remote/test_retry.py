# SPDX-License-Identifier: Apache-2.0
"""Patience on a clock that only pauses move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from opendsec.images.remote.retry import Patience, Patient
from opendsec.images.remote.store import Kind, StoreError, ignore


class Scripted:
    """Answers as it is told, one after the other; a kind is an error."""

    name, writable = "s", True

    def __init__(self, *answers: bytes | Kind | None) -> None:
        self.answers = list(answers)
        self.calls: list[tuple[object, ...]] = []

    async def answer(self, *call: object) -> bytes:
        self.calls.append(call)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, str):
            raise StoreError(answer, self.name, str(call[1]), "as told")
        assert answer is not None
        return answer

    async def get(self, key: str, *, limit: int) -> bytes:
        return await self.answer("get", key, limit)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return await self.answer("get_range", key, start, length)

    async def put(self, key: str, content: bytes | Path, *, progress: Callable[[int], None] = ignore) -> None:
        progress(len(await self.answer("put", key)))

    async def size(self, key: str) -> int:
        return len(await self.answer("size", key))

    async def list(self, prefix: str) -> AsyncIterator[str]:
        yield (await self.answer("list", prefix)).decode()

    async def delete(self, key: str) -> None:
        await self.answer("delete", key)

    async def close(self) -> None:
        self.calls.append(("close",))


class Time:
    def __init__(self) -> None:
        self.now, self.pauses = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def patient(store: Scripted, time: Time | None = None, *, jitter: float = 1.0, **settings: float) -> Patient:
    time = time or Time()
    patience = Patience(**{"attempts": 5, "first_pause_s": 1.0, "longest_pause_s": 4.0, "deadline_s": 100.0, **settings})  # type: ignore[arg-type]
    return Patient(store, patience, clock=time, sleep=time.sleep, jitter=lambda: jitter)


async def test_pauses_double_up_to_a_limit_and_no_is_an_answer_of_last_resort() -> None:
    time, store = Time(), Scripted("unreachable")
    with pytest.raises(StoreError, match=r"as told \(tried 5 times in 11\.0 s\)") as caught:
        await patient(store, time).get("k", limit=9)
    assert caught.value.kind == "unreachable"
    assert time.pauses == [1.0, 2.0, 4.0, 4.0]


async def test_jitter_halves_a_pause_at_most() -> None:
    time = Time()
    with pytest.raises(StoreError):
        await patient(Scripted("unreachable"), time, jitter=0.0).get("k", limit=9)
    assert time.pauses == [0.5, 1.0, 2.0, 2.0]


async def test_the_deadline_ends_it() -> None:
    time = Time()
    with pytest.raises(StoreError, match=r"tried 3 times in 3\.0 s"):
        await patient(Scripted("unreachable"), time, deadline_s=5.0).size("k")
    assert time.pauses == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["missing", "denied", "full"])
async def test_a_clear_no_is_taken_at_its_word(kind: Kind) -> None:
    store = Scripted(kind)
    with pytest.raises(StoreError) as caught:
        await patient(store).get("k", limit=9)
    assert (caught.value.kind, len(store.calls)) == (kind, 1)


async def test_it_goes_on_when_the_store_does() -> None:
    store = Scripted("unreachable", "damaged", b"abc")
    assert await patient(store).get_range("k", 5, 3) == b"abc"
    assert store.calls == [("get_range", "k", 5, 3)] * 3


async def test_a_short_answer_is_no_answer() -> None:
    store = Scripted(b"ab", b"abc")
    assert await patient(store).get_range("k", 5, 3) == b"abc"
    with pytest.raises(StoreError, match="has 3 bytes instead of 4") as caught:
        await patient(store).get_range("k", 5, 4)
    assert caught.value.kind == "damaged"


async def test_silence_is_not_waited_for_for_ever() -> None:
    store = Scripted(None, b"abc")
    assert await patient(store, attempt_s=0.01).get("k", limit=0) == b"abc"
    with pytest.raises(StoreError, match=r"no answer within 0\.01 s") as caught:
        await patient(Scripted(None), attempt_s=0.01, attempts=2).size("k")
    assert caught.value.kind == "unreachable"


async def test_large_transfers_have_longer() -> None:
    time = Time()
    with pytest.raises(StoreError, match="tried 5 times"):
        await patient(Scripted("unreachable"), time, deadline_s=5.0).put("k", bytes(100 << 20))


async def test_all_calls_are_patient() -> None:
    store = Scripted("unreachable", b"k")
    asked = patient(store)
    assert (asked.name, asked.writable) == ("s", True)
    calls: list[Callable[[], object]] = [
        lambda: asked.get("k", limit=1),
        lambda: asked.size("k"),
        lambda: asked.put("k", b"x"),
        lambda: asked.delete("k"),
    ]
    for call in calls:
        store.answers, store.calls = ["unreachable", b"k"], []
        await call()  # type: ignore[misc]
        assert len(store.calls) == 2
    store.answers = ["unreachable", b"k"]
    assert [key async for key in asked.list("k")] == ["k"]
    await asked.close()
    assert store.calls[-1] == ("close",)


async def test_cancelling_ends_the_wait() -> None:
    task = asyncio.ensure_future(patient(Scripted(None)).get("k", limit=9))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
