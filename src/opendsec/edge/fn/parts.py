# SPDX-License-Identifier: Apache-2.0
"""What an edge needs for function calls; `assemble` fills it in."""

from __future__ import annotations

import msgspec

from opendsec.edge.fn.devices import Accelerator
from opendsec.edge.fn.languages import Languages
from opendsec.runtime.fncall.interface import FnBackend

NAME = "fncall"


class FnParts(msgspec.Struct, frozen=True, kw_only=True):
    backend: FnBackend
    languages: Languages
    devices: tuple[Accelerator, ...] = ()
    members: int = 4  # at most, of a pool that nobody declared
    cache_bytes: int = 1 << 30  # of compiled programs
