# SPDX-License-Identifier: Apache-2.0
"""`dsec image build-disk` and `dsec image import-disk`: images for VMs."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from opendsec.client.cli import common as c

if TYPE_CHECKING:
    from opendsec.api.images import DebianDiskSource, DiskSource


class Format(StrEnum):
    raw = "raw"
    qcow2 = "qcow2"
    vmdk = "vmdk"
    vhdx = "vhdx"
    vpc = "vpc"
    vdi = "vdi"


def build_disk(
    name: Annotated[str, typer.Argument(help="Name of the image.")],
    suite: Annotated[str, typer.Option("--suite", help="Debian suite; default: the machine's own.")] = "",
    package: Annotated[list[str] | None, typer.Option("--package", "-p", help="Debian package; repeat for more.")] = None,
    desktop: Annotated[bool, typer.Option("--desktop", help="With an X server, a window manager and a text editor.")] = False,
    size: Annotated[str, typer.Option("--size", help="Of the disk, such as 4GiB; default: what it needs. A sandbox's may be larger.")] = "",
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Make a disk that boots Debian, with the agent in it, by this machine's apt sources."""
    from opendsec.api.errors import InvalidRequest
    from opendsec.api.images import DebianDiskSource
    from opendsec.api.units import parse_bytes

    size_bytes = 0
    if size:
        try:
            size_bytes = parse_bytes(size, field="size")
        except InvalidRequest as error:
            c.refuse(error.message, "size")
    source = DebianDiskSource(suite=suite, packages=tuple(package or ()), desktop=desktop, size_bytes=size_bytes)
    _build(name, source, json=json, address=address)


def import_disk(
    name: Annotated[str, typer.Argument(help="Name of the image.")],
    file: Annotated[str, typer.Argument(help="Disk image, a file of the edge's machine.")],
    format: Annotated[Format | None, typer.Option("--format", help="Of the file; default: what its name ends with.")] = None,
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Bring a disk image here, as an image for VMs. It has to be whole in itself."""
    import os

    from opendsec.api.images import DiskSource

    ending = {"img": "raw", "iso": "raw", "vhd": "vpc"}.get(file.rpartition(".")[2].lower(), file.rpartition(".")[2].lower())
    if format is None:
        if ending not in set(Format):
            c.refuse(f"say which it is, with --format: {', '.join(Format)}", "format")
        format = Format(ending)
    _build(name, DiskSource(path=os.path.abspath(file), format=format.value), json=json, address=address)


def _build(name: str, source: DebianDiskSource | DiskSource, *, json: bool, address: str | None) -> None:
    from opendsec.api.images import ImageInfo, LayerInfo
    from opendsec.api.units import format_bytes
    from opendsec.client.cli.progress import work

    async def building() -> ImageInfo | LayerInfo:
        async with c.connect(address) as client:
            with work(f"building {name}", quiet=json) as tell:
                return await client.images.build(name, source, progress=tell)

    made = c.execute(building(), json=json)
    if json:
        c.print_json(made)
    else:
        assert isinstance(made, ImageInfo)
        print(f"image {made.name}: {format_bytes(made.size_bytes)}")
