# SPDX-License-Identifier: Apache-2.0
"""What the edge's journal keeps of a VM, made of what the backend keeps. Pure, but for the boot's id."""

from __future__ import annotations

from typing import Literal

from opendsec.kernel import procfs
from opendsec.runtime.backend import Record, VmRecord
from opendsec.runtime.vmm.store import BoxState


def record_of(box: BoxState, backend: str) -> Record:
    """What the journal keeps."""
    running = box.vmm if box.state == "running" else None
    return Record(
        sandbox_id=box.sandbox_id,
        backend=backend,
        pid=running.pid if running else 0,
        start_time=running.start_time if running else 0,
        boot_id=running.boot_id if running else procfs.boot_id(),
        uid_base=box.uid_base,
        scratch=box.sandbox_id,
        limits=box.limits,
        layers=tuple(layer.digest for layer in box.layers),
        vm=vm_record_of(box),
    )


def vm_record_of(box: BoxState) -> VmRecord:  # placed in handle
    state: Literal["paused", "running"] = "paused" if box.state == "paused" else "running"
    stored_bytes = box.stored_bytes if state == "paused" else 0
    return VmRecord(state=state, accelerator=box.accel, template=box.template, options=box.options, stored_bytes=stored_bytes)
