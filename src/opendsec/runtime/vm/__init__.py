# SPDX-License-Identifier: Apache-2.0
"""Full virtual machines: firmware, a disk image, a screen."""
