# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a sandbox: a process in user, mount, pid and ipc namespaces of its own, as root of 65,536 ids, on an overlay.

Two kinds of root. "host": the overlay is mounted by root of the host over an id-mapped layer, as the container backend does.
"inside": a tmpfs mounted in the user namespace, where ids of the host mean nothing; new files for them are EOVERFLOW.

The process runs what a test sends it (`Box.run`), as hostile as the test likes.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Literal

from opendsec.kernel import abi, fds, mounts, namespaces, syscalls
from opendsec.runtime.files import SandboxFiles
from tests.support import SRC

UID_BASE = 3_000_000
IDS = 65_536
DISK_BYTES = 64 << 20
INODES = 30_000
STAGING = "/mnt"  # a directory that every machine has and every user can reach; covered in the box's own mount namespace
Kind = Literal["host", "inside"]


class Box:
    """`kind`: how the root is mounted. `size_bytes` of writable space."""

    def __init__(self, kind: Kind = "host", size_bytes: int = DISK_BYTES, inodes: int = INODES) -> None:
        self.kind = kind
        self._folder = tempfile.TemporaryDirectory()
        layer = Path(self._folder.name, "layer")
        for name in ("etc", "proc", "dev/shm", "tmp", "root", "usr/lib", "work", "lower/sub"):
            (layer / name).mkdir(parents=True)
        (layer / "tmp").chmod(0o1777)
        (layer / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1001::/home/user:/bin/sh\n")
        (layer / "etc/group").write_text("root:x:0:\nuser:x:1001:\nstaff:x:50:user\n")
        (layer / "lower/file").write_bytes(b"from the layer")
        (layer / "lower/sub/file").write_bytes(b"below")
        (layer / "lib").symlink_to("usr/lib")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.files.box", str(theirs.fileno())],
                cwd=SRC.parent.parent,
                env={**os.environ, "PYTHONPATH": f"{SRC.parent}:{SRC.parent.parent}"},
                pass_fds=[theirs.fileno()],
            )
        try:
            self.pid = int(self._receive())
            namespaces.write_id_maps(self.pid, [(0, UID_BASE, IDS)])
            root = self._host_root(layer, size_bytes, inodes) if kind == "host" else -1
            options = f"size={size_bytes},nr_inodes={inodes},mode=755"
            socket.send_fds(ours, [options.encode()], [root] if root >= 0 else [])
            if root >= 0:
                os.close(root)
            assert self._receive() == "ready"
            if kind == "inside":  # the same files, made by the sandbox itself
                source = "\n".join(f"os.makedirs({name!r}, exist_ok=True)" for name in ("/tmp", "/root", "/usr/lib", "/work", "/etc"))
                self.run(source + "\nos.chmod('/tmp', 0o1777)\nos.symlink('usr/lib', '/lib')")
                for name in ("passwd", "group"):
                    self.run(f"open('/etc/{name}', 'w').write({(layer / 'etc' / name).read_text()!r})")
        except BaseException:
            self.close()
            raise
        self.files = SandboxFiles(self.open_root, UID_BASE)

    def _host_root(self, layer: Path, size_bytes: int, inodes: int) -> int:
        held = [namespaces.open_namespace(self.pid, "user")]
        try:
            held.append(_clone(layer))
            held.append(mounts.idmapped_clone(held[1], held[0]))
            base = mounts.tmpfs(size_bytes, inodes, 0o700)
            held.append(base)
            for name in ("upper", "work"):
                os.mkdir(name, 0o755, dir_fd=base)
                os.chown(name, UID_BASE, UID_BASE, dir_fd=base)
                held.append(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=base))
            return mounts.overlay([held[2]], held[4], held[5], attrs=abi.MOUNT_ATTR_NOSUID | abi.MOUNT_ATTR_NODEV)
        finally:
            for fd in held:
                os.close(fd)

    def _receive(self) -> str:
        data = self._channel.recv(1 << 20)
        if not data:
            raise RuntimeError("the stand-in for a sandbox has died")
        return data.decode()

    def open_root(self) -> int:
        return os.open(f"/proc/{self.pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def run(self, code: str) -> object:
        """Run Python text inside; the value of the variable `result` afterwards. Names live on between calls."""
        self._channel.send(code.encode())
        answer = json.loads(self._receive())
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _clone(layer: Path) -> int:
    fd = fds.open_path(layer, directory=True)
    try:
        return mounts.clone(fd)
    finally:
        os.close(fd)


# --- inside --------------------------------------------------------------------------------------------------------


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    syscalls.unshare(abi.CLONE_NEWUSER | abi.CLONE_NEWNS | abi.CLONE_NEWPID | abi.CLONE_NEWIPC)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reading)
        channel.send(str(pid).encode())
        channel.close()
        os.waitpid(pid, 0)
        os._exit(0)
    os.close(writing)  # the parent's end: when the parent is killed, so are we
    syscalls.prctl(abi.PR_SET_PDEATHSIG, signal.SIGKILL)
    options, roots, _, _ = socket.recv_fds(channel, 4096, 1)
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    syscalls.mount(None, b"/", None, abi.MS_REC | abi.MS_PRIVATE)
    if roots:
        root = roots[0]
        syscalls.move_mount(root, b"", abi.AT_FDCWD, STAGING, abi.MOVE_MOUNT_F_EMPTY_PATH)
        os.close(root)
    else:
        syscalls.mount("tmpfs", STAGING, "tmpfs", 0, options)
        for name in ("proc", "dev", "dev/shm"):
            os.mkdir(os.path.join(STAGING, name))
    os.chdir(STAGING)
    syscalls.mount("proc", "proc", "proc", 0, None)
    syscalls.mount("tmpfs", "dev/shm", "tmpfs", 0, "size=1m,mode=1777")
    syscalls.pivot_root(".", ".")
    syscalls.umount2(".", abi.MNT_DETACH)
    os.chdir("/")
    os.umask(0)
    channel.send(b"ready")
    serve(channel)


def serve(channel: socket.socket) -> None:
    names: dict[str, object] = {
        "os": os,
        "abi": abi,
        "syscalls": syscalls,
        "socket": socket,
        "fcntl": fcntl,
        "stat": stat,
        "threading": threading,
        "signal": signal,
        "sys": sys,
    }
    while code := channel.recv(1 << 20):
        names["result"] = None
        try:
            exec(code.decode(), names)
            answer = {"result": names["result"]}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        channel.send(json.dumps(answer).encode())
    os._exit(0)


if __name__ == "__main__":
    main()
