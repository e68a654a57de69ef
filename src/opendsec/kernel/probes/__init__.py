# SPDX-License-Identifier: Apache-2.0
"""The probes behind `features`: each function tries one thing for real in a scratch directory, cleans up, and returns a detail
for the table ("" if there is none). It raises `tools.Missing` or OSError where the machine cannot do it.
"""
