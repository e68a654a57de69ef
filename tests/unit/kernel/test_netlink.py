# SPDX-License-Identifier: Apache-2.0
"""Acknowledgements: the error, the kernel's text beside it, and datagrams that are none."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.kernel import netlink


def ack(code: int, *, sequence: int = 1, flags: int = 0, rest: bytes = b"") -> bytes:
    body = struct.pack("=i", -code) + struct.pack("=IHHII", 32, netlink.RTM_NEWLINK, 5, sequence, 0) + rest
    return struct.pack("=IHHII", 16 + len(body), netlink.NLMSG_ERROR, flags, sequence, 0) + body


def text_attribute(text: bytes) -> bytes:
    data = text + b"\0"
    return struct.pack("=HH", 4 + len(data), netlink.NLMSGERR_ATTR_MSG) + data + bytes(-len(data) % 4)


def test_success_and_failure() -> None:
    assert netlink.parse_ack(ack(0), 1) == (0, "")
    assert netlink.parse_ack(ack(19), 1) == (19, "")


def test_the_kernels_text() -> None:
    other = struct.pack("=HHI", 8, 2, 99)
    capped = netlink.NLM_F_CAPPED | netlink.NLM_F_ACK_TLVS
    assert netlink.parse_ack(ack(22, flags=capped, rest=other + text_attribute(b"no such \xff")), 1) == (22, "no such \ufffd")
    # Not capped: the whole request is quoted, 32 bytes of which 16 are the header.
    assert netlink.parse_ack(ack(22, flags=netlink.NLM_F_ACK_TLVS, rest=bytes(16) + text_attribute(b"why")), 1) == (22, "why")


def test_other_messages_are_passed_over() -> None:
    news = struct.pack("=IHHII", 20, 16, 0, 0, 0) + b"abcd"
    assert netlink.parse_ack(news + ack(5, sequence=9) + ack(7), 1) == (7, "")
    with pytest.raises(ValueError, match="no acknowledgement"):
        netlink.parse_ack(news + ack(5, sequence=9), 1)


@given(data=st.binary(max_size=120))
def test_anything_else_is_a_value_error(data: bytes) -> None:
    try:
        netlink.parse_ack(data, 1)
    except ValueError:
        pass


@given(rest=st.binary(max_size=60), flags=st.integers(0, 0x3FF))
def test_hostile_attributes(rest: bytes, flags: int) -> None:
    code, text = netlink.parse_ack(ack(22, flags=flags, rest=rest), 1)
    assert code == 22
    assert isinstance(text, str)
