# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import InvalidRequest
from opendsec.api.spec import Container
from opendsec.images import names


def accepted_by_spec(**fields: object) -> bool:
    try:
        Container(**{"image": "x", **fields}).check()  # type: ignore[arg-type]
    except InvalidRequest:
        return False
    return True


IMAGES = [
    "debian",
    "python:3.12",
    "team/tools:2",
    "a",
    "a.b_c-d",
    "",
    "Debian",
    ":1",
    "a:",
    "a:b:c",
    "a/",
    "-a",
    "a" * 129,
    "a:" + "1" * 65,
    "a\n",
]
LAYERS = [
    "workspace:astropy@4f2c",
    "toolkit:harness@7",
    "harness",
    "harness@7",
    "base:debian",
    "workspace:a/b+c@1.0+x",
    "sha256:" + "0" * 64,
    "",
    "other:x@1",
    "workspace:",
    "workspace:@1",
    "x@",
    "x@1@2",
    "-x",
    "x" * 129,
    "x\n",
]


@pytest.mark.parametrize("name", IMAGES)
def test_image_names_are_those_that_a_spec_accepts(name: str) -> None:
    try:
        names.check_image_name(name, "name")
        accepted = True
    except InvalidRequest as error:
        assert error.field == "name"
        accepted = False
    assert accepted == accepted_by_spec(image=name)


@pytest.mark.parametrize("text", LAYERS)
def test_layer_names_are_those_that_a_spec_accepts(text: str) -> None:
    try:
        accepted = names.is_digest(text) or bool(names.parse_layer_name(text, "layers[0]"))
    except InvalidRequest as error:
        assert error.field == "layers[0]"
        accepted = False
    assert accepted == accepted_by_spec(layers=(text,))


@given(st.text(alphabet="ab:@/.-+ \n\0", max_size=20))
def test_parsing_is_total(text: str) -> None:
    try:
        name = names.parse_layer_name(text, "x")
    except InvalidRequest:
        return
    assert str(name) == text


def test_a_tag_of_a_base_is_its_version() -> None:
    assert str(names.complete_layer_name("base", "python:3.12", "1")) == "base:python@3.12"
    assert str(names.complete_layer_name("base", "debian", "1")) == "base:debian@1"
    assert str(names.complete_layer_name("workspace", "astropy", "4f2c")) == "workspace:astropy@4f2c"


@pytest.mark.parametrize(
    ("kind", "name", "version", "field"),
    [("base", "Debian", "1", "name"), ("toolkit", "a:b", "1", "name"), ("toolkit", "a", "", "version"), ("toolkit", "a", "1@2", "version")],
)
def test_incomplete_names_are_refused(kind: str, name: str, version: str, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        names.complete_layer_name(kind, name, version)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_file_names_fit_and_differ() -> None:
    found = {names.file_name(name) for name in ("a/b", "a%2Fb", "a:b", "a", "/" * 127, "/" * 126)}
    assert len(found) == 6
    assert max(len(name.encode()) for name in found) <= 255
    assert not any("/" in name for name in found)
