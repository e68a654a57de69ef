# SPDX-License-Identifier: Apache-2.0
"""`dsec image build`: a layer from a directory or a Debian suite, an image from a Dockerfile."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from opendsec.client.cli import common as c


class Kind(StrEnum):
    base = "base"
    workspace = "workspace"
    toolkit = "toolkit"


class Variant(StrEnum):
    essential = "essential"
    minbase = "minbase"
    apt = "apt"


def build(
    name: Annotated[str, typer.Argument(help="Name of the image, or of the layer.")],
    directory: Annotated[str | None, typer.Option("--from", "-f", metavar="DIR", help="Take this directory of the edge's machine.")] = None,
    context: Annotated[
        str | None, typer.Option("--dockerfile", "-d", metavar="DIR", help="Build the Dockerfile of this directory, its context.")
    ] = None,
    file: Annotated[str | None, typer.Option("--file", metavar="FILE", help="The Dockerfile, if it lies elsewhere.")] = None,
    target: Annotated[str, typer.Option("--target", help="Stage of the Dockerfile to build; default: the last.")] = "",
    build_arg: Annotated[list[str] | None, typer.Option("--build-arg", help="NAME=VALUE for an ARG; repeat for more.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Run every step of the Dockerfile again.")] = False,
    debian: Annotated[bool, typer.Option("--debian", help="Install Debian with mmdebstrap and this machine's apt sources.")] = False,
    suite: Annotated[str, typer.Option("--suite", help="Debian suite; default: the machine's own.")] = "",
    package: Annotated[list[str] | None, typer.Option("--package", "-p", help="Debian package; repeat for more.")] = None,
    variant: Annotated[Variant, typer.Option("--variant", help="How much of Debian.")] = Variant.minbase,
    kind: Annotated[Kind, typer.Option("--kind", "-k", help="base makes an image; the others a layer to put on one.")] = Kind.base,
    version: Annotated[str, typer.Option("--version", help="Of a layer that is no base.")] = "1",
    prefix: Annotated[str, typer.Option("--prefix", help="Where in the sandbox the directory appears.")] = "/",
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", "-x", help="Shell pattern of paths to leave out; repeat for more.")
    ] = None,
    keep_owners: Annotated[bool, typer.Option("--keep-owners", help="Keep owners instead of making everything root's.")] = False,
    env: c.Env = None,
    user: Annotated[str, typer.Option("--user", "-u", help="Default user of the image.")] = "root",
    workdir: Annotated[str, typer.Option("--workdir", "-w", help="Default directory of the image.")] = "/",
    json: c.Json = False,
    address: c.Address = None,
) -> None:
    """Build a layer and give it a name."""
    import os

    from opendsec.api.images import DebianSource, DirectorySource, DockerfileSource, ImageConfig, ImageInfo, LayerInfo
    from opendsec.api.units import format_bytes
    from opendsec.client.cli.progress import work

    async def building() -> ImageInfo | LayerInfo:
        if (directory is not None) + debian + (context is not None) != 1:
            c.refuse("give exactly one of --from, --debian and --dockerfile", "source")
        source: DirectorySource | DebianSource | DockerfileSource = DebianSource(
            suite=suite, packages=tuple(package or ()), variant=variant.value
        )
        if directory is not None:
            source = DirectorySource(path=os.path.abspath(directory), prefix=prefix, owner="keep" if keep_owners else "root")
        if context is not None:
            source = DockerfileSource(
                context=os.path.abspath(context),
                dockerfile=_text(file) if file is not None else "",
                target=target,
                args=c.pairs(build_arg, "args"),
                no_cache=no_cache,
            )
        config = ImageConfig(env=c.environment(env), user=user, workdir=workdir)
        async with c.connect(address) as client:
            with work(f"building {name}", quiet=json) as tell:
                return await client.images.build(
                    name,
                    source,
                    kind=kind.value,
                    version=version,
                    config=config,
                    exclude=exclude or (),
                    progress=tell,
                )

    made = c.execute(building(), json=json)
    if json:
        c.print_json(made)
    elif isinstance(made, ImageInfo):
        print(f"image {made.name}: {c.layers_of(len(made.layers))}, {format_bytes(made.size_bytes)}")
    else:
        print(f"layer {', '.join(made.names)}: {made.digest}, {format_bytes(made.meta_bytes + made.data_bytes)}")


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        c.refuse(f"cannot be read: {error}", "file")
