#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Makes a Debian 12 or 13 machine ready: system packages by apt, then .venv with the project in it (editable).
# Idempotent; when nothing changed it only looks, which takes a few milliseconds.
set -euo pipefail
cd "$(dirname "$0")/.."

# program → Debian package. A program that is there, however it came, is not installed again.
declare -A PACKAGES=(
    [cc]="gcc libc6-dev" [bwrap]=bubblewrap [crun]=crun [mkfs.erofs]=erofs-utils [mmdebstrap]=mmdebstrap
    [mkfs.btrfs]=btrfs-progs [losetup]=mount [ip]=iproute2
    [nginx]=nginx-light [openssl]=openssl # a web server of ranges and certificates, for tests of remote stores
    [git]=git [mkfs.ext4]=e2fsprogs # repositories and a file system that runs full, for tests
    # OCI images: registries are spoken to by skopeo; umoci and a registry of our own are for tests alone.
    [skopeo]=skopeo [umoci]=umoci [docker-registry]=docker-registry
)
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
    command -v "$program" >/dev/null || wanted+=(${PACKAGES[$program]})
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
    $sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "$@" >/dev/null
}

# Debian's python3 comes without ensurepip; the package that has it is named after the minor version.
if [ -n "${python:-}" ] && ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    wanted+=("$("$python" -c 'import sys; print(f"python3.{sys.version_info[1]}-venv")')")
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
