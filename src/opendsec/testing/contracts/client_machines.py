# SPDX-License-Identifier: Apache-2.0
"""What the SDK can do with machines: pause, resume, fork, snapshots. Named checks as in `client`, for a setup whose kind is a machine.

They need of an image what those of `client` need, and a /dev/shm that is memory: a snapshot without memory does not have what is there.
Of a fake they ask no more than it can: no process is expected to live on in a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, OpenDSecError, SandboxLost
from opendsec.api.spec import Container, MicroVM
from opendsec.client.aio import Client, Sandbox
from opendsec.testing.contracts.client import INODES, WORK, Setup

Check = Callable[[Setup], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def machine(setup: Setup, **fields: object) -> MicroVM:
    return MicroVM(**{"image": setup.image, "memory": setup.memory, "disk": setup.disk, "inodes": INODES, **fields})  # type: ignore[arg-type]


async def marked(setup: Setup, client: Client, **fields: object) -> Sandbox:
    """With something on its disk and something in its memory."""
    box = await client.create(machine(setup, **fields))
    await box.files.write(f"{WORK}/disk", "disk", parents=True)
    await box.files.write("/dev/shm/memory", "memory")
    return box


async def state(box: Sandbox) -> str:
    return (await box.refresh()).state


def made(slots: list[Sandbox | OpenDSecError]) -> list[Sandbox]:
    for slot in slots:
        assert isinstance(slot, Sandbox), slot
    return [slot for slot in slots if isinstance(slot, Sandbox)]


@check
async def a_paused_sandbox_is_resumed_by_what_needs_it(setup: Setup) -> None:
    async with setup.client() as client, await marked(setup, client) as box:
        assert (await box.pause()).state == "paused"
        assert (await box.pause()).state == "paused"
        assert await state(box) == "paused" and (await box.usage()).memory_bytes == 0
        assert await box.processes() == () and await state(box) == "paused"
        assert (await box.resume()).state == "running"
        assert (await box.resume()).state == "running"
        for need in (lambda: box.run("true"), lambda: box.files.stat("/"), lambda: box.session(), lambda: box.start("true")):
            await box.pause()
            await need()
            assert await state(box) == "running"
        assert await box.files.read("/dev/shm/memory") == "memory"


@check
async def commands_and_sessions_go_on_after_a_pause(setup: Setup) -> None:
    async with setup.client() as client, await marked(setup, client) as box:
        shell = await box.session(cwd=WORK)
        await shell.run("kept=yes")
        process = await box.start("read line; echo got $line", stdin_stream=True)
        waiting = asyncio.ensure_future(process.wait())
        await box.pause()
        await box.resume()
        await process.write("it\n")
        assert (await waiting).check().stdout == "got it\n"
        assert (await shell.run("echo $kept")).stdout == "yes\n"


@check
async def what_is_killed_while_paused_has_ended(setup: Setup) -> None:
    async with setup.client() as client:
        box = await marked(setup, client)
        await box.pause()
        await box.kill()
        assert box.info is not None and box.info.state == "stopped"
        for need in (box.run("true"), box.pause(), box.fork(), box.snapshot()):
            try:
                await need
            except (Conflict, NotFound, SandboxLost):
                continue
            raise AssertionError("it goes on after its end")


@check
async def forks_have_what_it_had_and_lives_of_their_own(setup: Setup) -> None:
    async with setup.client() as client, await marked(setup, client, labels={"a": "b"}) as box:
        forks = made(await box.fork(2, action_id=f"fork-{box.id}"))
        again = made(await box.fork(2, action_id=f"fork-{box.id}"))
        assert [one.id for one in forks] == [one.id for one in again]
        try:
            for one in forks:
                info = await one.refresh()
                assert (info.state, info.origin, info.labels) == ("running", box.id, {"a": "b"})
                assert await one.files.read(f"{WORK}/disk") == "disk" and await one.files.read("/dev/shm/memory") == "memory"
            await forks[0].files.write(f"{WORK}/disk", "other")
            await box.files.write(f"{WORK}/disk", "its own")
            assert [await one.files.read(f"{WORK}/disk") for one in (box, *forks)] == ["its own", "other", "disk"]
            (grandchild,) = made(await forks[0].fork())
            async with grandchild:
                assert await grandchild.files.read(f"{WORK}/disk") == "other"
        finally:
            await asyncio.gather(*(one.kill() for one in forks))
        assert (await box.run("echo on")).stdout == "on\n"


@check
async def snapshots_are_kept_by_name_and_made_into_sandboxes(setup: Setup) -> None:
    async with setup.client() as client:
        async with await marked(setup, client) as box:
            name = f"both-{box.id[3:]}"
            both = await box.snapshot(name)
            assert (both.name, both.memory, both.sandbox_id) == (name, True, box.id)
            disk = await box.snapshot(memory=False)
            assert disk.name == disk.id and not disk.memory
            try:
                await box.snapshot(name)
            except Conflict as error:
                assert error.field == "name"
            else:
                raise AssertionError("a name was given twice")
            await box.files.write(f"{WORK}/disk", "later")
        try:
            assert both.id in [one.id for one in await client.snapshots.list()]
            assert (await client.snapshots.get(disk.id)).stored_bytes > 0
            assert isinstance(both.spec, MicroVM)
            async with await client.create(both.spec) as copy:
                assert copy.info is not None and copy.info.origin == both.id
                assert await copy.files.read(f"{WORK}/disk") == "disk" and await copy.files.read("/dev/shm/memory") == "memory"
            async with await client.create(machine(setup, snapshot=disk.name)) as copy:
                assert await copy.files.read(f"{WORK}/disk") == "disk" and not await copy.files.exists("/dev/shm/memory")
                assert (await copy.run("echo on")).stdout == "on\n"
        finally:
            for one in (both, disk):
                await client.snapshots.remove(one.name)
        try:
            await client.create(machine(setup, snapshot=name))
        except NotFound as error:
            assert error.field == "snapshot"
        else:
            raise AssertionError("a removed snapshot was used")


@check
async def what_does_not_fit_a_snapshot_is_refused(setup: Setup) -> None:
    async with setup.client() as client, await marked(setup, client) as box:
        kept = await box.snapshot()
        try:
            await client.create(machine(setup, snapshot=kept.name, memory="256MiB"))
        except InvalidRequest as error:
            assert error.field == "memory"
        else:
            raise AssertionError("a machine of another size was made of a snapshot")
        finally:
            await client.snapshots.remove(kept.name)


@check
async def ten_pauses_lose_nothing(setup: Setup) -> None:
    async with setup.client() as client, await marked(setup, client) as box:
        for number in range(10):
            await box.files.append(f"{WORK}/log", f"{number}\n")
            await box.files.append("/dev/shm/log", f"{number}\n")
            await box.pause()
        expected = "".join(f"{number}\n" for number in range(10))
        assert await box.files.read(f"{WORK}/log") == expected == await box.files.read("/dev/shm/log")


@check
async def containers_say_that_they_cannot(setup: Setup) -> None:
    from opendsec.api.errors import Unsupported

    async with setup.client() as client, await client.create(Container(image=setup.image, memory=setup.memory, disk=setup.disk)) as box:
        for cannot in (box.pause(), box.fork(2), box.snapshot(), box.screen.png(), box.keyboard.press("enter")):
            try:
                await cannot
            except Unsupported:
                continue
            raise AssertionError("a container did what only machines can")
        assert await state(box) == "running"
