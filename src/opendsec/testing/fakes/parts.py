# SPDX-License-Identifier: Apache-2.0
"""An edge made of fakes: the real server, node and journal over a fake backend.

As a process: `python -m opendsec.testing.fakes.parts --state-dir … --run-dir …`, with the edge's own flags.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import msgspec

from opendsec.api.images import ImageConfig, LayerKind
from opendsec.edge.__main__ import main
from opendsec.edge.assemble import Parts
from opendsec.edge.config import Settings
from opendsec.edge.fn.languages import load
from opendsec.edge.fn.parts import FnParts
from opendsec.edge.log import Log
from opendsec.images.layers import DATA, META, LayerRecord
from opendsec.images.names import LayerName
from opendsec.images.store import ImageStore
from opendsec.testing.fakes.backend import FakeBackend, FakeMachine
from opendsec.testing.fakes.machines import FakeMachines
from opendsec.testing.fakes.members import FakeMembers

IMAGE = "fake"
TOOLKIT = "toolkit:fake@1"
PATH = "/usr/local/bin:/usr/bin:/bin"


def fake_images(root: Path) -> ImageStore:
    """A store with the image `fake` and the layer `toolkit:fake@1`; nothing can be mounted from it."""
    store = ImageStore(root)
    store.prepare()
    base = _layer(store, b"base", "base", LayerName("base", IMAGE, "1"))
    _layer(store, b"toolkit", "toolkit", LayerName("toolkit", IMAGE, "1"))
    store.name_image(IMAGE, [base], ImageConfig(env={"PATH": PATH, "FROM_IMAGE": "1"}))
    return store


def _layer(store: ImageStore, content: bytes, kind: LayerKind, name: LayerName) -> str:
    checksum = hashlib.sha256(content).hexdigest()
    with store.workspace() as (work, _):
        out = work / "out"
        out.mkdir()
        for file in (META, DATA):
            (out / file).write_bytes(content)
        record = LayerRecord(
            digest=f"sha256:{checksum}",
            kind=kind,
            meta_bytes=len(content),
            data_bytes=len(content),
            meta_sha256=checksum,
            data_sha256=checksum,
            created_at=0.0,
        )
        store.publish(out, record)
    store.name_layer(name, record.digest)
    return record.digest


def fake_parts(
    machine: FakeMachine,
    images: ImageStore,
    *,
    scratch_bytes: int = 1 << 40,
    scratch_is_memory: bool = False,
    languages: Path | None = None,
) -> Parts:
    """Parts over a machine that may outlive the edge. Every language is in the image `fake`; `languages`: the operator's."""
    assert machine.root is not None
    return Parts(
        backends={"container": FakeBackend(machine), "microvm": FakeMachines(machine), "vm": FakeMachines(machine, "vm")},
        images=images,
        boot_id=machine.boot_id,
        scratch_driver="fake",
        scratch_bytes=scratch_bytes,
        scratch_is_memory=scratch_is_memory,
        fn=FnParts(
            backend=FakeMembers(machine.root.with_name(f"{machine.root.name}-members")), languages=load(languages, images=f"*={IMAGE}")
        ),
    )


async def assemble_fakes(settings: Settings, edge_id: str, log: Log) -> Parts:
    """For an edge process of its own; its sandboxes end with it."""
    machine = FakeMachine(settings.state_dir / "machine")

    async def close() -> None:
        machine.close()

    parts = fake_parts(machine, fake_images(settings.state_dir / "images"), languages=settings.fn_languages)
    return msgspec.structs.replace(parts, close=close)


if __name__ == "__main__":
    sys.exit(main(assembling=assemble_fakes))
