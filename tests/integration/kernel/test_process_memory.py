# SPDX-License-Identifier: Apache-2.0
"""Which pages of a private mapping are a process's own, and reading and writing them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from opendsec.kernel import process_memory
from opendsec.kernel.probes.tools import waiting_child
from opendsec.kernel.process_memory import PAGE

PAGES = 64
CHANGED = (0, 3, 4, 5, 40, 63)


@contextmanager
def copier(path: Path) -> Iterator[tuple[int, process_memory.Mapping]]:
    """A child that has mapped the file privately, read some pages and changed those of CHANGED."""
    path.write_bytes(b"f" * (PAGES * PAGE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        for number in CHANGED:
            memory[number * PAGE : number * PAGE + 1] = b"c"
        assert memory[10 * PAGE] == ord("f")
        with waiting_child() as (pid, _):
            (mapping,) = (one for one in process_memory.mappings(pid) if one.path == os.fsencode(path))
            yield pid, mapping


def expanded(ranges: Iterator[tuple[int, int]], mapping: process_memory.Mapping) -> list[int]:
    return [(at - mapping.start) // PAGE for start, end in ranges for at in range(start, end, PAGE)]


def test_own_pages_are_found_in_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with copier(tmp_path / "file") as (pid, mapping):
        assert mapping.end - mapping.start == PAGES * PAGE and mapping.offset == 0
        assert expanded(process_memory.private_pages(pid, mapping.start, mapping.end), mapping) == list(CHANGED)
        monkeypatch.setattr(process_memory, "_REGIONS_AT_ONCE", 2)  # more than fit into one answer
        assert expanded(process_memory.private_pages(pid, mapping.start, mapping.end), mapping) == list(CHANGED)
        monkeypatch.setattr(process_memory, "PAGEMAP_SCAN", 0xC060_66FF)  # a kernel before 6.7
        assert expanded(process_memory.private_pages(pid, mapping.start, mapping.end), mapping) == list(CHANGED)


def test_reading_and_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_MAX_IOVECS", 2)
    with copier(tmp_path / "file") as (pid, mapping), mmap.mmap(-1, PAGES * PAGE) as buffer:
        ranges = list(process_memory.private_pages(pid, mapping.start, mapping.end))
        process_memory.read_ranges(pid, ranges, buffer)
        assert all(buffer[n * PAGE] == ord("c") and buffer[n * PAGE + 1] == ord("f") for n in range(len(CHANGED)))
        buffer[:] = b"w" * len(buffer)
        process_memory.write_ranges(pid, ranges, buffer)
        process_memory.read_ranges(pid, [(mapping.start, mapping.end)], buffer)
        assert [n for n in range(PAGES) if buffer[n * PAGE] == ord("w")] == list(CHANGED)
        with pytest.raises(OSError, match="process_vm_readv"):
            process_memory.read_ranges(pid, [(mapping.end + (1 << 40), mapping.end + (1 << 40) + PAGE)], buffer)


def test_copies_keep_holes(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        for at in (0, 8 << 20, 40 << 20):
            file.seek(at)
            file.write(b"data" * 1024)
        file.truncate(64 << 20)
    with (tmp_path / "sparse").open("rb") as source, (tmp_path / "copy").open("wb") as target:
        process_memory.copy_file(source.fileno(), target.fileno())
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "sparse").read_bytes()
    assert (tmp_path / "copy").stat().st_blocks <= (tmp_path / "sparse").stat().st_blocks + 64
