# SPDX-License-Identifier: Apache-2.0
"""`dsec cp`: files between this machine and a sandbox."""

from __future__ import annotations

from typing import Annotated

import typer

from opendsec.client.cli import common as c

SHOWN_LEFT_OUT = 10


def cp(
    source: Annotated[str, typer.Argument(help="A path here, or SANDBOX:/path.")],
    target: Annotated[str, typer.Argument(help="A path here, or SANDBOX:/path.")],
    user: c.User = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Copy a file or a directory. Into an existing directory it goes by its own name, otherwise it becomes the target.

    Of a sandbox nothing is taken over that could lead out of the copy: symlinks only if they stay within it.
    """
    import os
    import sys
    from pathlib import Path

    from opendsec.api.errors import NotFound
    from opendsec.api.units import format_bytes
    from opendsec.client.cli.progress import bytes_bar

    def split(word: str) -> tuple[str, str]:
        """Sandbox and path; a path of this machine has no sandbox. `./a:b` is a path as well."""
        box_id, colon, path = word.partition(":")
        return (box_id, path) if colon and "/" not in box_id and path.startswith("/") else ("", word)

    async def work() -> int:
        (from_box, from_path), (to_box, to_path) = split(source), split(target)
        if bool(from_box) == bool(to_box):
            c.refuse("exactly one of both must be SANDBOX:/path", "target")
        async with c.connect(address) as client:
            if to_box:
                files = client.sandbox(to_box).files
                name = os.path.basename(os.path.abspath(from_path))
                try:
                    inside = (await files.stat(to_path)).kind == "directory"
                except NotFound as error:
                    if error.field not in ("path", None):
                        raise
                    inside = to_path.endswith("/")
                where = f"{to_path.rstrip('/')}/{name}" if inside else to_path
                with bytes_bar(f"to {to_box}", _size(Path(from_path)), quiet=quiet or json) as advance:
                    return await files.upload(from_path, where, user=user, progress=advance, left_out=left_out.append)
            files = client.sandbox(from_box).files
            local = Path(to_path)
            if local.is_dir() or to_path.endswith("/"):
                local = local / (os.path.basename(from_path.rstrip("/")) or "root")
            info = await files.stat(from_path)
            total = info.size_bytes if info.kind == "file" else None
            with bytes_bar(f"from {from_box}", total, quiet=quiet or json) as advance:
                return await files.download(from_path, local, progress=advance, left_out=left_out.append)

    left_out: list[str] = []
    copied = c.execute(work(), json=json)
    if json:
        c.print_json({"bytes": copied, "left_out": left_out})
        return
    if left_out:
        shown = ", ".join(left_out[:SHOWN_LEFT_OUT]) + (", …" if len(left_out) > SHOWN_LEFT_OUT else "")
        why = "symlinks that lead out of the copy, devices and the like" if split(source)[0] else "neither files, directories nor symlinks"
        print(f"dsec: {len(left_out)} left out ({why}): {shown}", file=sys.stderr)
    if not quiet:
        print(f"{format_bytes(copied)} copied")


def _size(path: object) -> int | None:
    from pathlib import Path

    assert isinstance(path, Path)
    return path.stat().st_size if path.is_file() else None
