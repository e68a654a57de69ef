# SPDX-License-Identifier: Apache-2.0
"""What the operator of an edge gives to machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from opendsec.api.errors import InvalidRequest
from opendsec.edge.config import BadSettings
from opendsec.edge.machines import load_operator
from opendsec.runtime.vm.operator import FILE, MacOS, Operator, load
from opendsec.runtime.vm.profiles import PROFILES

SECRET = "a key that was made up (c) by nobody".ljust(64, "x")
WHOLE = """
[windows]
installer = "{installer}"
drivers = "{drivers}"
[windows.answers]
password = "{secret}"
[macos]
apple_hardware = true
osk = "{secret}"
"""


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / FILE
    path.write_text(text)
    path.chmod(mode)
    return path


def test_no_file_gives_nothing(tmp_path: Path) -> None:
    operator = load(tmp_path / FILE)
    assert operator == Operator()
    for name, profile in PROFILES.items():
        assert bool(operator.lacks(profile)) == (name in ("macos", "windows-11-setup")), name


def test_all_of_it(tmp_path: Path) -> None:
    installer, drivers = tmp_path / "installer.iso", tmp_path / "drivers.iso"
    path = written(tmp_path, WHOLE.format(installer=installer, drivers=drivers, secret=SECRET))
    operator = load(path)
    assert operator.windows is not None and operator.windows.media() == (str(installer), str(drivers))
    assert operator.macos is not None and f'osk = "{SECRET}"' in operator.macos.config()
    assert SECRET not in repr(operator) and SECRET not in operator.stamp
    assert not operator.lacks(PROFILES["macos"])
    assert "is not there" in operator.lacks(PROFILES["windows-11-setup"])
    installer.touch()
    drivers.touch()
    assert not operator.lacks(PROFILES["windows-11-setup"])
    assert load(path).stamp == operator.stamp
    path.write_text(path.read_text() + "\n")
    assert load(path).stamp != operator.stamp


def test_apple_hardware_has_to_be_confirmed() -> None:
    assert Operator(macos=MacOS(apple_hardware=False, osk=SECRET)).lacks(PROFILES["macos"])


@pytest.mark.parametrize(
    ("text", "field"),
    (
        ("[macos]\napple_hardware = true\nosk = 5", "macos.osk"),
        (f"[macos]\napple_hardware = true\nosk = '{SECRET}\"'", "macos.osk"),
        (f"[macos]\napple_hardware = true\nosk = '{SECRET[1:]}'", "macos.osk"),
        (f"[macos]\nosk = '{SECRET}'", "macos"),
        (f"[macos]\napple_hardware = '{SECRET}'\nosk = '{SECRET}'", "macos.apple_hardware"),
        (f"[windows]\ninstaller = '{SECRET}'", "windows.installer"),
        (f"[windows.answers]\npassword = '{SECRET}'", "windows"),
        (f"[windows]\ninstaller = '/x'\n[windows.answers]\nuser = 'a/b'\npassword = '{SECRET}'", "windows.answers.user"),
        (f"osk = '{SECRET}", FILE),
        ("stamp = 'x'", "stamp"),
        ("more = 1", FILE),
    ),
)
def test_what_is_wrong_is_named_and_not_quoted(tmp_path: Path, text: str, field: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidRequest) as raised:
        load(path)
    assert raised.value.field == field
    with pytest.raises(BadSettings) as told:
        load_operator(path)
    assert SECRET not in f"{raised.value!r} {raised.value} {told.value!r}"


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = written(tmp_path, "", 0o640)
    with pytest.raises(InvalidRequest, match="0600"):
        load(path)
