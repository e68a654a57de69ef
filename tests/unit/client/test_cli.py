# SPDX-License-Identifier: Apache-2.0
"""The command line over the fake edge: what it prints, and the exit codes it passes on."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from opendsec.api.images import BuildEvent
from opendsec.client import aio
from opendsec.client.cli import main, progress
from opendsec.client.results import StreamEvent
from opendsec.testing.fakes.edge import FakeEdge
from tests.unit.client.conftest import Dsec


def test_run_passes_on_output_and_exit_code(dsec: Dsec, edge: FakeEdge) -> None:
    assert dsec("run", "debian", "echo out; echo err >&2; exit 7") == (7, "out\n", "err\n")
    assert dsec("run", "-e", "A=x y", "debian", "printf", "%s|", "a b", "--json") == (0, "a b|--json|", "")
    assert edge.boxes == {}  # ended with the command


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("run", "debian", "kill -15 $$"), 143, ""),
        (("run", "--timeout", "0.1", "debian", "sleep", "60"), 124, "ran out of time"),
        (("run", "debian", "no-such-program", "x"), 127, "could not start"),
        (("run", "-w", "/no/such", "debian", "true"), 127, "could not start"),
        (("run", "no-such-image", "true"), 125, "no image 'no-such-image'"),
        (("run", "--memory", "lots", "debian", "true"), 125, "memory: 'lots' is not a size"),
        (("run", "--env", "=x", "debian", "true"), 125, "env"),
        (("exec", "sb_0000000000000000", "true"), 125, "no sandbox"),
        (("exec", "../x", "true"), 125, "cannot be the id of anything"),
        (("kill",), 125, "name sandboxes"),
        (("kill", "sb_0000000000000000"), 125, "no sandbox"),
        (("cp", "/etc/hostname", "/tmp/x"), 125, "exactly one of both"),
        (("cp", "sb_0000000000000000:/x", "/tmp/never"), 125, "no sandbox"),
        (("image", "build", "x"), 125, "exactly one of --from, --debian and --dockerfile"),
        (("image", "build", "broken", "--from", "/etc/apt"), 125, "it is broken"),
        (("image", "rm", "no-such"), 125, "no image"),
        (("image", "compose", "a", "no-such", "toolkit:x@1"), 125, "no image"),
        (("image", "pull", "debian"), 125, "must look like 'docker://HOST/NAME:TAG'"),
        (("image", "pull", "oci:/x", "--token", "SECRET"), 125, "only a registry takes a token"),
        (("image", "push", "no-such", "store:depot/x"), 125, "no image"),
        (("image", "inspect", "no-such"), 125, "no image"),
        (("image", "diff", "debian", "/etc"), 125, "must be the name of an image"),
        (("image", "build", "x", "--dockerfile", "/no/such/directory"), 125, "no such directory"),
        (("image", "build", "x", "--dockerfile", ".", "--file", "/no/such/file"), 125, "cannot be read"),
        (("pack", "sb_0000000000000000", "x"), 125, "must look like 'name@version'"),
        (("bench", "no-such"), 125, "no benchmark is called"),
        (("rollout", "/no/such/tasks.jsonl", "--out", "/tmp/never"), 125, "cannot read"),
        (("run",), 2, "Usage"),
        (("run", "debian", "--timeout", "0.1", "sleep", "60"), 124, "ran out of time"),
        (("run", "debian", "--no-such", "true"), 2, "No such option: --no-such"),
        (("exec", "sb_0000000000000000", "-l"), 2, "No such option: -l"),
        (("shell", "sb_nope"), 125, "sb_nope"),
        (("shell", "sb_0000000000000000"), 125, "no sandbox"),
        (("logs", "sb_0000000000000000"), 125, "no sandbox"),
        (("logs", "sb_0000000000000000", "proc_0000000000000000"), 125, "no sandbox"),
        (("kill", "sb_0000000000000000", "-p", "proc_0000000000000000", "-s", "BOGUS"), 125, "signal: must be the name or number"),
        (("no-such-command",), 2, "No such command"),
        (("create", "debian", "--count", "many"), 2, "many"),
        (("--address", "gopher://x", "ls"), 2, "No such option"),
        (("ls", "--address", "gopher://x"), 125, "address"),
    ],
)
def test_failures(dsec: Dsec, words: tuple[str, ...], code: int, says: str) -> None:
    ran = dsec(*words)
    assert ran.code == code and says in ran.err, ran
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--env", "A=1", "debian", "printf", "%s|%s", "--env", "--"),
        ("run", "debian", "--env", "A=1", "printf", "%s|%s", "--env", "--"),
        ("run", "-eA=1", "debian", "--timeout=9", "--", "printf", "%s|%s", "--env", "--"),
        ("run", "--", "debian", "--json", "--", "printf", "%s|%s", "--env", "--"),
    ],
    ids=" ".join,
)
def test_our_options_may_stand_on_both_sides_of_the_image(dsec: Dsec, words: tuple[str, ...]) -> None:
    ran = dsec(*words)
    assert ran.code == 0, ran
    assert (json.loads(ran.out)["stdout"] if "--json" in words else ran.out) == "--env|--"


@pytest.mark.parametrize("words", [("ls",), ("ls", "--json"), ("run", "debian", "echo out"), ("image", "ls"), ("--help",)], ids=" ".join)
def test_output_that_cannot_be_written(edge: FakeEdge, words: tuple[str, ...]) -> None:
    """A full disk is told in a line; a descriptor that is closed takes output as /dev/null does, and is never somebody else's."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, env=environment(edge), check=False)
    assert done.returncode == 125 and done.stderr == b"dsec: [Errno 28] No space left on device\n"
    for closed in (">&-", "<&-", "2>&-", "<&- >&- 2>&-"):
        shell = ["/bin/sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *words]
        done = subprocess.run(shell, capture_output=True, env=environment(edge), check=False)
        assert done.returncode == 0 and done.stderr == b"", closed
        assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", "")), closed
    assert edge.boxes == {}


def test_large_output_passes_without_a_word(dsec: Dsec) -> None:
    ran = dsec("run", "debian", "head -c 12000000 /dev/zero | tr '\\0' x")
    assert (ran.code, len(ran.out), ran.err) == (0, 12_000_000, "")


def test_output_that_was_lost_is_no_success(dsec: Dsec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads a pipe must not take what came for all of it."""

    async def attach(process: aio.Process, *, hold: bool) -> AsyncIterator[StreamEvent]:
        yield StreamEvent(kind="output", process_id=process.id, stream="stdout", data=b"begin", text="begin")
        for _ in range(2):
            yield StreamEvent(kind="gap", process_id=process.id, stream="stdout", missing_bytes=500)
        yield StreamEvent(kind="exit", process_id=process.id, result=await process.wait())

    monkeypatch.setattr(aio.Process, "attach", attach)
    assert dsec("run", "debian", "true")[:2] == (125, "begin")
    assert dsec("run", "debian", "exit 3").code == 3
    assert "1000 bytes of its output are missing" in dsec("run", "debian", "true").err


def test_json_everywhere(dsec: Dsec) -> None:
    ran = dsec("run", "--json", "debian", "echo hi; exit 3")
    assert ran.code == 3 and json.loads(ran.out)["stdout"] == "hi\n"
    ran = dsec("run", "--json", "no-such", "true")
    assert ran.code == 125 and json.loads(ran.out)["error"]["code"] == "not_found" and ran.err == ""
    made = json.loads(dsec("create", "debian", "-n", "2", "--json").out)
    first = made[0]["sandbox"]["id"]
    assert {one["id"] for one in json.loads(dsec("ls", "--json").out)["sandboxes"]} >= {one["sandbox"]["id"] for one in made}
    started = json.loads(dsec("exec", "--json", "-d", first, "echo started").out)
    assert started["state"] in ("running", "ended")
    assert json.loads(dsec("logs", "--json", "-p", first).out)[0]["id"] == started["id"]
    assert [json.loads(line)["text"] for line in dsec("logs", "--json", "-f", first, started["id"]).out.splitlines()] == ["started\n"]
    assert json.loads(dsec("logs", "--json", first).out.splitlines()[0])["kind"] == "sandbox.created"
    assert json.loads(dsec("image", "ls", "--json").out)["images"]
    assert json.loads(dsec("image", "gc", "-n", "--json").out)["dry_run"] is True
    assert json.loads(dsec("doctor", "--json").out)["backends"]
    assert json.loads(dsec("kill", "--json", *(one["sandbox"]["id"] for one in made)).out)["failed"] == {}


def test_a_day_with_a_sandbox(dsec: Dsec, tmp_path: Path) -> None:
    box = dsec("create", "debian", "--label", "day=one").out.strip()
    assert dsec("ls", "-q", "--label", "day=one").out == f"{box}\n"
    assert dsec("ls", "-q", "--label", "day=two").out == ""
    (tmp_path / "tree" / "sub").mkdir(parents=True)
    (tmp_path / "tree" / "sub" / "a").write_text("content\n")
    assert dsec("cp", str(tmp_path / "tree"), f"{box}:/tmp").code == 0  # into the directory, by its name
    assert dsec("exec", "-w", "/tmp", box, "cat", "tree/sub/a").out == "content\n"
    assert dsec("cp", str(tmp_path / "tree" / "sub" / "a"), f"{box}:/tmp/b").code == 0
    assert dsec("exec", "-w", "/tmp", "-e", "X=1", box, "cat b; echo $X").out == "content\n1\n"
    assert dsec("cp", "-q", f"{box}:/tmp/tree", str(tmp_path / "copy")) == (0, "", "")
    assert (tmp_path / "copy" / "sub" / "a").read_text() == "content\n"
    assert dsec("exec", "-w", "/tmp", box, "ln -s /etc/hostname tree/out").code == 0
    assert "dsec: 1 left out (symlinks" in dsec("cp", f"{box}:/tmp/tree", str(tmp_path / "copy")).err
    assert json.loads(dsec("cp", "--json", f"{box}:/tmp/tree", str(tmp_path / "copy")).out)["left_out"] == ["out"]
    os.mkfifo(tmp_path / "tree" / "fifo")
    assert dsec("cp", str(tmp_path / "tree"), f"{box}:/tmp").err == "dsec: 1 left out (neither files, directories nor symlinks): fifo\n"
    assert dsec("cp", "-q", f"{box}:/tmp/b", str(tmp_path)).code == 0
    assert (tmp_path / "b").read_text() == "content\n"
    process = dsec("exec", "-d", box, "echo begun; exec sleep 600").out.strip()
    assert "running" in dsec("logs", "-p", box).out
    assert dsec("kill", box, "--process", process, "--signal", "TERM").code == 0
    assert dsec("logs", "-f", box, process).out == "begun\n"
    assert "signalled" in dsec("logs", "-p", box).out
    assert "sandbox.created" in dsec("logs", box).out
    assert dsec("kill", "--all").code == 0
    assert dsec("ls", "-q").out == ""
    assert "stopped" in dsec("ls", "--all").out


def test_a_rollout_says_what_is_wrong_and_does_it_again(dsec: Dsec, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out.jsonl"
    lines = (
        '{"id": "line", "image": "debian", "verify": {"run": "true", "typo": 1}}',
        '{"id": "image", "image": "no-such", "verify": {"run": "true"}}',
        '{"id": "verdict", "image": "debian", "verify": {"run": "exit 4"}}',
    )
    tasks.write_text("\n".join(lines))
    ran = dsec("rollout", str(tasks), "--out", str(out), "--quiet")
    assert ran.code == 1
    assert "not as expected: line: line 1: verify: Object contains unknown field `typo`" in ran.out
    assert "not as expected: image: image: no image 'no-such'" in ran.out
    assert "not as expected: verdict: judged fail, expected pass: the judge's command exited with 4" in ran.out
    tasks.write_text("\n".join(lines).replace(', "typo": 1', "").replace("no-such", "debian").replace("exit 4", "true"))
    ran = dsec("rollout", str(tasks), "--out", str(out), "--quiet")
    assert ran.code == 1 and "2 of 3 as expected" in ran.out  # what has a verdict keeps it


def test_images(dsec: Dsec, tmp_path: Path) -> None:
    assert dsec("image", "build", "tool", "--from", str(tmp_path), "--kind", "toolkit", "--version", "2").code == 0
    assert "toolkit:tool@2" in dsec("image", "ls", "--layers").out
    assert "image mixed: 1 layer\n" in dsec("image", "compose", "mixed", "debian", "toolkit:tool@2").out
    assert "mixed" in dsec("image", "ls").out
    assert dsec("image", "rm", "mixed").code == 0
    assert "1 layer," in dsec("image", "gc").out
    assert dsec("image", "build", "broken", "--from", str(tmp_path)).err.count("it is broken") == 1


def test_images_come_and_go(dsec: Dsec, tmp_path: Path) -> None:
    assert "pushed to store:depot/x:1" in dsec("image", "push", "debian", "store:depot/x:1").out
    pulled = dsec("image", "pull", "store:depot/x:1", "--name", "mine")
    assert "image mine:" in pulled.out and "layer 1 of 1" in pulled.err
    assert json.loads(dsec("image", "pull", "store:depot/x:1", "--json").out)["name"] == "x:1"
    assert dsec("image", "push", "debian", f"oci:{tmp_path}/layout:v1").code == 0
    assert "depot" in dsec("image", "stores").out
    assert "mine is warm" in dsec("image", "warm", "mine").out
    assert "exit code 0" in dsec("image", "trace", "mine", "sh", "-c", "echo --json").out
    assert json.loads(dsec("image", "trace", "--json", "mine", "true").out)["name"] == "mine"


def test_pack_and_what_can_be_asked_of_it(dsec: Dsec) -> None:
    box = dsec("create", "debian").out.strip()
    assert "image made:1: layer workspace:made@1" in dsec("pack", box, "made@1", "--scrub", "/root/*.log").out
    assert json.loads(dsec("pack", box, "made@2", "--kind", "toolkit", "--json").out)["layer"]["names"] == ["toolkit:made@2"]
    shown = dsec("image", "inspect", "made:1").out
    assert "workspace:made@1" in shown and "HERE" in shown
    assert dsec("image", "diff", "debian", "made:1").out.startswith("A ")
    assert json.loads(dsec("image", "diff", "debian", "made:1", "--json").out)["entries"]
    assert dsec("image", "lint", "made:1", "--package", "astropy").code == 0
    assert "as it should be" in dsec("image", "verify", "made:1").out
    assert json.loads(dsec("image", "verify", "made:1", "--json").out)["findings"] == []
    assert json.loads(dsec("image", "gc", "--grace", "3600", "--json").out)["digests"] == []
    assert dsec("kill", box).code == 0


def test_bars_show_bytes_and_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    with progress.work("pulling x") as tell:
        tell(BuildEvent(kind="step", message="unpacking"))
        tell(BuildEvent(kind="progress", what="layer 1 of 2", done_bytes=1 << 20, total_bytes=4 << 20))
    assert "layer 1 of 2" in screen.getvalue() and "1.0/4.0 MiB" in screen.getvalue()


def test_help_and_version(dsec: Dsec) -> None:
    whole = dsec("--help").out
    for name, _, _ in main.COMMANDS:
        if "." not in name:
            assert f"  {name} " in whole
    assert "125 dsec itself failed" in whole
    assert "--json" in dsec("image", "build", "--help").out
    assert dsec("--version").out.startswith("dsec ")
    assert dsec("image").code in (0, 2)


def environment(edge: FakeEdge) -> dict[str, str]:
    return {**os.environ, "OPENDSEC_ADDRESS": f"unix:{edge.socket_path}"}


COMMAND = [sys.executable, "-c", "from opendsec.client.cli.main import main; main()"]


def test_standard_input_is_passed_on(edge: FakeEdge) -> None:
    done = subprocess.run(
        [*COMMAND, "run", "-i", "debian", "cat; echo over"], input=b"one\xff\n", capture_output=True, env=environment(edge), check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"one\xff\nover\n", b"")


def test_a_reader_that_goes_away_ends_the_command(edge: FakeEdge) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", "debian", "while :; do echo y; done"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(edge)
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == b""
    process.stderr.close()
    assert edge.boxes == {}


def test_ctrl_c_goes_to_the_command(edge: FakeEdge) -> None:
    script = "trap 'echo bye; exit 5' INT; echo ready; while :; do sleep 0.02; done"
    process = subprocess.Popen([*COMMAND, "run", "debian", script], stdout=subprocess.PIPE, env=environment(edge))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.read() == b"bye\n"
    process.stdout.close()
    assert process.wait() == 5
    assert edge.boxes == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_command_and_its_sandbox(edge: FakeEdge, number: int) -> None:
    script = "echo ready; while :; do sleep 0.02; done"
    process = subprocess.Popen([*COMMAND, "run", "debian", script], stdout=subprocess.PIPE, env=environment(edge))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    assert [box.info.spec and box.info.spec.ttl_idle_s for box in edge.boxes.values()] == [60.0]  # should it be killed itself
    process.send_signal(number)
    process.stdout.close()
    assert process.wait() == 128 + number
    assert edge.boxes == {}


def test_nohup_is_heeded(edge: FakeEdge) -> None:
    process = subprocess.Popen(
        ["nohup", *COMMAND, "run", "-i", "debian", "echo ready; read x; echo got $x"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment(edge),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    assert process.communicate(b"it\n")[0] == b"got it\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("script", "code"), [(b"", 0), (b"exit 7\n", 7)])
def test_a_shell_whose_input_is_no_terminal_ends_with_it(edge: FakeEdge, script: bytes, code: int) -> None:
    done = subprocess.run([*COMMAND, "shell", "debian"], input=script, env=environment(edge), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, b"")


def test_a_shell_in_a_terminal(edge: FakeEdge) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (33, 99))
    before = termios.tcgetattr(theirs)
    script = 'stty size; while [ "$(stty size)" = "33 99" ]; do sleep 0.02; done; stty size; read x; echo got:$x; exit 9'
    process = subprocess.Popen(
        [*COMMAND, "shell", "debian", "sh", "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, env=environment(edge)
    )
    seen = b""
    while b"33 99" not in seen:
        seen += os.read(ours, 1000)
    termios.tcsetwinsize(ours, (40, 120))
    process.send_signal(signal.SIGWINCH)  # the kernel sends it to the terminal's foreground group, which this process is not in
    while b"40 120" not in seen:
        seen += os.read(ours, 1000)
    os.write(ours, b"typed\r")
    while b"got:typed" not in seen:
        seen += os.read(ours, 1000)
    assert process.wait() == 9
    after = termios.tcgetattr(theirs)
    assert after[:4] == before[:4]
    os.close(ours)
    os.close(theirs)
    assert edge.boxes == {}


def test_no_more_is_loaded_than_a_command_needs() -> None:
    loads = "import sys; import opendsec.client.cli.ls, opendsec.client.aio"
    program = f"{loads}; print([name for name in ('httpx', 'rich', 'pydantic', 'uvicorn') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "[]\n"
