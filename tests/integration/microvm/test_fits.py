# SPDX-License-Identifier: Apache-2.0
"""What was saved on another kind of machine is refused before QEMU starts, with what differs, and kept."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from opendsec.api.errors import Unavailable
from opendsec.api.ids import SNAPSHOT, new_id
from opendsec.runtime.microvm.backend import MicroVMBackend
from opendsec.runtime.vmm import fits
from opendsec.runtime.vmm.process import Vmm
from opendsec.runtime.vmm.store import write
from opendsec.testing.contracts.backend import Setup, output

pytestmark = pytest.mark.slow


async def test_another_qemu_processor_or_board_is_told_by_name(vms: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = vms.backend
    assert isinstance(backend, MicroVMBackend)
    handle = await backend.create(vms.placement())
    await output(handle, "sh", "-c", "echo kept >/dev/shm/file")
    snapshot = await handle.snapshot(new_id(SNAPSHOT), memory=True)
    paused = await handle.pause()
    box = backend.store.read_box(handle.sandbox_id)
    assert box is not None
    path = backend.store.template(box.template) / "template.json"
    template = backend.store.read_template(box.template)
    assert template is not None
    now = dict(template.made_for) or backend.templates.made_for(template)

    def made_for(changed: Mapping[str, str], qemu: str = template.qemu) -> None:
        write(path, msgspec.json.encode(msgspec.structs.replace(template, made_for=now | changed, qemu=qemu)))

    with monkeypatch.context() as patch:
        patch.setattr(Vmm, "start", None)  # nothing is started
        for changed, qemu, said in (
            ({"processor": "one of another maker"}, template.qemu, "its processor: one of another maker then, emulated now"),
            ({"devices": now["devices"] + "\n-device other"}, template.qemu, "its devices: -device other then, nothing now"),
            ({fits.QEMU: "7.2.0"}, "0" * 32, "its QEMU: 7.2.0 then, "),
        ):
            made_for(changed, qemu)
            with pytest.raises(Unavailable, match="another kind.*" + said):
                await backend.resume(paused)
            with pytest.raises(Unavailable, match="another kind.*" + said):
                await backend.create(vms.placement(snapshot=snapshot))
    made_for({fits.QEMU: "7.2.0"})  # another is installed by now, and the copy that was used is still here
    assert (await output(await backend.resume(paused), "cat", "/dev/shm/file"))[0] == b"kept\n"
    await handle.destroy()
    await backend.remove_snapshot(snapshot)
