# SPDX-License-Identifier: Apache-2.0
"""A VM's disks as files: an empty ext4 for what the guest writes, empty qcow2 files to lie on it, and sparse copies.

The size of the ext4 is the sandbox's limit, plus what the file system needs for itself. It has no journal: a sandbox's disk does not
outlive a crash of its kernel, and what is saved stands still meanwhile.
"""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

from opendsec.api.errors import Unavailable

MIB = 1 << 20
CLUSTER_BITS = 16
CLUSTER = 1 << CLUSTER_BITS
_ENTRIES = CLUSTER // 8  # of an L2 table
HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_INODE_BYTES = 256
_FIXED_BYTES = 4 * MIB  # superblocks, group descriptors, bitmaps of a small file system
_BLOCK = 4096
_COPY = 1 << 20


def scratch_bytes(disk_bytes: int, inodes: int) -> int:
    """The size of a disk on which files can have `disk_bytes` in `inodes` of them: whole MiB."""
    size = disk_bytes + inodes * _INODE_BYTES + disk_bytes // 200 + _FIXED_BYTES
    return -(-size // MIB) * MIB


def format_scratch(path: Path, disk_bytes: int, inodes: int) -> None:
    """Make an ext4 file system in the new, sparse file `path`. Blocks. Raises Unavailable."""
    size = scratch_bytes(disk_bytes, inodes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)
    command = [
        *("mkfs.ext4", "-q", "-F", "-m", "0", "-b", str(_BLOCK), "-I", str(_INODE_BYTES), "-N", str(inodes)),
        # Nothing may write to it in the background: each clone would do so again, in pages and clusters of its own.
        *("-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", "-O", "^has_journal,^resize_inode,^metadata_csum,^64bit"),
        str(path),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env={**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"},
        )
    except FileNotFoundError:
        raise Unavailable("mkfs.ext4 is not installed (Debian package e2fsprogs); VMs need it for their disks") from None
    if done.returncode != 0:
        raise Unavailable(f"mkfs.ext4: {done.stderr.strip()[-300:]}")


def empty_overlay(size_bytes: int) -> bytes:
    """A qcow2 file (version 3) of that virtual size in which nothing is written yet. It names nothing that it lies on: whoever opens it
    says.

    cluster 0: header; 1: table of reference counts; 2: reference counts; from 3 on: L1 table.
    """
    l1_entries = -(-size_bytes // (CLUSTER * _ENTRIES))
    l1_clusters = max(-(-l1_entries * 8 // CLUSTER), 1)
    used = 3 + l1_clusters
    header = HEADER.pack(
        *(b"QFI\xfb", 3, 0, 0, CLUSTER_BITS, size_bytes, 0, l1_entries, 3 * CLUSTER, CLUSTER, 1, 0, 0),
        *(0, 0, 0, 4, 104),  # features; reference counts of 16 bits; length of this header
    )
    image = bytearray(used * CLUSTER)
    image[: len(header)] = header
    struct.pack_into(">Q", image, CLUSTER, 2 * CLUSTER)
    struct.pack_into(f">{used}H", image, 2 * CLUSTER, *(1,) * used)
    return bytes(image)


def write_overlay(path: Path, size_bytes: int) -> None:
    """A new empty overlay. It stays ours: QEMU gets it open."""
    image = empty_overlay(size_bytes)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        for at in (0, CLUSTER, 2 * CLUSTER):  # what is not zero
            os.pwrite(fd, image[at : at + _BLOCK], at)
        os.ftruncate(fd, len(image))
    finally:
        os.close(fd)


def copy_sparse(source: Path, target: Path, *, owner: int | None = None, mode: int = 0o600) -> int:
    """Copy a file that stands still into a new one, holes left out; the bytes copied. Blocks."""
    copied = 0
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            size = os.fstat(reading).st_size
            os.ftruncate(writing, size)
            at = 0
            while at < size:
                try:
                    start = os.lseek(reading, at, os.SEEK_DATA)
                except OSError:  # only a hole is left
                    break
                end = os.lseek(reading, start, os.SEEK_HOLE)
                at = start
                while at < end:
                    count = os.copy_file_range(reading, writing, min(end - at, 64 * _COPY), at, at)
                    if count == 0:
                        break
                    at += count
                    copied += count
                at = max(at, end)
            os.fchmod(writing, mode)
            if owner is not None and owner != os.geteuid():
                os.fchown(writing, owner, owner)
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return copied
