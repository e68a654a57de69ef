# SPDX-License-Identifier: Apache-2.0
"""What the edge must not forget, in one SQLite file: sandboxes, actions, commands, events.

An intent is written before its side effect and the outcome after it, so that the next edge process can tell what may be half done. Many
intents or outcomes share one transaction.

Durability. WAL with synchronous=NORMAL: a commit is a write into the page cache without fsync (some 0.05 ms), so it outlives the edge,
whatever kills it; a power cut may lose the last commits but not the file's consistency, and it ends all sandboxes as well, but for paused
ones: `settle` is for what is to outlive it. What does fsync otherwise is the checkpoint; left to SQLite it would run inside some commit
and stall the event loop for tens of milliseconds. So automatic checkpoints are off and `checkpoint` runs in a worker thread on a
connection of its own, which never blocks the writer (PASSIVE).

One connection writes, in the event loop's thread. Format: application_id names the file as ours, user_version is the format's
version; a newer one is refused. Names here are append-only.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from opendsec.api.errors import Unavailable
from opendsec.api.sandboxes import Event
from opendsec.edge.tables import (
    ADDED,
    APPLICATION_ID,
    SCHEMA,
    VERSION,
    ActionRow,
    ActionState,
    CommandRow,
    MemberRow,
    Retention,
    SandboxRow,
    SnapshotRow,
)

CHECKPOINT_CHANGES = 5_000  # rows; some 16 KiB of WAL each, at most

Value: TypeAlias = str | bytes | int | float | None

_INSERT_SANDBOX = f"INSERT INTO sandboxes VALUES ({','.join('?' * len(SandboxRow.__struct_fields__))})"
_UPDATE_SANDBOX = (
    "UPDATE sandboxes SET state = ?, held = ?, expires_at = ?, used_at = ?, busy = ?, ended_at = ?, message = ?, record = ?, turning = ?"
    " WHERE id = ?"
)


class NewerFormat(Exception):
    """The journal was written by a newer edge."""


class Journal:
    """Opens or makes the file. Raises NewerFormat, or ValueError if the file is something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._depth = 0
        self._changes, self._checkpointing = 0, False
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # environments may hold secrets
        self._db = _connect(path)
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise
        self._db.execute("PRAGMA wal_autocheckpoint = 0")

    def _prepare(self) -> None:
        application, version = self._number("PRAGMA application_id"), self._number("PRAGMA user_version")
        if application == 0 and version == 0 and not self._number("SELECT count(*) FROM sqlite_schema"):
            schema = SCHEMA + "".join(ADDED.values())
            self._db.executescript(f"BEGIN; {schema} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT;")
        elif application != APPLICATION_ID:
            raise ValueError(f"{self.path} is not a journal of an edge")
        elif version > VERSION:
            raise NewerFormat(f"{self.path} has format {version}, this edge knows formats up to {VERSION}: use the newer edge")
        elif version < VERSION:
            added = "".join(tables for number, tables in sorted(ADDED.items()) if number > version)
            self._db.executescript(f"BEGIN; {added} PRAGMA user_version = {VERSION}; COMMIT;")

    def close(self) -> None:
        """Fold the WAL into the file and close."""
        try:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error:
            pass  # the WAL stays and is read at the next start
        finally:
            self._db.close()

    def checkpoint_due(self) -> bool:
        """Whether so much was written since the last checkpoint that another is worth its fsync; at most one is under way."""
        return not self._checkpointing and self._db.total_changes - self._changes >= CHECKPOINT_CHANGES

    def checkpoint(self) -> None:
        """Copy the WAL into the file, with fsync; for a worker thread. The next commit then writes the WAL from its beginning again."""
        self._checkpointing, self._changes = True, self._db.total_changes
        try:
            with contextlib.closing(_connect(self.path)) as db:
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        finally:
            self._checkpointing = False

    def settle(self) -> None:
        """All that is committed outlives a loss of power when this returns; for a worker thread. Raises OSError."""
        for path in (self.path.with_name(f"{self.path.name}-wal"), self.path, self.path.parent):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes within are one commit, or none. May be nested. Raises Unavailable if the disk refuses."""
        if self._depth:
            self._depth += 1
            try:
                yield
            except sqlite3.OperationalError as error:
                raise Unavailable(f"the journal cannot be written: {error}") from error
            finally:
                self._depth -= 1
            return
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise Unavailable(f"the journal cannot be written: {error}") from error
        self._depth = 1
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.OperationalError):
                raise Unavailable(f"the journal cannot be written: {error}") from error
            raise
        finally:
            self._depth = 0

    def _write(self, sql: str, values: Sequence[Value]) -> int:
        try:
            return self._db.execute(sql, values).rowcount
        except sqlite3.OperationalError as error:
            raise Unavailable(f"the journal cannot be written: {error}") from error

    def _scalar(self, sql: str, values: Sequence[Value] = ()) -> Value:
        row: tuple[Value, ...] | None = self._db.execute(sql, values).fetchone()
        return None if row is None else row[0]

    def _number(self, sql: str) -> int:
        value = self._scalar(sql)
        return value if isinstance(value, int) else 0

    # --- meta ----------------------------------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        value = self._scalar("SELECT value FROM meta WHERE key = ?", (key,))
        return value if isinstance(value, str) else None

    def set_meta(self, key: str, value: str) -> None:
        self._write("INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    # --- sandboxes -----------------------------------------------------------------------------------------------------

    def template(self, digest: bytes, body: bytes) -> int:
        """The id of a template, stored if it is new."""
        found = self._scalar("SELECT id FROM templates WHERE digest = ?", (digest,))
        if isinstance(found, int):
            return found
        made = self._scalar("INSERT INTO templates (digest, body) VALUES (?, ?) RETURNING id", (digest, body))
        assert isinstance(made, int)
        return made

    def templates(self) -> dict[int, bytes]:
        rows: list[tuple[int, bytes]] = self._db.execute("SELECT id, body FROM templates").fetchall()
        return dict(rows)

    def insert_sandbox(self, row: SandboxRow) -> None:
        self._write(_INSERT_SANDBOX, msgspec.structs.astuple(row))

    def update_sandbox(self, row: SandboxRow) -> None:
        """Write what changes in a sandbox's life."""
        self._write(
            _UPDATE_SANDBOX,
            (row.state, row.held, row.expires_at, row.used_at, row.busy, row.ended_at, row.message, row.record, row.turning, row.id),
        )

    def sandboxes(self) -> list[SandboxRow]:
        """All, the oldest first."""
        return [
            msgspec.convert(row, SandboxRow, strict=False) for row in self._db.execute("SELECT * FROM sandboxes ORDER BY created_at, id")
        ]

    # --- actions -------------------------------------------------------------------------------------------------------

    def begin_action(self, action_id: str, *, sandbox_id: str | None, kind: str, digest: bytes, detail: str, at: float) -> ActionRow | None:
        """Write the intent; None if it is new, else the action that had this id before."""
        sql = (
            "INSERT INTO actions (action_id, sandbox_id, kind, digest, state, detail, started_at) VALUES (?, ?, ?, ?, 'pending', ?, ?)"
            " ON CONFLICT (action_id) DO NOTHING"
        )
        if self._write(sql, (action_id, sandbox_id, kind, digest, detail, at)):
            return None
        return self.action(action_id)

    def action(self, action_id: str) -> ActionRow | None:
        row = self._db.execute("SELECT * FROM actions WHERE action_id = ?", (action_id,)).fetchone()
        return None if row is None else msgspec.convert(row, ActionRow, strict=False)

    def end_action(
        self, action_id: str, *, at: float, state: ActionState, result: bytes | None, file: str | None = None, size: int = 0
    ) -> None:
        """Write the outcome: `result` itself or the `file` (of `size` bytes) that holds it."""
        self._write(
            "UPDATE actions SET state = ?, result = ?, result_file = ?, result_bytes = ?, ended_at = ? WHERE action_id = ?",
            (state, result, file, size if result is None else len(result), at, action_id),
        )

    def drop_action(self, action_id: str) -> None:
        """Forget an intent that had no side effect: the request turned out to be wrong."""
        self._write("DELETE FROM actions WHERE action_id = ?", (action_id,))

    def pending_actions(self) -> list[ActionRow]:
        rows = self._db.execute("SELECT * FROM actions WHERE state = 'pending' ORDER BY id")
        return [msgspec.convert(row, ActionRow, strict=False) for row in rows]

    def oldest_results(self, kinds: Sequence[str], keep_bytes: int) -> list[tuple[str, str]]:
        """Action ids and files of the oldest results of these kinds, so many that those which remain have at most `keep_bytes`."""
        marks = ",".join("?" * len(kinds))
        rows = self._db.execute(
            f"SELECT action_id, result_file, result_bytes FROM actions WHERE result_file IS NOT NULL AND kind IN ({marks})"
            " ORDER BY id DESC",
            tuple(kinds),
        )
        total, found = 0, []
        for action_id, file, size in rows:
            total += size
            if total > keep_bytes:
                found.append((action_id, file))
        return found

    def result_files(self) -> set[str]:
        return {str(row[0]) for row in self._db.execute("SELECT result_file FROM actions WHERE result_file IS NOT NULL")}

    # --- commands ------------------------------------------------------------------------------------------------------

    def begin_command(self, process_id: str, sandbox_id: str, kind: str, action_id: str | None, command: str, at: float) -> None:
        """Write the intent to start a command."""
        self._write(
            "INSERT INTO commands (process_id, sandbox_id, kind, action_id, command, started_at) VALUES (?, ?, ?, ?, ?, ?)",
            (process_id, sandbox_id, kind, action_id, command, at),
        )

    def end_command(self, process_id: str, at: float, result: bytes | None) -> None:
        self._write("UPDATE commands SET ended_at = ?, result = ? WHERE process_id = ?", (at, result, process_id))

    def drop_command(self, process_id: str) -> None:
        """It was refused before anything happened."""
        self._write("DELETE FROM commands WHERE process_id = ?", (process_id,))

    def commands_of(self, sandbox_id: str) -> list[CommandRow]:
        """Oldest first. Reads the whole table, which retention keeps short."""
        rows = self._db.execute("SELECT * FROM commands WHERE sandbox_id = ? ORDER BY id", (sandbox_id,))
        return [msgspec.convert(row, CommandRow, strict=False) for row in rows]

    def commands_under_way(self, sandbox_id: str | None = None) -> frozenset[str]:
        """Process ids of commands, of all or of one sandbox, that were begun and whose end is not known."""
        sql = "SELECT process_id FROM commands WHERE ended_at IS NULL AND (?1 IS NULL OR sandbox_id = ?1)"
        return frozenset(process_id for (process_id,) in self._db.execute(sql, (sandbox_id,)))

    def end_all_commands(self, at: float, sandbox_id: str | None = None) -> int:
        """At start: what an earlier edge ran has ended unknown; not yet what is in a paused sandbox, which is ended when that is resumed:
        then with the sandbox's id. How many there were."""
        if sandbox_id is not None:
            return self._write("UPDATE commands SET ended_at = ? WHERE ended_at IS NULL AND sandbox_id = ?", (at, sandbox_id))
        elsewhere = "sandbox_id NOT IN (SELECT id FROM sandboxes WHERE state = 'paused')"
        return self._write(f"UPDATE commands SET ended_at = ? WHERE ended_at IS NULL AND {elsewhere}", (at,))

    # --- pools ---------------------------------------------------------------------------------------------------------

    def put_pool(self, name: str, spec: bytes, at: float) -> None:
        """A pool is declared, or changed."""
        sql = "INSERT INTO pools VALUES (?, ?, ?) ON CONFLICT (name) DO UPDATE SET spec = excluded.spec"
        self._write(sql, (name, spec, at))

    def drop_pool(self, name: str) -> None:
        self._write("DELETE FROM pools WHERE name = ?", (name,))

    def pools(self) -> dict[str, bytes]:
        """Specs of declared pools by name, the oldest first."""
        rows: list[tuple[str, bytes]] = self._db.execute("SELECT name, spec FROM pools ORDER BY declared_at, name").fetchall()
        return dict(rows)

    def add_member(self, row: MemberRow) -> None:
        """The intent to start a member."""
        self._write("INSERT INTO members VALUES (?, ?, ?, ?)", msgspec.structs.astuple(row))

    def drop_member(self, member_id: str) -> None:
        """Nothing is left of it."""
        self._write("DELETE FROM members WHERE member_id = ?", (member_id,))

    def members(self) -> list[MemberRow]:
        rows = self._db.execute("SELECT * FROM members ORDER BY started_at")
        return [msgspec.convert(row, MemberRow, strict=False) for row in rows]

    # --- snapshots -----------------------------------------------------------------------------------------------------

    def put_snapshot(self, row: SnapshotRow) -> None:
        """The intent to make one, and later what it is."""
        values = msgspec.structs.astuple(row)
        sql = "INSERT INTO snapshots VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET record = excluded.record"
        self._write(sql, values)

    def drop_snapshot(self, snapshot_id: str) -> None:
        """Nothing is left of it."""
        self._write("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))

    def snapshots(self) -> list[SnapshotRow]:
        """The oldest first."""
        rows = self._db.execute("SELECT * FROM snapshots ORDER BY created_at, id")
        return [msgspec.convert(row, SnapshotRow, strict=False) for row in rows]

    # --- events --------------------------------------------------------------------------------------------------------

    def add_events(self, events: Iterable[Event]) -> None:
        rows = [(event.seq, event.at, event.kind, event.sandbox_id, msgspec.json.encode(event.data)) for event in events]
        with self.transaction():
            self._db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", rows)

    def events(self, *, after: int = 0, sandbox_id: str | None = None, limit: int = 1000) -> list[Event]:
        """Stored events with a number above `after`, in order, at most `limit`."""
        rows = self._db.execute(
            "SELECT seq, at, kind, sandbox_id, data FROM events WHERE seq > ?1 AND (?2 IS NULL OR sandbox_id = ?2) ORDER BY seq LIMIT ?3",
            (after, sandbox_id, limit),
        )
        data_type = dict[str, str | int | float | bool | None]
        return [
            Event(seq=seq, at=at, kind=kind, sandbox_id=sandbox, data=msgspec.json.decode(data, type=data_type))
            for seq, at, kind, sandbox, data in rows
        ]

    def last_event(self) -> int:
        return self._number("SELECT max(seq) FROM events")

    # --- retention -----------------------------------------------------------------------------------------------------

    def prune(self, now: float, keep: Retention) -> list[str]:
        """Forget what is old. The ids of forgotten sandboxes.

        An action is kept while its sandbox lives, whatever its age: its id must not run twice.
        """
        with self.transaction():
            old: list[tuple[str]] = self._db.execute(
                "SELECT id FROM sandboxes WHERE NOT held AND (ended_at < ? OR id NOT IN"
                " (SELECT id FROM sandboxes WHERE NOT held ORDER BY ended_at DESC LIMIT ?))",
                (now - keep.ended_s, keep.ended_count),
            ).fetchall()
            self._db.executemany("DELETE FROM sandboxes WHERE id = ?", old)
            self._db.execute(
                "DELETE FROM actions WHERE state != 'pending' AND ended_at < ?"
                " AND (sandbox_id IS NULL OR sandbox_id NOT IN (SELECT id FROM sandboxes WHERE held))",
                (now - keep.actions_s,),
            )
            self._db.execute(
                "DELETE FROM commands WHERE ended_at IS NOT NULL AND id <= (SELECT max(id) FROM commands) - ?", (keep.commands,)
            )
            self._db.execute("DELETE FROM events WHERE seq <= (SELECT max(seq) FROM events) - ?", (keep.events,))
            used = "SELECT template FROM sandboxes UNION SELECT template FROM snapshots"
            self._db.execute(f"DELETE FROM templates WHERE id NOT IN ({used})")
        return [row[0] for row in old]


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, isolation_level=None, cached_statements=256, check_same_thread=True)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA busy_timeout = 5000")
    except sqlite3.DatabaseError as error:
        db.close()
        raise ValueError(f"{path} is not a journal of an edge: {error}") from error
    return db
