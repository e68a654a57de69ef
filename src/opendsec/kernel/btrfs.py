# SPDX-License-Identifier: Apache-2.0
"""btrfs: subvolumes, snapshots and quota groups by ioctl, for a pool of scratch disks.

A subvolume has the quota group 0/<its id>. A limit on it is exact when written to (EDQUOT), reservations included; what
`qgroup_usage` reports as referenced lags until the next commit. btrfs cannot limit inodes: they cost metadata bytes, which
count. Deleting a subvolume returns at once; the kernel frees the space later (`wait_cleaned`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from opendsec.kernel import abi, procfs, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from opendsec.kernel.syscalls import StrPath

_MAGIC = 0x94


def _ioctl_number(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | _MAGIC << 8 | number


_W, _R, _WR = 1, 2, 3
SNAP_CREATE_V2 = _ioctl_number(_W, 23, 4096)
SUBVOL_CREATE_V2 = _ioctl_number(_W, 24, 4096)
SNAP_DESTROY_V2 = _ioctl_number(_W, 63, 4096)
INO_LOOKUP = _ioctl_number(_WR, 18, 4096)
FS_INFO = _ioctl_number(_R, 31, 1024)
QUOTA_CTL = _ioctl_number(_WR, 40, 16)
QGROUP_CREATE = _ioctl_number(_W, 42, 16)
QGROUP_LIMIT = _ioctl_number(_R, 43, 48)
QUOTA_RESCAN_WAIT = _MAGIC << 8 | 46
SYNC = _MAGIC << 8 | 8
START_SYNC = _ioctl_number(_R, 24, 8)
TREE_SEARCH_V2 = _ioctl_number(_WR, 17, 112)
SUBVOL_SYNC_WAIT = _ioctl_number(_W, 65, 16)

SUBVOL_RDONLY = 1 << 1
SUBVOL_QGROUP_INHERIT = 1 << 2
QGROUP_INHERIT_SET_LIMITS = 1 << 0
QGROUP_LIMIT_MAX_RFER = 1 << 0
QUOTA_CTL_ENABLE, QUOTA_CTL_DISABLE, QUOTA_CTL_ENABLE_SIMPLE_QUOTA = 1, 2, 4
SUBVOL_SYNC_WAIT_FOR_ONE = 0
FIRST_FREE_OBJECTID = 256
_LAST_FREE_OBJECTID = 2**64 - 256
_INODE_ITEM = 1
NAME_MAX = 255
_NO_LIMIT = 0xFFFF_FFFF_FFFF_FFFF


def _ioctl(fd: int, request: int, argument: bytes | bytearray | int, what: str, subject: StrPath | None = None) -> None:
    if isinstance(argument, bytes):
        argument = bytearray(argument)  # Python takes only buffers that it may write to at their full size
    try:
        fcntl.ioctl(fd, request, argument)
    except OSError as error:
        message = f"{what}: {os.strerror(error.errno or 0)}"
        raise OSError(error.errno, message, fd if subject is None else os.fsdecode(subject)) from None


class _Buffer:
    """A structure that outlives the ioctl that points at it, and its address."""

    __slots__ = ("address", "data")

    def __init__(self, content: bytes) -> None:
        import ctypes

        self.data = ctypes.create_string_buffer(content, len(content))
        self.address = ctypes.addressof(self.data)


def _limit(max_bytes: int | None) -> bytes:
    """struct btrfs_qgroup_limit: flags, and the most that may be referenced; None lifts the limit."""
    return struct.pack("=5Q", QGROUP_LIMIT_MAX_RFER, _NO_LIMIT if max_bytes is None else max_bytes, 0, 0, 0)


def _volume_args(fd: int, flags: int, name: StrPath, inherit: _Buffer | None = None) -> bytes:
    encoded = os.fsencode(name)
    if not encoded or len(encoded) > NAME_MAX or b"/" in encoded or b"\0" in encoded or encoded in (b".", b".."):
        raise OSError(errno.EINVAL, "not a subvolume's name", os.fsdecode(name))
    size, pointer = 0, 0
    if inherit is not None:
        flags |= SUBVOL_QGROUP_INHERIT
        size, pointer = len(inherit.data), inherit.address
    return struct.pack("=qQQQQQQ4040s", fd, 0, flags, size, pointer, 0, 0, encoded)


def _inherit(max_bytes: int | None) -> _Buffer | None:
    """struct btrfs_qgroup_inherit that sets the new subvolume's limit in the same step as it is made."""
    if max_bytes is None:
        return None
    return _Buffer(struct.pack("=4Q", QGROUP_INHERIT_SET_LIMITS, 0, 0, 0) + _limit(max_bytes))


def subvolume_create(parent_fd: int, name: StrPath, *, max_bytes: int | None = None) -> None:
    """Make an empty subvolume in a directory, with a limit on its bytes from the start (needs quotas on)."""
    inherit = _inherit(max_bytes)
    _ioctl(parent_fd, SUBVOL_CREATE_V2, _volume_args(0, 0, name, inherit), "BTRFS_IOC_SUBVOL_CREATE_V2", name)


def snapshot(source_fd: int, parent_fd: int, name: StrPath, *, read_only: bool = False, max_bytes: int | None = None) -> None:
    """Make `name` in a directory a snapshot of the subvolume that `source_fd` is the root of, with a limit of its own."""
    flags = SUBVOL_RDONLY if read_only else 0
    _ioctl(parent_fd, SNAP_CREATE_V2, _volume_args(source_fd, flags, name), "BTRFS_IOC_SNAP_CREATE_V2", name)
    # Classic quotas give a snapshot its source's limit, whatever is asked for at its making; simple ones do not.
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent_fd)
    try:
        qgroup_limit(parent_fd, subvolume_id(fd), max_bytes)
    except OSError as error:
        if error.errno != errno.ENOTCONN or max_bytes is not None:
            subvolume_destroy(parent_fd, name)
            raise
        # Quotas are off, and no limit was asked for.
    finally:
        os.close(fd)


def subvolume_destroy(parent_fd: int, name: StrPath) -> None:
    """Delete a subvolume and all it holds, whatever its size, at once. Not those nested in it (ENOTEMPTY)."""
    _ioctl(parent_fd, SNAP_DESTROY_V2, _volume_args(0, 0, name), "BTRFS_IOC_SNAP_DESTROY_V2", name)


def subvolume_id(fd: int) -> int:
    """The id of the subvolume that a file or directory lies in."""
    args = bytearray(struct.pack("=QQ4080s", 0, FIRST_FREE_OBJECTID, b""))
    _ioctl(fd, INO_LOOKUP, args, "BTRFS_IOC_INO_LOOKUP")
    (tree,) = struct.unpack_from("=Q", args)
    return int(tree)


def is_subvolume(fd: int) -> bool:
    """Whether `fd` is the root of a subvolume."""
    return os.fstat(fd).st_ino == FIRST_FREE_OBJECTID and syscalls.fstatfs_type(fd) == abi.BTRFS_SUPER_MAGIC


def filesystem_id(fd: int) -> str:
    """The file system's UUID, as /sys/fs/btrfs names it."""
    args = bytearray(1024)
    _ioctl(fd, FS_INFO, args, "BTRFS_IOC_FS_INFO")
    digits = args[16:32].hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


# --- quotas --------------------------------------------------------------------------------------------------------


def quota_enable(fd: int, *, simple: bool = False) -> None:
    """Switch accounting on. `simple` (Linux 6.7) counts each extent for the subvolume that wrote it: much cheaper when there
    are many snapshots, but data shared with a snapshot then counts for its origin alone."""
    command = QUOTA_CTL_ENABLE_SIMPLE_QUOTA if simple else QUOTA_CTL_ENABLE
    _ioctl(fd, QUOTA_CTL, bytearray(struct.pack("=QQ", command, 0)), "BTRFS_IOC_QUOTA_CTL")


def quota_rescan_wait(fd: int) -> None:
    """Wait until the scan that enabling starts has counted what was there."""
    _ioctl(fd, QUOTA_RESCAN_WAIT, 0, "BTRFS_IOC_QUOTA_RESCAN_WAIT")


def qgroup_limit(fd: int, subvolume: int, max_bytes: int | None) -> None:
    """Limit, or with None no longer limit, the bytes that a subvolume refers to."""
    args = bytearray(struct.pack("=Q", subvolume) + _limit(max_bytes))
    _ioctl(fd, QGROUP_LIMIT, args, "BTRFS_IOC_QGROUP_LIMIT")


def qgroup_destroy(fd: int, subvolume: int) -> bool:
    """Drop the group of a deleted subvolume, which older kernels keep. False while the subvolume is still being cleaned."""
    try:
        _ioctl(fd, QGROUP_CREATE, struct.pack("=QQ", 0, subvolume), "BTRFS_IOC_QGROUP_CREATE")
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        if error.errno not in (errno.ENOENT, errno.ENOTCONN):
            raise
    return True


class QgroupUsage:
    """Bytes. `reserved_bytes` is written or promised and not committed yet; `max_bytes` None is no limit."""

    __slots__ = ("exclusive_bytes", "max_bytes", "referenced_bytes", "reserved_bytes")

    def __init__(self, referenced_bytes: int, exclusive_bytes: int, reserved_bytes: int, max_bytes: int | None) -> None:
        self.referenced_bytes, self.exclusive_bytes = referenced_bytes, exclusive_bytes
        self.reserved_bytes, self.max_bytes = reserved_bytes, max_bytes


def qgroup_usage(filesystem: str, subvolume: int) -> QgroupUsage:
    """What a subvolume uses; `filesystem` as from `filesystem_id`. OSError(ENOENT): no such group, or quotas are off."""
    folder = f"/sys/fs/btrfs/{filesystem}/qgroups/0_{subvolume}"
    limited = int(procfs.read(f"{folder}/limit_flags")) & QGROUP_LIMIT_MAX_RFER
    maximum = int(procfs.read(f"{folder}/max_referenced"))
    return QgroupUsage(
        int(procfs.read(f"{folder}/referenced")),
        int(procfs.read(f"{folder}/exclusive")),
        sum(int(procfs.read(f"{folder}/{name}")) for name in ("rsv_data", "rsv_meta_pertrans", "rsv_meta_prealloc")),
        maximum if limited and maximum != _NO_LIMIT else None,
    )


def qgroup_pending(filesystem: str, subvolume: int) -> tuple[int, int]:
    """(referenced bytes, data bytes written or promised since): of `qgroup_usage`, what is cheap and not an estimate. Metadata
    reservations are left out, since the kernel reserves many times what it then needs."""
    folder = f"/sys/fs/btrfs/{filesystem}/qgroups/0_{subvolume}"
    return int(procfs.read(f"{folder}/referenced")), int(procfs.read(f"{folder}/rsv_data"))


# --- inodes --------------------------------------------------------------------------------------------------------
#
# Nothing counts them. But a subvolume numbers its inodes upwards from 256 and never uses a number again, so the highest one bounds how
# many there are, and finding it is a search in a tree, whatever its size. Both see what is not committed yet.

_SEARCH_KEY = struct.Struct("=7Q4I4QQ")  # struct btrfs_ioctl_search_key, and the size of the buffer after it
_SEARCH_HEADER = struct.Struct("=QQQII")  # transaction, object, offset, type, length of the item that follows
_SEARCH_BYTES = 16_384


def _search(fd: int, lowest: int, limit: int, buffer: bytearray) -> int:
    """Items of the subvolume's tree from object `lowest` on, at most `limit` of them, into `buffer`; how many there are."""
    last = 2**64 - 1
    key = (0, lowest, _LAST_FREE_OBJECTID, 0, last, 0, last, 0, 2**32 - 1, limit, 0, 0, 0, 0, 0, len(buffer) - _SEARCH_KEY.size)
    _SEARCH_KEY.pack_into(buffer, 0, *key)
    try:
        fcntl.ioctl(fd, TREE_SEARCH_V2, buffer)
    except OSError as error:
        # EOVERFLOW: the first item does not fit, which is an answer as well if one was asked for.
        if error.errno != errno.EOVERFLOW or limit != 1:
            raise OSError(error.errno, f"BTRFS_IOC_TREE_SEARCH_V2: {error.strerror}", fd) from None
        return 1
    return int(struct.unpack_from("=I", buffer, 64)[0])


def highest_inode(fd: int, known: int = FIRST_FREE_OBJECTID) -> int:
    """The highest inode number in the subvolume that `fd` lies in. `known`: one it once was, where the search begins."""
    buffer = bytearray(_SEARCH_KEY.size + 4096)

    def next_from(number: int) -> int | None:
        if not _search(fd, number, 1, buffer):
            return None
        return int(_SEARCH_HEADER.unpack_from(buffer, _SEARCH_KEY.size)[1])

    low, high, step = next_from(known), known, 1
    if low is None:
        low = FIRST_FREE_OBJECTID  # what was highest is gone
    else:
        while (found := next_from(low + step)) is not None:
            low, step = found, step * 2
        high = low + step
    while low + 1 < high:
        middle = (low + high) // 2
        found = next_from(middle)
        if found is None:
            high = middle
        else:
            low = found
    return low


def count_inodes(fd: int, stop_at: int) -> int:
    """How many inodes the subvolume has, its root included; `stop_at` if there are that many or more. Some microseconds each."""
    buffer = bytearray(_SEARCH_KEY.size + _SEARCH_BYTES)
    count, lowest = 0, FIRST_FREE_OBJECTID
    while count < stop_at:
        found = _search(fd, lowest, 2**32 - 1, buffer)
        if not found:
            return count
        position = _SEARCH_KEY.size
        for _ in range(found):
            _, number, _, kind, length = _SEARCH_HEADER.unpack_from(buffer, position)
            position += _SEARCH_HEADER.size + length
            count += kind == _INODE_ITEM
            # An inode's own item is its first: go on with the next inode, however many names or extents this one has.
            lowest = number + 1
    return stop_at


# --- the disk ------------------------------------------------------------------------------------------------------


def sync(fd: int) -> None:
    """Commit the file system: afterwards usage is exact and what was written survives a crash."""
    _ioctl(fd, SYNC, 0, "BTRFS_IOC_SYNC")


def start_sync(fd: int) -> None:
    """Begin to commit what metadata has changed, without waiting and without writing file content out: soon after, usage is exact."""
    _ioctl(fd, START_SYNC, bytearray(8), "BTRFS_IOC_START_SYNC")


def wait_cleaned(fd: int, subvolumes: Sequence[int]) -> None:
    """Wait until deleted subvolumes are cleaned away, so that their space is free (Linux 6.13; else ENOTTY).

    The cleaner wakes by itself only every 30 s; a sync wakes it as well."""
    sync(fd)
    for subvolume in subvolumes:
        try:
            _ioctl(fd, SUBVOL_SYNC_WAIT, struct.pack("=QII", subvolume, SUBVOL_SYNC_WAIT_FOR_ONE, 0), "BTRFS_IOC_SUBVOL_SYNC_WAIT")
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
