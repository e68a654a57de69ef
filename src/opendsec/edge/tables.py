# SPDX-License-Identifier: Apache-2.0
"""What the journal's file looks like: its format, its tables, their rows, and how long they are kept. Names are append-only."""

from __future__ import annotations

from typing import Literal

import msgspec

from opendsec.api.sandboxes import SandboxState
from opendsec.edge.lifecycle import Turning

APPLICATION_ID = 0x44536563  # "DSec"
VERSION = 3

ActionState = Literal["pending", "done", "unknown"]

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
-- What sandboxes of one request have in common is kept once: an environment may be large and a batch has thousands.
CREATE TABLE templates (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE sandboxes (
    id TEXT PRIMARY KEY,
    state TEXT NOT NULL,
    held INTEGER NOT NULL,          -- still occupies something of this machine
    template INTEGER NOT NULL REFERENCES templates (id),
    backend TEXT NOT NULL,
    uid_base INTEGER NOT NULL,
    memory_bytes INTEGER NOT NULL,  -- promised
    disk_bytes INTEGER NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    ttl_idle_s REAL,
    used_at REAL NOT NULL,
    busy INTEGER NOT NULL,
    ended_at REAL,
    message TEXT NOT NULL,
    record BLOB                     -- runtime.backend.Record, for adopting or clearing it
) WITHOUT ROWID;
CREATE UNIQUE INDEX one_range_each ON sandboxes (uid_base) WHERE held;
CREATE INDEX ended ON sandboxes (ended_at) WHERE NOT held;
CREATE TABLE actions (
    id INTEGER PRIMARY KEY,
    action_id TEXT NOT NULL UNIQUE,
    sandbox_id TEXT,
    kind TEXT NOT NULL,
    digest BLOB NOT NULL,           -- of the request
    state TEXT NOT NULL,
    detail TEXT NOT NULL,           -- what the intent concerned: a process id, sandbox ids
    result BLOB,
    result_file TEXT,
    result_bytes INTEGER NOT NULL DEFAULT 0,
    started_at REAL NOT NULL,
    ended_at REAL
);
CREATE INDEX actions_pending ON actions (state) WHERE state = 'pending';
CREATE INDEX actions_of_sandbox ON actions (sandbox_id);
CREATE TABLE commands (
    id INTEGER PRIMARY KEY,
    process_id TEXT NOT NULL UNIQUE,
    sandbox_id TEXT NOT NULL,
    kind TEXT NOT NULL,             -- run, session
    action_id TEXT,
    command TEXT NOT NULL,          -- for people
    started_at REAL NOT NULL,
    ended_at REAL,
    result BLOB                     -- ExecResult without output; NULL with ended_at: unknown
);
CREATE INDEX commands_pending ON commands (id) WHERE ended_at IS NULL;
CREATE TABLE events (seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, sandbox_id TEXT, data BLOB NOT NULL);
"""

# What each format added to the one before; a new file has all of them.
ADDED = {
    2: """
CREATE TABLE pools (name TEXT PRIMARY KEY, spec BLOB NOT NULL, declared_at REAL NOT NULL) WITHOUT ROWID;  -- declared ones
-- Living members of all pools: what a dead edge left is cleared by these, and until then nobody else gets their uids.
CREATE TABLE members (member_id TEXT PRIMARY KEY, pool TEXT NOT NULL, uid_base INTEGER NOT NULL, started_at REAL NOT NULL) WITHOUT ROWID;
""",
    3: """
ALTER TABLE sandboxes ADD COLUMN turning TEXT NOT NULL DEFAULT '';  -- pause, resume: under way, the state is the one before
ALTER TABLE sandboxes ADD COLUMN origin TEXT NOT NULL DEFAULT '';   -- the snapshot or sandbox that it was made of
CREATE TABLE snapshots (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kept INTEGER NOT NULL,          -- else it is for a fork, and goes when that is over
    template INTEGER NOT NULL REFERENCES templates (id),
    backend TEXT NOT NULL,
    sandbox_id TEXT NOT NULL,
    created_at REAL NOT NULL,
    record BLOB                     -- runtime.backend.SnapshotRecord; NULL: it is being made
) WITHOUT ROWID;
""",
}


class SandboxRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row of `sandboxes`, its fields in the table's order."""

    id: str
    state: SandboxState
    held: bool
    template: int
    backend: str
    uid_base: int
    memory_bytes: int
    disk_bytes: int
    created_at: float
    expires_at: float | None
    ttl_idle_s: float | None
    used_at: float
    busy: bool
    ended_at: float | None
    message: str
    record: bytes | None
    turning: Turning = ""
    origin: str = ""


class SnapshotRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row of `snapshots`, its fields in the table's order."""

    id: str
    name: str
    kept: bool
    template: int
    backend: str
    sandbox_id: str
    created_at: float
    record: bytes | None = None


class ActionRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row of `actions`, its fields in the table's order."""

    id: int
    action_id: str
    sandbox_id: str | None
    kind: str
    digest: bytes
    state: ActionState
    detail: str
    result: bytes | None
    result_file: str | None
    result_bytes: int
    started_at: float
    ended_at: float | None


class CommandRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row of `commands`, its fields in the table's order."""

    id: int
    process_id: str
    sandbox_id: str
    kind: str
    action_id: str | None
    command: str
    started_at: float
    ended_at: float | None
    result: bytes | None


class MemberRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A row of `members`, its fields in the table's order."""

    member_id: str
    pool: str
    uid_base: int
    started_at: float


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the past is kept."""

    ended_s: float = 86_400.0  # ended sandboxes
    ended_count: int = 10_000
    actions_s: float = 7 * 86_400.0  # results of actions, beyond the life of their sandbox
    commands: int = 10_000  # ended ones, known by their process ids
    events: int = 100_000
    results_bytes: int = 4 << 30  # large results of actions; beyond that the oldest keep everything but their output
