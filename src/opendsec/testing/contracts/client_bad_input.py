# SPDX-License-Identifier: Apache-2.0
"""Bad input through the SDK: every case ends in one clear error that names the field, and leaves nothing behind.

    @pytest.mark.parametrize("name", client_bad_input.CASES)
    async def test_bad_input(name):
        await client_bad_input.check_case(name, setup)

Callers without a type checker are the point here, so the cases go through `untyped`, which forgets the signature.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast

from opendsec.api.errors import CallerError, Conflict, InvalidRequest, NotFound, OpenDSecError
from opendsec.api.images import DirectorySource
from opendsec.api.spec import Container
from opendsec.client.aio import Client, Sandbox
from opendsec.testing.contracts.client import WORK, Setup

Call = Callable[[Client, Sandbox], Awaitable[object]]
NO_SUCH_BOX, NO_SUCH_PROCESS = "sb_0000000000000000", "proc_0000000000000000"


@dataclass(frozen=True)
class Case:
    call: Call
    error: type[OpenDSecError] | tuple[type[OpenDSecError], ...] = InvalidRequest
    field: str | None = None  # how the named field begins


class Untyped(Protocol):
    """A function as seen by a caller who does not check types."""

    def __call__(self, *arguments: object, **options: object) -> Awaitable[object]: ...


class UntypedSpec(Protocol):
    def __call__(self, **fields: object) -> Container: ...


def untyped(function: object) -> Untyped:
    return cast(Untyped, function)


def create(**fields: object) -> Call:
    async def call(client: Client, box: Sandbox) -> object:
        image = box.info.image if box.info else ""
        return await client.create(cast(UntypedSpec, Container)(**{"image": image, **fields}))

    return call


def run(*command: object, **options: object) -> Call:
    async def call(client: Client, box: Sandbox) -> object:
        return await untyped(box.run)(*command, **options)

    return call


def files(method: str, *arguments: object, **options: object) -> Call:
    async def call(client: Client, box: Sandbox) -> object:
        return await untyped(getattr(box.files, method))(*arguments, **options)

    return call


CASES: dict[str, Case] = {
    # the spec: types
    "spec is no spec": Case(lambda c, b: untyped(c.create)({"image": "debian"}), field="spec"),
    "spec is None": Case(lambda c, b: untyped(c.create)(None), field="spec"),
    "image is a number": Case(create(image=5), field="spec.image"),
    "layers is text": Case(create(layers="workspace:a@1"), field="spec.layers"),
    "cpu is text": Case(create(cpu="two"), field="spec.cpu"),
    "memory is a list": Case(create(memory=[1]), field="spec.memory"),
    "pids is a fraction": Case(create(pids=1.5), field="spec.pids"),
    "env has a number": Case(create(env={"A": 1}), field="spec.env"),
    "labels is a list": Case(create(labels=["a"]), field="spec.labels"),
    "ttl is text": Case(create(ttl_s="1h"), field="spec.ttl_s"),
    # the spec: values
    "image is empty": Case(create(image=""), field="image"),
    "image has upper case": Case(create(image="Debian"), field="image"),
    "image goes up": Case(create(image="../etc"), field="image"),
    "image does not exist": Case(create(image="no-such-image"), NotFound),
    "layer is malformed": Case(create(layers=("a b",)), field="layers[0]"),
    "layer does not exist": Case(create(layers=("toolkit:no-such@1",)), NotFound),
    "too many layers": Case(create(layers=("toolkit:x@1",) * 65), field="layers"),
    "cpu is zero": Case(create(cpu=0), field="cpu"),
    "cpu is not a number": Case(create(cpu=float("nan"))),
    "cpu is endless": Case(create(cpu=float("inf"))),
    "memory has no unit we know": Case(create(memory="1 parsec"), field="memory"),
    "memory is negative": Case(create(memory=-1), field="memory"),
    "memory is tiny": Case(create(memory="1KiB"), field="memory"),
    "disk is empty text": Case(create(disk=""), field="disk"),
    "inodes is zero": Case(create(inodes=0), field="inodes"),
    "pids is one": Case(create(pids=1), field="pids"),
    "open files is huge": Case(create(open_files=1 << 40), field="open_files"),
    "weight is zero": Case(create(cpu_weight=0), field="cpu_weight"),
    "env name has =": Case(create(env={"A=B": ""}), field="env"),
    "env name is empty": Case(create(env={"": "x"}), field="env"),
    "env value has NUL": Case(create(env={"A": "\0"}), field="env.A"),
    "env is huge": Case(create(env={f"V{number}": "x" * 100_000 for number in range(12)}), field="env"),
    "user is a sentence": Case(create(user="root; id"), field="user"),
    "user id is huge": Case(create(user="99999"), field="user"),
    "workdir is relative": Case(create(workdir="work"), field="workdir"),
    "hostname has a dot": Case(create(hostname="a.b"), field="hostname"),
    "label key has a space": Case(create(labels={"a b": ""}), field="labels"),
    "ttl is negative": Case(create(ttl_s=-1), field="ttl_s"),
    "idle ttl is zero": Case(create(ttl_idle_s=0), field="ttl_idle_s"),
    # creating
    "count is zero": Case(lambda c, b: c.create_many(_spec(b), 0), field="count"),
    "count is huge": Case(lambda c, b: c.create_many(_spec(b), 1 << 20), field="count"),
    "count is text": Case(lambda c, b: untyped(c.create_many)(_spec(b), "3"), field="count"),
    "create with a bad action id": Case(lambda c, b: c.create(_spec(b), action_id="a b"), field="action_id"),
    "create with an empty action id": Case(lambda c, b: c.create(_spec(b), action_id=""), field="action_id"),
    # ids
    "unknown sandbox": Case(lambda c, b: c.get(NO_SUCH_BOX), NotFound),
    "sandbox id goes up": Case(lambda c, b: c.get("../info"), NotFound),
    "sandbox id is empty": Case(lambda c, b: c.get(""), NotFound),
    "sandbox id is a number": Case(lambda c, b: untyped(c.get)(7), NotFound),
    "kill an unknown sandbox": Case(lambda c, b: c.sandbox(NO_SUCH_BOX).kill(), NotFound),
    "run in an unknown sandbox": Case(lambda c, b: c.sandbox(NO_SUCH_BOX).run("true"), NotFound),
    "unknown process": Case(lambda c, b: b.process(NO_SUCH_PROCESS).wait(), NotFound),
    "signal to an unknown process": Case(lambda c, b: b.process(NO_SUCH_PROCESS).signal(9), NotFound),
    # commands
    "command is a number": Case(run(5), field="shell"),
    "command is nothing": Case(run(None)),
    "argv is empty": Case(run([]), field="argv"),
    "argv has a number": Case(run(["echo", 1]), field="argv[1]"),
    "argv has an empty program": Case(run([""]), field="argv"),
    "argv has NUL": Case(run(["echo", "a\0b"]), field="argv[1]"),
    "shell has NUL": Case(run("echo \0"), field="shell"),
    "shell is too long": Case(run("x" * 200_000), field="shell"),
    "shell has a lone surrogate": Case(run("echo \ud800")),
    "cwd is relative": Case(run("true", cwd="work"), field="cwd"),
    "cwd has NUL": Case(run("true", cwd="/\0"), field="cwd"),
    "cwd is bytes": Case(run("true", cwd=b"/"), field="cwd"),
    "command env is a list": Case(run("true", env=["A=1"]), field="env"),
    "command env has a number": Case(run("true", env={"A": 1}), field="env"),
    "user is malformed": Case(run("true", user="a b"), field="user"),
    "stdin is a number": Case(run("true", stdin=5), field="stdin"),
    "stdin is too large": Case(run("true", stdin=bytes((64 << 20) + 1)), field="stdin"),
    "time-out is zero": Case(run("true", timeout_s=0), field="timeout_s"),
    "time-out is text": Case(run("true", timeout_s="5s"), field="timeout_s"),
    "time-out is not a number": Case(run("true", timeout_s=float("nan")), field="timeout_s"),
    "capture is negative": Case(run("true", capture_bytes=-1), field="capture_bytes"),
    "output limit is zero": Case(run("true", output_limit_bytes=0), field="output_limit_bytes"),
    "terminal is text": Case(run("true", pty="yes"), field="pty"),
    "action id has a space": Case(run("true", action_id="a b"), field="action_id"),
    "action id is too long": Case(run("true", action_id="a" * 129), field="action_id"),
    "an option that does not exist": Case(run("true", shel="bash")),
    "session in a relative directory": Case(lambda c, b: b.session(cwd="x"), field="cwd"),
    "signal zero": Case(lambda c, b: b.process(NO_SUCH_PROCESS).signal(0), field="signal"),
    "signal by name": Case(lambda c, b: untyped(b.process(NO_SUCH_PROCESS).signal)("KILL"), field="signal"),
    "terminal of no size": Case(lambda c, b: b.process(NO_SUCH_PROCESS).resize(0, 80), field="pty.rows"),
    "signal with a bad action id": Case(lambda c, b: b.process(NO_SUCH_PROCESS).signal(9, action_id="a b"), field="action_id"),
    "resize with a bad action id": Case(lambda c, b: b.process(NO_SUCH_PROCESS).resize(1, 1, action_id=""), field="action_id"),
    "input with a bad action id": Case(lambda c, b: b.process(NO_SUCH_PROCESS).write("x", action_id="\n"), field="action_id"),
    "end of input with a bad action id": Case(lambda c, b: untyped(b.process(NO_SUCH_PROCESS).close_stdin)(action_id=7), field="action_id"),
    # files
    "mkdir with a bad action id": Case(files("mkdir", f"{WORK}/x", action_id="a b"), field="action_id"),
    "move with a bad action id": Case(files("move", WORK, f"{WORK}/x", action_id="é"), field="action_id"),
    "remove with a bad action id": Case(files("remove", f"{WORK}/x", action_id="x" * 129), field="action_id"),
    "chmod with a bad action id": Case(files("chmod", WORK, 0o600, action_id=b"x"), field="action_id"),
    "image to remove with a bad action id": Case(lambda c, b: c.images.remove("x", action_id="a,b"), field="action_id"),
    "gc with a bad action id": Case(lambda c, b: c.images.gc(action_id="%"), field="action_id"),
    "path is relative": Case(files("read", "a.txt"), field="path"),
    "path is empty": Case(files("read", ""), field="path"),
    "path is None": Case(files("read", None), field="path"),
    "path has NUL": Case(files("read", "/a\0b"), field="path"),
    "path is too long": Case(files("read", "/" + "a/" * 3000), field="path"),
    "a name is too long": Case(files("read", "/" + "a" * 256), field="path"),
    "file does not exist": Case(files("read", f"{WORK}/no-such-file"), NotFound),
    "file is a directory": Case(files("read", WORK), Conflict),
    "read from a negative offset": Case(files("read_bytes", WORK, offset=-1), field="offset"),
    "write a number": Case(files("write", f"{WORK}/x", 5), field="data"),
    "write text that is none": Case(files("write", f"{WORK}/x", "\ud800"), field="data"),
    "write with a mode that is none": Case(files("write", f"{WORK}/x", "", mode=0o10000), field="mode"),
    "write with a malformed user": Case(files("write", f"{WORK}/x", "", user="a b"), field="user"),
    "write below a file that is not there": Case(files("write", f"{WORK}/no/x", ""), NotFound),
    "write over a directory": Case(files("write", WORK, "x"), Conflict),
    "make a directory twice": Case(files("mkdir", WORK), Conflict),
    "list what does not exist": Case(files("list", f"{WORK}/no"), NotFound),
    "list a relative path": Case(files("list", "work"), field="path"),
    "move what does not exist": Case(files("move", f"{WORK}/no", f"{WORK}/x"), NotFound),
    "move to a relative path": Case(files("move", WORK, "x"), field="to"),
    "remove what does not exist": Case(files("remove", f"{WORK}/no"), NotFound),
    "watch what does not exist": Case(lambda c, b: _first(b.files.watch(f"{WORK}/no")), NotFound),
    "download what does not exist": Case(files("download", f"{WORK}/no", "/tmp/never-made"), NotFound),
    "upload what does not exist": Case(files("upload", "/no/such/file/here", f"{WORK}/x"), field="local"),
    "unpack what is no tar": Case(lambda c, b: b.files.extract(WORK, _garbage())),
    # images
    "build from a directory that does not exist": Case(
        lambda c, b: c.images.build("never", DirectorySource(path="/no/such/directory")), (InvalidRequest, NotFound)
    ),
    "build from a number": Case(lambda c, b: untyped(c.images.build)("never", 5)),
    "compose from nothing": Case(lambda c, b: c.images.compose("never", "no-such-image", []), NotFound),
    "remove an image that does not exist": Case(lambda c, b: c.images.remove("no-such-image"), NotFound),
    "pull without a transport": Case(lambda c, b: c.images.pull("debian"), field="reference"),
    "pull without a host": Case(lambda c, b: c.images.pull("docker://debian"), field="reference"),
    "pull a number": Case(lambda c, b: untyped(c.images.pull)(5), field="reference"),
    "pull from no store": Case(lambda c, b: c.images.pull("store:no-such-store/x"), NotFound, field="reference"),
    "pull under a bad name": Case(lambda c, b: c.images.pull("oci:/x", name="A B"), field="name"),
    "pull with a token for a path": Case(lambda c, b: c.images.pull("oci:/x", token="secret"), field="token"),
    "pull lazily perhaps": Case(lambda c, b: untyped(c.images.pull)("oci:/x", lazy="perhaps"), field="lazy"),
    "push what is not there": Case(lambda c, b: c.images.push("no-such-image", "oci:/tmp/never-made"), NotFound, field="name"),
    "push to a digest": Case(lambda c, b: c.images.push("x", "docker://r.test/x@sha256:" + "0" * 64), field="reference"),
    "warm what is not there": Case(lambda c, b: c.images.warm("no-such-image"), NotFound, field="name"),
    "inspect what is not there": Case(lambda c, b: c.images.inspect("no-such-image"), NotFound, field="name"),
    "inspect a number": Case(lambda c, b: untyped(c.images.inspect)(5), field="name"),
    "trace text": Case(lambda c, b: untyped(c.images.trace)("x", "echo"), field="argv"),
    "trace nothing": Case(lambda c, b: c.images.trace("x", []), field="argv"),
    "diff with a path": Case(lambda c, b: c.images.diff("/etc", "x"), field="a"),
    "lint for a number": Case(lambda c, b: untyped(c.images.lint)("x", packages=[5]), field="packages[0]"),
    "verify what is not there": Case(lambda c, b: c.images.verify("no-such-image"), NotFound, field="name"),
    "gc with a negative grace": Case(lambda c, b: c.images.gc(grace_s=-1), field="grace_s"),
    "pack without a version": Case(lambda c, b: b.pack("x"), field="name"),
    "pack a number": Case(lambda c, b: untyped(b.pack)(5), field="name"),
    "pack as a base": Case(lambda c, b: b.pack("x@1", kind="base"), field="kind"),
    "pack with a relative pattern": Case(lambda c, b: b.pack("x@1", scrub_paths=["tmp"]), field="scrub_paths[0]"),
    "pack with a bad action id": Case(lambda c, b: b.pack("x@1", action_id="a b"), field="action_id"),
}


def _spec(box: Sandbox) -> Container:
    return Container(image=box.info.image if box.info else "")


async def _first(items: object) -> object:
    async for item in cast(AsyncIterable[object], items):
        return item
    return None


async def _garbage() -> AsyncIterator[bytes]:
    yield b"this is no tar stream\n" * 100


async def check_case(name: str, setup: Setup) -> None:
    """Run one case. The sandbox works afterwards, and none was made or lost."""
    case = CASES[name]
    async with setup.box() as box, setup.client() as client:
        before = {one.id for one in await client.list()}
        try:
            await case.call(client, box)
        except OpenDSecError as error:
            assert isinstance(error, case.error), f"{type(error).__name__}: {error}"
            assert isinstance(error, CallerError) and 400 <= error.status < 500
            assert error.message and "\n" not in error.message, error.message
            if case.field is not None:
                assert (error.field or "").startswith(case.field), f"{error.field}: {error.message}"
        else:
            raise AssertionError(f"{name}: accepted")
        assert {one.id for one in await client.list()} == before
        assert (await box.run("true")).ok
        assert [entry.name for entry in await box.files.list(WORK)] == []


async def check_every_case(setup: Setup) -> None:
    """All of them on one edge. Raises an ExceptionGroup with a note that names each case that failed."""
    failed: list[Exception] = []
    for name in CASES:
        try:
            await check_case(name, setup)
        except Exception as error:
            error.add_note(f"the case: {name}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} of {len(CASES)} cases", failed)
