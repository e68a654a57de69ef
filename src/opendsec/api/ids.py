# SPDX-License-Identifier: Apache-2.0
"""Identifiers: what they look like, how they are made, how a caller's own are checked."""

from __future__ import annotations

import re
import secrets

from opendsec.api.errors import InvalidRequest, NotFound

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32: no i, l, o, u
_ACTION = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
_OWN = re.compile(r"(sb|proc|sess|edge)_[0-9a-z]{16}")

SANDBOX, PROCESS, SESSION, EDGE = "sb", "proc", "sess", "edge"


def new_id(kind: str) -> str:
    """A fresh identifier `<kind>_<16 characters>` with 80 random bits; safe as a file, cgroup and host name part."""
    bits = secrets.randbits(80)
    return f"{kind}_" + "".join(_ALPHABET[bits >> shift & 31] for shift in range(0, 80, 5))


def check_action_id(value: str) -> str:
    """`value` unchanged, or InvalidRequest: 1 to 128 of letters, digits and `. _ : / @ + -`."""
    if not _ACTION.fullmatch(value):
        raise InvalidRequest("must be 1 to 128 letters, digits or any of . _ : / @ + -", field="action_id")
    return value


def check_own_id(value: str, kind: str) -> str:
    """`value` unchanged if it has the form of one of our `kind` ids, else NotFound (it cannot exist)."""
    if not _OWN.fullmatch(value) or not value.startswith(f"{kind}_"):
        raise NotFound(f"no {kind!r} with id {value[:80]!r}", field="id")
    return value
