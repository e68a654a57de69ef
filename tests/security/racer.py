# SPDX-License-Identifier: Apache-2.0
"""A hostile process beside the code under test: exchanges two names over and over, then says how often.

`python -m tests.security.racer ROOT COUNT A B [A B ...]`: all pairs in turn, COUNT times. It is confined to ROOT, as a sandbox
would be: what it exchanges is always inside. A pair that is gone for a moment is skipped.
"""

from __future__ import annotations

import os
import sys

from opendsec.kernel import abi, syscalls


def main() -> None:
    count, names = int(sys.argv[2]), [os.fsencode(name) for name in sys.argv[3:]]
    os.chroot(sys.argv[1])
    os.chdir("/")
    pairs = list(zip(names[::2], names[1::2], strict=True))
    done = 0
    print("racing", flush=True)
    for _ in range(count):
        for one, other in pairs:
            try:
                syscalls.renameat2(abi.AT_FDCWD, one, abi.AT_FDCWD, other, abi.RENAME_EXCHANGE)
                done += 1
            except OSError:
                pass
    print(done, flush=True)


if __name__ == "__main__":
    main()
