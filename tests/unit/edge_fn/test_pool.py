# SPDX-License-Identifier: Apache-2.0
"""The pool's machine, driven by hand and at random."""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.fn import Reuse
from opendsec.edge.fn.events import (
    Asked,
    Assign,
    Create,
    Destroy,
    Drained,
    Empty,
    Ended,
    Event,
    Evicted,
    Fail,
    Gone,
    Instruction,
    Lost,
    NoRoom,
    Reshaped,
    RoomMade,
    SetTimer,
    Shape,
    Started,
    StartFailed,
    Ticked,
    Withdrawn,
)
from opendsec.edge.fn.pool import BACKOFF_S, GIVE_UP, Pool


class World:
    """A pool and all that it told to do, at a time that the test sets."""

    def __init__(self, *, size: int = 0, most: int = 2, reuse: Reuse = "fork", idle_s: float = 60.0) -> None:
        self.pool = Pool(Shape(size=size, max=most, reuse=reuse, idle_s=idle_s))
        self.at = 0.0
        self.assigned: dict[int, int] = {}  # call → member
        self.cold: set[int] = set()
        self.failed: dict[int, Fail] = {}
        self.starting: list[int] = []
        self.ending: list[int] = []
        self.timer: float | None = None
        self.empty = False
        self._calls = 0
        self._take(self.pool.handle(Ticked(0.0)))

    def _take(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            match one:
                case Create(number):
                    self.starting.append(number)
                case Destroy(number):
                    self.ending.append(number)
                case Assign(number, call, cold):
                    assert call not in self.assigned
                    self.assigned[call] = number
                    if cold:
                        self.cold.add(call)
                case Fail(call):
                    self.failed[call] = one
                case SetTimer(at):
                    self.timer = at
                case Empty():
                    self.empty = True

    def state(self) -> str:
        return self.pool.state

    def is_empty(self) -> bool:
        return self.empty

    def feed(self, event: Event) -> None:
        self._take(self.pool.handle(event))

    def ask(self, caller: str = "a", tenant: str = "", *, fresh: bool = False, again: bool = False) -> int:
        self._calls += 1
        self.feed(Asked(self._calls, caller, tenant, fresh, self.at, again))
        return self._calls

    def start(self, number: int | None = None) -> int:
        number = self.starting[0] if number is None else number
        self.starting.remove(number)
        self.feed(Started(number, self.at))
        return number

    def start_all(self) -> None:
        while self.starting:
            self.start()

    def end(self, call: int, lost: str = "") -> None:
        number = self.assigned[call]
        self.feed(Ended(number, self.at, lost))

    def gone(self) -> None:
        while self.ending:
            self.feed(Gone(self.ending.pop(), self.at))

    def tick(self) -> None:
        assert self.timer is not None
        self.at, self.timer = max(self.at, self.timer), None
        self.feed(Ticked(self.at))


def test_a_declared_pool_is_filled_before_anybody_calls() -> None:
    world = World(size=2, most=4)
    assert len(world.starting) == 2
    assert world.state() == "filling"
    world.start_all()
    assert world.state() == "ready" and world.pool.idle == 2


def test_a_call_that_finds_an_idle_member_is_not_cold() -> None:
    world = World(size=1)
    world.start_all()
    call = world.ask()
    assert world.assigned == {call: 1} and not world.cold


def test_a_miss_is_a_cold_start() -> None:
    world = World(size=0)
    call = world.ask()
    assert len(world.starting) == 1 and not world.assigned
    world.start()
    assert call in world.assigned and world.cold == {call}
    assert world.pool.cold == 1


def test_no_more_than_max_members_and_the_rest_waits() -> None:
    world = World(most=2)
    calls = [world.ask() for _ in range(5)]
    assert len(world.starting) == 2
    world.start_all()
    assert world.pool.waiting == 3
    world.end(calls[0])
    assert world.assigned[calls[2]] == world.assigned[calls[0]]


def test_a_member_used_once_is_destroyed_and_replaced_ahead_of_demand() -> None:
    world = World(size=2, most=4, reuse="never")
    world.start_all()
    call = world.ask()
    assert len(world.starting) == 1, "its replacement starts while it serves"
    world.end(call)
    assert world.ending == [world.assigned[call]]
    world.start_all()
    assert world.pool.idle == 2


def test_a_member_serves_one_tenant_only() -> None:
    world = World(most=1)
    first = world.ask(tenant="a")
    world.start()
    world.end(first)
    second = world.ask(tenant="b")
    assert second not in world.assigned
    assert world.ending == [world.assigned[first]], "the idle member of the other tenant makes way"
    world.gone()
    world.start_all()
    assert world.assigned[second] != world.assigned[first]


def test_the_same_tenant_gets_its_warm_member_back() -> None:
    world = World(size=2, most=2)
    world.start_all()
    first = world.ask(tenant="a")
    world.end(first)
    again = world.ask(tenant="a")
    assert world.assigned[again] == world.assigned[first]


def test_a_call_that_wants_a_member_of_its_own_gets_an_unused_one_and_nobody_after_it() -> None:
    world = World(size=1, most=2)
    world.start_all()
    used = world.ask()
    world.end(used)
    own = world.ask(fresh=True)
    assert own not in world.assigned
    world.start_all()
    assert world.assigned[own] != world.assigned[used]
    world.end(own)
    assert world.ending == [world.assigned[own]]


def test_callers_take_turns() -> None:
    world = World(most=1)
    many = [world.ask("batch") for _ in range(100)]
    world.start()
    single = world.ask("single")
    served = [many[0]]
    while single not in world.assigned:
        world.end(served[-1])
        served.append(max(world.assigned, key=lambda call: list(world.assigned).index(call)))
    assert len(served) <= 3, "a single call waits for one call of a batch, not for a hundred"


def test_withdrawn_calls_are_not_served() -> None:
    world = World(most=1)
    first, second, third = world.ask(), world.ask(), world.ask()
    world.start()
    world.feed(Withdrawn(second, world.at))
    world.end(first)
    assert third in world.assigned and second not in world.assigned
    assert world.pool.waiting == 0


def test_idle_members_beyond_the_size_go() -> None:
    world = World(size=1, most=3, idle_s=10.0)
    calls = [world.ask() for _ in range(3)]
    world.start_all()
    for call in calls:
        world.end(call)
    assert world.pool.idle == 3
    while world.timer is not None:
        world.tick()
    assert world.at == pytest.approx(10.0)
    assert len(world.ending) == 2 and world.pool.idle == 1


def test_a_lost_member_is_replaced() -> None:
    world = World(size=1)
    world.start_all()
    call = world.ask()
    world.end(call, lost="killed")
    assert world.pool.lost == 1 and len(world.starting) == 1
    assert world.ending == [1]


def test_starting_is_tried_again_later_and_later_and_calls_fail_in_the_end() -> None:
    world = World(size=0)
    call = world.ask()
    waits = []
    for _ in range(GIVE_UP):
        world.feed(StartFailed(world.starting.pop(), world.at, "no luck", "platform"))
        if call in world.failed:
            break
        before = world.at
        world.tick()
        waits.append(world.at - before)
    assert waits == [BACKOFF_S[0], BACKOFF_S[0] * 2]
    assert world.failed[call].why == "platform" and "no luck" in world.failed[call].message
    assert world.pool.state == "failing"


def test_a_pool_that_is_wrong_fails_its_calls_at_once() -> None:
    world = World(size=1)
    call = world.ask()
    world.feed(StartFailed(world.starting.pop(), world.at, "no module x", "pool"))
    assert world.failed[call].why == "pool"
    later = world.ask()
    assert world.failed[later].message == "no module x", "while it waits to try again"
    world.tick()
    assert world.starting, "it is tried again: the image may have changed"


def test_members_that_die_before_they_served_are_not_started_in_a_loop() -> None:
    world = World(size=1)
    number = world.start()
    world.feed(Lost(number, world.at, "killed"))
    assert not world.starting and world.timer == world.at + BACKOFF_S[0]
    world.tick()
    assert len(world.starting) == 1


def test_without_room_calls_wait_as_long_as_there_is_hope() -> None:
    world = World(most=2)
    first = world.ask()
    world.start()
    second = world.ask()
    world.feed(NoRoom(world.starting.pop(), world.at, "full", hope=False))
    assert not world.failed, "its own member will be free"
    world.end(first)
    assert second in world.assigned


def test_without_room_or_hope_calls_fail() -> None:
    world = World()
    call = world.ask()
    world.feed(NoRoom(world.starting.pop(), world.at, "full", hope=True))
    assert not world.failed and not world.starting
    world.feed(RoomMade(world.at))
    world.feed(NoRoom(world.starting.pop(), world.at, "full", hope=False))
    assert world.failed[call].why == "quota"


def test_room_is_looked_for_again() -> None:
    world = World()
    world.ask()
    world.feed(NoRoom(world.starting.pop(), world.at, "full", hope=True))
    world.tick()
    assert len(world.starting) == 1


def test_members_make_way_for_other_pools_but_not_below_what_is_to_be_kept() -> None:
    world = World(size=0, most=2)
    call = world.ask()
    world.start()
    world.feed(Evicted(0, world.at))
    assert not world.ending, "a young busy member stays"
    world.at = 10.0
    world.feed(Evicted(0, world.at))
    world.end(call)
    assert len(world.ending) == 1, "an older one goes after its call"
    kept = World(size=1)
    kept.start_all()
    kept.feed(Evicted(1, kept.at))
    assert not kept.ending


def test_draining_serves_what_waits_and_then_is_empty() -> None:
    world = World(size=2, most=2)
    world.start_all()
    calls = [world.ask() for _ in range(3)]
    world.feed(Drained(world.at))
    assert world.state() == "draining" and not world.is_empty()
    for call in calls:
        world.end(call)
    world.gone()
    assert world.is_empty() and not world.failed


def test_resizing_grows_and_shrinks() -> None:
    world = World(size=1, most=4)
    world.start_all()
    world.feed(Reshaped(Shape(size=3, max=4, reuse="fork", idle_s=60.0), False, world.at))
    world.start_all()
    assert world.pool.idle == 3
    world.feed(Reshaped(Shape(size=1, max=1, reuse="fork", idle_s=60.0), False, world.at))
    assert len(world.ending) == 2 and world.pool.idle == 1


def test_replacing_retires_old_members_once_they_are_free() -> None:
    world = World(size=2, most=3)
    world.start_all()
    call = world.ask()
    world.feed(Reshaped(Shape(size=2, max=3, reuse="fork", idle_s=60.0), True, world.at))
    assert len(world.ending) == 1
    world.end(call)
    assert len(world.ending) == 2
    world.gone()
    world.start_all()
    assert world.pool.idle == 2 and not {1, 2} & set(world.pool.slots)


@given(st.integers(0, 2**32), st.sampled_from(["fork", "never"]), st.integers(0, 3), st.integers(1, 4))
def test_at_random_every_call_ends_and_the_books_balance(seed: int, reuse: Literal["fork", "never"], size: int, most: int) -> None:
    rand = random.Random(seed)
    world = World(size=min(size, most), most=most, reuse=reuse, idle_s=5.0)
    tenants: dict[int, str] = {}  # of a call
    served: dict[int, set[str]] = {}  # tenants by member
    running: set[int] = set()
    fresh: set[int] = set()
    withdrawn: set[int] = set()

    def check() -> None:
        for call, number in world.assigned.items():
            served.setdefault(number, set()).add(tenants[call])
        phases = [slot.phase for slot in world.pool.slots.values()]
        assert world.pool.idle == phases.count("idle")
        assert world.pool.busy == phases.count("busy")
        assert world.pool.starting == phases.count("starting") == len(world.starting)
        assert world.pool.living <= most
        assert world.pool.waiting == len(tenants) - len(world.assigned) - len(set(world.failed) | withdrawn)

    ended: set[int] = set()
    for _ in range(60):
        world.at += rand.random()
        running = {call for call in world.assigned if call not in ended}
        step = rand.randrange(9)
        if step <= 2:
            tenant, own = rand.choice("ab"), rand.random() < 0.2
            number = world._calls + 1
            tenants[number] = tenant
            if own:
                fresh.add(number)
            world.ask(rand.choice("xyz"), tenant, fresh=own)
        elif step == 3 and world.starting:
            world.start(rand.choice(world.starting))
        elif step == 4 and world.starting:
            number = rand.choice(world.starting)
            world.starting.remove(number)
            refused = NoRoom(number, world.at, "full", rand.random() < 0.5)
            world.feed(refused if rand.random() < 0.5 else StartFailed(number, world.at, "no", "platform"))
        elif step == 5 and running:
            call = rand.choice(sorted(running))
            ended.add(call)
            world.end(call, "lost" if rand.random() < 0.2 else "")
        elif step == 6 and world.ending:
            world.gone()
        elif step == 7 and world.timer is not None:
            world.tick()
        elif step == 8:
            waiting = sorted(set(tenants) - set(world.assigned) - set(world.failed) - withdrawn)
            if waiting:
                withdrawn.add(waiting[0])
                world.feed(Withdrawn(waiting[0], world.at))
        check()
    for number, whose in served.items():
        assert len(whose) == 1, f"member {number} served {whose}"
    for call in fresh & set(world.assigned):
        others = [other for other, number in world.assigned.items() if number == world.assigned[call] and other != call]
        assert not others, "a member of its own serves nobody else"
    for _ in range(500):  # then all goes well, and everything ends
        world.at += 1.0
        world.start_all()
        for call in set(world.assigned) - ended:
            ended.add(call)
            world.end(call)
        world.gone()
        if world.timer is not None and world.timer <= world.at:
            world.tick()
        world.feed(RoomMade(world.at))
        if not world.pool.waiting and not world.starting and set(world.assigned) == ended:
            break
    assert world.pool.waiting == 0
    assert set(world.assigned) | set(world.failed) | withdrawn == set(tenants)
    world.feed(Drained(world.at))
    world.start_all()
    world.gone()
    assert world.empty and not world.pool.slots
