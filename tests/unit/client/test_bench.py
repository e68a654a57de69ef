# SPDX-License-Identifier: Apache-2.0
"""`dsec bench` finds the benchmarks of the checkout and passes options on."""

from __future__ import annotations

from pathlib import Path

from opendsec.client.cli.bench import _is_benchmark, _with_plot
from tests.support import ROOT


def test_benchmarks_are_told_from_what_serves_them() -> None:
    found = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if _is_benchmark(path)}
    assert "container" in found and found.isdisjoint({"report", "spec", "support", "__init__"})


def test_plots_go_where_the_caller_stands(tmp_path: Path) -> None:
    assert _with_plot("x", ["--json"], tmp_path) == ["--json"]
    assert _with_plot("x", ["--plot", "a.png", "--quick"], tmp_path) == ["--plot", str(tmp_path / "a.png"), "--quick"]
    assert _with_plot("x", ["--plot", "out/"], tmp_path) == ["--plot", str(tmp_path / "out" / "x.png")]
    assert (tmp_path / "out").is_dir()
    assert _with_plot("x", ["--plot"], tmp_path) == ["--plot"]
