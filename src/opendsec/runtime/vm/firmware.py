# SPDX-License-Identifier: Apache-2.0
"""Where the host keeps UEFI firmware for machines, as Debian's package ovmf lays it out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from opendsec.api.errors import Unsupported

FOLDER = Path("/usr/share/OVMF")
PLAIN = (("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd"), ("OVMF_CODE.fd", "OVMF_VARS.fd"))
SECURE = (("OVMF_CODE_4M.secboot.fd", "OVMF_VARS_4M.ms.fd"), ("OVMF_CODE.secboot.fd", "OVMF_VARS.ms.fd"))


@dataclass(frozen=True, slots=True)
class Found:
    """`variables`: what a machine's own begin as."""

    code: Path
    variables: Path

    def digest(self) -> str:
        return hashlib.sha256(self.code.read_bytes() + self.variables.read_bytes()).hexdigest()[:16]


def find(*, secure: bool = False, folder: Path = FOLDER) -> Found:
    """Raises Unsupported where there is none."""
    for code, variables in SECURE if secure else PLAIN:
        if (folder / code).exists() and (folder / variables).exists():
            return Found((folder / code).resolve(), (folder / variables).resolve())
    raise Unsupported(f"no UEFI firmware{' with secure boot' if secure else ''} here (Debian package ovmf)", field="spec.profile")
