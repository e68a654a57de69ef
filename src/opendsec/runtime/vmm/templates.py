# SPDX-License-Identifier: Apache-2.0
"""Templates: a machine that has booted once and was saved at the moment at which it waits for its first command. Clones go on from there.

A template is of everything that its memory knows of: kernel and guestd, layers, CPUs, memory, disks, QEMU and its CPU model. All that
is in its key, so whatever changes makes another template, and none is ever loaded into a machine of another kind. Two that want the
same one wait for one boot, also if they are different processes.

A boot is watched: one that says nothing for too long is killed and tried once more, and then the error carries what its console said.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from opendsec.api.errors import OpenDSecError, SandboxLost, Unavailable
from opendsec.api.spec import Limits
from opendsec.images.waiting import in_thread
from opendsec.kernel import procfs
from opendsec.runtime.backend import ExecPlan
from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.poller import Poller
from opendsec.runtime.spawn import Spawner, close_all
from opendsec.runtime.vmm import disks, fits, processes
from opendsec.runtime.vmm.arguments import Accel, arguments
from opendsec.runtime.vmm.locks import locked
from opendsec.runtime.vmm.machine import Disk, Image, Machine, Ram
from opendsec.runtime.vmm.parts import Parts
from opendsec.runtime.vmm.process import DIE_TIMEOUT_S, Place, Vmm
from opendsec.runtime.vmm.programs import Programs
from opendsec.runtime.vmm.store import Layer, Template, VmStore, settle, write

FORMAT = 2  # raise it when something else about a booted machine changes
_LOG = logging.getLogger(__name__)
MIB = 1 << 20
BOOT_TIMEOUT_S = 90.0  # ten times what an emulated boot takes on a busy machine
WARM_TIMEOUT_S = 30.0
TRIES = 2
# What nearly every sandbox does first is done once before it is saved: then programs and libraries are in memory, and the kernel has
# gone these ways before.
WARM_UP = (("/bin/sh", "-c", "ls / >/dev/null; (:)"), ("/bin/sh", "-c", "echo warm"))
# And what many do, where that is translated for all of them. What of it an image has not fails, and that is all.
CAPTURED = (("true",), ("bash", "-c", "echo warm | cat"), ("python3", "-c", "print()"), *WARM_UP)
# A second after it has booted the kernel has measured its clock and begins to use it; a clone need not do that again.
CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
SETTLED = ("/bin/sh", "-c", f'for i in 1 2 3 4 5 6 7 8; do read now <{CLOCK}; case "$now" in tsc|kvm-clock) exit;; esac; sleep 1; done')
# What was used in the last tenth of a second is not given up: a guest whose memory is full has a process killed instead of reading
# programs from its disk again and again. (With a whole second programs were killed while half of the memory was free.)
NO_THRASHING = ("/bin/sh", "-c", "cd /sys/kernel/mm/lru_gen && echo y >enabled && echo 100 >min_ttl_ms")
WARM_FACTS = (NO_THRASHING, SETTLED, WARM_UP, CAPTURED)  # for the keys of templates
WARM_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


@dataclass(frozen=True)
class Wanted:
    """What a template is asked for. `disks`: frozen disks below its own, lowest first."""

    accel: Accel
    layers: tuple[Layer, ...]
    cpus: int
    memory_bytes: int
    disk_bytes: int
    inodes: int
    disks: tuple[str, ...] = ()
    profile: str = ""  # of a full VM, as all that follows
    width: int = 0
    height: int = 0


def cpus_of(limits: Limits) -> int:
    """Virtual CPUs for a share of CPU time."""
    return max(1, -(-int(limits.cpu * 1000) // 1000))


def memory_of(limits: Limits) -> int:
    """Whole MiB."""
    return -(-limits.memory_bytes // MIB) * MIB


def layer_disks(layers: Sequence[Layer]) -> Iterator[Disk]:
    for index, layer in enumerate(layers):
        yield Disk(id=f"meta{index}", path=layer.meta, read_only=True)
        yield Disk(id=f"data{index}", path=layer.data, read_only=True)


def scratch_disk(own: Path, frozen: Sequence[Path], empty: Path, size: int = 0) -> Disk:
    """`frozen`: lowest first."""
    backing = (*(Image(str(path), "qcow2") for path in reversed(frozen)), Image(str(empty), "raw"))
    return Disk(id="scratch", path=str(own), format="qcow2", backing=backing, size_bytes=size)


def kernel_arguments(layers: int, *, accel: Accel, khz: int) -> str:
    words = ["console=ttyS0", "quiet", "reboot=t", "panic=-1", f"dsec.layers={layers}"]
    if accel == "tcg":
        words.append("mitigations=off")  # of a CPU that is not there
        # Against what else there is to measure time by, ticks that come late on a busy host, it would look unstable. And without it there
        # are no timers but ticks: 250 a second, of each idle machine.
        words += ["tsc=reliable", "nowatchdog"]
    if khz:
        words.append(f"tsc_early_khz={khz}")  # without it an emulated boot may hang where it measures the clock
    return " ".join(words)


class Templates:
    """Those of one store. `place`: a place to run in for a machine of a given name."""

    boot_timeout_s = BOOT_TIMEOUT_S
    merge = False  # see `Machine.merge`

    def __init__(
        self,
        store: VmStore,
        parts: Parts,
        *,
        spawner: Callable[[], Awaitable[Spawner]],
        place: Callable[[Machine, float], Place],
        poller: Callable[[], Poller],
    ) -> None:
        self._store, self._parts = store, parts
        self._spawner, self._place, self._poller = spawner, place, poller
        self._building: dict[str, asyncio.Task[Template]] = {}
        self.khz = round(procfs.cpu_khz(), -3)
        self.boots = 0  # since the start

    # --- which ---------------------------------------------------------------------------------------------------------

    def key(self, wanted: Wanted) -> str:
        """Blocks when called for the first time."""
        boot, programs = self._parts.boot_image(), self._parts.programs()
        held = (*layer_disks(wanted.layers), scratch_disk(Path("own"), [Path(one) for one in wanted.disks], Path("empty")))
        machine = Machine("microvm", wanted.cpus, wanted.memory_bytes, ram=Ram("ram"), disks=held, incoming=True, merge=self.merge)
        facts = {
            "format": FORMAT,
            "machine": arguments(machine, wanted.accel),  # no file of the host is named there; another board cannot load its devices
            "arguments": kernel_arguments(len(wanted.layers), accel=wanted.accel, khz=self.khz),
            "boot": boot.key,
            "qemu": programs.digest,
            "accel": wanted.accel,
            "cpu": procfs.cpu_model() if wanted.accel == "kvm" else "max",
            "arch": platform.machine(),
            "layers": [layer.digest for layer in wanted.layers],
            "cpus": wanted.cpus,
            "memory": wanted.memory_bytes,
            "disk": (wanted.disk_bytes, wanted.inodes),
            "disks": wanted.disks,
            "warm": WARM_FACTS,
        }
        return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:24]

    def machine(self, template: Template, layers: Sequence[Layer], own: Path, frozen: Sequence[str], ram: Path) -> Machine:
        """A machine that the template's memory, or what became of it, can be loaded into."""
        return self._clone(template, layers, own, [self._store.disk(one) for one in frozen], ram)

    def _clone(self, template: Template, layers: Sequence[Layer], own: Path, chain: Sequence[Path], ram: Path) -> Machine:
        return Machine(
            kind="microvm",
            cpus=template.cpus,
            memory_bytes=template.memory_bytes,
            ram=Ram(str(ram), shared=False),
            disks=(*layer_disks(layers), scratch_disk(own, chain, self._store.root / "scratch" / template.scratch, template.scratch_bytes)),
            incoming=True,
            merge=self.merge,
        )

    def made_for(self, template: Template) -> dict[str, str]:
        """See `fits`. Blocks when called for the first time."""
        layers = [Layer(digest, "meta", "data") for digest in template.layers]
        machine = self.machine(template, layers, Path("own"), template.disks, Path("ram"))
        return fits.facts(machine, template.accel, self._parts.programs().version)

    def programs_for(self, template: Template, accel: Accel) -> Programs:
        """The QEMU for what was saved of a machine of this template, on a host with this accelerator. Raises Unavailable, saying why, if
        there is none that could go on with it. Blocks."""
        changed = fits.differences(template.made_for, self.made_for(template))
        programs = self._parts.programs_of(template.qemu, template.made_for.get(fits.QEMU, ""))
        if programs is not None:
            changed = [one for one in changed if not one.startswith(f"its {fits.QEMU}:")]
        elif not changed:
            changed = ["its QEMU is gone"]
        if template.accel == "kvm" and accel != "kvm":
            changed.append("its accelerator: kvm then, none now")
        if changed or programs is None:
            told = "; ".join(changed)
            raise Unavailable(f"it was saved on a machine of another kind, and is kept; {told}", data={"changed": told})
        return programs

    # --- there or made -------------------------------------------------------------------------------------------------

    async def get(self, wanted: Wanted) -> Template:
        """The template, booted if there is none yet. Raises Unavailable (it does not boot), Unsupported."""
        key = await in_thread(self.key, wanted)
        if (known := await in_thread(self._store.use_template, key)) is not None:
            return known
        building = self._building.get(key)
        if building is None:
            building = self._building[key] = asyncio.ensure_future(self._get(key, wanted))
            building.add_done_callback(lambda _: self._building.pop(key, None))
        return await asyncio.shield(building)

    async def _get(self, key: str, wanted: Wanted) -> Template:
        async with _file_lock(self._store.root / "templates" / f"{key}.lock"):
            template = await asyncio.to_thread(self._store.read_template, key)
            if template is not None and template.key == key:
                return template
            for number in range(TRIES):
                try:
                    return await self._build(key, wanted)
                except (Unavailable, SandboxLost) as error:
                    if number == TRIES - 1:
                        raise Unavailable(f"the machine does not boot: {error.message}", data=error.data) from error
            raise AssertionError

    async def _build(self, key: str, wanted: Wanted) -> Template:
        self.boots += 1
        boot, programs = await in_thread(lambda: (self._parts.boot_image(), self._parts.programs()))
        empty, size = await in_thread(self._parts.scratch, wanted.disk_bytes, wanted.inodes)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=self._store.root / "templates"))
        try:
            template = Template(
                key=key,
                accel=wanted.accel,
                qemu=programs.digest,
                boot=boot.key,
                layers=tuple(layer.digest for layer in wanted.layers),
                cpus=wanted.cpus,
                memory_bytes=wanted.memory_bytes,
                scratch=empty.name,
                scratch_bytes=size,
                disks=wanted.disks,
            )
            ram, own = await in_thread(begin, making, template)
            machine = Machine(
                kind="microvm",
                cpus=wanted.cpus,
                memory_bytes=wanted.memory_bytes,
                ram=Ram(str(ram), shared=True),
                kernel=str(boot.path),
                append=kernel_arguments(len(wanted.layers), accel=wanted.accel, khz=self.khz),
                disks=(*layer_disks(wanted.layers), scratch_disk(own, [self._store.disk(one) for one in wanted.disks], empty, size)),
            )
            await self._boot_and_save(machine, making / "devices", wanted.accel)
            if processes.possible(wanted.accel):
                await self._capture(making, template, wanted)
            await self._publish(making, template)
            return template
        finally:
            shutil.rmtree(making, ignore_errors=True)

    async def _capture(self, making: Path, template: Template, wanted: Wanted) -> None:
        """Add a clone's QEMU that has done once what nearly every sandbox does first, and see whether it can be gone on from. If not,
        clones are made without."""
        folder = making / processes.NAME
        own, chain = folder / "disk", [*(self._store.disk(one) for one in template.disks), making / "disk"]
        try:
            await in_thread(folder.mkdir, 0o700)
            await in_thread(disks.write_overlay, own, template.scratch_bytes)
            machine = self._clone(template, wanted.layers, own, chain, making / "ram")
            vmm = await Vmm.start(await self._spawner(), machine, self._place(machine, float(os.cpu_count() or 1)), accel=template.accel)
            try:
                await vmm.load(making / "devices")
                await self._talk(vmm, lambda channel: warm_up(channel, CAPTURED))
                await vmm.stop()
                await vmm.capture(machine, folder)
            finally:
                await asyncio.shield(vmm.kill())
            await self._try_out(folder, template, wanted, chain)
            await in_thread(processes.publish, folder)
        except (OpenDSecError, OSError, TimeoutError) as error:
            _LOG.warning("clones of template %s start without translated code: %s", template.key, error)
            await in_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _try_out(self, folder: Path, template: Template, wanted: Wanted, chain: Sequence[Path]) -> None:
        own = folder / "tried"
        await in_thread(shutil.copyfile, folder / "disk", own)
        machine = self._clone(template, wanted.layers, own, chain, folder / "ram")
        place = self._place(machine, float(os.cpu_count() or 1))
        vmm = await Vmm.start(await self._spawner(), machine, place, accel=template.accel, process=folder)
        try:
            await self._talk(vmm, Channel.usage)
        finally:
            await asyncio.shield(vmm.kill())
            await in_thread(own.unlink)

    async def _talk(self, vmm: Vmm, what: Callable[[Channel], Awaitable[object]]) -> None:
        sock = await vmm.channel()
        try:
            await vmm.cont()
        except BaseException:
            sock.close()
            raise
        channel = await Channel.open(sock, poller=self._poller(), timeout_s=self.boot_timeout_s)
        try:
            async with asyncio.timeout(WARM_TIMEOUT_S):
                await what(channel)
            await channel.detach()
        finally:
            channel.close()

    async def _publish(self, making: Path, template: Template) -> None:
        template = msgspec.structs.replace(template, made_for=await in_thread(self.made_for, template))
        await in_thread(_settle, making, template)
        target = self._store.template(template.key)
        shutil.rmtree(target, ignore_errors=True)  # one that could not be read
        (making / "disk").rename(self._store.disk(template.disk))
        making.rename(target)
        await in_thread(settle, self._store.shared_folders())

    async def _boot_and_save(self, machine: Machine, devices: Path, accel: Accel) -> None:
        vmm = await Vmm.start(await self._spawner(), machine, self._place(machine, float(os.cpu_count() or 1)), accel=accel)
        channel = None
        try:
            try:
                channel = await Channel.open(await vmm.channel(), poller=self._poller(), timeout_s=self.boot_timeout_s)
                async with asyncio.timeout(WARM_TIMEOUT_S):
                    await _run(channel, NO_THRASHING)
                    await _run(channel, SETTLED)
                    await warm_up(channel)
                await channel.detach()
            except (OpenDSecError, TimeoutError) as error:
                raise Unavailable(await self._diagnosis(vmm, error)) from error
            await vmm.stop()
            await vmm.save_devices(devices)
        finally:
            if channel is not None:
                channel.close()
            await asyncio.shield(vmm.kill())

    async def _diagnosis(self, vmm: Vmm, error: BaseException) -> str:
        what = error.message if isinstance(error, OpenDSecError) else "its first commands do not end"
        if not vmm.alive():
            await asyncio.wait([vmm.died], timeout=DIE_TIMEOUT_S)
        if vmm.died.done():
            what = vmm.died.result()
        return f"{what}; its console: {last_words(vmm.console())}"

    async def close(self) -> None:
        """Give up what is being built."""
        building = list(self._building.values())
        for task in building:
            task.cancel()
        await asyncio.gather(*building, return_exceptions=True)


async def warm_up(channel: Channel, commands: Sequence[tuple[str, ...]] = WARM_UP) -> None:
    """Be somebody, and run what sandboxes run first."""
    await channel.identity(hostname="template", machine_id="0" * 31 + "1", boot_id="00000000-0000-4000-8000-000000000001")
    await channel.limits(processes=WARM_LIMITS.pids)
    for argv in commands:
        await _run(channel, argv)


async def _run(channel: Channel, argv: tuple[str, ...]) -> None:
    plan = ExecPlan(process_id=f"warm-{os.urandom(6).hex()}", argv=argv, env=WARM_ENV, cwd="/", user="root")
    held = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), *os.pipe2(os.O_CLOEXEC)]
    try:
        running = await channel.exec(plan, (held[0], held[2], held[2]), WARM_LIMITS)  # nobody reads the pipe, which has room for it
        await running.exited
        running.kill_tree()
        await running.release()
    finally:
        close_all(held)


WARM_LIMITS = Limits(cpu=1.0, cpu_weight=100, memory_bytes=MIB, disk_bytes=MIB, inodes=64, pids=64, open_files=256)


def last_words(console: str) -> str:
    """What of a console's text says why a machine does not work: what guestd or a panicking kernel said, else the end."""
    lines = [line.strip() for line in console.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("guestd:") or "Kernel panic" in line]
    return " / ".join((telling or lines)[-5:])[-600:] or "nothing"


def begin(making: Path, template: Template) -> tuple[Path, Path]:
    """Its memory and its disk, both empty."""
    ram, own = making / "ram", making / "disk"
    ram.touch(mode=0o600)
    os.truncate(ram, template.memory_bytes)
    disks.write_overlay(own, template.scratch_bytes)
    return ram, own


def _settle(making: Path, template: Template) -> None:
    """What is published is on the disk, so a template that is there is whole."""
    for path in (*making.glob("*"), *making.glob("*/*")):
        os.chown(path, os.geteuid(), os.getegid())
        path.chmod(0o555 if path.is_dir() else 0o444)
        settle([path])
    write(making / "template.json", msgspec.json.encode(template), durable=True)


@contextlib.asynccontextmanager
async def _file_lock(path: Path) -> AsyncIterator[None]:
    with contextlib.ExitStack() as stack:
        await in_thread(stack.enter_context, locked(path))
        yield
