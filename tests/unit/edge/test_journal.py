# SPDX-License-Identifier: Apache-2.0
"""The journal: what is written is there after a crash, formats are refused, nothing is kept for ever."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from opendsec.api.errors import Unavailable
from opendsec.api.sandboxes import Event
from opendsec.edge.journal import Journal, NewerFormat
from opendsec.edge.tables import ADDED, APPLICATION_ID, SCHEMA, MemberRow, Retention, SandboxRow, SnapshotRow


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.db")
    yield journal
    journal.close()


def row(number: int, *, template: int = 1, held: bool = True, ended_at: float | None = None) -> SandboxRow:
    return SandboxRow(
        id=f"sb_{number:016d}",
        state="running" if held else "stopped",
        held=held,
        template=template,
        backend="container",
        uid_base=65_536 * (number + 1),
        memory_bytes=1,
        disk_bytes=2,
        created_at=float(number),
        expires_at=None,
        ttl_idle_s=5.0,
        used_at=float(number),
        busy=False,
        ended_at=ended_at,
        message="",
        record=b"r",
    )


def test_rows_come_back_as_they_were_written(journal: Journal) -> None:
    template = journal.template(b"d" * 32, b"{}")
    assert journal.template(b"d" * 32, b"{}") == template
    first, second = row(1, template=template), row(2, template=template)
    with journal.transaction():
        journal.insert_sandbox(first)
        journal.insert_sandbox(second)
    changed = replace(first, state="stopping", busy=True, message="why", record=None, expires_at=9.0, used_at=8.0)
    journal.update_sandbox(changed)
    assert journal.sandboxes() == [changed, second]
    assert journal.templates() == {template: b"{}"}


def test_a_transaction_is_all_or_nothing(journal: Journal) -> None:
    template = journal.template(b"d" * 32, b"{}")
    with pytest.raises(KeyError), journal.transaction():
        journal.insert_sandbox(row(1, template=template))
        with journal.transaction():
            journal.insert_sandbox(row(2, template=template))
        raise KeyError
    assert journal.sandboxes() == []


def test_two_living_sandboxes_never_share_a_uid_range(journal: Journal) -> None:
    template = journal.template(b"d" * 32, b"{}")
    journal.insert_sandbox(row(1, template=template))
    clash = replace(row(2, template=template), uid_base=row(1).uid_base)
    with pytest.raises(sqlite3.IntegrityError):
        journal.insert_sandbox(clash)
    journal.update_sandbox(replace(row(1, template=template), held=False, state="stopped"))
    journal.insert_sandbox(clash)


def test_an_edge_that_is_killed_loses_nothing_committed(tmp_path: Path) -> None:
    dead = Journal(tmp_path / "journal.db")
    template = dead.template(b"d" * 32, b"{}")
    dead.insert_sandbox(row(1, template=template))
    alive = Journal(tmp_path / "journal.db")  # the first was never closed
    assert alive.sandboxes() == [row(1, template=template)]
    alive.close()
    dead.close()


def test_actions_are_told_apart_by_their_id(journal: Journal) -> None:
    assert journal.begin_action("a", sandbox_id="sb", kind="run", digest=b"1", detail="p", at=1.0) is None
    before = journal.begin_action("a", sandbox_id="sb", kind="run", digest=b"2", detail="q", at=2.0)
    assert before is not None and (before.digest, before.state, before.detail) == (b"1", "pending", "p")
    assert [one.action_id for one in journal.pending_actions()] == ["a"]
    journal.end_action("a", at=3.0, state="done", result=b"r")
    ended = journal.action("a")
    assert ended is not None and (ended.state, ended.result, ended.result_bytes, ended.ended_at) == ("done", b"r", 1, 3.0)
    assert journal.pending_actions() == []
    journal.end_action("a", at=3.0, state="done", result=None, file="f", size=99)
    assert journal.result_files() == {"f"}
    journal.drop_action("a")
    assert journal.action("a") is None


def test_commands_of_a_dead_edge_are_ended_without_result(journal: Journal) -> None:
    for name in ("one", "two"):
        journal.begin_command(name, "sb", "run", None, "true", 1.0)
    journal.end_command("one", 2.0, b"{}")
    assert journal.end_all_commands(3.0) == 1
    assert [(one.process_id, one.ended_at, one.result) for one in journal.commands_of("sb")] == [("one", 2.0, b"{}"), ("two", 3.0, None)]


def test_events_are_read_in_pages(journal: Journal) -> None:
    written = [Event(seq=seq, at=1.0, kind="k", sandbox_id="a" if seq % 2 else "b", data={"n": seq, "t": True}) for seq in range(1, 8)]
    journal.add_events(written)
    assert journal.events(limit=3) == written[:3]
    assert journal.events(after=3, sandbox_id="a") == [written[4], written[6]]
    assert journal.last_event() == 7


def test_what_is_old_is_forgotten(journal: Journal) -> None:
    template = journal.template(b"d" * 32, b"{}")
    journal.template(b"e" * 32, b"unused")
    journal.insert_sandbox(row(1, template=template))
    for number in range(2, 7):
        journal.insert_sandbox(row(number, template=template, held=False, ended_at=100.0 * number))
    for action, box in (("of-living", row(1).id), ("of-ended", row(5).id), ("of-none", None)):
        journal.begin_action(action, sandbox_id=box, kind="run", digest=b"", detail="", at=1.0)
        journal.end_action(action, at=2.0, state="done", result=b"")
    journal.begin_action("pending", sandbox_id=None, kind="create", digest=b"", detail="", at=1.0)
    for number in range(5):
        journal.begin_command(f"p{number}", "sb", "run", None, "", 1.0)
        if number:
            journal.end_command(f"p{number}", 1.0, None)
    journal.add_events(Event(seq=seq, at=1.0, kind="k") for seq in range(1, 11))
    forgotten = journal.prune(700.0, Retention(ended_s=350.0, ended_count=2, actions_s=100.0, commands=2, events=4))
    assert sorted(forgotten) == [row(2).id, row(3).id, row(4).id]  # two by age, one by number
    assert [one.id for one in journal.sandboxes()] == [row(1).id, row(5).id, row(6).id]
    assert [name for name in ("of-living", "of-ended", "of-none", "pending") if journal.action(name)] == ["of-living", "pending"]
    assert [one.process_id for one in journal.commands_of("sb")] == ["p0", "p3", "p4"]
    assert [event.seq for event in journal.events()] == [7, 8, 9, 10]
    assert list(journal.templates()) == [template]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"no database at all, but long enough to be taken for one" * 100)
    with pytest.raises(ValueError, match="is not a journal"):
        Journal(path)
    path.unlink()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(ValueError, match="is not a journal"):
        Journal(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    Journal(path).close()
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(NewerFormat, match="format 99"):
        Journal(path)


def test_it_is_for_its_owner_alone(journal: Journal) -> None:
    journal.template(b"d" * 32, b"{}")
    assert {path.stat().st_mode & 0o777 for path in journal.path.parent.glob("journal.db*")} == {0o600}


def test_a_full_disk_is_told_as_such(journal: Journal) -> None:
    template = journal.template(b"d" * 32, b"{}")
    with sqlite3.connect(journal.path) as other:
        pages = other.execute("PRAGMA page_count").fetchone()[0]
    other.close()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(Unavailable, match="the journal cannot be written"), journal.transaction():
        for number in range(10_000):
            journal.insert_sandbox(row(number, template=template))
    assert journal.sandboxes() == []


def test_a_checkpoint_leaves_the_writer_alone(journal: Journal) -> None:
    template = journal.template(b"d" * 32, b"{}")
    for number in range(50):
        journal.insert_sandbox(row(number, template=template))
    journal.checkpoint()
    assert not journal.checkpoint_due()
    journal.insert_sandbox(row(99, template=template))
    assert len(journal.sandboxes()) == 51


def test_a_journal_of_the_first_format_gets_the_tables_of_pools(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    with sqlite3.connect(path) as db:
        db.executescript(f"{SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 1;")
    db.close()
    journal = Journal(path)
    member = MemberRow(member_id="sb_1", pool="p", uid_base=65_536, started_at=1.0)
    journal.put_pool("p", b"{}", 1.0)
    journal.put_pool("p", b"[]", 2.0)
    journal.add_member(member)
    journal.close()
    journal = Journal(path)
    assert journal.pools() == {"p": b"[]"} and journal.members() == [member]
    journal.drop_pool("p")
    journal.drop_member("sb_1")
    assert journal.pools() == {} and journal.members() == []
    journal.close()


def test_a_journal_of_the_second_format_gets_what_pauses_and_snapshots_need(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    db = sqlite3.connect(path)
    db.executescript(f"{SCHEMA} {ADDED[2]} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 2;")
    db.execute("INSERT INTO templates VALUES (1, ?, ?)", (b"d" * 32, b"{}"))
    old = msgspec.structs.astuple(row(1))[:-2]
    db.execute(f"INSERT INTO sandboxes VALUES ({','.join('?' * len(old))})", old)
    db.commit()
    db.close()
    with contextlib.closing(Journal(path)) as journal:
        assert journal.sandboxes() == [row(1)]
        paused = replace(row(1), state="paused", turning="resume")
        journal.update_sandbox(paused)
        kept = SnapshotRow(id="snap_1", name="s", kept=True, template=1, backend="microvm", sandbox_id="sb_1", created_at=1.0)
        journal.put_snapshot(kept)
        journal.put_snapshot(replace(kept, record=b"r"))
        assert journal.snapshots() == [replace(kept, record=b"r")]
        assert journal.sandboxes() == [paused]
        journal.drop_snapshot("snap_1")
        assert journal.snapshots() == []


def test_commands_of_paused_sandboxes_stay_under_way(journal: Journal) -> None:
    template = journal.template(b"d" * 32, b"{}")
    journal.insert_sandbox(row(1, template=template))
    journal.insert_sandbox(replace(row(2, template=template), state="paused"))
    for number in (1, 2):
        journal.begin_command(f"proc_{number}", row(number).id, "run", None, "sleep", 1.0)
    assert journal.end_all_commands(2.0) == 1
    assert journal.commands_under_way() == journal.commands_under_way(row(2).id) == {"proc_2"}
    assert journal.end_all_commands(3.0, row(2).id) == 1 and not journal.commands_under_way()
