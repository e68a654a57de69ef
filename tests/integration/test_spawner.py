# SPDX-License-Identifier: Apache-2.0
"""The spawner, spoken to in its own protocol: whatever it is sent it answers, goes on, and keeps nothing.

`Raw` is the edge's end of the channel without the edge: each message is sent and received by the test itself.
"""

from __future__ import annotations

import errno
import itertools
import marshal
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from opendsec.api.images import ImageConfig
from opendsec.api.spec import Container
from opendsec.images.layers import LayerRef
from opendsec.kernel import cgroups, procfs, syscalls
from opendsec.kernel.fds import sealed_memfd
from opendsec.runtime.backend import ExecPlan, Placement
from opendsec.runtime.container import plan as plans
from opendsec.runtime.container import profile
from opendsec.runtime.scratch import ScratchPlan
from opendsec.runtime.spawn import START
from tests.boxes import STAGING, UID_BASE
from tests.support import NATIVE_INIT

Message = dict[str, object]
pytestmark = pytest.mark.timeout(60)

GROUP = f"opendsec-raw{os.getpid()}"
SANDBOX = "sb_raw"
_numbers = itertools.count(1)


def wait_gone(pid: int) -> None:
    """Until a process has ended, if it is there."""
    try:
        pidfd = syscalls.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        assert poll.poll(10_000), f"a child lives on: {procfs.stat(pid).comm!r}"
    finally:
        os.close(pidfd)


class Raw:
    """A spawner and our end of its channel."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-SI", "-c", START, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={}, stdin=subprocess.DEVNULL)
        self.socket.settimeout(30)
        self.early: list[Message] = []  # exits that came while an answer was awaited

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        socket.send_fds(self.socket, [data], fds)

    def receive(self) -> tuple[Message, list[int]]:
        data, fds, flags, _ = socket.recv_fds(self.socket, 1 << 16, 4)
        assert data, "the spawner went away"
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        return marshal.loads(data), fds

    def answer(self, request: int) -> Message:
        """The answer to one request; what it brings is closed."""
        while True:
            message, fds = self.receive()
            for fd in fds:
                os.close(fd)
            if message.get("id") == request:
                return message
            self.early.append(message)

    def call(self, op: str, fields: Message, fds: Sequence[int] = ()) -> Message:
        request = next(_numbers)
        self.send(marshal.dumps({**fields, "id": request, "op": op}), fds)
        return self.answer(request)

    def ping(self) -> None:
        assert "ok" in self.call("ping", {})

    def exit_of(self, pid: object) -> Message:
        """The exit of a command. May be asked for once."""
        while True:
            for message in self.early:
                if message.get("exit") == pid:
                    self.early.remove(message)
                    return message
            message, fds = self.receive()
            assert not fds
            self.early.append(message)

    def holds(self) -> dict[int, str]:
        """Its descriptors by kind, once all its children are reaped."""
        for pid in procfs.children(self.pid):
            wait_gone(pid)
        while procfs.children(self.pid):
            self.ping()  # a round of its loop
        self.ping()
        return {number: target.decode().partition("[")[0].partition(":[")[0] for number, target in procfs.fds(self.pid).items()}

    def close(self) -> int:
        self.socket.close()
        return self.process.wait(30)


def placement(layers: Sequence[LayerRef]) -> Placement:
    return Placement(
        sandbox_id=SANDBOX,
        uid_base=UID_BASE,
        limits=Container(image="x", memory="64MiB", pids=32).check(),
        layers=tuple(layers),
        config=ImageConfig(),
        env={},
        user="root",
        workdir="/",
        hostname="raw",
    )


def create_fields(layers: Sequence[LayerRef]) -> Message:
    scratch = ScratchPlan(kind="tmpfs", ref=SANDBOX, size_bytes=1 << 24, inodes=1000)
    fields = plans.create_plan(placement(layers), edge_id="x", scratch=scratch, staging=str(STAGING))
    return {**fields, "group": f"{GROUP}/{SANDBOX}"}


def exec_fields(*argv: str, given: Sequence[bool] = (False, False, False), **changes: object) -> Message:
    plan = ExecPlan(process_id=f"proc_{next(_numbers)}", argv=argv, env={}, cwd="/", user="root")
    limits = Container(image="x", memory="64MiB", pids=32).check()
    fields = plans.exec_plan(plan, edge_id="x", sandbox_id=SANDBOX, limits=limits, given=list(given))
    return {**fields, "group": f"{GROUP}/{SANDBOX}", **changes}


def sandbox_group() -> cgroups.Group:
    return cgroups.discover().group(f"{GROUP}/{SANDBOX}")


@pytest.fixture(scope="module")
def raw(base_layers: tuple[LayerRef, ...]) -> Iterator[Raw]:
    """A spawner that is set up, with the profile and the layers of the test image."""
    raw = Raw()
    fd = os.open(NATIVE_INIT, os.O_RDONLY)
    assert "ok" in raw.call("setup", {}, [fd])
    os.close(fd)
    assert "ok" in raw.call("profile", {"name": plans.PROFILE_NAME, "program": profile.program()})
    for layer in base_layers:
        fields: Message = {"digest": layer.digest.encode(), "meta": bytes(layer.meta), "data": bytes(layer.data)}
        assert "ok" in raw.call("layer", fields)
    group = cgroups.discover().group(GROUP)
    group.create()
    yield raw
    assert raw.close() == 0
    group.remove()


@contextmanager
def living(raw: Raw, layers: Sequence[LayerRef]) -> Iterator[int]:
    """A sandbox; a pidfd of its PID 1."""
    answer = raw.call("create", create_fields(layers))
    assert "ok" in answer, answer
    pid = answer["pid"]
    assert isinstance(pid, int)
    pidfd = syscalls.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        sandbox_group().remove()
        os.close(pidfd)


@pytest.fixture
def sandbox(raw: Raw, base_layers: tuple[LayerRef, ...]) -> Iterator[int]:
    with living(raw, base_layers) as pidfd:
        yield pidfd


@pytest.fixture(autouse=True)
def unchanged(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the spawner serves, and has neither children nor descriptors that it had not before."""
    if "raw" not in request.fixturenames:
        yield
        return
    raw: Raw = request.getfixturevalue("raw")
    raw.early.clear()
    before = raw.holds()
    yield
    sandbox_group().remove()
    assert raw.holds() == before


# --- malformed messages --------------------------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    return b"[\x01\x00\x00\x00" * depth + b"N"


NOT_REQUESTS: dict[str, bytes] = {
    "text": b"hello",
    "a zero byte": b"\0",
    "a cut message": marshal.dumps({"id": 1, "op": "ping"})[:-3],
    "a reference to nothing": b"r\xff\xff\xff\x7f",
    "a length beyond the end": b"s\xff\xff\xff\x7f",
    "a negative length": b"s\xff\xff\xff\xff",
    "deep": nested(20_000),
    "a list": marshal.dumps([1, 2]),
    "a number": marshal.dumps(7),
    "nothing": marshal.dumps(None),
    "code": marshal.dumps(compile("1", "x", "eval")),
    "an empty dict": marshal.dumps({}),
    "no op": marshal.dumps({"id": 1}),
    "no id": marshal.dumps({"op": "ping"}),
    "id of another type": marshal.dumps({"id": "1", "op": "ping"}),
    "op of another type": marshal.dumps({"id": 1, "op": b"ping"}),
    "a memfd that is not there": marshal.dumps({"memfd": True}),
    "longer than a message may be": marshal.dumps({"id": 1, "op": "ping", "x": b"x" * (140 << 10)}),
}


@pytest.mark.parametrize("data", NOT_REQUESTS.values(), ids=NOT_REQUESTS.keys())
def test_what_is_no_request_is_refused(raw: Raw, data: bytes) -> None:
    raw.send(data)
    message = raw.answer(-1)
    assert isinstance(message["error"], tuple) and message["error"][0] == "plan"


REFUSED: dict[str, tuple[str, Message]] = {
    "unknown": ("nonsense", {}),
    "empty": ("", {}),
    "a method of the spawner": ("send", {}),
    "a private name": ("_exec", {}),
    "a dunder": ("__class__", {}),
    "with a dot": ("ping.__func__", {}),
    "longer than an answer may be": ("x" * 50_000, {}),
    "set up twice": ("setup", {}),
    "a profile without a name": ("profile", {"program": b""}),
    "a profile without a program": ("profile", {"name": b"x"}),
    "a profile of another type": ("profile", {"name": b"x", "program": "text"}),
    "a profile whose name cannot be a key": ("profile", {"name": [], "program": b"x" * 8}),
    "a layer without files": ("layer", {"digest": b"sha256:1"}),
    "a layer that is not there": ("layer", {"digest": b"sha256:1", "meta": b"/nonexistent", "data": b"/nonexistent"}),
    "a layer that is a directory": ("layer", {"digest": b"sha256:1", "meta": b"/tmp", "data": b"/tmp"}),
    "a layer that is no file system": ("layer", {"digest": b"sha256:1", "meta": b"/etc/hostname", "data": b"/etc/hostname"}),
    "a layer with a NUL": ("layer", {"digest": b"sha256:1", "meta": b"/tmp/a\0b", "data": b"/tmp"}),
    "a layer with a long name": ("layer", {"digest": b"sha256:1", "meta": b"/" + b"x" * 10_000, "data": b"/tmp"}),
    "a layer of another type": ("layer", {"digest": b"sha256:1", "meta": 7, "data": 8}),
    "a layer whose digest cannot be a key": ("layer", {"digest": {}, "meta": b"/tmp", "data": b"/tmp"}),
    "an unlayer without a digest": ("unlayer", {}),
    "an empty create": ("create", {}),
    "an empty exec": ("exec", {}),
}


@pytest.mark.parametrize(("op", "fields"), REFUSED.values(), ids=REFUSED.keys())
def test_a_malformed_request_is_refused(raw: Raw, op: str, fields: Message) -> None:
    answer = raw.call(op, fields)
    assert isinstance(answer["error"], tuple)
    step, code, text = answer["error"]
    assert step == "plan" and code > 0 and 0 < len(text) <= 800


WRONG: tuple[object, ...] = (None, -1, "text", b"bytes", [], {}, [None], 1 << 70)

# Fields whose wrong values may still say something that can be done: an empty mapping is an empty list, a text is a sequence of names that
# are not there, bytes are a sequence of numbers.
LENIENT = {"masked", "read_only", "rlimits", "limits", "pty", "given", "env", "capabilities"}


def mutations(fields: Message) -> Iterator[tuple[str, str, Message]]:
    """(field, what was done to it, plan): the plan without each field, and with each of another type."""
    for key in fields:
        yield key, "missing", {name: value for name, value in fields.items() if name != key}
        for value in WRONG:
            if not isinstance(value, type(fields[key])):
                yield key, f"{value!r}", {**fields, key: value}


@pytest.mark.slow
def test_a_create_with_one_wrong_field_makes_nothing(raw: Raw, base_layers: tuple[LayerRef, ...]) -> None:
    mounts = [mount.mount_id for mount in procfs.mountinfo()]
    for key, what, fields in mutations(create_fields(base_layers)):
        answer = raw.call("create", fields)
        group = sandbox_group()
        if "ok" in answer:
            assert key in LENIENT, what
        else:
            assert isinstance(answer["error"], tuple), (key, what)
            if group.exists():
                group.wait_empty()
        group.remove()
    assert [mount.mount_id for mount in procfs.mountinfo()] == mounts


@pytest.mark.slow
def test_an_exec_with_one_wrong_field_runs_nothing(raw: Raw, sandbox: int) -> None:
    original = exec_fields("true")
    for key, what, fields in mutations(original):
        if fields.get("child") == original["child"]:
            fields["child"] = f"proc_{next(_numbers)}"
        answer = raw.call("exec", fields, [sandbox])
        if "ok" in answer:
            assert key in LENIENT, what
            raw.exit_of(answer["pid"])
        else:
            assert isinstance(answer["error"], tuple), (key, what)


def test_mutated_plans(raw: Raw) -> None:
    """Bytes changed at random, in a plan that could not run if it were right: its sandbox is dead."""
    with dead_process() as pidfd:
        whole = marshal.dumps({**exec_fields("true"), "id": -1, "op": "exec"})
        dice = random.Random(5)
        for _ in range(60):
            data = bytearray(whole)
            for _ in range(dice.randint(1, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            raw.send(bytes(data), [pidfd])
            message, fds = raw.receive()
            assert "error" in message and not fds


def test_descriptors_too_many_and_too_few(raw: Raw, sandbox: int) -> None:
    assert "error" in raw.call("exec", exec_fields("true"))  # not even the sandbox's
    assert "error" in raw.call("exec", exec_fields("true", given=(True, True, True)), [sandbox])
    assert "error" in raw.call("exec", exec_fields("true"), [0])  # not a pidfd
    answer = raw.call("exec", exec_fields("true"), [sandbox] + [0] * 9)  # more than the plan speaks of
    assert "ok" in answer
    raw.exit_of(answer["pid"])
    raw.send(marshal.dumps({**exec_fields("true"), "id": 1, "op": "exec"}), [sandbox] + [0] * 40)
    assert "error" in raw.answer(-1)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def lying_files() -> Iterator[tuple[str, int, bool]]:
    """(what, a descriptor, whether the plan in it can be read)."""
    plan = marshal.dumps({"id": 5, "op": "ping"})
    larger = os.memfd_create("larger")
    write_all(larger, plan)
    os.ftruncate(larger, 1 << 20)
    yield "longer than its content", larger, True
    yield "empty", os.memfd_create("empty"), False
    huge = os.memfd_create("huge")
    os.ftruncate(huge, (64 << 20) + 1)
    yield "longer than a plan may be", huge, False
    zeros = os.memfd_create("zeros")
    os.ftruncate(zeros, 64 << 20)
    yield "nothing but zeros", zeros, False
    yield "content but no size", os.open(procfs.path_of("self", "status"), os.O_RDONLY), False
    yield "a directory", os.open("/", os.O_RDONLY), False
    reader, writer = os.pipe()
    os.close(writer)
    yield "a pipe", reader, False
    yield "write-only", os.open("/dev/null", os.O_WRONLY), False
    yield "no access", os.open("/", os.O_PATH), False


def test_a_memfd_that_lies(raw: Raw) -> None:
    for what, fd, readable in lying_files():
        raw.send(marshal.dumps({"memfd": True}), [fd])
        os.close(fd)
        if readable:
            assert "ok" in raw.answer(5), what
        else:
            assert "error" in raw.answer(-1), what


def test_a_plan_of_a_mebibyte(raw: Raw, sandbox: int) -> None:
    env = {b"V%d" % n: b"x" * 100_000 for n in range(10)} | {b"PATH": b"/usr/bin:/bin"}
    reader, writer = os.pipe()
    plan = sealed_memfd("plan", marshal.dumps({**exec_fields("env", given=(False, True, False), env=env), "id": 9, "op": "exec"}))
    raw.send(marshal.dumps({"memfd": True}), [plan, sandbox, writer])
    for fd in (plan, writer):
        os.close(fd)
    with open(reader, "rb") as stream:
        printed = stream.read()
    answer = raw.answer(9)
    raw.exit_of(answer["pid"])
    assert all(b"%s=%s\n" % item in printed for item in env.items())


# --- what cannot be done -------------------------------------------------------------------------------------------


@contextmanager
def dead_process() -> Iterator[int]:
    """A pidfd of a process that has ended and was reaped."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pidfd = syscalls.pidfd_open(pid)
    os.waitpid(pid, 0)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def test_exec_into_a_dead_sandbox(raw: Raw, sandbox: int) -> None:
    """Its cgroup is still there, its first process is not."""
    syscalls.pidfd_send_signal(sandbox, signal.SIGKILL)
    poll = select.poll()
    poll.register(sandbox, select.POLLIN)
    assert poll.poll(10_000)
    raw.ping()
    answer = raw.call("exec", exec_fields("true"), [sandbox])
    assert isinstance(answer["error"], tuple)
    assert answer["error"][:2] == ("plan", errno.ESRCH)
    assert sandbox_group().children() == []


def test_exec_into_a_cleared_sandbox(raw: Raw) -> None:
    """Neither is there. It must not make the cgroup anew."""
    with dead_process() as pidfd:
        answer = raw.call("exec", exec_fields("true"), [pidfd])
    assert isinstance(answer["error"], tuple)
    assert answer["error"][:2] == ("plan", errno.ENOENT)
    assert not sandbox_group().exists()


HALF_WAY: dict[str, tuple[Callable[[Message], Message], str]] = {
    # the plan's change → the step that must fail
    "a layer nobody mounted": (lambda plan: {**plan, "layers": [b"sha256:none"]}, "plan"),
    "no layers": (lambda plan: {**plan, "layers": []}, "plan"),
    "no such profile": (lambda plan: {**plan, "profile": b"none"}, "plan"),
    "an id that cannot be": (lambda plan: {**plan, "uid_base": 0xFFFF_FFFF}, "plan"),
    "a limit that cannot be": (lambda plan: {**plan, "limits": {"memory_bytes": 1 << 70}}, "plan"),
    "a limit nobody knows": (lambda plan: {**plan, "limits": {"luck": 1}}, "plan"),
    "no such scratch": (lambda plan: {**plan, "scratch": ["dir", b"/nonexistent/upper", b"/nonexistent/work"]}, "plan"),
    "no room for scratch": (lambda plan: {**plan, "scratch": ["tmpfs", 1 << 20, 2]}, "plan"),
    "no such staging directory": (lambda plan: {**plan, "staging": b"/nonexistent"}, "find the staging directory"),
    "a staging file": (lambda plan: {**plan, "staging": b"/etc/hostname"}, "find the staging directory"),
    "a long host name": (lambda plan: {**plan, "hostname": b"x" * 65}, "network"),
    "a shm without a size": (lambda plan: {**plan, "shm_size": 0}, "mount in /dev"),
    "a limit above ours": (lambda plan: {**plan, "rlimits": [(7, 1 << 40, 1 << 40)]}, "restrict"),
    "a limit that is none": (lambda plan: {**plan, "rlimits": [(999, 1, 1)]}, "restrict"),
}


@pytest.mark.parametrize(("change", "step"), HALF_WAY.values(), ids=HALF_WAY.keys())
def test_a_create_that_fails_half_way_leaves_nothing(
    raw: Raw, base_layers: tuple[LayerRef, ...], change: Callable[[Message], Message], step: str
) -> None:
    mounts = [mount.mount_id for mount in procfs.mountinfo()]
    answer = raw.call("create", change(create_fields(base_layers)))
    assert isinstance(answer["error"], tuple), answer
    assert answer["error"][0] == step, answer
    group = sandbox_group()
    if group.exists():
        group.wait_empty()
    group.remove_if_empty()
    assert not group.exists()
    assert [mount.mount_id for mount in procfs.mountinfo()] == mounts


@pytest.mark.parametrize("program", [b"", b"1234567", b"\xff" * 8, b"\x06\0\0\0\0\0\0\x7f" * 5000], ids=["empty", "odd", "garbage", "long"])
def test_a_filter_the_kernel_refuses(raw: Raw, base_layers: tuple[LayerRef, ...], program: bytes) -> None:
    assert "ok" in raw.call("profile", {"name": b"bad", "program": program})
    answer = raw.call("create", {**create_fields(base_layers), "profile": b"bad"})
    sandbox_group().remove()
    assert isinstance(answer["error"], tuple)
    assert answer["error"][:2] == ("restrict", errno.EINVAL)


def test_a_group_that_is_there_stays_untouched(raw: Raw, sandbox: int, base_layers: tuple[LayerRef, ...]) -> None:
    answer = raw.call("create", create_fields(base_layers))
    assert isinstance(answer["error"], tuple)
    assert answer["error"][:2] == ("plan", errno.EEXIST)
    syscalls.pidfd_send_signal(sandbox, 0)
    assert len(sandbox_group().procs()) == 1


LONG = "x" * 100_000
NOT_STARTED: dict[str, tuple[Message, str, int]] = {
    # changes → step and errno
    "a long program": ({"argv": [b"/" + LONG.encode()]}, "exec", errno.ENAMETOOLONG),
    "a long program to be looked for": ({"argv": [LONG.encode()]}, "exec", errno.ENAMETOOLONG),
    "a program that is not there": ({"argv": [b"nosuch"]}, "exec", errno.ENOENT),
    "a file that is no program": ({"argv": [b"/etc/passwd"]}, "exec", errno.EACCES),
    "a directory": ({"argv": [b"/etc"]}, "exec", errno.EACCES),
    "an argument with a NUL": ({"argv": [b"true", b"a\0b"]}, "exec", 0),
    "an argument too long for the kernel": ({"argv": [b"true", b"x" * (129 << 10)]}, "exec", errno.E2BIG),
    "a name with an equals sign": ({"env": {b"A=B": b"C"}}, "exec", 0),
    "a directory that is not there": ({"cwd": b"/nosuch"}, "change to the working directory", errno.ENOENT),
    "a long directory": ({"cwd": b"/" + b"\xff" * 4000}, "change to the working directory", errno.ENAMETOOLONG),
    "a file as directory": ({"cwd": b"/etc/passwd"}, "change to the working directory", errno.ENOTDIR),
    "a user that is not there": ({"user": b"nosuch"}, "find the user", errno.ENOENT),
    "a long user": ({"user": LONG.encode()}, "find the user", errno.ENOENT),
    "a group that is not there": ({"user": b"root:nosuch"}, "find the user", errno.ENOENT),
    "a user of no number": ({"user": b"99999"}, "find the user", errno.ENOENT),
    "a terminal of no size": ({"pty": (1 << 20, 1)}, "descriptors", 0),
}


@pytest.mark.parametrize(("changes", "step", "code"), NOT_STARTED.values(), ids=NOT_STARTED.keys())
def test_a_command_that_cannot_start(raw: Raw, sandbox: int, changes: Message, step: str, code: int) -> None:
    fields = {**exec_fields("true"), **changes, "op": "exec", "id": 11}
    plan = sealed_memfd("plan", marshal.dumps(fields))
    raw.send(marshal.dumps({"memfd": True}), [plan, sandbox])
    os.close(plan)
    answer = raw.answer(11)
    assert isinstance(answer["error"], tuple), answer
    assert answer["error"][:2] == (step, code)
    assert 0 < len(answer["error"][2]) <= 800
    assert "b'" not in answer["error"][2]  # it is for people
    raw.ping()
    assert raw.early == []  # no exit of what never started


# --- killed on the way ---------------------------------------------------------------------------------------------


def test_a_command_killed_before_its_start_is_reported(raw: Raw, sandbox: int) -> None:
    """Born into a frozen cgroup it cannot take a step."""
    group = sandbox_group()
    group.freeze()
    fields = exec_fields("true")
    raw.send(marshal.dumps({**fields, "id": 21, "op": "exec"}), [sandbox])
    raw.ping()  # which also shows that a frozen sandbox does not hold up the rest
    child = group.child(str(fields["child"]))
    assert len(child.procs()) == 1
    child.kill()
    answer = raw.answer(21)
    assert answer["error"] == ("start", 0, "killed before it could start")
    group.thaw()
    raw.ping()
    assert raw.early == []


def test_a_sandbox_killed_before_its_start_is_reported(raw: Raw, base_layers: tuple[LayerRef, ...]) -> None:
    above = cgroups.discover().group(GROUP)
    above.freeze()
    try:
        raw.send(marshal.dumps({**create_fields(base_layers), "id": 22, "op": "create"}))
        raw.ping()
        assert len(sandbox_group().procs()) == 1
        sandbox_group().kill()
        assert raw.answer(22)["error"] == ("start", 0, "killed before it could start")
    finally:
        above.thaw()
        sandbox_group().remove()


@pytest.mark.parametrize("number", [signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP])
def test_a_signal_on_the_way_forges_nothing(raw: Raw, sandbox: int, number: int) -> None:
    """Root inside may signal a command from the moment that it has joined, before it is executed."""
    group = sandbox_group()
    reader, writer = os.pipe()
    group.freeze()
    fields = exec_fields("echo", "hello", given=(False, True, True))
    raw.send(marshal.dumps({**fields, "id": 23, "op": "exec"}), [sandbox, writer, writer])
    os.close(writer)
    raw.ping()
    (pid,) = group.child(str(fields["child"])).procs()
    for _ in range(3):
        with suppress(ProcessLookupError):  # a deadly one works on the frozen, too
            os.kill(pid, number)
    group.thaw()
    answer = raw.answer(23)
    with open(reader, "rb") as stream:
        printed = stream.read()
    if "ok" in answer:
        assert number in (signal.SIGCHLD, signal.SIGPIPE)  # those that a fresh process ignores, or Python did
        assert printed == b"hello\n"
        assert raw.exit_of(answer["pid"])["status"] == 0
    else:
        assert answer["error"] == ("start", 0, "killed before it could start")
        assert printed == b""
    raw.ping()
    assert raw.early == []


# --- many ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_exit_comes_once_and_after_its_start(raw: Raw, sandbox: int) -> None:
    count = 200
    for number in range(count):
        fields = exec_fields("/bin/true") if number % 3 else exec_fields("/nosuch")
        raw.send(marshal.dumps({**fields, "id": 1_000_000 + number, "op": "exec"}), [sandbox])
    started: set[object] = set()
    ended: list[object] = []
    answered = 0
    while answered < count or len(ended) < len(started):
        message, fds = raw.receive()
        for fd in fds:
            os.close(fd)
        if "exit" in message:
            assert message["exit"] in started, "an exit before its start"
            assert message["status"] == 0
            ended.append(message["exit"])
        else:
            answered += 1
            if "ok" in message:
                started.add(message["pid"])
    assert answered == count
    assert sorted(map(str, ended)) == sorted(map(str, started))
    assert len(started) == count - len(range(0, count, 3))


def test_exit_says_how(raw: Raw, sandbox: int) -> None:
    def status_of(text: str) -> tuple[int, Message]:
        answer = raw.call("exec", exec_fields("sh", "-c", text), [sandbox])
        message = raw.exit_of(answer["pid"])
        assert isinstance(message["status"], int)
        return os.waitstatus_to_exitcode(message["status"]), message

    assert status_of("exit 7")[0] == 7
    assert status_of("kill -KILL $$")[0] == -signal.SIGKILL
    _, message = status_of("i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done")
    assert isinstance(message["cpu_us"], int) and message["cpu_us"] > 1000
    assert isinstance(message["max_rss_kib"], int) and message["max_rss_kib"] > 100


# --- its own life --------------------------------------------------------------------------------------------------


def test_it_ends_with_the_edge() -> None:
    raw = Raw()
    raw.ping()
    assert raw.close() == 0


def test_it_makes_nothing_for_an_edge_that_is_gone(base_layers: tuple[LayerRef, ...]) -> None:
    """Requests of a dead edge that wait in the channel are not carried out: its successor may be taking stock."""
    raw = Raw()
    raw.ping()
    os.kill(raw.pid, signal.SIGSTOP)
    raw.send(marshal.dumps({"id": 1, "op": "layer", "digest": b"x", "meta": b"/nonexistent", "data": b""}))
    raw.socket.close()
    os.kill(raw.pid, signal.SIGCONT)
    assert raw.process.wait(30) == 0


def test_it_ignores_ctrl_c() -> None:
    raw = Raw()
    raw.ping()
    os.kill(raw.pid, signal.SIGINT)
    raw.ping()
    assert raw.close() == 0


def test_what_it_shows_of_itself() -> None:
    """A command is the spawner's image until it is executed, and may be looked at from inside meanwhile."""
    raw = Raw()
    raw.ping()
    assert procfs.cmdline(raw.pid) == [b"dsec-spawner"]
    assert procfs.environ(raw.pid) == []
    assert os.stat(procfs.path_of(raw.pid, "ns", "net")).st_ino != os.stat(procfs.path_of("self", "ns", "net")).st_ino
    assert procfs.status(raw.pid)["Threads"] == "1"
    assert raw.close() == 0


def test_it_takes_all_the_descriptors_it_may_have() -> None:
    """Two a child under way; the usual soft limit of 1,024 would be met by a burst."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(procfs.fds()) + 16, hard))
    try:
        raw = Raw()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raw.ping()
    assert procfs.limits(raw.pid)["Max open files"] == (hard, hard)
    assert raw.close() == 0


def test_the_program_of_process_1_is_a_copy_that_nobody_reads(raw: Raw, sandbox: int) -> None:
    (pid,) = sandbox_group().procs()
    program = procfs.path_of(pid, "exe")
    assert Path(program).read_bytes() == NATIVE_INIT.read_bytes()  # we may: the host's root passes any mode
    stats = os.stat(program)
    assert (stats.st_mode & 0o7777, stats.st_uid) == (0o111, 0)
    assert (stats.st_dev, stats.st_ino) != (os.stat(NATIVE_INIT).st_dev, os.stat(NATIVE_INIT).st_ino)
    with pytest.raises(OSError, match=r"Read-only file system|Text file busy"):
        os.open(program, os.O_WRONLY)
