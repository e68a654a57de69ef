# SPDX-License-Identifier: Apache-2.0
"""Comparisons with peers and the measurement of every bound in SPECIFICATION.md."""
