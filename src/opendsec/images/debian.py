# SPDX-License-Identifier: Apache-2.0
"""A Debian (or derived) base tree by mmdebstrap, from the apt sources that this machine itself uses.

Three parts: which of the machine's sources serve a suite (pure), running mmdebstrap with them, and turning the result into a base for
sandboxes: nothing of this machine in it, nothing that differs between two builds from equal packages, and the few things there
that programs expect.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from opendsec.api.errors import InvalidRequest, Unavailable
from opendsec.api.images import DebianSource

_COMPONENTS = frozenset({"main", "contrib", "non-free", "non-free-firmware", "universe", "multiverse", "restricted"})
_SUITE = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}(?::[a-z0-9-]{2,32})?(?:[=/][A-Za-z0-9.+:~-]{1,128})?")
# How this machine reaches its archives, beyond the sources themselves.
_APT_OPTION = re.compile(r"Acquire::(?:(?:http|https)::|Check-Valid-Until|Check-Date|Max-ValidTime|Retries|ForceIPv4|ForceIPv6)")

_ONE_LINE = re.compile(r"deb\s+(?:\[(?P<options>[^]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?:\s+(?P<components>[^#]*))?")
_OPTION_FIELDS = {"arch": "Architectures", "lang": "Languages", "pdiffs": "PDiffs"}


# --- the machine's sources -----------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One stanza of apt sources for binary packages."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: Mapping[str, str]  # further deb822 fields

    def stanza(self) -> str:
        fields = {"Types": "deb", "URIs": " ".join(self.uris), "Suites": " ".join(self.suites), "Components": " ".join(self.components)}
        return "".join(f"{name}: {value}\n" for name, value in {**fields, **self.options}.items())


def parse_one_line(text: str) -> Iterator[Entry]:
    """Entries of a `*.list` file; what is not a `deb` line is skipped."""
    for line in text.splitlines():
        match = _ONE_LINE.fullmatch(line.strip()) or _ONE_LINE.match(line.strip())
        if match is None:
            continue
        options = {}
        for option in (match["options"] or "").split():
            name, _, value = option.partition("=")
            field = _OPTION_FIELDS.get(name, "-".join(part.capitalize() for part in name.split("-")))
            options[field] = value.replace(",", " ")
        yield Entry((match["uri"],), (match["suite"],), tuple((match["components"] or "").split()), options)


def parse_deb822(text: str) -> Iterator[Entry]:
    """Entries of a `*.sources` file; disabled ones and those of source packages are skipped."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for stanza in re.split(r"\n[ \t]*(?:\n[ \t]*)*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line[:1].isspace():
                fields[name] = f"{fields.get(name, '')}\n{line}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip()
                fields[name] = value.strip()
        lower = {name.lower(): value for name, value in fields.items()}
        if "deb" not in lower.get("types", "").split() or lower.get("enabled", "yes").lower() in ("no", "false", "0"):
            continue
        known = ("types", "enabled", "uris", "suites", "components")
        options = {name: value for name, value in fields.items() if name and name.lower() not in known}
        uris, suites, components = (tuple(lower.get(key, "").split()) for key in ("uris", "suites", "components"))
        yield Entry(uris, suites, components, options)


def machine_sources(apt: Path) -> list[Entry]:
    """All entries of this machine; `apt` is its configuration directory."""
    found: list[Entry] = []
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]:
        parse = {".list": parse_one_line, ".sources": parse_deb822}.get(path.suffix)
        if parse is not None and path.is_file():
            found.extend(parse(path.read_text(errors="replace")))
    return found


def select(entries: Sequence[Entry], suite: str) -> list[Entry]:
    """The entries, cut down to what serves `suite` with its updates. Raises InvalidRequest if none does.

    Other vendors call their suites after Debian's as well. The distribution's own entries have its components and its archive's
    key; only if there are none such is another key accepted, as of a company's own mirror.
    """
    wanted = (suite, f"{suite}-updates", f"{suite}-security", f"{suite}/updates")
    serving = []
    for entry in entries:
        suites = tuple(name for name in entry.suites if name in wanted)
        components = tuple(name for name in entry.components if name in _COMPONENTS)
        if suites and components and len(components) == len(entry.components):
            serving.append(entry._replace(suites=suites))
    chosen = [entry for entry in serving if "-archive" in entry.options.get("Signed-By", "-archive")] or serving
    if not any(suite in entry.suites for entry in chosen):
        offered = sorted({name for entry in entries for name in entry.suites if _COMPONENTS & set(entry.components)})
        raise InvalidRequest(
            f"no apt source of this machine offers suite {suite!r}; it has {', '.join(offered) or 'none'}", field="source.suite"
        )
    return chosen


def machine_suite(os_release: str) -> str:
    """The code name in the text of an os-release file, or an empty string."""
    match = re.search(r'^VERSION_CODENAME="?([a-z0-9.-]+)"?$', os_release, re.MULTILINE)
    return match[1] if match else ""


def check(source: DebianSource) -> None:
    """Raises InvalidRequest naming the field."""
    if source.suite and not _SUITE.fullmatch(source.suite):
        raise InvalidRequest(f"must be a suite's name such as 'bookworm'; got {source.suite[:80]!r}", field="source.suite")
    for index, package in enumerate(source.packages):
        if not _PACKAGE.fullmatch(package):
            raise InvalidRequest(
                f"must be a package's name, optionally with '=version'; got {package[:80]!r}", field=f"source.packages[{index}]"
            )


# --- the build -----------------------------------------------------------------------------------------------------


def bootstrap(
    source: DebianSource, target: Path, work: Path, *, etc: Path = Path("/etc"), log: Callable[[str], None], essential_hook: str = ""
) -> None:
    """Install the base tree at `target` (a new directory), keeping helper files in `work`. The caller is root, in a mount and pid
    namespace of its own, which take everything that mmdebstrap starts and mounts along when they end. `essential_hook`: shell, run between
    the essential packages and the others; `$1` is the tree.

    Raises InvalidRequest (suite, packages), Unavailable (no mmdebstrap, archives unreachable) with the end of what it said.
    """
    suite = source.suite or machine_suite((etc / "os-release").read_text())
    sources = work / "apt.sources"
    sources.write_text("\n".join(entry.stanza() for entry in select(machine_sources(etc / "apt"), suite)))
    command = ["mmdebstrap", "--mode=root", "--format=directory", f"--variant={source.variant}", "--skip=output/dev"]
    command += [f"--include={package}" for package in source.packages]
    command += [f"--aptopt={option}" for option in _apt_options()]
    if essential_hook:
        command.append(f"--essential-hook={essential_hook}")
    command += ["--", suite, os.fspath(target), os.fspath(sources)]
    said: list[str] = []
    try:
        # A fixed seed: sets of strings would otherwise come out of the byte compiler in another order each time.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            close_fds=False,  # it too holds the workspace: see `ImageStore.workspace`
        )
    except FileNotFoundError:
        raise Unavailable("mmdebstrap is not installed (Debian package mmdebstrap)") from None
    with process:
        assert process.stderr is not None
        for raw in process.stderr:
            line = raw.decode(errors="replace").rstrip()
            said = [*said[-19:], line]
            if line.startswith("I: "):
                log(line[3:])
    if process.returncode != 0:
        raise _failure(said)


def _failure(said: Sequence[str]) -> Exception:
    text = "; ".join(line for line in said if line.startswith(("E: ", "W: "))) or "; ".join(said[-3:])
    if missing := re.search(r"Unable to locate package ([^\s;]+)|[Pp]ackage '?(\S+?)'? has no installation candidate", text):
        return InvalidRequest(f"the suite has no package {missing[1] or missing[2]!r}", field="source.packages")
    return Unavailable(f"mmdebstrap failed: {text}")


def _apt_options() -> list[str]:
    """Proxies and the like, as this machine's apt is configured."""
    done = subprocess.run(["apt-config", "dump"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return [line.rstrip(";") for line in done.stdout.splitlines() if _APT_OPTION.match(line) and not line.endswith('"";')]


# --- from a chroot to a base ---------------------------------------------------------------------------------------

_EMPTIED = ("dev", "proc", "sys", "run", "tmp", "var/tmp", "var/lib/apt/lists", "etc/apt/sources.list.d")
_REMOVED = (
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/.pwd.lock",
    *(f"etc/{name}-" for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid")),
    "var/lib/dbus/machine-id",
    "var/cache/ldconfig/aux-cache",
    "var/cache/apt/pkgcache.bin",
    "var/cache/apt/srcpkgcache.bin",
)
_REMOVED_PATTERNS = ("var/cache/apt/archives/**/*.deb", "var/cache/debconf/*-old", "var/lib/dpkg/*-old", "var/log/**/*")
_MODES = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "run": 0o755, "tmp": 0o1777, "var/tmp": 0o1777}

HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_FILES = {
    "etc/hosts": HOSTS,
    "etc/hostname": "localhost\n",
    "etc/resolv.conf": "",
    "etc/machine-id": "",
    # The sources were those of the machine that built it: perhaps private, and no part of what the packages are.
    "etc/apt/sources.list": "# Left empty: the sources belong to the machine that built this image.\n",
}


def finish(root: Path) -> None:
    """Make a fresh Debian tree a base for sandboxes. Raises Unavailable if it cannot be one.

    Links in it may point anywhere (`/etc/resolv.conf` to `/run`), so nothing is written through one: each file is made anew.
    """
    for relative in _EMPTIED:
        _empty(root / relative)
    for relative in _REMOVED:
        (root / relative).unlink(missing_ok=True)
    for pattern in _REMOVED_PATTERNS:
        for path in root.glob(pattern):
            if not stat.S_ISDIR(path.lstat().st_mode):
                path.unlink()
    for relative, mode in _MODES.items():
        (root / relative).mkdir(exist_ok=True)
        (root / relative).chmod(mode)
    for relative, text in _FILES.items():
        if (root / relative).parent.is_dir():
            _write(root / relative, text.encode(), 0o644)
    _age_passwords(root / "etc/shadow")
    # A link is followed as inside the tree, where /bin may be a link to usr/bin; the shell itself may be one too.
    if not any(os.path.lexists(root / place / "sh") for place in ("bin", "usr/bin")):
        raise Unavailable("the base has no /bin/sh")


def _empty(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def _write(path: Path, content: bytes, mode: int, owner: tuple[int, int] = (0, 0)) -> None:
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, content)
        os.fchown(fd, *owner)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _age_passwords(path: Path) -> None:
    """Accounts are made "today", as a count of days in /etc/shadow: give them all one day."""
    try:
        status = path.lstat()
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return
    aged = [b":".join((*fields[:2], b"10957", *fields[3:])) for fields in _fields(lines)]  # 2000-01-01
    _write(path, b"".join(line + b"\n" for line in aged), stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid))


def _fields(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    return (fields for fields in (line.split(b":") for line in lines) if len(fields) >= 3)
