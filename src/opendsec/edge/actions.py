# SPDX-License-Identifier: Apache-2.0
"""Exactly once: an action with a caller's id runs at most once, and whoever repeats the id gets what became of it.

    new id                                → intent in the journal, side effect, outcome in the journal
    id of an action under way             → wait for it, the same result
    id of an ended action                 → the recorded result (an error too, if the action had begun)
    id of an action of a dead edge        → `unknown`, settled at start by reconcile; never run again
    same id, other request                → Conflict

What fails before its intent was written (a wrong field, no such sandbox, a quota) leaves no record: the id may be used again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from opendsec.api.errors import Conflict, ErrorBody, Internal, OpenDSecError, Unavailable, from_body
from opendsec.api.exec import Captured, ExecResult
from opendsec.edge.journal import Journal
from opendsec.edge.log import Log
from opendsec.edge.tables import ActionRow, ActionState
from opendsec.edge.turns import Turns, size_of

INLINE_BYTES = 128 << 10  # larger results go to a file of their own
COMMANDS = ("run", "stream", "session_run")  # kinds of actions whose result is an ExecResult
S = TypeVar("S", bound=msgspec.Struct)


def request_digest(kind: str, *parts: bytes) -> bytes:
    """What makes two requests the same."""
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.digest()


class Action(Generic[S]):
    """One action under way. Without an id its methods do nothing."""

    def __init__(self, actions: Actions, action_id: str | None, sandbox_id: str | None, kind: str, digest: bytes) -> None:
        self._actions, self.action_id, self._sandbox_id, self._kind, self._digest = actions, action_id, sandbox_id, kind, digest
        self.begun = False
        self.frees = False  # it makes room on the disk: wanted most of all when there is none to record it

    def begin(self, detail: str = "", at: float | None = None) -> None:
        """Write the intent; to be called right before the side effect, perhaps within a transaction. Raises Unavailable if it cannot be
        written, unless the action `frees`: then a repetition does it again."""
        if self.action_id is not None:
            try:
                before = self._actions.journal.begin_action(
                    self.action_id,
                    sandbox_id=self._sandbox_id,
                    kind=self._kind,
                    digest=self._digest,
                    detail=detail,
                    at=self._actions.clock() if at is None else at,
                )
            except Unavailable:
                if not self.frees:
                    raise
                return
            assert before is None  # `once` has looked
            self.begun = True

    def forget(self) -> None:
        """The intent came to nothing, certainly: the id may be used again."""
        if self.action_id is not None and self.begun:
            self._actions.journal.drop_action(self.action_id)
            self.begun = False

    def end(self, result: S, at: float) -> None:
        """Write a small outcome, perhaps within the transaction of other outcomes. Larger ones: return them, `once` writes them."""
        if self.action_id is not None and self.begun:
            encoded = msgspec.json.encode(result)
            if len(encoded) <= INLINE_BYTES:
                self._actions.journal.end_action(self.action_id, at=at, state="done", result=encoded)
                self.begun = False


class Actions:
    """All actions of one edge. `directory` holds large results."""

    def __init__(self, journal: Journal, directory: Path, clock: Callable[[], float], log: Log) -> None:
        self.journal, self._directory, self.clock, self._log = journal, directory, clock, log
        self.turns = Turns()
        self._writing: set[str | None] = set()  # files that the journal does not know yet
        self._outlived: set[asyncio.Task[msgspec.Struct]] = set()
        self._running: dict[str, tuple[bytes, asyncio.Task[msgspec.Struct]]] = {}

    async def once(
        self,
        action_id: str | None,
        work: Callable[[Action[S]], Awaitable[S]],
        *,
        result: type[S],
        kind: str,
        digest: Callable[[], bytes],
        sandbox_id: str | None = None,
        replay: Callable[[S], S] = lambda recorded: recorded,
        outlived: bool = False,
    ) -> S:
        """The result of `work`, or of the earlier action with this id. `replay` may adapt a recorded result to the present. `outlived`:
        the action may take as long as a sandbox lives, so `close` does not wait for it; the next edge will call it unknown."""
        if action_id is None:
            return await work(Action(self, None, sandbox_id, kind, b""))
        wanted = digest()
        while (running := self._running.get(action_id)) is not None:
            if running[0] != wanted:
                raise _reused(action_id)
            try:
                ended = await asyncio.shield(running[1])
            except OpenDSecError:
                raise
            except Exception:  # cut off (its caller went away in the middle of the body), or a bug: the journal knows what is left of it
                self._ended(action_id, running[1])
                continue
            assert isinstance(ended, result)
            return ended
        row = self.journal.action(action_id)
        if row is not None:
            if row.digest != wanted or row.kind != kind:
                raise _reused(action_id)
            return replay(await self._recorded(row, result))
        action: Action[S] = Action(self, action_id, sandbox_id, kind, wanted)
        task = asyncio.ensure_future(self._run(action, work))
        self._running[action_id] = (wanted, task)
        if outlived:
            self._outlived.add(task)
        task.add_done_callback(lambda task: self._ended(action_id, task))
        return await asyncio.shield(task)  # a caller who goes away does not cut the action

    async def _run(self, action: Action[S], work: Callable[[Action[S]], Awaitable[S]]) -> S:
        try:
            result = await work(action)
        except OpenDSecError as error:
            if action.begun:
                await self._write(action, "done", msgspec.json.encode({"error": error.body()}))
            raise
        except Exception as error:
            if action.begun:
                unknown = Internal(f"this action failed in the edge ({type(error).__name__})", data={"outcome": "unknown"})
                await self._write(action, "unknown", msgspec.json.encode({"error": unknown.body()}))
            raise
        if action.begun:
            await self._write(action, "done", await self.turns.do(lambda: msgspec.json.encode(result), size_of(result)))
        return result

    async def _write(self, action: Action[S], state: ActionState, encoded: bytes) -> None:
        assert action.action_id is not None
        name = None
        try:
            if len(encoded) > INLINE_BYTES:
                name = f"{secrets.token_hex(16)}.json"
                self._writing.add(name)
                await asyncio.to_thread(self._write_file, name, encoded)
            self.journal.end_action(
                action.action_id, at=self.clock(), state=state, result=None if name else encoded, file=name, size=len(encoded)
            )
        except (OSError, OpenDSecError) as error:
            # The side effect has happened and its caller gets the result now; a repetition will be told `unknown`.
            self._log.error("action.not_recorded", action_id=action.action_id, reason=str(error))
        finally:
            self._writing.discard(name)

    def _write_file(self, name: str, data: bytes) -> None:
        # No rename: a name counts only once the journal has it.
        with open(self._directory / name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(data)

    async def _recorded(self, row: ActionRow, kind: type[S]) -> S:
        if row.state == "pending":  # its outcome could not be written, see `_write`
            raise Internal("the outcome of this action is unknown: it could not be recorded", data={"outcome": "unknown"})
        data = row.result
        if row.result_file is not None:
            try:
                data = await asyncio.to_thread((self._directory / row.result_file).read_bytes)
            except OSError as error:
                raise Internal(f"the recorded result of this action cannot be read: {error}") from error
        return decode_result(data or b"{}", kind)

    def running(self, action_id: str) -> bytes | None:
        """The request's digest, if an action with this id is under way."""
        running = self._running.get(action_id)
        return None if running is None else running[0]

    def _ended(self, action_id: str, task: asyncio.Task[msgspec.Struct]) -> None:
        running = self._running.get(action_id)
        if running is not None and running[1] is task:
            del self._running[action_id]
        self._outlived.discard(task)
        if not task.cancelled():
            task.exception()  # its callers may all have gone away

    async def close(self) -> None:
        """Until no action is under way, but for those that may go on for ever: they are cut."""
        for task in self._outlived:
            task.cancel()
        while self._running:
            await asyncio.wait([task for _, task in self._running.values()])

    async def trim(self, keep_bytes: int) -> None:
        """Give up the output in the oldest large results of commands, but never the results."""
        for action_id, file in self.journal.oldest_results(COMMANDS, keep_bytes):

            def read(file: str = file) -> ExecResult | None:
                try:
                    return decode_result((self._directory / file).read_bytes(), ExecResult)
                except (OSError, OpenDSecError, msgspec.DecodeError):
                    return None  # lost already: a repetition is told so

            result = await asyncio.to_thread(read)
            if result is not None:
                self.journal.end_action(action_id, at=self.clock(), state="done", result=msgspec.json.encode(without_output(result)))
        await self.clear_orphans()

    async def clear_orphans(self) -> None:
        """Remove files of results that the journal does not know; at start and after pruning."""
        there = await asyncio.to_thread(os.listdir, self._directory)
        orphans = set(there) - self._writing - self.journal.result_files()

        def remove() -> None:
            for name in orphans:
                os.unlink(self._directory / name)

        if orphans:
            await asyncio.to_thread(remove)


def without_output(result: ExecResult) -> ExecResult:
    """With the sizes of what was captured, so that it shows as truncated."""
    message = "; ".join(filter(None, (result.message, "its output was given up to make room for that of later actions")))
    stdout, stderr = Captured(total_bytes=result.stdout.total_bytes), Captured(total_bytes=result.stderr.total_bytes)
    return msgspec.structs.replace(result, stdout=stdout, stderr=stderr, message=message)


def decode_result(data: bytes, kind: type[S]) -> S:
    """A recorded result; a recorded error is raised."""
    if data.startswith(b'{"error":{'):
        raise from_body(msgspec.json.decode(data, type=dict[str, ErrorBody])["error"])
    return msgspec.json.decode(data, type=kind)


def _reused(action_id: str) -> Conflict:
    return Conflict(f"action id {action_id!r} was used before for another request", field="action_id")
