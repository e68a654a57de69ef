# SPDX-License-Identifier: Apache-2.0
"""Pinned distributions: downloaded by pip, held to their sha256, unpacked with care.

The network is touched only by pip, so that whatever mirror, proxy or certificate the user's pip is set up for also serves the demo.

Archives are input from outside. `unpack_sdist` and `unpack_wheels` write only regular files and directories, only beneath the
target, and at most so many and so much; everything else in an archive (links, devices, `..`, absolute names, a name given
twice) is an `UnsafeArchive`. They do not use tarfile's `filter="data"`: the Python of Debian 12 (3.11.2) is older than it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec

MAX_ARCHIVE_BYTES = 256 * 1024 * 1024
MAX_ARCHIVE_ENTRIES = 20_000
_COPY_BYTES = 1024 * 1024
_PARALLEL_DOWNLOADS = 4
_PIP_TIMEOUT_S = 600
# Wheels carry no times worth keeping; one fixed time keeps the layer's bytes the same wherever it is built.
_WHEEL_MTIME = 1_600_000_000


class FetchError(Exception):
    """pip could not bring a distribution; the text ends with what pip said."""


class DigestMismatch(FetchError):
    """A file is not the one that was pinned."""


class UnsafeArchive(Exception):
    """An archive holds something that a source distribution or a pure wheel has no need of."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One file of one release: `filename` says whether it is a source distribution or a wheel; `sha256` is hexadecimal."""

    project: str
    version: str
    filename: str
    sha256: str

    @property
    def is_wheel(self) -> bool:
        return self.filename.endswith(".whl")


class WheelPart(msgspec.Struct, frozen=True, kw_only=True):
    """What lies below `take` of a wheel goes below `into` of the target; "" stands for everything, and for the target itself."""

    take: str = ""
    into: str = ""


def check_digest(path: Path, sha256: str) -> None:
    """Raise `DigestMismatch` unless the file has this digest."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != sha256:
        raise DigestMismatch(f"{path.name}: expected sha256 {sha256}, got {actual}")


def fetch(release: Release, cache: Path) -> Path:
    """The release's file in `cache`, downloaded if it is not there, its digest checked either way.

    Raises `DigestMismatch` for a cached file that has another content (it is left for the user to look at), and `FetchError`
    when pip fails, which includes pip's own refusal of a file with the wrong digest.
    """
    target = cache / release.filename
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as staging:
            _pip_download(release, Path(staging))
            os.replace(Path(staging, release.filename), target)
    check_digest(target, release.sha256)
    return target


def fetch_all(releases: Iterable[Release], cache: Path) -> list[Path]:
    """`fetch` for each, a few at a time; the paths come in the order asked for."""
    with ThreadPoolExecutor(max_workers=_PARALLEL_DOWNLOADS) as pool:
        return list(pool.map(lambda release: fetch(release, cache), releases))


def _pip_download(release: Release, staging: Path) -> None:
    # pip runs the build backend of a source distribution to learn its metadata. With --require-hashes it compares the digest
    # first, so nothing but the pinned code ever runs.
    requirements = staging / "requirements.txt"
    requirements.write_text(f"{release.project}=={release.version} --hash=sha256:{release.sha256}\n", encoding="utf-8")
    kind = "--only-binary" if release.is_wheel else "--no-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", kind, release.project, "--dest", str(staging), "--requirement", str(requirements)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{release.filename}: pip took longer than {_PIP_TIMEOUT_S} s") from error
    if done.returncode != 0:
        raise FetchError(f"{release.filename}: pip exited with {done.returncode}: {done.stderr.strip()[-2000:]}")
    if not (staging / release.filename).is_file():
        found = sorted(path.name for path in staging.iterdir() if path != requirements)
        raise FetchError(f"{release.filename}: pip brought {found} instead")


def unpack_sdist(archive: Path, target: Path) -> None:
    """Unpack what lies below the archive's one top directory as `target`, which must not exist and appears only when whole.

    Modes become 0755 or 0644 and times are the archive's, so that equal archives give equal trees.
    """
    with _staged(target) as writer, tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            relative = _below_top(member.name, writer.tops)
            if member.isdir():
                writer.directory(relative)
            elif member.isreg() and relative.parts:
                content = tar.extractfile(member)
                assert content is not None  # it is a regular file
                writer.file(relative, content, executable=bool(member.mode & 0o100), mtime=int(member.mtime))
            else:
                raise UnsafeArchive(f"{archive.name}: {member.name!r} is neither a regular file nor a directory")


def unpack_wheels(wheels: Iterable[tuple[Path, WheelPart]], target: Path) -> None:
    """Unpack pure wheels over each other as `target`, which must not exist and appears only when whole.

    pip would also write scripts that name this interpreter, and a record of them; a layer must not depend on where it is built,
    and `python3 -m` needs neither.
    """
    with _staged(target) as writer:
        for archive, part in wheels:
            below = PurePosixPath(part.take)
            with zipfile.ZipFile(archive) as wheel:
                for info in wheel.infolist():
                    path = _checked(info.filename)
                    if info.is_dir() or not path.is_relative_to(below):
                        continue
                    with wheel.open(info) as content:
                        writer.file(part.into / path.relative_to(below), content, executable=False, mtime=_WHEEL_MTIME)


def read_sdist(archive: Path, names: Iterable[str]) -> dict[str, str]:
    """The text of files of a source distribution, by their path below its top directory. Raises `KeyError` for one not there."""
    wanted = list(names)
    found: dict[str, str] = {}
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if name in wanted and member.isreg():
                content = tar.extractfile(member)
                assert content is not None  # it is a regular file
                found[name] = content.read().decode("utf-8")
    return {name: found[name] for name in wanted}


class _Writer:
    """Writes a tree beneath `root`, within the limits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tops: set[str] = set()
        self._entries = 0
        self._bytes = 0

    def directory(self, relative: PurePosixPath) -> None:
        self._count(relative)
        (self.root / relative).mkdir(mode=0o755, parents=True, exist_ok=True)

    def file(self, relative: PurePosixPath, content: IO[bytes], *, executable: bool, mtime: int) -> None:
        self._count(relative)
        path = self.root / relative
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        with path.open("xb") as out:
            while chunk := content.read(_COPY_BYTES):
                self._bytes += len(chunk)
                if self._bytes > MAX_ARCHIVE_BYTES:
                    raise UnsafeArchive(f"more than {MAX_ARCHIVE_BYTES} bytes")
                out.write(chunk)
        path.chmod(0o755 if executable else 0o644)
        os.utime(path, (mtime, mtime))

    def _count(self, relative: PurePosixPath) -> None:
        self._entries += 1
        if self._entries > MAX_ARCHIVE_ENTRIES:
            raise UnsafeArchive(f"more than {MAX_ARCHIVE_ENTRIES} entries, the last {str(relative)!r}")


@contextmanager
def _staged(target: Path) -> Iterator[_Writer]:
    """A writer to a new directory beside `target` that takes its name at the end, or vanishes."""
    if target.exists():
        raise FileExistsError(f"{target} exists")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        staging.chmod(0o755)
        try:
            yield _Writer(staging)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise UnsafeArchive(f"one name twice, or a file used as a directory: {error}") from error
        except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            raise UnsafeArchive(f"not a readable archive: {error}") from error
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or "\\" in name or not path.parts:
        raise UnsafeArchive(f"{name!r} does not name a place below the top")
    return path


def _below_top(name: str, tops: set[str]) -> PurePosixPath:
    path = _checked(name)
    tops.add(path.parts[0])
    if len(tops) > 1:
        raise UnsafeArchive(f"{name!r} is outside the one top directory")
    return PurePosixPath(*path.parts[1:])
