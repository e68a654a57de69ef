# SPDX-License-Identifier: Apache-2.0
"""The one error tree: each class says who is at fault, each has a stable code on the wire.

    OpenDSecError
    ├── CallerError            the request was wrong; repeating it unchanged will fail again
    │   ├── InvalidRequest         a field breaks a rule (`field` names it)
    │   ├── Unauthorized           no token, or a wrong one
    │   ├── NotFound               no such sandbox, process, session, image or path
    │   ├── Conflict               right request, wrong state (or an action id reused for another request)
    │   ├── QuotaExceeded          more than the operator's policy lets this edge promise
    │   └── Unsupported            this backend or this machine cannot do it; the message says what is missing
    ├── PolicyError
    │   └── Denied                 the policy forbids it
    ├── SandboxError
    │   └── SandboxLost            the sandbox died; its state is gone
    ├── PlatformError          the infrastructure failed: mask it from the reward
    │   ├── Unavailable            not now (draining, starting, unreachable); a retry may succeed
    │   └── Internal               a bug of ours
    └── CommandFailed          raised only by `Result.check()`; a failing command is otherwise a result

Only `code`, `message`, `field` and `data` cross the wire, never a class name, so a hostile peer cannot choose what is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import msgspec

Data = Mapping[str, str | int | float | bool | None]


class ErrorBody(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """The JSON form of an error: the body of every response with a status of 400 or above, under the key `error`."""

    code: str
    message: str
    field: str | None = None
    data: dict[str, str | int | float | bool | None] = {}


class OpenDSecError(Exception):
    """Base of all errors raised on purpose. `message` is one sentence for a person; `data` holds facts for a program."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, field: str | None = None, data: Data | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.data = dict(data or {})

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def body(self) -> ErrorBody:
        return ErrorBody(code=self.code, message=self.message, field=self.field, data=self.data)


class CallerError(OpenDSecError):
    """The request was wrong."""


class InvalidRequest(CallerError):
    """A field breaks a rule; `field` names it."""

    code, status = "invalid_request", 400


class Unauthorized(CallerError):
    """No token, or a wrong one."""

    code, status = "unauthorized", 401


class NotFound(CallerError):
    """The named thing does not exist."""

    code, status = "not_found", 404


class Conflict(CallerError):
    """The thing is in a state that does not allow this, or an action id was used before for another request."""

    code, status = "conflict", 409


class QuotaExceeded(CallerError):
    """More than policy lets this edge promise. `data`: resource, asked, promised, limit."""

    code, status = "quota_exceeded", 429


class Unsupported(CallerError):
    """This backend or machine cannot do it; never silently done by halves."""

    code, status = "unsupported", 422


class PolicyError(OpenDSecError):
    """The policy decided."""


class Denied(PolicyError):
    """The policy forbids it."""

    code, status = "denied", 403


class SandboxError(OpenDSecError):
    """The sandbox is at fault."""


class SandboxLost(SandboxError):
    """The sandbox died; its state is gone."""

    code, status = "sandbox_lost", 410


class PlatformError(OpenDSecError):
    """The infrastructure is at fault: a trainer masks these from the reward."""


class Unavailable(PlatformError):
    """Not now: draining, starting, overloaded or unreachable."""

    code, status, retryable = "unavailable", 503, True


class Internal(PlatformError):
    """A bug of ours."""

    code, status = "internal", 500


class CommandFailed(OpenDSecError):
    """`Result.check()` on a command that did not exit with 0."""

    code, status = "command_failed", 500


BY_CODE: dict[str, type[OpenDSecError]] = {
    kind.code: kind
    for kind in (
        InvalidRequest,
        Unauthorized,
        NotFound,
        Conflict,
        QuotaExceeded,
        Unsupported,
        Denied,
        SandboxLost,
        Unavailable,
        Internal,
    )
}


def from_body(body: ErrorBody) -> OpenDSecError:
    """The exception for a wire error; an unknown code (a newer peer) becomes `Internal` with the code kept in `data`."""
    kind = BY_CODE.get(body.code)
    if kind is None:
        return Internal(body.message, field=body.field, data={**body.data, "code": body.code})
    return kind(body.message, field=body.field, data=body.data)
