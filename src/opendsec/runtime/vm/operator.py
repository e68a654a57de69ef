# SPDX-License-Identifier: Apache-2.0
"""`machines.toml`: what the operator of the edge has to give before machines of some profiles can be had.

    [windows]                            # for profile windows-11-setup
    installer = "/srv/iso/Win11.iso"
    drivers = "/srv/iso/virtio-win.iso"  # its storage driver is what makes the disk visible to the installation

    [windows.answers]                    # see `answers`; without it somebody sits before the screen
    user = "user"
    password = "…"

    [macos]                              # Apple's licence allows macOS on Apple's hardware alone
    apple_hardware = true                # this machine is such
    osk = "…"                            # the key in its system management controller, 64 characters

It holds secrets, so nobody but root may be able to read it. None of them is in a `repr`, an error, a log, a command line or an answer.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.vm.answers import Answers
from opendsec.runtime.vm.profiles import Profile

FILE = "machines.toml"
MAX_BYTES = 1 << 20
Absolute = Annotated[str, Meta(pattern=r"^/[^\x00]*$", max_length=4096)]
Osk = Annotated[str, Meta(pattern=r"^[ !#-~]{64}$")]  # QEMU takes no other length; it stands between quotes that nothing escapes


class Windows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    installer: Absolute
    drivers: Absolute = ""
    answers: Answers | None = None

    def media(self) -> tuple[str, ...]:
        return (self.installer, *((self.drivers,) if self.drivers else ()))


class MacOS(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    apple_hardware: bool
    osk: Osk

    def __repr__(self) -> str:
        return f"MacOS(apple_hardware={self.apple_hardware}, osk=<hidden>)"

    __rich_repr__ = None  # type: ignore[assignment]  # msgspec's would show all fields

    def config(self) -> str:
        """QEMU's configuration of the controller."""
        return f'[device "smc"]\n  driver = "isa-applesmc"\n  osk = "{self.osk}"\n'


class Operator(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`stamp`: of the file, for keys of templates, which must not be made of secrets."""

    windows: Windows | None = None
    macos: MacOS | None = None
    stamp: str = ""

    def lacks(self, profile: Profile) -> str:
        """Why this profile cannot be had, or ""."""
        if profile.apple:
            return "" if self.macos is not None and self.macos.apple_hardware else profile.refused
        if profile.setup:
            if self.windows is None:
                return profile.refused
            for path in self.windows.media():
                if not os.path.isfile(path):
                    return f"a medium that the operator of this edge has named for it in {FILE} is not there"
        return ""


def load(path: Path) -> Operator:
    """Empty if there is no such file. Raises InvalidRequest naming the field; nothing that stands in the file is quoted."""
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Operator()
    if facts.st_mode & 0o077 or facts.st_uid != os.geteuid():
        raise InvalidRequest("must be the edge's own and readable by nobody else (mode 0600)", field=FILE)
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"is larger than {MAX_BYTES} bytes", field=FILE)
    document = _parsed(data, tomllib.loads)
    if "stamp" in document:
        raise InvalidRequest("there is no such field", field="stamp")
    document["stamp"] = f"{facts.st_ino} {facts.st_size} {facts.st_mtime_ns}"
    why, field = "", ""
    try:
        return msgspec.convert(document, Operator)
    except msgspec.ValidationError as error:
        why, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`")
    raise InvalidRequest(why, field=field or FILE)


def _parsed(data: bytes, parse: Callable[[str], dict[str, object]]) -> dict[str, object]:
    line = "?"
    try:
        return parse(data.decode())
    except UnicodeDecodeError:
        pass
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))  # the rest may quote what stands there
        line = found[1] if found else "?"
    raise InvalidRequest(f"is not TOML, at line {line}", field=FILE)
