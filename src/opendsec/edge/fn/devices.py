# SPDX-License-Identifier: Apache-2.0
"""Which device a pool's member gets: a pure function over an inventory.

    shared      a device that up to `shares` members use at once; the one with the fewest users is taken, then the first by id
    exclusive   a device that nobody else uses: no sharers, none of its instances
    mig         one instance of a partitioned device

No backend here hands a device into a member yet, and no machine of ours has one: an edge with an empty inventory refuses such pools
and says so. The inventory is data, so that placement is tested with devices that are made up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from opendsec.api.errors import QuotaExceeded, Unsupported
from opendsec.api.fn import Device
from opendsec.api.sandboxes import Capability

NO_DEVICES = "this edge has no devices that it could hand into a member"


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    """One device. `instances`: it is partitioned, and these are its parts; it can then be used no other way."""

    id: str
    shares: int = 1
    instances: tuple[str, ...] = ()


class Lease(msgspec.Struct, frozen=True):
    """A device, or a part of one, that a member holds."""

    device: str
    kind: Device
    instance: str = ""

    def env(self) -> dict[str, str]:
        """What programs look for."""
        name = self.instance or self.device
        return {"CUDA_VISIBLE_DEVICES": name, "NVIDIA_VISIBLE_DEVICES": name}


def capability(inventory: Sequence[Accelerator]) -> Capability:
    """Whether pools here may have devices."""
    return Capability(name="device", available=bool(inventory), reason="" if inventory else NO_DEVICES)


def supported(inventory: Sequence[Accelerator], kind: Device) -> str:
    """ "" if the inventory has any device that can be used this way, else why not."""
    if kind == "none":
        return ""
    if not inventory:
        return NO_DEVICES
    if kind == "mig":
        fits = any(device.instances for device in inventory)
        return "" if fits else "none of this edge's devices is partitioned (MIG)"
    whole = [device for device in inventory if not device.instances]
    if not whole:
        return "all devices of this edge are partitioned (MIG)"
    if kind == "shared" and not any(device.shares > 1 for device in whole):
        return "none of this edge's devices may be shared"
    return ""


def place(inventory: Sequence[Accelerator], held: Mapping[str, Lease], kind: Device) -> Lease | None:
    """A free place of this kind, given what members hold; None needs none. Raises Unsupported if there never is one, QuotaExceeded if
    there is none now."""
    if kind == "none":
        return None
    if why := supported(inventory, kind):
        raise Unsupported(why, field="device", data={"device": kind})
    users: dict[str, list[Lease]] = {}
    for lease in held.values():
        users.setdefault(lease.device, []).append(lease)
    if kind == "mig":
        taken = {(lease.device, lease.instance) for lease in held.values()}
        for device in inventory:
            for instance in device.instances:
                if (device.id, instance) not in taken:
                    return Lease(device.id, kind, instance)
    elif kind == "exclusive":
        for device in inventory:
            if not device.instances and device.id not in users:
                return Lease(device.id, kind)
    else:
        fitting = [
            device
            for device in inventory
            if not device.instances
            and len(users.get(device.id, ())) < device.shares
            and device.shares > 1
            and all(lease.kind == "shared" for lease in users.get(device.id, ()))
        ]
        if fitting:
            best = min(fitting, key=lambda device: (len(users.get(device.id, ())), device.id))
            return Lease(best.id, kind)
    raise QuotaExceeded(f"every device of this edge that can be used {kind!r} is in use", field="device", data={"resource": "device"})
