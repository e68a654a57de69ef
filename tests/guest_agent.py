# SPDX-License-Identifier: Apache-2.0
"""QEMU's guest agent as Debian has it, as a process of this machine: nobody's, and without all commands that would change the machine.

Its package is unpacked beside the test images, not installed, which would start it wherever the tests themselves run in a virtual machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from opendsec.runtime.vmm.locks import locked
from opendsec.runtime.vmm.programs import libraries

LOADER = "/lib64/ld-linux-x86-64.so.2"
NOBODY = 65_534
BLOCKED = (
    *("guest-shutdown", "guest-suspend-disk", "guest-suspend-ram", "guest-suspend-hybrid", "guest-set-time", "guest-set-vcpus"),
    *("guest-fsfreeze-freeze", "guest-fsfreeze-freeze-list", "guest-fsfreeze-thaw", "guest-fstrim", "guest-set-user-password"),
    *("guest-set-memory-blocks", "guest-ssh-add-authorized-keys", "guest-ssh-remove-authorized-keys"),
)


def program() -> Path:
    """Where it is unpacked, fetched by this machine's apt once."""
    parent = Path(os.environ.get("OPENDSEC_TEST_IMAGES", "/var/tmp/opendsec-test-images"))
    parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    target = parent / "guest-agent"
    with locked(parent / "guest-agent.lock"):
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=parent, prefix=".guest-agent-") as folder:
                work = Path(folder)
                options = ["-o", "APT::Sandbox::User=root", "-q"]
                if subprocess.run(["apt-get", *options, "download", "qemu-guest-agent"], cwd=work, capture_output=True).returncode:
                    subprocess.run(["apt-get", *options, "update"], check=True, capture_output=True)
                    subprocess.run(["apt-get", *options, "download", "qemu-guest-agent"], cwd=work, check=True, capture_output=True)
                (package,) = work.glob("*.deb")
                subprocess.run(["dpkg-deb", "-x", package, work / "root"], check=True)
                (work / "root").chmod(0o755)
                (work / "root").rename(target)
    return target / "usr/sbin/qemu-ga"


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Path]:
    """The socket that one listens at, in a folder that becomes nobody's."""
    os.chown(folder, NOBODY, NOBODY)
    folder.parent.chmod(folder.parent.stat().st_mode & 0o7777 | 0o011)
    path = folder / "agent.sock"
    words = [program(), "-m", "unix-listen", "-p", path, "-t", folder, "-f", folder / "pid", "-b", ",".join(BLOCKED)]
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with subprocess.Popen(
        words, user=NOBODY, group=NOBODY, extra_groups=[], cwd=folder, stderr=writing, env={"PATH": "/usr/bin:/bin", "OWN": "agent"}
    ) as agent:
        os.close(writing)
        try:
            while not path.exists() and agent.poll() is None:
                os.sched_yield()
            yield path
        finally:
            agent.kill()
            os.close(reading)


def dial(path: Path) -> socket.socket:
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.connect(str(path))
        stack.pop_all()
        return sock


def bundle() -> bytes:
    """A tar archive with it and its libraries, which runs in any Linux by `start`."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for path in (str(program()), *libraries(str(program())), LOADER):
            archive.add(os.path.realpath(path), Path(path).name)
    return made.getvalue()


def start(folder: str) -> tuple[str, ...]:
    """How it is started where a bundle was unpacked."""
    words = (f"{folder}/{Path(LOADER).name}", "--library-path", folder, f"{folder}/qemu-ga", "-m", "virtio-serial")
    return (*words, "-p", "/dev/virtio-ports/org.qemu.guest_agent.0", "-t", folder, "-f", f"{folder}/pid")
