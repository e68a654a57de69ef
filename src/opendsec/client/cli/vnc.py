# SPDX-License-Identifier: Apache-2.0
"""`dsec vnc`: a machine's screen for a VNC viewer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from opendsec.client.cli import common as c

if TYPE_CHECKING:
    import asyncio

    from opendsec.client.screen import Screen

PIECE_BYTES = 64 << 10


def vnc(
    sandbox: c.SandboxId,
    socket: Annotated[str | None, typer.Option("--socket", help="Listen on this unix socket, mode 0600, in the place of a port.")] = None,
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65_535, help="Of 127.0.0.1; 0: a free one.")] = 0,
    address: c.Address = None,
) -> None:
    """Listen for a VNC viewer, and pass what it says through the edge to the machine, until interrupted.

    Every local user can connect to a port. A unix socket is for you alone.
    """
    import asyncio
    import contextlib
    import os
    import sys

    async def work() -> None:
        async with c.connect(address) as client:
            screen = client.sandbox(sandbox).screen
            await screen.size()  # whether there is one

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await passed(screen, reader, writer)

            if socket is not None:
                mask = os.umask(0o177)
                try:
                    server = await asyncio.start_unix_server(serve, socket)
                finally:
                    os.umask(mask)
                print(socket)
            else:
                server = await asyncio.start_server(serve, "127.0.0.1", port)
                print(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            sys.stdout.flush()
            try:
                async with server:
                    await server.serve_forever()
            finally:
                if socket is not None:
                    with contextlib.suppress(OSError):
                        os.unlink(socket)

    c.execute(work())


async def passed(screen: Screen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One viewer's connection, until either side ends it."""
    import contextlib
    import sys

    from opendsec.api.errors import OpenDSecError

    async def said() -> AsyncIterator[bytes]:
        while data := await reader.read(PIECE_BYTES):
            yield data

    try:
        async with contextlib.aclosing(screen.vnc(said())) as heard:
            async for data in heard:
                writer.write(data)
                await writer.drain()
    except OpenDSecError as error:
        print(f"dsec: {error}", file=sys.stderr)
    except ConnectionError:
        pass
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
