# SPDX-License-Identifier: Apache-2.0
"""Programs that do to a pool what programs do, each with the outcomes that classify it rightly, among honest ones.

A hostile program that cannot reach what it attacks may well end with exit code 0: then `ok` is what it is. What counts is that it is told
apart from what honest programs get, that it ends in time, and that no call after it notices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from opendsec.api.fn import FnInput, FnLimits, FnOutcome
from opendsec.client.results import FnResult

LIMITS = FnLimits(cpu_time_s=0.3, wall_time_s=1.5, memory="96MiB", output_bytes=64 << 10, pids=24, disk="8MiB")


@dataclass(frozen=True)
class Hostile:
    name: str
    source: str
    outcomes: frozenset[FnOutcome]


def _hostile(name: str, source: str, *outcomes: FnOutcome) -> Hostile:
    return Hostile(name, source.strip() + "\n", frozenset(outcomes))


HOSTILE = (
    _hostile(
        "fork bomb",
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        "time_limit",
        "memory_limit",
    ),
    _hostile(
        "memory bomb",
        """
held = []
while True:
    held.append(b"x" * (1 << 20))
""",
        "memory_limit",
    ),
    _hostile(
        "output flood",
        """
import sys
while True:
    sys.stdout.write("y" * 65536)
""",
        "output_limit",
    ),
    _hostile(
        "disk fill",
        """
import os
with open("big", "wb", buffering=0) as file:
    while True:
        assert file.write(b"x" * (1 << 20))
""",
        "runtime_error",
    ),
    _hostile("infinite loop", "while True: pass", "time_limit"),
    _hostile(
        "daemoniser",
        """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        for fd in range(3):
            os.close(fd)
        open("/tmp/left", "w").write("left")
        while True:
            time.sleep(60)
    os._exit(0)
print("started")
""",
        "ok",
    ),
    _hostile(
        "signal storm",
        """
import os, signal
for number in range(1, 65):
    for target in (-1, 1, os.getppid()):
        try:
            if target:
                os.kill(target, number)
        except OSError:
            pass
print("sent")
""",
        "ok",
        "runtime_error",
    ),
    _hostile("os._exit", "import os\nos._exit(7)", "runtime_error"),
    _hostile(
        "kill -9 of the parent",
        """
import os
os.kill(os.getppid(), 9)
""",
        "ok",
        "runtime_error",
    ),
    _hostile(
        "module tampering",
        """
import builtins, io, json, os, sys, threading
json.dumps = json.loads = lambda *args, **kwargs: "tampered"
os.environ["TAMPERED"] = "1"
os.environ.clear()
builtins.int = builtins.str = builtins.len = builtins.sum = lambda *args: 13
builtins.print = builtins.open = None
sys.path[:] = ["/tampered"]
sys.stdin = sys.stdout = io.StringIO()
os.chdir("/tmp")
os.umask(0o777)
for name in list(sys.modules):
    if name not in ("sys", "builtins"):
        del sys.modules[name]
""",
        "ok",
        "runtime_error",
    ),
)

# Sums what it is given, by way of what the others tamper with.
HONEST = """
import json, os, sys
numbers = [int(word) for word in sys.stdin.read().split()]
assert not os.path.exists("/tmp/left") and not os.path.exists("big"), "a file of another call"
assert "TAMPERED" not in os.environ, "the environment of another call"
with open("sum", "w") as file:
    file.write(str(sum(numbers)))
print(json.dumps({"sum": int(open("sum").read()), "count": len(numbers)}))
"""


@dataclass(frozen=True)
class Item:
    """One call of the mix. `hostile` None: an honest one, that prints `expected`."""

    input: FnInput
    expected: str = ""
    hostile: Hostile | None = None

    def problem(self, result: FnResult) -> str:
        """What is wrong with its result; empty if nothing is."""
        if self.hostile is None:
            right = result.outcome == "ok" and result.stdout == self.expected
            return "" if right else f"an honest call: {result.describe()}: {result.stdout[-300:]!r} {result.stderr[-300:]!r}"
        return "" if result.outcome in self.hostile.outcomes else f"{self.hostile.name}: {result.describe()}: {result.stderr[-300:]!r}"


def mix(count: int, *, share: float = 0.1, seed: int = 1) -> Iterator[Item]:
    """`count` calls of which that share is hostile, all kinds alike, in an order drawn from the seed."""
    drawn = random.Random(seed)
    bad = [HOSTILE[number % len(HOSTILE)] for number in range(round(count * share))]
    kinds: list[Hostile | None] = [*bad, *[None] * (count - len(bad))]
    drawn.shuffle(kinds)
    for kind in kinds:
        if kind is not None:
            yield Item(FnInput(source=kind.source), hostile=kind)
            continue
        numbers = [drawn.randrange(1000) for _ in range(5)]
        expected = f'{{"sum": {sum(numbers)}, "count": 5}}\n'
        yield Item(FnInput(source=HONEST, stdin=" ".join(map(str, numbers)).encode()), expected)
