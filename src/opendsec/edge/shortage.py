# SPDX-License-Identifier: Apache-2.0
"""Want of space or of descriptors is no bug: whoever asked is told so."""

from __future__ import annotations

import errno

from opendsec.api.errors import Unavailable


def shortage(error: BaseException) -> Unavailable | None:
    """What the caller is told, if it is that."""
    if isinstance(error, OSError):
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return Unavailable("this edge has no file descriptors left", data={"resource": "descriptors"})
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return Unavailable("no space left on this edge's disk", data={"resource": "disk"})
    return None
