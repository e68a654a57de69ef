# SPDX-License-Identifier: Apache-2.0
"""A small, blocking host for `dsec-guestd`, for its own tests: it knows the protocol's numbers from native/guest_protocol.h alone."""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import signal
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

NATIVE = Path(__file__).parent.parent / "native"
PROGRAM = Path(__file__).parent.parent / "src" / "opendsec" / "_native" / "dsec-guestd"
HEADER = struct.Struct("<IIHHIQ")
ANSWER = 0x8000
ERROR = 0xFFFF


def numbers() -> dict[str, int]:
    """The header's constants."""
    found = re.findall(r"\b([A-Z][A-Z0-9_]+) = (0x[0-9A-Fa-f]+|\d+(?: << \d+)?)", (NATIVE / "guest_protocol.h").read_text())
    shifts = {name: [int(part, 0) for part in value.split(" << ")] for name, value in found}
    return {name: value[0] << (value[1] if len(value) > 1 else 0) for name, value in shifts.items()}


N = numbers()


class GuestError(Exception):
    """(errno, text)"""


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw


def texts(values: Sequence[str | bytes]) -> bytes:
    return struct.pack("<I", len(values)) + b"".join(text(value) for value in values)


class Payload:
    """A payload being taken apart."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> tuple[int, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def text(self) -> bytes:
        (length,) = self.take("I")
        self.at += length
        assert self.at <= len(self.data)
        return self.data[self.at - length : self.at]

    def entry(self) -> dict[str, object]:
        names = ("mode", "uid", "gid", "links", "size", "mtime", "device", "inode")
        entry: dict[str, object] = dict(zip(names, self.take("IIIIQqQQ"), strict=True))
        entry["name"] = self.text()
        entry["target"] = self.text()
        return entry

    @property
    def over(self) -> bool:
        return self.at == len(self.data)


class Guest:
    """One connection. Frames that nobody has asked for yet are kept in `events`."""

    def __init__(self, sock: socket.socket, timeout_s: float = 20.0) -> None:
        self.sock = sock
        self.sock.settimeout(timeout_s)
        self.events: deque[tuple[int, int, int, bytes]] = deque()
        self.auto_credit = True
        self._in = b""

    # Frames.

    def send(self, kind: int, payload: bytes = b"", *, flags: int = 0, id: int = 0) -> int:
        id = id or random.getrandbits(64) | 1
        self.sock.sendall(HEADER.pack(N["GUEST_MAGIC"], len(payload), kind, flags, 0, id) + payload)
        return id

    def send_request(self, kind: int, payload: bytes) -> int:
        """In parts, if it is long."""
        id = random.getrandbits(64) | 1
        parts = [payload[at : at + 65_536] for at in range(0, len(payload), 65_536)] or [b""]
        for part in parts[:-1]:
            self.send(kind, part, flags=1, id=id)
        self.send(kind, parts[-1], id=id)
        return id

    def frame(self) -> tuple[int, int, int, bytes]:
        """(type, flags, id, payload) of the next frame."""
        magic, length, kind, flags, zero, id = HEADER.unpack(self._exactly(HEADER.size))
        assert magic == N["GUEST_MAGIC"] and length <= 65_536 and zero == 0, "a broken header"
        return kind, flags, id, self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        while len(self._in) < count:
            data = self.sock.recv(1 << 18)
            if not data:
                raise EOFError
            self._in += data
        data, self._in = self._in[:count], self._in[count:]
        return data

    def next(self, kind: int, id: int) -> tuple[int, bytes]:
        """(flags, payload) of the next frame of this type and id, or ERROR. Others wait in `events`."""
        for event in self.events:
            if event[0] in (kind, ERROR) and event[2] == id:
                self.events.remove(event)
                return self._checked(event)
        while True:
            event = self.frame()
            if event[0] == N["TYPE_DATA"] and self.auto_credit:
                self.send(N["TYPE_CREDIT"], struct.pack("<I", len(event[3])), flags=event[1], id=event[2])
            if event[0] in (kind, ERROR) and event[2] == id:
                return self._checked(event)
            self.events.append(event)

    def _checked(self, event: tuple[int, int, int, bytes]) -> tuple[int, bytes]:
        if event[0] == ERROR:
            payload = Payload(event[3])
            raise GuestError(payload.take("I")[0], payload.text().decode())
        return event[1], event[3]

    def ask(self, name: str, payload: bytes = b"") -> Payload:
        """One request, whose answer may come in parts that are joined. Raises GuestError."""
        kind = N[f"TYPE_{name}"]
        id = self.send_request(kind, payload)
        data = b""
        while True:
            flags, part = self.next(kind | ANSWER, id)
            data += part
            if not flags & 1:
                return Payload(data)

    # Requests.

    def hello(self) -> Payload:
        nonce = os.urandom(16)
        answer = self.ask("HELLO", struct.pack("<II", N["GUEST_VERSION"], 0) + nonce)
        version, self.features = answer.take("II")
        assert version == N["GUEST_VERSION"] and answer.data[8:24] == nonce
        return answer

    def exec(
        self,
        argv: Sequence[str],
        *,
        name: str = "",
        kinds: bytes = b"\1\2\2",
        user: str = "",
        cwd: str = "/",
        env: Sequence[str] = (),
        pty: tuple[int, int] | None = None,
        open_files: int = 0,
    ) -> Command:
        payload = struct.pack("<IHHI", 1 if pty else 0, *(pty or (0, 0)), open_files) + text(name or f"p{random.getrandbits(48):x}")
        payload += text(b"" if pty else kinds) + text(user) + text(cwd) + texts(argv) + texts(env)
        id = self.send_request(N["TYPE_EXEC"], payload)
        _, answer = self.next(N["TYPE_EXEC"] | ANSWER, id)
        return Command(self, id, Payload(answer).take("I")[0])

    def exec_id(self, argv: Sequence[str]) -> int:
        """Ask for a command, and do not wait for the answer."""
        payload = struct.pack("<IHHI", 0, 0, 0, 0) + text(f"p{random.getrandbits(48):x}") + text(b"\1\2\2") + text("") + text("/")
        return self.send_request(N["TYPE_EXEC"], payload + texts(argv) + texts([]))

    def run(
        self, argv: Sequence[str], *, user: str = "", cwd: str = "/", env: Sequence[str] = (), open_files: int = 0
    ) -> tuple[int, bytes]:
        """(exit code, standard output)."""
        command = self.exec(argv, user=user, cwd=cwd, env=env, open_files=open_files)
        kind, code, _ = command.exit()
        output = command.output(1)
        command.release()
        assert kind == 0, f"signal {code}"
        return code, output


class Command:
    def __init__(self, guest: Guest, id: int, pid: int) -> None:
        self.guest = guest
        self.id = id
        self.pid = pid

    def send(self, data: bytes, stream: int = 0) -> None:
        self.guest.send(N["TYPE_DATA"], data, flags=stream, id=self.id)

    def eof(self, stream: int = 0) -> None:
        self.guest.send(N["TYPE_EOF"], flags=stream, id=self.id)

    def output(self, stream: int = 1) -> bytes:
        """All of a stream to its end."""
        data = b""
        while True:
            event = self.next_of(stream)
            if event is None:
                return data
            data += event

    def next_of(self, stream: int) -> bytes | None:
        kinds = (N["TYPE_DATA"], N["TYPE_EOF"])
        while True:
            for event in self.guest.events:
                if event[0] in kinds and event[1] == stream and event[2] == self.id:
                    self.guest.events.remove(event)
                    return event[3] if event[0] == N["TYPE_DATA"] else None
            event = self.guest.frame()
            if event[0] == N["TYPE_DATA"] and self.guest.auto_credit:
                self.guest.send(N["TYPE_CREDIT"], struct.pack("<I", len(event[3])), flags=event[1], id=event[2])
            self.guest.events.append(event)

    def exit(self) -> tuple[int, int, dict[str, object]]:
        """(0 exit or 1 signal, code or signal, the rest)."""
        _, data = self.guest.next(N["TYPE_EXIT"], self.id)
        payload = Payload(data)
        kind, code, cpu_us, rss, alive, oom, denied, _, _, count = payload.take("IIQQIQQIII")
        ends = payload.take(f"{count}Q")
        assert payload.over
        return kind, code, {"cpu_us": cpu_us, "rss": rss, "alive": alive, "oom_kills": oom, "pids_denied": denied, "ends": ends}

    def tree_empty(self) -> None:
        self.guest.next(N["TYPE_TREE_EMPTY"], self.id)

    def ask(self, name: str, rest: bytes = b"") -> Payload:
        return self.guest.ask(name, struct.pack("<Q", self.id) + rest)

    def signal(self, number: int, flags: int = 0) -> int:
        return self.ask("SIGNAL", struct.pack("<II", number, flags)).take("I")[0]

    def release(self) -> None:
        self.ask("RELEASE")


def cgroup2() -> Path | None:
    """Where a cgroup2 hierarchy is mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        if fields[fields.index("-") + 1] == "cgroup2":
            return Path(fields[4])
    return None


@contextlib.contextmanager
def service(program: Path = PROGRAM, *, root: Path | str = "/", stderr: Path | None = None) -> Iterator[Guest]:
    """A guestd on this machine, in pid, mount and network namespaces of its own and a cgroup of its own, all of which end with it."""
    mine, other = socket.socketpair()
    base = cgroup2()
    group = base / f"opendsec-guestd-{os.getpid()}-{random.getrandbits(32):x}" if base else None
    if group:
        group.mkdir()
    command = ["unshare", "--pid", "--mount", "--net", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    command += [str(program), "--fd", str(other.fileno()), "--root", str(root), *(["--cgroup", str(group)] if group else [])]
    with contextlib.ExitStack() as stack:
        stack.callback(_remove, group)
        errors = stack.enter_context(stderr.open("wb")) if stderr else None
        process = subprocess.Popen(command, pass_fds=[other.fileno()], stderr=errors)
        stack.callback(_end, process)
        other.close()
        stack.callback(mine.close)
        yield Guest(mine)


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends by itself when the channel is closed."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise


def _remove(group: Path | None) -> None:
    if group is None:
        return
    (group / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + 10
    with (group / "cgroup.events").open() as events:
        while "populated 1" in events.read() and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(events, select.POLLPRI)
            poll.poll(1000)
            events.seek(0)
    for path, _, _ in os.walk(group, topdown=False):
        Path(path).rmdir()
