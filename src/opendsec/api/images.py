# SPDX-License-Identifier: Apache-2.0
"""Images and layers as the edge shows them, and how to ask for one to be built."""

from __future__ import annotations

from typing import Literal

import msgspec

LayerKind = Literal["base", "workspace", "toolkit"]


class ImageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What commands inherit: environment, user, working directory, entry point and its default arguments."""

    env: dict[str, str] = {}
    user: str = "root"
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()


class LayerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A layer: an immutable tree addressed by its digest."""

    digest: str  # sha256:<64 hex digits>
    kind: LayerKind
    names: tuple[str, ...] = ()  # `kind:name@version`
    meta_bytes: int
    data_bytes: int
    created_at: float


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An image: ordered layers and a config."""

    name: str
    layers: tuple[str, ...]  # digests, lowest first
    config: ImageConfig
    size_bytes: int
    created_at: float


class ImageList(msgspec.Struct, frozen=True):
    images: tuple[ImageInfo, ...]
    layers: tuple[LayerInfo, ...]


class DirectorySource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="directory"):
    """A directory of the edge's machine. Accepted only over the unix socket."""

    path: str
    prefix: str = "/"  # where in the sandbox its content appears
    owner: Literal["root", "keep"] = "root"


class DebianSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="debian"):
    """A Debian suite, by mmdebstrap with the machine's own apt sources."""

    suite: str = ""  # "" = the machine's own
    packages: tuple[str, ...] = ()
    variant: Literal["essential", "minbase", "apt"] = "minbase"


class DebianDiskSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="debian-disk"):
    """A whole disk that boots a Debian suite, for VMs, with the agent as a service; made as `DebianSource`. `size_bytes` 0: as large as it
    has to be. With `desktop` it has a screen's worth of software: an X server, a window manager, a text editor."""

    suite: str = ""
    packages: tuple[str, ...] = ()
    desktop: bool = False
    size_bytes: int = 0


class DiskSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="disk"):
    """A disk image, for VMs: a file of the edge's machine. Accepted only over the unix socket. It has to be whole in itself."""

    path: str
    format: Literal["raw", "qcow2", "vmdk", "vhdx", "vpc", "vdi"]


class DockerfileSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="dockerfile"):
    """A Dockerfile and its context. The context is a directory of the edge's machine: accepted only over the unix socket.

    Understood: FROM (images of this edge, `scratch`, several stages), RUN, COPY (with --from and --chown), ADD of local files, ENV, ARG,
    WORKDIR, USER, ENTRYPOINT, CMD. Anything else is refused, never skipped. RUN steps are commands in a sandbox of this edge.
    """

    context: str
    dockerfile: str = ""  # its text; "" = the file `Dockerfile` of the context
    target: str = ""  # the stage to build; "" = the last
    args: dict[str, str] = {}
    no_cache: bool = False
    memory: int | str = "1GiB"  # of each RUN step's sandbox
    cpu: float = 1.0
    timeout_s: float = 3600.0


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Build one layer. `kind` "base": an image `name` is made of it. Otherwise the layer is named `kind:name@version`."""

    name: str
    source: DirectorySource | DebianSource | DockerfileSource | DebianDiskSource | DiskSource
    kind: LayerKind = "base"
    version: str = "1"
    config: ImageConfig = ImageConfig()
    exclude: tuple[str, ...] = ()  # shell patterns on paths relative to the source


class ComposeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name an ordered list of existing layers as an image."""

    name: str
    base: str  # an image
    layers: tuple[str, ...]
    config: ImageConfig | None = None  # None = the base's


class BuildEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a build's progress; the last is `done` or `failed`."""

    kind: Literal["step", "progress", "log", "done", "failed"]
    message: str = ""
    done: int = 0
    total: int = 0
    image: ImageInfo | None = None
    layer: LayerInfo | None = None
    done_bytes: int = 0
    total_bytes: int = 0  # 0 = not known
    what: str = ""  # what the counts are of: a layer, a file


class PullRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bring an image here. `reference` says from where:

    docker://HOST/NAME:TAG, docker://HOST/NAME@sha256:…     a registry
    oci:PATH[:TAG], docker-archive:PATH[:NAME:TAG]          on the edge's machine; accepted only over the unix socket
    store:STORE/NAME                                        an image pushed to a store that the edge's operator has configured
    """

    reference: str
    name: str = ""  # what to call it here; "" = as it is called there, without the host
    platform: str = ""  # `linux/amd64`; "" = this machine's
    tls_verify: bool = True
    lazy: bool = True  # of a store: load content when it is first read
    token: str = ""  # `user:password` or a bearer token for the registry; never logged


class PushRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Send an image to a registry, an OCI layout or a docker-archive (as OCI layers), or to a store (as our layers)."""

    name: str
    reference: str  # forms as of PullRequest
    tls_verify: bool = True
    token: str = ""


class PackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Make a sandbox's writable layer a layer of its own, and an image of it and what is below. The sandbox goes on running."""

    name: str  # `NAME@VERSION` of the layer; the image is called `NAME:VERSION`
    kind: LayerKind = "workspace"
    scrub: bool = True  # leave out histories, caches, credentials, /tmp and what tools leave behind
    scrub_paths: tuple[str, ...] = ()  # more shell patterns to leave out, absolute
    keep_paths: tuple[str, ...] = ()  # patterns that are kept, whatever the scrub list says
    packages: tuple[str, ...] = ()  # the packages whose source would be an answer: looked for in caches
    fail_on_warnings: bool = False
    action_id: str | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a linter found or a scrub removed."""

    rule: str  # `git.newer_objects`, `cache.pip`, `scrub.history`, …
    path: str
    message: str
    bytes: int = 0


class PackResult(msgspec.Struct, frozen=True, kw_only=True):
    image: ImageInfo
    layer: LayerInfo
    scrubbed: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    frozen_ms: float = 0.0  # how long the sandbox's processes stood still


class LintReport(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    findings: tuple[Finding, ...]


class LayerDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A layer as it lies here: how much of its data is local, who uses it."""

    layer: LayerInfo
    local_bytes: int  # of its data, here now
    complete: bool
    origin: str = ""  # the store it loads from, without credentials
    chunks: int = 0
    chunk_bytes: int = 0
    traces: int = 0  # access traces kept with it


class ImageDetail(msgspec.Struct, frozen=True, kw_only=True):
    image: ImageInfo
    layers: tuple[LayerDetail, ...]  # lowest first
    notes: tuple[str, ...] = ()  # what was left out when it came in: volumes, device nodes
    source: str = ""  # where it came from


class DiffEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One path that differs between two images or layers."""

    change: Literal["added", "removed", "changed"]
    path: str
    kind: Literal["file", "dir", "link", "other"]
    size_bytes: int = 0  # after, or before if it was removed
    what: str = ""  # of a change: content, mode, owner, target, xattrs


class DiffReport(msgspec.Struct, frozen=True, kw_only=True):
    entries: tuple[DiffEntry, ...]
    truncated: bool = False


class WarmRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Load an image's content now: all of it, or what its trace says."""

    name: str
    trace: bool = False


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Record which content a command touches in a sandbox made of an image, in order, and keep that with the image: the next cold
    start loads it in that order."""

    name: str
    argv: tuple[str, ...] = ()
    timeout_s: float = 600.0


class TraceInfo(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    chunks: int
    bytes: int
    exit_code: int | None = None


class StoreInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A remote store as configured, without credentials."""

    name: str
    url: str
    writable: bool


class StoreList(msgspec.Struct, frozen=True):
    stores: tuple[StoreInfo, ...]


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What a garbage collection removed, or would remove."""

    digests: tuple[str, ...]
    freed_bytes: int
    dry_run: bool
