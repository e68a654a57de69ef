# SPDX-License-Identifier: Apache-2.0
"""The spawner's memory and start-up time are a promise: exactly these modules, and no others, are loaded in it.

Every sandbox is forked from it, so what it carries is copied, or at least mapped, that many times.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import SRC

PROGRAM = f"import sys; sys.path.insert(0, {str(SRC.parent)!r}); import {{}}; print(*sys.modules)"
SPAWNER = SRC / "kernel" / "spawner.py"

# What the spawner may load beyond a bare interpreter; the project's own modules are those of kernel/ alone.
STANDARD_LIBRARY = {
    "__future__",
    "_ctypes",
    "_socket",
    "_struct",
    "array",
    "ctypes",
    "ctypes._endian",
    "errno",
    "fcntl",
    "math",
    "resource",
    "select",
    "signal",
    "socket",
    "struct",
}


def loaded(module: str) -> set[str]:
    command = [sys.executable, "-SI", "-c", PROGRAM.format(module)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["opendsec.kernel.spawner"] if SPAWNER.exists() else ["opendsec.kernel.syscalls"])
def test_what_the_spawner_loads(module: str) -> None:
    new = loaded(module) - loaded("sys")
    own = {name for name in new if name.split(".")[0] == "opendsec"}
    assert {name for name in own if not name.startswith("opendsec.kernel")} <= {"opendsec"}
    assert sorted(new - own - STANDARD_LIBRARY) == []
