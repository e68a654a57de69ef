# SPDX-License-Identifier: Apache-2.0
"""The confinement of QEMU: its posture against literals, and what a program in its place can do."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from opendsec.kernel import procfs
from opendsec.kernel.fds import written_to
from opendsec.runtime.vmm import process, profile
from opendsec.runtime.vmm.console import Tail
from opendsec.runtime.vmm.machine import Disk
from opendsec.runtime.vmm.place import ERRORS_FIFO
from opendsec.testing.posture import Posture, collect
from tests.security.test_posture import DEV
from tests.support import ROOT
from tests.vmms import Vmms

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
NONE: dict[str, tuple[str, ...]] = {"inheritable": (), "permitted": (), "effective": (), "bounding": (), "ambient": ()}


async def test_posture_of_a_running_qemu(vmms: Vmms) -> None:
    layer, scratch = vmms.folder / "layer", vmms.folder / "scratch"
    for file in (layer, scratch):
        file.write_bytes(b"\0" * 65_536)
    machine = vmms.machine(more="quiet", disks=(Disk("layer", str(layer), read_only=True), Disk("scratch", str(scratch))))
    vmm = await vmms.start(machine)
    place = vmm.record.place
    found = collect(vmm.pid, uid_base=place.uid, names={place.group: "GROUP", str(vmms.folder): "FOLDER"})
    assert found.program == "/usr/bin/qemu-system-x86_64"
    assert found.own_namespaces == ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    assert found.uid_map == found.gid_map == ((1000, "base", 1),)  # nobody is root in there
    assert found.ids == {"uid": ("0",) * 4, "gid": ("0",) * 4} and found.groups == ()  # the first of the host's that are its own
    assert found.capabilities == NONE and found.no_new_privileges
    assert (found.seccomp, found.seccomp_filters) == ("filter", 2)  # ours and QEMU's
    assert [(where, options) for where, _, options, _ in found.mounts] == [
        ("/", "ro,nosuid,nodev,relatime"),
        ("/dev", "ro,nosuid,noexec,relatime"),
        ("/kernel", "ro,nosuid,nodev,noexec,relatime"),
        ("/ram", "rw,nosuid,nodev,noexec,relatime"),
    ]
    assert found.mounts[1][1:] == ("tmpfs", "ro,nosuid,noexec,relatime", DEV)
    # Two listening sockets and a pair of QEMU's own to wake itself; anonymous ones are its event loop's.
    names = Counter(name for name in found.descriptors.values() if name != "anon_inode")
    assert names.keys() == {f"{place.directory}/serial", f"{place.directory}/errors", str(layer), str(scratch), "/ram", "socket"}
    assert names["socket"] == 3 and names["/ram"] == 1
    for number, name in found.descriptors.items():
        if name == str(layer):
            assert int(procfs.fd_info(vmm.pid, number)["flags"], 8) & os.O_ACCMODE == os.O_RDONLY
    assert found.environment == ("LD_PRELOAD=/usr/lib/dsec-ram.so", "PATH=/usr/bin", "TMPDIR=/tmp")
    assert {name for name, path in found.cgroups.items() if path == "/GROUP"} >= {"memory", "cpu", "pids"} or found.cgroups == {
        "": "/GROUP"
    }
    for name, value in (("core file size", 1), ("open files", 4096), ("locked memory", 65_536), ("realtime priority", 0)):
        assert found.limits[f"Max {name}"] == (value, value)
    assert found.session_leader and not found.terminal and found.tracer == 0 and found.umask == "0077"
    # Not dumpable: its entries are the host's root's, and nobody of its user may look into it.
    assert os.stat(procfs.path_of(vmm.pid, "environ")).st_uid == 0
    for task in os.listdir(procfs.path_of(vmm.pid, "task")):
        assert procfs.status(f"{vmm.pid}/task/{task}")["Seccomp_filters"] == "2"


async def test_a_clone_can_only_read_the_memory_that_it_shares(vmms: Vmms) -> None:
    machine, state = await vmms.template()
    clone = await vmms.clone(machine, state)
    place = clone.record.place
    found = collect(clone.pid, uid_base=place.uid)
    assert ("/ram", "ro,nosuid,nodev,noexec,relatime") in [(where, options) for where, _, options, _ in found.mounts]
    for number, name in found.descriptors.items():
        if name == "/ram":
            assert int(procfs.fd_info(clone.pid, number)["flags"], 8) & os.O_ACCMODE == os.O_RDONLY


async def test_a_captured_one_goes_on_in_the_same_confinement(vmms: Vmms) -> None:
    layer, scratch = vmms.folder / "layer", vmms.folder / "scratch"
    for file in (layer, scratch):
        file.write_bytes(b"\0" * 65_536)
    disks = (Disk("layer", str(layer), read_only=True), Disk("scratch", str(scratch)))
    machine = vmms.machine(disks=disks)
    first = await vmms.start(machine)
    await vmms.until(first, "n=2")
    await first.stop()
    state = vmms.folder / "devices"
    await first.save_devices(state)
    await first.kill()
    os.chmod(machine.ram.path, 0o444)

    def posture(vmm: process.Vmm) -> Posture:
        place = vmm.record.place
        found = collect(vmm.pid, uid_base=place.uid, names={place.group: "GROUP"})
        names = {
            number: name.replace(place.directory, "PLACE").replace(str(vmms.folder), "FOLDER") for number, name in found.descriptors.items()
        }
        return replace(found, descriptors=names, threads=0)  # those that wait for work end after a while

    machine = replace(machine, kernel="", append="").clone(machine.ram.path, disks)  # as clones are: it is in memory
    source = await vmms.start(machine)
    await source.load(state)
    ordinary = posture(source)
    captured = vmms.folder / "captured"
    captured.mkdir()
    await source.capture(machine, captured)
    await source.kill()
    own = vmms.folder / "own"
    own.write_bytes(scratch.read_bytes())
    for path in captured.iterdir():
        path.chmod(0o444)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in (*captured.iterdir(), layer, scratch)}
    machine = machine.clone(str(captured / "ram"), (disks[0], Disk("scratch", str(own))))
    vmm = await process.Vmm.start(vmms.spawner, machine, vmms.place(machine), accel="tcg", process=captured)
    vmms.started.append(vmm)
    restored = posture(vmm)
    assert restored.program == "/usr/bin/dsec-restore"
    # The same descriptors under the same numbers, so neither script, pages nor QEMU itself; its disk is its own.
    named = {number: name.replace("FOLDER/own", "FOLDER/scratch") for number, name in restored.descriptors.items()}
    assert replace(restored, program=ordinary.program, descriptors=named) == ordinary
    flags = {number: procfs.fd_info(vmm.pid, number)["flags"] for number in restored.descriptors}
    assert {number for number in flags if restored.descriptors[number] == "FOLDER/own" and int(flags[number], 8) & os.O_RDWR}
    for number, name in restored.descriptors.items():
        if name in ("/ram", "FOLDER/layer"):
            assert int(flags[number], 8) & os.O_ACCMODE == os.O_RDONLY
    assert os.stat(procfs.path_of(vmm.pid, "environ")).st_uid == 0  # not dumpable
    assert stat.S_IMODE(os.stat(procfs.path_of(vmm.pid, "exe")).st_mode) == 0o111
    for task in procfs.threads(vmm.pid):
        status = procfs.status(f"{vmm.pid}/task/{task}")
        assert (status["Seccomp"], status["Seccomp_filters"], status["NoNewPrivs"], int(status["CapBnd"], 16)) == ("2", "2", "1", 0)
    await vmm.cont()
    await vmms.further(vmm, 2)
    running = posture(vmm)  # devices that work are told by event descriptors
    assert replace(running, descriptors={}) == replace(restored, descriptors={})
    assert set(running.descriptors.items()) ^ set(restored.descriptors.items()) <= {(number, "anon_inode") for number in range(64)}
    # Nothing that others go on from is written to, nor could be.
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in before} == before
    assert not [path for path in before if path != own and written_to(path)]


EXPECTED = {
    "inet": errno.EAFNOSUPPORT,
    "unix": errno.EAFNOSUPPORT,
    "netlink": errno.EAFNOSUPPORT,
    "vsock": errno.EAFNOSUPPORT,
    "create": errno.EROFS,
    "create-in-dev": errno.EROFS,
    "kernel-for-writing": errno.EACCES,
    "ram-for-writing": errno.EACCES,
    "self": errno.EACCES,
    "proc": errno.ENOENT,
    "sys": errno.ENOENT,
    "etc": errno.ENOENT,
    "kvm": errno.ENOENT,
    "kill-all": errno.ESRCH,
    "io-uring": errno.ENOSYS,
    "clone3": errno.ENOSYS,
}


async def test_what_a_program_in_its_place_can_do(vmms: Vmms) -> None:
    root = vmms.folder / "root"
    shutil.copytree(vmms.programs.root, root, symlinks=True)
    qemu = root / "usr/bin/qemu-system-x86_64"
    qemu.unlink()
    command = ["cc", "-static", "-O1", "-Wall", "-Werror", str(ROOT / "tests/guests/escape.c"), "-o", str(qemu)]
    subprocess.run(command, check=True, timeout=60)
    qemu.chmod(0o111)
    machine = vmms.machine(shared=False)
    place = process.Place(**{name: getattr(vmms.place(machine), name) for name in process.Place.__struct_fields__} | {"root": str(root)})
    Path(place.directory).mkdir(parents=True)
    held: list[int] = []
    plan, given = process.prepare(machine, place, "tcg", (), None, held)
    tail = Tail(Path(place.directory) / ERRORS_FIFO)
    try:
        await vmms.spawner.call("profile", {"name": profile.NAME, "program": profile.program()})
        answer = await vmms.spawner.call("machine", plan, given)
        async with asyncio.timeout(20):
            while "end\n" not in tail.text():
                tail.heard.clear()
                await tail.heard.wait()
        said = dict(line.split() for line in tail.text().splitlines() if line != "end")
        os.close(answer.fds[0])
    finally:
        for fd in held:
            os.close(fd)
        tail.close()
        await process.remove(place)
    wanted = {name: EXPECTED.get(name, errno.EPERM) for name in said}
    assert {name: int(code) for name, code in said.items()} == wanted and len(said) >= 29
