# SPDX-License-Identifier: Apache-2.0
"""The files of control groups: what is written for each limit and read for each figure, on v1 and v2.

`homes` below maps a controller to (version, the group's directory there); `cgroups` knows where that is.
"""

from __future__ import annotations

import errno
import os

from opendsec.kernel import procfs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Homes = Mapping[str, tuple[int, str]]
    Limit = int | float | None

CONTROLLERS = ("memory", "cpu", "pids")
LIMITS = ("memory_bytes", "cpu_cores", "cpu_weight", "pids")
"""Keys of a limits mapping: bytes (no swap on top), cores (0.5 is half of one), weight 1 to 10,000 (default 100),
number of processes and threads. A value of None lifts the limit."""

PERIOD_US = 100_000
"""Length of the CPU quota's period."""
LEAST_QUOTA_US = 1000
SOCKET_PART = 8
"""On v1, the buffers of sockets may take one part in so many of the memory limit, on top of it."""
MAX_WEIGHT = 10_000


def parse_flat(data: bytes) -> dict[str, int]:
    """A flat-keyed file (`name number` a line); lines of another shape are passed over."""
    fields = {}
    for line in data.split(b"\n"):
        words = line.split()
        if len(words) == 2:
            try:
                fields[words[0].decode("ascii", "replace")] = int(words[1])
            except ValueError:
                continue
    return fields


def read_int(path: str) -> int | None:
    """The number in a file, None if this kernel has no such file."""
    try:
        return int(procfs.read(path))
    except FileNotFoundError:
        return None


# --- limits --------------------------------------------------------------------------------------------------------


def set_limits(homes: Homes, limits: Mapping[str, Limit]) -> None:
    """Write the limits given. Raises ValueError for an unknown key or a value out of range, before anything is written;
    OSError(ENOTSUP) for one whose controller is nowhere."""
    unknown = [key for key in limits if key not in LIMITS]
    if unknown:
        raise ValueError(f"unknown limits: {', '.join(unknown)}")
    writers = {"memory_bytes": _set_memory, "pids": _set_pids, "cpu_cores": _set_quota, "cpu_weight": _set_weight}
    for key, value in limits.items():
        _check_value(key, value)
    for key, value in limits.items():
        controller = key.partition("_")[0]
        if controller not in homes:
            raise OSError(errno.ENOTSUP, f"no cgroup hierarchy has the {controller} controller")
        version, path = homes[controller]
        writers[key](version, path, value)


def _check_value(key: str, value: Limit) -> None:
    if value is None:
        return
    if not value > 0:
        raise ValueError(f"{key} is above 0, not {value}")
    if value >= 1 << 62:
        raise ValueError(f"{key} is out of range: {value}")  # the kernel would silently cut some
    if key == "cpu_weight" and value > MAX_WEIGHT:
        raise ValueError(f"cpu_weight is 1 to {MAX_WEIGHT}, not {value}")


def _set_memory(version: int, path: str, value: Limit) -> None:
    if version == 2:
        procfs.write(f"{path}/memory.max", "max" if value is None else str(int(value)))
        try:
            procfs.write(f"{path}/memory.swap.max", "max" if value is None else "0")
        except FileNotFoundError:
            pass  # no swap in this kernel
        return
    text = "-1" if value is None else str(int(value))
    both, memory = f"{path}/memory.memsw.limit_in_bytes", f"{path}/memory.limit_in_bytes"
    swap_counted = os.path.exists(both)
    # memory <= memory+swap must hold in between as well, so a rise goes in the other order.
    try:
        procfs.write(memory, text)
    except OSError as error:
        if error.errno != errno.EINVAL or not swap_counted:
            raise
        procfs.write(both, text)
        procfs.write(memory, text)
    else:
        if swap_counted:
            procfs.write(both, text)
    # v1 counts the buffers of TCP and UDP apart, and does not limit them until told to: gigabytes, over loopback alone.
    sockets = f"{path}/memory.kmem.tcp.limit_in_bytes"
    if os.path.exists(sockets):
        procfs.write(sockets, "-1" if value is None else str(int(value) // SOCKET_PART))


def _set_pids(version: int, path: str, value: Limit) -> None:
    procfs.write(f"{path}/pids.max", "max" if value is None else str(int(value)))


def _set_quota(version: int, path: str, cores: Limit) -> None:
    quota = None if cores is None else max(LEAST_QUOTA_US, int(cores * PERIOD_US))
    if version == 2:
        procfs.write(f"{path}/cpu.max", f"{'max' if quota is None else quota} {PERIOD_US}")
    else:
        procfs.write(f"{path}/cpu.cfs_period_us", str(PERIOD_US))
        procfs.write(f"{path}/cpu.cfs_quota_us", "-1" if quota is None else str(quota))


def _set_weight(version: int, path: str, value: Limit) -> None:
    weight = 100 if value is None else max(1, int(value))
    if version == 2:
        procfs.write(f"{path}/cpu.weight", str(weight))
    else:
        procfs.write(f"{path}/cpu.shares", str(max(2, weight * 1024 // 100)))  # v1's default of 1024 is v2's of 100


# --- readings ------------------------------------------------------------------------------------------------------


def held_bytes(homes: Homes) -> int:
    """Memory that the group has and that the kernel cannot take back by itself: without the files that it only keeps at hand."""
    version, path = homes["memory"]
    used = read_int(f"{path}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}") or 0
    fields = parse_flat(procfs.read(f"{path}/memory.stat"))
    cached = fields.get("inactive_file", 0) + fields.get("active_file", 0) - fields.get("file_mapped" if version == 2 else "mapped_file", 0)
    return max(used - max(cached, 0), 0)


class Usage:
    """What a group uses now. None: this kernel does not say, or the group has no such controller."""

    __slots__ = ("cpu_us", "memory_bytes", "memory_peak_bytes", "pids")

    def __init__(self, homes: Homes, cpu_us: int | None, list_pids: Callable[[], list[int]]) -> None:
        self.cpu_us = cpu_us
        self.memory_bytes = self.memory_peak_bytes = None
        if "memory" in homes:
            version, path = homes["memory"]
            names = ("memory.current", "memory.peak") if version == 2 else ("memory.usage_in_bytes", "memory.max_usage_in_bytes")
            self.memory_bytes, self.memory_peak_bytes = (read_int(f"{path}/{name}") for name in names)
        # Without the controller threads go uncounted.
        self.pids = read_int(f"{homes['pids'][1]}/pids.current") if "pids" in homes else len(list_pids())


class Events:
    """What happened to a group since it was made. Counts only grow; without the controller they stay 0."""

    __slots__ = ("cpu_throttled", "cpu_throttled_us", "memory_max_hits", "oom_kills", "pids_max_hits")

    def __init__(self, homes: Homes) -> None:
        self.oom_kills = self.memory_max_hits = self.pids_max_hits = self.cpu_throttled = self.cpu_throttled_us = 0
        if "memory" in homes:
            version, path = homes["memory"]
            if version == 2:
                fields = parse_flat(procfs.read(f"{path}/memory.events"))
                self.oom_kills, self.memory_max_hits = fields.get("oom_kill", 0), fields.get("max", 0)
            else:
                self.oom_kills = parse_flat(procfs.read(f"{path}/memory.oom_control")).get("oom_kill", 0)
                # With swap forbidden, memory+swap refuses first and counts nothing; but no OOM kill comes without a refusal.
                self.memory_max_hits = max(read_int(f"{path}/memory.failcnt") or 0, self.oom_kills)
        if "pids" in homes:
            self.pids_max_hits = parse_flat(procfs.read(f"{homes['pids'][1]}/pids.events")).get("max", 0)
        if "cpu" in homes:
            version, path = homes["cpu"]
            fields = parse_flat(procfs.read(f"{path}/cpu.stat"))
            self.cpu_throttled = fields.get("nr_throttled", 0)
            self.cpu_throttled_us = fields.get("throttled_usec", 0) if version == 2 else fields.get("throttled_time", 0) // 1000
