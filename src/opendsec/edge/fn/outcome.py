# SPDX-License-Identifier: Apache-2.0
"""How a call ended: from what was observed to what its result says. Pure.

`outcome` is the first of these that holds:

1. it never ran: `runtime_error` if that is the call's own doing (no such program, no such function), else `platform_error`
2. `denied`: a filter ended it
3. `output_limit`: it was ended for what it wrote
4. `memory_limit`: the kernel's OOM killer killed something of it, and it did not end with exit code 0
5. `time_limit`: it was ended for its time
6. `runtime_error`: a signal, or another exit code than 0
7. `ok`

Memory comes before time: a program whose child was killed for memory often waits for it for ever.
"""

from __future__ import annotations

import re
import signal

import msgspec

from opendsec.api.errors import CallerError, OpenDSecError, PolicyError
from opendsec.api.fn import FnOutcome, FnOutput, FnResult, Hit
from opendsec.api.fn_check import Bounds
from opendsec.api.units import format_bytes
from opendsec.runtime.fncall.interface import Ended

INCOMPLETE = "not all files could be brought back"
NOTHING = msgspec.Raw(b"null")
MARGIN = 200  # levels of nesting less than we could read ourselves
MOST_DIGITS = 4000  # Python reads numbers of 4,300
_PLAIN = frozenset((b"null", b"true", b"false"))
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (MOST_DIGITS + 1))
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_skip = msgspec.json.Decoder(msgspec.Raw).decode


def result(ended: Ended, bounds: Bounds, *, index: int = 0, cold: bool = False) -> FnResult:
    """What the caller of a call is told."""
    outcome = classify(ended)
    hits = hits_of(ended)
    wrong = "" if not ended.value else value_problem(ended.value)
    if wrong and outcome == "ok":
        outcome = "runtime_error"
    message = "" if outcome == "ok" and not hits and not ended.files_problem else message_of(ended, outcome, hits, bounds)
    return FnResult(
        outcome=outcome,
        index=index,
        exit_code=ended.code,
        signal=ended.signal,
        stdout=FnOutput(data=ended.stdout, total_bytes=ended.stdout_total),
        stderr=FnOutput(data=ended.stderr, total_bytes=ended.stderr_total),
        value=msgspec.Raw(ended.value) if ended.value and not wrong else NOTHING,
        files=dict(ended.files) if ended.files else {},
        cpu_ms=ended.cpu_ms,
        wall_ms=ended.wall_ms,
        peak_memory_bytes=ended.peak_memory_bytes,
        limits_hit=hits,
        message="; ".join(filter(None, (message, wrong))) if wrong else message,
        cold=cold,
    )


def value_problem(value: bytes) -> str:
    """Why what a function left as its value is none. Whoever runs in the call can write there, and it goes into answers as it is: what is
    not one JSON value on one line could pass for another field, or for the result of another call."""
    if value in _PLAIN:
        return ""
    try:
        value.decode()  # what is skipped below is not looked into
        _skip(value)
        if value.count(b"[") + value.count(b"{") > MARGIN:  # readers have less room than we
            _skip(b"[" * MARGIN + value + b"]" * MARGIN)
    except (ValueError, RecursionError) as error:
        return f"its value cannot be passed on as JSON: {'it is nested too deeply' if isinstance(error, RecursionError) else error}"
    if b"\n" in value or b"\r" in value:
        return "its value cannot be passed on as JSON: it has line breaks between its parts"
    if len(value) > MOST_DIGITS and _LONG_NUMBER.search(value) and _LONG_NUMBER.search(_STRING.sub(b"", value)):
        return f"its value cannot be passed on as JSON: a number of more than {MOST_DIGITS} digits"
    return ""


def classify(ended: Ended) -> FnOutcome:
    if ended.code is None and ended.signal is None and not ended.timed_out and not ended.output_exceeded:
        return "runtime_error" if ended.caller_fault else "platform_error"
    if ended.denied:
        return "denied"
    if ended.output_exceeded:
        return "output_limit"
    if ended.oom_killed and ended.code != 0:
        return "memory_limit"
    if ended.timed_out or ended.signal == signal.SIGXCPU:
        return "time_limit"
    return "ok" if ended.code == 0 else "runtime_error"


def hits_of(ended: Ended) -> tuple[Hit, ...]:
    """Every limit that refused something, also if the call coped."""
    by_signal = ended.signal == signal.SIGXCPU
    if not (ended.timed_out or by_signal or ended.oom_killed or ended.output_exceeded or ended.pids_denied or ended.disk_full):
        return ()
    hits: list[tuple[Hit, bool]] = [
        ("cpu_time", ended.timed_out == "cpu" or by_signal),
        ("wall_time", ended.timed_out == "wall"),
        ("memory", ended.oom_killed),
        ("output", ended.output_exceeded),
        ("pids", ended.pids_denied),
        ("disk", ended.disk_full),
    ]
    return tuple(name for name, hit in hits if hit)


def message_of(ended: Ended, outcome: FnOutcome, hits: tuple[Hit, ...], bounds: Bounds) -> str:
    """One sentence for a person, or more of them."""
    parts = []
    if outcome == "platform_error":
        parts.append(f"the machine failed, not the program: {ended.not_started or 'it was never started'}")
    elif ended.not_started:
        parts.append(ended.not_started)
    elif outcome == "denied":
        parts.append(f"it was ended for what it may not do: {ended.denied}")
    elif outcome == "runtime_error":
        parts.append(f"exit code {ended.code}" if ended.signal is None else f"killed by {_signal(ended.signal)}")
    limits = {
        "cpu_time": f"{bounds.cpu_time_s:g} s of CPU time",
        "wall_time": f"{bounds.wall_time_s:g} s",
        "memory": f"{format_bytes(bounds.memory_bytes)} of memory",
        "output": f"{bounds.output_bytes} bytes of output",
        "pids": f"{bounds.pids} processes",
        "disk": f"{format_bytes(bounds.disk_bytes)} of files",
    }
    if hits:
        parts.append(f"it reached its limit of {' and of '.join(limits[name] for name in hits)}")
    if ended.files_problem:
        parts.append(f"{INCOMPLETE}: {ended.files_problem}")
    return "; ".join(parts)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def failed(error: OpenDSecError, index: int = 0) -> FnResult:
    """A call of a batch that was refused or could not be made. Whatever is neither its own fault nor a policy's is the platform's; room
    that is lacking is, too: a repetition may find some."""
    fault = isinstance(error, (CallerError, PolicyError)) and error.code != "quota_exceeded"
    return FnResult(outcome="denied" if fault else "platform_error", index=index, message=str(error))


def cancelled(index: int = 0, message: str = "the caller gave it up") -> FnResult:
    return FnResult(outcome="cancelled", index=index, message=message)


RECORDED_BYTES = 1 << 20


def recorded(result: FnResult) -> FnResult | None:
    """`result` as it is kept for a repetition of its action id: whole (None) up to RECORDED_BYTES of outputs, else without them."""
    compiled = 0 if result.compile is None else len(result.compile.stdout.data) + len(result.compile.stderr.data)
    size = len(result.stdout.data) + len(result.stderr.data) + len(bytes(result.value)) + sum(map(len, result.files.values())) + compiled
    if size <= RECORDED_BYTES:
        return None
    message = "; ".join(filter(None, (result.message, f"its outputs, {size} bytes, were too large to be kept for a repetition")))
    return msgspec.structs.replace(
        result,
        stdout=FnOutput(total_bytes=result.stdout.total_bytes),
        stderr=FnOutput(total_bytes=result.stderr.total_bytes),
        value=NOTHING,
        files={},
        compile=None,
        message=message,
    )
