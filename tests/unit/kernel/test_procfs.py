# SPDX-License-Identifier: Apache-2.0
"""Parsers of /proc against what a hostile process can put there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.kernel import procfs

TAIL = b" S 41 42 43 1025 -1 4194560 1 0 0 0 2 3 0 0 20 0 7 0 123456 1000 5 18446744073709551615 0"


@given(comm=st.binary(max_size=40))
def test_stat_whatever_the_name(comm: bytes) -> None:
    stat = procfs.Stat(b"77 (" + comm + b")" + TAIL)
    assert (stat.pid, stat.comm, stat.state, stat.ppid, stat.pgrp, stat.session) == (77, comm, "S", 41, 42, 43)
    assert (stat.threads, stat.start_time) == (7, 123456)


def test_stat_with_a_name_made_to_look_like_fields() -> None:
    stat = procfs.Stat(b"77 (x) R 1 1 1 0 -1 (y\n) Z 2) " + TAIL.strip())
    assert (stat.ppid, stat.start_time) == (41, 123456)


@given(data=st.binary(max_size=200))
def test_parsers_raise_nothing_but_value_error(data: bytes) -> None:
    for parse in (procfs.Stat, procfs.parse_status, procfs.parse_mountinfo, procfs.parse_cgroup, procfs.parse_meminfo, procfs.parse_limits):
        try:
            parse(data)
        except ValueError:
            pass


def test_status_first_field_counts() -> None:
    fields = procfs.parse_status(b"Name:\tx\\nUid:\t0\nUid:\t1000\t1000\t1000\t1000\nSeccomp:\t2\nUid:\t0\n\xff\n")
    assert fields["Uid"].split()[0] == "1000"
    assert fields["Seccomp"] == "2"
    assert fields["Name"] == "x\\nUid:\t0"


def escape(path: bytes) -> bytes:
    """As the kernel's mangle(): blanks, line ends and backslashes in octal."""
    return b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in path)


paths = st.binary(min_size=1, max_size=60).filter(lambda path: b"\0" not in path)


@given(path=paths)
def test_unescape_undoes_the_kernels_escapes(path: bytes) -> None:
    assert procfs.unescape(escape(path)) == path


def test_unescape_leaves_what_is_no_escape() -> None:
    assert procfs.unescape(rb"\04") == rb"\04"
    assert procfs.unescape(rb"a\x40\999") == rb"a\x40\999"
    assert procfs.unescape(b"\\") == b"\\"


@given(root=paths, point=paths, source=paths, optional=st.lists(st.sampled_from([b"shared:1", b"master:22", b"unbindable"]), max_size=3))
def test_mountinfo_whatever_the_paths(root: bytes, point: bytes, source: bytes, optional: list[bytes]) -> None:
    fields = [b"36", b"35", b"98:0", escape(root), escape(point), b"rw,noatime", *optional, b"-", b"ext4", escape(source), b"rw,errors=x"]
    (mount,) = procfs.parse_mountinfo(b" ".join(fields) + b"\n")
    assert (mount.mount_id, mount.parent_id, mount.device, mount.fstype) == (36, 35, "98:0", "ext4")
    assert (mount.root, mount.mount_point, mount.source) == (root, point, source)
    assert (mount.options, mount.super_options) == (("rw", "noatime"), ("rw", "errors=x"))
    assert list(mount.optional) == [tag.decode() for tag in optional]


def test_mountinfo_with_an_empty_source() -> None:
    (mount,) = procfs.parse_mountinfo(b"1 2 0:3 / /x rw - tmpfs  rw\n")
    assert (mount.source, mount.super_options) == (b"", ("rw",))


@pytest.mark.parametrize(
    "line", [b"", b"1 2", b"1 2 0:3 / /x rw - tmpfs", b"a 2 0:3 / /x rw - tmpfs none rw", b"1 2 0:3 / /x rw tmpfs none rw"]
)
def test_mountinfo_refuses_other_lines(line: bytes) -> None:
    with pytest.raises(ValueError, match="mountinfo"):
        procfs.Mount(line)


def test_cgroup_paths_may_hold_colons() -> None:
    groups = procfs.parse_cgroup(b"9:name=systemd:/a:b\n5:cpu,cpuacct:/c\n0::/d\n")
    assert groups == {"name=systemd": b"/a:b", "cpu": b"/c", "cpuacct": b"/c", "": b"/d"}


def test_meminfo() -> None:
    fields = procfs.parse_meminfo(b"MemTotal:   24684084 kB\nHugePages_Total:       3\nOdd: x kB\n")
    assert fields == {"MemTotal": 24684084 * 1024, "HugePages_Total": 3}


def test_limits() -> None:
    text = (
        b"Limit                     Soft Limit           Hard Limit           Units     \n"
        b"Max cpu time              unlimited            unlimited            seconds   \n"
        b"Max open files            1024                 524288               files     \n"
    )
    assert procfs.parse_limits(text) == {"Max cpu time": (None, None), "Max open files": (1024, 524288)}
