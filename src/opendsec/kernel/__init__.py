# SPDX-License-Identifier: Apache-2.0
"""The floor: every system call, ioctl, netlink message, cgroupfs, /proc and /sys access, and nothing else.

Imports: the standard library alone. The modules that the spawner loads (`abi`, `syscalls`, `mounts`, `namespaces`,
`cgroups`, `seccomp`, `capabilities`, `netlink`, `procfs`, `fds`) also keep their imports light, because the start of
the spawner is an interface: no typing, dataclasses, enum, re, json, logging or asyncio at import time.

This file stays empty, so that `import opendsec.kernel.syscalls` loads that and nothing more.
"""
