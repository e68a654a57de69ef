# SPDX-License-Identifier: Apache-2.0
"""Settings of the edge: one table gives the command-line flags, the environment variables and the keys of the TOML file.

The flag wins over the environment (`OPENDSEC_<NAME>`), the environment over the file (`--config`, or `OPENDSEC_CONFIG`), the file over
the default. All of them are the operator's; none can be set by a request.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.api.units import parse_bytes
from opendsec.edge.log import LEVELS
from opendsec.edge.tables import Retention

UIDS_EACH = 65_536

Setting = str | int | float | Path | tuple[str, int] | None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings, checked."""

    state_dir: Path
    run_dir: Path
    tcp: tuple[str, int] | None
    token_file: Path | None
    memory_limit: int | None
    memory_fraction: float
    memory_overcommit: float
    disk_overcommit: float
    max_sandboxes: int
    max_memory: int | None
    max_disk: int | None
    max_cpu: float | None
    max_pids: int | None
    uid_base: int
    uid_ranges: int
    scratch_driver: str
    scratch_size: int | None
    lazy: str
    cache_size: int | None
    keep_ended_s: float
    keep_ended: int
    keep_actions_s: float
    keep_results: int
    fn_languages: Path | None
    fn_images: str
    fn_members: int
    fn_cache: int
    vm_parts: Path | None
    vm_waiting: int
    vm_ksm: str
    log_level: str
    log_file: Path | None
    ready_fd: int | None

    @property
    def socket(self) -> Path:
        return self.run_dir / "edge.sock"

    @property
    def journal(self) -> Path:
        return self.state_dir / "journal.db"

    def memory_bytes(self) -> int:
        """What this edge may promise in all."""
        if self.memory_limit is not None:
            return self.memory_limit
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(total * self.memory_fraction * self.memory_overcommit)

    def cache_bytes(self) -> int:
        """What loaded content of layers may take here."""
        if self.cache_size is not None:
            return self.cache_size
        disk = os.statvfs(self.state_dir)
        return min(disk.f_blocks * disk.f_frsize // 10, 100 << 30)

    def retention(self) -> Retention:
        return Retention(
            ended_s=self.keep_ended_s, ended_count=self.keep_ended, actions_s=self.keep_actions_s, results_bytes=self.keep_results
        )


class _Field(NamedTuple):
    parse: Callable[[str], Setting]
    default: Setting
    help: str


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text, 0)
        if not low <= value <= high:
            raise ValueError(f"must be from {low} to {high}")
        return value

    return parse


def _number(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise ValueError(f"must be from {low:g} to {high:g}")
        return value

    return parse


def _size(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdigit() else text, field="")
    except InvalidRequest as error:
        raise ValueError(error.message) from None


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError("must be a path")
    return Path(text).absolute()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65_535:
        raise ValueError("must be HOST:PORT")
    return host.strip("[]"), int(port)


def _text(text: str) -> str:
    return text


def _choice(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return text

    return parse


# uid ranges. 0x70000000 to 0x7ffdffff is free by convention: /etc/subuid ends at 600,100,000, Incus and LXD take 1,000,000 to
# 1,001,000,000, systemd-nspawn picks from 0x80000 to 0x6fffffff, systemd's foreign range begins at 0x7ffe0000, and above 2^31 programs
# that keep a uid in a signed number fail. Ranges are taken from the top down, so that the first 4,094 sandboxes use that free part alone;
# more than that go on downwards through nspawn's part, where a clash needs nspawn containers with --private-users=pick. Entries of
# /etc/subuid and /etc/subgid within the span are left out when the edge starts.
UID_BASE, UID_RANGES = 0x40000000, (0x7FFE0000 - 0x40000000) // UIDS_EACH

FIELDS: dict[str, _Field] = {
    "state_dir": _Field(_path, Path("/var/lib/opendsec"), "journal, images and scratch"),
    "run_dir": _Field(_path, Path("/run/opendsec"), "the socket and the lock"),
    "tcp": _Field(_address, None, "HOST:PORT to listen on besides the unix socket; needs a token file"),
    "token_file": _Field(_path, None, "file (mode 0600) with the token that callers over TCP must bear"),
    "memory_limit": _Field(_size, None, "memory to promise in all; default: the machine's, by the two settings that follow"),
    "memory_fraction": _Field(_number(0.01, 1.0), 0.9, "share of the machine's memory that sandboxes may have"),
    "memory_overcommit": _Field(_number(0.1, 100.0), 1.0, "how many times over that share may be promised"),
    "disk_overcommit": _Field(_number(0.1, 1000.0), 4.0, "how many times over the scratch pool may be promised"),
    "max_sandboxes": _Field(_integer(1, 1_000_000), 10_000, "living sandboxes at once"),
    "max_memory": _Field(_size, None, "the most memory of one sandbox; default: all there is"),
    "max_disk": _Field(_size, None, "the most disk of one sandbox"),
    "max_cpu": _Field(_number(0.01, 1024.0), None, "the most cores of one sandbox"),
    "max_pids": _Field(_integer(2, 1 << 22), None, "the most processes of one sandbox"),
    "uid_base": _Field(_integer(UIDS_EACH, 0xFFFE0000), UID_BASE, "first host uid given to sandboxes"),
    "uid_ranges": _Field(_integer(1, 65_534), UID_RANGES, "how many ranges of 65,536 uids there are"),
    "scratch_driver": _Field(_choice("auto", "btrfs", "tmpfs"), "auto", "where writable files of sandboxes live: auto, btrfs, tmpfs"),
    "scratch_size": _Field(_size, None, "size of the scratch pool; default: chosen by the driver"),
    "lazy": _Field(
        _choice("auto", "fanotify", "fuse", "eager"),
        "auto",
        "how content of images from stores is loaded: when first read, by fanotify or fuse; eager: whole before use; auto: the best",
    ),
    "cache_size": _Field(
        _size, None, "local size of loaded content; the least used goes first. Default: a tenth of the disk, 100 GiB at most"
    ),
    "keep_ended_s": _Field(_number(0.0, 1e9), 86_400.0, "seconds for which ended sandboxes are remembered"),
    "keep_ended": _Field(_integer(0, 1_000_000), 10_000, "how many ended sandboxes are remembered"),
    "keep_actions_s": _Field(_number(0.0, 1e9), 7 * 86_400.0, "seconds for which results of actions are kept after their sandbox ended"),
    "keep_results": _Field(_size, 4 << 30, "size of large results kept for repeated actions; beyond it the oldest lose their output"),
    "fn_languages": _Field(_path, None, "directory with more language definitions (TOML); one of the same name replaces ours"),
    "fn_images": _Field(_text, "", "images of languages: LANGUAGE=IMAGE,… with * for all others; default: as their definitions say"),
    "fn_members": _Field(_integer(1, 4096), max(4, os.cpu_count() or 1), "members at most of a pool that was made for calls without one"),
    "fn_cache": _Field(_size, 1 << 30, "size of the cache of compiled programs"),
    "vm_parts": _Field(
        _path, None, "directory with guest kernels and the files QEMU needs, which edges may share; default: vm in the state directory"
    ),
    "vm_waiting": _Field(_integer(0, 32), 1, "microVMs that wait, for each template in use, to become sandboxes"),
    "vm_ksm": _Field(
        _choice("off", "on"), "off", "on: the kernel may merge equal pages of VMs, if its KSM runs; only where all of them are one tenant's"
    ),
    "log_level": _Field(_choice(*LEVELS), "info", "debug, info, warning, error"),
    "log_file": _Field(_path, None, "append the log there instead of stderr"),
    "ready_fd": _Field(_integer(3, 1 << 20), None, "descriptor to which one line is written when the edge answers"),
}


class BadSettings(Exception):
    """A setting breaks a rule; the message names it and where it came from."""


def load(arguments: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Settings from flags, environment and file. Raises BadSettings; SystemExit for `--help` and unknown flags."""
    parser = argparse.ArgumentParser(
        prog="dsec-edge", description="The daemon that owns the sandboxes of this machine.", allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with these settings (dashes written as underscores)")
    parser.add_argument("--foreground", action="store_true", help="accepted for clarity: the edge never goes to the background by itself")
    for name, field in FIELDS.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="VALUE", help=f"{field.help} (default: {field.default})".replace("%", "%%")
        )
    given: dict[str, str | None] = vars(parser.parse_args(arguments))
    file = given["config"] or environ.get("OPENDSEC_CONFIG")
    from_file = _read_file(Path(file)) if file else {}
    values: dict[str, Setting] = {}
    for name, field in FIELDS.items():
        variable = f"OPENDSEC_{name.upper()}"
        for source, text in (
            (f"--{name.replace('_', '-')}", given[name]),
            (variable, environ.get(variable) or None),
            (f"{name} in {file}", from_file.get(name)),
        ):
            if text is not None:
                try:
                    values[name] = field.parse(text)
                except ValueError as error:
                    raise BadSettings(f"{source}: {error}; got {text[:80]!r}") from None
                break
        else:
            values[name] = field.default
    settings = msgspec.convert(values, Settings)
    _check(settings)
    return settings


def _read_file(path: Path) -> dict[str, str]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSettings(f"{path}: {error}") from None
    if unknown := sorted(set(content) - set(FIELDS)):
        raise BadSettings(f"{path}: no setting is called {unknown[0]!r}")
    for name, value in content.items():
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise BadSettings(f"{path}: {name} must be a string or a number")
    return {name: str(value) for name, value in content.items()}


def _check(settings: Settings) -> None:
    if settings.tcp is not None and settings.token_file is None:
        raise BadSettings("--tcp needs --token-file: whoever reaches the port would own this machine")
    if settings.uid_base % UIDS_EACH:
        raise BadSettings(f"--uid-base must be a multiple of {UIDS_EACH}")
    if settings.uid_base + settings.uid_ranges * UIDS_EACH > 0xFFFF0000:
        raise BadSettings("--uid-base and --uid-ranges: the last range ends beyond the largest uid")
    if len(os.fsencode(settings.socket)) > 100:
        raise BadSettings("--run-dir: too long; a unix socket's path may have 107 bytes")


def read_token(path: Path) -> bytes:
    """The token in `path`. Raises BadSettings if others may read the file or the token is short."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4097).strip()
    except OSError as error:
        raise BadSettings(f"--token-file: {error}") from None
    if mode & 0o077:
        raise BadSettings(f"--token-file: {path} must be readable by its owner alone (mode 0600)")
    if not 16 <= len(token) <= 4096 or not token.isascii() or b" " in token or not token.decode().isprintable():
        raise BadSettings(f"--token-file: {path} must hold 16 to 4096 printable characters without spaces")
    return token
