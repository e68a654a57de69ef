# SPDX-License-Identifier: Apache-2.0
"""Our layers on the real kernel, file by file beside what `umoci unpack` makes of the same image."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import spec
from opendsec.api.errors import InvalidRequest
from opendsec.api.images import PullRequest
from opendsec.images.oci.pull import pull
from opendsec.images.store import ImageStore
from tests.integration.oci.conftest import mounted
from tests.integration.oci.corpus import CASES, ROOT_BY_UMOCI, Case
from tests.integration.oci.trees import Tree, differences, look
from tests.oci_layouts import layout

pytestmark = pytest.mark.slow


def umoci(folder: Path, bundle: Path) -> Tree | None:
    """What umoci unpacks; None if it refuses."""
    done = subprocess.run(["umoci", "unpack", "--image", f"{folder}:latest", str(bundle)], capture_output=True, timeout=60, check=False)
    return look(bundle / "rootfs") if done.returncode == 0 else None


def test_there_are_enough_cases() -> None:
    assert spec.load()["images.oci.corpus"].holds(len(CASES))


@pytest.mark.parametrize("name", CASES)
async def test_case(name: str, store: ImageStore, tmp_path: Path) -> None:
    """`images.oci.unexplained` of the specification: a failure here is one."""
    case = CASES[name]
    layout(tmp_path / "layout", *case.layers, pack=case.pack)
    theirs = umoci(tmp_path / "layout", tmp_path / "bundle")
    request = PullRequest(reference=f"oci:{tmp_path}/layout", name="case")
    if case.refused:
        with pytest.raises(InvalidRequest, match=case.refused):
            await pull(store, request, progress=lambda event: None, allow_host_paths=True)
        assert (theirs is not None) == bool(case.umoci_takes), "what umoci does is another thing than the corpus says"
        assert not store.list().images
        return
    await pull(store, request, progress=lambda event: None, allow_host_paths=True)
    with mounted(store, "case", tmp_path / "ours") as root:
        ours = look(root)
    assert sorted(note for note in store.image("case").notes) == sorted(case.notes)
    if case.umoci_refuses:
        assert theirs is None
        layout(tmp_path / "plain", *case.umoci_gets)
        theirs = umoci(tmp_path / "plain", tmp_path / "plain-bundle")
    assert theirs is not None, "umoci refuses it"
    compare(case, ours, theirs)


def compare(case: Case, ours: Tree, theirs: Tree) -> None:
    found = differences(ours, theirs)
    differs = dict(case.differs)
    if not any(b"./\0" in layer for layer in case.layers):
        differs[".: mtime"] = ROOT_BY_UMOCI
    assert found.keys() == differs.keys(), "\n".join(f"{where}: {what}" for where, what in found.items() if where not in differs)
