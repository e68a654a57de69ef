# SPDX-License-Identifier: Apache-2.0
"""A registry, and one that fails."""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, Unauthorized, Unavailable
from opendsec.api.images import BuildEvent, ImageInfo, PullRequest, PushRequest
from opendsec.images.oci.pull import pull
from opendsec.images.oci.push import push
from opendsec.images.store import ImageStore
from tests.integration.oci.conftest import mounted
from tests.integration.oci.corpus import BASE, CASES
from tests.integration.oci.trees import look
from tests.oci_layouts import Image, Layout, archive, entry, layout, sha256
from tests.registry import Fault, Proxy, skopeo_copy

pytestmark = pytest.mark.slow

NOISE = [archive(entry(f"n{number}", random.Random(number).randbytes(3 << 19))) for number in range(3)]


@pytest.fixture
async def proxy(registry: str) -> AsyncIterator[Proxy]:
    async with Proxy(registry) as made:
        yield made


@pytest.fixture
def repository(registry: str, tmp_path: Path) -> str:
    """NAME:TAG of an image of three large layers, in the registry."""
    name = f"test/{uuid.uuid4().hex}:1"
    layout(tmp_path / "source", *NOISE, config={"Env": ["A=b"]})
    skopeo_copy(f"oci:{tmp_path}/source:latest", f"docker://{registry}/{name}")
    return name


async def get(store: ImageStore, reference: str, events: list[BuildEvent] | None = None, **more: object) -> ImageInfo:
    request = PullRequest(reference=reference, tls_verify=False, **{"name": "image", **more})  # type: ignore[arg-type]
    return await pull(
        store, request, progress=(events if events is not None else []).append, allow_host_paths=False, stall_s=1.0, retries=1
    )


async def send(store: ImageStore, name: str, reference: str, **more: object) -> None:
    request = PushRequest(name=name, reference=reference, tls_verify=False, **more)  # type: ignore[arg-type]
    await push(store, request, progress=lambda event: None, allow_host_paths=True, retries=1)


async def test_pull(store: ImageStore, proxy: Proxy, repository: str) -> None:
    events: list[BuildEvent] = []
    image = await get(store, f"docker://{proxy.address}/{repository}", events, name="")
    assert image.name == repository
    assert image.config.env == {"A": "b"}
    assert len(image.layers) == 3
    assert store.image(repository).source.startswith(f"docker://{proxy.address}/{repository}@sha256:")
    assert [event.message for event in events if event.kind == "step"][:2] == ["resolving", "fetching 3 of 3 layers"]
    fetched = [event for event in events if event.what == "checking"]
    assert fetched[-1].done_bytes == fetched[-1].total_bytes > 3 * (3 << 19)


async def test_what_is_here_is_not_fetched(store: ImageStore, proxy: Proxy, registry: str, repository: str, tmp_path: Path) -> None:
    await get(store, f"docker://{proxy.address}/{repository}")
    layout(tmp_path / "next", NOISE[0], NOISE[1], archive(entry("other", random.Random(9).randbytes(3 << 19))))
    name = f"test/{uuid.uuid4().hex}"
    skopeo_copy(f"oci:{tmp_path}/next:latest", f"docker://{registry}/{name}:2")
    proxy.requests.clear()
    proxy.sent = 0
    await get(store, f"docker://{proxy.address}/{name}:2")
    assert proxy.sent < 2 * (3 << 19)
    proxy.sent = 0
    await get(store, f"docker://{proxy.address}/{name}:2")
    assert proxy.sent < 10_000


async def test_by_digest(store: ImageStore, registry: str, repository: str) -> None:
    image = await get(store, f"docker://{registry}/{repository}")
    digest = store.image("image").source.rpartition("@")[2]
    assert (await get(store, f"docker://{registry}/{repository.partition(':')[0]}@{digest}")).layers == image.layers
    with pytest.raises(NotFound):
        await get(store, f"docker://{registry}/{repository.partition(':')[0]}@sha256:{'0' * 64}")


async def test_indexes_and_docker_manifests(store: ImageStore, registry: str, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    made.add(made.nested([made.manifest(Image(layers=[BASE], architecture="s390x")), made.manifest(Image(layers=[BASE, NOISE[0]]))]), "all")
    name = f"test/{uuid.uuid4().hex}"
    skopeo_copy(f"oci:{tmp_path}/layout:all", f"docker://{registry}/{name}:all")
    assert len((await get(store, f"docker://{registry}/{name}:all")).layers) == 2
    assert len((await get(store, f"docker://{registry}/{name}:all", platform="linux/s390x")).layers) == 1
    with pytest.raises(NotFound, match=r"not there for linux/riscv64; there is: linux/\w+, linux/\w+"):
        await get(store, f"docker://{registry}/{name}:all", platform="linux/riscv64")
    options = ["--insecure-policy", "copy", "--quiet", "--format=v2s2", "--dest-tls-verify=false", "--src-tls-verify=false"]
    source, target = f"docker://{registry}/{name}:all", f"docker://{registry}/{name}:docker"
    subprocess.run(["skopeo", *options, source, target], check=True, timeout=60, capture_output=True)
    assert len((await get(store, f"docker://{registry}/{name}:docker")).layers) == 2


async def test_layers_that_are_not_packed(store: ImageStore, registry: str, tmp_path: Path) -> None:
    layout(tmp_path / "layout", BASE, NOISE[0], pack="none")
    name = f"test/{uuid.uuid4().hex}:1"
    options = ["--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
    subprocess.run(["skopeo", *options, f"oci:{tmp_path}/layout:latest", f"docker://{registry}/{name}"], check=True, timeout=60)
    assert len((await get(store, f"docker://{registry}/{name}")).layers) == 2


async def test_credentials(store: ImageStore, proxy: Proxy, repository: str) -> None:
    proxy.password = "user:a secret"
    reference = f"docker://{proxy.address}/{repository}"
    for token in ("", "user:wrong secret", "justatoken"):
        with pytest.raises(Unauthorized) as caught:
            await get(store, reference, token=token)
        assert "secret" not in str(caught.value) and "justatoken" not in str(caught.value)
        assert caught.value.field == "token"
    await get(store, reference, token=proxy.password)
    assert "secret" not in store.image("image").source


async def test_no_credentials_on_a_command_line(store: ImageStore, proxy: Proxy, repository: str) -> None:
    proxy.password = "user:hunter2"
    proxy.faults.append(Fault("stall"))
    task = asyncio.ensure_future(get(store, f"docker://{proxy.address}/{repository}", token=proxy.password))
    await proxy.stalled.wait()
    lines = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            lines.append((place / "cmdline").read_bytes() + (place / "environ").read_bytes())
        except OSError:
            continue  # it has ended
    assert any(b"skopeo" in line and proxy.address.encode() in line for line in lines)
    assert not any(b"hunter2" in line for line in lines)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_full_disk(small_disk: Path, proxy: Proxy, repository: str) -> None:
    """Told at once: nothing is fetched again for it."""
    store = ImageStore(small_disk / "store")
    store.prepare()
    with pytest.raises(Unavailable, match="no space left"):
        await get(store, f"docker://{proxy.address}/{repository}")
    assert not list((store.root / "tmp").iterdir())
    assert len(proxy.blobs()) <= 4


async def test_killed(store: ImageStore, proxy: Proxy, repository: str) -> None:
    """All that a pull started ends with the process that asked for it, however that ends; the next one to come clears up."""
    proxy.faults.append(Fault("stall"))
    program = (
        "import asyncio, sys; from pathlib import Path; from opendsec.api.images import PullRequest\n"
        "from opendsec.images.oci.pull import pull; from opendsec.images.store import ImageStore\n"
        "request = PullRequest(reference=sys.argv[2], name='image', tls_verify=False)\n"
        "asyncio.run(pull(ImageStore(Path(sys.argv[1])), request, progress=lambda event: None, allow_host_paths=False))"
    )
    command = [sys.executable, "-c", program, str(store.root), f"docker://{proxy.address}/{repository}"]
    process = await asyncio.create_subprocess_exec(*command)
    await proxy.stalled.wait()
    (work,) = (store.root / "tmp").iterdir()
    fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
        await process.wait()
        await asyncio.wait_for(asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX), 20)  # nothing holds the workspace any more
    finally:
        os.close(fd)
    store.prepare()
    assert not list((store.root / "tmp").iterdir())
    proxy.faults.clear()
    await get(store, f"docker://{proxy.address}/{repository}")


async def test_nobody_there(store: ImageStore) -> None:
    with pytest.raises(Unavailable, match=r"registry 127\.0\.0\.1:9"):
        await get(store, "docker://127.0.0.1:9/name:1")


async def test_no_such_image(store: ImageStore, registry: str) -> None:
    with pytest.raises(NotFound, match="no such image") as caught:
        await get(store, f"docker://{registry}/none:1")
    assert caught.value.field == "reference"


async def test_a_registry_without_tls(store: ImageStore, registry: str, repository: str) -> None:
    request = PullRequest(reference=f"docker://{registry}/{repository}")
    with pytest.raises(InvalidRequest, match="speaks no TLS") as caught:
        await pull(store, request, progress=lambda event: None, allow_host_paths=False, retries=0)
    assert caught.value.field == "tls_verify"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("cut", after=100_000), r"registry 127"),
        (Fault("wrong", after=100_000), r"something else than it should|registry 127"),
        (Fault("wrong", path="/manifests/", after=50), r"registry 127|cannot be understood|does not match"),
        (Fault("status", status=503), r"registry 127"),
        (Fault("status", status=500, path="/manifests/"), r"registry 127"),
        (Fault("stall", after=100_000), r"has sent nothing for 1 s"),
        (Fault("stall", after=0, path="/manifests/"), r"has sent nothing for 1 s"),
    ],
    ids=lambda value: f"{value.kind}{value.path.rstrip('/:').rpartition('/')[2]}" if isinstance(value, Fault) else "",
)
async def test_faults(store: ImageStore, proxy: Proxy, repository: str, fault: Fault, said: str) -> None:
    """Each ends in bounded time, says who is at fault, and leaves nothing; the next pull gets the image."""
    fault.times = 1_000_000
    proxy.faults = [fault]
    with pytest.raises((Unavailable, InvalidRequest), match=said):
        await get(store, f"docker://{proxy.address}/{repository}")
    assert not store.list().images
    assert not list((store.root / "tmp").iterdir())
    proxy.faults.clear()
    assert len((await get(store, f"docker://{proxy.address}/{repository}")).layers) == 3


@pytest.mark.parametrize("kind", ["cut", "status"])
async def test_faults_that_pass(store: ImageStore, proxy: Proxy, repository: str, kind: str) -> None:
    """What fails once is tried again, and what arrived is not fetched again."""
    proxy.faults = [Fault(kind, path="/blobs/" + sha256_of_layer(1), times=1, after=500_000)]  # type: ignore[arg-type]
    assert len((await get(store, f"docker://{proxy.address}/{repository}")).layers) == 3
    assert proxy.blobs().count(sha256_of_layer(1)) == 2


def sha256_of_layer(number: int) -> str:
    from tests.oci_layouts import packed

    return sha256(packed(NOISE[number], "gzip"))


# --- push ------------------------------------------------------------------------------------------------------------


async def test_push_and_pull_again(store: ImageStore, registry: str, tmp_path: Path) -> None:
    """The same layers come back, whatever was in them: to a registry, a layout and an archive."""
    layout(tmp_path / "layout", *CASES["all-together-in-large-layers"].layers, config={"User": "7", "Cmd": ["x"], "WorkingDir": "/etc"})
    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="image")
    image = await pull(store, request, progress=lambda event: None, allow_host_paths=True)
    name = f"test/{uuid.uuid4().hex}:9"
    for reference in (f"docker://{registry}/{name}", f"oci:{tmp_path}/out:tag", f"docker-archive:{tmp_path}/out.tar"):
        await send(store, "image", reference)
        request = PullRequest(reference=reference, name="again", tls_verify=False)
        again = await pull(store, request, progress=lambda event: None, allow_host_paths=True)
        assert (again.layers, again.config) == (image.layers, image.config)
    inspected = subprocess.run(
        ["skopeo", "inspect", "--tls-verify=false", f"docker://{registry}/{name}"], check=True, timeout=60, capture_output=True
    )
    assert b'"Layers"' in inspected.stdout


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.refused and len(case.layers) > 1])
async def test_umoci_unpacks_what_was_pushed(store: ImageStore, tmp_path: Path, name: str) -> None:
    """And sees what a sandbox sees; so whiteouts are what they were."""
    layout(tmp_path / "layout", *CASES[name].layers, pack=CASES[name].pack)
    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="image")
    image = await pull(store, request, progress=lambda event: None, allow_host_paths=True)
    await send(store, "image", f"oci:{tmp_path}/out:tag")
    subprocess.run(
        ["umoci", "unpack", "--image", f"{tmp_path}/out:tag", str(tmp_path / "bundle")], check=True, timeout=60, capture_output=True
    )
    theirs = look(tmp_path / "bundle/rootfs")
    with mounted(store, "image", tmp_path / "ours") as root:
        assert look(root) == theirs
    request = PullRequest(reference=f"oci:{tmp_path}/out:tag", name="again")
    assert (await pull(store, request, progress=lambda event: None, allow_host_paths=True)).layers == image.layers


async def test_push_is_the_same_each_time(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "layout", BASE, NOISE[0])
    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="image")
    await pull(store, request, progress=lambda event: None, allow_host_paths=True)
    for name in ("one", "two"):
        await send(store, "image", f"oci:{tmp_path}/{name}:tag")
    assert (tmp_path / "one/index.json").read_bytes() == (tmp_path / "two/index.json").read_bytes()


async def test_push_to_where_it_cannot_go(store: ImageStore, registry: str, tmp_path: Path) -> None:
    layout(tmp_path / "layout", BASE)
    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="image")
    await pull(store, request, progress=lambda event: None, allow_host_paths=True)
    (tmp_path / "there.tar").write_bytes(b"")
    with pytest.raises(Conflict):
        await send(store, "image", f"docker-archive:{tmp_path}/there.tar")
    with pytest.raises(NotFound, match="no directory"):
        await send(store, "image", f"oci:{tmp_path}/nowhere/out")
    with pytest.raises(NotFound, match="no image"):
        await send(store, "other", f"docker://{registry}/x:1")
    with pytest.raises(Unavailable, match=r"registry 127\.0\.0\.1:9"):
        await send(store, "image", "docker://127.0.0.1:9/x:1")
    assert not list((store.root / "tmp").iterdir())
