# SPDX-License-Identifier: Apache-2.0
"""The host's side of the channel into a virtual machine, where dsec-guestd answers (docs/guest-protocol.md).

    wire.py       frames and payloads; pure
    channel.py    Channel: requests, answers and streams over one socket
    running.py    GuestRunning: a command in a guest
    streams.py    its streams, pumped from and to the host's descriptors
    files.py watch.py   GuestFiles: file operations, for worker threads
    transfer.py   the streams of one file operation, between a worker thread and the loop

What comes through the channel is said by whoever is root in the guest. A guest that breaks the protocol loses its channel
(`Channel.broken`), and with it the sandbox; it costs the host neither memory beyond fixed bounds nor another sandbox.
"""

from opendsec.runtime.guest.channel import Channel
from opendsec.runtime.guest.files import GuestFiles
from opendsec.runtime.guest.running import GuestRunning
from opendsec.runtime.guest.wire import CommandRow, GuestUsage, Renewed

__all__ = ["Channel", "CommandRow", "GuestFiles", "GuestRunning", "GuestUsage", "Renewed"]
