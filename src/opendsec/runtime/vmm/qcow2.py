# SPDX-License-Identifier: Apache-2.0
"""One qcow2 file of several that lie on each other, so that chains of snapshots stay short.

Only what our QEMUs write is understood: version 3, clusters of 64 KiB, no compression, encryption or internal snapshots. The files were
written by QEMU, which a hostile guest may have taken over: every number is checked before it is used. The result names only clusters
that were in the sources, so no more can come of it than what the guest could write there itself.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from opendsec.api.errors import Unavailable
from opendsec.runtime.vmm.disks import CLUSTER, CLUSTER_BITS, HEADER

ENTRIES = CLUSTER // 8  # of an L2 table
REFERENCES = CLUSTER // 2  # of a cluster of reference counts
ZERO = -1  # where a cluster lies that is all zeros

_OFFSET = 0x00FF_FFFF_FFFF_FE00
_COMPRESSED = 1 << 62
_COPIED = 1 << 63
_READS_AS_ZERO = 1

Place = tuple[int, int]  # number of the file, offset or ZERO


def clusters(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """What is written in an open file, of a disk of that virtual size: (number of the cluster in the disk, offset in the file or ZERO).
    Raises Unavailable for a file that is not as ours are."""
    data = os.pread(fd, HEADER.size, 0)
    if len(data) < HEADER.size:
        raise Unavailable("a disk is no qcow2 file")
    (magic, version, _, _, bits, said, crypt, l1_entries, l1, _, _, internal, _, incompatible, *_) = HEADER.unpack(data)
    known = (magic, version, bits, said, crypt, internal, incompatible) == (b"QFI\xfb", 3, CLUSTER_BITS, size, 0, 0, 0)
    end = os.fstat(fd).st_size
    if not known or not 0 < l1_entries <= -(-size // (CLUSTER * ENTRIES)) or l1 % CLUSTER or l1 + l1_entries * 8 > end + CLUSTER:
        raise Unavailable("a disk is a qcow2 file of an unknown kind")
    return _walk(fd, size, l1, l1_entries, end)


def _walk(fd: int, size: int, l1: int, l1_entries: int, end: int) -> Iterator[tuple[int, int]]:
    last = -(-size // CLUSTER)
    for number, (entry,) in enumerate(struct.iter_unpack(">Q", os.pread(fd, l1_entries * 8, l1).ljust(l1_entries * 8, b"\0"))):
        table = entry & _OFFSET
        if not table:
            continue
        if table % CLUSTER or table >= end:
            raise Unavailable("a disk's tables lie outside of it")
        raw = os.pread(fd, CLUSTER, table).ljust(CLUSTER, b"\0")
        for index, (found,) in enumerate(struct.iter_unpack(">Q", raw)):
            if not found:
                continue
            cluster, offset = number * ENTRIES + index, found & _OFFSET
            if found & _COMPRESSED or cluster >= last or offset % CLUSTER or offset >= end:
                raise Unavailable("a disk's clusters lie outside of it")
            if found & _READS_AS_ZERO:
                yield cluster, ZERO
            elif offset:
                yield cluster, offset


def merge(chain: Sequence[Path], target: Path, size: int) -> int:
    """Write to the new file `target` what the files of `chain`, lowest first, are together; the bytes of data in it. All are disks of
    that virtual size: what the files themselves say of it decides about nothing. Blocks."""
    with ExitStack() as stack:
        sources = []
        for path in chain:
            sources.append(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
            stack.callback(os.close, sources[-1])
        found = dict[int, Place]()
        for number, fd in enumerate(sources):
            found.update((cluster, (number, offset)) for cluster, offset in clusters(fd, size))
        fresh = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        stack.callback(os.close, fresh)
        try:
            return _write(fresh, sources, size, found)
        except BaseException:
            target.unlink()
            raise


def _write(fresh: int, sources: Sequence[int], size: int, found: dict[int, Place]) -> int:
    """header | table of reference counts | reference counts | L1 table | L2 tables | data"""
    l1_entries = -(-size // (CLUSTER * ENTRIES))
    l1_clusters = -(-l1_entries * 8 // CLUSTER)
    tables = sorted({cluster // ENTRIES for cluster in found})
    data = [cluster for cluster in sorted(found) if found[cluster][1] != ZERO]
    counts = 1
    while counts * REFERENCES < (total := 2 + counts + l1_clusters + len(tables) + len(data)):
        counts += 1
    if counts > ENTRIES:
        raise Unavailable("a disk is too large to be merged")
    l1 = 2 + counts
    first_table = l1 + l1_clusters
    first_data = first_table + len(tables)
    header = HEADER.pack(
        *(b"QFI\xfb", 3, 0, 0, CLUSTER_BITS, size, 0, l1_entries, l1 * CLUSTER, CLUSTER, 1, 0, 0),
        *(0, 0, 0, 4, HEADER.size),
    )
    os.ftruncate(fresh, total * CLUSTER)
    os.pwrite(fresh, header, 0)
    os.pwrite(fresh, struct.pack(f">{counts}Q", *((2 + number) * CLUSTER for number in range(counts))), CLUSTER)
    os.pwrite(fresh, struct.pack(f">{total}H", *(1,) * total), 2 * CLUSTER)
    entries = [0] * l1_entries
    for index, table in enumerate(tables):
        entries[table] = (first_table + index) * CLUSTER | _COPIED
    os.pwrite(fresh, struct.pack(f">{l1_entries}Q", *entries), l1 * CLUSTER)
    place = {cluster: (first_data + index) * CLUSTER for index, cluster in enumerate(data)}
    for index, table in enumerate(tables):
        row = [0] * ENTRIES
        for cluster in range(table * ENTRIES, (table + 1) * ENTRIES):
            if cluster in place:
                row[cluster % ENTRIES] = place[cluster] | _COPIED
            elif cluster in found:
                row[cluster % ENTRIES] = _READS_AS_ZERO
        os.pwrite(fresh, struct.pack(f">{ENTRIES}Q", *row), (first_table + index) * CLUSTER)
    for cluster, to in place.items():
        number, offset = found[cluster]
        _copy(sources[number], fresh, offset, to)
    return len(data) * CLUSTER


def _copy(source: int, target: int, offset: int, to: int) -> None:
    """A cluster. What lies beyond the end of a file is zeros."""
    done = 0
    while done < CLUSTER:
        count = os.copy_file_range(source, target, CLUSTER - done, offset + done, to + done)
        if not count:
            break
        done += count
