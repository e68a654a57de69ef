# SPDX-License-Identifier: Apache-2.0
"""The checks of every kind of store, on S3 and on a web server; and a mount that is dead."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from opendsec.images.remote import config
from opendsec.images.remote.config import StoreConfig
from opendsec.images.remote.retry import Patience
from opendsec.images.remote.store import RemoteStore, StoreError
from opendsec.images.transfer import push_image
from opendsec.kernel import syscalls
from tests.layers import add_image, new_store
from tests.services import S3, FaultServer, s3_server
from tests.support import ROOT
from tests.unit.images_remote import test_stores as checks
from tests.unit.images_remote.test_stores import (  # noqa: F401  # run here with the store below
    test_files_are_sent_with_progress,
    test_objects_come_back,
    test_what_is_not_so_is_said,
)

pytestmark = [pytest.mark.usefixtures("obstore_started"), pytest.mark.slow]
PATIENCE = Patience(attempt_s=5.0, deadline_s=10.0, attempts=2, first_pause_s=0.01)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["web", "s3"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, s3: S3) -> AsyncIterator[RemoteStore]:
    if request.param == "s3":
        yield config.open_store(
            StoreConfig(name="s", url=f"{s3.url}/{tmp_path.name}", writable=True, options=s3.options, patience=PATIENCE)
        )
        return
    (tmp_path / "web").mkdir()
    with FaultServer(tmp_path / "web", writable=True) as web:
        yield config.open_store(StoreConfig(name="s", url=web.url, writable=True, patience=PATIENCE))


async def test_s3_lists_and_web_servers_do_not(store: RemoteStore) -> None:
    """Which nothing here needs them to."""
    if "some/prefix" in repr(store._store._backend):  # type: ignore[attr-defined]
        await checks.test_keys_are_listed(store)
    else:
        with pytest.raises(StoreError, match="the store cannot do this") as caught:
            await checks.keys(store, "a")
        assert caught.value.kind == "denied"


PUSHER = """
import asyncio, json, sys
from pathlib import Path
from opendsec.images.remote import config
from opendsec.images.remote.config import StoreConfig
from opendsec.images.store import ImageStore
from opendsec.images.transfer import push_image
root, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
store = config.open_store(StoreConfig(name="s", url=url, writable=True, options=options))
asyncio.run(push_image(ImageStore(Path(root)), "task", store, progress=lambda event: print(event.done_bytes, flush=True)))
"""


async def test_a_push_to_s3_that_is_killed_is_not_seen(s3: S3, tmp_path: Path) -> None:
    source = new_store(tmp_path / "source")
    add_image(source, "task", "base", size=40 << 20)
    url = f"{s3.url}/killed"
    command = [sys.executable, "-c", PUSHER, tmp_path / "source", url, json.dumps(s3.options)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as pusher:
        assert pusher.stdout is not None
        first = await asyncio.to_thread(pusher.stdout.readline)
        pusher.kill()
    assert 0 < int(first) < 40 << 20
    remote = config.open_store(StoreConfig(name="s", url=url, writable=True, options=s3.options, patience=PATIENCE))
    assert [key async for key in remote.list("layers")] == [key async for key in remote.list("images")] == []
    await push_image(source, "task", remote, progress=lambda event: None)
    assert len([key async for key in remote.list("layers")]) == 4
    await remote.close()


async def test_a_mount_that_is_dead_holds_a_thread_and_nothing_else(tmp_path: Path) -> None:
    """A FUSE mount whose server never answers: whoever touches it sleeps in the kernel."""
    (tmp_path / "dead").mkdir()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        syscalls.mount("dead", tmp_path / "dead", "fuse", 0, f"fd={device},rootmode=40000,user_id=0,group_id=0")
        try:
            patience = Patience(attempt_s=0.1, deadline_s=0.5, attempts=2, first_pause_s=0.01)
            store = config.open_store(StoreConfig(name="s", url=str(tmp_path / "dead"), writable=True, patience=patience))
            began = time.monotonic()
            for call in (store.get("a", limit=9), store.put("a", b"x"), store.size("a"), store.delete("a")):
                with pytest.raises(StoreError, match="no answer within") as caught:
                    await call
                assert caught.value.kind == "unreachable"
            assert time.monotonic() - began < 5
            assert any(thread.name == "store s" for thread in threading.enumerate())
            await store.close()
        finally:
            os.close(device)  # which ends the connection and lets the sleepers go
            device = -1
            subprocess.run(["umount", "--lazy", tmp_path / "dead"], check=True)
    finally:
        if device >= 0:
            os.close(device)


async def test_certificates_of_ones_own(tmp_path: Path) -> None:
    certificate, key = tmp_path / "site.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=site", "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "a").write_bytes(b"hello")
    with FaultServer(tmp_path / "web", tls=(certificate, key)) as web:
        text = f"[[store]]\nname = 'site'\nurl = '{web.url}'\ndeadline_s = 2\n"
        (trusting,) = config.parse(f"{text}ca_file = '{certificate}'\n".encode(), {})
        store = config.open_store(trusting)
        assert await store.get("a", limit=9) == b"hello"
        await store.close()
        (other,) = config.parse(text.encode(), {})
        store = config.open_store(other)
        with pytest.raises(StoreError) as caught:
            await store.get("a", limit=9)
        assert caught.value.kind == "unreachable"
        await store.close()
