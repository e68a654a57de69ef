# SPDX-License-Identifier: Apache-2.0
"""The spawner's program: a copy of this interpreter that nobody but the host's root may read or execute.

Until a command is executed it is a fork of the spawner, and so /proc/self/exe is the spawner's program. A sandbox may make scripts and
links that name that path. Were it the interpreter's own file, they would execute, and then read, a file of the host's, and learn its path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opendsec.kernel import procfs
from opendsec.kernel.fds import sealed_memfd


@contextmanager
def private_copy() -> Iterator[int | None]:
    """A descriptor to execute by its /proc/self/fd path; None where a copy does not run: if the interpreter looks for its libraries beside
    itself, or the host forbids to execute memory files."""
    writable = sealed_memfd("python", Path(sys.executable).read_bytes(), executable=True)
    try:
        os.fchmod(writable, 0o700)
        copy = os.open(procfs.fd_path(writable), os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(writable)  # what is open for writing cannot be executed
    try:
        yield copy if _runs(Path(sys.executable), copy) else None
    finally:
        os.close(copy)


_tried: dict[Path, bool] = {}


def _runs(program: Path, copy: int) -> bool:
    """Tried once for each interpreter."""
    if program not in _tried:
        try:
            done = subprocess.run(
                [program, "-SI", "-c", ""],
                executable=procfs.fd_path(copy),
                pass_fds=[copy],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                check=False,
            )
            _tried[program] = done.returncode == 0
        except OSError:
            _tried[program] = False
    return _tried[program]
