# SPDX-License-Identifier: Apache-2.0
"""What every kind of store does, on a directory and on obstore's store in memory; what S3 and web servers do is in the integration
tests."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from opendsec.images.remote import objects
from opendsec.images.remote.objects import ObjectStore
from opendsec.images.remote.posix import PosixStore
from opendsec.images.remote.store import RemoteStore, StoreError, exists
from opendsec.images.remote.threads import Abandoned, Workers

pytestmark = pytest.mark.usefixtures("obstore_started")
MIB = 1 << 20


@pytest.fixture(params=["directory", "memory"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteStore:
    if request.param == "directory":
        (tmp_path / "store").mkdir()
        return PosixStore("s", tmp_path / "store", writable=True)
    return ObjectStore("s", objects.connect("memory:///", {}, attempt_s=5), writable=True)


async def refused(kind: str, call: object, message: str = "store s") -> None:
    with pytest.raises(StoreError, match=message) as caught:
        await call  # type: ignore[misc]
    assert caught.value.kind == kind


async def keys(store: RemoteStore, prefix: str) -> list[str]:
    return sorted([key async for key in store.list(prefix)])


async def test_objects_come_back(store: RemoteStore, tmp_path: Path) -> None:
    await store.put("a/b/c", b"hello")
    assert await store.get("a/b/c", limit=5) == b"hello"
    assert await store.size("a/b/c") == 5
    assert await exists(store, "a/b/c") and not await exists(store, "a/b/d")
    await store.put("a/b/c", b"other!")
    assert await store.get_range("a/b/c", 2, 3) == b"her"
    await store.put("a/empty", b"")
    assert await store.get("a/empty", limit=0) == b""
    await store.delete("a/b/c")
    await store.delete("a/b/c")
    assert not await exists(store, "a/b/c")
    await store.close()


async def test_keys_are_listed(store: RemoteStore) -> None:
    for key in ("a/b/c", "a/empty", "ab", "b"):
        await store.put(key, b"")
    assert await keys(store, "a") == ["a/b/c", "a/empty"]
    assert await keys(store, "nothing/here") == []
    await store.close()


async def test_files_are_sent_with_progress(store: RemoteStore, tmp_path: Path) -> None:
    data = os.urandom(20 * MIB + 17)
    (tmp_path / "file").write_bytes(data)
    seen: list[int] = []
    await store.put("big", tmp_path / "file", progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == len(data)  # web servers get it in one piece
    assert await store.get("big", limit=len(data)) == data
    assert await store.get_range("big", 5 * MIB, 9 * MIB) == data[5 * MIB : 14 * MIB]
    await store.close()


async def test_what_is_not_so_is_said(store: RemoteStore) -> None:
    await store.put("a/b", b"hello")
    await refused("missing", store.get("a/c", limit=9), "store s: a/c: there is no such object")
    await refused("missing", store.get_range("a/c", 0, 1))
    await refused("missing", store.size("a/c"))
    await refused("damaged", store.get("a/b", limit=4), "has 5 bytes, more than the 4")
    await refused("damaged", store.get_range("a/b", 3, 3))
    await refused("damaged", store.get_range("a/b", 30, 3))
    for bad in ("", "/etc/passwd", "../x", "a/../../x", "a//b", "a\0b", "a b"):
        await refused("missing", store.get(bad, limit=9), "that is no key")
        await refused("missing", store.put(bad, b""), "that is no key")
    await store.close()


async def test_stores_are_read_only_unless_said_otherwise(tmp_path: Path) -> None:
    stores: list[RemoteStore] = [PosixStore("s", tmp_path), ObjectStore("s", objects.connect("memory:///", {}, attempt_s=5))]
    for store in stores:
        await refused("denied", store.put("a", b""), "not configured as writable")
        await refused("denied", store.delete("a"))
        await store.close()


# --- directories ---------------------------------------------------------------------------------------------------


async def test_a_mount_that_is_not_there_is_not_an_empty_store(tmp_path: Path) -> None:
    store = PosixStore("s", tmp_path / "mount", writable=True)
    await refused("unreachable", store.get("a", limit=1), "its directory is not there")
    await refused("unreachable", store.put("a", b""))
    await refused("unreachable", store.delete("a"))
    with pytest.raises(StoreError):
        await keys(store, "a")
    assert os.listdir(tmp_path) == []
    await store.close()


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EACCES, "denied"), (errno.EROFS, "denied"), (errno.ENOSPC, "full"), (errno.EDQUOT, "full"), (errno.ESTALE, "unreachable")],
)
async def test_errors_of_the_file_system_have_a_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: str) -> None:
    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    store = PosixStore("s", tmp_path, writable=True)
    monkeypatch.setattr(os, "fsync", fail)
    await refused(kind, store.put("a/b", b"x"))
    assert not await exists(store, "a/b")
    assert os.listdir(tmp_path / ".tmp") == []
    await store.close()


async def test_what_dead_pushers_left_is_cleared_after_a_day(tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    for name, age in (("old", 90_000), ("new", 1000)):
        (tmp_path / ".tmp" / name).touch()
        os.utime(tmp_path / ".tmp" / name, (1_000_000 - age,) * 2)
    store = PosixStore("s", tmp_path, writable=True, clock=lambda: 1_000_000)
    await store.put("a", b"x")
    assert os.listdir(tmp_path / ".tmp") == ["new"]
    await store.close()


async def test_a_put_that_was_given_up_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, go_on, done = threading.Event(), threading.Event(), threading.Event()
    fsync, fchmod = os.fsync, os.fchmod

    def slow(fd: int, mode: int) -> None:
        stuck.set()
        go_on.wait(30)
        fchmod(fd, mode)

    store = PosixStore("s", tmp_path, writable=True)
    await store.put("a", b"first")
    monkeypatch.setattr(os, "fchmod", slow)
    task = asyncio.ensure_future(store.put("a", b"late"))
    await asyncio.to_thread(stuck.wait, 30)
    monkeypatch.setattr(os, "fchmod", fchmod)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):  # at once, though the thread is stuck
        await task
    await store.put("a", b"second")

    def told(fd: int) -> None:
        fsync(fd)
        if os.path.samestat(os.fstat(fd), os.stat(tmp_path)):
            done.set()

    monkeypatch.setattr(os, "fsync", told)
    go_on.set()
    assert await asyncio.to_thread(done.wait, 30)
    assert await store.get("a", limit=9) == b"second"
    assert os.listdir(tmp_path / ".tmp") == []
    await store.close()


async def test_no_link_leads_out_of_a_store(tmp_path: Path) -> None:
    """Not where others of the same directory may write: what is read, written, listed, removed and cleared lies in it."""
    outside, root = tmp_path / "outside", tmp_path / "store"
    outside.mkdir(), root.mkdir()
    (outside / "secret").write_bytes(b"secret")
    os.utime(outside / "secret", (1, 1))
    for name, target in {"file": outside / "secret", "up": "../outside", "folder": outside, ".tmp": outside}.items():
        (root / name).symlink_to(target)
    store = PosixStore("s", root, writable=True)
    for key in ("file", "folder/secret", "up/secret"):
        await refused("missing", store.get(key, limit=9))
        assert not await exists(store, key)
        await store.delete(key)
    assert await keys(store, "folder") == await keys(store, "up") == []
    await refused("unreachable", store.put("a", b"x"))
    (root / ".tmp").unlink()
    for key in ("folder/new", "up/new"):
        with pytest.raises(StoreError):
            await store.put(key, b"x")
    assert [(path.name, path.read_bytes()) for path in outside.iterdir()] == [("secret", b"secret")]
    (root / "real").mkdir()
    (root / "inside").symlink_to("real")  # what stays in is nobody's harm
    await store.put("inside/a", b"x")
    assert await store.get("real/a", limit=9) == b"x"
    await store.close()


async def test_what_is_no_file_is_no_object(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.mkdir(tmp_path / "folder")
    store = PosixStore("s", tmp_path)
    for key in ("fifo", "folder"):
        await refused("missing", store.get(key, limit=9))
        await refused("missing", store.get_range(key, 0, 9))
    await store.close()


# --- threads -------------------------------------------------------------------------------------------------------


async def test_threads_are_few_and_used_again() -> None:
    workers, names = Workers("w", 2), set[int]()

    def note(abandoned: Abandoned) -> None:
        names.add(threading.get_ident())

    await asyncio.gather(*(workers.run(note) for _ in range(20)))
    for _ in range(5):
        await workers.run(note)
    assert len(names) <= 2
    workers.close()


async def test_errors_come_through() -> None:
    def fail(abandoned: Abandoned) -> None:
        raise ZeroDivisionError

    workers = Workers("w")
    with pytest.raises(ZeroDivisionError):
        await workers.run(fail)
    workers.close()


async def test_stuck_threads_block_no_loop_and_what_waited_behind_them_is_not_run() -> None:
    workers, release, ran = Workers("w", 2), threading.Event(), list[int]()

    def stick(abandoned: Abandoned) -> None:
        release.wait(30)

    def run(number: int) -> Callable[[Abandoned], None]:
        return lambda abandoned: ran.append(number)

    stuck = [asyncio.ensure_future(workers.run(stick)) for _ in range(2)]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(workers.run(run(1)), 0.02)
    for task in stuck:
        task.cancel()
    await asyncio.wait(stuck)
    release.set()
    await workers.run(run(2))
    assert ran == [2]
    workers.close()


async def test_closed_is_closed() -> None:
    workers = Workers("w")
    await workers.run(lambda abandoned: None)
    workers.close()
    workers.close()
    with pytest.raises(RuntimeError, match="w is closed"):
        await workers.run(lambda abandoned: None)
