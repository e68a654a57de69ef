# SPDX-License-Identifier: Apache-2.0
"""The base image that other tests stand on."""

from __future__ import annotations

from pathlib import Path

from opendsec.images.store import ImageStore
from tests.images import BASE, link_store


def test_the_shared_store_has_the_base(test_images: Path) -> None:
    resolved = ImageStore(test_images).resolve(BASE)
    assert [layer.meta.is_file() and layer.data.is_file() for layer in resolved.layers] == [True]


def test_a_linked_store_is_independent(test_images: Path, tmp_path: Path) -> None:
    store = link_store(test_images, tmp_path / "state" / "images")
    store.remove(BASE)
    assert ImageStore(test_images).resolve(BASE).image == BASE
