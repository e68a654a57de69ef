# SPDX-License-Identifier: Apache-2.0
"""A base image for tests that run something: built once, kept outside the repository, shared by all sessions.

    def test_something(test_images: Path) -> None:
        store = ImageStore(test_images)                     # holds the image `debian-python` (BASE)
        resolved = store.resolve(BASE)                      # .layers: LayerRefs, lowest first; .config

    def test_an_edge(test_images: Path, tmp_path: Path) -> None:
        link_store(test_images, tmp_path / "state/images")  # a store of one's own with the same images, in milliseconds

The shared store is for reading; tests that build, remove or collect take a linked one. The first build takes about 25 s and needs
the machine's apt sources; the kept one lies under $OPENDSEC_TEST_IMAGES (/var/tmp/opendsec-test-images) by a hash of what goes in.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from opendsec.api.images import BuildEvent, BuildRequest, DebianSource
from opendsec.images import debian, layers
from opendsec.images.build import build
from opendsec.images.store import ImageStore

BASE = "debian-python"
REQUEST = BuildRequest(name=BASE, source=DebianSource(packages=("python3", "git", "patch", "procps")))
REVISION = 2  # raise it when a change of the builder should reach the kept image


@pytest.fixture(scope="session")
def test_images() -> Path:
    """The root of an ImageStore with image `debian-python`. See the module."""
    return base_store()


def base_store() -> Path:
    """As the fixture, for programs that are no tests."""
    return kept_store(REQUEST)


def kept_store(request: BuildRequest) -> Path:
    """The root of an ImageStore with the image that `request` makes, built if it is not kept yet."""
    parent = Path(os.environ.get("OPENDSEC_TEST_IMAGES", "/var/tmp/opendsec-test-images"))
    root = parent / _key(request)
    parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(parent / f"{root.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # concurrent sessions wait for the one that builds
        store = ImageStore(root)
        if not any(image.name == request.name for image in store.list().images):
            store.prepare()
            last: list[BuildEvent] = []
            try:
                with ThreadPoolExecutor(1) as pool:  # whoever asks may run in a loop
                    pool.submit(asyncio.run, build(store, request, progress=last.append, allow_host_paths=False)).result()
            except Exception as error:
                error.add_note(f"while building the image for tests; it said: {[event.message for event in last[-5:]]}")
                raise
    finally:
        os.close(fd)
    return root


def _key(request: BuildRequest) -> str:
    sources = [entry.stanza() for entry in debian.machine_sources(Path("/etc/apt"))]
    inputs = [msgspec.json.encode(request), f"{layers.VERSION} {REVISION}".encode(), *map(str.encode, sources)]
    return hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]


def link_store(source: Path, target: Path) -> ImageStore:
    """A new store at `target` with all that `source` has; layer files are hard links where the file system allows."""
    shutil.copytree(
        source, target, ignore=lambda folder, names: names if Path(folder).name == "tmp" else ["lock"], copy_function=_link_or_copy
    )
    store = ImageStore(target)
    store.prepare()
    return store


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
