# SPDX-License-Identifier: Apache-2.0
"""What the edge and a member's supervisor say to each other: native/calld.c and native/envelope.h have the same structures.

A message is a head (magic, type, flags, length of the body) and a body, in one datagram or, if it is large, with the body in a memfd
beside it. What comes from a member is checked for its shape: the supervisor is ours, but it runs where hostile programs do.
"""

from __future__ import annotations

import marshal
import os
import struct
from collections.abc import Mapping, Sequence

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.container.plan import raw
from opendsec.runtime.fncall.interface import Ended, Job

MAGIC = 0x31434644
SETUP, JOB, CANCEL, READY, FAILED, ENDED = 1, 2, 3, 16, 17, 18
IN_MEMFD = 1
INLINE_BYTES = 60 << 10  # of a body that goes in the datagram
DATAGRAM_BYTES = 96 << 10  # no message is larger
MAX_ANSWER_BYTES = 9 << 30  # two streams of 4 GiB at most, and more than anybody allows
VALUE_BYTES = (16 << 20) + 8  # of a function's value, with its head
MAX_WORDS, MAX_PATH_BYTES = 4096, 3000  # of calld.c

HEAD = struct.Struct("<IIII")
_JOB = struct.Struct("<6I8Q")
_ENDED = struct.Struct("<IiQQQQQ7QII")
_SETUP = struct.Struct("<8I2Q")
_FILE, _ENTRY = struct.Struct("<IQ"), struct.Struct("<IIQ")
_LENGTH = struct.Struct("<I")
_PYTHON, _EXEC = 1, 2

_STARTED, _WALL, _CPU, _OOM, _OUTPUT, _PIDS, _DISK, _CALLERS_FAULT, _, _VALUE = (1 << bit for bit in range(10))
SIGSYS = 31


class Broken(Exception):
    """A member said what no member says."""


def _text(text: str) -> bytes:
    data = raw(text) + b"\0"
    return _LENGTH.pack(len(data)) + data


def setup_body(
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    workdir: str,
    masked: Sequence[bytes],
    read_only: Sequence[bytes],
    call_filter: bytes,
    warm_filter: bytes,
    cores: int,
    cpu_is_v1: bool,
    disk_bytes: int,
    patience_s: float,
) -> bytes:
    """What a member is told once. `argv`: of the warm interpreter, empty without one."""
    lengths = (len(argv), len(env), len(masked), len(read_only), len(call_filter), len(warm_filter), cores, cpu_is_v1)
    parts = [_SETUP.pack(*lengths, disk_bytes, round(patience_s * 1e6)), call_filter, warm_filter, _text(workdir)]
    parts += [_text(f"{name}={value}") for name, value in env.items()]
    parts += [_LENGTH.pack(len(name) + 1) + name + b"\0" for name in (*masked, *read_only)]
    parts += [_text(word) for word in argv]
    return b"".join(parts)


def warm_config(preload: Sequence[str], warmup: str, workdir: str, env: Mapping[str, str]) -> bytes:
    """For zygote.py. `env`: what the image sets, so that what calld adds can be told from it."""
    return marshal.dumps((tuple(preload), warmup, workdir, "LD_BIND_NOW" in env), 2)


def check(job: Job) -> None:
    """That a member can read it. Raises InvalidRequest, which names the field."""
    for field, texts, maximum in (
        ("argv", job.argv, MAX_WORDS),
        ("env", [f"{name}={value}" for name, value in job.env.items()], MAX_WORDS),
        ("outputs", job.outputs, MAX_WORDS),
        ("files", [file.path for file in job.files], 1 << 20),
    ):
        if len(texts) > maximum:
            raise InvalidRequest(f"at most {maximum}, not {len(texts)}", field=field)
        for text in texts:
            if "\0" in text:
                raise InvalidRequest(f"no NUL may be in {text[:80]!r}", field=field)
            if field in ("outputs", "files") and (
                not text or text.startswith("/") or ".." in text.split("/") or text.endswith("/") or len(raw(text)) > MAX_PATH_BYTES
            ):
                raise InvalidRequest(f"{text[:80]!r} is no relative path without '..' of 1 to {MAX_PATH_BYTES} bytes", field=field)
    for name in job.env:
        if not name or "=" in name:
            raise InvalidRequest(f"not the name of a variable: {name[:80]!r}", field="env")
    if job.kind == "exec" and not (job.argv and job.argv[0]):
        raise InvalidRequest("a program is needed", field="argv")


def job_body(job: Job) -> bytes:
    """Raises InvalidRequest."""
    if job.argv or job.env or job.files or job.outputs or job.kind == "exec":
        check(job)
    is_exec = job.kind == "exec"
    payload = b""
    if not is_exec:
        # Version 2 of the format is what every Python that may be in an image can read.
        payload = marshal.dumps((job.kind, job.source, job.filename, job.function, job.args, job.kwargs, dict(job.env)), 2)
    limits = job.limits
    parts = [
        _JOB.pack(
            _EXEC if is_exec else _PYTHON,
            len(job.files),
            len(job.outputs),
            len(job.argv) if is_exec else 0,
            len(job.env) if is_exec else 0,
            len(payload),
            len(job.stdin),
            round(limits.wall_time_s * 1e6),
            round(limits.cpu_time_s * 1e6),
            limits.output_bytes,
            limits.disk_bytes,
            job.output_files_bytes,
            VALUE_BYTES if job.kind == "function" else 0,
            limits.memory_bytes,
        )
    ]
    parts += [_text(pattern) for pattern in job.outputs]
    if is_exec:
        parts += [_text(word) for word in job.argv]
        parts += [_text(f"{name}={value}") for name, value in job.env.items()]
    for file in job.files:
        parts += [_FILE.pack(file.executable, len(file.data)), _text(file.path), file.data]
    parts += [job.stdin, payload]
    return b"".join(parts)


def read_head(datagram: bytes) -> tuple[int, int, int]:
    """(type, flags, length of the body). Raises Broken."""
    if len(datagram) < HEAD.size:
        raise Broken(f"a message of {len(datagram)} bytes")
    magic, kind, flags, length = HEAD.unpack_from(datagram)
    if magic != MAGIC or (not flags & IN_MEMFD and length != len(datagram) - HEAD.size):
        raise Broken("not a message")
    return kind, flags, length


def read_body(datagram: bytes, fds: list[int]) -> bytes:
    """The body, wherever it is. Raises Broken."""
    _, flags, length = read_head(datagram)
    if not flags & IN_MEMFD:
        return datagram[HEAD.size :]
    if len(fds) != 1 or os.fstat(fds[0]).st_size < length or length > MAX_ANSWER_BYTES:
        raise Broken("a message without its body")
    parts, at = [], 0
    while at < length:
        part = os.pread(fds[0], min(length - at, 1 << 24), at)
        if not part:
            raise Broken("a message whose body ends early")
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def read_ended(body: bytes) -> Ended:
    """Raises Broken."""
    if len(body) < _ENDED.size:
        raise Broken("an end that is too short")
    flags, status, cpu_us, wall_us, peak, out_total, err_total, *lengths, n_files, _ = _ENDED.unpack_from(body)
    if sum(lengths) != len(body) - _ENDED.size:
        raise Broken("an end whose parts do not add up")
    if not lengths[0] and not lengths[1] and not sum(lengths[2:]) and flags == _STARTED and status & 0x7F == 0:
        # The most frequent one: it said nothing.
        return Ended(code=status >> 8 & 0xFF, cpu_ms=cpu_us / 1000, wall_ms=wall_us / 1000, peak_memory_bytes=peak)
    parts, at = [], _ENDED.size
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    out, err, value, files, problem, reason, spoiled = parts
    code = signal = None
    if flags & _STARTED:
        signal = status & 0x7F or None
        code = None if signal else status >> 8 & 0xFF
    brought, bad_name = read_files(files, n_files)
    return Ended(
        code=code,
        signal=signal,
        not_started="" if flags & _STARTED else reason.decode("utf-8", "replace") or "the call was cancelled before it began",
        caller_fault=bool(flags & _CALLERS_FAULT),
        stdout=out,
        stdout_total=out_total,
        stderr=err,
        stderr_total=err_total,
        value=value if flags & _VALUE else None,
        files=brought,
        files_problem=problem.decode("utf-8", "replace") or bad_name,
        cpu_ms=cpu_us / 1000,
        wall_ms=wall_us / 1000,
        peak_memory_bytes=peak,
        timed_out="cpu" if flags & _CPU else "wall" if flags & _WALL else "",
        oom_killed=bool(flags & _OOM),
        output_exceeded=bool(flags & _OUTPUT),
        pids_denied=bool(flags & _PIDS),
        disk_full=bool(flags & _DISK),
        denied="a system call that nothing here may make" if signal == SIGSYS else "",
        spoiled=spoiled.decode("utf-8", "replace"),
    )


def read_files(data: bytes, count: int) -> tuple[dict[str, bytes], str]:
    """(path → content, the first problem). Raises Broken."""
    files: dict[str, bytes] = {}
    problem, at = "", 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise Broken("a file that is cut off")
        path_length, _, length = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        if path_length + length > len(data) - at:
            raise Broken("a file that is cut off")
        name = data[at : at + path_length]
        try:
            files[name.decode()] = data[at + path_length : at + path_length + length]
        except UnicodeDecodeError:
            problem = problem or f"{name[:80]!r}: its name is not UTF-8"
        at += path_length + length
    return files, problem
