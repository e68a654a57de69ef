# SPDX-License-Identifier: Apache-2.0
"""Where images come from and go to, and the checks of the requests that say so. Pure: both ends of the wire use them.

    docker://HOST[:PORT]/NAME[:TAG | @sha256:…]    a registry; the host is never left out, so that nobody pulls from one by accident
    oci:/PATH[:TAG]                                an OCI layout on the edge's machine
    docker-archive:/PATH[:NAME[:TAG]]              a tar file as `docker save` writes it, on the edge's machine
    store:STORE/NAME                               a remote store of the edge's operator

Everything here is tenant input. Messages quote what was given, but never a token.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from opendsec.api.errors import Denied, InvalidRequest
from opendsec.api.ids import check_action_id
from opendsec.api.images import DockerfileSource, PackRequest, PullRequest, PushRequest, TraceRequest, WarmRequest
from opendsec.api.spec import CPU, MEMORY_BYTES, check_env, check_number, check_path, check_text
from opendsec.api.units import format_bytes, parse_bytes

Transport = Literal["docker", "oci", "docker-archive", "store"]

MAX_PATTERNS = 256
MAX_DOCKERFILE_BYTES = 1 << 20
TIMEOUT_S = (0.001, 86_400.0)
GRACE_S = (0.0, 366 * 86_400.0)

_IMAGE = re.compile(r"[a-z0-9](?:[a-z0-9._/-]{0,126}[a-z0-9])?(?::[A-Za-z0-9._-]{1,64})?")
_LAYER_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+/-]{0,126})")
_VERSION = re.compile(r"[A-Za-z0-9._+-]{1,64}")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_COMPONENT}(?:/{_COMPONENT})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_STORE = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62})")
_PLATFORM = re.compile(r"linux/[a-z0-9_]{1,32}(?:/[a-z0-9_]{1,32})?")
_PACKAGE = re.compile(r"[A-Za-z0-9@](?:[A-Za-z0-9._+@/-]{0,213})")
_UNFIT = re.compile(r"[^a-z0-9._/-]+")

_FORMS = "must look like 'docker://HOST/NAME:TAG', 'oci:/PATH:TAG', 'docker-archive:/PATH:NAME:TAG' or 'store:STORE/NAME'"


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A reference, taken apart. What a transport does not have is empty."""

    transport: Transport
    place: str  # a registry's host and port, an absolute path, or the name of a store
    name: str = ""  # of the repository or the image; of a docker-archive as it stands there, host and all
    tag: str = ""
    digest: str = ""

    @property
    def on_this_machine(self) -> bool:
        """Whether it names a path of the edge's machine: such a one is accepted only over the unix socket."""
        return self.transport in ("oci", "docker-archive")

    @property
    def image_name(self) -> str:
        """What the image is called here unless the caller says otherwise: its name there without the host, with its tag."""
        name = self.name
        if self.transport in ("oci", "docker-archive") and not name:
            name = self.place.rstrip("/").rpartition("/")[2].removesuffix(".tar")
        if self.transport == "docker-archive":
            host, slash, rest = name.partition("/")
            name = rest if slash and ("." in host or ":" in host or host == "localhost") else name
        name, _, tag = name.partition(":") if self.transport == "store" else (name, "", self.tag)
        name = _UNFIT.sub("-", name.lower()).strip("._/-")[:128].rstrip("._/-") or "image"
        return f"{name}:{tag[:64]}" if tag else name

    def __str__(self) -> str:
        match self.transport:
            case "docker":
                end = f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else ""
                return f"docker://{self.place}/{self.name}{end}"
            case "store":
                return f"store:{self.place}/{self.name}"
            case "oci":
                return f"oci:{self.place}" + (f":{self.tag}" if self.tag else "")
            case "docker-archive":
                name = self.name + (f":{self.tag}" if self.tag else "")
                return f"docker-archive:{self.place}" + (f":{name}" if name else "")


def parse_reference(text: str, field: str = "reference") -> Reference:
    """The parts of a reference. Raises InvalidRequest naming `field`."""
    check_text(text, field, limit=8192)
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise InvalidRequest("must not contain control characters", field=field)
    if text.startswith("docker://"):
        return _registry(text.removeprefix("docker://"), text, field)
    transport, colon, rest = text.partition(":")
    match transport if colon else "":
        case "oci":
            path, tag = _path(rest, text, field)
            if tag and not _TAG.fullmatch(tag):
                raise _malformed(text, field)
            return Reference(transport="oci", place=path, tag=tag)
        case "docker-archive":
            path, name = _path(rest, text, field)
            name, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "")
            host, slash, repository = name.partition("/")
            if (
                name and not _REPOSITORY.fullmatch(name) and not (slash and _HOST.fullmatch(host) and _REPOSITORY.fullmatch(repository))
            ) or (tag and not _TAG.fullmatch(tag)):
                raise _malformed(text, field)
            return Reference(transport="docker-archive", place=path, name=name, tag=tag)
        case "store":
            store, _, name = rest.partition("/")
            if not _STORE.fullmatch(store) or not _IMAGE.fullmatch(name):
                raise _malformed(text, field)
            return Reference(transport="store", place=store, name=name)
    raise _malformed(text, field)


def _registry(rest: str, text: str, field: str) -> Reference:
    host, _, path = rest.partition("/")
    path, at, digest = path.partition("@")
    name, colon, tag = path.partition(":")
    if not _HOST.fullmatch(host) or not (set(host) & set(".:") or host == "localhost"):
        raise InvalidRequest(f"must name the registry's host, with a dot or a port: docker://HOST/NAME:TAG; got {text[:80]!r}", field=field)
    if not _REPOSITORY.fullmatch(name) or len(name) > 255 or (colon and not _TAG.fullmatch(tag)) or (at and not _DIGEST.fullmatch(digest)):
        raise _malformed(text, field)
    if colon and at:
        raise InvalidRequest("must have a tag or a digest, not both", field=field)
    return Reference(transport="docker", place=host, name=name, tag=tag, digest=digest)


def _path(rest: str, text: str, field: str) -> tuple[str, str]:
    """A path and what follows its colon. A path with a colon cannot be said, as in every program that takes these forms."""
    path, _, after = rest.partition(":")
    if not path.startswith("/") or path.rstrip("/") == "":
        raise InvalidRequest(f"must hold an absolute path; got {text[:80]!r}", field=field)
    if ".." in path.split("/") or any(len(part.encode("utf-8", "surrogateescape")) > 255 for part in path.split("/")) or len(path) > 4095:
        raise InvalidRequest("the path must not contain '..' or parts of more than 255 bytes", field=field)
    return path, after


def _malformed(text: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{_FORMS}; got {text[:80]!r}", field=field)


# --- requests ---------------------------------------------------------------------------------------------------------


def check_image_name(name: str, field: str) -> str:
    """`name` if an image may be called so. Raises InvalidRequest."""
    if not _IMAGE.fullmatch(name):
        raise InvalidRequest(f"must be a name such as 'debian' or 'python:3.12' in lower case; got {name[:80]!r}", field=field)
    return name


def check_content_name(name: str, field: str) -> str:
    """`name` if it may be that of an image, of a layer (`kind:name@version`), or a digest. Raises InvalidRequest."""
    kind, colon, rest = name.rpartition(":")
    bare, at, version = rest.partition("@")
    layer = kind in ("base", "workspace", "toolkit") and _LAYER_NAME.fullmatch(bare) and (not at or _VERSION.fullmatch(version))
    if not (layer and colon) and not _IMAGE.fullmatch(name) and not _DIGEST.fullmatch(name):
        raise InvalidRequest(
            f"must be the name of an image, of a layer ('workspace:name@version') or a digest; got {name[:80]!r}", field=field
        )
    return name


def check_pull(request: PullRequest, *, local: bool) -> Reference:
    """What is to be pulled. `local`: the request came over the unix socket. Raises InvalidRequest, Denied."""
    reference = _reference(request.reference, request.token, local=local)
    if request.name:
        check_image_name(request.name, "name")
    if request.platform and not _PLATFORM.fullmatch(request.platform):
        raise InvalidRequest(f"must look like 'linux/amd64' or 'linux/arm/v7'; got {request.platform[:80]!r}", field="platform")
    return reference


def check_push(request: PushRequest, *, local: bool) -> Reference:
    """Where an image is to be pushed. Raises InvalidRequest, Denied."""
    check_image_name(request.name, "name")
    reference = _reference(request.reference, request.token, local=local)
    if reference.digest:
        raise InvalidRequest("an image is pushed to a tag; its digest follows from its content", field="reference")
    return reference


def _reference(text: str, token: str, *, local: bool) -> Reference:
    reference = parse_reference(text)
    if reference.on_this_machine and not local:
        raise Denied("a path of the edge's machine may be named only over the unix socket", field="reference")
    if token:
        if reference.transport != "docker":
            raise InvalidRequest("only a registry takes a token", field="token")
        if len(token) > 16_384 or not token.isprintable():  # never quoted
            raise InvalidRequest("must be at most 16384 printable characters", field="token")
    return reference


def pack_names(request: PackRequest) -> tuple[str, str]:
    """Name and version of the layer that a pack makes; the image is called `NAME:VERSION`. All other fields are checked as well.
    Raises InvalidRequest."""
    name, at, version = request.name.partition("@")
    if not at or not _LAYER_NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        raise InvalidRequest(f"must look like 'name@version'; got {request.name[:80]!r}", field="name")
    if not _IMAGE.fullmatch(f"{name}:{version}"):
        raise InvalidRequest(f"{name}:{version} must be a possible name of an image: lower case, versions without '+'", field="name")
    if request.kind == "base":
        raise InvalidRequest("must be workspace or toolkit: what is packed lies on top of a base", field="kind")
    for field, patterns in (("scrub_paths", request.scrub_paths), ("keep_paths", request.keep_paths)):
        if len(patterns) > MAX_PATTERNS:
            raise InvalidRequest(f"at most {MAX_PATTERNS} patterns", field=field)
        for index, pattern in enumerate(patterns):
            where = f"{field}[{index}]"
            check_text(pattern, where, limit=4095)
            if not pattern.startswith("/") or not pattern.strip("/") or ".." in pattern.split("/"):
                raise InvalidRequest(f"must be a pattern of an absolute path without '..'; got {pattern[:80]!r}", field=where)
    check_packages(request.packages)
    if request.action_id is not None:
        check_action_id(request.action_id)
    return name, version


def check_packages(packages: tuple[str, ...]) -> tuple[str, ...]:
    """Names of packages that a linter looks for. Raises InvalidRequest."""
    if len(packages) > MAX_PATTERNS:
        raise InvalidRequest(f"at most {MAX_PATTERNS} packages", field="packages")
    for index, package in enumerate(packages):
        if not _PACKAGE.fullmatch(package):
            raise InvalidRequest(f"must be the name of a package; got {package[:80]!r}", field=f"packages[{index}]")
    return packages


def check_dockerfile(source: DockerfileSource, *, local: bool) -> None:
    """All of a Dockerfile source but the Dockerfile's text. Raises InvalidRequest, Denied."""
    check_path(source.context, "source.context")
    if ".." in source.context.split("/"):
        raise InvalidRequest("must not contain '..'", field="source.context")
    if not local:
        raise Denied("a directory of the edge's machine may be a context only over the unix socket", field="source.context")
    check_text(source.dockerfile, "source.dockerfile", limit=MAX_DOCKERFILE_BYTES)
    check_text(source.target, "source.target", limit=255)
    check_env(source.args, "source.args")
    size = parse_bytes(source.memory, field="source.memory")
    if not MEMORY_BYTES[0] <= size <= MEMORY_BYTES[1]:
        raise InvalidRequest(f"must be from {format_bytes(MEMORY_BYTES[0])} to {format_bytes(MEMORY_BYTES[1])}", field="source.memory")
    check_number(source.cpu, "source.cpu", CPU)
    check_number(source.timeout_s, "source.timeout_s", TIMEOUT_S)


def check_warm(request: WarmRequest) -> None:
    """Raises InvalidRequest."""
    check_image_name(request.name, "name")


def check_trace(request: TraceRequest) -> None:
    """Raises InvalidRequest."""
    check_image_name(request.name, "name")
    if not request.argv or not request.argv[0]:
        raise InvalidRequest("must be a program and its arguments", field="argv")
    for index, argument in enumerate(request.argv):
        check_text(argument, f"argv[{index}]", limit=131_000)
    check_number(request.timeout_s, "timeout_s", TIMEOUT_S)
