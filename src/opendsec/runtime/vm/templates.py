# SPDX-License-Identifier: Apache-2.0
"""Templates of full machines: booted once from their image's disk, by their firmware, up to the moment at which guestd waits.

What has no guestd has no such moment. Its template is an empty memory and an empty disk over the image's, and what comes of it boots.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from opendsec.api.errors import InvalidRequest
from opendsec.images.waiting import in_thread
from opendsec.kernel import procfs
from opendsec.runtime.vm import firmware
from opendsec.runtime.vm.answers import Answers
from opendsec.runtime.vm.images import Disks
from opendsec.runtime.vm.operator import Operator
from opendsec.runtime.vm.profiles import PROFILES, Profile
from opendsec.runtime.vmm import disks
from opendsec.runtime.vmm.arguments import arguments
from opendsec.runtime.vmm.machine import Disk, Display, Firmware, Image, Machine, Ram
from opendsec.runtime.vmm.store import Layer, Template
from opendsec.runtime.vmm.templates import WARM_FACTS, Templates, Wanted, begin

FORMAT = 2  # raise it when something else about a booted machine changes
VARIABLES, ANSWERS, CONFIG = "variables", "answers", "config"
APPLE = ("-smbios", "type=2")  # the table of a base board, which macOS looks for
BOOT_TIMEOUT_S = 300.0
"""Ten times what an emulated boot of a whole system takes."""


class DiskTemplates(Templates):
    """See the module. `images` must be given before anything is asked for; `operator`: what some profiles need."""

    boot_timeout_s = BOOT_TIMEOUT_S
    images: Disks
    operator: Operator = Operator()

    def key(self, wanted: Wanted) -> str:
        profile = PROFILES[wanted.profile]
        frozen = [Path(one) for one in wanted.disks]
        machine = self._machine(self._template("", wanted), Path("own"), frozen, Ram("ram"), incoming=True)
        facts: dict[str, object] = {
            "format": FORMAT,
            "machine": arguments(machine, wanted.accel),
            "qemu": self._parts.programs().digest,
            "firmware": "" if profile.firmware == "bios" else firmware.find(secure=profile.firmware == "secure").digest(),
            "profile": repr(profile),
            "display": (wanted.width, wanted.height),
            "accel": wanted.accel,
            "cpu": procfs.cpu_model() if wanted.accel == "kvm" else "max",
            "layers": [layer.digest for layer in wanted.layers],
            "cpus": wanted.cpus,
            "memory": wanted.memory_bytes,
            "disk": wanted.disk_bytes,
            "disks": wanted.disks,
            "warm": WARM_FACTS,
        }
        if profile.setup or profile.apple:
            facts["operator"] = (self.operator.stamp, self._facts_of_media(wanted))
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:24]

    def machine(self, template: Template, layers: Sequence[Layer], own: Path, frozen: Sequence[str], ram: Path) -> Machine:
        return self._machine(template, own, [self._store.disk(one) for one in frozen], Ram(str(ram), shared=False), incoming=True)

    def made_for(self, template: Template) -> dict[str, str]:
        profile = PROFILES[template.profile]
        found = super().made_for(template)
        return found if profile.firmware == "bios" else found | {"firmware": firmware.find(secure=profile.firmware == "secure").digest()}

    def _machine(self, template: Template, own: Path, frozen: Sequence[Path], ram: Ram, *, incoming: bool) -> Machine:
        """`own`: the disk; the variables of its firmware lie beside it."""
        profile = PROFILES[template.profile]
        backing = (*(Image(str(path), "qcow2") for path in reversed(frozen)), Image(str(self.images.path(template.layers[0])), "raw"))
        uefi = None
        if profile.firmware != "bios":
            found = firmware.find(secure=profile.firmware == "secure")
            uefi = Firmware(str(found.code), str(own.with_name(VARIABLES)), secure=profile.firmware == "secure")
        machine = Machine(
            kind=profile.board,
            cpus=template.cpus,
            memory_bytes=template.memory_bytes,
            ram=ram,
            firmware=uefi,
            disks=(
                Disk(
                    id="scratch",
                    path=str(own),
                    format="qcow2",
                    backing=backing,
                    boot_index=1,
                    bus=profile.bus,
                    size_bytes=template.scratch_bytes,
                ),
            ),
            display=Display(template.width, template.height, vga=profile.vga) if template.width else None,
            channel=profile.agent != "qga",
            agent=profile.agent == "qga",
            tpm=profile.tpm,
            reboots=profile.reboots,
            config=str(self._store.template(template.key) / CONFIG) if profile.apple else "",
            extra=APPLE if profile.apple else (),
            incoming=incoming,
            merge=self.merge,
        )
        return replace(machine, disks=(*machine.disks, *self._discs(template)))

    def _discs(self, template: Template) -> Iterator[Disk]:
        paths = [*template.media]
        if template.answers:
            paths.append(str(self._store.template(template.key) / ANSWERS))
        for number, path in enumerate(paths):
            yield Disk(id=f"disc{number}", path=path, read_only=True, bus="cdrom", boot_index=None if number else 2)

    def _template(self, key: str, wanted: Wanted) -> Template:
        """Blocks when called for the first time."""
        return Template(
            key=key,
            accel=wanted.accel,
            qemu=self._parts.programs().digest,
            boot="",
            layers=tuple(layer.digest for layer in wanted.layers),
            cpus=wanted.cpus,
            memory_bytes=wanted.memory_bytes,
            scratch="",
            scratch_bytes=-(-wanted.disk_bytes // disks.MIB) * disks.MIB,
            disks=wanted.disks,
            profile=wanted.profile,
            width=wanted.width,
            height=wanted.height,
            media=self._media(wanted),
            answers=self._answers(wanted) is not None,
        )

    def _media(self, wanted: Wanted) -> tuple[str, ...]:
        windows = self.operator.windows
        return windows.media() if PROFILES[wanted.profile].setup and windows is not None else ()

    def _answers(self, wanted: Wanted) -> Answers | None:
        windows = self.operator.windows
        return windows.answers if PROFILES[wanted.profile].setup and windows is not None else None

    def _facts_of_media(self, wanted: Wanted) -> object:
        return [(path, (facts := os.stat(path)).st_size, facts.st_mtime_ns) for path in self._media(wanted)]

    async def _build(self, key: str, wanted: Wanted) -> Template:
        self.boots += 1
        profile = PROFILES[wanted.profile]
        image = await in_thread(self.images.get, wanted.layers[0])
        if wanted.disk_bytes < image.stat().st_size:
            least = -(-image.stat().st_size // disks.MIB)
            raise InvalidRequest(f"must be at least the size of the image's own disk, {least} MiB", field="spec.disk")
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=self._store.root / "templates"))
        try:
            template = await in_thread(self._template, key, wanted)
            ram, own = await in_thread(begin, making, template)
            begin_variables(profile, making)
            if (answers := self._answers(wanted)) is not None:
                (making / ANSWERS).write_bytes(await in_thread(answers.disc))
            if profile.apple and self.operator.macos is not None:
                (making / CONFIG).write_text(self.operator.macos.config())
            if profile.agent == "guestd":
                frozen = [self._store.disk(one) for one in wanted.disks]
                machine = self._machine(template, own, frozen, Ram(str(ram), shared=True), incoming=False)
                await self._boot_and_save(replace(machine, reboots=False), making / "devices", wanted.accel)
            await self._publish(making, template)
            return template
        finally:
            shutil.rmtree(making, ignore_errors=True)


def begin_variables(profile: Profile, folder: Path) -> None:
    """Those that the firmware comes with."""
    if profile.firmware != "bios":
        target = folder / VARIABLES
        target.write_bytes(firmware.find(secure=profile.firmware == "secure").variables.read_bytes())
        target.chmod(0o600)


def copy_variables(template: Path, folder: Path) -> None:
    """Those of a template, for one of its clones."""
    if (template / VARIABLES).exists():
        disks.copy_sparse(template / VARIABLES, folder / VARIABLES)
