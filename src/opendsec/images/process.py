# SPDX-License-Identifier: Apache-2.0
"""The edge's side of a `job`: start its process, pass on what it tells, and see it end whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import TypeVar

import msgspec

from opendsec.api.errors import Internal, OpenDSecError, from_body
from opendsec.api.images import BuildEvent
from opendsec.images.job import Job, Line
from opendsec.images.waiting import to_the_end

Progress = Callable[[BuildEvent], None]
L = TypeVar("L", bound=Line)

_LINE_BYTES = 16 << 20
_PASSED_ON = ("LANG", "http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")


async def run(
    module: str, job: Job, kind: type[L], held: int, progress: Progress, *, home: str, heard: Callable[[L], None] | None = None
) -> L:
    """Have `module` do the job; the last line that it said of its own. Nothing of it runs when this returns or raises. `held` keeps the
    workspace; `heard` gets all lines besides progress and errors."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-I", "-m", module),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={
            **{name: os.environ[name] for name in (*_PASSED_ON, *_CERTIFICATES) if name in os.environ},
            # Some of what it runs lives in the sbin directories, which a user's PATH need not have.
            "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin:/usr/bin:/bin",
            "TMPDIR": job.work,
            "HOME": home,
        },
        pass_fds=(held,),  # holds the workspace as long as anything of the process lives
        start_new_session=True,  # a terminal's Ctrl-C is for the edge to handle
        limit=_LINE_BYTES,
    )
    tail = asyncio.ensure_future(_tail(process))
    made: L | None = None
    error: OpenDSecError | None = None
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(job))  # by a pipe: a token is on no command line
        process.stdin.close()
        async for raw in process.stdout:
            line = msgspec.json.decode(raw, type=kind)
            if line.event is not None:
                progress(line.event)
            elif line.error is not None:
                error = from_body(line.error)
            else:
                made = line
                if heard is not None:
                    heard(line)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        raise
    finally:
        await to_the_end(_gone(process))
        said = (await to_the_end(tail)).decode(errors="replace").strip()
    if isinstance(error, Internal) and said:
        raise Internal(f"{error.message}: {said}", data=error.data)
    if error is not None:
        raise error
    if made is None or process.returncode != 0:
        raise Internal(f"the work ended with status {process.returncode}: {said or 'it said nothing'}")
    return made


async def _gone(process: Process) -> None:
    """Wait until all of it has ended and its output is empty."""
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
