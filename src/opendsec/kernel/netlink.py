# SPDX-License-Identifier: Apache-2.0
"""rtnetlink, as far as a sandbox without a network needs it: bring the loopback device up.

One request, one acknowledgement. The kernel's own explanation (extended ack) goes into the error.
"""

from __future__ import annotations

import errno
import os
import socket
import struct

NETLINK_ROUTE = 0
SOL_NETLINK = 270
NETLINK_CAP_ACK, NETLINK_EXT_ACK = 10, 11
NLMSG_ERROR = 2
NLM_F_REQUEST, NLM_F_ACK, NLM_F_CAPPED, NLM_F_ACK_TLVS = 0x1, 0x4, 0x100, 0x200
NLMSGERR_ATTR_MSG = 1
NLA_TYPE_MASK = 0x3FFF
RTM_NEWLINK = 16
IFF_UP = 0x1
LOOPBACK_IFINDEX = 1
"""The loopback device is the first of every network namespace."""

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_IFINFO = struct.Struct("=BxHiII")  # family, type, index, flags, change mask


def pack_message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags, sequence, 0) + body


def parse_ack(data: bytes, sequence: int) -> tuple[int, str]:
    """(errno, the kernel's text) from a datagram that acknowledges `sequence`; (0, "") is success. ValueError: it does not."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, flags, number, _ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size or at + length > len(data):
            break
        if kind == NLMSG_ERROR and number == sequence and length >= _HEADER.size + 4:
            (code,) = struct.unpack_from("=i", data, at + _HEADER.size)
            return -code, _ack_text(data[at + _HEADER.size + 4 : at + length], flags)
        at += (length + 3) & ~3
    raise ValueError("no acknowledgement in the datagram")


def _ack_text(rest: bytes, flags: int) -> str:
    """The message attribute; before it the failed request is quoted, its header alone if capped."""
    if not flags & NLM_F_ACK_TLVS or len(rest) < _HEADER.size:
        return ""
    at = _HEADER.size if flags & NLM_F_CAPPED else (_HEADER.unpack_from(rest)[0] + 3) & ~3
    while at + 4 <= len(rest):
        length, kind = struct.unpack_from("=HH", rest, at)
        if length < 4:
            break
        if kind & NLA_TYPE_MASK == NLMSGERR_ATTR_MSG:
            return rest[at + 4 : at + length].rstrip(b"\0").decode("utf-8", "replace")
        at += (length + 3) & ~3
    return ""


def request(kind: int, body: bytes, what: str) -> None:
    """Send one request in the current network namespace and take its acknowledgement. OSError names `what`."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_ROUTE) as channel:
        for option in (NETLINK_CAP_ACK, NETLINK_EXT_ACK):
            try:
                channel.setsockopt(SOL_NETLINK, option, 1)
            except OSError as error:
                if error.errno != errno.ENOPROTOOPT:
                    raise
        channel.send(pack_message(kind, NLM_F_REQUEST | NLM_F_ACK, 1, body))
        code, text = parse_ack(channel.recv(8192), 1)
    if code:
        raise OSError(code, f"netlink: {os.strerror(code)}" + (f" ({text})" if text else ""), what)


def link_up(index: int) -> None:
    """Set the device with this index up, by RTM_NEWLINK."""
    request(RTM_NEWLINK, _IFINFO.pack(socket.AF_UNSPEC, 0, index, IFF_UP, IFF_UP), f"link {index}")


def loopback_up() -> None:
    """Bring `lo` up; the kernel then gives it 127.0.0.1 and ::1 by itself."""
    link_up(LOOPBACK_IFINDEX)
