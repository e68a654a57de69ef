# SPDX-License-Identifier: Apache-2.0
"""The answers for an installation of Windows, and the disc that they are on."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pycdlib
import pytest

from opendsec.runtime.vm.answers import LABEL, NAME, UNATTEND, WCM, Answers

IN = f"{{{UNATTEND}}}"
SECRET = 'a<b>&"ä'
ANSWERS = Answers(
    password=SECRET, user="Ann", computer="BOX-1", edition="Windows 11 Home", language="de-DE", time_zone="W. Europe Standard Time"
)


def texts(root: ElementTree.Element, *names: str) -> list[str | None]:
    return [one.text for one in root.findall(".//" + "/".join(f"{IN}{name}" for name in names))]


def test_every_answer_is_in_its_place() -> None:
    root = ElementTree.fromstring(ANSWERS.xml())
    assert [one.get("pass") for one in root] == ["windowsPE", "specialize", "oobeSystem"]
    assert texts(root, "UserData", "AcceptEula") == ["true"]
    assert texts(root, "MetaData", "Value") == ["Windows 11 Home"]
    assert texts(root, "UILanguage") == ["de-DE"]
    assert texts(root, "ComputerName") == ["BOX-1"] and texts(root, "TimeZone") == ["W. Europe Standard Time"]
    assert texts(root, "LocalAccount", "Name") == texts(root, "AutoLogon", "Username") == ["Ann"]
    assert texts(root, "Password", "Value") == [SECRET, SECRET]
    assert texts(root, "CreatePartition", "Type") == ["EFI", "MSR", "Primary"]
    assert texts(root, "ModifyPartition", "PartitionID") == ["1", "3"]
    assert texts(root, "CreatePartition", "Extend") == ["true"]
    paths = texts(root, "PathAndCredentials", "Path")
    assert "E:\\viostor\\w11\\amd64" in paths and len(paths) == len(set(paths)) == 16
    keys = [one.get(f"{{{WCM}}}keyValue") for one in root.iter(f"{IN}PathAndCredentials")]
    assert keys == [str(number) for number in range(1, 17)]
    (command,) = texts(root, "SynchronousCommand", "CommandLine")
    assert command is not None and 'msiexec /i "%d:\\guest-agent\\qemu-ga-x86_64.msi" /qn' in command
    assert not texts(ElementTree.fromstring(msgspec.structs.replace(ANSWERS, tools="").xml()), "SynchronousCommand")


def test_the_disc_is_one(tmp_path: Path) -> None:
    disc = ANSWERS.disc()
    assert len(disc) < 1 << 20
    path = tmp_path / "disc"
    path.write_bytes(disc)
    said = subprocess.run(["blkid", "-p", "-o", "export", path], capture_output=True, text=True, check=True).stdout
    assert "TYPE=iso9660" in said and f"LABEL={LABEL}" in said
    image, held = pycdlib.PyCdlib(), io.BytesIO()
    image.open_fp(io.BytesIO(disc))
    try:
        image.get_file_from_iso_fp(held, joliet_path=f"/{NAME}")
    finally:
        image.close()
    assert held.getvalue() == ANSWERS.xml()


@pytest.mark.parametrize(
    "wrong",
    (
        *(
            {},
            {"password": ""},
            {"password": "x", "user": "a/b"},
            {"password": "x", "computer": "a b"},
            {"password": "x", "product_key": "1"},
        ),
        *(
            {"password": "x", "drivers": ["a&b"]},
            {"password": "x", "tools": 'x" & del'},
            {"password": "x", "more": 1},
            {"password": "a\nb"},
        ),
    ),
)
def test_what_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Answers)


def test_the_password_is_not_shown() -> None:
    assert SECRET not in repr(ANSWERS) and "Ann" in repr(ANSWERS)
