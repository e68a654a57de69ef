# SPDX-License-Identifier: Apache-2.0
"""Build hook: compiles the programs in native/ with the system C compiler into the package.

Each native/<name>.c becomes src/opendsec/_native/dsec-<name>, one static program without libc, but for those in SHARED, which
become dsec-<name>.so, a library that needs none, and those in WITH_LIBC, which are linked with it statically. The hook runs for
wheels and for editable installs alike, so a checkout and an installed package find the programs at the same place.
It can be run by hand, too: ``python hatch_build.py`` rebuilds the programs and nothing else.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, outside a build
    BuildHookInterface = object  # type: ignore[assignment,misc,unused-ignore]

# No libc: the programs make their few system calls themselves, so that each lives in a handful of pages.
CFLAGS = (
    "-std=gnu11 -Os -Wall -Wextra -Werror -ffreestanding -fno-builtin -fno-stack-protector -fno-pie "
    "-fno-asynchronous-unwind-tables -fcf-protection=none -fno-tree-loop-distribute-patterns"
)
LDFLAGS = "-nostdlib -static -no-pie -Wl,--build-id=none -Wl,-z,noseparate-code -Wl,-z,norelro -Wl,-z,noexecstack -Wl,-s"
ONE_PAGE = "-Wl,-n"  # of a program without data: its file is mapped as one page
WITHOUT_DATA = ("init",)
SHARED = ("forkin", "ram")
SHARED_FLAGS = "-shared -fPIC -fvisibility=hidden"
X86_64_ONLY = ("restore",)  # it knows registers and signal frames
WITH_LIBC = ("guestd",)  # one a machine, not one a sandbox: size matters less there
LIBC_FLAGS = "-std=gnu11 -O2 -Wall -Wextra -Werror -Wno-unused-function -Wno-format-truncation -fno-pie -ffunction-sections"
LIBC_LINK = "-static -no-pie -Wl,--build-id=none -Wl,-z,noexecstack -Wl,--gc-sections -Wl,-s"


def build_native(root: Path) -> list[Path]:
    """Compile every native/*.c; return the programs made. Raises CalledProcessError with the compiler's own text."""
    out_dir = root / "src" / "opendsec" / "_native"
    out_dir.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    made = []
    for source in sorted((root / "native").glob("*.c")):
        if source.stem in X86_64_ONLY and os.uname().machine != "x86_64":
            continue
        shared = source.stem in SHARED
        target = out_dir / f"dsec-{source.stem}{'.so' if shared else ''}"
        partial = target.with_suffix(".partial")
        flags = (LIBC_FLAGS if source.stem in WITH_LIBC else CFLAGS).split()
        if os.uname().machine != "x86_64" and "-fcf-protection=none" in flags:
            flags.remove("-fcf-protection=none")  # an x86 flag that other back ends refuse
        if shared:
            flags = [flag for flag in flags if flag != "-fno-pie"]
            link = [*SHARED_FLAGS.split(), *(flag for flag in LDFLAGS.split() if flag not in ("-static", "-no-pie"))]
        elif source.stem in WITH_LIBC:
            link = LIBC_LINK.split()
        else:
            link = [*LDFLAGS.split(), *([ONE_PAGE] if source.stem in WITHOUT_DATA else [])]
        if os.uname().machine == "x86_64" and source.stem not in WITH_LIBC:
            flags.append("-mno-red-zone")
        subprocess.run([*compiler, *flags, str(source), *link, "-o", str(partial)], check=True)
        partial.chmod(0o755)
        partial.rename(target)  # running copies keep their inode
        made.append(target)
    return made


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc,unused-ignore]
    """Adds the compiled programs to the wheel and marks it as bound to this machine's architecture."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        build_native(Path(self.root))
        platform_tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag}"


if __name__ == "__main__":
    for program in build_native(Path(__file__).resolve().parent):
        print(program, program.stat().st_size, "bytes", file=sys.stderr)
