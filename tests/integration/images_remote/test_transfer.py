# SPDX-License-Identifier: Apache-2.0
"""Push and pull over a directory, S3 and the web, when all goes well and when it does not."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, Internal, NotFound, OpenDSecError, Unavailable
from opendsec.api.images import BuildEvent, ImageConfig
from opendsec.images.layers import DATA
from opendsec.images.remote import config, layout
from opendsec.images.remote.config import StoreConfig, Stores
from opendsec.images.remote.retry import Patience
from opendsec.images.remote.store import RemoteStore
from opendsec.images.store import ImageStore
from opendsec.images.transfer import pull_image, push_image
from tests.layers import add_image, add_layer, check_store, content, digest_of, new_store
from tests.services import S3, FaultServer, nginx_server, s3_server

pytestmark = [pytest.mark.usefixtures("obstore_started"), pytest.mark.slow]

PATIENCE = Patience(attempt_s=2.0, deadline_s=6.0, attempts=4, first_pause_s=0.01, longest_pause_s=0.05)
SIZE = 5 << 20
SECRET = "PLANTED-SECRET"


def silent(event: BuildEvent) -> None:
    pass


def opened(name: str, url: str, patience: Patience = PATIENCE, **options: str) -> RemoteStore:
    return config.open_store(StoreConfig(name=name, url=url, writable=True, options=options, patience=patience))


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "remote").mkdir()
    return tmp_path / "remote"


@pytest.fixture
def web(folder: Path) -> Iterator[FaultServer]:
    with FaultServer(folder, writable=True) as server:
        yield server


@pytest.fixture(params=["directory", "web", "s3"])
async def remote(request: pytest.FixtureRequest, folder: Path, web: FaultServer, s3: S3) -> AsyncIterator[RemoteStore]:
    if request.param == "directory":
        store = opened("team", str(folder))
    elif request.param == "web":
        store = opened("team", web.url)
    else:
        store = opened("team", f"{s3.url}/{request.node.name.replace('[', '-').strip(']')}", **s3.options)
    yield store
    await store.close()


@pytest.fixture
def source(tmp_path: Path) -> ImageStore:
    store = new_store(tmp_path / "source")
    add_image(store, "task:1", "base", "workspace", size=SIZE)
    return store


@pytest.fixture
async def pushed(source: ImageStore, folder: Path) -> ImageStore:
    """The image is in the folder, which `web` serves."""
    store = opened("team", str(folder))
    await push_image(source, "task:1", store, progress=silent)
    await store.close()
    return source


@pytest.fixture
async def site(web: FaultServer) -> AsyncIterator[RemoteStore]:
    store = opened("team", web.url)
    yield store
    await store.close()


@pytest.fixture
def here(tmp_path: Path) -> ImageStore:
    return new_store(tmp_path / "here")


def data_of(store: ImageStore, name: str) -> bytes:
    return (store.directory(digest_of(name)) / DATA).read_bytes()


async def test_an_image_goes_there_and_comes_back(source: ImageStore, here: ImageStore, remote: RemoteStore) -> None:
    source.write_trace(digest_of("base"), "start.trace", b"a trace")
    events: list[BuildEvent] = []
    await push_image(source, "task:1", remote, progress=events.append, name="shared/task:2")
    assert (events[-1].kind, events[-1].done_bytes, events[-1].total_bytes, events[-1].what) == ("progress", 2 * SIZE, 2 * SIZE, "2 layers")

    image = await pull_image(here, "shared/task:2", remote, progress=silent, name="mine")
    assert (image.name, image.layers) == ("mine", (digest_of("base"), digest_of("workspace")))
    assert image.config == ImageConfig(env={"IMAGE": "task:1"})
    assert (here.image("mine").source, here.image("mine").notes) == ("store:team/shared/task:2", ("a note",))
    for digest in image.layers:
        origin = here.origin(digest)
        assert origin is not None and origin.stores == ("team",)
        assert await remote.size(origin.key("data.blob")) == SIZE
        assert here.chunk_table(digest) == source.chunk_table(digest)
    assert (here.traces / digest_of("base").replace(":", "-") / "start.trace").read_bytes() == b"a trace"
    check_store(here.root)

    events.clear()
    await pull_image(here, "shared/task:2", remote, progress=events.append, lazy=False)
    assert (events[-1].done_bytes, events[-1].total_bytes) == (2 * SIZE, 2 * SIZE)
    assert [here.origin(digest) for digest in image.layers] == [None, None]
    assert data_of(here, "base") == content("base", SIZE)
    check_store(here.root)
    assert os.listdir(here.partial) == []


async def test_only_what_is_missing_is_sent(pushed: ImageStore, here: ImageStore, web: FaultServer, site: RemoteStore) -> None:
    web.reset()
    await push_image(pushed, "task:1", site, progress=silent)
    assert [request.path for request in web.requests if request.method == "PUT"] == ["/" + layout.image_record("task:1")]
    add_layer(pushed, "toolkit", 1000)
    pushed.name_image("task:2", [digest_of("base"), digest_of("toolkit")], ImageConfig())
    web.reset()
    await push_image(pushed, "task:2", site, progress=silent)
    sent = [request.path.rpartition("/")[2] for request in web.requests if request.method == "PUT"]
    assert sent == [
        "data.blob",
        "data.chunks",
        "meta.erofs.zst",
        "layer.json",
        layout.image_record("task:2").rpartition("/")[2],
    ]  # in this order

    await pull_image(here, "task:1", site, progress=silent, lazy=False)
    web.reset()
    await pull_image(here, "task:2", site, progress=silent, lazy=False)
    assert web.sent_bytes < 10_000


async def test_pushers_at_once_with_different_packings(tmp_path: Path, here: ImageStore, remote: RemoteStore) -> None:
    sources = []
    for number in range(4):
        store = new_store(tmp_path / f"source-{number}")
        add_layer(store, "base", 500_000, packing=f"{number % 2}")
        store.name_image("task", [digest_of("base")], ImageConfig())
        sources.append(store)
    await asyncio.gather(*(push_image(store, "task", remote, progress=silent) for store in sources))
    await pull_image(here, "task", remote, progress=silent, lazy=False)
    assert data_of(here, "base") in {content("base0", 500_000), content("base1", 500_000)}
    check_store(here.root)


async def test_pullers_at_once_fetch_once(pushed: ImageStore, here: ImageStore, web: FaultServer, site: RemoteStore) -> None:
    await asyncio.gather(*(pull_image(here, "task:1", site, progress=silent, name=f"n{i}", lazy=False) for i in range(4)))
    assert sum(request.sent for request in web.requests if request.path.endswith("data.blob")) == 2 * SIZE
    assert len(here.list().images) == 4


async def test_what_is_not_there_is_said(here: ImageStore, folder: Path, web: FaultServer, site: RemoteStore) -> None:
    with pytest.raises(NotFound, match="the store team has no image 'nosuch'") as caught:
        await pull_image(here, "nosuch", site, progress=silent)
    assert caught.value.field == "reference"
    with pytest.raises(NotFound):
        await push_image(here, "nosuch", site, progress=silent)
    assert web.requests[-1].method == "GET"


async def test_an_image_is_passed_on_without_being_here(
    pushed: ImageStore, here: ImageStore, tmp_path: Path, folder: Path, site: RemoteStore
) -> None:
    await pull_image(here, "task:1", site, progress=silent)
    (tmp_path / "other").mkdir()
    other = opened("other", str(tmp_path / "other"))
    with pytest.raises(Conflict, match="is not here, and not in the store"):
        await push_image(here, "task:1", other, progress=silent)
    assert not (tmp_path / "other" / "images").exists()
    stores = Stores({"team": StoreConfig(name="team", url=str(folder))})
    await push_image(here, "task:1", other, progress=silent, stores=stores)
    third = new_store(tmp_path / "third")
    await pull_image(third, "task:1", other, progress=silent, lazy=False)
    assert data_of(third, "workspace") == content("workspace", SIZE)
    await stores.close()
    await other.close()


async def test_a_second_store_is_remembered(pushed: ImageStore, here: ImageStore, folder: Path, site: RemoteStore, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "mirror")
    mirror = opened("mirror", str(tmp_path / "mirror"))
    for store in (site, mirror, mirror, site):
        await pull_image(here, "task:1", store, progress=silent)
    for digest in here.image("task:1").layers:
        origin = here.origin(digest)
        assert origin is not None and origin.stores == ("team", "mirror")
    await mirror.close()


# --- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["status", "cut", "wrong", "short", "drop"])
async def test_faults_that_pass_are_got_over(pushed: ImageStore, here: ImageStore, web: FaultServer, site: RemoteStore, kind: str) -> None:
    web.fail(kind, match="data.blob", times=2)  # type: ignore[arg-type]
    web.fail(kind, match="layer.json", times=1)  # type: ignore[arg-type]
    await pull_image(here, "task:1", site, progress=silent, lazy=False)
    check_store(here.root)
    assert data_of(here, "base") == content("base", SIZE)


@pytest.mark.parametrize(
    ("kind", "match", "error", "message"),
    [
        ("status", "data.blob", Unavailable, "it answered with status 503"),
        ("cut", "data.blob", Unavailable, "cut short"),
        ("wrong", "data.blob", Internal, r"chunk \d+ does not match its checksum"),
        ("short", "data.blob", Internal, "not the range that was asked for"),
        ("drop", "data.blob", Unavailable, "cannot be reached"),
        ("wrong", "data.chunks", Internal, "data.chunks does not match its checksum"),
        ("wrong", "meta.erofs.zst", Internal, "the layer's"),
        ("wrong", "layer.json", Internal, "the layer's record"),
        ("wrong", "images/", Internal, "the image's record"),
        ("status", "images/", Unavailable, "503"),
    ],
)
async def test_faults_that_stay_leave_nothing_behind(
    pushed: ImageStore, here: ImageStore, web: FaultServer, site: RemoteStore, kind: str, match: str, error: type[Exception], message: str
) -> None:
    web.fail(kind, match=match)  # type: ignore[arg-type]
    with pytest.raises(error, match=message) as caught:
        await pull_image(here, "task:1", site, progress=silent, lazy=False)
    assert isinstance(caught.value, OpenDSecError) and caught.value.data["store"] == "team"
    assert check_store(here.root).list().images == ()
    web.heal()
    await pull_image(here, "task:1", site, progress=silent, lazy=False)
    check_store(here.root)


@pytest.mark.parametrize("stalls", [1, 1000])
async def test_a_stall_is_an_answer_that_does_not_come(pushed: ImageStore, here: ImageStore, web: FaultServer, stalls: int) -> None:
    site = opened("team", web.url, Patience(attempt_s=0.5, deadline_s=1.5, first_pause_s=0.01))
    web.fail("stall", match="data.blob", times=stalls)
    began = time.monotonic()
    if stalls == 1:
        await pull_image(here, "task:1", site, progress=silent, lazy=False)
    else:
        with pytest.raises(Unavailable, match="no answer"):
            await pull_image(here, "task:1", site, progress=silent, lazy=False)
    assert time.monotonic() - began < 20
    check_store(here.root)
    await site.close()


async def test_a_pull_that_was_cut_short_goes_on(pushed: ImageStore, here: ImageStore, web: FaultServer, site: RemoteStore) -> None:
    web.fail("status", match="data.blob", after=4)
    with pytest.raises(Unavailable):
        await pull_image(here, "task:1", site, progress=silent, lazy=False)
    before = sum(request.sent for request in web.requests if request.path.endswith("data.blob"))
    assert before > 0
    web.heal()
    web.reset()
    await pull_image(new_store(here.root), "task:1", site, progress=silent, lazy=False)
    again = sum(request.sent for request in web.requests if request.path.endswith("data.blob"))
    assert again <= 2 * SIZE - before + 200
    check_store(here.root)
    assert os.listdir(here.partial) == []


async def test_damaged_partial_data_is_fetched_again(pushed: ImageStore, here: ImageStore, web: FaultServer, site: RemoteStore) -> None:
    web.fail("status", match="data.blob", after=4)
    with pytest.raises(Unavailable):
        await pull_image(here, "task:1", site, progress=silent, lazy=False)
    web.heal()
    for path in here.partial.iterdir():
        with open(path, "r+b") as file:
            file.write(b"wrong")
            file.truncate(SIZE // 2)
    await pull_image(here, "task:1", site, progress=silent, lazy=False)
    check_store(here.root)


async def test_a_cancelled_pull_leaves_nothing_half_made(pushed: ImageStore, here: ImageStore, web: FaultServer, site: RemoteStore) -> None:
    gate = web.hold("data.blob")
    task = asyncio.ensure_future(pull_image(here, "task:1", site, progress=silent, lazy=False))
    await asyncio.to_thread(gate.wait_arrived)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert os.listdir(here.root / "tmp") == []
    web.let_go()
    await pull_image(here, "task:1", site, progress=silent, lazy=False)
    check_store(here.root)


async def test_a_store_that_lacks_what_it_names_is_damaged(pushed: ImageStore, here: ImageStore, folder: Path, site: RemoteStore) -> None:
    (data,) = folder.glob(f"layers/{digest_of('base').replace(':', '-')}/*/data.blob")
    os.truncate(data, 5)
    with pytest.raises(Internal, match="has not the size its record says"):
        await pull_image(here, "task:1", site, progress=silent)
    data.unlink()
    with pytest.raises(NotFound, match="there is no such object"):
        await pull_image(here, "task:1", site, progress=silent)
    await push_image(pushed, "task:1", site, progress=silent)  # a push mends it
    await pull_image(here, "task:1", site, progress=silent, lazy=False)


async def closed(store: RemoteStore) -> None:
    """And its threads at an end: a call that was given up on, because another had failed, may still be looking up."""
    await store.close()
    for thread in threading.enumerate():
        if thread.name == f"store {store.name}":
            await asyncio.to_thread(thread.join, 30)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


async def test_a_full_disk_here(pushed: ImageStore, tmp_path: Path, site: RemoteStore) -> None:
    with small_disk(tmp_path / "small", "6m") as disk:
        store = new_store(disk / "images")
        with pytest.raises(Unavailable, match="no space left on this machine"):
            await pull_image(store, "task:1", site, progress=silent, lazy=False)
        assert os.listdir(store.partial) == []
        check_store(store.root)
        await pull_image(store, "task:1", site, progress=silent, lazy=True)  # which needs next to nothing
        check_store(store.root)


async def test_a_full_disk_there(source: ImageStore, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "6m") as disk:
        remote = opened("team", str(disk))
        with pytest.raises(Unavailable, match=r"store team: .*data\.blob: no space left") as caught:
            await push_image(source, "task:1", remote, progress=silent)
        assert caught.value.data["kind"] == "full"
        assert not (disk / "images").exists()
        await closed(remote)
        assert os.listdir(disk / ".tmp") == []
        remote = opened("team", str(disk))
        add_image(source, "little", "little", size=1000)
        await push_image(source, "little", remote, progress=silent)
        await closed(remote)


# --- secrets -------------------------------------------------------------------------------------------------------


async def test_secrets_stay_where_they_are(
    pushed: ImageStore, here: ImageStore, web: FaultServer, s3: S3, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever goes wrong, what can be seen of it has no credentials in it."""
    caplog.set_level(logging.DEBUG)
    host = web.url.removeprefix("http://")
    stores = [
        opened("team", f"http://user:{SECRET}@{host}"),
        opened("team", web.url, authorization=f"Bearer {SECRET}"),
        opened("team", "http://127.0.0.1:1", authorization=f"Bearer {SECRET}"),
        opened("team", f"http://user:{SECRET}@127.0.0.1:1"),
        opened("team", "s3://images", endpoint="http://127.0.0.1:1", region="x", access_key_id=f"{SECRET}-id", secret_access_key=SECRET),
        opened("team", "s3://nosuch", endpoint=s3.endpoint, region="x", access_key_id=f"{SECRET}-id", secret_access_key=SECRET),
        opened("team", "s3://images", endpoint=web.url, region="x", access_key_id=f"{SECRET}-id", secret_access_key=SECRET),
    ]
    seen = []
    for status in (401, 403, 404, 500, 503):
        web.fail("status", status=status)
        for method in ("PUT", "HEAD"):
            web.fail("status", status=status, method=method)
        for store in stores:
            events: list[BuildEvent] = []
            tell = events.append
            for work in (pull_image(here, "task:1", store, progress=tell), push_image(pushed, "task:1", store, progress=tell)):
                try:
                    await work
                except OpenDSecError as error:
                    seen += [str(error), repr(error), repr(error.body()), repr(vars(error)), repr(events)]
                    seen += [*traceback.format_exception(error), *_chain(error)]
        web.heal()
    assert len(seen) > 200
    assert any(SECRET in request.authorization for request in web.requests)  # they were used
    for store in stores:
        await store.close()
    shown = "".join(seen) + caplog.text + "".join(capfd.readouterr())
    assert SECRET not in shown
    for file in here.root.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()


def _chain(error: BaseException) -> list[str]:
    """What a logger that ignores `from None` would find."""
    found = []
    while (context := error.__cause__ or error.__context__) is not None:
        found.append(repr(context))
        error = context
    return found


# --- a real server -------------------------------------------------------------------------------------------------


async def test_nginx_behind_a_slow_line(pushed: ImageStore, here: ImageStore, folder: Path) -> None:
    with nginx_server(folder, latency_ms=20, rate_mbit=1000) as nginx:
        site = opened("team", nginx.url)
        await pull_image(here, "task:1", site, progress=silent)
        lazily = nginx.counts()
        assert lazily.sent_bytes < SIZE / 20
        await pull_image(here, "task:1", site, progress=silent, lazy=False)
        whole = nginx.counts()
        assert 2 * SIZE < whole.sent_bytes - lazily.sent_bytes < 2.05 * SIZE
        assert whole.requests - lazily.requests < 12
        check_store(here.root)
        await site.close()
