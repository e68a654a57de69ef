# SPDX-License-Identifier: Apache-2.0
"""The kernel that microVMs boot: Debian's cloud kernel, by the machine's own apt, unpacked once and never run here.

    kernels/<first 16 digits of a hash>/
        kernel.json     what it is
        vmlinux         uncompressed, as PVH wants it: the payload of the package's vmlinuz
        modules/        NAME.ko, plain, those of WANTED and what they need
        modules/order   their names, in the order in which they can be loaded

The kernel once chosen stays until an operator asks for a newer one: a template is of one kernel. Everything here blocks.
"""

from __future__ import annotations

import functools
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zstandard

from opendsec.api.errors import Unavailable
from opendsec.images import debian
from opendsec.runtime.vmm.locks import locked

WANTED = (
    "virtio_mmio",
    "virtio_blk",
    "virtio_scsi",
    "sd_mod",
    "virtio_net",
    "virtio_balloon",
    "virtio-rng",
    "erofs",
    "overlay",
)
PACKAGE = "linux-image-cloud-amd64"
OLDEST = (6, 6)  # older ones lack EROFS features and page reporting that we use; the next suite's backports have a newer one
VERSION = 1
MAX_VMLINUX = 256 << 20
DOWNLOAD_S = 600

_ZSTD = b"\x28\xb5\x2f\xfd"
_XZ = b"\xfd7zXZ\x00"
_RELEASE = re.compile(r"linux-image-[0-9][A-Za-z0-9.+~-]*-cloud-amd64")


class GuestKernel(msgspec.Struct, frozen=True, kw_only=True):
    """`kernel.json`, and where it lies."""

    version: int = VERSION
    key: str
    package: str  # name=version
    sha256: str  # of the package
    modules: tuple[str, ...]  # in loading order

    def vmlinux(self, root: Path) -> Path:
        return root / self.key / "vmlinux"

    def module(self, root: Path, name: str) -> Path:
        return root / self.key / "modules" / f"{name}.ko"


def installed(root: Path) -> GuestKernel | None:
    """The newest kernel below `root` (`<state>/vm/kernels`), or None."""
    found: list[tuple[float, GuestKernel]] = []
    for path in root.glob("*/kernel.json"):
        try:
            kernel = msgspec.json.decode(path.read_bytes(), type=GuestKernel)
            found.append((path.stat().st_mtime, kernel))
        except (msgspec.DecodeError, OSError):
            continue
    usable = [(age, kernel) for age, kernel in found if kernel.version == VERSION]
    return max(usable, key=lambda one: one[0])[1] if usable else None


def install(root: Path, *, refresh: bool = False) -> GuestKernel:
    """The kernel below `root`, fetched if there is none, or if a newer one is asked for. Raises Unavailable."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(root / "lock"):
        kernel = installed(root)
        if kernel is not None and not refresh:
            return kernel
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=root) as work:
            return _install(root, Path(work))


def _install(root: Path, work: Path) -> GuestKernel:
    package, deb = download(work)
    with open(deb, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    key = hashlib.sha256(f"{VERSION} {package} {sha256} {' '.join(WANTED)}".encode()).hexdigest()[:16]
    target = root / key
    if not (target / "kernel.json").exists():
        unpacked, made = work / "unpacked", work / "made"
        _run("dpkg-deb", "-x", str(deb), str(unpacked))
        (made / "modules").mkdir(parents=True)
        [image] = (unpacked / "boot").glob("vmlinuz-*")
        (made / "vmlinux").write_bytes(payload(image.read_bytes()))
        modules = collect([*unpacked.glob("lib/modules/*"), *unpacked.glob("usr/lib/modules/*")][0], made / "modules")
        kernel = GuestKernel(key=key, package=package, sha256=sha256, modules=tuple(modules))
        (made / "kernel.json").write_bytes(msgspec.json.encode(kernel))
        for path in (*made.glob("*"), *made.glob("modules/*"), made):
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)
        _sync(root)
    os.utime(target / "kernel.json")
    found = installed(root)
    assert found is not None
    return found


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- the package -------------------------------------------------------------------------------------------------------------


def download(work: Path) -> tuple[str, Path]:
    """The newest cloud kernel that the machine's apt knows; if that is too old, from the backports of the machine's own archive."""
    options: list[str] = []
    chosen = newest(_run("apt-cache", "madison", PACKAGE))
    if chosen is None or _number(chosen) < OLDEST:
        options = _backports(work)
        chosen = newest(_run("apt-cache", *options, "madison", PACKAGE)) or chosen
    if chosen is None:
        raise Unavailable(f"apt knows no {PACKAGE}; it is needed for microVMs")
    shown = _run("apt-cache", *options, "show", f"{PACKAGE}={chosen}")
    match = _RELEASE.search(shown.partition("\nDepends:")[2].partition("\n")[0])
    if match is None:
        raise Unavailable(f"{PACKAGE}={chosen} names no kernel")
    wanted = f"{match[0]}={chosen}"
    if chosen not in _run("apt-cache", *options, "madison", match[0]):
        wanted = match[0]
    _run("apt-get", *options, "-q", "download", wanted, cwd=work)
    files = list(work.glob("*.deb"))
    if len(files) != 1:
        raise Unavailable(f"apt-get download {wanted} gave {len(files)} files")
    return wanted, files[0]


def newest(madison: str) -> str | None:
    """The highest version in what `apt-cache madison` says, or None."""
    versions = [fields[1].strip() for line in madison.splitlines() if len(fields := line.split("|")) >= 3]
    return max(versions, key=_sortable, default=None)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@functools.cmp_to_key
def _sortable(one: str, other: str) -> int:
    for operator, value in (("lt", -1), ("gt", 1)):
        if subprocess.run(["dpkg", "--compare-versions", one, operator, other], check=False).returncode == 0:
            return value
    return 0


def _backports(work: Path) -> list[str]:
    """Options for apt with the backports of this machine's suite besides its own sources, lists of their own among them."""
    suite = debian.machine_suite(Path("/etc/os-release").read_text())
    entries = [
        entry._replace(suites=(f"{suite}-backports",))
        for entry in debian.select(debian.machine_sources(Path("/etc/apt")), suite)
        if suite in entry.suites
    ]
    sources = work / "backports.sources"
    sources.write_text("\n".join(entry.stanza() for entry in entries[:1]))
    (work / "lists/partial").mkdir(parents=True)
    options = ["-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=-", "-o", f"Dir::State::Lists={work / 'lists'}"]
    _run("apt-get", *options, "-q", "update")
    return options


def _run(*command: str, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError:
        raise Unavailable(f"{command[0]} is not installed; the guest kernel comes as a Debian package") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:2])} took longer than {DOWNLOAD_S} s") from None
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip()[-500:] or f'status {done.returncode}'}")
    return done.stdout


# --- what is in it -----------------------------------------------------------------------------------------------------------


def payload(image: bytes) -> bytes:
    """The ELF file in a bzImage. Raises Unavailable."""
    for magic, unpack in ((_ZSTD, _unzstd), (_XZ, _unxz)):
        at = image.find(magic)
        while at >= 0:
            try:
                found = unpack(image[at:])
            except (zstandard.ZstdError, lzma.LZMAError):
                found = b""
            if found.startswith(b"\x7fELF"):
                return found
            at = image.find(magic, at + 1)
    raise Unavailable("no vmlinux was found in the kernel image: it is neither packed with zstd nor with xz")


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj().decompress(data)


def _unxz(data: bytes) -> bytes:
    return lzma.LZMADecompressor().decompress(data, MAX_VMLINUX)


def collect(tree: Path, target: Path, wanted: Sequence[str] = WANTED) -> list[str]:
    """Write the modules `wanted` that are none of the kernel itself, and those that they need, plain; their names in loading order."""
    files = {_name(path): path for path in tree.glob("kernel/**/*.ko*")}
    builtin = {_name(Path(line)) for line in (tree / "modules.builtin").read_text().split()}
    order: list[str] = []
    contents: dict[str, bytes] = {}

    def add(name: str) -> None:
        name = name.replace("-", "_")
        if name in contents or name in builtin:
            return
        if name not in files:
            raise Unavailable(f"the kernel has no module {name}")
        contents[name] = _plain(files[name])
        for needed in needs(contents[name]):
            add(needed)
        order.append(name)

    for name in wanted:
        add(name)
    for name in order:
        (target / f"{name}.ko").write_bytes(contents[name])
    (target / "order").write_text("".join(f"{name}\n" for name in order))
    return order


def _name(path: Path) -> str:
    return path.name.partition(".")[0].replace("-", "_")


def _plain(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".xz":
        return lzma.decompress(data)
    if path.suffix == ".zst":
        return _unzstd(data)
    return data


def needs(module: bytes) -> list[str]:
    """What a module says that it needs: the `depends=` of its .modinfo."""
    match = re.search(rb"\0depends=([^\0]*)\0", module)
    return [name for name in match[1].decode().split(",") if name] if match else []
