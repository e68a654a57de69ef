# SPDX-License-Identifier: Apache-2.0
"""Building requests and reading answers. Nothing here does I/O, so both shells and every transport share it."""

from __future__ import annotations

import codecs
import os
import random
import re
import shlex
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypedDict, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from opendsec.api import wire
from opendsec.api.errors import Internal, InvalidRequest, NotFound
from opendsec.api.exec import Command, Pty
from opendsec.api.ids import check_action_id
from opendsec.api.routes import Route
from opendsec.api.spec import check_path

T = TypeVar("T", bound=msgspec.Struct)
Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
Query = Mapping[str, str | bytes | int | float | bool | None]

_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
MAX_LINE_BYTES = 64 << 20  # of an NDJSON stream; the longest honest line is one output chunk in base64


class Request(NamedTuple):
    """One HTTP request, ready for a transport."""

    method: str
    target: str  # path and query, percent-encoded ASCII
    body: bytes | AsyncIterable[bytes] = b""
    content_type: str = ""
    repeatable: bool = False  # the edge does the same, once, however often it is sent


class CommandOptions(TypedDict, total=False):
    """What may be said about a command. Every one has a default."""

    timeout_s: float | None  # wall-clock seconds, then the whole process tree is killed; None = no end
    cwd: str | None  # absolute path inside; None = the image's working directory
    env: Mapping[str, str] | None  # added to the sandbox's
    user: str | None  # name or number, optionally `:group`
    stdin: str | bytes | None  # all of the input; None = closed
    capture_bytes: int  # kept of each stream, half of it head and half tail; 10 MiB unless given
    output_limit_bytes: int | None  # of both streams together; more ends the command
    pty: bool | Pty | None  # a terminal of its own; True = 24 rows, 80 columns
    action_id: str | None  # the same id never runs twice; made up if not given


# --- building ---------------------------------------------------------------------------------------------------------


def new_action_id() -> str:
    """An action id for a call that was given none: it makes repeating the request after a broken connection safe."""
    return "auto-" + os.urandom(12).hex()


def request(route: Route, ids: Mapping[str, str], *, body: bytes | AsyncIterable[bytes] = b"", query: Query | None = None) -> Request:
    """The request for `route` with its `{placeholders}` filled. Repeatable if it only reads, or carries an action id in its query: the
    caller's, or one made up."""
    if "{" in route.path:
        for name, value in ids.items():
            if not isinstance(value, str) or not _ID.fullmatch(value):  # it becomes a part of a path
                raise NotFound(f"{str(value)[:80]!r} cannot be the id of anything", field=name)
        target = route.path.format(**ids)
    else:
        target = route.path
    words = [(name, _query_value(value)) for name, value in (query or {}).items() if value is not None and name != "action_id"]
    once = "action_id" in route.query
    if once:
        words.append(("action_id", check_action((query or {}).get("action_id")) or new_action_id()))
    if words:
        target += "?" + urlencode(words, quote_via=quote)
    content_type = "application/json" if route.request else ("application/octet-stream" if route.raw_request else "")
    return Request(route.method, target, body, content_type, once or not route.mutates)


def _query_value(value: str | bytes | int | float | bool | None) -> str | bytes:
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, (str, bytes)) else str(value)


def encode(value: msgspec.Struct) -> bytes:
    """JSON of a request body. Raises InvalidRequest for values that JSON cannot carry."""
    try:
        return wire.encode(value)
    except UnicodeEncodeError:
        raise InvalidRequest("text must be valid Unicode", field="body") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(str(error), field="body") from None


def raw_path(path: Path, field: str = "path") -> bytes:
    """The bytes of an absolute path inside a sandbox. Raises InvalidRequest."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InvalidRequest(f"must be text, bytes or a path object, not {type(path).__name__}", field=field)
    raw = os.fspath(path)
    text = raw.decode("utf-8", "surrogateescape") if isinstance(raw, bytes) else raw
    return check_path(text, field).encode("utf-8", "surrogateescape")


def command(what: str | Sequence[str], options: CommandOptions, *, stdin_stream: bool = False) -> Command:
    """A checked command: text is for the shell, a sequence is an argv. Raises InvalidRequest."""
    fields: dict[str, object] = dict(options)
    if isinstance(what, (list, tuple)):
        fields["argv"] = what
    else:
        fields["shell"] = what
    if options.get("env") is None:
        fields.pop("env", None)
    else:
        fields["env"] = dict(options["env"] or {}) if isinstance(options["env"], Mapping) else options["env"]
    stdin = options.get("stdin")
    if isinstance(stdin, str):
        fields["stdin"] = _utf8(stdin, "stdin")
    if stdin_stream:
        if stdin is not None:
            raise InvalidRequest("give the input now or stream it, not both", field="stdin")
        fields["stdin_mode"] = "stream"
    pty = options.get("pty")
    if isinstance(pty, bool):
        fields["pty"] = Pty() if pty else None
    if options.get("action_id") is None:
        fields["action_id"] = new_action_id()
    made = wire.convert(fields, Command)
    made.check()
    return made


def check_action(action_id: object) -> str | None:
    """`action_id` if it is None or well formed. Raises InvalidRequest."""
    if action_id is None:
        return None
    if not isinstance(action_id, str):
        raise InvalidRequest(f"must be text, not {type(action_id).__name__}", field="action_id")
    return check_action_id(action_id)


def label(what: str | Sequence[str]) -> str:
    """A command for people, in one line of at most 200 characters."""
    text = what if isinstance(what, str) else shlex.join(what)
    return text if len(text) <= 200 else text[:199] + "…"


def text_bytes(data: str | bytes, field: str = "data") -> bytes:
    """Bytes of what a caller wants written."""
    if isinstance(data, str):
        return _utf8(data, field)
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    raise InvalidRequest(f"must be text or bytes, not {type(data).__name__}", field=field)


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest("is not valid Unicode text; give bytes", field=field) from None


# --- reading ----------------------------------------------------------------------------------------------------------


def read(status: int, data: bytes, kind: type[T]) -> T:
    """The body of an answer. Raises what the edge reported, or Internal if the answer is not of this contract."""
    if status >= 400:
        raise wire.decode_error(status, data)
    try:
        return wire.decode(data, kind)
    except InvalidRequest as error:
        raise Internal(f"the edge's answer is not what this client knows: {error}") from None


def read_nothing(status: int, data: bytes) -> None:
    if status >= 400:
        raise wire.decode_error(status, data)


def read_line(line: bytes, kind: type[T]) -> T:
    """One line of an NDJSON stream. An edge that fails after it began to answer sends its error as a line."""
    if line.startswith(b'{"error"'):
        raise wire.decode_error(500, line)
    return read(200, line, kind)


class LineReader:
    """Chunks in, whole lines out; memory bounded by the longest line."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._rest = bytearray()
        self._most_bytes = MAX_LINE_BYTES if most_bytes is None else most_bytes

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        if b"\n" not in chunk:
            self._rest += chunk
            if len(self._rest) > self._most_bytes:
                raise Internal(f"the edge sent a line of more than {self._most_bytes} bytes")
            return
        first, *lines, rest = chunk.split(b"\n")
        head = bytes(self._rest) + first
        self._rest = bytearray(rest)
        for line in (head, *lines):
            if line.strip():
                yield line


class TextDecoder:
    """Bytes of one output stream to text, a chunk at a time, no character ever split; what is not UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What an unfinished character at the end, or before a gap, decodes to."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


# --- repeating --------------------------------------------------------------------------------------------------------


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When the connection breaks. An answer of the edge, whatever it says, is never retried here.

    A request that never left is sent again. One that may have arrived is sent again only if that is safe: it only reads, or
    it carries an action id, by which the edge gives back the recorded result instead of acting twice.
    """

    attempts: int = 5  # in all
    first_delay_s: float = 0.05  # doubles each time, with jitter
    max_delay_s: float = 2.0

    def delay_s(self, attempt: int) -> float:
        """How long to wait after the failed `attempt` (1 is the first)."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)

    def again(self, attempt: int, *, sent: bool, repeatable: bool) -> bool:
        return attempt < self.attempts and (repeatable or not sent)
