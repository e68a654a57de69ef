# SPDX-License-Identifier: Apache-2.0
"""Language definitions: ours, the operator's, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.edge.fn.languages import command, load, parse_images


def test_all_that_come_with_the_package_are_read() -> None:
    languages = load()
    assert set(languages.all) == {"python", "c", "cpp", "java", "javascript", "go", "rust", "bash"}
    assert languages.get("python").warm
    assert {language.image for language in languages.all.values()} == {"toolchain"}


def test_an_operator_adds_languages_and_replaces_ours(tmp_path: Path) -> None:
    (tmp_path / "lua.toml").write_text('image = "fn-lua"\nfile = "main.lua"\nrun = ["lua", "{file}"]\n')
    ours = 'image = "fn-c"\nfile = "a.c"\ncompile = ["tcc", "{file}"]\nrun = ["./a.out"]\nartifacts = ["a.out"]\n'
    (tmp_path / "c.toml").write_text(ours)
    languages = load(tmp_path)
    assert languages.get("lua").run == ("lua", "{file}")
    assert languages.get("c").compile == ("tcc", "{file}") and languages.get("cpp").image == "toolchain"


def test_images_are_the_operators_choice() -> None:
    languages = load(images="python=debian-python, *=mine:2")
    assert languages.get("python").image == "debian-python" and languages.get("rust").image == "mine:2"
    assert parse_images("") == {}
    for bad in ("python", "=x", "python=", "python=A B"):
        with pytest.raises(ValueError, match="LANGUAGE=IMAGE"):
            parse_images(bad)
    with pytest.raises(ValueError, match="no language is called 'perl'"):
        load(images="perl=x")


def test_places_in_commands_are_filled_in() -> None:
    java = load().get("java")
    assert "-Xmx256m" in command(java.run, java, 256 << 20)
    assert command(java.compile, java, 1)[-1] == "Main.java"


def test_an_unknown_language_names_the_known_ones() -> None:
    with pytest.raises(InvalidRequest, match="bash, c, cpp") as caught:
        load().get("cobol")
    assert caught.value.field == "language"


BAD = {
    "no TOML": "x",
    "an unknown key": 'image="a"\nfile="b"\nrun=["c"]\nspeed=1\n',
    "a name": 'name="x"\nimage="a"\nfile="b"\nrun=["c"]\n',
    "no image": 'file="b"\nrun=["c"]\n',
    "a bad image": 'image="A B"\nfile="b"\nrun=["c"]\n',
    "a file elsewhere": 'image="a"\nfile="/etc/x"\nrun=["c"]\n',
    "no command": 'image="a"\nfile="b"\nrun=[]\n',
    "a command that is no list": 'image="a"\nfile="b"\nrun="c"\n',
    "nothing compiled": 'image="a"\nfile="b"\nrun=["c"]\ncompile=["d"]\n',
    "a bad overhead": 'image="a"\nfile="b"\nrun=["c"]\nmemory_overhead="much"\n',
    "artifacts elsewhere": 'image="a"\nfile="b"\nrun=["c"]\ncompile=["d"]\nartifacts=["../x"]\n',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_definition_names_the_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(BAD[name])
    with pytest.raises(ValueError, match=r"x\.toml"):
        load(tmp_path)
