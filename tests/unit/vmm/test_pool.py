# SPDX-License-Identifier: Apache-2.0
"""Which machines wait, how many, and when they end; the store's notion of what is still needed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec
import pytest

from opendsec.api.spec import Limits
from opendsec.runtime.backend import SnapshotRecord, VmOptions, VmRecord
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.microvm import pool as pools
from opendsec.runtime.microvm.pool import Pool, Waiting
from opendsec.runtime.vmm import store as stores
from opendsec.runtime.vmm.process import Vmm
from opendsec.runtime.vmm.store import BoxState, SnapshotState, Template, VmStore, write
from opendsec.runtime.vmm.templates import Wanted

LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=1, disk_bytes=1, inodes=64, pids=2, open_files=16)
WANTED = Wanted("tcg", (), 1, 1 << 27, 1 << 20, 64)


def template(key: str, disks: tuple[str, ...] = ()) -> Template:
    return Template(key=key, accel="tcg", qemu="", boot="", layers=(), cpus=1, memory_bytes=1, scratch="", scratch_bytes=1, disks=disks)


class Held:
    """Stands for both a machine and its channel."""

    def __init__(self) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lost = False


class Factory:
    def __init__(self, size: int, *, room: bool = True) -> None:
        self.made: list[str] = []
        self.ended: list[Waiting] = []
        self.fail = False
        self.has_room = room
        self.pool = Pool(size, make=self.make, discard=self.discard, room=lambda wanted: self.has_room)

    async def make(self, template: Template, wanted: Wanted) -> Waiting:
        if self.fail:
            raise OSError("it does not work")
        self.made.append(template.key)
        held = Held()
        return Waiting(f"vm{len(self.made)}", 1, template.key, Path("/nowhere"), cast(Vmm, held), cast(Channel, held))

    async def discard(self, waiting: Waiting) -> None:
        self.ended.append(waiting)

    async def filled(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.pool.waiting() < count:
                self.pool.changed.clear()
                await self.pool.changed.wait()


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "SETTLE_S", 0.0)


async def test_what_was_asked_for_waits_from_then_on() -> None:
    factory = Factory(2)
    assert factory.pool.take(template("a"), WANTED) is None
    await factory.filled(2)
    first = factory.pool.take(template("a"), WANTED)
    assert first is not None and first.template == "a"
    await factory.filled(2)
    assert factory.made == ["a"] * 3 and factory.pool.waiting("b") == 0
    await factory.pool.close()
    assert len(factory.ended) == 2 and first not in factory.ended
    assert factory.pool.take(template("a"), WANTED) is None


async def test_the_dead_are_not_handed_out() -> None:
    factory = Factory(2)
    factory.pool.take(template("a"), WANTED)
    await factory.filled(2)
    [shelf] = factory.pool._shelves.values()
    shelf.machines[0].vmm.died.set_result("killed")
    good = shelf.machines[1]
    assert factory.pool.take(template("a"), WANTED) is good
    await factory.pool.close()
    assert len(factory.ended) == len(factory.made) - 1


async def test_nothing_is_made_while_something_is_created_or_there_is_no_room() -> None:
    factory = Factory(1)
    with factory.pool.creating():
        factory.pool.take(template("a"), WANTED)
        for _ in range(20):
            await asyncio.sleep(0)
        assert factory.made == []
    await factory.filled(1)
    factory.has_room = False
    assert factory.pool.take(template("a"), WANTED) is not None
    assert factory.pool.take(template("a"), WANTED) is None
    for _ in range(20):
        await asyncio.sleep(0)
    assert factory.made == ["a"]
    await factory.pool.close()


async def test_what_fails_is_not_tried_at_once_again() -> None:
    factory = Factory(1)
    factory.fail = True
    factory.pool.take(template("a"), WANTED)
    for _ in range(20):
        await asyncio.sleep(0)
    factory.fail = False
    assert factory.pool.take(template("a"), WANTED) is None
    assert factory.made == []
    factory.pool.take(template("b"), WANTED)  # another one is
    await factory.filled(1)
    assert factory.made == ["b"]
    await factory.pool.close()


async def test_none_wait_if_none_are_wanted() -> None:
    factory = Factory(0)
    assert factory.pool.take(template("a"), WANTED) is None
    assert await factory.pool.shed() == 0 and factory.made == []
    await factory.pool.close()


# --- what is still needed ----------------------------------------------------------------------------------------------------


def box(name: str, key: str, disks: tuple[str, ...], memory: str = "") -> BoxState:
    return BoxState(
        sandbox_id=name,
        state="running",
        template=key,
        accel="tcg",
        machine="vm",
        uid=1,
        uid_base=1,
        scratch_bytes=1,
        limits=LIMITS,
        layers=(),
        options=VmOptions(),
        memory=memory,
        disks=disks,
    )


def snapshot(name: str, key: str, disks: tuple[str, ...]) -> SnapshotState:
    vm = VmRecord(state="running", accelerator="tcg", template=key, options=VmOptions())
    record = SnapshotRecord(
        snapshot_id=name, backend="microvm", sandbox_id="sb", memory=True, limits=LIMITS, layers=(), stored_bytes=0, vm=vm
    )
    return SnapshotState(record=record, disks=disks)


def test_what_is_named_stays_and_the_rest_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "TEMPLATES_KEPT", 1)
    store = VmStore(tmp_path)
    store.prepare()
    for key, disks in (("a", ()), ("b", ()), ("c", ()), ("of-s1", ("template-a", "s1"))):
        store.template(key).mkdir()
        write(store.template(key) / "template.json", msgspec.json.encode(template(key, disks)))
        store.disk(f"template-{key}").touch()
    for name in ("s1", "s2", "s3", "new"):
        store.disk(name).touch()
        store.memory(name).mkdir()
    store.box("sb1").mkdir()
    store.write_box(box("sb1", "a", ("template-a", "s1"), memory="s2"))
    store.write_snapshot(snapshot("s3", "a", ("template-a", "s3")))
    assert store.use_template("c") == template("c")
    store.collect(frozenset({"new"}))
    assert {path.stem for path in (tmp_path / "disks").iterdir()} >= {"template-a", "s1", "s3", "new"}
    assert not store.disk("s2").exists() and {path.name for path in (tmp_path / "memory").iterdir()} == {"s2", "s3", "new"}
    assert store.read_template("a") is not None
    assert sum(store.read_template(key) is not None for key in ("b", "c", "of-s1")) == 1
    store.remove_box("sb1")
    store.forget_snapshot("s3")
    store.collect()
    assert {path.name for path in (tmp_path / "memory").iterdir()} == set()
    assert all(path.stem.startswith("template-") for path in (tmp_path / "disks").iterdir())
    assert store.read_template("of-s1") is None
    assert store.collect() == 0


def test_another_version_is_not_read(tmp_path: Path) -> None:
    store = VmStore(tmp_path)
    store.prepare()
    store.box("sb1").mkdir()
    store.write_box(box("sb1", "a", ()))
    path = store.box("sb1") / "box.json"
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))
    assert store.read_box("sb1") is None and store.boxes() == ["sb1"]
