# SPDX-License-Identifier: Apache-2.0
"""What a caller asks for: one inert struct a backend, checked by a pure function.

Every field here is tenant input. `check()` turns it into `Checked` (sizes as bytes, all bounds verified) or raises
InvalidRequest naming the field and the rule; nothing is created before that.
"""

from __future__ import annotations

import math
import re
from typing import ClassVar

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.api.units import format_bytes, parse_bytes

MIB = 1 << 20
MEMORY_BYTES = (4 * MIB, 1 << 44)
DISK_BYTES = (MIB, 1 << 44)
INODES = (64, 1 << 32)
CPU = (0.01, 1024.0)
CPU_WEIGHT = (1, 10_000)
PIDS = (2, 1 << 22)
OPEN_FILES = (16, 1 << 20)
TTL_S = (0.001, 366 * 86_400.0)
BATCH = (1, 32_000)
MAX_ENV_BYTES = 1 << 20
MAX_LAYERS = 64
VM_MEMORY_BYTES = (96 * MIB, 1 << 44)  # less does not boot
VM_CPU = (0.01, 64.0)
VM_DISK_BYTES = (16 * MIB, 1 << 44)
SCREEN_PIXELS = ((320, 3840), (200, 2160))  # width, height
PROFILES = ("linux-uefi", "linux-bios", "other-uefi", "other-bios", "android-x86", "windows-11", "windows-11-setup", "macos")

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._/-]{0,126}[a-z0-9])?(?::[A-Za-z0-9._-]{1,64})?")
_LAYER = re.compile(
    r"(?:(?:base|workspace|toolkit):)?[A-Za-z0-9](?:[A-Za-z0-9._+/-]{0,126})(?:@[A-Za-z0-9._+-]{1,64})?|sha256:[0-9a-f]{64}"
)
_HOSTNAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9._/-]{1,64}")
_SNAPSHOT = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,62})")
_DISPLAY = re.compile(r"(\d{1,5})x(\d{1,5})")
_USER = re.compile(r"(?:\d{1,10}|[a-z_][a-z0-9_.-]{0,31}\$?)(?::(?:\d{1,10}|[a-z_][a-z0-9_.-]{0,31}\$?))?")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may use at most, in base units."""

    cpu: float  # cores, as quota over a 100 ms period
    cpu_weight: int  # share when cores are contended; 100 is the default
    memory_bytes: int
    disk_bytes: int  # writable bytes
    inodes: int  # writable files, directories and links
    pids: int
    open_files: int  # RLIMIT_NOFILE of every process


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="backend"):
    """What all backends share."""

    image: str
    layers: tuple[str, ...] = ()  # `workspace:NAME@VERSION`, `toolkit:NAME@VERSION`, or `sha256:…`; later ones override earlier ones
    cpu: float = 1.0
    cpu_weight: int = 100
    memory: int | str = "512MiB"
    disk: int | str = "1GiB"
    inodes: int = 262_144
    pids: int = 512
    open_files: int = 4_096
    env: dict[str, str] = {}
    user: str = ""  # "" = the image's user; name or number, optionally `:group`
    workdir: str = ""  # "" = the image's
    hostname: str = ""  # "" = the sandbox's id, made a host name
    policy: str = "default"
    labels: dict[str, str] = {}
    ttl_s: float | None = None  # seconds from creation, absolute
    ttl_idle_s: float | None = None  # seconds in which no command runs and nothing talks to the sandbox

    kind: ClassVar[str]
    bounds: ClassVar[tuple[tuple[float, float], tuple[int, int], tuple[int, int]]] = (CPU, MEMORY_BYTES, DISK_BYTES)

    def limits(self) -> Limits:
        """The limits in base units. Raises InvalidRequest."""
        cpu, memory, disk = self.bounds
        return Limits(
            cpu=_number(self.cpu, "cpu", cpu),
            cpu_weight=_integer(self.cpu_weight, "cpu_weight", CPU_WEIGHT),
            memory_bytes=_size(self.memory, "memory", memory),
            disk_bytes=_size(self.disk, "disk", disk),
            inodes=_integer(self.inodes, "inodes", INODES),
            pids=_integer(self.pids, "pids", PIDS),
            open_files=_integer(self.open_files, "open_files", OPEN_FILES),
        )

    def check(self) -> Limits:
        """All fields checked; the limits. Raises InvalidRequest naming the field and the rule."""
        _match(_NAME, self.image, "image", "must be a name such as 'debian' or 'python:3.12' in lower case")
        if len(self.layers) > MAX_LAYERS:
            raise InvalidRequest(f"at most {MAX_LAYERS} layers", field="layers")
        for index, layer in enumerate(self.layers):
            _match(
                _LAYER,
                layer,
                f"layers[{index}]",
                "must look like 'workspace:name@version', 'toolkit:name@version' or 'sha256:<64 hex digits>'",
            )
        check_env(self.env, "env")
        check_user(self.user, "user")
        if self.workdir:
            check_path(self.workdir, "workdir")
        if self.hostname:
            _match(_HOSTNAME, self.hostname, "hostname", "must be 1 to 63 of a-z, 0-9 and inner hyphens")
        _match(_LABEL, self.policy, "policy", "must be the name of a policy")
        if len(self.labels) > 64:
            raise InvalidRequest("at most 64 labels", field="labels")
        for key, value in self.labels.items():
            _match(_LABEL, key, "labels", "keys must be 1 to 64 letters, digits or any of . _ / -")
            if len(value) > 256 or "\0" in value:
                raise InvalidRequest("values must be at most 256 characters without NUL", field=f"labels.{key}")
        for field, ttl in (("ttl_s", self.ttl_s), ("ttl_idle_s", self.ttl_idle_s)):
            if ttl is not None:
                _number(ttl, field, TTL_S)
        return self.limits()


class Container(Spec, frozen=True, kw_only=True, tag="container"):
    """Namespaces, cgroups and seccomp on the shared kernel."""

    kind = "container"


class Machine(Spec, frozen=True, kw_only=True):
    """What the two kinds of machines share. They have as many virtual processors as `cpu` rounded up; `cpu` itself is what these get."""

    hardware_virtualization: bool = False  # True: nothing but that will do; else it is used where the machine has it
    snapshot: str = ""  # the name of one: the sandbox begins as what that kept; image, layers and sizes must be those that it was made of

    bounds = (VM_CPU, VM_MEMORY_BYTES, VM_DISK_BYTES)

    def check(self) -> Limits:
        if self.snapshot:
            check_snapshot_name(self.snapshot, "snapshot")
        return super().check()


class MicroVM(Machine, frozen=True, kw_only=True, tag="microvm"):
    """A small machine with a kernel of its own, on the layers of an image as a container is."""

    kind = "microvm"


class VM(Machine, frozen=True, kw_only=True, tag="vm"):
    """A whole machine: firmware, disks, a screen."""

    memory: int | str = "2GiB"
    disk: int | str = "8GiB"
    profile: str = "linux-uefi"  # what kind of machine, see PROFILES
    display: str = "1280x800"  # WIDTHxHEIGHT; "" = no screen

    kind = "vm"

    def check(self) -> Limits:
        if self.profile not in PROFILES:
            raise InvalidRequest(f"must be one of {', '.join(PROFILES)}; got {self.profile[:80]!r}", field="profile")
        self.pixels()
        return super().check()

    def pixels(self) -> tuple[int, int] | None:
        """Width and height of the screen; None: it has none. Raises InvalidRequest."""
        if not self.display:
            return None
        match = _DISPLAY.fullmatch(self.display)
        if match is None:
            raise InvalidRequest(f"must look like 1280x800, or be empty for no screen; got {self.display[:80]!r}", field="display")
        return check_pixels(int(match[1]), int(match[2]), ("display", "display"))


AnySpec = Container | MicroVM | VM


class CreateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/sandboxes`: `count` sandboxes of one spec. Each slot succeeds or fails by itself."""

    spec: AnySpec
    count: int = 1
    action_id: str | None = None


def _match(pattern: re.Pattern[str], value: str, field: str, rule: str) -> None:
    if not pattern.fullmatch(value):
        raise InvalidRequest(f"{rule}; got {value[:80]!r}", field=field)


def _number(value: float, field: str, bounds: tuple[float, float]) -> float:
    low, high = bounds
    if isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        raise InvalidRequest(f"must be a number from {low:.12g} to {high:.12g}; got {value!r}", field=field)
    return float(value)


def _integer(value: int, field: str, bounds: tuple[int, int]) -> int:
    low, high = bounds
    if isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(f"must be a whole number from {low} to {high}; got {value!r}", field=field)
    return value


def _size(value: int | str, field: str, bounds: tuple[int, int]) -> int:
    size = parse_bytes(value, field=field)
    if not bounds[0] <= size <= bounds[1]:
        raise InvalidRequest(f"must be from {format_bytes(bounds[0])} to {format_bytes(bounds[1])}; got {str(value)[:40]!r}", field=field)
    return size


def check_number(value: float, field: str, bounds: tuple[float, float]) -> float:
    """`value` if finite and within the bounds, both included. Raises InvalidRequest naming `field`."""
    return _number(value, field, bounds)


def check_integer(value: int, field: str, bounds: tuple[int, int]) -> int:
    """`value` if within the bounds, both included. Raises InvalidRequest naming `field`."""
    return _integer(value, field, bounds)


def check_text(value: str, field: str, *, limit: int) -> str:
    """`value` if it can be given to the kernel as bytes: no NUL, encodable, at most `limit` bytes."""
    if "\0" in value:
        raise InvalidRequest("must not contain a NUL character", field=field)
    if len(encode(value, field)) > limit:
        raise InvalidRequest(f"must be at most {limit} bytes", field=field)
    return value


def encode(value: str, field: str) -> bytes:
    """UTF-8 bytes of `value`; lone surrogates U+DC80..U+DCFF stand for raw bytes, any other is refused."""
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest("is not valid Unicode text", field=field) from None


def check_path(value: str, field: str) -> str:
    """`value` if it is an absolute path of at most 4,095 bytes, each part at most 255."""
    check_text(value, field, limit=4095)
    if not value.startswith("/"):
        raise InvalidRequest(f"must be an absolute path; got {value[:80]!r}", field=field)
    if any(len(encode(part, field)) > 255 for part in value.split("/")):
        raise InvalidRequest("no part of a path may be longer than 255 bytes", field=field)
    return value


def check_user(value: str, field: str) -> str:
    """`value` if it is empty, a user name or number, optionally `:group`. Whether it exists is known only inside."""
    if value:
        _match(_USER, value, field, "must be a user name or number, optionally followed by ':group'")
        for part in value.split(":"):
            if part.isdigit() and int(part) > 65_534:
                raise InvalidRequest("numbers must be at most 65534", field=field)
    return value


def check_snapshot_name(value: str, field: str) -> str:
    """`value` if it can name a snapshot."""
    _match(_SNAPSHOT, value, field, "must be 1 to 63 of a-z, 0-9 and, after the first, . _ -")
    return value


def check_pixels(width: int, height: int, fields: tuple[str, str]) -> tuple[int, int]:
    """The two if a screen can be of this size. Raises InvalidRequest naming the field that is wrong."""
    for value, bounds, field, word in zip((width, height), SCREEN_PIXELS, fields, ("width", "height"), strict=True):
        if isinstance(value, bool) or not bounds[0] <= value <= bounds[1]:
            raise InvalidRequest(f"the {word} must be from {bounds[0]} to {bounds[1]} pixels; got {value!r}", field=field)
    return width, height


def check_env(env: dict[str, str], field: str) -> None:
    """Names without `=` or NUL and not empty, values without NUL, all of it at most 1 MiB."""
    total = 0
    for name, value in env.items():
        if not name or "=" in name:
            raise InvalidRequest(f"a name must not be empty or contain '='; got {name[:80]!r}", field=field)
        check_text(name, field, limit=4096)
        check_text(value, f"{field}.{name[:80]}", limit=131_000)  # one string may have 128 KiB (MAX_ARG_STRLEN) with its name
        total += len(name) + len(value) + 2
    if total > MAX_ENV_BYTES:
        raise InvalidRequest(f"must be at most {MAX_ENV_BYTES} bytes in all", field=field)
