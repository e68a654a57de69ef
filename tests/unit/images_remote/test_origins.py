# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.images import origins
from opendsec.images.origins import Origin
from opendsec.images.records import Damaged


def test_an_origin_comes_back(tmp_path: Path) -> None:
    assert origins.read(tmp_path) is None
    origin = Origin(stores=("near", "far"), prefix="layers/sha256-00/11")
    origins.write(tmp_path, origin, temporary=tmp_path)
    assert origins.read(tmp_path) == origin
    assert origin.key("data.blob") == "layers/sha256-00/11/data.blob"


@pytest.mark.parametrize(
    "origin",
    [
        Origin(stores=(), prefix="a"),
        Origin(stores=("S",), prefix="a"),
        Origin(stores=("https://user:password@host",), prefix="a"),
        *(Origin(stores=("s",), prefix=prefix) for prefix in ("", "/a", "a/../b", "a//b", "a/", "a b", "a?x", "x" * 901)),
    ],
)
def test_what_is_no_origin_is_refused(tmp_path: Path, origin: Origin) -> None:
    origins.write(tmp_path, origin, temporary=tmp_path)
    with pytest.raises(Damaged):
        origins.read(tmp_path)


def test_damage_is_told(tmp_path: Path) -> None:
    (tmp_path / "origin.json").write_text("{}")
    with pytest.raises(Damaged, match=r"origin\.json is not a record"):
        origins.read(tmp_path)
