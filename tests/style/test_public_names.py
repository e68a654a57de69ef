# SPDX-License-Identifier: Apache-2.0
"""The public surface of `import opendsec`: these names, no more, each from one home, and loaded only when asked for."""

from __future__ import annotations

import ast
import subprocess
import sys

import opendsec
from tests.support import SRC

PUBLIC = {
    *("Client", "Sandbox", "Result", "sync", "Container", "MicroVM", "VM", "Limits"),
    *("FnCall", "FnInput", "FnLimits", "FnResult", "JudgeTask", "JudgeResult", "Test", "Checker", "PoolSpec"),
    *("OpenDSecError", "CallerError", "InvalidRequest", "Unauthorized", "NotFound", "Conflict", "QuotaExceeded", "Unsupported"),
    *("PolicyError", "Denied", "SandboxError", "SandboxLost", "PlatformError", "Unavailable", "Internal", "CommandFailed"),
}


def test_names() -> None:
    assert len(opendsec.__all__) == len(set(opendsec.__all__))
    assert set(opendsec.__all__) == PUBLIC
    assert set(dir(opendsec)) >= PUBLIC


def test_every_name_is_there() -> None:
    for name in opendsec.__all__:
        assert getattr(opendsec, name).__name__.rpartition(".")[2] == name


def test_type_checkers_and_the_loader_agree_on_the_homes() -> None:
    tree = ast.parse((SRC / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert declared == opendsec._HOMES | {"sync": "opendsec.client"}


def test_importing_the_package_loads_nothing_else() -> None:
    program = "import sys; import opendsec; print([m for m in sys.modules if m.startswith(('opendsec.', 'msgspec', 'httpx'))])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_unknown_names_are_attribute_errors() -> None:
    assert not hasattr(opendsec, "NoSuchThing")
