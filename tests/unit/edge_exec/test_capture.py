# SPDX-License-Identifier: Apache-2.0
"""The capture against a model that keeps everything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.edge import capture as capture_module
from opendsec.edge.capture import LATE_BYTES, LEAST_BYTES, Budget, Capture, Output, whole_end, whole_start

chunks = st.lists(st.binary(max_size=40), max_size=40)
limits = st.integers(0, 64)


def filled(limit: int, parts: list[bytes]) -> tuple[Capture, bytes]:
    capture = Capture(limit)
    for part in parts:
        capture.write(memoryview(part))
    return capture, b"".join(parts)


@given(limits, chunks)
def test_keeps_head_and_tail_and_the_exact_length(limit: int, parts: list[bytes]) -> None:
    capture, everything = filled(limit, parts)
    kept = capture.snapshot()
    assert kept.total_bytes == capture.total == len(everything)
    assert capture.held_bytes == min(limit, len(everything))
    if len(everything) <= limit:
        assert kept.data() == everything and not kept.truncated
        return
    ring = limit // 2
    head, tail = everything[: limit - ring], everything[len(everything) - ring :]
    assert kept.truncated and head.startswith(kept.head) and tail.endswith(kept.tail)
    assert len(head) - len(kept.head) <= 3 and len(tail) - len(kept.tail) <= 3
    assert kept.omitted_bytes == len(everything) - len(kept.head) - len(kept.tail)


@given(limits, st.lists(st.text(max_size=10), max_size=40))
def test_never_splits_a_character(limit: int, texts: list[str]) -> None:
    capture, everything = filled(limit, [text.encode("utf-8", "replace") for text in texts])
    kept = capture.snapshot()
    assert everything.startswith(kept.head.decode().encode())  # both decode strictly
    assert everything.endswith(kept.tail.decode().encode())


@given(limits, chunks, st.integers(0, 1700), st.integers(1, 50))
def test_reads_from_an_offset(limit: int, parts: list[bytes], offset: int, size: int) -> None:
    capture, everything = filled(limit, parts)
    data, following, missing = capture.read_from(offset, size)
    assert len(data) <= size
    if data:
        assert following == offset + missing + len(data)
        assert everything[offset + missing : following] == data
    else:
        assert following == max(offset, min(offset + missing, len(everything)))
    kept_before = range(limit - limit // 2)
    kept_after = range(max(0, len(everything) - limit // 2), len(everything))
    first_kept = next((p for p in range(offset, len(everything)) if p in kept_before or p in kept_after), max(offset, len(everything)))
    assert offset + missing == first_kept


@given(limits, chunks, st.integers(1, 30))
def test_a_reader_that_keeps_up_misses_nothing(limit: int, parts: list[bytes], size: int) -> None:
    output = Output(limit)
    offset, seen, missing = 0, b"", 0
    for part in parts:
        for piece in (part[: limit // 2], part[limit // 2 :][: limit // 2]) if limit > 1 else (part,):
            output.write(memoryview(piece))
            while offset < output.total:
                data, offset, gap = output.read_from(offset, size)
                seen, missing = seen + data, missing + gap
    assert len(seen) + missing == output.total
    if limit > 1:
        assert missing == 0


@given(limits, chunks, chunks)
def test_the_result_stays_when_children_write_on(limit: int, before: list[bytes], after: list[bytes]) -> None:
    output = Output(limit)
    for part in before:
        output.write(memoryview(part))
    output.freeze()
    result = output.kept.snapshot()
    for part in after:
        output.write(memoryview(part))
    assert output.kept.snapshot() == result
    everything = b"".join(before + after)
    assert output.total == len(everything)
    offset = 0
    while offset < len(everything):
        data, following, missing = output.read_from(offset, 7)
        assert everything[offset + missing : following] == data and following > offset
        offset = following
    assert output.held_bytes <= output.bound_bytes <= 2 * max(limit, 1)


def test_dropping_keeps_the_length() -> None:
    output = Output(100)
    output.write(memoryview(b"x" * 80))
    output.freeze()
    output.drop()
    output.write(memoryview(b"y" * 5))
    assert (output.held_bytes, output.total) == (0, 85)
    assert output.kept.snapshot().total_bytes == output.kept.snapshot().omitted_bytes == 80
    assert output.read_from(10, 1000) == (b"", 80, 70)
    assert output.read_from(80, 1000) == (b"", 85, 5)


def test_after_the_end_less_is_kept() -> None:
    output = Output(10 << 20)
    output.freeze()
    output.write(memoryview(bytes(1 << 20)))
    assert output.held_bytes == LATE_BYTES


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=60)), max_size=60), st.integers(0, 200), st.integers(0, 60))
def test_together_captures_keep_within_a_budget(writes: list[tuple[int, bytes]], limit: int, offset: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture_module, "LEAST_BYTES", 8)
        budget = Budget(limit)
        captures, everything = [Capture(100, budget=budget) for _ in range(4)], [b""] * 4
        for index, data in writes:
            captures[index].write(memoryview(data))
            everything[index] += data
            assert budget.held == sum(capture.held_bytes for capture in captures)
            assert budget.held <= max(limit, 4 * 8)
    for capture, wanted in zip(captures, everything, strict=True):
        kept = capture.snapshot()
        assert kept.total_bytes == len(wanted) and wanted.startswith(kept.head) and wanted.endswith(kept.tail)
        assert kept.truncated or kept.data() == wanted
        at = offset
        while at < len(wanted):
            data, following, missing = capture.read_from(at, 7)
            assert wanted[at + missing : following] == data and following > at
            at = following
        budget.release(capture)
    assert budget.held == 0


def test_a_flood_costs_only_those_who_flood() -> None:
    budget = Budget(1 << 20)
    little = Output(10 << 20, budget)
    little.write(memoryview(b"x" * LEAST_BYTES))
    floods = [Output(10 << 20, budget) for _ in range(4)]
    for _ in range(100):
        for flood in floods:
            flood.write(memoryview(bytes(64 << 10)))
    assert budget.held <= 1 << 20
    assert not little.kept.halved and not little.kept.snapshot().truncated
    assert all(flood.kept.halved and flood.kept.held_bytes >= LEAST_BYTES // 2 and flood.kept.total == 100 << 16 for flood in floods)
    for flood in floods:
        flood.freeze()
    assert budget.held == LEAST_BYTES  # what is kept of ended ones is the retention's to count


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"", b""),
        (b"a", b"a"),
        ("é".encode(), "é".encode()),
        ("é".encode()[:1], b""),
        ("x€".encode()[:3], b"x"),
        ("x€".encode()[:2], b"x"),
        ("🙂".encode()[:3], b""),
        ("🙂".encode(), "🙂".encode()),
        (b"\x80\x80\x80\x80", b"\x80\x80\x80\x80"),  # no text at all
        (b"a\xff", b"a\xff"),
    ],
)
def test_whole_end(data: bytes, kept: bytes) -> None:
    assert whole_end(data) == kept


@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (b"", b""),
        (b"a", b"a"),
        ("é".encode()[1:], b""),
        ("🙂x".encode()[1:], b"x"),
        ("🙂x".encode(), "🙂x".encode()),
        (b"\x80\x80\x80\x80", b"\x80\x80\x80\x80"),
    ],
)
def test_whole_start(data: bytes, kept: bytes) -> None:
    assert whole_start(data) == kept
