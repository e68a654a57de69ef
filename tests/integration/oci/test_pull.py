# SPDX-License-Identifier: Apache-2.0
"""Pulling: what is verified, chosen, honoured, refused, and not done twice."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.api.errors import Denied, InvalidRequest, NotFound, Unavailable, Unsupported
from opendsec.api.images import BuildEvent, ImageInfo, PullRequest
from opendsec.images.oci.below import Lowers
from opendsec.images.oci.limits import Limits
from opendsec.images.oci.nodes import Question
from opendsec.images.oci.pull import pull
from opendsec.images.store import ImageStore
from tests.integration.oci.conftest import mounted
from tests.integration.oci.corpus import BASE
from tests.integration.oci.trees import look
from tests.oci_layouts import HERE, Image, Layout, archive, docker_archive, entry, folder, layout, packed, sha256, symlink

pytestmark = pytest.mark.slow

NOISE = random.Random(3).randbytes(3 << 19)  # does not pack, so a layer of it is no small one
LARGE = archive(folder("big"), entry("big/noise", NOISE))


async def get(store: ImageStore, reference: str, events: list[BuildEvent] | None = None, **more: object) -> ImageInfo:
    request = PullRequest(reference=reference, **{"name": "image", **more})  # type: ignore[arg-type]
    return await pull(store, request, progress=(events if events is not None else []).append, allow_host_paths=True)


def clean(store: ImageStore) -> bool:
    return not store.list().images and not list((store.root / "tmp").iterdir())


async def test_config_is_honoured(store: ImageStore, tmp_path: Path) -> None:
    config: dict[str, object] = {
        "Env": ["PATH=/bin", "A=b=c", "broken"],
        "User": "daemon:staff",
        "WorkingDir": "/srv",
        "Entrypoint": ["/bin/sh", "-c"],
        "Cmd": ["echo hello"],
        "Volumes": {"/data": {}, "/cache": {}},
        "ExposedPorts": {"80/tcp": {}},
        "Healthcheck": {"Test": ["CMD", "true"]},
        "Labels": {"a": "b"},
    }
    layout(tmp_path / "layout", BASE, config=config)
    image = await get(store, f"oci:{tmp_path}/layout:latest")
    assert image.config.env == {"PATH": "/bin", "A": "b=c"}
    assert (image.config.user, image.config.workdir) == ("daemon:staff", "/srv")
    assert (image.config.entrypoint, image.config.cmd) == (("/bin/sh", "-c"), ("echo hello",))
    ref = store.image("image")
    assert ref.notes == (
        "left out 'broken' of the environment: no NAME=VALUE",
        "ignored volumes: /cache, /data",
        "ignored exposed ports: 80/tcp",
        "ignored a health check",
    )
    assert ref.source.startswith(f"oci:{tmp_path}/layout:latest@sha256:")


async def test_a_config_that_cannot_be_used(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "layout", BASE, config={"User": "no user!"})
    with pytest.raises(InvalidRequest, match="config cannot be used: User"):
        await get(store, f"oci:{tmp_path}/layout")
    assert clean(store)


@pytest.mark.parametrize("pack", ["gzip", "zstd", "none"])
async def test_packings(store: ImageStore, tmp_path: Path, pack: str) -> None:
    layout(tmp_path / "layout", LARGE, pack=pack)
    image = await get(store, f"oci:{tmp_path}/layout")
    with mounted(store, "image", tmp_path / "at") as root:
        assert (root / "big/noise").read_bytes() == NOISE
    assert image.size_bytes < len(NOISE) + 100_000


async def test_gzip_of_several_members_and_zeros_behind(store: ImageStore, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    blob = gzip.compress(LARGE[:1000]) + gzip.compress(LARGE[1000:]) + bytes(700)
    config = made.blob(Image(layers=[LARGE]).config_bytes(), "application/vnd.oci.image.config.v1+json")
    layer = made.blob(blob, "application/vnd.oci.image.layer.v1.tar+gzip")
    made.add(
        made.blob(
            json.dumps({"schemaVersion": 2, "config": config, "layers": [layer]}).encode(), "application/vnd.oci.image.manifest.v1+json"
        )
    )
    await get(store, f"oci:{tmp_path}/layout")


async def test_platforms_of_nested_indexes(store: ImageStore, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    other = "arm64" if HERE.architecture != "arm64" else "amd64"
    images = [
        made.manifest(Image(layers=[archive(entry("which", name.encode()))], architecture=architecture, variant=variant))
        for name, architecture, variant in (("other", other, ""), ("v7", "arm", "v7"), ("v6", "arm", "v6"), ("here", HERE.architecture, ""))
    ]
    attestation = {**images[0], "platform": {"architecture": "unknown", "os": "unknown"}}
    made.add(made.nested([attestation, *images]), "all")
    for platform, expected in (("", b"here"), (f"linux/{other}", b"other"), ("linux/arm/v6", b"v6"), ("linux/arm", b"v7")):
        await get(store, f"oci:{tmp_path}/layout:all", platform=platform, name="image")
        with mounted(store, "image", tmp_path / f"at-{expected.decode()}") as root:
            assert (root / "which").read_bytes() == expected
    with pytest.raises(NotFound, match=r"not there for linux/s390x; there is: linux/\w+, linux/") as caught:
        await get(store, f"oci:{tmp_path}/layout:all", platform="linux/s390x")
    assert caught.value.field == "platform"


async def test_the_only_platform_is_another(store: ImageStore, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    descriptor = made.manifest(Image(layers=[BASE], architecture="s390x"))
    del descriptor["platform"]
    made.add(descriptor)
    with pytest.raises(NotFound, match="there is: linux/s390x"):
        await get(store, f"oci:{tmp_path}/layout")
    await get(store, f"oci:{tmp_path}/layout", platform="linux/s390x")


async def test_an_index_that_leads_too_deep(store: ImageStore, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    at = made.manifest(Image(layers=[BASE]))
    for _ in range(5):
        at = made.nested([at], platform=at.get("platform"))
    made.add(at)
    with pytest.raises(InvalidRequest, match="leads through more than"):
        await get(store, f"oci:{tmp_path}/layout")


async def test_tags(store: ImageStore, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    made.add(made.manifest(Image(layers=[BASE])), "one")
    made.add(made.manifest(Image(layers=[LARGE])), "two")
    with pytest.raises(InvalidRequest, match="say which of one, two"):
        await get(store, f"oci:{tmp_path}/layout")
    with pytest.raises(NotFound, match="there is: one, two"):
        await get(store, f"oci:{tmp_path}/layout:three")
    assert (await get(store, f"oci:{tmp_path}/layout:two", name="")).name == "layout:two"


async def test_docker_schema_2(store: ImageStore, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    made.add(made.manifest(Image(layers=[BASE, LARGE], docker=True)))
    assert len((await get(store, f"oci:{tmp_path}/layout")).layers) == 2


@pytest.mark.parametrize("squeeze", [False, True])
async def test_docker_archive(store: ImageStore, tmp_path: Path, squeeze: bool) -> None:
    path = docker_archive(tmp_path / "saved.tar", Image(layers=[BASE, LARGE, BASE]), tags=["demo:1", "reg.io/team/demo:2"], linked=True)
    if squeeze:
        path.write_bytes(gzip.compress(path.read_bytes()))
    await get(store, f"docker-archive:{path}:reg.io/team/demo:2")
    with mounted(store, "image", tmp_path / "at") as root:
        assert (root / "big/noise").read_bytes() == NOISE
        assert (root / "etc/a").read_bytes() == b"1"
    with pytest.raises(NotFound, match=r"there is: demo:1, reg\.io/team/demo:2"):
        await get(store, f"docker-archive:{path}:demo:9")


async def test_docker_archive_of_newer_versions(store: ImageStore, tmp_path: Path) -> None:
    """A layout with a manifest.json beside it; layers packed or not."""
    image = Image(layers=[BASE, LARGE])
    made = Layout(tmp_path / "layout")
    made.add(made.manifest(image), "demo")
    manifest = json.loads(made.file(str(made.index[0]["digest"])).read_bytes())
    names = ["blobs/" + item["digest"].replace(":", "/") for item in (manifest["config"], *manifest["layers"])]
    saved = json.dumps([{"Config": names[0], "RepoTags": ["demo:latest"], "Layers": names[1:], "LayerSources": {}}]).encode()
    files = [path for path in sorted(made.path.rglob("*")) if path.is_file()]
    items = [entry(str(path.relative_to(made.path)), path.read_bytes()) for path in files]
    (tmp_path / "saved.tar").write_bytes(archive(folder("blobs"), folder("blobs/sha256"), *items, entry("manifest.json", saved)))
    image_info = await get(store, f"docker-archive:{tmp_path}/saved.tar", name="")
    assert image_info.name == "saved"
    assert len(image_info.layers) == 2


async def test_on_layers_whose_content_is_elsewhere(store: ImageStore, tmp_path: Path) -> None:
    """What lies below is looked up in the metadata alone."""
    layout(tmp_path / "one", archive(folder("shared", 0o1770, uid=9), entry("shared/noise", NOISE)))
    (lower,) = (await get(store, f"oci:{tmp_path}/one", name="one")).layers
    data = store.directory(lower) / "data.blob"
    data.rename(tmp_path / "kept")
    with Lowers([store.directory(lower)], tmp_path) as lowers:
        there, absent = lowers.answers([Question(b"shared", True), Question(b"none", True)])
    assert there is not None and (there.mode, there.uid) == (0o1770, 9)
    assert absent is None
    (tmp_path / "kept").rename(data)


async def test_links_below_do_not_lead_to_the_host(store: ImageStore, tmp_path: Path) -> None:
    (tmp_path / "host").mkdir(mode=0o711)
    lower = archive(symlink("out", str(tmp_path)), symlink("up", "../" * 20 + str(tmp_path)))
    layout(tmp_path / "layout", lower, archive(entry("out/host/x", NOISE), entry("up/host/y")))
    layers = (await get(store, f"oci:{tmp_path}/layout")).layers
    with Lowers([store.directory(layers[0])], tmp_path) as lowers:
        paths = (b"out/host", b"up/host", b"../../etc", os.fsencode(tmp_path), b"out")
        answers = lowers.answers([Question(path, True) for path in paths])
    assert answers[:4] == [None] * 4
    assert answers[4] is not None and answers[4].link == os.fsencode(tmp_path).lstrip(b"/")
    with mounted(store, "image", tmp_path / "at") as root:
        inside = root / tmp_path.relative_to("/") / "host"
        assert {path.name for path in inside.iterdir()} == {"x", "y"}
        assert inside.stat().st_mode & 0o777 == 0o755
    assert list((tmp_path / "host").iterdir()) == []


async def test_docker_archives_that_lie(store: ImageStore, tmp_path: Path) -> None:
    image = Image(layers=[BASE], diff_ids=[sha256(b"another")])
    with pytest.raises(InvalidRequest, match="is not what the image's config says"):
        await get(store, f"docker-archive:{docker_archive(tmp_path / 'a.tar', image)}")
    (tmp_path / "b.tar").write_bytes(archive(entry("manifest.json", b'[{"Config":"../../../etc/passwd","Layers":[]}]')))
    with pytest.raises(InvalidRequest, match="has no"):
        await get(store, f"docker-archive:{tmp_path}/b.tar")
    (tmp_path / "c.tar").write_bytes(b"no archive at all" * 100)
    with pytest.raises(InvalidRequest, match="the archive"):
        await get(store, f"docker-archive:{tmp_path}/c.tar")
    os.mkfifo(tmp_path / "d.tar")
    with pytest.raises(InvalidRequest, match="is no file"):
        await get(store, f"docker-archive:{tmp_path}/d.tar")
    assert clean(store)


def spoil_size(made: Layout, digest: str) -> None:
    with open(made.file(digest), "ab") as file:
        file.write(b"x")


def spoil_bytes(made: Layout, digest: str) -> None:
    data = bytearray(made.file(digest).read_bytes())
    data[-1] ^= 1
    made.file(digest).write_bytes(data)


def spoil_by_link(made: Layout, digest: str) -> None:
    target = made.path / "elsewhere"
    made.file(digest).rename(target)
    made.file(digest).symlink_to(target)


def take_away(made: Layout, digest: str) -> None:
    made.file(digest).unlink()


@pytest.mark.parametrize("what", ["manifest", "config", "layer"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [(spoil_size, "instead of"), (spoil_bytes, "does not match"), (spoil_by_link, "cannot be read"), (take_away, "is not there")],
)
async def test_blobs_that_are_not_what_they_should_be(
    store: ImageStore, tmp_path: Path, spoil: Callable[[Layout, str], None], said: str, what: str
) -> None:
    made = layout(tmp_path / "layout", BASE)
    manifest = json.loads(made.file(str(made.index[0]["digest"])).read_bytes())
    spoil(made, {"manifest": made.index[0], "config": manifest["config"], "layer": manifest["layers"][0]}[what]["digest"])
    with pytest.raises((InvalidRequest, NotFound), match=said) as caught:
        await get(store, f"oci:{tmp_path}/layout")
    assert caught.value.field == "reference"
    assert clean(store)


async def test_layers_that_unpack_to_something_else(store: ImageStore, tmp_path: Path) -> None:
    made = Layout(tmp_path / "layout")
    made.add(made.manifest(Image(layers=[LARGE, BASE], diff_ids=[sha256(LARGE), sha256(LARGE)])))
    with pytest.raises(InvalidRequest, match="is not what the image's config says"):
        await get(store, f"oci:{tmp_path}/layout")
    assert clean(store)
    made.add(made.manifest(Image(layers=[LARGE, BASE], diff_ids=[sha256(LARGE)])), "few")
    with pytest.raises(InvalidRequest, match="tells of 1 layers, but it has 2"):
        await get(store, f"oci:{tmp_path}/layout:few")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"mediaType": "application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"}, Unsupported, "may not be distributed"),
        ({"mediaType": "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"}, Unsupported, "may not be distributed"),
        ({"urls": ["https://example.org/layer"]}, Unsupported, "may not be distributed"),
        ({"mediaType": "application/vnd.cncf.helm.chart.content.v1.tar+gzip"}, Unsupported, "no file system layer"),
        ({"digest": "sha512:" + "0" * 128}, Unsupported, "known is sha256"),
        ({"digest": "sha256:../../../etc/passwd"}, InvalidRequest, "no proper digest"),
        ({"size": -1}, InvalidRequest, "negative size"),
        ({"size": "1"}, InvalidRequest, "cannot be understood"),
    ],
)
async def test_layers_that_are_refused(
    store: ImageStore, tmp_path: Path, change: dict[str, object], error: type[Exception], said: str
) -> None:
    made = Layout(tmp_path / "layout")
    image = Image(layers=[BASE])
    layer = {**made.blob(packed(BASE, "gzip"), "application/vnd.oci.image.layer.v1.tar+gzip"), **change}
    config = made.blob(image.config_bytes(), "application/vnd.oci.image.config.v1+json")
    made.add(
        made.blob(
            json.dumps({"schemaVersion": 2, "config": config, "layers": [layer]}).encode(), "application/vnd.oci.image.manifest.v1+json"
        )
    )
    with pytest.raises(error, match=said):
        await get(store, f"oci:{tmp_path}/layout")
    assert clean(store)


@pytest.mark.parametrize(
    ("layer", "limits", "said"),
    [
        (archive(entry("zeros", bytes(8 << 20))), Limits(ratio=100, ratio_from_bytes=1 << 20), "a decompression bomb"),
        (LARGE, Limits(tar_bytes=1 << 20), "unpacks to more than"),
        (LARGE, Limits(blob_bytes=1 << 20), "at most"),
        (archive(*(entry(str(number)) for number in range(20))), Limits(entries=10), "more than 10 entries"),
        (archive(entry("f", bytes(5000))), Limits(file_bytes=4096), "a file of 5000 bytes"),
        (archive(entry("n" * 300)), Limits(), "name of more than 255 bytes"),
        (archive(entry("/".join(["n" * 200] * 21))), Limits(), "path of more than 4095 bytes"),
        (archive(entry("f", pax={"SCHILY.xattr.user.x": "x" * 70_000})), Limits(), "bytes of attributes"),
        (
            archive(entry("f", pax={"comment": "x" * 600_000}), entry("g", pax={"comment": "x" * 600_000})),
            Limits(metadata_bytes=1 << 20),
            "names and attributes",
        ),
        (archive(entry("f", b"x"), end=False)[:700], Limits(), "is cut off"),
        (b"not a tar" * 100, Limits(), "no tar archive"),
        (archive(entry("f", kind=b"Z")), Limits(), "unknown kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_layers_that_go_too_far(store: ImageStore, tmp_path: Path, layer: bytes, limits: Limits, said: str) -> None:
    layout(tmp_path / "layout", layer)
    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="image")
    with pytest.raises(InvalidRequest, match=said):
        await pull(store, request, progress=lambda event: None, allow_host_paths=True, limits=limits)
    assert clean(store)


async def test_damaged_packings(store: ImageStore, tmp_path: Path) -> None:
    for number, data in enumerate(
        (packed(LARGE, "gzip")[:-20], b"\x1f\x8b" + b"x" * 100, packed(LARGE, "zstd")[:-20], b"BZh91AY", b"\xfd7zXZ\0")
    ):
        made = Layout(tmp_path / f"layout{number}")
        config = made.blob(Image(layers=[LARGE]).config_bytes(), "application/vnd.oci.image.config.v1+json")
        layer = made.blob(data, "application/vnd.oci.image.layer.v1.tar+gzip")
        made.add(
            made.blob(
                json.dumps({"schemaVersion": 2, "config": config, "layers": [layer]}).encode(), "application/vnd.oci.image.manifest.v1+json"
            )
        )
        with pytest.raises(InvalidRequest, match=r"damaged|cut off|known are gzip and zstd|not what the image's config says"):
            await get(store, f"oci:{made.path}")
    assert clean(store)


async def test_converted_once(store: ImageStore, tmp_path: Path) -> None:
    """Also when it comes from elsewhere, packed otherwise; and again when the layer has gone."""
    layout(tmp_path / "a", LARGE, archive(entry("etc/x", NOISE)))
    first = await get(store, f"oci:{tmp_path}/a", name="first")
    layout(tmp_path / "b", LARGE, archive(entry("other", NOISE)), pack="zstd")
    events: list[BuildEvent] = []
    second = await get(store, f"oci:{tmp_path}/b", events, name="second")
    assert first.layers[0] == second.layers[0]
    assert "fetching 1 of 2 layers" in [event.message for event in events]
    events.clear()
    assert (await get(store, f"oci:{tmp_path}/b", events, name="third")).layers == second.layers
    assert [event.message for event in events] == ["resolving"]
    for name in ("first", "second", "third"):
        store.remove(name)
    assert len(store.gc(grace_s=-1).digests) == 3
    assert (await get(store, f"oci:{tmp_path}/b", name="third")).layers == second.layers


async def test_a_directory_that_a_layer_only_passes_keeps_the_attributes_below(store: ImageStore, tmp_path: Path) -> None:
    """The same layer on two bases becomes two of ours."""
    top = archive(entry("shared/f", NOISE))
    for name, mode in (("open", 0o1777), ("closed", 0o700)):
        layout(tmp_path / name, archive(folder("shared", mode, uid=7)), top)
        await get(store, f"oci:{tmp_path}/{name}", name=name)
        with mounted(store, name, tmp_path / f"at-{name}") as root:
            status = (root / "shared").stat()
            assert (status.st_mode & 0o7777, status.st_uid) == (mode, 7)
    assert store.image("open").layers[1] != store.image("closed").layers[1]


async def test_small_neighbours_are_made_one(store: ImageStore, tmp_path: Path) -> None:
    small = [archive(entry(f"n{number}", b"x")) for number in range(5)]
    layout(tmp_path / "layout", LARGE, *small, LARGE, small[0])
    assert len((await get(store, f"oci:{tmp_path}/layout")).layers) == 3  # the second LARGE is the first: it hides nothing new


async def test_holes_stay_holes(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "layout", archive(entry("zeros", bytes(4 << 20)), entry("mixed", bytes(1 << 20) + b"x" + bytes(1 << 20))))
    image = await get(store, f"oci:{tmp_path}/layout")
    assert image.size_bytes < 100_000
    with mounted(store, "image", tmp_path / "at") as root:
        assert (root / "mixed").read_bytes() == bytes(1 << 20) + b"x" + bytes(1 << 20)


async def test_paths_of_the_machine_only_over_the_unix_socket(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "layout", BASE)
    with pytest.raises(Denied):
        await pull(store, PullRequest(reference=f"oci:{tmp_path}/layout"), progress=lambda event: None, allow_host_paths=False)
    with pytest.raises(NotFound, match="no OCI layout"):
        await get(store, f"oci:{tmp_path}/nowhere")


async def test_a_name_keeps_its_meaning_when_a_pull_fails(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "good", BASE)
    layout(tmp_path / "bad", archive(entry("../evil")))
    before = await get(store, f"oci:{tmp_path}/good")
    with pytest.raises(InvalidRequest, match="leads upwards"):
        await get(store, f"oci:{tmp_path}/bad")
    assert store.list().images == (before,)


async def test_cancelled(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "layout", LARGE, archive(entry("more", NOISE[::-1])))
    converting = asyncio.Event()

    def progress(event: BuildEvent) -> None:
        if event.message.startswith("converting"):
            converting.set()

    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="image")
    task = asyncio.ensure_future(pull(store, request, progress=progress, allow_host_paths=True))
    await converting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clean(store)
    await get(store, f"oci:{tmp_path}/layout")


async def test_the_same_image_twice_at_once(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "layout", LARGE, archive(entry("more", NOISE[::-1])))
    first, second = await asyncio.gather(get(store, f"oci:{tmp_path}/layout", name="one"), get(store, f"oci:{tmp_path}/layout", name="two"))
    assert first.layers == second.layers
    for digest in first.layers:
        store.verify(digest)


async def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    store = ImageStore(small_disk / "store")
    store.prepare()
    layout(tmp_path / "layout", archive(entry("a", NOISE), entry("b", NOISE[::-1])))
    with pytest.raises(Unavailable, match="no space left"):
        await get(store, f"oci:{tmp_path}/layout")
    assert clean(store)
    layout(tmp_path / "fits", BASE)
    await get(store, f"oci:{tmp_path}/fits")


async def test_layers_verify_and_show_nothing_of_the_host(store: ImageStore, tmp_path: Path) -> None:
    layout(tmp_path / "layout", BASE, LARGE)
    image = await get(store, f"oci:{tmp_path}/layout")
    for digest in image.layers:
        store.verify(digest)
    with mounted(store, "image", tmp_path / "at") as root:
        assert {path.split("/")[0] for path in look(root)} == {".", "etc", "var", "tmp", "usr", "lib", "big"}
