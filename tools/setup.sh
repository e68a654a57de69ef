#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes a Debian 12 or 13 machine ready: system packages by apt, then .venv with the project in it (editable).
# Idempotent; when nothing changed it only looks, which takes a few milliseconds.
set -euo pipefail
cd "$(dirname "$0")/.."

# program, or file → Debian package. What is there, however it came, is not installed again.
declare -A PACKAGES=(
    [cc]="gcc libc6-dev" [bwrap]=bubblewrap [crun]=crun [mkfs.erofs]=erofs-utils [mmdebstrap]=mmdebstrap
    [mkfs.btrfs]=btrfs-progs [losetup]=mount [ip]=iproute2
    [nginx]=nginx-light [openssl]=openssl # a web server of ranges and certificates, for tests of remote stores
    [git]=git [mkfs.ext4]=e2fsprogs [cpio]=cpio # for tests: repositories, a file system that runs full, archives of a boot image
    # OCI images: registries are spoken to by skopeo; umoci and a registry of our own are for tests alone.
    [skopeo]=skopeo [umoci]=umoci [docker-registry]=docker-registry
    # Virtual machines.
    [qemu-system-x86_64]=qemu-system-x86 [qemu-img]=qemu-utils
    # Full machines: their firmware, and what fills the boot partition of a disk without mounting it.
    [swtpm]=swtpm # the TPM of a machine, beside its QEMU
    [/usr/share/OVMF/OVMF_CODE_4M.fd]=ovmf [mkfs.vfat]=dosfstools [mcopy]=mtools [syslinux]="syslinux syslinux-common"
)
QEMU_OLDEST=1:9 # older ones cannot be given /dev/kvm as a descriptor
PATH="$PATH:/usr/sbin:/sbin"

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"; return
        fi
    done
    return 1
}

wanted=()
for program in "${!PACKAGES[@]}"; do
    command -v "$program" >/dev/null || [ -e "$program" ] || wanted+=(${PACKAGES[$program]})
done
python=$(find_python) || wanted+=(python3 python3-venv)

want=$(cat pyproject.toml hatch_build.py tools/setup.sh native/* 2>/dev/null | sha256sum)
stamp=.venv/.opendsec-setup
if [ ${#wanted[@]} = 0 ] && [ -x .venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$want" ] && [ -d src/opendsec/_native ]; then
    exit 0
fi

exec 9>.setup.lock
flock 9  # two targets, or two shells, may ask at once

apt_install() {
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo=sudo
    echo "setup: installing $*"
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq update
    local package qemu=() others=() suite=""
    for package in "$@"; do
        case $package in qemu-*) qemu+=("$package") ;; *) others+=("$package") ;; esac
    done
    local install="$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends"
    [ ${#others[@]} = 0 ] || $install "${others[@]}" >/dev/null
    if [ ${#qemu[@]} != 0 ]; then
        qemu_suite "$sudo"
        $install ${suite:+-t "$suite"} "${qemu[@]}" >/dev/null
    fi
}

# Debian 12 has a QEMU that is new enough in its backports, which are added from wherever this machine has the rest. Nothing else is
# taken from there: apt prefers the other suites unless it is told. Sets $suite where it is needed.
qemu_suite() {
    local sudo=$1 list=/etc/apt/sources.list.d/opendsec-backports.sources codename site keys text
    if dpkg --compare-versions "$(apt-cache policy qemu-system-x86 | sed -n 's/^ *Candidate: //p')" ge $QEMU_OLDEST; then
        return
    fi
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    suite=$codename-backports
    if ! apt-get indextargets --format '$(CODENAME)' 'Created-By: Packages' | grep -x "$suite" >/dev/null; then
        site=$(apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
            awk -v codename="$codename" '$1 == codename && $2 == "main" && !found++ { print $3 }')
        [ -n "$site" ] || { echo "setup: apt has no source of $codename, so there is no newer QEMU to be had" >&2; exit 1; }
        keys=/usr/share/keyrings/debian-archive-keyring.gpg
        text="Types: deb"$'\n'"URIs: $site"$'\n'"Suites: $suite"$'\n'"Components: main"
        [ ! -e $keys ] || text+=$'\n'"Signed-By: $keys"
        echo "$text" | $sudo tee $list >/dev/null
        $sudo apt-get -qq update
    fi
}

# Debian's python3 comes without ensurepip; the package that has it is named after the minor version.
if [ -n "${python:-}" ] && ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    wanted+=("$("$python" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')")
fi
if command -v qemu-system-x86_64 >/dev/null && dpkg-query -W qemu-system-x86 >/dev/null 2>&1 &&
    dpkg --compare-versions "$(dpkg-query -W -f '${Version}' qemu-system-x86)" lt $QEMU_OLDEST; then
    wanted+=(qemu-system-x86 qemu-utils)
fi
if [ ${#wanted[@]} != 0 ]; then
    # The registry's package would start a service that listens to everybody; the tests start one of their own.
    unit=/etc/systemd/system/docker-registry.service
    if [[ " ${wanted[*]} " = *" docker-registry "* ]] && [ -d "${unit%/*}" ] && [ ! -e $unit ]; then
        $([ "$(id -u)" = 0 ] || echo sudo) ln -sf /dev/null $unit
    fi
    apt_install "${wanted[@]}"
    python=$(find_python)
fi

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv
    "$python" -m venv .venv
fi
echo "setup: installing the project into .venv (a minute or two)"
.venv/bin/python -m pip install -qq --disable-pip-version-check --editable '.[dev,bench]'
echo "$want" >$stamp
