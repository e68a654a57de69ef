# SPDX-License-Identifier: Apache-2.0
"""The blocking classes: the same methods as their asynchronous twins, and the same results."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator

import pytest

from opendsec.api.errors import InvalidRequest, NotFound, OpenDSecError
from opendsec.api.images import DirectorySource
from opendsec.api.spec import Container
from opendsec.client import aio, sync
from opendsec.testing.fakes.edge import FakeEdge

TWINS = [
    (aio.Client, sync.Client),
    (aio.Sandbox, sync.Sandbox),
    (aio.Files, sync.Files),
    (aio.Images, sync.Images),
    (aio.Pools, sync.Pools),
    (aio.Process, sync.Process),
    (aio.Session, sync.Session),
    (aio.Snapshots, sync.Snapshots),
    (aio.Screen, sync.Screen),
    (aio.Mouse, sync.Mouse),
    (aio.Keyboard, sync.Keyboard),
]
RENAMED = {"aclose": "close"}
ONLY_ASYNCHRONOUS = {
    (aio.Files, "extract"),  # takes an asynchronous iterable; `upload` is the way
    (aio.Screen, "vnc"),  # takes one too; `dsec vnc` is the way
}


@pytest.mark.parametrize(("asynchronous", "blocking"), TWINS)
def test_nothing_is_missing(asynchronous: type, blocking: type) -> None:
    for name, method in vars(asynchronous).items():
        if name.startswith("_") or not callable(method) or (asynchronous, name) in ONLY_ASYNCHRONOUS:
            continue
        mirrored = getattr(blocking, RENAMED.get(name, name))
        ours, theirs = inspect.signature(method), inspect.signature(mirrored)
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
        assert not inspect.iscoroutinefunction(inspect.unwrap(mirrored)) or mirrored.__doc__, name
    extra = {name for name in vars(blocking) if not name.startswith("_")} - set(vars(asynchronous)) - {"id", "info", "close"}
    assert extra == set()


@pytest.fixture
def client(edge: FakeEdge) -> Iterator[sync.Client]:
    with sync.Client(f"unix:{edge.socket_path}") as client:
        yield client


def test_a_session_with_everything(client: sync.Client) -> None:
    assert client.info().state == "ready"
    assert client.capabilities().backends
    with client.create(Container(image="debian", labels={"a": "sync"})) as box:
        assert [one.id for one in client.list(labels={"a": "sync"})] == [box.id]
        assert client.get(box.id).id == client.sandbox(box.id).id == box.id
        assert box.info is not None and box.info.state == "running"
        assert box.run("echo hi").check().stdout == "hi\n"
        events = list(box.stream(["printf", "é"]))
        assert [event.kind for event in events] == ["started", "output", "exit"] and events[1].text == "é"
        process = box.start("cat", stdin_stream=True)
        process.write("typed")
        process.close_stdin()
        assert process.wait().stdout == "typed"
        assert [event.text for event in box.process(process.id).attach() if event.text] == ["typed"]
        assert [info.id for info in box.processes()][-1] == process.id
        with box.session() as session:
            session.run("X=5")
            assert session.run("echo $X").stdout == "5\n"
        assert box.files.write("/a/b", "text", parents=True) == 4
        assert box.files.read("/a/b") == "text" and b"".join(box.files.chunks("/a/b")) == b"text"
        assert [entry.name for entry in box.files.list("/a")] == ["b"]
        for event in box.files.watch("/a"):
            if event.kind == "ready":
                box.files.write("/a/c", "")
            else:
                break
        assert box.usage().pids >= 1
    with pytest.raises(NotFound):
        box.run("true")
    slots = client.create_many(Container(image="debian"), 2)
    assert not any(isinstance(slot, OpenDSecError) for slot in slots)
    for slot in slots:
        if not isinstance(slot, OpenDSecError):
            slot.kill()
    assert client.images.build("mine", DirectorySource(path="/etc/apt")) is not None
    assert [event.kind for event in client.images.build_events("mine", DirectorySource(path="/etc/apt"))][-1] == "done"
    client.images.remove("mine")
    assert [event.kind for event in client.events(sandbox_id=box.id)] == ["sandbox.created", "sandbox.stopped"]


def test_errors_come_out_as_they_are(client: sync.Client) -> None:
    with pytest.raises(InvalidRequest) as error:
        client.create(Container(image="NOT A NAME"))
    assert error.value.field == "image"


def test_a_stream_may_be_left(client: sync.Client) -> None:
    with client.create(Container(image="debian")) as box:
        for event in box.stream("echo 1; sleep 600"):
            if event.kind == "output":
                break
        assert box.run("true").ok


def test_from_many_threads(client: sync.Client) -> None:
    with client.create(Container(image="debian")) as box:
        outputs: list[str] = []
        threads = [threading.Thread(target=lambda n=n: outputs.append(box.run(f"echo {n}").stdout)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outputs) == [f"{n}\n" for n in range(8)]


def test_a_constructor_does_nothing_and_closing_may_be_repeated() -> None:
    before = threading.active_count()
    client = sync.Client("unix:/no/such/socket/edge.sock", start_edge=False)
    assert threading.active_count() == before
    with pytest.raises(OpenDSecError):
        client.info()
    client.close()
    client.close()
    assert threading.active_count() == before
