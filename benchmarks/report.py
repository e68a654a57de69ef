# SPDX-License-Identifier: Apache-2.0
"""The one format benchmarks speak: results beside their bounds and their peers, as JSON, a table, or a plot."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import spec


def command_line(bench: str, doc: str) -> argparse.ArgumentParser:
    """What every benchmark takes; see `Report.finish`."""
    parser = argparse.ArgumentParser(prog=f"dsec bench {bench}", description=doc.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer samples, within 60 s once the images are built")
    parser.add_argument("--plot", type=Path, help="draw the latencies into this PNG file")
    return parser


def percentile(samples: Sequence[float], share: float) -> float:
    """The value that `share` of the samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]


@dataclass
class Report:
    """What one benchmark found. `add` judges by SPECIFICATION.md; `note` records a figure that has no bound."""

    bench: str
    peers: dict[str, str]
    results: list[dict[str, object]] = field(default_factory=list)
    samples: dict[str, Sequence[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        bound = spec.load()[name]
        self.results.append(
            {
                "name": name,
                "value": round(value, 4),
                "unit": bound.unit,
                "bound": bound.bound,
                "relation": bound.relation,
                "holds": bound.holds(value),
            }
        )

    def note(self, name: str, value: float, unit: str) -> None:
        self.results.append({"name": name, "value": round(value, 4), "unit": unit, "bound": None, "relation": None, "holds": None})

    def distribution(self, name: str, samples_ms: Sequence[float]) -> None:
        """Median, p90 and p99 of latencies in milliseconds, kept for the plot."""
        self.samples[name] = samples_ms
        for label, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
            self.note(f"{name}.{label}", percentile(samples_ms, share), "ms")

    @property
    def holds(self) -> bool:
        return all(result["holds"] is not False for result in self.results)

    def document(self) -> dict[str, object]:
        return {"bench": self.bench, "machine": machine(), "peers": self.peers, "results": self.results}

    def print(self, *, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self.document(), indent=1))
            return
        for result in self.results:
            bound = (
                "" if result["bound"] is None else f"  {result['relation']} {result['bound']:g}  {'ok' if result['holds'] else 'MISSED'}"
            )
            print(f"{result['name']:<44} {result['value']:>12} {result['unit']}{bound}")

    def finish(self, options: argparse.Namespace) -> int:
        """Print and plot as asked for; the exit code."""
        self.print(as_json=options.json)
        if options.plot is not None:
            self.plot(options.plot)
        return 0 if self.holds else 1

    def plot(self, path: Path) -> None:
        """Cumulative distributions of all latencies. Raises ImportError without matplotlib (the `bench` extra)."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(9, 5))
        for name, samples in self.samples.items():
            ordered = sorted(samples)
            axes.plot(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], label=name)
        axes.set(xlabel="milliseconds", ylabel="share of samples", title=f"{self.bench}: latency", xscale="log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def machine() -> Mapping[str, object]:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cores": os.cpu_count(), "memory_bytes": memory, "kernel": platform.release(), "python": platform.python_version()}
