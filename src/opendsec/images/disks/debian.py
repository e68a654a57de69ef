# SPDX-License-Identifier: Apache-2.0
"""A disk that boots Debian, by UEFI (systemd-boot) and by BIOS (SYSLINUX), with guestd as a service. Nothing is mounted and nothing booted
for it: a tree by mmdebstrap becomes a file system by mkfs.ext4, and the boot partition is filled by mtools.

    sector 0       partition table; SYSLINUX's boot code, which looks for the partition with the legacy boot attribute
    from 1 MiB     FAT: systemd-boot, SYSLINUX, kernel and initramfs, one entry for each of both loaders
    after it       ext4: the system. It grows to the end of the disk at each boot, so a sandbox's `disk` is what it has
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from opendsec.api.errors import Internal, Unavailable, Unsupported
from opendsec.api.images import DebianDiskSource, DebianSource
from opendsec.images import debian
from opendsec.images.disks import DISK, gpt

MIB = 1 << 20
BOOT_BYTES = 128 * MIB
FREE_BYTES = 256 * MIB  # at least, in the smallest disk
PORT = "/dev/virtio-ports/org.opendsec.guest.0"
GUESTD = Path(__file__).resolve().parents[2] / "_native" / "dsec-guestd"
GPTMBR = ("/usr/lib/SYSLINUX/gptmbr.bin", "/usr/lib/syslinux/mbr/gptmbr.bin", "/usr/share/syslinux/gptmbr.bin")

# The cloud kernel has no graphics.
KERNEL, DESKTOP_KERNEL = "linux-image-cloud-amd64", "linux-image-amd64"
PACKAGES = ("systemd-sysv", "udev", "initramfs-tools", "systemd-boot-efi", "kmod", "procps")
DESKTOP = (
    *("xserver-xorg-core", "xserver-xorg-input-libinput", "xinit", "x11-xserver-utils", "openbox", "l3afpad"),
    *("fonts-dejavu-core", "adwaita-icon-theme"),
)
MODULES = ("virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "ahci", "ext4")

# Before the kernel's package makes its initramfs: one of the few modules that a machine of ours needs, not of all there are.
_SMALL_INITRAMFS = f"""set -e
mkdir -p "$1/etc/initramfs-tools/conf.d" "$1/etc/initramfs-tools/hooks"
printf 'MODULES=list\\nBUSYBOX=n\\n' >"$1/etc/initramfs-tools/conf.d/opendsec"
hook="$1/etc/initramfs-tools/hooks/opendsec"
printf '#!/bin/sh\\n[ "$1" != prereqs ] || exit 0\\n. /usr/share/initramfs-tools/hook-functions\\n' >"$hook"
printf 'manual_add_modules {" ".join(MODULES)}\\n' >>"$hook"
chmod 755 "$hook"
"""

_FILES = {
    "etc/fstab": "PARTUUID={root} / ext4 rw,noatime,errors=remount-ro,x-systemd.growfs 0 1\n",
    "usr/lib/repart.d/50-root.conf": "[Partition]\nType=root-x86-64\n",
    # Debian's own empties /tmp at each boot; but what is made of a snapshot of the disk has all its files.
    "etc/tmpfiles.d/tmp.conf": "q /tmp 1777 root root -\nq /var/tmp 1777 root root -\n",
    # Started by the port's appearance: a unit that waited for it would give up on a machine that takes its time.
    "etc/udev/rules.d/60-opendsec.rules": 'SUBSYSTEM=="virtio-ports", ATTR{{name}}=="org.opendsec.guest.0", TAG+="systemd", '
    'ENV{{SYSTEMD_WANTS}}="dsec-guestd.service"\n',
    "etc/systemd/system/dsec-guestd.service": f"""[Unit]
Description=OpenDSec's agent in this machine
StartLimitIntervalSec=0
After={{after}}

[Service]
{{ready}}ExecStart=/usr/local/sbin/dsec-guestd --port {PORT} --disk /
Restart=always
RestartSec=1
Delegate=yes
OOMScoreAdjust=-999
TasksMax=infinity
LimitNOFILE=524288
LimitMEMLOCK=infinity
""",
}
_DESKTOP_FILES = {
    "etc/systemd/system/dsec-desktop.service": """[Unit]
Description=The desktop, for the one user there is
After=systemd-user-sessions.service systemd-udev-settle.service
Wants=systemd-udev-settle.service
Conflicts=getty@tty1.service

[Service]
Environment=HOME=/root
ExecStart=/usr/bin/xinit /usr/local/lib/dsec-session -- /usr/bin/Xorg :0 vt1 -nolisten tcp -noreset -s 0 -dpms
Restart=always

[Install]
WantedBy=multi-user.target
""",
    # Whoever waits for the desktop waits for a window manager that answers.
    "usr/local/lib/dsec-session": """#!/bin/sh
xhost +local: >/dev/null
xsetroot -solid '#30506a'
touch /run/dsec-desktop
exec runuser -u user -- openbox --startup /usr/local/lib/dsec-startup
""",
    "usr/local/lib/dsec-startup": "#!/bin/sh\nexit 0\n",
    "usr/local/lib/dsec-desktop-wait": """#!/bin/sh
for _ in $(seq 300); do
    [ ! -e /run/dsec-desktop ] || exit 0
    sleep 0.2
done
""",
    "etc/X11/xorg.conf.d/50-opendsec.conf": """Section "ServerFlags"
    Option "BlankTime" "0"
    Option "StandbyTime" "0"
    Option "DontVTSwitch" "true"
EndSection
""",
    "etc/profile.d/opendsec-display.sh": "export DISPLAY=:0\n",
    "etc/X11/Xwrapper.config": "allowed_users=anybody\n",
}
# Services that do nothing for a sandbox but take time at each boot.
_MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
)


def make(source: DebianDiskSource, work: Path, *, log: Callable[[str], None], step: Callable[[str], None]) -> Path:
    """A directory in `work` that holds the disk. The caller is as in `debian.bootstrap`. Raises as that does, and Unsupported."""
    if not GUESTD.exists():
        raise Unsupported(f"{GUESTD.name} was not built")
    boot_code = _boot_code()
    root, tree = work / "root", work / "tree"
    tree.mkdir()
    step("installing the packages")
    packages = (DESKTOP_KERNEL if source.desktop else KERNEL, *PACKAGES, *(DESKTOP if source.desktop else ()), *source.packages)
    plain = DebianSource(suite=source.suite, packages=packages, variant="minbase")
    debian.bootstrap(plain, root, work, log=log, essential_hook=_SMALL_INITRAMFS)
    debian.finish(root)
    root_id = uuid.uuid4()
    _configure(root, root_id, desktop=source.desktop)
    step("making the disk")
    disk = tree / DISK
    used = _used_bytes(root)
    size = max(source.size_bytes, -(-(used * 5 // 4 + FREE_BYTES + BOOT_BYTES) // (64 * MIB)) * 64 * MIB)
    _lay_out(disk, root, root_id, size, boot_code)
    return tree


def _boot_code() -> bytes:
    for path in map(Path, GPTMBR):
        if path.exists():
            return path.read_bytes()
    raise Unavailable("gptmbr.bin is not there (Debian package syslinux-common)")


def _used_bytes(root: Path) -> int:
    total = 0
    for folder, folders, names in os.walk(root):
        total += 4096 * (len(folders) + len(names))
        for name in names:
            total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _configure(root: Path, root_id: uuid.UUID, *, desktop: bool) -> None:
    fields = _fields_of(desktop) | {"root": str(root_id)}
    for name, text in _FILES.items():
        _write(root / name, text.format(**fields))
    enabled: tuple[str, ...] = ()
    if desktop:
        for name, text in _DESKTOP_FILES.items():
            _write(root / name, text, executable=text.startswith("#!"))
        enabled = ("dsec-desktop.service",)
        _run(["chroot", os.fspath(root), "useradd", "--create-home", "--shell", "/bin/bash", "user"])
    (root / "usr/local/sbin").mkdir(parents=True, exist_ok=True)
    agent = root / "usr/local/sbin/dsec-guestd"
    agent.write_bytes(GUESTD.read_bytes())
    agent.chmod(0o755)
    system = root / "etc/systemd/system"
    wants = system / "multi-user.target.wants"
    wants.mkdir(parents=True, exist_ok=True)
    for name in enabled:
        (wants / name).symlink_to(f"/etc/systemd/system/{name}")
    for name in (*_MASKED, *(("getty@tty1.service",) if desktop else ())):
        if not os.path.lexists(system / name):
            (system / name).symlink_to("/dev/null")


def _fields_of(desktop: bool) -> dict[str, str]:
    return {
        "after": "dsec-desktop.service" if desktop else "basic.target",
        "ready": "ExecStartPre=/usr/local/lib/dsec-desktop-wait\nTimeoutStartSec=300\nEnvironment=DISPLAY=:0\n" if desktop else "",
    }


def _write(path: Path, text: str, *, executable: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755 if executable else 0o644)


def _lay_out(disk: Path, root: Path, root_id: uuid.UUID, size: int, boot_code: bytes) -> None:
    sectors = size // gpt.SECTOR
    boot = gpt.Partition(gpt.ESP, uuid.uuid4(), gpt.FIRST, BOOT_BYTES // gpt.SECTOR, "boot", gpt.LEGACY_BOOT)
    first = boot.first + boot.length
    count = (sectors - 1 - gpt.TABLE_SECTORS - first) // gpt.FIRST * gpt.FIRST
    system = gpt.Partition(gpt.ROOT_X86_64, root_id, first, count, "system")
    begin, end = gpt.tables(uuid.uuid4(), sectors, [boot, system], boot_code)
    with open(disk, "xb") as file:
        file.truncate(size)
        file.write(begin)
        file.seek(size - len(end))
        file.write(end)
    vmlinuz, initrd = (_newest(root / "boot", name) for name in ("vmlinuz", "initrd.img"))
    fat = _make_boot(disk.parent.parent / "boot.fat", boot, root, root_id, vmlinuz, initrd)
    with open(fat, "rb") as source, open(disk, "r+b") as file:
        file.seek(boot.first * gpt.SECTOR)
        while piece := source.read(MIB):
            if any(piece):
                file.write(piece)
            else:
                file.seek(len(piece), os.SEEK_CUR)
    fat.unlink()
    for path in (vmlinuz, initrd):  # they lie on the other partition
        path.unlink()
    offset = f"offset={system.first * gpt.SECTOR}"
    options = f"{offset},lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0"
    _run(
        [
            "mkfs.ext4",
            "-q",
            "-F",
            "-m",
            "0",
            "-J",
            "size=8",
            "-E",
            options,
            "-d",
            str(root),
            str(disk),
            f"{system.length * gpt.SECTOR // 1024}k",
        ]
    )


def _newest(folder: Path, name: str) -> Path:
    found = sorted(path for path in folder.glob(f"{name}-*") if path.is_file())
    if not found:
        raise Internal(f"the kernel's package left no {name}")
    return found[-1]


def _make_boot(fat: Path, boot: gpt.Partition, root: Path, root_id: uuid.UUID, vmlinuz: Path, initrd: Path) -> Path:
    with open(fat, "xb") as file:
        file.truncate(boot.length * gpt.SECTOR)
    _run(["mkfs.vfat", "-F", "32", "-n", "BOOT", "-h", str(boot.first), str(fat)])
    there = str(fat)
    command = f"root=PARTUUID={root_id} rw console=tty0 console=ttyS0 quiet net.ifnames=0"
    texts = {
        "loader/loader.conf": "timeout 0\ndefault debian.conf\neditor no\n",
        "loader/entries/debian.conf": f"title Debian\nlinux /vmlinuz\ninitrd /initrd.img\noptions {command}\n",
        "syslinux.cfg": f"DEFAULT debian\nPROMPT 0\nTIMEOUT 0\nLABEL debian\n  LINUX /vmlinuz\n  INITRD /initrd.img\n  APPEND {command}\n",
    }
    loader = root / "usr/lib/systemd/boot/efi/systemd-bootx64.efi"
    for folder in ("EFI", "EFI/BOOT", "loader", "loader/entries"):
        _run(["mmd", "-i", there, f"::/{folder}"])
    for path, name in ((loader, "EFI/BOOT/BOOTX64.EFI"), (vmlinuz, "vmlinuz"), (initrd, "initrd.img")):
        _run(["mcopy", "-i", there, str(path), f"::/{name}"])
    for name, text in texts.items():
        _run(["mcopy", "-i", there, "-", f"::/{name}"], text.encode())
    _run(["syslinux", "--install", str(fat)])
    return fat


def _run(command: Sequence[str], given: bytes | None = None) -> None:
    environment = {**os.environ, "PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin", "MTOOLS_SKIP_CHECK": "1"}
    try:
        done = subprocess.run(
            command,
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            close_fds=False,  # it too holds the workspace: see `ImageStore.workspace`
            check=False,
        )
    except FileNotFoundError:
        packages = "e2fsprogs, dosfstools, mtools, syslinux"
        raise Unavailable(f"{command[0]} is not installed (disks are made with Debian packages {packages})") from None
    if done.returncode != 0:
        said = done.stdout[-500:].decode(errors="replace").strip()
        if "No space left" in said:
            raise Unavailable("no space left for the disk")
        raise Internal(f"{command[0]}: {said}")
