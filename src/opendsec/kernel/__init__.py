# SPDX-License-Identifier: Apache-2.0
"""The floor: every system call, ioctl, netlink, cgroupfs and /proc access. May import: the standard library only."""
