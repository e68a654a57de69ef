# SPDX-License-Identifier: Apache-2.0
"""What runs a sandbox: the interface that every backend implements, and the words the edge speaks to it in.

A backend owns no timers, no journal and no HTTP. The edge decides; a backend acquires and releases. Every `create` that raises
has released what it had acquired; every `destroy` may be repeated and releases the rest even when one part fails.

    Placement   what the edge has already decided and journaled for a new sandbox (id, uid range, limits, layers)
    Handle      a living sandbox held by this edge
    Record      what the journal keeps of a handle, enough for another edge process to adopt the sandbox or to clear it away
    ExecPlan    one command, with every default resolved
    Running     a started command
    Exit        how it ended

A sandbox that is a machine can more: its state is saved and its process ended (`pause`), it comes back (`Backend.resume`), and what it was
at one moment is kept (`snapshot`), of which others are made (`Placement.snapshot`). Where a backend cannot, it raises Unsupported.

    SnapshotRecord   what the journal keeps of a snapshot
    VmOptions        what only a machine can be asked for
    VmRecord         the part of a Record, or of a SnapshotRecord, that only a machine has
    Screen           what a machine shows, and its pointer and keyboard
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from opendsec.api.exec import Pty
from opendsec.api.files import FileInfo, WatchEvent
from opendsec.api.images import ImageConfig
from opendsec.api.sandboxes import Capability, Usage
from opendsec.api.spec import Limits
from opendsec.images.layers import LayerRef as LayerRef

MouseButton = Literal["left", "middle", "right"]


class VmOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only a machine can be asked for. `profile`: the kind of a full VM, "" for a microVM; `width` 0: no display."""

    hardware_required: bool = False  # nothing but hardware virtualisation will do
    profile: str = ""
    width: int = 0
    height: int = 0


class VmRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What of a machine the edge should know. What it stands on, the backend keeps itself (`runtime.vmm.store`): that changes while the
    edge is not looking."""

    state: Literal["running", "paused"]
    accelerator: str  # "kvm" or "tcg"
    template: str  # key
    options: VmOptions
    stored_bytes: int = 0  # of a paused one: what its memory takes on the disk


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a snapshot. A sandbox made of it has the same layers and limits."""

    snapshot_id: str
    backend: str
    sandbox_id: str  # whose it is
    memory: bool  # with memory: what ran goes on in whatever is made of it
    limits: Limits
    layers: tuple[str, ...]  # digests, which are in use as long as the snapshot is kept
    stored_bytes: int
    vm: VmRecord


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox to create. `uid_base`: the first of the 65,536 host ids that are its own."""

    sandbox_id: str
    uid_base: int
    limits: Limits
    layers: tuple[LayerRef, ...]  # lowest first
    config: ImageConfig
    env: Mapping[str, str]  # the image's and the spec's, merged
    user: str
    workdir: str
    hostname: str
    vm: VmOptions | None = None  # for backends of machines
    snapshot: SnapshotRecord | None = None  # made of this; it and its layers and limits must agree


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal keeps of a handle. `pid` and `start_time` together name one process of this boot, for ever."""

    sandbox_id: str
    backend: str
    pid: int
    start_time: int  # clock ticks since boot, /proc/<pid>/stat field 22
    boot_id: str
    uid_base: int
    scratch: str  # the scratch driver's own reference
    limits: Limits
    layers: tuple[str, ...]
    vm: VmRecord | None = None


class ExecPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One command. `env` is complete; strings may carry surrogate escapes for raw bytes."""

    process_id: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    user: str
    pty: Pty | None = None


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended. `not_started` is set when it never ran: then code and signal are None.

    `lost` means that the spawner died first and nobody can know.
    """

    code: int | None = None
    signal: int | None = None
    cpu_ms: float = 0.0
    max_rss_bytes: int = 0
    not_started: str = ""
    lost: bool = False
    reason: str = ""  # of its end, for people, where that was neither its own nor a signal of somebody's


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Cumulative counts of refused or killed requests in one sandbox; a difference between two readings says what a command hit."""

    oom_kills: int = 0
    pids_denied: int = 0
    disk_full: bool = False
    inodes_full: bool = False


class Running(Protocol):
    """A started command."""

    @property
    def pid(self) -> int:
        """The host's id of its first process; 0 if it never started, or if the host does not know it (inside a virtual machine)."""

    @property
    def terminal(self) -> int | None:
        """Descriptor of the terminal's controlling side, owned by the caller of `Handle.exec` from then on. Not always a terminal itself
        (a virtual machine gives a socket), so its size is set by `resize`."""

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Done once the first process has ended, whatever its children do. Never cancelled by the backend."""

    def signal(self, number: int, *, tree: bool = False, since_mark: bool = False) -> None:
        """Send a signal to the first process or to all of its tree; with both flags to those of the tree that were not there at the last
        `mark`. Nothing happens if there is nobody to get it."""

    def mark(self) -> None:
        """Remember which processes the tree has now. What the command is told afterwards, by its descriptors, comes after this."""

    def kill_since_mark(self) -> None:
        """SIGKILL to all that came since the last `mark`, again until nothing of it is left. What forks faster than that takes its whole
        tree along."""

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal, of which the caller still has the descriptor open."""

    def kill_tree(self) -> None:
        """SIGKILL the whole tree, with children that called setsid, double-forked or ignore signals."""

    def alive_children(self) -> bool:
        """Whether anything of the tree still runs."""

    async def release(self) -> None:
        """Give back what the command held (its cgroup) once its tree is gone; while children live this only marks it for later."""


class FileAccess(Protocol):
    """Files of a living sandbox. Paths are absolute bytes, resolved beneath its root; uids are as seen inside.

    All are blocking calls for a worker thread. Errors: NotFound, Conflict (wrong kind, not empty, exists), InvalidRequest,
    QuotaExceeded (no space left in the sandbox), SandboxLost.
    """

    def stat(self, path: bytes, *, follow: bool = True) -> FileInfo: ...
    def list(self, path: bytes) -> Sequence[FileInfo]: ...
    def open_read(self, path: bytes) -> FileReader:
        """A regular file, opened for reading; the caller closes it."""

    def open_write(
        self, path: bytes, *, mode: int | None, user: str | None, append: bool, parents: bool, default_user: str = ""
    ) -> FileWriter:
        """`mode` and `user` None: as the existing file has them; 0644 and `default_user` for a new one."""

    def mkdir(self, path: bytes, *, mode: int, user: str | None, parents: bool) -> FileInfo: ...
    def move(self, path: bytes, to: bytes) -> FileInfo: ...
    def remove(self, path: bytes, *, recursive: bool) -> None: ...
    def chmod(self, path: bytes, *, mode: int | None, user: str | None) -> FileInfo: ...
    def archive(self, path: bytes, out_fd: int) -> None:
        """Write a tar stream of `path` to `out_fd` (closed by the caller)."""

    def extract(self, path: bytes, in_fd: int, *, user: str | None) -> int:
        """Unpack a tar stream from `in_fd` beneath `path`; the bytes of file content written."""

    def open_watch(self, path: bytes) -> Watch: ...


class FileReader(Protocol):
    """A file being read, which may be changing."""

    def size_bytes(self) -> int:
        """Its size by now; 0 also for a file that does not know it (/proc)."""

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset` on; fewer only at the end of the file."""

    def close(self) -> None: ...


class FileWriter(Protocol):
    """A file being written. Until `commit` succeeds the old content stays; `abort` leaves nothing behind. (Appending writes in place.)"""

    def write(self, data: bytes) -> None: ...
    def commit(self) -> int:
        """Make it the file; its size on disk, checked against what was written."""

    def abort(self) -> None: ...


class Watch(Protocol):
    """A watched directory. `fileno` becomes readable when events wait."""

    def fileno(self) -> int: ...
    def read(self) -> Sequence[WatchEvent]: ...
    def close(self) -> None: ...


class DiskSnapshot(Protocol):
    """What a sandbox had written at one moment, as a directory of the host that is ours to change (see `scratch.Snapshot`)."""

    @property
    def upper(self) -> Path: ...
    @property
    def aside(self) -> Path: ...
    @property
    def uid_base(self) -> int: ...
    @property
    def frozen_ms(self) -> float:
        """How long the sandbox stood still for it."""

    async def release(self) -> None:
        """Remove it; may be repeated."""


class Screen(Protocol):
    """What a machine shows, and its pointer and keyboard. Points are pixels from the upper left corner; all that waits raises SandboxLost,
    Unavailable."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, as last known."""

    async def png(self) -> bytes: ...
    async def move(self, x: int, y: int) -> None: ...
    async def button(self, button: MouseButton, *, down: bool) -> None: ...
    async def click(self, x: int, y: int, *, button: MouseButton = "left", count: int = 1) -> None: ...
    async def scroll(self, x: int, y: int, *, dx: int = 0, dy: int = 0) -> None:
        """In notches of the wheel; positive is right and down."""

    async def key(self, keys: str) -> None:
        """Press and release a key, or several together, such as `ctrl+s`. Raises InvalidRequest for a name that is none."""

    async def text(self, text: str) -> None:
        """Type it. Raises InvalidRequest for a character that the keyboard has not."""

    async def resize(self, width: int, height: int) -> None:
        """Raises Unsupported where the guest does not follow."""

    async def vnc(self) -> socket.socket:
        """A connection of one's own to the VNC server; the caller closes it."""


class Handle(Protocol):
    """A living sandbox."""

    @property
    def sandbox_id(self) -> str: ...
    @property
    def record(self) -> Record: ...
    @property
    def died(self) -> asyncio.Future[str]:
        """Done with a reason once PID 1 of the sandbox is gone."""

    @property
    def files(self) -> FileAccess: ...
    def alive(self) -> bool:
        """Whether PID 1 still runs. False from the moment it begins to exit, which is before the kernel kills the rest of the sandbox and
        long before `died` is done: so a command that was killed with its sandbox can be told from one that was killed alone."""

    async def exec(
        self, plan: ExecPlan, *, stdin: int | None, stdout: int | None, stderr: int | None, extra: Sequence[int] = ()
    ) -> Running:
        """Start a command. The descriptors become its 0, 1, 2 (None: /dev/null; all None with a terminal), those of `extra` its 3, 4, …;
        the caller keeps and closes its own copies. A command that cannot start is a Running whose `exited` says `not_started`.
        Raises SandboxLost, Unavailable. Cancelled, it kills what may have started."""

    def counters(self) -> Counters: ...
    def usage(self) -> Usage: ...
    def processes(self) -> int:
        """How many processes run inside besides PID 1."""

    async def freeze(self) -> None:
        """Stop all processes; returns when they stand still. Freezing twice is freezing once. What an edge that dies leaves frozen, the
        next one thaws when it adopts the sandbox. Raises SandboxLost, Unavailable (then they run)."""

    async def thaw(self) -> None:
        """Let them run again; may be repeated."""

    async def snapshot_disk(self) -> DiskSnapshot:
        """Copy what the sandbox has written, while it stands still; it runs again when this returns or raises. Not changes that the
        edge itself makes at that moment (file transfers): they are in it or not. Raises SandboxLost, Unavailable, Unsupported."""

    async def pause(self) -> Record:
        """Save its state and end its process; the record is for `Backend.resume`. Everything but what is stored is given back, `died` is
        not done, and the handle can only be destroyed or come back by `resume`; commands go on then, if it is in the same edge process.
        Raises Unsupported, SandboxLost, Unavailable (then it runs on)."""

    async def snapshot(self, snapshot_id: str, *, memory: bool, durable: bool = True) -> SnapshotRecord:
        """Keep what it is now, its disk or its disk and memory. It stands still for a moment, and runs again when this returns or raises.
        `durable`: it outlives a loss of power from then on, as what is paused does. Raises Unsupported, SandboxLost, Unavailable."""

    @property
    def screen(self) -> Screen | None:
        """None: it has none."""

    async def destroy(self) -> None:
        """Kill everything and release everything; may be repeated."""


class Backend(Protocol):
    """One kind of sandbox on this node."""

    @property
    def name(self) -> str: ...
    def capabilities(self) -> tuple[Capability, ...]: ...
    async def start(self) -> None:
        """Acquire what all sandboxes share."""

    async def create(self, placement: Placement) -> Handle: ...
    async def create_many(self, placements: Sequence[Placement]) -> Sequence[Handle | BaseException]:
        """Like `create` for each, in order, overlapped."""

    async def adopt(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        """A handle on a sandbox that an earlier edge process made. Raises SandboxLost if it is gone.

        The commands in `cut` were under way when that edge died: nobody can hear them any more, so they are ended, whole trees, and so
        are the shells of sessions. What commands that had ended left running lives on. A sandbox whose edge died while it paused it may
        be found paused: then it is resumed.
        """

    async def resume(self, record: Record, *, cut: Collection[str] = ()) -> Handle:
        """A paused sandbox, running again: what was in its memory goes on. The same handle that was paused, if this process still has it;
        else a new one, and then `cut` is as for `adopt`. Its record is another one than before. One that runs already, because an edge
        died as it resumed it, is adopted. Raises SandboxLost, Unavailable (then it stays paused), Unsupported."""

    async def remove_snapshot(self, record: SnapshotRecord) -> None:
        """Forget a snapshot; may be repeated. What was made of it stays, and what that stands on is kept as long."""

    async def clear(self, sandbox_id: str, record: Record | None) -> None:
        """Remove whatever a half-made or dead sandbox left behind, a paused one as well; may be repeated."""

    def leftovers(self) -> Sequence[str]:
        """Ids of sandboxes of this edge that have cgroups, scratch or processes here, paused ones among them."""

    def snapshots(self) -> Sequence[str]:
        """Ids of the snapshots of this edge that are stored here."""

    async def unmount_unused(self) -> int:
        """Let go of the mounts of layers that no sandbox uses, which would keep the space of removed ones; how many."""

    async def close(self) -> None:
        """Release what all sandboxes share; living sandboxes stay."""
