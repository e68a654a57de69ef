# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Sequence

from opendsec.api.sandboxes import Event
from opendsec.observe.events import PENDING, SEQUENCE_GAP, EventSink


async def test_events_are_numbered_and_stored() -> None:
    stored: list[Event] = []
    scheduled = []
    sink = EventSink(clock=lambda: 5.0, store=stored.extend, schedule=lambda: scheduled.append(1))
    sink.emit("a", "sb", n=1)
    sink.emit("b")
    assert scheduled == [1] and stored == []
    sink.flush()
    assert stored == [Event(seq=1, at=5.0, kind="a", sandbox_id="sb", data={"n": 1}), Event(seq=2, at=5.0, kind="b")]
    sink.emit("c")
    assert scheduled == [1, 1]


async def test_numbers_are_never_given_twice() -> None:
    """Whatever a crash kept from the store lies within the gap."""
    sink = EventSink(clock=lambda: 0.0, last_seq=10)
    sink.emit("a")
    assert sink.seq == 10 + SEQUENCE_GAP + 1
    stored: list[Event] = []
    sink = EventSink(clock=lambda: 0.0, store=stored.extend)
    for _ in range(PENDING):
        sink.emit("a")
    assert len(stored) == PENDING < SEQUENCE_GAP


async def test_a_store_that_refuses_does_not_stop_events() -> None:
    def refuse(events: Sequence[Event]) -> None:
        raise OSError("full")

    sink = EventSink(clock=lambda: 0.0, store=refuse)
    with sink.subscribe() as subscription:
        sink.emit("a")
        sink.flush()
        assert sink.store_failures == 1
        assert (await anext(subscription)).kind == "a"


async def test_a_follower_sees_what_it_asked_for() -> None:
    sink = EventSink(clock=lambda: 0.0)
    sink.emit("before", "x")
    with sink.subscribe(sandbox_id="x") as subscription:
        sink.emit("one", "x")
        sink.emit("other", "y")
        sink.emit("two", "x")
        assert [(await anext(subscription)).kind for _ in range(2)] == ["one", "two"]
        assert subscription.waiting() == 0
    sink.emit("after", "x")
    assert subscription.waiting() == 0


async def test_a_slow_follower_is_told_what_it_lost() -> None:
    sink = EventSink(clock=lambda: 0.0)
    with sink.subscribe(capacity=2) as subscription:
        for _ in range(5):
            sink.emit("a")
        assert [(await anext(subscription)).seq for _ in range(2)] == [1, 2]
        lost = await anext(subscription)
        assert (lost.kind, lost.seq, lost.data) == ("events.lost", 5, {"missing": 3})
        sink.emit("b")
        assert (await anext(subscription)).seq == 6
        assert subscription.lost == 3


async def test_a_loss_is_told_before_what_follows_it() -> None:
    sink = EventSink(clock=lambda: 0.0)
    with sink.subscribe(capacity=1) as subscription:
        sink.emit("a")
        sink.emit("b")
        assert (await anext(subscription)).kind == "a"
        sink.emit("c")
        assert [(await anext(subscription)).kind for _ in range(2)] == ["events.lost", "c"]
