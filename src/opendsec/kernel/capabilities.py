# SPDX-License-Identifier: Apache-2.0
"""Capability sets: names to bits and back, and giving them up in the one order that works."""

from __future__ import annotations

import errno

from opendsec.kernel import abi, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES: tuple[str, ...] = (
    "CAP_CHOWN",
    "CAP_DAC_OVERRIDE",
    "CAP_DAC_READ_SEARCH",
    "CAP_FOWNER",
    "CAP_FSETID",
    "CAP_KILL",
    "CAP_SETGID",
    "CAP_SETUID",
    "CAP_SETPCAP",
    "CAP_LINUX_IMMUTABLE",
    "CAP_NET_BIND_SERVICE",
    "CAP_NET_BROADCAST",
    "CAP_NET_ADMIN",
    "CAP_NET_RAW",
    "CAP_IPC_LOCK",
    "CAP_IPC_OWNER",
    "CAP_SYS_MODULE",
    "CAP_SYS_RAWIO",
    "CAP_SYS_CHROOT",
    "CAP_SYS_PTRACE",
    "CAP_SYS_PACCT",
    "CAP_SYS_ADMIN",
    "CAP_SYS_BOOT",
    "CAP_SYS_NICE",
    "CAP_SYS_RESOURCE",
    "CAP_SYS_TIME",
    "CAP_SYS_TTY_CONFIG",
    "CAP_MKNOD",
    "CAP_LEASE",
    "CAP_AUDIT_WRITE",
    "CAP_AUDIT_CONTROL",
    "CAP_SETFCAP",
    "CAP_MAC_OVERRIDE",
    "CAP_MAC_ADMIN",
    "CAP_SYSLOG",
    "CAP_WAKE_ALARM",
    "CAP_BLOCK_SUSPEND",
    "CAP_AUDIT_READ",
    "CAP_PERFMON",
    "CAP_BPF",
    "CAP_CHECKPOINT_RESTORE",
)
"""Indexed by capability number."""

NUMBERS: dict[str, int] = {name: number for number, name in enumerate(NAMES)}
ALL: int = (1 << len(NAMES)) - 1
"""The bit set of every capability this module knows."""

_SETPCAP = NUMBERS["CAP_SETPCAP"]


def mask(names: Iterable[str]) -> int:
    """The bit set of capability names; "CAP_" may be left out, case does not count. Raises ValueError."""
    bits = 0
    for name in names:
        upper = name.upper()
        number = NUMBERS.get(upper if upper.startswith("CAP_") else "CAP_" + upper)
        if number is None:
            raise ValueError(f"unknown capability: {name!r}")
        bits |= 1 << number
    return bits


def names(bits: int) -> list[str]:
    """The names in a bit set, lowest number first; a bit without a name is `CAP_<number>`."""
    return [NAMES[number] if number < len(NAMES) else f"CAP_{number}" for number in range(bits.bit_length()) if bits >> number & 1]


def last_cap() -> int:
    """The highest capability number the running kernel knows."""
    number = 63
    while number:
        try:
            syscalls.prctl(abi.PR_CAPBSET_READ, number)
        except OSError:
            number -= 1
        else:
            break
    return number


def bounding() -> int:
    """This thread's bounding set as a bit set."""
    bits = 0
    for number in range(64):
        try:
            bits |= syscalls.prctl(abi.PR_CAPBSET_READ, number) << number
        except OSError:
            break
    return bits


def ambient() -> int:
    """This thread's ambient set as a bit set."""
    bits = 0
    for number in range(64):
        try:
            bits |= syscalls.prctl(abi.PR_CAP_AMBIENT, abi.PR_CAP_AMBIENT_IS_SET, number) << number
        except OSError:
            break
    return bits


def drop_bounding(keep: int) -> None:
    """Take everything outside `keep` out of the bounding set. Needs CAP_SETPCAP in this user namespace."""
    for number in range(64):
        if keep >> number & 1:
            continue
        try:
            syscalls.prctl(abi.PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL and number > _SETPCAP:
                return  # past the kernel's last capability
            raise


def drop_to(*, bounding: int, effective: int = 0, permitted: int | None = None, inheritable: int = 0, ambient: int = 0) -> None:
    """Make this thread's five sets exactly these (bit sets, see `mask`).

    `permitted` left out means as `effective`. Call it as the last step that needs privilege, after the change of user:
    a change away from uid 0 empties permitted, effective and ambient unless PR_SET_KEEPCAPS was set. The order inside is
    forced: the bounding set needs CAP_SETPCAP, ambient bits must be permitted and inheritable already.
    """
    if permitted is None:
        permitted = effective
    drop_bounding(bounding)
    syscalls.prctl(abi.PR_CAP_AMBIENT, abi.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.capset(effective, permitted, inheritable)
    number = 0
    while ambient >> number:
        if ambient >> number & 1:
            syscalls.prctl(abi.PR_CAP_AMBIENT, abi.PR_CAP_AMBIENT_RAISE, number)
        number += 1
