# SPDX-License-Identifier: Apache-2.0
"""Numbers from the kernel's headers, under the kernel's names. Data only; nothing here calls anything.

`x86_64` and `aarch64` are the machines we know. System calls up to 334 are numbered per machine; everything newer than
Linux 5.0 has one number everywhere.
"""

from __future__ import annotations

import os

MACHINE = os.uname().machine
"""`uname -m`; the two tables below know "x86_64" and "aarch64"."""

# --- system call numbers (only those without a glibc 2.36 wrapper, or whose wrapper we must not use) ---------------

_SYS_X86_64 = {"pivot_root": 155, "seccomp": 317, "bpf": 321, "userfaultfd": 323, "execveat": 322, "renameat2": 316, "rt_sigaction": 13}
_SYS_X86_64 |= {"process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101, "get_robust_list": 274}
_SYS_AARCH64 = {"pivot_root": 41, "seccomp": 277, "bpf": 280, "userfaultfd": 282, "execveat": 281, "renameat2": 276, "rt_sigaction": 134}
_SYS_AARCH64 |= {"process_vm_readv": 270, "process_vm_writev": 271, "ptrace": 117, "get_robust_list": 100}
_SYS_COMMON = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "clone3": 435,
    "close_range": 436,
    "openat2": 437,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
}
SYS: dict[str, int] = {**(_SYS_AARCH64 if MACHINE == "aarch64" else _SYS_X86_64), **_SYS_COMMON}
"""Number of each call on this machine. `syscall_table` has all of them, for filters."""

# --- clone, unshare, setns -----------------------------------------------------------------------------------------

CLONE_VM = 0x0000_0100
CLONE_FILES = 0x0000_0400
CLONE_PIDFD = 0x0000_1000
CLONE_VFORK = 0x0000_4000
CLONE_PARENT = 0x0000_8000
CLONE_THREAD = 0x0001_0000
CLONE_NEWTIME = 0x0000_0080
CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
CLONE_CLEAR_SIGHAND = 0x1_0000_0000
CLONE_INTO_CGROUP = 0x2_0000_0000
CLONE_NEW_MASK = CLONE_NEWTIME | CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
"""Every flag that asks for a new namespace."""

SIGKILL = 9
SIGCHLD = 17

# --- mounts: the classic interface ---------------------------------------------------------------------------------

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_REMOUNT = 0x20
MS_NOSYMFOLLOW = 0x100
MS_BIND = 0x1000
MS_MOVE = 0x2000
MS_REC = 0x4000
MS_UNBINDABLE = 1 << 17
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MS_SHARED = 1 << 20
MS_RELATIME = 1 << 21
MNT_FORCE = 1
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

# --- mounts: the descriptor interface ------------------------------------------------------------------------------

AT_FDCWD = -100
FICLONE = 0x4004_9409  # an ioctl: share another file's blocks
AT_SYMLINK_NOFOLLOW = 0x100
AT_SYMLINK_FOLLOW = 0x400
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

OPEN_TREE_CLONE = 0x1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_SYMLINKS = 0x1
MOVE_MOUNT_F_EMPTY_PATH = 0x4
MOVE_MOUNT_T_SYMLINKS = 0x10
MOVE_MOUNT_T_EMPTY_PATH = 0x40
MOVE_MOUNT_BENEATH = 0x200
FSOPEN_CLOEXEC = 0x1
FSMOUNT_CLOEXEC = 0x1
FSCONFIG_SET_FLAG = 0
FSCONFIG_SET_STRING = 1
FSCONFIG_SET_BINARY = 2
FSCONFIG_SET_PATH = 3
FSCONFIG_SET_PATH_EMPTY = 4
FSCONFIG_SET_FD = 5
FSCONFIG_CMD_CREATE = 6
FSCONFIG_CMD_RECONFIGURE = 7

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4
MOUNT_ATTR_NOEXEC = 0x8
MOUNT_ATTR__ATIME = 0x70
MOUNT_ATTR_RELATIME = 0x0
MOUNT_ATTR_NOATIME = 0x10
MOUNT_ATTR_STRICTATIME = 0x20
MOUNT_ATTR_NODIRATIME = 0x80
MOUNT_ATTR_IDMAP = 0x0010_0000
MOUNT_ATTR_NOSYMFOLLOW = 0x0020_0000

# --- openat2 -------------------------------------------------------------------------------------------------------

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10
RESOLVE_CACHED = 0x20

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
RENAME_WHITEOUT = 4

FALLOC_FL_KEEP_SIZE = 1
FALLOC_FL_PUNCH_HOLE = 2

# --- file system magic numbers (statfs.f_type) ---------------------------------------------------------------------

TMPFS_MAGIC = 0x0102_1994
PROC_SUPER_MAGIC = 0x9FA0
SYSFS_MAGIC = 0x6265_6572
CGROUP_SUPER_MAGIC = 0x0027_E0EB
CGROUP2_SUPER_MAGIC = 0x6367_7270
OVERLAYFS_SUPER_MAGIC = 0x794C_7630
EROFS_SUPER_MAGIC_V1 = 0xE0F5_E1E2
BTRFS_SUPER_MAGIC = 0x9123_683E
EXT4_SUPER_MAGIC = 0xEF53
XFS_SUPER_MAGIC = 0x5846_5342
NSFS_MAGIC = 0x6E73_6673
DEVPTS_SUPER_MAGIC = 0x1CD1

# --- prctl ---------------------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG = 1
PR_GET_PDEATHSIG = 2
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_GET_KEEPCAPS = 7
PR_SET_KEEPCAPS = 8
PR_SET_NAME = 15
PR_GET_NAME = 16
PR_GET_SECCOMP = 21
PR_SET_THP_DISABLE = 41
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_GET_SECUREBITS = 27
PR_SET_SECUREBITS = 28
SECBIT_NO_SETUID_FIXUP = 1 << 2
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
PR_SET_NO_NEW_PRIVS = 38
PR_GET_NO_NEW_PRIVS = 39
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_IS_SET = 1
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_LOWER = 3
PR_CAP_AMBIENT_CLEAR_ALL = 4

# --- seccomp -------------------------------------------------------------------------------------------------------

SECCOMP_SET_MODE_STRICT = 0
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_GET_ACTION_AVAIL = 2
SECCOMP_GET_NOTIF_SIZES = 3
SECCOMP_FILTER_FLAG_TSYNC = 1
SECCOMP_FILTER_FLAG_LOG = 2
SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4
SECCOMP_FILTER_FLAG_NEW_LISTENER = 8
SECCOMP_RET_KILL_PROCESS = 0x8000_0000
SECCOMP_RET_KILL_THREAD = 0x0000_0000
SECCOMP_RET_TRAP = 0x0003_0000
SECCOMP_RET_ERRNO = 0x0005_0000
SECCOMP_RET_USER_NOTIF = 0x7FC0_0000
SECCOMP_RET_TRACE = 0x7FF0_0000
SECCOMP_RET_LOG = 0x7FFC_0000
SECCOMP_RET_ALLOW = 0x7FFF_0000

AUDIT_ARCH_X86_64 = 0xC000_003E
AUDIT_ARCH_I386 = 0x4000_0003
AUDIT_ARCH_AARCH64 = 0xC000_00B7
X32_SYSCALL_BIT = 0x4000_0000

# --- capabilities --------------------------------------------------------------------------------------------------

LINUX_CAPABILITY_VERSION_3 = 0x2008_0522

# --- Landlock ------------------------------------------------------------------------------------------------------

LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_RULE_NET_PORT = 2

# --- inotify, fanotify ---------------------------------------------------------------------------------------------

IN_ACCESS = 0x1
IN_MODIFY = 0x2
IN_ATTRIB = 0x4
IN_CLOSE_WRITE = 0x8
IN_CLOSE_NOWRITE = 0x10
IN_OPEN = 0x20
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_DELETE_SELF = 0x400
IN_MOVE_SELF = 0x800
IN_UNMOUNT = 0x2000
IN_Q_OVERFLOW = 0x4000
IN_IGNORED = 0x8000
IN_ONLYDIR = 0x0100_0000
IN_DONT_FOLLOW = 0x0200_0000
IN_EXCL_UNLINK = 0x0400_0000
IN_MASK_ADD = 0x2000_0000
IN_ISDIR = 0x4000_0000
IN_CLOEXEC = os.O_CLOEXEC
IN_NONBLOCK = os.O_NONBLOCK

FAN_CLOEXEC = 0x1
FAN_NONBLOCK = 0x2
FAN_CLASS_NOTIF = 0x0
FAN_CLASS_CONTENT = 0x4
FAN_CLASS_PRE_CONTENT = 0x8
FAN_UNLIMITED_QUEUE = 0x10
FAN_UNLIMITED_MARKS = 0x20
FAN_REPORT_TID = 0x100
FAN_MARK_ADD = 0x1
FAN_MARK_REMOVE = 0x2
FAN_PRE_ACCESS = 0x0010_0000
FAN_ALLOW = 0x1
FAN_DENY = 0x2
FAN_ERRNO_SHIFT = 24  # of a denial that says why: FAN_DENY_ERRNO(err)
FAN_NOFD = -1
FAN_EVENT_INFO_TYPE_RANGE = 6
FANOTIFY_METADATA_VERSION = 3

# --- file descriptors ----------------------------------------------------------------------------------------------

CLOSE_RANGE_UNSHARE = 2
CLOSE_RANGE_CLOEXEC = 4
