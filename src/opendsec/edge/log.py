# SPDX-License-Identifier: Apache-2.0
"""Structured logs of the edge: one JSON object a line, to stderr or a file. Secrets and file contents never go in."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Protocol, TextIO

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

Field = str | int | float | bool | None


class Log(Protocol):
    """What the edge's parts log through: an event name in dotted lower case, and fields."""

    def debug(self, event: str, /, **fields: Field) -> None: ...
    def info(self, event: str, /, **fields: Field) -> None: ...
    def warning(self, event: str, /, **fields: Field) -> None: ...
    def error(self, event: str, /, **fields: Field) -> None: ...
    def exception(self, event: str, /, **fields: Field) -> None:
        """At level error, with the traceback of the exception being handled."""


def open_log(*, level: str = "info", path: Path | None = None) -> Log:
    """A log to `path` (appended, mode 0600) or stderr."""
    stream: TextIO = sys.stderr if path is None else open(path, "a", encoding="utf-8", buffering=1, opener=_private)  # noqa: SIM115
    log: Log = structlog.wrap_logger(
        structlog.WriteLogger(stream),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
    )
    return log


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


class NullLog:
    """Logs nothing; for tests."""

    def debug(self, event: str, /, **fields: Field) -> None: ...
    def info(self, event: str, /, **fields: Field) -> None: ...
    def warning(self, event: str, /, **fields: Field) -> None: ...
    def error(self, event: str, /, **fields: Field) -> None: ...
    def exception(self, event: str, /, **fields: Field) -> None: ...
