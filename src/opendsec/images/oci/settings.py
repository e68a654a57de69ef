# SPDX-License-Identifier: Apache-2.0
"""An image's config of OCI's as ours, and back. Pure."""

from __future__ import annotations

import msgspec

from opendsec.api import spec
from opendsec.api.errors import InvalidRequest
from opendsec.api.images import ImageConfig
from opendsec.images.oci.manifest import Config, ContainerConfig, here

CREATED = "2000-01-01T00:00:00Z"  # of every image pushed: the same image is pushed as the same bytes
_IGNORED = (
    ("volumes", "volumes"),
    ("exposed_ports", "exposed ports"),
    ("healthcheck", "a health check"),
    ("stop_signal", "a stop signal"),
    ("on_build", "build triggers"),
)


def to_ours(config: Config) -> tuple[ImageConfig, list[str]]:
    """What commands inherit, and notes of what was left out. Raises InvalidRequest."""
    given = config.config or ContainerConfig()
    notes: list[str] = []
    env: dict[str, str] = {}
    for item in given.env or ():
        name, equals, value = item.partition("=")
        if name and equals:
            env[name] = value
        else:
            notes.append(f"left out {item[:80]!r} of the environment: no NAME=VALUE")
    workdir = given.working_dir or "/"
    if not workdir.startswith("/"):
        workdir = "/" + workdir  # relative to the root, as runtimes take it
    ours = ImageConfig(
        env=env, user=given.user or "root", workdir=workdir, entrypoint=tuple(given.entrypoint or ()), cmd=tuple(given.cmd or ())
    )
    for field, what in _IGNORED:
        value = getattr(given, field)
        if isinstance(value, dict):
            if value:
                notes.append(f"ignored {what}: {', '.join(sorted(value))[:500]}")
        elif isinstance(value, msgspec.Raw):
            if bytes(value) not in (b"null", b"{}"):
                notes.append(f"ignored {what}")
        elif value:
            notes.append(f"ignored {what}" + (f": {value}" if isinstance(value, str) else ""))
    _check(ours)
    return ours, notes


def _check(config: ImageConfig) -> None:
    try:
        spec.check_env(config.env, "Env")
        spec.check_user(config.user, "User")
        spec.check_path(config.workdir, "WorkingDir")
        for argument in (*config.entrypoint, *config.cmd):
            spec.check_text(argument, "Entrypoint and Cmd", limit=131_000)
    except InvalidRequest as error:
        raise InvalidRequest(f"the image's config cannot be used: {error.field}: {error.message}", field="reference") from None


class _History(msgspec.Struct, kw_only=True):
    created: str
    created_by: str


class _RootFs(msgspec.Struct, kw_only=True):
    type: str
    diff_ids: list[str]


class _Container(msgspec.Struct, kw_only=True, rename="pascal"):
    user: str
    env: list[str]
    entrypoint: list[str]
    cmd: list[str]
    working_dir: str


class _Image(msgspec.Struct, kw_only=True):
    created: str
    architecture: str
    os: str
    config: _Container
    rootfs: _RootFs
    history: list[_History]


def from_ours(config: ImageConfig, diff_ids: list[str], digests: list[str]) -> bytes:
    """The config of an image to be pushed; `digests` are our own layers', for its history."""
    platform = here()
    image = _Image(
        created=CREATED,
        architecture=platform.architecture,
        os=platform.os,
        config=_Container(
            user="" if config.user == "root" else config.user,  # an image may be without /etc/passwd
            env=[f"{name}={value}" for name, value in config.env.items()],
            entrypoint=list(config.entrypoint),
            cmd=list(config.cmd),
            working_dir=config.workdir,
        ),
        rootfs=_RootFs(type="layers", diff_ids=diff_ids),
        history=[_History(created=CREATED, created_by=f"opendsec layer {digest}") for digest in digests],
    )
    return msgspec.json.encode(image)
