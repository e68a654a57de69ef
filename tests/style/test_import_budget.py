# SPDX-License-Identifier: Apache-2.0
"""The spawner's memory and start-up time are a promise: exactly these modules, and no others, are loaded in it.

Every sandbox is forked from it, so what it carries is copied, or at least mapped, that many times.
"""

from __future__ import annotations

import subprocess
import sys

from tests.support import SRC

PROGRAM = f"import sys; sys.path.insert(0, {str(SRC.parent)!r}); import {{}}; print(*sys.modules)"

# What the spawner may load beyond a bare interpreter; the project's own modules are those of kernel/ alone.
# socket and signal bring enum, and enum the rest of the first lines; typing, re, contextlib, importlib and asyncio stay out.
STANDARD_LIBRARY = {
    *("__future__", "_collections", "_collections_abc", "_functools", "_operator", "_stat", "collections", "collections.abc", "enum"),
    *(
        "functools",
        "genericpath",
        "itertools",
        "keyword",
        "operator",
        "os",
        "os.path",
        "posixpath",
        "reprlib",
        "selectors",
        "stat",
        "types",
    ),
    *("_ctypes", "_socket", "_struct", "array", "ctypes", "ctypes._endian", "errno", "fcntl", "marshal", "math", "resource", "select"),
    *("signal", "socket", "struct"),
}


def loaded(module: str) -> set[str]:
    command = [sys.executable, "-SI", "-c", PROGRAM.format(module)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_what_the_spawner_loads() -> None:
    new = loaded("opendsec.kernel.spawner") - loaded("sys")
    own = {name for name in new if name.split(".")[0] == "opendsec"}
    assert {name for name in own if not name.startswith("opendsec.kernel")} <= {"opendsec"}
    assert sorted(new - own - STANDARD_LIBRARY) == []
