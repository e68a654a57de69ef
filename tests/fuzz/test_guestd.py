# SPDX-License-Identifier: Apache-2.0
"""guestd against hostile frames, built with sanitizers: its parser and handlers by the thousand, then the whole program on a socket."""

from __future__ import annotations

import os
import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guestd import HEADER, Guest, GuestError, N, cgroup2, service, text, texts

HERE = Path(__file__).parent
NATIVE = HERE.parent.parent / "native"
FLAGS = ["-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w"]
RUNS = 20_000
CONVERSATIONS = 60

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")]


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is not dumpable, so leaks cannot be looked for.
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=1")
    monkeypatch.setenv("UBSAN_OPTIONS", "print_stacktrace=1:halt_on_error=1")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guestd")
    for source, target in ((NATIVE / "guestd.c", "guestd"), (HERE / "guest_frames.c", "guest_frames")):
        subprocess.run(["cc", *FLAGS, str(source), "-o", str(folder / target)], check=True, timeout=300)
    return folder


def frame(name: str, payload: bytes = b"", *, flags: int = 0, id: int = 0) -> bytes:
    return HEADER.pack(N["GUEST_MAGIC"], len(payload), N[f"TYPE_{name}"], flags, 0, id) + payload


def who(flags: int, mode: int = 0o644, user: str = "") -> bytes:
    return struct.pack("<II", flags, mode) + text(user)


def record(kind: int, name: str, mode: int, body: bytes = b"", target: str = "") -> bytes:
    return struct.pack("<IIIIIQqQQ", kind, mode, 1, 2, 1, len(body), 10**18, 0, 0) + text(name) + text(target) + body


def execute(name: str, argv: list[str], *, pty: bool = False) -> bytes:
    kinds = b"" if pty else b"\1\2\2\1\2"
    return (
        struct.pack("<IHHI", int(pty), 10, 20, 100) + text(name) + text(kinds) + text("nobody") + text("/") + texts(argv) + texts(["A=1"])
    )


def conversations() -> dict[str, bytes]:
    """Valid ones, each of a few frames."""
    tree = b"".join(
        (
            record(1, ".", 0o040755),
            record(1, "d", 0o040755),
            record(1, "d/f", 0o100644, b"content"),
            record(1, "d/l", 0o120777, target="f"),
            record(2, "d/h", 0o100644, target="d/f"),
            record(1, "p", 0o010644),
        )
    )
    files = b"".join(
        (
            frame("MKDIR", who(2) + text("/a/b"), id=2),
            frame("WRITE", who(6) + text("nobody") + text("/a/b/f"), id=3),
            frame("DATA", b"x" * 3000, id=3),
            frame("EOF", id=3),
            frame("COMMIT", struct.pack("<Q", 3), id=4),
            frame("STAT", struct.pack("<I", 32) + text("/a/b/f"), id=5),
            frame("CHMOD", who(12, 0o600, "1:2") + text("/a/b/f"), id=6),
            frame("MOVE", text("/a/b/f") + text("/a/g"), id=7),
            frame("READ", struct.pack("<QQ", 1, 100) + text("/a/g"), id=8),
            frame("CREDIT", struct.pack("<I", 100), id=8),
            frame("LIST", struct.pack("<I", 1000) + text("/a"), id=9),
            frame("REMOVE", struct.pack("<I", 16) + text("/a"), id=10),
        )
    )
    trees = b"".join(
        (
            frame("EXTRACT", who(2) + text("/t"), id=2),
            frame("DATA", tree[:100], id=2),
            frame("DATA", tree[100:], id=2),
            frame("EOF", id=2),
            frame("COMMIT", struct.pack("<Q", 2), id=3),
            frame("WALK", text("/t"), id=4),
            frame("CREDIT", struct.pack("<I", 1), id=4),
            frame("WATCH", text("/t"), id=5),
            frame("EXTRACT", who(10, 0, "nobody") + text("/t"), id=6),
            frame("DATA", tree, id=6),
            frame("ABORT", struct.pack("<Q", 6), id=7),
            frame("UNWATCH", struct.pack("<Q", 5), id=8),
        )
    )
    commands = b"".join(
        (
            frame("EXEC", execute("p1", ["sh", "-c", "cat; exec cat <&3 >&4"]), id=2),
            frame("DATA", b"abc", id=2),
            frame("DATA", b"def", flags=3, id=2),
            frame("EOF", id=2),
            frame("MARK", struct.pack("<Q", 2), id=3),
            frame("SIGNAL", struct.pack("<QII", 2, 0, 1), id=4),
            frame("MEMBERS", struct.pack("<Q", 2), id=5),
            frame("CREDIT", struct.pack("<I", 1), flags=1, id=2),
            frame("CLOSE", struct.pack("<I", 0), flags=2, id=2),
            frame("COMMANDS", id=6),
            frame("RELEASE", struct.pack("<Q", 2), id=7),
            frame("CUT", texts(["p1", "p2"]), id=8),
        )
    )
    terminal = b"".join(
        (
            frame("EXEC", execute("p2", ["cat"], pty=True), id=2),
            frame("RESIZE", struct.pack("<QHH", 2, 5, 5), id=3),
            frame("DATA", b"typed\r", id=2),
            frame("SIGNAL", struct.pack("<QII", 2, 15, 3), id=4),
            frame("CUT", texts(["p2"]), id=5),
        )
    )
    long = execute("p3", ["x" * 100] * 700)
    parts = frame("EXEC", long[:60_000], flags=1, id=2) + frame("EXEC", long[60_000:], id=2) + frame("CUT", texts(["p3"]), id=3)
    machine = b"".join(
        (
            frame("IDENTITY", bytes(64) + struct.pack("<Q", 0) + text("h") + text("a" * 32) + text(""), id=2),
            frame("CLOCK", struct.pack("<Q", 0) + bytes(64), id=3),
            frame("USAGE", id=4),
            frame("LIMITS", struct.pack("<Q", 0), id=5),
            frame("FREEZE", id=6),
            frame("THAW", id=7),
            frame(
                "NETWORK",
                text("none")
                + bytes(6)
                + struct.pack("<I", 0)
                + texts(["10.0.0.1/24", "fd00::1/64"])
                + texts(["10.0.0.2"])
                + texts(["10.0.0.3"]),
                id=8,
            ),
            frame("MOUNT", text("x") + text("/m") + text("tmpfs") + text("size=1m") + struct.pack("<I", 1), id=9),
            frame("PING", b"x" * 64, id=10),
            frame("PARK", id=11),
            frame("UNPARK", bytes(16), id=12),
        )
    )
    return {"files": files, "trees": trees, "commands": commands, "terminal": terminal, "parts": parts, "machine": machine}


def test_the_parser_and_its_handlers_bear_what_comes(built: Path, tmp_path: Path) -> None:
    (tmp_path / "root" / "etc").mkdir(parents=True)
    (tmp_path / "root" / "etc" / "passwd").write_text("nobody:x:65534:65534::/:/bin/sh\n")
    (tmp_path / "corpus").mkdir()
    for name, data in conversations().items():
        (tmp_path / "corpus" / name).write_bytes(data)
    command = ["unshare", "--mount", "--net", "--uts", "--ipc", str(built / "guest_frames")]
    done = subprocess.run(
        [*command, str(tmp_path / "root"), str(tmp_path / "corpus"), str(RUNS), "1"], capture_output=True, timeout=280, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"done\n"), done.stderr.decode()[-4000:]


@pytest.fixture
def guest(built: Path, tmp_path: Path) -> Iterator[Guest]:
    errors = tmp_path / "errors"
    with service(built / "guestd", stderr=errors) as guest:
        guest.hello()
        yield guest
    assert b"Sanitizer" not in errors.read_bytes() and b"runtime error" not in errors.read_bytes(), errors.read_text()[-4000:]


def mutated(chance: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at : at + 4] = struct.pack("<I", chance.choice([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF]))
            case 2:
                del changed[at]
            case 3:
                changed = changed[: max(at, 24)]
    return bytes(changed)


@pytest.mark.skipif(cgroup2() is None, reason="no cgroup2 hierarchy is mounted here")
def test_the_program_itself_answers_hello_after_anything(guest: Guest) -> None:
    """Commands run here, so mutations of other requests, which could change this machine's files, stay away."""
    chance = random.Random(5)
    known = conversations()
    for _ in range(CONVERSATIONS):
        guest.sock.sendall(mutated(chance, known[chance.choice(["commands", "terminal", "parts"])]))
        guest.sock.sendall(bytes(N["HEADER_BYTES"] + N["MAX_PAYLOAD"]))
        listen_until_hello(guest)
        guest.ask("CUT", texts(["p1", "p2", "p3"]))
    assert guest.run(["echo", "well"]) == (0, b"well\n")


def listen_until_hello(guest: Guest) -> None:
    try:
        guest.hello()
    except GuestError as error:  # a mutation may have made a request of an id that is asked for again
        pytest.fail(f"HELLO was refused: {error}")
    guest.events.clear()
    assert guest.ask("PING", os.urandom(8)).over is False
