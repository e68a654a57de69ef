# SPDX-License-Identifier: Apache-2.0
"""Keys of a US keyboard by QEMU's names for them, and what has to be pressed for a character."""

from __future__ import annotations

from opendsec.api.errors import InvalidRequest

SHIFT = "shift"

_NAMES = {
    "enter": "ret",
    "return": "ret",
    "escape": "esc",
    "esc": "esc",
    "backspace": "backspace",
    "tab": "tab",
    "space": "spc",
    "delete": "delete",
    "del": "delete",
    "insert": "insert",
    "home": "home",
    "end": "end",
    "pageup": "pgup",
    "pagedown": "pgdn",
    "up": "up",
    "down": "down",
    "left": "left",
    "right": "right",
    "capslock": "caps_lock",
    "numlock": "num_lock",
    "scrolllock": "scroll_lock",
    "printscreen": "print",
    "pause": "pause",
    "menu": "menu",
    "shift": "shift",
    "ctrl": "ctrl",
    "control": "ctrl",
    "alt": "alt",
    "altgr": "alt_r",
    "super": "meta_l",
    "meta": "meta_l",
    "win": "meta_l",
    "cmd": "meta_l",
    "plus": "shift+equal",
    **{f"f{number}": f"f{number}" for number in range(1, 13)},
}
_PLAIN = {
    **{letter: letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789"},
    "\n": "ret",
    "\t": "tab",
    "\b": "backspace",
    " ": "spc",
    "-": "minus",
    "=": "equal",
    "[": "bracket_left",
    "]": "bracket_right",
    "\\": "backslash",
    ";": "semicolon",
    "'": "apostrophe",
    "`": "grave_accent",
    ",": "comma",
    ".": "dot",
    "/": "slash",
}
_SHIFTED = {
    **{letter.upper(): letter for letter in "abcdefghijklmnopqrstuvwxyz"},
    **dict(zip("!@#$%^&*()", "1234567890", strict=True)),
    "_": "minus",
    "+": "equal",
    "{": "bracket_left",
    "}": "bracket_right",
    "|": "backslash",
    ":": "semicolon",
    '"': "apostrophe",
    "~": "grave_accent",
    "<": "comma",
    ">": "dot",
    "?": "slash",
}


def typed(character: str) -> tuple[str, ...]:
    """The keys that are down together for a character. Raises InvalidRequest for one that the keyboard has not."""
    if (key := _PLAIN.get(character)) is not None:
        return (key,)
    if (key := _SHIFTED.get(character)) is not None:
        return (SHIFT, key)
    raise InvalidRequest(f"a US keyboard has no {character!r}", field="text")


def pressed(keys: str) -> tuple[str, ...]:
    """The keys of `ctrl+s`, `Enter`, `A`, in the order of pressing. Raises InvalidRequest."""
    found: list[str] = []
    for name in ["+"] if keys == "+" else keys.split("+"):
        if len(name) == 1:
            found += typed(name)
        elif (known := _NAMES.get(name.lower().replace("_", "").replace("-", ""))) is not None:
            found += known.split("+")
        else:
            raise InvalidRequest(f"{name[:40]!r} is no key: a character, or one of {', '.join(sorted(_NAMES))}", field="keys")
    return tuple(dict.fromkeys(found))
