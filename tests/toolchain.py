# SPDX-License-Identifier: Apache-2.0
"""The image in which the languages of function calls live, by the name that their definitions give it. Built once, as tests/images.py
has it.

The first build takes about 70 s and 1.8 GB.
"""

from __future__ import annotations

from pathlib import Path

from opendsec.api.images import BuildRequest, DebianSource
from tests.images import kept_store

TOOLCHAIN = "toolchain"
PACKAGES = ("python3", "python3-numpy", "gcc", "g++", "default-jdk-headless", "nodejs", "golang-go", "rustc", "procps")
REQUEST = BuildRequest(name=TOOLCHAIN, source=DebianSource(packages=PACKAGES))


def toolchain_store() -> Path:
    """The root of an ImageStore with image `toolchain`."""
    return kept_store(REQUEST)


if __name__ == "__main__":
    print(toolchain_store())
