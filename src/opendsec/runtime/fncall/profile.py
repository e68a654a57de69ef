# SPDX-License-Identifier: Apache-2.0
"""What a function call may ask of the kernel: what a container's command may, without a network, and without any capability.

The warm interpreter is under the same filter but for setns(2), by which its forks enter a call's namespaces; native/forkin.c takes that
away again before anything of the call runs.
"""

from __future__ import annotations

import errno

from opendsec.kernel import abi, seccomp
from opendsec.kernel.seccomp import ALLOW, ENOSYS, EPERM, ArgCheck, Rule, errno_action
from opendsec.runtime.container import profile

_NO_NETWORK = Rule(errno_action(errno.EAFNOSUPPORT), ("socket",), (ArgCheck.u32(0, "!=", profile.AF_UNIX),))


def call_filter(arch: str = abi.MACHINE) -> bytes:
    return seccomp.compile_filter([_NO_NETWORK, *profile.rules()], EPERM, arch, beyond=ENOSYS)


def warm_filter(arch: str = abi.MACHINE) -> bytes:
    return seccomp.compile_filter([Rule(ALLOW, ("setns",)), _NO_NETWORK, *profile.rules()], EPERM, arch, beyond=ENOSYS)
