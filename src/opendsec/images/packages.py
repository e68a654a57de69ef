# SPDX-License-Identifier: Apache-2.0
"""Where package managers keep a package: by the names of files and directories, and by the beginnings of a few."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from opendsec.images.scrub import beginning

_ARCHIVE = re.compile(rb"(.+?)\.(whl|tar\.gz|tgz|zip|tar\.bz2|tar\.xz|crate|gem|deb|jar|nupkg|egg)", re.IGNORECASE)
_METADATA = re.compile(rb"(.+?)-([0-9][^-]*?)(?:-py[0-9.]+)?\.(?:dist-info|egg-info)", re.IGNORECASE)
_VERSIONED = re.compile(rb"(.+?)[-@]v?([0-9][0-9A-Za-z.+_-]*)")
_SITE = (b"/site-packages/", b"/dist-packages/")
_PROJECT_NAME = re.compile(rb"^\s*name\s*=\s*[\"']?([A-Za-z0-9._-]+)", re.MULTILINE)
_PROJECT_VERSION = re.compile(rb"^\s*version\s*=\s*[\"']?([0-9][0-9A-Za-z.+!-]*)", re.MULTILINE)
_INFO_NAME = re.compile(rb"^Name: *(\S+)", re.MULTILINE)
_INFO_VERSION = re.compile(rb"^Version: *(\S+)", re.MULTILINE)
_LOOK_BYTES = 256 << 10


class Packages:
    """`wanted`: names as their registries have them. Without any, nothing is looked for."""

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = {normal(name.encode()): name for name in wanted if name}
        self._last = {name.rpartition(b"/")[2] for name in self._wanted}  # of a scoped or path-like name
        self._installed: list[tuple[bytes, bytes, bytes]] = []  # name, version, path
        self._sources: dict[bytes, bytes] = {}  # name → the workspace's version

    def _has(self, name: bytes) -> bool:
        return (found := normal(name)) in self._wanted or found in self._last

    def directory(self, path: bytes, name: bytes) -> str:
        """The rule that a directory falls under, or ""."""
        if not self._wanted:
            return ""
        if (match := _METADATA.fullmatch(name)) and self._has(match[1]):
            if any(site in b"/" + path for site in _SITE) and b"/.cache/" not in b"/" + path:
                self._installed.append((normal(match[1]), match[2], path))
                return ""
            return "cache.uv" if b"/uv/" in path else "cache.package"
        if b"/.cache/uv/" in b"/" + path and self._has(name):
            return "cache.uv"
        if b"registry/src/" in path and (match := _VERSIONED.fullmatch(name)) and self._has(match[1]):
            return "cache.cargo"
        if b"pkg/mod/" in path:
            module = path.partition(b"pkg/mod/")[2].removeprefix(b"cache/download/")
            if name == b"@v" and self._has(module.removesuffix(b"/@v")):
                return "cache.go"
            if (match := _VERSIONED.fullmatch(module)) and self._has(match[1]):
                return "cache.go"
        return ""

    def file(self, path: bytes, name: bytes, folder_fd: int) -> str:
        """As `directory`, for a regular file."""
        if not self._wanted:
            return ""
        if (match := _ARCHIVE.fullmatch(name)) and self._archive(match[1], match[2]):
            return "cache.cargo" if match[2] == b"crate" else "cache.package"
        if b"/.cache/pip/" in b"/" + path and self._is_zip_of(beginning(folder_fd, name, 4096)):
            return "cache.pip"
        if b"/_cacache/index-v5/" in b"/" + path:
            data = beginning(folder_fd, name, _LOOK_BYTES)
            if any(
                b"/" + one.replace(b"/", b"%2f") + b"/-/" in data.lower() or b"/" + one + b"/-/" in data.lower() for one in self._wanted
            ):
                return "cache.npm"
        return ""

    def project(self, folder_fd: int, path: bytes) -> None:
        """Look for a project of the workspace's own in a directory."""
        if self._wanted and not any(site in b"/" + path + b"/" for site in _SITE):
            for name in (b"pyproject.toml", b"setup.cfg", b"PKG-INFO"):
                if text := beginning(folder_fd, name, _LOOK_BYTES):
                    self._source(name, text)

    def _archive(self, stem: bytes, kind: bytes) -> bool:
        if kind in (b"whl", b"egg"):
            return self._has(stem.partition(b"-")[0])
        if kind == b"deb":
            return self._has(stem.partition(b"_")[0])
        match = _VERSIONED.fullmatch(stem)
        return match is not None and self._has(match[1])

    def _is_zip_of(self, begin: bytes) -> bool:
        """The first member of a wheel is a file of the package."""
        if begin[:4] != b"PK\x03\x04" or len(begin) < 30:
            return False
        name = begin[30 : 30 + int.from_bytes(begin[26:28], "little")]
        top = name.partition(b"/")[0]
        return self._has(top.removesuffix(b".py")) or ((match := _METADATA.fullmatch(top)) is not None and self._has(match[1]))

    def _source(self, file: bytes, text: bytes) -> None:
        info = file == b"PKG-INFO"
        name = (_INFO_NAME if info else _PROJECT_NAME).search(text)
        version = (_INFO_VERSION if info else _PROJECT_VERSION).search(text)
        if name and version and self._has(name[1]):
            known = self._sources.get(normal(name[1]))
            if known is None or release(version[1]) > release(known):
                self._sources[normal(name[1])] = version[1]

    def newer(self) -> Iterator[tuple[bytes, str]]:
        """Installed packages that are newer than the workspace's own: (path, why)."""
        for name, version, path in self._installed:
            own = self._sources.get(name)
            if own is not None and release(version) > release(own):
                yield path, f"{name.decode()} {_text(version)} is installed, the workspace has {_text(own)}"


def normal(name: bytes) -> bytes:
    """As PyPI compares names; a scope or a path stays."""
    return re.sub(rb"[-_.]+", b"-", name.lower())


def release(version: bytes) -> tuple[int, ...]:
    """The numbers of a version, as far as they go: 1.2.0rc1 → (1, 2, 0)."""
    numbers = []
    for part in version.lstrip(b"vV").split(b"+")[0].split(b"."):
        match = re.match(rb"[0-9]{1,9}", part)
        if match is None:
            break
        numbers.append(int(match.group()))
        if match.end() != len(part):
            break
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _text(version: bytes) -> str:
    return version[:60].decode(errors="backslashreplace")
