# SPDX-License-Identifier: Apache-2.0
"""Loading on demand as callers of an edge see it: each mechanism, restarts, stores that die, a loader that is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import opendsec as od
from opendsec.api.sandboxes import Event
from opendsec.kernel import procfs
from tests.edges import EdgeProcess
from tests.images import BASE
from tests.services import FaultServer

pytestmark = pytest.mark.slow
REFERENCE = f"store:depot/{BASE}"
COMMAND = ["python3", "-c", "import json; print(6 * 7)"]


@pytest.fixture(scope="module")
def remote(test_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that holds the image."""
    folder = tmp_path_factory.mktemp("depot")

    async def push() -> None:
        async with edge_of(folder, images=test_images, writable=True) as edge, edge.client() as client:
            await client.images.push(BASE, REFERENCE)

    asyncio.run(push())
    return folder


@asynccontextmanager
async def edge_of(url: str | Path, *arguments: str, images: Path | None = None, writable: bool = False) -> AsyncIterator[EdgeProcess]:
    text = f'[[store]]\nname = "depot"\nurl = "{url}"\nwritable = {str(writable).lower()}\nattempt_s = 1.0\ndeadline_s = 2.0\n'
    edge = EdgeProcess(images, ["--scratch-size", "512MiB", *arguments], stores=text)
    try:
        edge.start()
        yield edge
    finally:
        await asyncio.to_thread(edge.remove)


async def wait_event(client: od.Client, kind: str) -> Event:
    async with asyncio.timeout(60):
        async for event in client.events(follow=True):
            if event.kind == kind:
                return event
    raise AssertionError(f"no {kind}")


@pytest.mark.parametrize("mechanism", ["fanotify", "fuse", "eager"])
async def test_a_cold_image_runs(mechanism: str, remote: Path) -> None:
    async with edge_of(remote, "--lazy", mechanism) as edge, edge.client() as client:
        found = {one.name: one for one in (await client.capabilities()).features}["image_loading"]
        assert found.present == (mechanism != "eager") and found.reason.startswith("forced")
        image = await client.images.pull(REFERENCE)
        detail = (await client.images.inspect(BASE)).layers[0]
        assert detail.origin == "depot" and detail.chunks > 100 and not detail.complete
        async with await client.create(od.Container(image=BASE)) as box:
            assert (await box.run(COMMAND, check=True)).stdout == "42\n"
            detail = (await client.images.inspect(BASE)).layers[0]
            if mechanism == "eager":
                assert detail.complete
            else:
                assert 0 < detail.local_bytes < image.size_bytes / 2
            await client.images.warm(BASE)
            assert (await client.images.inspect(BASE)).layers[0].complete
            assert (await client.images.verify(BASE)).findings == ()


async def test_a_trace_travels_with_its_image(remote: Path) -> None:
    async with edge_of(remote, writable=True) as edge, edge.client() as client:
        await client.images.pull(REFERENCE)
        traced = await client.images.trace(BASE, COMMAND)
        assert traced.exit_code == 0 and traced.chunks > 10
        for argv, timeout_s, field in ((["/nosuch"], 60.0, "argv"), (["sleep", "60"], 0.2, "timeout_s")):
            with pytest.raises(od.InvalidRequest, match="nothing was kept") as caught:
                await client.images.trace(BASE, argv, timeout_s=timeout_s)
            assert caught.value.field == field
        assert (await client.images.inspect(BASE)).layers[0].traces == 1
        await client.images.push(BASE, f"store:depot/{BASE}-traced")
        assert (await client.list()) == []
    async with edge_of(remote) as edge, edge.client() as client:
        await client.images.pull(f"store:depot/{BASE}-traced")
        assert (await client.images.inspect(f"{BASE}-traced")).layers[0].traces == 1
        await client.images.warm(f"{BASE}-traced", trace=True)
        detail = (await client.images.inspect(f"{BASE}-traced")).layers[0]
        assert detail.local_bytes >= traced.bytes and not detail.complete


async def test_a_restarted_edge_goes_on_loading(remote: Path) -> None:
    async with edge_of(remote) as edge:
        async with edge.client() as client:
            await client.images.pull(REFERENCE)
            box = await client.create(od.Container(image=BASE))
            await box.run("true", check=True)
        edge.kill()
        edge.start()
        async with edge.client() as client:
            box = await client.get(box.id)
            assert (await box.run(COMMAND, check=True)).stdout == "42\n"
            await box.kill()


async def test_a_dead_store_is_an_error_inside_and_an_event_outside(remote: Path) -> None:
    with FaultServer(remote) as web:
        async with edge_of(web.url) as edge, edge.client() as client:
            await client.images.pull(REFERENCE)
            async with await client.create(od.Container(image=BASE)) as box:
                await box.run("true", check=True)
                web.fail("status")
                result = await box.run(COMMAND, timeout_s=60)
                assert result.outcome in ("exited", "signalled", "not_started") and result.exit_code != 0
                event = await wait_event(client, "layer.fetch_failed")
                assert str(event.data["digest"]).startswith("sha256:")
                web.heal()
                async with asyncio.timeout(30):  # a failure is remembered for a moment
                    while (await box.run(COMMAND, timeout_s=60)).stdout != "42\n":
                        pass


async def test_sandboxes_that_nobody_guarded_are_lost(remote: Path) -> None:
    async with edge_of(remote) as edge:
        async with edge.client() as client:
            await client.images.pull(REFERENCE)
            box = await client.create(od.Container(image=BASE))
            await box.run("true", check=True)
        edge.kill()
        kill_family(edge.state_dir)
        edge.start()
        async with edge.client() as client:
            lost = await wait_event(client, "layer.lost")
            assert str(lost.data["digest"]).startswith("sha256:")
            assert (await wait_event(client, "sandbox.lost")).sandbox_id == box.id
            with pytest.raises(od.SandboxLost):
                await (await client.get(box.id)).run("true")
            async with await client.create(od.Container(image=BASE)) as another:
                assert (await another.run(COMMAND, check=True)).stdout == "42\n"


def kill_family(state_dir: Path) -> None:
    """All of the loader's processes at once, as nothing but an operator or the kernel out of memory would do it."""
    mark = os.fsencode(state_dir)
    family = [pid for pid in procfs.pids() if b"opendsec.images.lazy.keeper" in (line := cmdline(pid)) and mark in line]
    assert family
    pidfds = [os.pidfd_open(pid) for pid in family]
    for pid in family:
        os.kill(pid, signal.SIGSTOP)  # so that none replaces another
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    for pidfd in pidfds:
        os.close(pidfd)


def cmdline(pid: int) -> bytes:
    try:
        return procfs.read(procfs.path_of(pid, "cmdline"))
    except OSError:
        return b""
