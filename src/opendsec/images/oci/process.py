# SPDX-License-Identifier: Apache-2.0
"""The edge's side of `worker`: start it, pass on what it tells, and see it end whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from opendsec.api.errors import Internal, OpenDSecError, from_body
from opendsec.api.images import BuildEvent
from opendsec.images.oci.jobs import Job, Line

T = TypeVar("T")

_LINE_BYTES = 16 << 20
_PASSED_ON = ("LANG", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")


async def work(job: Job, held: int, progress: Callable[[BuildEvent], None]) -> Line:
    """The line that says what was made; nothing of the worker runs when this returns or raises. `held` keeps the workspace."""
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-m", "opendsec.images.oci.worker"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={
            **environment,
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/bin:/bin",
            "TMPDIR": job.work,
            "HOME": job.work,
        },
        pass_fds=(held,),  # holds the workspace as long as anything of the worker lives
        start_new_session=True,  # a terminal's Ctrl-C is for the edge to handle
        limit=_LINE_BYTES,
    )
    said = asyncio.ensure_future(_tail(process))
    made: Line | None = None
    error: OpenDSecError | None = None
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(job))  # by a pipe: a token is on no command line
        process.stdin.close()
        async for raw in process.stdout:
            line = msgspec.json.decode(raw, type=Line)
            if line.event is not None:
                progress(line.event)
            elif line.error is not None:
                error = from_body(line.error)
            else:
                made = line
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        raise
    finally:
        await to_the_end(_gone(process))
        stderr = await to_the_end(said)
    if isinstance(error, Internal) and stderr:
        raise Internal(f"{error.message}: {stderr.decode(errors='replace').strip()}", data=error.data)
    if error is not None:
        raise error
    if made is None or process.returncode != 0:
        text = stderr.decode(errors="replace").strip() or "it said nothing"
        raise Internal(f"the work ended with status {process.returncode}: {text}")
    return made


async def _gone(process: Process) -> None:
    """Wait until all of the worker has ended and its output is empty."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 20):
        pass
    await process.wait()


async def _tail(process: Process, limit: int = 4000) -> bytes:
    assert process.stderr is not None
    kept = b""
    while block := await process.stderr.read(65536):
        kept = (kept + block)[-limit:]
    return kept


async def to_the_end(awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`, which runs to its end even if we are cancelled meanwhile; the cancellation is raised after that."""
    future = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        raise cancelled
    return future.result()
