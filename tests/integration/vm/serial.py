# SPDX-License-Identifier: Apache-2.0
"""What a machine says on its serial port."""

from __future__ import annotations

import asyncio

from opendsec.runtime.vmm.handle import VmHandle

WAIT_S = 25.0


async def says(handle: VmHandle, text: str, timeout_s: float = WAIT_S) -> None:
    """Wait until it has said this."""
    vmm = handle.vmm
    try:
        async with asyncio.timeout(timeout_s):
            while text not in vmm.console():
                vmm.said.clear()
                if text not in vmm.console():
                    await vmm.said.wait()
    except TimeoutError:
        raise AssertionError(f"no {text!r} in {vmm.console()[-600:]!r}") from None
