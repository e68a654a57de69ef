# SPDX-License-Identifier: Apache-2.0
"""Groups, platforms, settings, skopeo's words, references of credentials."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from opendsec.api.errors import InvalidRequest, NotFound, OpenDSecError, Unauthorized, Unavailable, Unsupported
from opendsec.api.images import ImageConfig
from opendsec.images.oci import archive, export, settings
from opendsec.images.oci import manifest as formats
from opendsec.images.oci.erofs_image import crc32c
from opendsec.images.oci.groups import SMALL_BYTES, groups
from opendsec.images.oci.manifest import Config, ContainerConfig, Descriptor, Platform
from opendsec.images.oci.skopeo import authfile, error_for

S, L = 1000, SMALL_BYTES + 1


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[]]),
        ([S], [[0]]),
        ([S, S, S], [[0], [1, 2]]),
        ([L, S, S, L, S], [[0], [1, 2], [3], [4]]),
        ([L, L, L], [[0], [1], [2]]),
        ([L, *[SMALL_BYTES] * 6], [[0], [1, 2, 3, 4], [5, 6]]),
    ],
)
def test_groups(sizes: list[int], expected: list[list[int]]) -> None:
    assert groups(sizes) == expected


def at(platform: str) -> Descriptor:
    system, architecture, *variant = platform.split("/")
    return Descriptor(digest="sha256:" + "0" * 64, size=1, platform=Platform(architecture, system, "".join(variant)))


@pytest.mark.parametrize(
    ("there", "want", "chosen"),
    [
        (["linux/arm64/v8", "linux/amd64"], "linux/amd64", 1),
        (["linux/arm64/v8", "linux/amd64"], "linux/arm64", 0),
        (["linux/arm64"], "linux/arm64/v8", 0),
        (["linux/arm/v6", "linux/arm/v7"], "linux/arm/v7", 1),
        (["windows/amd64", "linux/amd64"], "linux/amd64", 1),
    ],
)
def test_choose(there: list[str], want: str, chosen: int) -> None:
    descriptors = [at(platform) for platform in there]
    assert formats.choose(descriptors, formats.wanted(want)) is descriptors[chosen]


def test_nothing_to_choose() -> None:
    with pytest.raises(NotFound, match="there is: linux/arm/v6, windows/amd64"):
        formats.choose([at("windows/amd64"), at("linux/arm/v6"), at("unknown/unknown")], formats.wanted("linux/arm/v7"))


def test_config_there_and_back() -> None:
    ours = ImageConfig(env={"A": "b=c", "E": ""}, user="root", workdir="/srv", entrypoint=("a", "b"), cmd=("c",))
    data = settings.from_ours(ours, ["sha256:" + "1" * 64], ["sha256:" + "2" * 64])
    config = formats.parse_config(data, 1)
    assert settings.to_ours(config) == (ours, [])
    assert json.loads(data)["history"][0]["created_by"].startswith("opendsec layer sha256:2")


def test_an_empty_config() -> None:
    assert settings.to_ours(Config()) == (ImageConfig(), [])
    nulls = msgspec.json.decode(b'{"config":{"Env":null,"Volumes":null,"Cmd":null,"Healthcheck":null,"User":""}}', type=Config)
    assert settings.to_ours(nulls) == (ImageConfig(), [])


def test_a_working_directory_that_is_relative() -> None:
    assert settings.to_ours(Config(config=ContainerConfig(working_dir="srv")))[0].workdir == "/srv"


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schemaVersion":2,"layers":[]}', b"\xff", b"[" * 100_000])
def test_manifests_that_are_none(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        formats.parse_manifest(data)


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("unable to retrieve auth token: invalid username/password: unauthorized", Unauthorized),
        ("reading manifest 1 in h/n: manifest unknown", NotFound),
        ("pinging container registry h: http: server gave HTTP response to HTTPS client", InvalidRequest),
        ("x509: certificate signed by unknown authority", InvalidRequest),
        ("writing blob: write /x: no space left on device", Unavailable),
        ("received unexpected HTTP status: 503 Service Unavailable", Unavailable),
        ("something quite new", Unavailable),
    ],
)
def test_what_skopeo_says(said: str, kind: type[OpenDSecError]) -> None:
    assert type(error_for(said, "h")) is kind


def test_credentials_are_written_as_skopeo_reads_them() -> None:
    assert json.loads(authfile("h:1", "u:p:w")) == {"auths": {"h:1": {"auth": "dTpwOnc="}}}
    assert json.loads(authfile("h:1", "bearer"))["auths"]["h:1"]["identitytoken"] == "bearer"
    assert json.loads(authfile("h:1", "")) == {}


def test_crc32c() -> None:
    assert crc32c(b"123456789") ^ 0xFFFF_FFFF == 0xE306_9283  # the check value of the standard


@pytest.mark.parametrize("name", [".wh.passwd", "folder/.wh..wh..opq", ".wh..wh.plnk/x"])
def test_what_would_mean_absence_is_not_exported(tmp_path: Path, name: str) -> None:
    """Others, and we, would take the file for a whiteout: something else would be missing from the image."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(Unsupported, match=r"'\.wh\.…' means absence"):
            export.tar(fd, lambda data: None)
    finally:
        os.close(fd)


# --- archives --------------------------------------------------------------------------------------------------------


def in_archive(*tags: str) -> archive._Image:
    return archive._Image(config="c", repo_tags=tags, layers=())


@pytest.mark.parametrize("asked", ["host.example/lib/tool:1", "lib/tool:1", "tool:1"])
def test_a_tag_of_an_archive_may_be_given_without_its_host_if_one_image_fits(asked: str) -> None:
    tool, other = in_archive("host.example/lib/tool:1"), in_archive("host.example/lib/mytool:1", "other:latest")
    assert archive._select((other, tool), asked) is tool
    assert archive._select((other, tool), "other") is other
    with pytest.raises(NotFound, match=r"host\.example/lib/tool:1"):
        archive._select((other, tool), "ool:1")


def test_a_tag_that_several_images_of_an_archive_fit_is_refused_unless_it_is_all_of_one() -> None:
    images = (in_archive("host.example/tool:1"), in_archive("other.example/tool:1"), in_archive("tool:2"), in_archive("a.example/tool:2"))
    with pytest.raises(InvalidRequest, match=r"host\.example/tool:1, other\.example/tool:1"):
        archive._select(images, "tool:1")
    assert archive._select(images, "tool:2") is images[2]
    one = in_archive("a.example/tool:1", "b.example/tool:1")
    assert archive._select((one,), "tool:1") is one
