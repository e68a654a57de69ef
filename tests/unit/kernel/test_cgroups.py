# SPDX-License-Identifier: Apache-2.0
"""Where controllers are found, and what is written and read for each limit, on the v2 driver too, which this machine may not have."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.kernel import cgroup_files, cgroups, procfs

LIMITS: dict[str, int | float | None] = {"memory_bytes": 1 << 30, "cpu_cores": 1.5, "cpu_weight": 50, "pids": 64}


def mounts(text: str) -> list[procfs.Mount]:
    return procfs.parse_mountinfo(text.encode())


PURE = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = """31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
37 31 0:34 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer
39 31 0:36 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids
40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd
"""
HYBRID = V1 + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"


def test_pure_v2() -> None:
    found = cgroups.find_hierarchies(mounts(PURE), {"/sys/fs/cgroup": "cpuset cpu io memory hugetlb pids\n"})
    assert (found.mode, found.v2, found.missing) == ("v2", "/sys/fs/cgroup", [])
    group = found.group("opendsec-e1/s1")
    assert group.tree_path == "/sys/fs/cgroup/opendsec-e1/s1"
    assert group.join_paths() == group.child("p1").join_paths() == []


def test_hybrid() -> None:
    found = cgroups.find_hierarchies(mounts(HYBRID), {"/sys/fs/cgroup/unified": "hugetlb\n"})
    assert (found.mode, found.v2, found.missing) == ("hybrid", "/sys/fs/cgroup/unified", [])
    group = found.group("e/s")
    assert group.tree_path == "/sys/fs/cgroup/unified/e/s"
    assert group.join_paths() == [f"/sys/fs/cgroup/{name}/e/s/tasks" for name in ("memory", "cpu,cpuacct", "pids")]
    assert group.child("p").join_paths() == group.join_paths()


def test_v1_alone() -> None:
    found = cgroups.find_hierarchies(mounts(V1), {})
    assert (found.mode, found.v2, found.missing) == ("v1", None, [])
    group = found.group("e/s")
    assert group.tree_path == "/sys/fs/cgroup/freezer/e/s"
    assert group.child("p").join_paths() == [
        *[f"/sys/fs/cgroup/{name}/e/s/tasks" for name in ("memory", "cpu,cpuacct", "pids")],
        "/sys/fs/cgroup/freezer/e/s/p/tasks",
    ]
    assert group.open_v2_dir() is None


def test_controllers_split_between_both() -> None:
    text = PURE.replace("/sys/fs/cgroup ", "/u ") + "35 31 0:32 / /m rw - cgroup cgroup rw,memory\n"
    found = cgroups.find_hierarchies(mounts(text), {"/u": "cpu pids"})
    assert found.homes == {"cpu": (2, "/u"), "pids": (2, "/u"), "memory": (1, "/m")}
    assert found.mode == "hybrid"


def test_nothing_mounted() -> None:
    found = cgroups.find_hierarchies([], {})
    assert (found.mode, found.missing) == ("none", ["memory", "cpu", "pids"])
    with pytest.raises(OSError, match="no cgroup hierarchy"):
        found.group("x").exists()


@pytest.mark.parametrize("name", ["a", "opendsec-e1/s1/proc_0", "A.b-c_9", "a" * 200])
def test_names(name: str) -> None:
    assert cgroups.check_name(name) == name


@pytest.mark.parametrize("name", ["", "/", "/a", "a/", "a//b", "..", "a/../b", ".a", "a b", "a\n", "a\0", "é", "a/.hidden", "*"])
def test_names_that_could_reach_elsewhere(name: str) -> None:
    with pytest.raises(ValueError, match="not a cgroup name"):
        cgroups.check_name(name)


def test_a_childs_name_has_one_component() -> None:
    with pytest.raises(ValueError, match="one component"):
        cgroups.Hierarchies("/x", {}).group("a").child("b/c")


@given(data=st.binary(max_size=200))
def test_parse_flat_never_raises(data: bytes) -> None:
    assert all(isinstance(value, int) for value in cgroup_files.parse_flat(data).values())


def test_parse_flat() -> None:
    assert cgroup_files.parse_flat(b"populated 1\nfrozen 0\nodd\nname x\nsum 1 2\n") == {"populated": 1, "frozen": 0}


# --- the files of each driver, in a directory that plays the hierarchy ---------------------------------------------


def fake(folder: Path, version: int, contents: dict[str, str]) -> dict[str, tuple[int, str]]:
    for name, content in contents.items():
        (folder / name).write_text(content)
    return {name: (version, str(folder)) for name in ("memory", "cpu", "pids")}


V2_FILES = {
    "memory.max": "",
    "memory.swap.max": "",
    "cpu.max": "",
    "cpu.weight": "",
    "pids.max": "",
    "memory.current": "4096\n",
    "memory.peak": "8192\n",
    "pids.current": "3\n",
    "memory.events": "low 0\nhigh 0\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n",
    "pids.events": "max 5\n",
    "cpu.stat": "usage_usec 900\nnr_periods 9\nnr_throttled 4\nthrottled_usec 77\n",
}
V1_FILES = {
    "memory.limit_in_bytes": "",
    "memory.memsw.limit_in_bytes": "",
    "cpu.cfs_period_us": "",
    "cpu.cfs_quota_us": "",
    "cpu.shares": "",
    "pids.max": "",
    "memory.usage_in_bytes": "4096\n",
    "memory.max_usage_in_bytes": "8192\n",
    "memory.failcnt": "7\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    "pids.current": "3\n",
    "pids.events": "max 5\n",
    "cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 77000\n",
}


def test_limits_on_v2(tmp_path: Path) -> None:
    homes = fake(tmp_path, 2, V2_FILES)
    cgroup_files.set_limits(homes, LIMITS)
    written = {name: (tmp_path / name).read_text() for name in ("memory.max", "memory.swap.max", "cpu.max", "cpu.weight", "pids.max")}
    assert written == {
        "memory.max": "1073741824",
        "memory.swap.max": "0",
        "cpu.max": "150000 100000",
        "cpu.weight": "50",
        "pids.max": "64",
    }


def test_limits_on_v1(tmp_path: Path) -> None:
    homes = fake(tmp_path, 1, V1_FILES)
    cgroup_files.set_limits(homes, LIMITS)
    assert {name: (tmp_path / name).read_text() for name in list(V1_FILES)[:6]} == {
        "memory.limit_in_bytes": "1073741824",
        "memory.memsw.limit_in_bytes": "1073741824",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "150000",
        "cpu.shares": "512",
        "pids.max": "64",
    }


@pytest.mark.parametrize(
    ("version", "files", "lifted"), [(1, V1_FILES, {"-1", "1024", "max"}), (2, V2_FILES, {"max", "max 100000", "100"})]
)
def test_none_lifts_a_limit(tmp_path: Path, version: int, files: dict[str, str], lifted: set[str]) -> None:
    homes = fake(tmp_path, version, files)
    cgroup_files.set_limits(homes, dict.fromkeys(cgroup_files.LIMITS))
    texts = {(tmp_path / name).read_text() for name, before in files.items() if not before} - {"100000"}
    assert texts == lifted


@pytest.mark.parametrize(("version", "files"), [(1, V1_FILES), (2, V2_FILES)])
def test_readings(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    homes = fake(tmp_path, version, files)
    used = cgroup_files.Usage(homes, 12, list)
    assert (used.memory_bytes, used.memory_peak_bytes, used.cpu_us, used.pids) == (4096, 8192, 12, 3)
    events = cgroup_files.Events(homes)
    assert (events.oom_kills, events.memory_max_hits, events.pids_max_hits) == (1, 7, 5)
    assert (events.cpu_throttled, events.cpu_throttled_us) == (4, 77)


def test_readings_of_an_older_kernel(tmp_path: Path) -> None:
    homes = fake(tmp_path, 2, V2_FILES)
    (tmp_path / "memory.peak").unlink()
    (tmp_path / "memory.swap.max").unlink()
    cgroup_files.set_limits(homes, {"memory_bytes": 4096})
    assert not (tmp_path / "memory.swap.max").exists()
    assert cgroup_files.Usage(homes, None, list).memory_peak_bytes is None


def test_without_controllers() -> None:
    used, events = cgroup_files.Usage({}, None, lambda: [4, 5]), cgroup_files.Events({})
    assert (used.memory_bytes, used.pids, events.oom_kills) == (None, 2, 0)
    with pytest.raises(OSError, match="memory controller") as raised:
        cgroup_files.set_limits({}, {"memory_bytes": 1})
    assert raised.value.errno == errno.ENOTSUP


@pytest.mark.parametrize(
    "limits",
    [
        {"memory": 1},
        {"memory_bytes": 0},
        {"memory_bytes": -1},
        {"cpu_cores": 0.0},
        {"cpu_cores": float("nan")},
        {"cpu_weight": 10_001},
        {"pids": 0},
    ],
)
def test_wrong_limits_write_nothing(tmp_path: Path, limits: dict[str, int | float | None]) -> None:
    homes = fake(tmp_path, 2, V2_FILES)
    with pytest.raises(ValueError, match=next(iter(limits))):
        cgroup_files.set_limits(homes, {"pids": 7, **limits} if "pids" not in limits else limits)
    assert (tmp_path / "pids.max").read_text() == ""


def test_the_least_quota_is_the_kernels(tmp_path: Path) -> None:
    cgroup_files.set_limits(fake(tmp_path, 2, V2_FILES), {"cpu_cores": 0.0001})
    assert (tmp_path / "cpu.max").read_text() == "1000 100000"
