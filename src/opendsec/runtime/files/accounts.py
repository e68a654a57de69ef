# SPDX-License-Identifier: Apache-2.0
"""User names as the sandbox's own passwd and group files have them. Both files are hostile text: bounded, and total parsers.

The rules are those of commands (`kernel.enter.find_user`), so that a file written for a user is the user's.
"""

from __future__ import annotations

from opendsec.api.errors import InvalidRequest
from opendsec.runtime.files.beneath import Owner, Tree

MAX_ACCOUNTS_BYTES = 1 << 20  # of each file; what comes after is not looked at
MAX_ID = 65_534

ROOT = Owner(0, 0)


def resolve(tree: Tree, user: str, field: str = "user") -> Owner:
    """The ids that `user` means inside: "" is root; a name or number, optionally followed by `:group`.

    A user's group is its own by passwd; a number that passwd does not know has group 0. Raises InvalidRequest.
    """
    name, colon, group = user.partition(":")
    owner = ROOT if not name else _user(tree, _encode(name, field), field)
    if colon and group:
        owner = Owner(owner.uid, _group(tree, _encode(group, field), field))
    if max(owner) >= tree.ids:
        raise InvalidRequest(f"this sandbox has {tree.ids} ids; {max(owner)} is none of them", field=field)
    return owner


def _encode(name: str, field: str) -> bytes:
    try:
        return name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise InvalidRequest("must be text", field=field) from None


def _user(tree: Tree, name: bytes, field: str) -> Owner:
    rows = _rows(tree, b"/etc/passwd", 6)
    if name.isdigit():
        uid = _checked(name, field)
        for row in rows:
            if _id(row[2]) == uid and (gid := _id(row[3])) is not None:
                return Owner(uid, gid)
        return Owner(uid, 0)
    for row in rows:
        if row[0] == name and (found := _id(row[2])) is not None and (gid := _id(row[3])) is not None:
            return Owner(found, gid)
    if name == b"root":
        return ROOT  # an image without a passwd file still has root
    raise InvalidRequest(f"no user {name[:80].decode('utf-8', 'replace')!r} in the sandbox's passwd file", field=field)


def _group(tree: Tree, name: bytes, field: str) -> int:
    if name.isdigit():
        return _checked(name, field)
    for row in _rows(tree, b"/etc/group", 4):
        if row[0] == name and (gid := _id(row[2])) is not None:
            return gid
    if name == b"root":
        return 0
    raise InvalidRequest(f"no group {name[:80].decode('utf-8', 'replace')!r} in the sandbox's group file", field=field)


def _rows(tree: Tree, path: bytes, columns: int) -> list[list[bytes]]:
    lines = tree.read_small(path, MAX_ACCOUNTS_BYTES).split(b"\n")
    return [row for line in lines if len(row := line.split(b":")) >= columns]


def _id(text: bytes) -> int | None:
    """An id that may be used inside, or None. `isdigit` on bytes knows ASCII digits alone."""
    return int(text) if text.isdigit() and len(text) <= 5 and int(text) <= MAX_ID else None


def _checked(text: bytes, field: str) -> int:
    number = _id(text)
    if number is None:
        raise InvalidRequest(f"numbers must be at most {MAX_ID}", field=field)
    return number
