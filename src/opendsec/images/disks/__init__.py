# SPDX-License-Identifier: Apache-2.0
"""Disk images: images whose only layer holds one file, `/disk.raw`, the whole disk of a machine."""

DISK = "disk.raw"
