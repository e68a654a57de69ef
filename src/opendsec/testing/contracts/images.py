# SPDX-License-Identifier: Apache-2.0
"""The contract of images that come and go, through the SDK: named checks over a factory of clients.

    @pytest.mark.parametrize("name", images.CHECKS)
    async def test_images(name, tmp_path):
        await images.CHECKS[name](images.Setup(make=lambda: Client(address), image="debian", store="depot", folder=tmp_path))

The edge has a writable remote store of that name, and an image with /bin/sh. Checks leave names behind that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from opendsec.api.errors import Conflict, NotFound
from opendsec.api.images import BuildEvent
from opendsec.api.spec import Container
from opendsec.client._core import new_action_id
from opendsec.testing.contracts import client as base
from opendsec.testing.contracts.client import WORK


@dataclass(frozen=True)
class Setup(base.Setup):
    """What a check works on. `folder`: an empty directory that client and edge both see."""

    store: str = "depot"
    folder: Path = Path("/nonexistent")


Check = Callable[[Setup], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


@check
async def shows_what_an_image_is_made_of(setup: Setup) -> None:
    async with setup.client() as client:
        found = await client.images.inspect(setup.image)
        assert found.image.name == setup.image
        for detail in found.layers:
            assert 0 <= detail.local_bytes <= max(detail.layer.data_bytes, 1)
        try:
            await client.images.inspect("no-such-image")
        except NotFound as error:
            assert error.field == "name"
        else:
            raise AssertionError("found what is not there")


@check
async def names_its_stores_without_secrets(setup: Setup) -> None:
    async with setup.client() as client:
        stores = {store.name: store for store in await client.images.stores()}
        assert stores[setup.store].writable and "@" not in stores[setup.store].url


@check
async def pushes_to_a_store_and_pulls_again(setup: Setup) -> None:
    async with setup.client() as client:
        told: list[BuildEvent] = []
        sent = await client.images.push(setup.image, f"store:{setup.store}/there:1", progress=told.append)
        assert sent.name == setup.image and told[-1].kind == "done"
        came = await client.images.pull(f"store:{setup.store}/there:1", progress=told.append)
        assert came.name == "there:1" and came.layers == sent.layers and came.config == sent.config
        other = await client.images.pull(f"store:{setup.store}/there:1", name="other")
        assert other.name == "other"
        for reference in (f"store:{setup.store}/never-pushed", "store:no-such-store/x"):
            try:
                await client.images.pull(reference)
            except NotFound:
                pass
            else:
                raise AssertionError(f"pulled {reference}")
        await client.images.warm("there:1")
        for name in ("there:1", "other"):
            await client.images.remove(name)


@check
async def pushes_to_a_layout_and_pulls_again(setup: Setup) -> None:
    async with setup.client() as client:
        reference = f"oci:{setup.folder}/layout:v1"
        await client.images.push(setup.image, reference)
        came = await client.images.pull(reference, name="from-layout")
        assert came.name == "from-layout"
        async with await client.create(Container(image="from-layout", memory=setup.memory, disk=setup.disk)) as box:
            assert (await box.run("echo $((6 * 7))")).stdout == "42\n"
        await client.images.remove("from-layout")


@check
async def packs_a_sandbox_that_goes_on(setup: Setup) -> None:
    async with setup.client() as client, await client.create(setup.spec()) as box:
        await box.files.mkdir(WORK, parents=True)
        await box.files.write(f"{WORK}/made", "here\n")
        before = {detail.layer.digest for detail in (await client.images.inspect(setup.image)).layers}
        packed = await box.pack("made@1", action_id=(action := new_action_id()))
        assert packed.image.name == "made:1" and "workspace:made@1" in packed.layer.names
        assert packed.image.layers[-1] == packed.layer.digest and packed.layer.digest not in before
        assert (await box.pack("made@1", action_id=action)) == packed
        try:
            await box.pack("other@1", action_id=action)
        except Conflict as error:
            assert error.field == "action_id"
        else:
            raise AssertionError("one action id for two packs")
        assert (await box.run("echo on")).stdout == "on\n"
        assert "made:1" in [image.name for image in (await client.images.list()).images]
        await box.kill()
        assert (await box.pack("made@1", action_id=action)) == packed
        await client.images.lint("workspace:made@1", packages=["astropy"])
        assert (await client.images.verify("workspace:made@1")).findings == ()
        await client.images.remove("made:1")


@check
async def tells_how_two_images_differ(setup: Setup) -> None:
    async with setup.client() as client, await client.create(setup.spec()) as box:
        await box.files.mkdir(WORK, parents=True)
        await box.files.write(f"{WORK}/made", "differs\n")
        await box.pack("differs@1")
        found = await client.images.diff(setup.image, "differs:1")
        assert any(entry.change == "added" for entry in found.entries)
        assert (await client.images.diff("differs:1", "differs:1")).entries == ()
        await client.images.remove("differs:1")


@check
async def records_a_trace(setup: Setup) -> None:
    async with setup.client() as client:
        traced = await client.images.trace(setup.image, ["/bin/sh", "-c", "exit 0"], timeout_s=30)
        assert traced.name == setup.image and traced.exit_code == 0 and traced.bytes >= traced.chunks >= 0


@check
async def collects_with_a_grace_period(setup: Setup) -> None:
    async with setup.client() as client:
        assert (await client.images.gc(dry_run=True, grace_s=3600)).dry_run
        assert (await client.images.gc(grace_s=3600.0)).digests == ()
