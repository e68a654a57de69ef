# SPDX-License-Identifier: Apache-2.0
"""Scratch: where the writable files of sandboxes live. One driver an edge, chosen by trying."""

from opendsec.runtime.scratch.choice import Choice, ScratchSettings, choose
from opendsec.runtime.scratch.driver import ScratchDriver, ScratchPlan, Snapshot

__all__ = ["Choice", "ScratchDriver", "ScratchPlan", "ScratchSettings", "Snapshot", "choose"]
