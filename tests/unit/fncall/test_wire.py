# SPDX-License-Identifier: Apache-2.0
"""What a member says is checked before it is believed: every cut, every length, every kind."""

from __future__ import annotations

import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.fncall import wire
from opendsec.runtime.fncall.interface import File, Job, JobLimits

LIMITS = JobLimits(cpu_time_s=1, wall_time_s=2, memory_bytes=3, output_bytes=4, pids=5, disk_bytes=6)


def ended_body(*parts: bytes, flags: int = 1, status: int = 0, n_files: int = 0) -> bytes:
    filled = [*parts, *[b""] * (7 - len(parts))]
    return struct.pack("<IiQQQQQ7QII", flags, status, 1500, 2500, 7, 10, 20, *map(len, filled), n_files, 0) + b"".join(filled)


def entry(name: bytes, data: bytes) -> bytes:
    return struct.pack("<IIQ", len(name), 0, len(data)) + name + data


def test_an_end() -> None:
    ended = wire.read_ended(
        ended_body(b"out", b"err", b"5", entry(b"a", b"A"), b"problem", b"", b"spoiled", flags=1 | 4 | 8 | 512, status=9, n_files=1)
    )
    assert (ended.code, ended.signal, ended.stdout, ended.stderr, ended.value) == (None, 9, b"out", b"err", b"5")
    assert (ended.files, ended.files_problem, ended.spoiled, ended.timed_out, ended.oom_killed) == (
        {"a": b"A"},
        "problem",
        "spoiled",
        "cpu",
        True,
    )
    assert (ended.cpu_ms, ended.wall_ms, ended.peak_memory_bytes, ended.stdout_total, ended.stderr_total) == (1.5, 2.5, 7, 10, 20)
    quiet = wire.read_ended(ended_body(status=3 << 8))
    assert (quiet.code, quiet.signal, quiet.not_started) == (3, None, "")
    refused = wire.read_ended(ended_body(b"", b"", b"", b"", b"", b"why", flags=128))
    assert (refused.code, refused.not_started, refused.caller_fault) == (None, "why", True)
    assert wire.read_ended(ended_body(status=31)).denied


def test_a_value_without_its_flag_is_none() -> None:
    assert wire.read_ended(ended_body(b"", b"", b"1")).value is None


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_read(data: bytes) -> None:
    for read in (wire.read_head, wire.read_ended):
        try:
            read(data)
        except wire.Broken:
            pass


@given(st.integers(0, 400), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read(at: int, value: int) -> None:
    body = bytearray(ended_body(b"out", b"err", b"5", entry(b"name", b"data") * 2, b"p", flags=1 | 512, n_files=2))
    body[at % len(body)] = value
    try:
        ended = wire.read_ended(bytes(body))
    except wire.Broken:
        return
    assert sum(map(len, ended.files.values())) <= len(body)


def test_every_cut_is_refused() -> None:
    body = ended_body(b"out", b"", b"", entry(b"name", b"data"), n_files=1)
    for length in range(len(body)):
        with pytest.raises(wire.Broken):
            wire.read_ended(body[:length])


@pytest.mark.parametrize(
    ("data", "count"),
    [(b"", 1), (entry(b"a", b"b"), 2), (struct.pack("<IIQ", 1, 0, 1 << 60) + b"ab", 1), (struct.pack("<IIQ", 1 << 31, 0, 1) + b"ab", 1)],
)
def test_files_that_do_not_add_up(data: bytes, count: int) -> None:
    with pytest.raises(wire.Broken):
        wire.read_files(data, count)


def test_a_name_that_is_no_text() -> None:
    assert wire.read_files(entry(b"\xff", b"x") + entry(b"a", b"y"), 2) == ({"a": b"y"}, "b'\\xff': its name is not UTF-8")


def test_heads() -> None:
    assert wire.read_head(wire.HEAD.pack(wire.MAGIC, 18, 0, 2) + b"ab") == (18, 0, 2)
    for wrong in (b"", b"abc", wire.HEAD.pack(1, 18, 0, 0), wire.HEAD.pack(wire.MAGIC, 18, 0, 3) + b"ab"):
        with pytest.raises(wire.Broken):
            wire.read_head(wrong)


def test_a_body_in_a_file() -> None:
    fd = os.memfd_create("test")
    try:
        os.write(fd, b"body")
        head = wire.HEAD.pack(wire.MAGIC, 18, wire.IN_MEMFD, 4)
        assert wire.read_body(head, [fd]) == b"body"
        for length, fds in ((5, [fd]), (4, []), (4, [fd, fd])):
            with pytest.raises(wire.Broken):
                wire.read_body(wire.HEAD.pack(wire.MAGIC, 18, wire.IN_MEMFD, length), fds)
    finally:
        os.close(fd)


def test_jobs() -> None:
    plain = wire.job_body(Job(kind="exec", limits=LIMITS, argv=("a", "b"), env={"X": "1"}, files=(File("f", b"data", True),), stdin=b"in"))
    assert struct.unpack_from("<6I8Q", plain) == (2, 1, 0, 2, 1, 0, 2, 2_000_000, 1_000_000, 4, 6, 64 << 20, 0, 3)
    assert plain.endswith(b"\x01\0\0\0" + (4).to_bytes(8, "little") + b"\x02\0\0\0f\0datain")
    function = wire.job_body(Job(kind="function", limits=LIMITS, function="a:b"))
    assert struct.unpack_from("<6I8Q", function)[0] == 1 and struct.unpack_from("<6I8Q", function)[12] == wire.VALUE_BYTES


@pytest.mark.parametrize(
    ("field", "job"),
    [
        ("argv", Job(kind="exec", limits=LIMITS)),
        ("argv", Job(kind="exec", limits=LIMITS, argv=("",))),
        ("argv", Job(kind="exec", limits=LIMITS, argv=("a", "b\0c"))),
        ("argv", Job(kind="exec", limits=LIMITS, argv=("a",) * 5000)),
        ("env", Job(kind="source", limits=LIMITS, env={"": "a"})),
        ("env", Job(kind="source", limits=LIMITS, env={"a=b": "a"})),
        ("env", Job(kind="source", limits=LIMITS, env={"a": "\0"})),
        *(
            (field, Job(kind="source", limits=LIMITS, files=(File(path, b""),)))
            for field in ("files",)
            for path in ("", "/a", "../a", "a/../b", "a/", "a\0")
        ),
        *(("outputs", Job(kind="source", limits=LIMITS, outputs=(path,))) for path in ("", "/a", "..", "x" * 5000)),
    ],
)
def test_jobs_that_no_member_can_read(field: str, job: Job) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.job_body(job)
    assert caught.value.field == field
