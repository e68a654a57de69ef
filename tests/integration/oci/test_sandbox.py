# SPDX-License-Identifier: Apache-2.0
"""A sandbox of an image that was pulled: what OCI says is what a process inside sees."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec import Container
from opendsec.api.images import PullRequest
from opendsec.images.oci.pull import pull
from opendsec.images.store import ImageStore
from tests.edges import EdgeProcess
from tests.oci_layouts import archive, entry, folder, hard_link, layout, symlink

pytestmark = pytest.mark.slow


def programs(*names: str) -> list[tuple[tarfile.TarInfo, bytes]]:
    """Programs of this machine with their libraries: a root file system small enough for a test."""
    files: dict[str, str] = {}
    for name in names:
        path = shutil.which(name)
        assert path is not None
        files[f"bin/{name}"] = path
        for library in re.findall(r"(/\S+) \(0x", subprocess.run(["ldd", path], check=True, capture_output=True, text=True).stdout):
            files[library.lstrip("/")] = library
    folders = sorted({str(parent) for file in files for parent in Path(file).parents} - {"."})
    made = [folder(name) for name in folders]
    return made + [entry(name, Path(os.path.realpath(path)).read_bytes(), mode=0o755) for name, path in files.items()]


@pytest.fixture
def edge(store: ImageStore, tmp_path: Path) -> Iterator[EdgeProcess]:
    base = archive(
        *programs("sh", "ls", "cat", "stat", "id"),
        folder("etc"),
        entry("etc/passwd", b"root:x:0:0::/:/bin/sh\nworker:x:1000:1000::/srv:/bin/sh\n"),
        entry("etc/gone", b"x"),
        folder("srv", uid=1000, gid=1000),
        folder("old"),
        entry("old/a"),
        entry("old/b"),
        symlink("lib-link", "old"),
    )
    top = archive(
        entry("etc/.wh.gone"),
        folder("old"),
        entry("old/.wh..wh..opq"),
        entry("old/c", b"new"),
        entry("srv/tool", b"x", mode=0o4750, uid=1000, gid=1000, mtime=1_000_000_000),
        hard_link("srv/again", "srv/tool"),
        entry("lib-link/d", b"through"),
    )
    config: dict[str, object] = {"Env": ["GREETING=hello", "PATH=/bin"], "User": "worker", "WorkingDir": "/srv"}
    layout(tmp_path / "layout", base, top, config=config)
    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="pulled")
    asyncio.run(pull(store, request, progress=lambda event: None, allow_host_paths=True))
    made = EdgeProcess(store.root, ["--scratch-size", "64MiB"])
    try:
        made.start()
        yield made
    finally:
        made.remove()


async def test_a_sandbox_sees_what_oci_says(edge: EdgeProcess) -> None:
    async with edge.client() as client, await client.create(Container(image="pulled")) as box:
        script = "echo $GREETING; pwd; id -un; ls /etc; ls /old; stat -c '%a %u %h %Y' tool again; cat /lib-link/d"
        result = (await box.run(["sh", "-c", script])).check()
        assert result.stdout.split("\n") == [
            *("hello", "/srv", "worker", "passwd", "c", "d"),
            *("4750 1000 2 1000000000",) * 2,
            "through",
        ]
