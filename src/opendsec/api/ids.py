# SPDX-License-Identifier: Apache-2.0
"""Identifiers: what they look like, how they are made, how a caller's own are checked."""

from __future__ import annotations

import re
import secrets

from opendsec.api.errors import InvalidRequest

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u
_ACTION = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")

SANDBOX, PROCESS, SESSION, EDGE, SNAPSHOT = "sb", "proc", "sess", "edge", "snap"


def new_id(kind: str) -> str:
    """A fresh identifier `<kind>_<16 characters>` with 80 random bits; safe as a file, cgroup and host name part."""
    bits = secrets.randbits(80)
    return f"{kind}_" + "".join(_ALPHABET[bits >> shift & 31] for shift in range(0, 80, 5))


def check_action_id(value: str) -> str:
    """`value` unchanged, or InvalidRequest: 1 to 128 of letters, digits and `. _ : / @ + -`."""
    if not _ACTION.fullmatch(value):
        raise InvalidRequest("must be 1 to 128 letters, digits or any of . _ : / @ + -", field="action_id")
    return value
