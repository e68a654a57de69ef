# SPDX-License-Identifier: Apache-2.0
"""Working on somebody else's files from a thread of a privileged process.

The kernel keeps credentials per thread, and these calls reach it past glibc's habit of changing all threads alike, so a
worker thread can act on a sandbox's files while the rest of the process stays what it is. Two facts make that necessary:

* A file system mounted inside a user namespace gives no new file to an id that has no meaning there: root of the host gets
  EOVERFLOW. The file-system id of the thread has to be one of the sandbox's own.
* /proc answers by the reader's privilege. Root of the host, reading a sandbox's /proc for somebody, would answer with the
  host's memory and the kernel's addresses.

A change of the file-system id makes the process not dumpable (no core, no tracing by others of the same user). For a root
daemon that is no loss.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from opendsec.kernel import abi, capabilities, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

FILE_CAPABILITIES = capabilities.mask(("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "SETUID", "SETGID"))
"""All that work on files needs. Not among them, on purpose: SYS_ADMIN, SYS_RAWIO (/proc/kcore), SYS_PTRACE (other processes'
memory), SYSLOG (kernel addresses), MKNOD, LINUX_IMMUTABLE. SETUID and SETGID are there to change the two ids again."""

_STATX_MNT_ID = 0x1000
_STATX_MNT_ID_OFFSET = 144  # of stx_mnt_id in struct statx

_libc = ctypes.CDLL(None, use_errno=True)
_fchownat = _libc.fchownat
_fchownat.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_int]
_statx = _libc.statx
_statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]


def statx_mnt_id(fd: int) -> int:
    """The number of the mount that a descriptor was opened through; unique among mounts that are held open."""
    buffer = ctypes.create_string_buffer(256)
    if _statx(fd, b"", abi.AT_EMPTY_PATH, _STATX_MNT_ID, buffer) < 0:
        syscalls.raise_errno("statx", fd)
    (mask,) = struct.unpack_from("=I", buffer)
    if not mask & _STATX_MNT_ID:
        raise OSError(errno.ENOTSUP, f"statx: {os.strerror(errno.ENOTSUP)}")
    (number,) = struct.unpack_from("=Q", buffer, _STATX_MNT_ID_OFFSET)
    return int(number)


def chown_path(fd: int, uid: int, gid: int) -> None:
    """fchownat of what an O_PATH descriptor names, a symlink itself included; fchown refuses such descriptors."""
    if _fchownat(fd, b"", uid, gid, abi.AT_EMPTY_PATH) < 0:
        syscalls.raise_errno("fchownat", fd)


def chmod_path(fd: int, mode: int) -> None:
    """chmod of what an O_PATH descriptor names; fchmod refuses such descriptors, and fchmodat2 is younger than our kernels."""
    os.chmod(procfs.fd_path(fd), mode)


class FsUser:
    """This thread as (uid, gid) towards files, with `FILE_CAPABILITIES` or none; a context that restores what was before.

    New files belong to (uid, gid). With the capabilities every file can be reached and given away, whoever owns it.
    """

    __slots__ = ("_before", "_now", "_permitted", "_inheritable", "gid", "uid")

    def __init__(self, uid: int, gid: int) -> None:
        self.uid, self.gid = uid, gid
        self._before = self._now = (0, 0, 0)
        self._permitted = self._inheritable = 0

    def __enter__(self) -> FsUser:
        effective, self._permitted, self._inheritable = syscalls.capget()
        self._before = self._now = (*syscalls.getfsids(), effective)
        try:
            self._be(self.uid, self.gid, FILE_CAPABILITIES)
        except BaseException:
            self._be(*self._before)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._be(*self._before)

    def _be(self, uid: int, gid: int, effective: int) -> None:
        effective &= self._permitted
        if (uid, gid, effective) == self._now:
            return
        ids_differ, self._now = (uid, gid) != self._now[:2], (-1, -1, -1)  # unknown, should one of the steps fail
        if ids_differ:
            # First everything permitted: changing the ids needs SETUID and SETGID, which `bare` gave up.
            syscalls.capset(self._permitted, self._permitted, self._inheritable)
            syscalls.setfsgid(gid)
            syscalls.setfsuid(uid)  # takes file capabilities away or gives them back: the last word is capset's
        syscalls.capset(effective, self._permitted, self._inheritable)
        self._now = (uid, gid, effective)

    def become(self, uid: int, gid: int) -> None:
        """From here on new files belong to (uid, gid)."""
        self._be(uid, gid, FILE_CAPABILITIES)
        self.uid, self.gid = uid, gid

    def bare(self) -> Aside:
        """A context without any capability: what the kernel shows to (uid, gid), and no more."""
        return Aside(self, (self.uid, self.gid, 0))

    def suspended(self) -> Aside:
        """A context in which the thread is what it was before."""
        return Aside(self, self._before)


class Aside:
    """A stretch of other credentials inside a `FsUser`."""

    __slots__ = ("_credentials", "_user")

    def __init__(self, user: FsUser, credentials: tuple[int, int, int]) -> None:
        self._user, self._credentials = user, credentials

    def __enter__(self) -> None:
        self._user._be(*self._credentials)

    def __exit__(self, *_: object) -> None:
        self._user._be(self._user.uid, self._user.gid, FILE_CAPABILITIES)
