# SPDX-License-Identifier: Apache-2.0
"""Landlock: a thread gives up file access for itself and its children, with no privilege and for good."""

from __future__ import annotations

import errno
import os
import struct

from opendsec.kernel import abi, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from opendsec.kernel.syscalls import StrPath

EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
REMOVE_DIR = 1 << 4
REMOVE_FILE = 1 << 5
MAKE_CHAR = 1 << 6
MAKE_DIR = 1 << 7
MAKE_REG = 1 << 8
MAKE_SOCK = 1 << 9
MAKE_FIFO = 1 << 10
MAKE_BLOCK = 1 << 11
MAKE_SYM = 1 << 12
REFER = 1 << 13  # ABI 2
TRUNCATE = 1 << 14  # ABI 3
IOCTL_DEV = 1 << 15  # ABI 5

READ = EXECUTE | READ_FILE | READ_DIR
"""Read and execute beneath a directory."""
FILE_ONLY = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""The rights that a rule on something not a directory may have."""

NET_BIND_TCP = 1 << 0  # ABI 4
NET_CONNECT_TCP = 1 << 1

SCOPE_ABSTRACT_UNIX_SOCKET = 1 << 0  # ABI 6
SCOPE_SIGNAL = 1 << 1


def abi_version() -> int:
    """The kernel's Landlock ABI, 1 or more; 0 if it has none or was booted without."""
    try:
        return syscalls.landlock_create_ruleset(None, abi.LANDLOCK_CREATE_RULESET_VERSION)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return 0
        raise


def fs_rights(version: int) -> int:
    """Every file system right that an ABI version knows: what a ruleset can take away."""
    if version < 1:
        return 0
    last = 12 if version < 2 else 13 if version < 3 else 14 if version < 5 else 15
    return (1 << (last + 1)) - 1


class Ruleset:
    """What is handled is forbidden, except where a rule allows it. Rights and scopes unknown to the kernel are left out, as
    Landlock intends: less protection, never a failure. Holds a descriptor; close it, or use it as a context."""

    __slots__ = ("fd", "handled", "version")

    def __init__(self, handled: int, *, scoped: int = 0) -> None:
        self.version = abi_version()
        if not self.version:
            raise OSError(errno.ENOSYS, "landlock_create_ruleset: this kernel has no Landlock")
        self.handled = handled & fs_rights(self.version)
        attr = struct.pack("=Q", self.handled)
        if self.version >= 4:
            attr += struct.pack("=Q", 0)
        if self.version >= 6:
            attr += struct.pack("=Q", scoped)
        self.fd = syscalls.landlock_create_ruleset(attr)

    def allow(self, path: StrPath | int, rights: int) -> None:
        """Allow `rights` for a file or for everything beneath a directory, by path or descriptor."""
        fd = path if isinstance(path, int) else os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            rule = struct.pack("=Qi", rights & self.handled, fd)
            try:
                syscalls.landlock_add_rule(self.fd, abi.LANDLOCK_RULE_PATH_BENEATH, rule)
            except OSError as error:
                error.filename = path if isinstance(path, int) else os.fsdecode(path)
                raise
        finally:
            if fd is not path:
                os.close(fd)

    def restrict_self(self) -> None:
        """Bind this thread. Needs no_new_privs, or CAP_SYS_ADMIN in its user namespace."""
        syscalls.landlock_restrict_self(self.fd)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> Ruleset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def restrict(rules: Iterable[tuple[StrPath | int, int]], *, handled: int | None = None, scoped: int = 0) -> None:
    """All in one for a child before exec: forbid `handled` (left out: everything known) except as `rules` allow."""
    with Ruleset(fs_rights(abi_version()) if handled is None else handled, scoped=scoped) as ruleset:
        for path, rights in rules:
            ruleset.allow(path, rights)
        ruleset.restrict_self()
