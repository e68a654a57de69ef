# SPDX-License-Identifier: Apache-2.0
"""Files through QEMU's guest agent, which opens, reads, writes and seeks, and knows nothing else of files.

What is written is kept on this host until all of it is there, and replaces the file's content then: the agent renames nothing, so a file
whose guest dies meanwhile has a part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import msgspec

from opendsec.api.errors import Conflict, InvalidRequest, NotFound, OpenDSecError, QuotaExceeded, SandboxLost, Unsupported
from opendsec.api.files import FileInfo
from opendsec.runtime.backend import FileReader, FileWriter, Watch
from opendsec.runtime.files.beneath import check_path, text
from opendsec.runtime.guest.qga import AgentRefused, T, packed, unpacked

if TYPE_CHECKING:
    from opendsec.runtime.vm.agent import AgentChannel

PIECE_BYTES = 256 << 10
MAX_FILE_BYTES = 1 << 30
ASK_S = 120.0
END = "end"
CANNOT = "QEMU's guest agent reads and writes files, and no more; a command can do it"


class _Read(msgspec.Struct, frozen=True, rename="kebab"):
    count: int
    buf_b64: str
    eof: bool


class _Written(msgspec.Struct, frozen=True):
    count: int


class _Sought(msgspec.Struct, frozen=True):
    position: int


class AgentFiles:
    """Implements `backend.FileAccess`; blocking, for threads other than the loop's."""

    def __init__(self, channel: AgentChannel) -> None:
        self.channel = channel

    def ask(self, path: bytes, command: str, kind: type[T], arguments: Mapping[str, object]) -> T:
        try:
            asking = asyncio.run_coroutine_threadsafe(self.channel.call(command, kind, arguments), self.channel.loop)
        except RuntimeError as error:
            raise SandboxLost("the sandbox has ended") from error
        try:
            return asking.result(ASK_S)
        except AgentRefused as error:
            raise failure(str(error), path) from error
        finally:
            asking.cancel()

    def name(self, path: bytes) -> str:
        check_path(path)
        return asyncio.run_coroutine_threadsafe(self.channel.path(path), self.channel.loop).result(ASK_S)

    # --- what there is -----------------------------------------------------------------------------------------------

    def open_read(self, path: bytes) -> FileReader:
        return AgentFile(self, path, "rb")

    def open_write(
        self, path: bytes, *, mode: int | None, user: str | None, append: bool, parents: bool, default_user: str = ""
    ) -> FileWriter:
        if mode is not None:
            raise Unsupported("QEMU's guest agent sets no permissions", field="mode")
        if user is not None:
            raise Unsupported("QEMU's guest agent gives files to nobody", field="user")
        return AgentWriter(self, path, "ab" if append else "wb")

    # --- what there is not -------------------------------------------------------------------------------------------

    def _cannot(self) -> NoReturn:
        raise Unsupported(CANNOT, field="path")

    def stat(self, path: bytes, *, follow: bool = True) -> FileInfo:
        self._cannot()

    def list(self, path: bytes) -> Sequence[FileInfo]:
        self._cannot()

    def mkdir(self, path: bytes, *, mode: int, user: str | None, parents: bool) -> FileInfo:
        self._cannot()

    def move(self, path: bytes, to: bytes) -> FileInfo:
        self._cannot()

    def remove(self, path: bytes, *, recursive: bool) -> None:
        self._cannot()

    def chmod(self, path: bytes, *, mode: int | None, user: str | None) -> FileInfo:
        self._cannot()

    def archive(self, path: bytes, out_fd: int) -> None:
        self._cannot()

    def extract(self, path: bytes, in_fd: int, *, user: str | None) -> int:
        self._cannot()

    def open_watch(self, path: bytes) -> Watch:
        self._cannot()


class AgentFile:
    """An open file of the guest. Implements `backend.FileReader`."""

    def __init__(self, files: AgentFiles, path: bytes, mode: str) -> None:
        self._files, self._path = files, path
        self._at = 0
        self._handle: int | None = files.ask(path, "guest-file-open", int, {"path": files.name(path), "mode": mode})

    def _nonsense(self) -> NoReturn:
        self._files.channel.nonsense()
        raise SandboxLost("the sandbox has ended: the guest's agent said what no agent says")

    def _on(self, **arguments: object) -> dict[str, object]:
        return {"handle": self._handle, **arguments}

    def size_bytes(self) -> int:
        return max(0, self._seek(0, END))

    def _seek(self, offset: int, whence: str) -> int:
        found = self._files.ask(self._path, "guest-file-seek", _Sought, self._on(offset=offset, whence=whence))
        self._at = found.position
        return found.position

    def read(self, offset: int, count: int) -> bytes:
        if self._at != offset:
            self._seek(offset, "set")
        data = bytearray()
        while len(data) < count:
            wanted = min(count - len(data), PIECE_BYTES)
            part = self._files.ask(self._path, "guest-file-read", _Read, self._on(count=wanted))
            got = unpacked(part.buf_b64)
            if got is None or len(got) != part.count or len(got) > wanted:
                self._nonsense()
            data += got
            self._at += len(got)
            if part.eof or not got:
                break
        return bytes(data)

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            piece = rest[:PIECE_BYTES]
            arguments = {"handle": self._handle, "buf-b64": packed(bytes(piece))}
            done = self._files.ask(self._path, "guest-file-write", _Written, arguments).count
            if not 0 < done <= len(piece):
                self._nonsense()
            rest = rest[done:]

    def close(self) -> None:
        """May be repeated. Raises as writing does, if this was what showed that there is no room."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._files.ask(self._path, "guest-file-close", dict[str, object], {"handle": handle})


class AgentWriter:
    """Implements `backend.FileWriter`."""

    def __init__(self, files: AgentFiles, path: bytes, mode: str) -> None:
        self._files, self._path, self._mode = files, path, mode
        self._kept = tempfile.TemporaryFile()  # noqa: SIM115 - closed by commit and abort
        self._size = 0

    def write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > MAX_FILE_BYTES:
            raise QuotaExceeded(
                f"files of more than {MAX_FILE_BYTES >> 30} GiB are not written through QEMU's guest agent",
                field="path",
                data={"resource": "file", "limit": MAX_FILE_BYTES},
            )
        self._kept.write(data)

    def commit(self) -> int:
        with self._kept:
            size = self._commit()
        if self._mode == "wb" and size != self._size:
            raise Conflict(f"{text(self._path)} has {size} bytes after {self._size} were written", field="path")
        return size

    def _commit(self) -> int:
        file = AgentFile(self._files, self._path, self._mode)
        try:
            self._kept.seek(0)
            while data := self._kept.read(PIECE_BYTES):
                file.write(data)
            size = file.size_bytes()
            file.close()
            return size
        except BaseException:
            with contextlib.suppress(OpenDSecError):
                file.close()
            raise

    def abort(self) -> None:
        self._kept.close()


REASONS: tuple[tuple[str, type[OpenDSecError]], ...] = (
    ("no such file", NotFound),
    ("cannot find", NotFound),
    ("is a directory", Conflict),
    ("no space left", QuotaExceeded),
    ("not enough space", QuotaExceeded),
    ("disk full", QuotaExceeded),
    ("quota", QuotaExceeded),
)


def failure(said: str, path: bytes) -> OpenDSecError:
    """The agent has text only, in English or whatever its system speaks."""
    for part, kind in REASONS:
        if part in said.lower():
            return kind(f"{text(path)}: {said}", field="path")
    return InvalidRequest(f"{text(path)}: {said}", field="path")
