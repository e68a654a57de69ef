# SPDX-License-Identifier: Apache-2.0
"""What tests share beyond fixtures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from opendsec.kernel import procfs

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "opendsec"
NATIVE_INIT = SRC / "_native" / "dsec-init"


def requires(*features: str) -> pytest.MarkDecorator:
    """Mark a test that needs kernel features, by their names in `opendsec.kernel.features`.

    The only way to skip: where a feature is missing the test is skipped with the probe's own reason. Any other skip is an error in CI.
    """
    return pytest.mark.requires(*features)


def running(pids: Iterable[int], program: str) -> list[int]:
    """Those of the processes that run this program, by its argument 0. One that has gone since it was listed is none of them."""
    found = []
    for pid in pids:
        try:
            if procfs.cmdline(pid)[:1] == [program.encode()]:
                found.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
