# SPDX-License-Identifier: Apache-2.0
"""Files of a living sandbox, worked on from outside while the sandbox, hostile, works on them too.

    access.py     SandboxFiles: the operations, each one context of root descriptor and credentials
    beneath.py    Tree: paths resolved beneath the root, which file systems are the sandbox's own, owners, errors
    writer.py     NewFile (temporary, then renamed over) and Appending (in place)
    walk.py       a position in a tree of any depth that holds one descriptor; recursive removal
    tarball.py    tar members to and from descriptors, nothing kept in memory
    archive.py extract.py   a tree to a tar stream and back
    accounts.py   user names by the sandbox's own passwd and group files
    watch.py      changes of one directory

Rules that hold everywhere here:

* A path from outside is resolved by `fds.beneath` from the sandbox's root: absolute symlinks and ".." stay inside, magic links
  of /proc are refused. What comes after the last "/" is then worked on relative to the held descriptor of its directory, never
  by the path again, never through a symlink, never onto another mount.
* The thread acts as root of the sandbox with the file capabilities alone (`kernel.fsuser`). That reaches everything on the
  sandbox's own file systems: its root's mount, and tmpfs mounts whose files belong to the sandbox's ids (/dev/shm). Everything
  else (/proc, /dev) can be looked at, and read only as root of the sandbox could without any capability; nothing there is
  ever changed.
* An inode is opened for data only after an O_PATH descriptor of it has shown a regular file, and then by that descriptor: a
  FIFO, a socket or a device is never opened, whatever is renamed meanwhile. O_NONBLOCK, so that a lease held inside cannot
  make anybody wait.
* Errors of the kernel become errors of the contract in one place, `beneath.translated`.
"""

from opendsec.runtime.files.access import SandboxFiles

__all__ = ["SandboxFiles"]
