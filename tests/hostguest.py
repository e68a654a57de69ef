# SPDX-License-Identifier: Apache-2.0
"""guestd as a service on this machine, in namespaces of its own, without any virtual machine: all of the channel, nothing of the guest.

Its root is this machine's, with /tmp, /root, /home and /etc on a file system of its own in memory; its processes die with it. Never set its
clock: that is this machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Sequence

from opendsec.api.ids import EDGE, new_id
from opendsec.api.sandboxes import Usage
from opendsec.kernel import cgroups
from opendsec.runtime.backend import Counters, ExecPlan, FileAccess, Placement, Record, Running
from opendsec.runtime.guest import Channel
from tests.support import SRC

GUESTD = SRC / "_native/dsec-guestd"
SETUP = """
set -e
mount -t tmpfs -o mode=755 scratch /mnt
for name in etc root home; do
    mkdir -p /mnt/$name /mnt/work-$name /mnt/up-$name
    mount -t overlay -o lowerdir=/$name,upperdir=/mnt/up-$name,workdir=/mnt/work-$name overlay /$name
done
mount -t tmpfs -o mode=1777,size=64m,nr_inodes=20000 files /tmp
exec "$@"
"""


class HostGuest:
    """A running guestd. `sock`: our end, until a Channel has it. `connect` needs no more than one end: it serves one connection."""

    def __init__(self, *, wrap: tuple[str, ...] = ()) -> None:
        self.sock, theirs = socket.socketpair()
        self.group = cgroups.discover().group(f"opendsec-guest-{new_id(EDGE)}")
        self.group.create()
        try:
            with theirs:
                fd = str(theirs.fileno())
                apart = ("unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc", "sh", "-c", SETUP, "sh")
                self.process = subprocess.Popen(
                    [*apart, *wrap, str(GUESTD), "--fd", fd, "--cgroup", self.group.tree_path],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
        except BaseException:
            self.close()
            raise

    def kill(self) -> None:
        """As the guest's root might."""
        self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self.sock.close()
        self.process.kill()
        self.process.wait()
        self.group.remove()


@contextlib.asynccontextmanager
async def host_channel() -> AsyncIterator[Channel]:
    """A channel to a guestd of its own."""
    guest = HostGuest()
    try:
        channel = await Channel.open(guest.sock.dup())
        try:
            yield channel
        finally:
            channel.close()
    finally:
        await asyncio.to_thread(guest.close)


class HostGuestHandle:
    """A `Handle` on a HostGuest, as far as commands and files go."""

    def __init__(self, guest: HostGuest, channel: Channel, record: Record) -> None:
        self.guest, self.channel, self.record = guest, channel, record
        self.sandbox_id = record.sandbox_id
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        channel.broken.add_done_callback(lambda broken: self.died.set_result(broken.result() or "destroyed"))

    @property
    def files(self) -> FileAccess:
        return self.channel.files

    def alive(self) -> bool:
        return not self.channel.lost

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        return await self.channel.exec(plan, (stdin, stdout, stderr, *extra), self.record.limits)

    def counters(self) -> Counters:
        return self.channel.counters

    def usage(self) -> Usage:
        return Usage()

    def processes(self) -> int:
        return len(self.guest.group.procs())  # here guestd has no controller that counts them

    async def destroy(self) -> None:
        self.channel.close()
        await asyncio.to_thread(self.guest.close)


class HostGuestBackend:
    """A `Backend` of them, as far as commands and files go."""

    name = "hostguest"

    async def start(self) -> None: ...

    async def create(self, placement: Placement) -> HostGuestHandle:
        guest = HostGuest()
        record = Record(
            sandbox_id=placement.sandbox_id,
            backend=self.name,
            pid=guest.process.pid,
            start_time=0,
            boot_id="",
            uid_base=0,
            scratch="",
            limits=placement.limits,
            layers=(),
        )
        return HostGuestHandle(guest, await Channel.open(guest.sock.dup()), record)

    async def close(self) -> None: ...
