# SPDX-License-Identifier: Apache-2.0
"""The declared outputs on their way from the agent's sandbox to the judge's.

They are opaque bytes here: spooled to a temporary file, never unpacked, so no name or link in them means anything on this machine.
Links in a declared path are resolved inside the sandbox, by the edge. The judge finds what the agent left, and nothing that the agent
removed: an output that is missing there is missing here.
"""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from opendsec.api.errors import Conflict, NotFound
from opendsec.client.aio import Sandbox
from opendsec.client.transport import CHUNK_BYTES

IN_MEMORY_BYTES = 1 << 20


class TooLarge(Exception):
    """The outputs are more than the agent's disk could hold: sparse files, most likely."""


@dataclass(frozen=True)
class _Output:
    path: str
    directory: bool
    mode: int
    content: IO[bytes]


class Outputs:
    """What was taken out of a sandbox. As a context manager it gives the space back."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._stack = ExitStack()
        self._taken: list[_Output] = []
        self.missing: list[str] = []
        self.total_bytes = 0

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def may_have_links(self) -> bool:
        return any(output.directory for output in self._taken)

    async def take(self, box: Sandbox, path: str) -> None:
        """Read one output. One that is missing, or neither a file nor a directory, is noted. Raises TooLarge."""
        try:
            info = await box.files.stat(path)
            if info.kind not in ("file", "directory"):
                raise NotFound(f"is a {info.kind}")
            content = self._stack.enter_context(_spool())
            chunks = box.files.chunks(path) if info.kind == "file" else box.files.archive(path)
            async with aclosing(chunks):
                async for chunk in chunks:
                    self.total_bytes += len(chunk)
                    if self.total_bytes > self._limit_bytes:
                        raise TooLarge(f"the outputs are larger than {self._limit_bytes} bytes")
                    content.write(chunk)
        except (NotFound, Conflict) as error:  # Conflict: a file where a directory should be on the way
            if error.field in ("id", "sandbox_id"):
                raise
            self.missing.append(path)
            return
        self._taken.append(_Output(path, info.kind == "directory", info.mode, content))

    async def give(self, box: Sandbox) -> None:
        """Put them into a fresh sandbox, in the place of what its image has there."""
        for path in (*self.missing, *(output.path for output in self._taken if output.directory)):
            try:
                await box.files.remove(path, recursive=True)
            except (NotFound, Conflict):
                pass  # nothing there
        for output in self._taken:
            if output.directory:
                await box.files.mkdir(output.path, parents=True)
                await box.files.chmod(output.path, output.mode)
                await box.files.extract(output.path, _chunks(output.content))
            else:
                await box.files.mkdir(posixpath.dirname(output.path), parents=True)
                await box.files.write(output.path, _chunks(output.content), mode=output.mode)
                await box.files.chmod(output.path, output.mode)


def _spool() -> tempfile.SpooledTemporaryFile[bytes]:
    return tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES)


async def _chunks(content: IO[bytes]) -> AsyncGenerator[bytes, None]:
    content.seek(0)
    while chunk := content.read(CHUNK_BYTES):
        yield chunk
