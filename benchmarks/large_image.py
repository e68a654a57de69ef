# SPDX-License-Identifier: Apache-2.0
"""The image of which little is read: Debian with Python, Node, C and C++ toolchains and their documentation, over 1 GiB. Built once."""

from __future__ import annotations

from pathlib import Path

from opendsec.api.images import BuildRequest, DebianSource
from tests.images import kept_store

LARGE = "debian-large"
REQUEST = BuildRequest(
    name=LARGE,
    source=DebianSource(
        packages=(
            "python3",
            "python3-doc",
            "python3-matplotlib",
            "python3-pandas",
            "python3-pytest",
            "python3-scipy",
            "python3-sympy",
            "nodejs",
            "nodejs-doc",
            "build-essential",
            "clang",
            "cmake",
            "llvm-dev",
            "git",
            "patch",
            "procps",
            "debian-reference",
            "glibc-doc",
            "linux-doc",
            "manpages-dev",
            "perl-doc",
        )
    ),
)


def large_store() -> Path:
    """The root of a store that holds it, kept outside the checkout; some minutes the first time."""
    return kept_store(REQUEST)


if __name__ == "__main__":
    print(large_store())
