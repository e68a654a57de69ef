# SPDX-License-Identifier: Apache-2.0
"""The linters, as tests: the same commands and settings on a laptop and in CI (settings: pyproject.toml)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

BIN = Path(sys.executable).parent
PYTHON_TREES = ["src", "tests", "benchmarks", "hatch_build.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["ruff", "check", "."], id="ruff-check"),
        pytest.param(["ruff", "format", "--check", "."], id="ruff-format"),
        pytest.param(["mypy", "src"], id="mypy"),
        pytest.param(["lint-imports", "--no-cache"], id="import-rules"),
        pytest.param(["codespell", "."], id="codespell"),
    ],
)
@pytest.mark.timeout(300)
def test_is_clean(command: list[str]) -> None:
    done = subprocess.run([BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{done.stdout}{done.stderr}", pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tools/setup.sh", "tools/run_tests.sh", ".ci/run"])
def test_shell_scripts_parse(script: str) -> None:
    assert subprocess.run(["bash", "-n", ROOT / script], capture_output=True, text=True, check=False).stderr == ""
