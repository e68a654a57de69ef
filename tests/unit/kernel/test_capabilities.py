# SPDX-License-Identifier: Apache-2.0
"""Capability names and bit sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.kernel import capabilities


def test_numbers_are_the_kernels() -> None:
    assert capabilities.NUMBERS["CAP_CHOWN"] == 0
    assert capabilities.NUMBERS["CAP_SYS_ADMIN"] == 21
    assert capabilities.NUMBERS["CAP_CHECKPOINT_RESTORE"] == 40
    assert capabilities.ALL == (1 << 41) - 1


@given(bits=st.integers(0, capabilities.ALL))
def test_names_and_bits(bits: int) -> None:
    assert capabilities.mask(capabilities.names(bits)) == bits


def test_spelling() -> None:
    assert capabilities.mask(["chown", "Cap_Kill", "CAP_MKNOD"]) == 1 << 0 | 1 << 5 | 1 << 27
    assert capabilities.names(1 << 63) == ["CAP_63"]
    with pytest.raises(ValueError, match="nonsense"):
        capabilities.mask(["nonsense"])
