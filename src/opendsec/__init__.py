# SPDX-License-Identifier: Apache-2.0
"""OpenDSec: throw-away computers for AI agents, by the thousand, from one SDK.

Import this package for everything a program needs: `Client`, the spec of a sandbox, results and errors.
"""

# The map. An arrow reads "is imported by"; import-linter holds it (pyproject.toml), tests/style runs it.
#
#     the node's tower                                               the user's tower
#
#     kernel ──┐                                                     api ──▶ client (SDK, command line)
#     api    ──┴▶ policy, images ──▶ runtime, observe ──▶ edge
#
#     kernel    every system call, ioctl, cgroupfs and /proc access; the spawner process      standard library only
#     api       the contract both towers share: specs, results, errors, routes, wire format   msgspec
#     policy    policy documents to enforceable rules; pure                                   nothing
#     images    layers and images: store, build, pull, load on demand                         msgspec, obstore, zstandard
#     runtime   what runs a sandbox: one interface, its backends, the spawner's client        msgspec
#     observe   events, logs, metrics                                                         msgspec, structlog
#     edge      the daemon: lifecycle, admission, journal, pools of function calls, server    msgspec, uvicorn, structlog
#     client    SDK and command line; meets the edge on the wire only                         httpx, Typer, Rich
#     testing   contract suites and fakes: may import all, nothing imports it
#
# The names below are loaded on first use: the spawner and the edge import `opendsec.kernel` and must not pay for httpx.
# The spawner would even pay for typing and importlib (a third of its start-up time), so they are not imported here.

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from opendsec.api.errors import (
        CallerError,
        CommandFailed,
        Conflict,
        Denied,
        Internal,
        InvalidRequest,
        NotFound,
        OpenDSecError,
        PlatformError,
        PolicyError,
        QuotaExceeded,
        SandboxError,
        SandboxLost,
        Unauthorized,
        Unavailable,
        Unsupported,
    )
    from opendsec.api.fn import Checker, FnCall, FnInput, FnLimits, JudgeResult, JudgeTask, PoolSpec, Test
    from opendsec.api.spec import VM, Container, Limits, MicroVM
    from opendsec.client import sync
    from opendsec.client.aio import Client, Sandbox
    from opendsec.client.results import FnResult, Result

__version__ = "0.1.0"

_HOMES = {
    "Client": "opendsec.client.aio",
    "Sandbox": "opendsec.client.aio",
    "Result": "opendsec.client.results",
    "Container": "opendsec.api.spec",
    "MicroVM": "opendsec.api.spec",
    "VM": "opendsec.api.spec",
    "Limits": "opendsec.api.spec",
    "FnResult": "opendsec.client.results",
    "FnCall": "opendsec.api.fn",
    "FnInput": "opendsec.api.fn",
    "FnLimits": "opendsec.api.fn",
    "JudgeTask": "opendsec.api.fn",
    "JudgeResult": "opendsec.api.fn",
    "Test": "opendsec.api.fn",
    "Checker": "opendsec.api.fn",
    "PoolSpec": "opendsec.api.fn",
    "OpenDSecError": "opendsec.api.errors",
    "CallerError": "opendsec.api.errors",
    "InvalidRequest": "opendsec.api.errors",
    "Unauthorized": "opendsec.api.errors",
    "NotFound": "opendsec.api.errors",
    "Conflict": "opendsec.api.errors",
    "QuotaExceeded": "opendsec.api.errors",
    "Unsupported": "opendsec.api.errors",
    "PolicyError": "opendsec.api.errors",
    "Denied": "opendsec.api.errors",
    "SandboxError": "opendsec.api.errors",
    "SandboxLost": "opendsec.api.errors",
    "PlatformError": "opendsec.api.errors",
    "Unavailable": "opendsec.api.errors",
    "Internal": "opendsec.api.errors",
    "CommandFailed": "opendsec.api.errors",
}

__all__ = [
    "Client",
    "Sandbox",
    "Result",
    "sync",
    "Container",
    "MicroVM",
    "VM",
    "Limits",
    "FnCall",
    "FnInput",
    "FnLimits",
    "FnResult",
    "JudgeTask",
    "JudgeResult",
    "Test",
    "Checker",
    "PoolSpec",
    "OpenDSecError",
    "CallerError",
    "InvalidRequest",
    "Unauthorized",
    "NotFound",
    "Conflict",
    "QuotaExceeded",
    "Unsupported",
    "PolicyError",
    "Denied",
    "SandboxError",
    "SandboxLost",
    "PlatformError",
    "Unavailable",
    "Internal",
    "CommandFailed",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name == "sync":
        value: object = import_module("opendsec.client.sync")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'opendsec' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
