# SPDX-License-Identifier: Apache-2.0
"""QEMU's control channel: `qemu.qmp` with time-outs, one error type, and events handed on as they come."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from qemu.qmp import EventListener, ExecuteError, QMPClient, QMPError
from qemu.qmp.protocol import Runstate

from opendsec.kernel import procfs

CALL_TIMEOUT_S = 20.0
CONNECT_TIMEOUT_S = 20.0

# The library tells its log of every disconnect, and takes some for bugs of its own; for us that is how a machine ends.
_LOG = logging.getLogger("opendsec.qmp")
_LOG.disabled = True


class QmpError(Exception):
    """QEMU refused a command: `command` and what it said."""

    def __init__(self, command: str, text: str) -> None:
        super().__init__(f"{command}: {text}")
        self.command, self.text = command, text


class QmpGone(QmpError):
    """QEMU does not answer: it is dead, or stuck for longer than the time-out."""


class Qmp:
    """A connection. `on_event(name, data)` is called for each event, in order, until `close`."""

    def __init__(self, client: QMPClient, on_event: Callable[[str, Mapping[str, object]], None]) -> None:
        self._client = client
        self._on_event = on_event
        self._sending = asyncio.Lock()
        self._closing = asyncio.Lock()
        self._listener = EventListener()
        client.register_listener(self._listener)
        self._events = asyncio.ensure_future(self._hand_on())

    @classmethod
    async def connect(cls, path: Path, on_event: Callable[[str, Mapping[str, object]], None]) -> Qmp:
        """Connect to the listening socket, whether QEMU has begun to answer or not. Raises QmpGone."""
        client = QMPClient("qemu")
        client.logger = _LOG
        qmp = cls(client, on_event)
        try:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await client.connect(short_path(directory, path))
            finally:
                os.close(directory)
        except BaseException as error:
            await qmp.close()
            if isinstance(error, QMPError | OSError | TimeoutError | EOFError):
                raise QmpGone("connect", str(error) or "no answer") from error
            raise
        return qmp

    async def _hand_on(self) -> None:
        async for event in self._listener:
            data = event.get("data")
            self._on_event(str(event.get("event")), data if isinstance(data, dict) else {})

    async def call(self, command: str, *, timeout_s: float = CALL_TIMEOUT_S, **arguments: object) -> object:
        """Run a command; its `return`. Underscores of argument names are sent as hyphens. Raises QmpError, QmpGone."""
        return await self.execute(command, {name.replace("_", "-"): value for name, value in arguments.items()}, timeout_s=timeout_s)

    async def execute(
        self, command: str, arguments: Mapping[str, object], *, fd: int | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> object:
        """As `call`, with the names as they are. `fd`: a descriptor that goes with the command; the caller keeps its own."""
        try:
            async with asyncio.timeout(timeout_s):
                if fd is None:
                    answer: object = await self._client.execute(command, dict(arguments))
                    return answer
                async with self._sending:  # QEMU takes it for the next command that wants one
                    self._send_fd(fd)
                    answer = await self._client.execute(command, dict(arguments))
                    return answer
        except ExecuteError as error:
            raise QmpError(command, str(error)) from error
        except TimeoutError:
            raise QmpGone(command, f"no answer within {timeout_s:g} s") from None
        except (QMPError, OSError, EOFError) as error:
            raise QmpGone(command, str(error) or "QEMU is gone") from error

    def _send_fd(self, fd: int) -> None:
        """As the library's `send_fd_scm`, which knows asyncio's own sockets only, not uvloop's."""
        writer = self._client._writer
        assert writer is not None
        with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
            socket.send_fds(connection, [b" "], [fd])

    async def close(self) -> None:
        """May be repeated, and at the same time."""
        self._events.cancel()
        async with self._closing:
            try:
                if self._client.runstate is not Runstate.IDLE:
                    await self._client.disconnect()
            except (QMPError, OSError, EOFError):
                pass  # it was broken before
        await asyncio.gather(self._events, return_exceptions=True)


def short_path(directory: int, path: Path) -> str:
    """The same socket under a name that fits into an address, whatever the directory's length."""
    full = str(path)
    return full if len(os.fsencode(full)) < 100 else f"{procfs.fd_path(directory)}/{path.name}"
