# SPDX-License-Identifier: Apache-2.0
"""Calls see the layers of an image as a container of it does, with all the marks that layers may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from opendsec.images import erofs
from opendsec.images.layers import LayerRef
from opendsec.kernel import procfs
from tests.fnmembers import Calls, FnNode

pytestmark = pytest.mark.slow


def layer(folder: Path) -> LayerRef:
    """On top of a Debian: a directory that hides the one below, a file that is gone, another list of users."""
    tree, out = folder / "tree", folder / "out"
    for path in ("etc/apt", "opt"):
        (tree / path).mkdir(parents=True)
    os.setxattr(tree / "etc/apt", "trusted.overlay.opaque", b"y")
    (tree / "etc/apt/mine").write_text("mine\n")
    os.mknod(tree / "etc/debian_version", 0o020000, os.makedev(0, 0))
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nsomebody:x:777:778::/home/somebody:/bin/sh\n")
    out.mkdir()
    erofs.pack(tree, out, all_root=True)
    return LayerRef("sha256:" + "ab" * 32, out / erofs.META, out / erofs.DATA)


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory, base_layers: tuple[LayerRef, ...]) -> Iterator[Calls]:
    node = FnNode(tmp_path_factory.mktemp("layers"), (*base_layers, layer(tmp_path_factory.mktemp("layer"))))
    with node.member(user="somebody", workdir="/home/somebody/work") as calls:
        yield calls
    node.close()


def test_marks_of_layers_count(layered: Calls) -> None:
    told = layered.exec("sh", "-c", "ls /etc/apt; ls /etc/debian_version; id -un; pwd; touch here && echo $HOME; ls /usr/bin/python3")
    assert told.stdout.decode().split() == ["mine", "somebody", "/home/somebody/work", "/home/somebody", "/usr/bin/python3"]
    assert layered.says("import os, getpass\nprint(os.listdir('/etc/apt'), getpass.getuser(), os.getcwd(), os.getuid(), os.getgid())") == (
        "['mine'] somebody /home/somebody/work 777 778\n"
    )


def test_nothing_of_the_lower_one_comes_through(layered: Calls) -> None:
    root = procfs.path_of(layered.member.pid, "root")
    assert sorted(os.listdir(root)) == ["dev", "l0", "proc", "r", "t"]
    with layered.node.member(user="root") as calls:
        told = calls.exec(
            "sh",
            "-c",
            "rm -rf /etc/apt /usr/share/doc; mkdir /etc/apt /usr/share/doc; ls /etc/apt /usr/share/doc | wc -w; ls -d /usr/share/doc",
        )
        assert told.stdout.split() == [b"2", b"/usr/share/doc"], told
        assert calls.exec("ls", "/etc/apt").stdout == b"mine\n"
