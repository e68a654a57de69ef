# SPDX-License-Identifier: Apache-2.0
"""The results file survives a crash; the summary counts right."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from opendsec.api.errors import Conflict, InvalidRequest, Unavailable
from opendsec.client.rollout.results import Failure, FailureKind, ResultFile, TaskResult, Timings, summarize
from opendsec.client.rollout.tasks import Verdict


def result(
    name: str, verdict: Verdict | None = "pass", expected: Verdict = "pass", kind: FailureKind | None = None, ms: float = 0
) -> TaskResult:
    failure = Failure(kind=kind, message="because") if kind else None
    timings = Timings(create_ms=ms, verify_ms=2 * ms, total_ms=3 * ms)
    return TaskResult(id=name, verdict=verdict, expected=expected, matched=verdict == expected, failure=failure, timings=timings)


def test_what_was_written_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as file:
        file.append(result("a"))
        file.append(result("b", None, kind="infrastructure"))
        assert len(path.read_bytes().splitlines()) == 2  # there before the file is closed
    with ResultFile(path) as file:
        assert set(file.done) == {"a", "b"}
        file.append(result("c", None, kind="task"))  # its line may have been put right, or its image been built
        file.append(result("d", "fail", kind="agent"))
        file.append(result("e", "fail"))
        assert [one.id for one in file.done.values() if one.done] == ["a", "d", "e"]
        file.append(result("b"))
    with ResultFile(path) as file:
        assert file.done["b"].verdict == "pass"  # the last line counts


@pytest.mark.parametrize("cut", [1, 10, 60])
def test_half_a_line_is_cut_off(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "out.jsonl"
    with ResultFile(path) as file:
        file.append(result("a"))
        file.append(result("b"))
    path.write_bytes(path.read_bytes()[:-cut])
    with ResultFile(path) as file:
        assert set(file.done) == {"a"}
        file.append(result("b"))
    with ResultFile(path) as file:
        assert set(file.done) == {"a", "b"}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out.jsonl"), pytest.raises(Conflict):
        ResultFile(tmp_path / "out.jsonl").__enter__()


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("my notes\n")
    with pytest.raises(InvalidRequest, match="line 1"):
        ResultFile(path).__enter__()
    assert path.read_text() == "my notes\n"
    with pytest.raises(InvalidRequest, match="cannot write"):
        ResultFile(tmp_path / "no" / "out").__enter__()


def test_only_a_regular_file_can_keep_results(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, Path("/dev/full"), tmp_path):
        with pytest.raises(InvalidRequest, match=r"not a regular file|Is a directory") as caught:
            ResultFile(path).__enter__()
        assert caught.value.field == "out"


def test_a_full_disk_is_told_as_such(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "out.jsonl") as file:
        file.append(result("a"))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "out.jsonl").stat().st_size + 10, limits[1]))
        try:
            with pytest.raises(Unavailable, match="cannot write"):
                file.append(result("b"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, before)
        assert "b" not in file.done
    with ResultFile(tmp_path / "out.jsonl") as file:
        assert set(file.done) == {"a"}  # the half line is cut off, and `b` runs again


def test_summary() -> None:
    results = [
        result("a", "pass", "pass", ms=10),
        result("b", "fail", "fail", ms=20),
        result("c", "fail", "pass", "agent", ms=30),
        result("d", None, "pass", "infrastructure"),
        result("e", None, "fail", "task"),
    ]
    summary = summarize(results)
    assert (summary.tasks, summary.matched, summary.ok) == (5, 2, False)
    assert summary.matrix == {"pass": {"pass": 1, "fail": 1, "none": 1}, "fail": {"pass": 0, "fail": 1, "none": 1}}
    assert summary.failures == {"task": 1, "agent": 1, "infrastructure": 1}
    assert summary.create_ms == (20.0, 30.0) and summary.mistaken == ("c", "d", "e")
    empty = summarize([])
    assert empty.ok and empty.create_ms is None
