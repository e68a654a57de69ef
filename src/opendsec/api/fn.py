# SPDX-License-Identifier: Apache-2.0
"""Function calls: a program and its input go in, a classified result comes out, and nothing stays behind.

    FnCall        one call: source text in a language, an argv, or a Python function, with its input and limits
    FnInput       what differs from call to call in a batch of one FnCall
    FnResult      how a call ended
    JudgeTask     a program and many tests; `JudgeResult` says which it passed
    PoolSpec      warm members to be kept for calls; `PoolInfo` says how they are

A program that fails is a result. `platform_error` is the one outcome that says nothing about the program: mask it from the reward.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FnOutcome = Literal[
    "ok",  # it ended by itself with exit code 0 (and, of a test, with the right output)
    "wrong_answer",  # it ended with exit code 0, and the checker refuses its output
    "runtime_error",  # another exit code, an uncaught exception, a signal of its own making
    "time_limit",  # `cpu_time_s` or `wall_time_s` passed; the whole tree was killed
    "memory_limit",  # the kernel's OOM killer ended it at `memory`
    "output_limit",  # it wrote more than `output_bytes` to stdout or stderr
    "compile_error",  # the compiler refused the program; nothing ran
    "denied",  # a policy forbade what it tried (a system call whose use ends the process) or what was asked for
    "platform_error",  # the machine failed, not the program; repeating it may help
    "cancelled",  # the caller gave up; of a batch: it was not run, or killed
]
Reuse = Literal["fork", "never"]
Device = Literal["none", "shared", "exclusive", "mig"]
Hit = Literal["cpu_time", "wall_time", "memory", "output", "pids", "disk"]


class FnLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one call may use at most, all its processes together."""

    cpu_time_s: float = 10.0
    wall_time_s: float = 20.0
    memory: int | str = "256MiB"
    output_bytes: int = 1 << 20  # of stdout, and again of stderr
    pids: int = 64
    disk: int | str = "64MiB"  # written to its file system, which is memory and counts as such


COMPILE_LIMITS = FnLimits(cpu_time_s=60.0, wall_time_s=120.0, memory="1GiB", pids=256, disk="512MiB")


class FnCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call. Exactly one of `source`, `argv` and `function` is given.

    `source`: text in `language`. `argv`: a program of the image. `function`: `package.module:name`, called with `args` and `kwargs`
    (JSON values) in the warm interpreter; its return value must be JSON and comes back in `FnResult.value`.
    """

    source: str | None = None
    language: str = "python"
    argv: tuple[str, ...] | None = None
    function: str | None = None
    args: msgspec.Raw = msgspec.Raw(b"[]")  # a JSON array
    kwargs: msgspec.Raw = msgspec.Raw(b"{}")  # a JSON object
    stdin: bytes = b""
    files: dict[str, bytes] = {}  # relative to the working directory
    outputs: tuple[str, ...] = ()  # files to bring back: names or shell patterns relative to the working directory
    env: dict[str, str] = {}
    limits: FnLimits = FnLimits()
    pool: str = ""  # "" = a pool for the language's image, made when first needed
    image: str = ""  # "" = the pool's or the language's
    reuse: Reuse | None = None  # None = the pool's
    tenant: str = ""  # whose call it is: calls of different tenants never meet in one member
    action_id: str | None = None


class FnInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item of a batch: each field that is given replaces the call's own. `env` and `files` are added to them."""

    index: int = 0
    source: str | None = None
    argv: tuple[str, ...] | None = None
    args: msgspec.Raw = msgspec.Raw(b"null")  # null: as the call has them
    kwargs: msgspec.Raw = msgspec.Raw(b"null")
    stdin: bytes | None = None
    files: dict[str, bytes] = {}
    env: dict[str, str] = {}


class FnOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One output stream as kept: its first `output_bytes`, and how long it really was until the call was ended."""

    data: bytes = b""
    total_bytes: int = 0


class FnResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended. Of a batch, `index` says of which item."""

    outcome: FnOutcome
    index: int = 0
    exit_code: int | None = None
    signal: int | None = None
    stdout: FnOutput = FnOutput()
    stderr: FnOutput = FnOutput()
    value: msgspec.Raw = msgspec.Raw(b"null")  # JSON: what a function returned
    files: dict[str, bytes] = {}  # what `outputs` asked for and was there
    cpu_ms: float = 0.0
    wall_ms: float = 0.0
    peak_memory_bytes: int = 0
    limits_hit: tuple[Hit, ...] = ()
    message: str = ""  # one sentence for a person: what went wrong, and whose fault it is
    cold: bool = False  # no warm member was free: one was started for it
    compile: FnResult | None = None  # of a compiled language; its times are not in this result's


# --- the judge -------------------------------------------------------------------------------------------------------


class Checker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What makes an output right.

    exact     byte for byte, but for white space at the end of the whole and a final newline
    tokens    the same words, whatever white space is between them
    float     like tokens, but words that are numbers may differ by `abs_tol` or relatively by `rel_tol`
    program   `source` in `language`, run in a member of its own with the files `input`, `expected`, `output` in its working directory:
              exit code 0 is right, 1 is wrong, anything else is the checker's own failure (`platform_error`)
    """

    kind: Literal["exact", "tokens", "float", "program"] = "exact"
    abs_tol: float = 1e-6
    rel_tol: float = 1e-6
    source: str = ""
    language: str = "python"
    limits: FnLimits = FnLimits()


class Test(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One test. `expected` None: exit code 0 is enough."""

    __test__ = False  # for pytest

    name: str = ""
    stdin: bytes = b""
    expected: bytes | None = None
    files: dict[str, bytes] = {}
    limits: FnLimits | None = None  # None = the task's


class JudgeTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A program and its tests. Neither `expected` nor the checker is ever where the judged program runs."""

    source: str
    language: str = "python"
    tests: tuple[Test, ...] = ()
    id: str = ""
    files: dict[str, bytes] = {}
    checker: Checker = Checker()
    stop_at_first_failure: bool = False
    limits: FnLimits = FnLimits()
    compile_limits: FnLimits = COMPILE_LIMITS
    pool: str = ""
    image: str = ""
    reuse: Reuse | None = None
    tenant: str = ""
    action_id: str | None = None


class TestResult(msgspec.Struct, frozen=True, kw_only=True):
    __test__ = False

    name: str
    outcome: FnOutcome
    result: FnResult | None = None  # None: not run, since an earlier one failed
    message: str = ""


class JudgeResult(msgspec.Struct, frozen=True, kw_only=True):
    """`outcome` is `ok` if all tests passed, else that of the first that did not."""

    outcome: FnOutcome
    id: str = ""
    passed: int = 0
    total: int = 0
    tests: tuple[TestResult, ...] = ()
    compile: FnResult | None = None
    message: str = ""


class Language(msgspec.Struct, frozen=True, kw_only=True):
    """How programs of a language are compiled and run: plain data, one file each."""

    name: str
    image: str
    file: str  # what the source is called, `main.c`
    run: tuple[str, ...]
    compile: tuple[str, ...] = ()
    version: tuple[str, ...] = ()  # prints the version
    artifacts: tuple[str, ...] = ()  # what compilation leaves for the run: names or patterns
    warm: bool = False  # the pool's interpreter runs it by a fork, without starting anything
    env: dict[str, str] = {}
    memory_overhead: int | str = 0  # what the runtime itself needs beyond a call's limit (a Java heap's surroundings)


class LanguageList(msgspec.Struct, frozen=True):
    languages: tuple[Language, ...]


# --- pools -----------------------------------------------------------------------------------------------------------


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Members kept warm for calls.

    `preload` and `warmup` run once in each member's interpreter, before any call, and every call starts from what they left.
    `reuse` "fork": a member serves many calls of one tenant, each forked into namespaces and a file system of its own.
    `reuse` "never": a member serves one call and is destroyed.
    """

    name: str
    image: str
    layers: tuple[str, ...] = ()
    size: int = 1  # members kept ready
    max: int = 4  # members at most, idle and busy
    preload: tuple[str, ...] = ()  # modules to import
    warmup: str = ""  # Python source
    python: str = "python3"  # the interpreter to keep warm; "" = none, for argv and other languages
    reuse: Reuse = "fork"
    tenant: str = ""
    idle_s: float = 60.0  # members beyond `size` go after so long without a call
    memory: int | str = "512MiB"  # of a member: its interpreter and the one call it serves
    cpu: float = 1.0
    user: str = ""
    device: Device = "none"
    labels: dict[str, str] = {}


class PoolInfo(msgspec.Struct, frozen=True, kw_only=True):
    spec: PoolSpec
    state: Literal["ready", "filling", "draining", "failing"]
    idle: int
    busy: int
    starting: int
    calls: int  # since the edge started
    cold: int  # calls that found no idle member
    lost: int  # members that died or were given up
    waiting: int  # calls in the queue
    message: str = ""  # why it is failing
    implicit: bool = False  # made for calls that named none


class PoolList(msgspec.Struct, frozen=True):
    pools: tuple[PoolInfo, ...]


class PoolResize(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int | None = None
    max: int | None = None
    action_id: str | None = None


class MapRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a batch's body; each further line is an FnInput."""

    call: FnCall
    window: int = 64  # calls of this batch that are in the edge at once: more lines are not read before results are
