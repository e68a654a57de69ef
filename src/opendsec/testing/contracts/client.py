# SPDX-License-Identifier: Apache-2.0
"""The contract of the SDK with an edge behind it: named checks over a factory of clients.

    @pytest.mark.parametrize("name", client.CHECKS)
    async def test_contract(name):
        await client.CHECKS[name](client.Setup(make=lambda: Client(address), image="debian"))

Every edge passes them, and every transport. Each check makes the sandboxes it needs and ends them. They need of an image: /bin/sh, bash,
and the usual small programs (cat, printf, sleep, kill, stty). Commands work in `WORK`, so that an edge that does not isolate can
take part.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from opendsec.api.errors import CommandFailed, Conflict, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded
from opendsec.api.images import DirectorySource, ImageInfo, LayerInfo
from opendsec.api.sandboxes import Event
from opendsec.api.spec import AnySpec, Container, MicroVM
from opendsec.api.units import parse_bytes
from opendsec.client._core import new_action_id
from opendsec.client.aio import Client, Sandbox
from opendsec.client.results import StreamEvent

WORK = "/work"
TIMEOUT_S = 60.0
INODES = 4096


@dataclass(frozen=True)
class Setup:
    """What a check works on."""

    make: Callable[[], Client]
    image: str
    memory: str = "64MiB"
    disk: str = "64MiB"
    too_much_memory: str = "1TiB"  # more than this edge may promise
    kind: type[Container] | type[MicroVM] = Container

    def spec(self, **labels: str) -> AnySpec:
        return self.kind(image=self.image, memory=self.memory, disk=self.disk, inodes=INODES, cpu=0.5, labels=labels)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with self.make() as client, asyncio.timeout(TIMEOUT_S):
            yield client

    @asynccontextmanager
    async def box(self) -> AsyncIterator[Sandbox]:
        async with self.client() as client, await client.create(self.spec()) as box:
            await box.files.mkdir(WORK, parents=True)
            yield box


Check = Callable[[Setup], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def joined(events: list[StreamEvent], stream: str = "stdout") -> str:
    return "".join(event.text for event in events if event.stream == stream)


# --- edge and sandboxes


@check
async def tells_about_the_edge(setup: Setup) -> None:
    async with setup.client() as client:
        info = await client.info()
        assert info.api >= 1 and info.state == "ready"
        capabilities = await client.capabilities()
        assert all(capability.available or capability.reason for some in capabilities.backends.values() for capability in some)


@check
async def creates_lists_and_kills(setup: Setup) -> None:
    async with setup.client() as client:
        box = await client.create(setup.spec(purpose="contract"))
        assert box.info is not None and box.info.state == "running" and box.info.labels == {"purpose": "contract"}
        assert box.info.limits.memory_bytes == parse_bytes(setup.memory, field="memory")
        assert box.id in [one.id for one in await client.list(labels={"purpose": "contract"})]
        assert box.id not in [one.id for one in await client.list(labels={"purpose": "other"})]
        again = await client.get(box.id)
        assert (await again.run("true")).ok
        assert (await box.usage()).memory_bytes > 0
        await box.kill()
        await box.kill()  # may be repeated
        assert box.id not in [one.id for one in await client.list()]
        assert box.id not in [one.id for one in await client.list(state="running")]
        assert "stopped" in [one.info.state for one in await client.list(state="all") if one.info is not None and one.id == box.id]
        try:
            await box.run("true")
        except OpenDSecError as error:
            assert error.status in (404, 409, 410), error
        else:
            raise AssertionError("a killed sandbox ran a command")


@check
async def creates_many_with_a_result_a_slot(setup: Setup) -> None:
    async with setup.client() as client:
        slots = await client.create_many(setup.spec(), 3)
        boxes = [slot for slot in slots if isinstance(slot, Sandbox)]
        assert len({box.id for box in boxes}) == 3
        await asyncio.gather(*(box.kill() for box in boxes))


@check
async def refuses_more_than_may_be_promised(setup: Setup) -> None:
    async with setup.client() as client:
        spec = setup.kind(image=setup.image, memory=setup.too_much_memory)
        try:
            await client.create(spec)
        except QuotaExceeded:
            pass
        else:
            raise AssertionError("promised more memory than there may be")


@check
async def repeats_a_create_only_once(setup: Setup) -> None:
    async with setup.client() as client:
        action_id = f"contract/{new_action_id()}"
        first = await client.create(setup.spec(), action_id=action_id)
        second = await client.create(setup.spec(), action_id=action_id)
        assert first.id == second.id
        await first.kill()


@check
async def reports_events(setup: Setup) -> None:
    async with setup.client() as client, await client.create(setup.spec()) as box:
        kinds = [event.kind async for event in client.events(sandbox_id=box.id)]
        assert "sandbox.created" in kinds, kinds
        last = [event.seq async for event in client.events()][-1]

        async def following() -> Event:
            async for event in client.events(after=last, sandbox_id=box.id, follow=True):
                return event
            raise AssertionError("the stream of events ended")

        waiting = asyncio.ensure_future(following())
        await box.kill()
        event = await waiting
        assert event.seq > last


# --- commands


@check
async def runs_a_command(setup: Setup) -> None:
    async with setup.box() as box:
        result = await box.run("echo out; echo err >&2; exit 3")
        assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("exited", 3, "out\n", "err\n")
        assert not result.ok and not result.truncated and result.duration_ms > 0 and result.action_id
        try:
            result.check()
        except CommandFailed as error:
            assert error.data["exit_code"] == 3
        else:
            raise AssertionError("check() let a failure pass")
        assert (await box.run(["printf", "%s|", "a b", "$HOME", "*"])).stdout == "a b|$HOME|*|"


@check
async def passes_what_a_command_is_given(setup: Setup) -> None:
    async with setup.box() as box:
        result = await box.run('pwd; printf "%s\\n" "$ODD"; cat', cwd=WORK, env={"ODD": "$(id) `x`\n;é"}, stdin="é\n")
        assert result.stdout.splitlines()[0].endswith(WORK)
        assert result.stdout.endswith("$(id) `x`\n;é\né\n"), result.stdout
        assert (await box.run(["cat"], stdin=b"\x00\xff\xfe")).stdout_bytes == b"\x00\xff\xfe"
        assert (await box.run("cat; echo closed")).stdout == "closed\n"


@check
async def says_how_a_command_ended(setup: Setup) -> None:
    async with setup.box() as box:
        killed = await box.run("kill -15 $$")
        assert (killed.outcome, killed.signal, killed.shell_code()) == ("signalled", 15, 143)
        late = await box.run("(trap '' TERM; sleep 600) & sleep 600", timeout_s=0.3)
        assert late.outcome == "timed_out" and "time" in late.limits_hit and late.duration_ms < 10_000
        absent = await box.run(["no-such-program"])
        assert absent.outcome == "not_started" and absent.message and absent.exit_code is None
        assert (await box.run("true", cwd="/no/such/directory")).outcome == "not_started"
        flood = await box.run("while :; do echo 0123456789; done", output_limit_bytes=100_000)
        assert flood.outcome == "output_limit" and "output" in flood.limits_hit


@check
async def keeps_head_and_tail(setup: Setup) -> None:
    async with setup.box() as box:
        result = await box.run(
            "printf héad; i=0; while [ $i -lt 2000 ]; do printf '\\303\\251'; i=$((i+1)); done; printf tail", capture_bytes=101
        )
        assert result.truncated and result.stdout_total_bytes == 5 + 4000 + 4
        assert result.stdout.startswith("héad") and result.stdout.endswith("tail") and "\ufffd" not in result.stdout
        assert "omitted" in result.stdout


@check
async def does_not_wait_for_a_child_that_holds_the_pipe(setup: Setup) -> None:
    async with setup.box() as box:
        result = await box.run("echo now; sleep 600 &")
        assert result.ok and result.stdout == "now\n" and result.duration_ms < 10_000


@check
async def runs_many_commands_at_once(setup: Setup) -> None:
    async with setup.box() as box:
        results = await asyncio.gather(*(box.run(f"echo {number}") for number in range(20)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(20)]


@check
async def repeats_an_action_only_once(setup: Setup) -> None:
    action_id = f"contract/{new_action_id()}"  # an edge knows them across all its sandboxes
    async with setup.box() as box:
        first = await box.run("echo x >> once; cat once", cwd=WORK, action_id=action_id)
        second = await box.run("echo x >> once; cat once", cwd=WORK, action_id=action_id)
        assert first.stdout == second.stdout == "x\n" and first.process_id == second.process_id
        try:
            await box.run("something else", action_id=action_id)
        except Conflict:
            pass
        else:
            raise AssertionError("one action id served two requests")


async def refused(asking: Awaitable[object]) -> None:
    """An action id that was used for another request."""
    try:
        await asking
    except Conflict as error:
        assert error.field == "action_id", error
    else:
        raise AssertionError("one action id served two requests")


@check
async def repeats_every_change_only_once(setup: Setup) -> None:
    base = f"contract/{new_action_id()}"
    async with setup.box() as box, setup.client() as client:
        files, path = box.files, f"{WORK}/a"
        made = await files.mkdir(f"{WORK}/d", action_id=f"{base}/mkdir")
        assert await files.mkdir(f"{WORK}/d", action_id=f"{base}/mkdir") == made
        await refused(files.mkdir(f"{WORK}/e", action_id=f"{base}/mkdir"))
        await refused(files.remove(f"{WORK}/d", action_id=f"{base}/mkdir"))
        for _ in range(2):
            await files.append(path, "line\n", action_id=f"{base}/append")
        for _ in range(2):
            assert (await files.move(path, f"{WORK}/b", action_id=f"{base}/move")).name == "b"
        await files.chmod(f"{WORK}/b", 0o600, action_id=f"{base}/chmod")
        await files.chmod(f"{WORK}/b", 0o644)
        await files.chmod(f"{WORK}/b", 0o600, action_id=f"{base}/chmod")
        assert (await files.stat(f"{WORK}/b")).mode == 0o644
        await files.remove(f"{WORK}/b", action_id=f"{base}/remove")
        await files.write(f"{WORK}/b", "another")
        await files.remove(f"{WORK}/b", action_id=f"{base}/remove")
        assert await files.read(f"{WORK}/b") == "another"
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "c").write_text("first")
            assert await files.upload(folder, f"{WORK}/tree", action_id=f"{base}/upload") == 5
            await files.write(f"{WORK}/tree/c", "second")
            assert await files.upload(folder, f"{WORK}/tree", action_id=f"{base}/upload") == 5
        assert await files.read(f"{WORK}/tree/c") == "second"

        process = await box.start("cat", stdin_stream=True)
        for _ in range(2):
            await process.write("line\n", action_id=f"{base}/input")
        await refused(process.write("other\n", action_id=f"{base}/input"))
        for _ in range(2):
            await process.close_stdin(action_id=f"{base}/end")
        assert (await process.wait()).stdout == "line\n"
        sleeper = await box.start("sleep 600")
        for _ in range(2):
            await sleeper.kill(action_id=f"{base}/kill")
        await refused(sleeper.signal(15, action_id=f"{base}/kill"))
        session = await box.session()
        for _ in range(2):
            await session.close(action_id=f"{base}/close")

        for _ in range(2):
            await client.images.compose("contract-once", setup.image, [], action_id=f"{base}/compose")
        for _ in range(2):
            await client.images.remove("contract-once", action_id=f"{base}/forget")
        await refused(client.images.remove(setup.image, action_id=f"{base}/forget"))
        for _ in range(2):
            assert (await client.images.gc(dry_run=True, action_id=f"{base}/gc")).dry_run


@check
async def streams_output_as_it_comes(setup: Setup) -> None:
    async with setup.box() as box:
        events = []
        async for event in box.stream(
            "printf 'caf\\303'; : > half; while [ ! -e go ]; do sleep 0.01; done; printf '\\251\\n'; exit 7", cwd=WORK
        ):
            events.append(event)
            if event.data.startswith(b"caf"):  # it runs still: output comes while it does
                await box.files.write(f"{WORK}/go", "")
        assert events[0].kind == "started" and events[-1].kind == "exit"
        assert joined(events) == "café\n" and all("\ufffd" not in event.text for event in events)
        assert b"".join(event.data for event in events) == "café\n".encode()
        result = events[-1].result
        assert result is not None and result.exit_code == 7
        # who follows from the start gets all of it, also if nothing is to be kept
        events = [event async for event in box.stream("seq 1 2000", capture_bytes=0)]
        assert joined(events) == "".join(f"{number}\n" for number in range(1, 2001))
        assert [event for event in events if event.kind == "gap"] == []


@check
async def background_processes_are_found_again(setup: Setup) -> None:
    async with setup.box() as box, setup.client() as other:
        process = await box.start("echo begun; cat; echo over", stdin_stream=True)
        again = (await other.get(box.id)).process(process.id)
        assert (await again.info()).state == "running"
        assert process.id in [one.id for one in await box.processes()]
        await again.write("line\n")
        await again.close_stdin()
        assert (await process.wait()).stdout == "begun\nline\nover\n"
        events = [event async for event in again.attach(stdout_offset=6)]
        assert joined(events) == "line\nover\n"
        assert (await again.info()).state == "ended"


@check
async def signals_and_kills_a_process(setup: Setup) -> None:
    async with setup.box() as box:
        process = await box.start("trap 'echo got; exit 0' USR1; echo ready; while :; do sleep 0.05; done")
        async for event in process.attach():
            if "ready" in event.text:
                await process.signal(10)
        assert (await process.wait()).stdout == "ready\ngot\n"
        sleeper = await box.start("sleep 600")
        try:
            await sleeper.wait(timeout_s=0.05)
        except TimeoutError:
            pass
        else:
            raise AssertionError("a sleeping process ended")
        await sleeper.kill()
        assert (await sleeper.wait()).outcome in ("killed", "signalled")


@check
async def gives_a_terminal(setup: Setup) -> None:
    async with setup.box() as box:
        process = await box.start("tty >/dev/null && stty size; read line; stty size; echo $line", pty=True, stdin_stream=True)
        text = ""
        async for event in process.attach():
            text += event.text
            if text.endswith("24 80\r\n"):
                await process.resize(40, 100)
                await process.write("typed\n")
        assert "40 100" in text and text.count("typed") == 2, text  # echoed, then printed


@check
async def sessions_keep_their_state(setup: Setup) -> None:
    async with setup.box() as box:
        async with await box.session(cwd=WORK, env={"GIVEN": "1"}) as session:
            assert (await session.run("mkdir -p sub && cd sub && X=5 && f() { echo f:$X:$GIVEN; }")).ok
            result = await session.run("f; pwd; echo err >&2; false")
            assert result.exit_code == 1 and result.stderr == "err\n"
            assert result.stdout.startswith("f:5:1\n") and result.stdout.rstrip().endswith(f"{WORK}/sub")
            assert (await session.run("cat <<END\nheredoc\nEND")).stdout == "heredoc\n"
            assert (await session.run("cat")).ok  # a program that reads its input does not eat the next command
            assert (await session.run("echo still here")).stdout == "still here\n"
        try:
            await session.run("true")
        except (Conflict, NotFound):
            pass
        else:
            raise AssertionError("a closed session ran a command")


# --- files


@check
async def reads_and_writes_files(setup: Setup) -> None:
    async with setup.box() as box:
        files, path = box.files, f"{WORK}/deep/a.txt"
        assert await files.write(path, "héllo\n", parents=True, mode=0o640) == 7
        assert await files.read(path) == "héllo\n"
        assert await files.append(path, b"more\n") == 12
        assert await files.read_bytes(path, offset=7, length=4) == b"more"
        info = await files.stat(path)
        assert (info.kind, info.size_bytes, info.mode) == ("file", 12, 0o640)
        assert (await box.run("cat deep/a.txt", cwd=WORK)).stdout == "héllo\nmore\n"
        await files.chmod(path, 0o600)
        assert (await files.stat(path)).mode == 0o600
        await files.move(path, f"{WORK}/b.txt")
        assert not await files.exists(path) and await files.exists(f"{WORK}/b.txt")
        await files.remove(f"{WORK}/b.txt")
        assert [entry.name for entry in await files.list(WORK)] == ["deep"]
        await files.write(f"{WORK}/deep/x", b"")
        try:
            await files.remove(f"{WORK}/deep")
        except Conflict:
            await files.remove(f"{WORK}/deep", recursive=True)
        assert not await files.exists(f"{WORK}/deep")


@check
async def names_need_not_be_text(setup: Setup) -> None:
    async with setup.box() as box:
        raw = WORK.encode() + b"/caf\xe9 \n%?&#+"
        await box.files.write(raw, b"1")
        assert await box.files.read_bytes(raw) == b"1"
        assert raw.rsplit(b"/", 1)[1] in [entry.raw_name for entry in await box.files.list(WORK)]
        await box.files.remove(raw)
        assert not await box.files.exists(raw)


@check
async def streams_large_files(setup: Setup) -> None:
    async with setup.box() as box:
        block = bytes(range(256)) * 4096  # 1 MiB

        async def blocks() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield block

        path = f"{WORK}/large"
        assert await box.files.write(path, blocks()) == 8 << 20
        size = 0
        async for chunk in box.files.chunks(path):
            assert len(chunk) <= 1 << 20
            size += len(chunk)
        assert size == 8 << 20
        assert await box.files.read_bytes(path, offset=(8 << 20) - 256) == block[-256:]


@check
async def copies_trees_both_ways(setup: Setup) -> None:
    async with setup.box() as box:
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "source"), Path(folder, "target")
            (source / "sub" / "empty").mkdir(parents=True)
            (source / "sub" / "run.sh").write_bytes(b"#!/bin/sh\necho ran\n")
            (source / "sub" / "run.sh").chmod(0o755)
            (source / "link").symlink_to("sub/run.sh")
            (source / "data").write_bytes(b"\0" * 300_000)
            sent: list[int] = []
            assert await box.files.upload(source, f"{WORK}/tree", progress=sent.append) == 300_000 + 19
            assert sent[-1] > 300_000
            assert (await box.run("./tree/link", cwd=WORK)).stdout == "ran\n"
            assert await box.files.download(f"{WORK}/tree", target) == 300_000 + 19
            assert (target / "sub" / "empty").is_dir() and (target / "link").readlink() == Path("sub/run.sh")
            assert (target / "sub" / "run.sh").stat().st_mode & 0o777 == 0o755
            assert (target / "data").read_bytes() == b"\0" * 300_000
            assert await box.files.upload(source / "sub" / "run.sh", f"{WORK}/one/run.sh") == 19
            assert (await box.files.stat(f"{WORK}/one/run.sh")).mode == 0o755
            assert await box.files.download(f"{WORK}/one/run.sh", Path(folder, "run.sh")) == 19


@check
async def watches_a_directory(setup: Setup) -> None:
    async with setup.box() as box:
        async for event in box.files.watch(WORK):
            if event.kind == "ready":
                await box.files.write(f"{WORK}/seen", "x")
            elif event.raw_name == b"seen":
                break
        else:
            raise AssertionError("the watch ended")


# --- images


@check
async def builds_and_removes_layers(setup: Setup) -> None:
    async with setup.client() as client:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "tool").write_text("a tool\n")
            steps: list[str] = []
            source = DirectorySource(path=folder, prefix="/opt/contract")
            layer = await client.images.build(
                "contract", source, kind="toolkit", version="1", progress=lambda event: steps.append(event.kind)
            )
        assert isinstance(layer, LayerInfo) and "toolkit:contract@1" in layer.names and steps[-1] == "done"
        image = await client.images.compose("contract-image", setup.image, ["toolkit:contract@1"])
        assert isinstance(image, ImageInfo) and image.layers[-1] == layer.digest
        listed = await client.images.list()
        assert "contract-image" in [one.name for one in listed.images] and layer.digest in [one.digest for one in listed.layers]
        await client.images.remove("contract-image")
        assert "contract-image" not in [one.name for one in (await client.images.list()).images]
        assert (await client.images.gc(dry_run=True)).dry_run
        try:
            await client.images.compose("contract-image", "no-such-image", [])
        except NotFound:
            pass
        else:
            raise AssertionError("an image was made of nothing")


@check
async def a_broken_input_leaves_nothing(setup: Setup) -> None:
    """An upload whose source fails half-way is an error here, and no file there."""
    async with setup.box() as box:

        async def breaks() -> AsyncIterator[bytes]:
            yield b"x" * 100_000
            raise InvalidRequest("the source broke")

        try:
            await box.files.write(f"{WORK}/broken", breaks())
        except InvalidRequest as error:
            assert error.message == "the source broke"
        else:
            raise AssertionError("a broken source was accepted")
        assert (await box.run("true")).ok  # the client is as good as before
        assert not await box.files.exists(f"{WORK}/broken")
