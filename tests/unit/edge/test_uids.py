# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opendsec.api.errors import QuotaExceeded
from opendsec.edge.config import UID_BASE, UID_RANGES, UIDS_EACH
from opendsec.edge.uids import UidRanges, parse_subids


def test_ranges_are_given_from_the_top_and_reused_last() -> None:
    uids = UidRanges(UIDS_EACH, 3)
    first, second = uids.take(), uids.take()
    assert (first, second) == (3 * UIDS_EACH, 2 * UIDS_EACH)
    uids.give_back(first)
    assert [uids.take(), uids.take()] == [UIDS_EACH, first]
    with pytest.raises(QuotaExceeded, match="all 3 uid ranges"):
        uids.take()


def test_the_default_begins_where_nobody_else_is() -> None:
    """Above systemd-nspawn's part, below systemd's foreign range and 2^31."""
    uids = UidRanges(UID_BASE, UID_RANGES)
    taken = [uids.take() for _ in range(4094)]
    assert min(taken) == 0x70000000 and max(taken) + UIDS_EACH <= 0x7FFE0000
    assert uids.total > 10_000


def test_ranges_of_the_journal_are_not_given_again() -> None:
    uids = UidRanges(UIDS_EACH, 3)
    uids.reserve(3 * UIDS_EACH)
    uids.reserve(77 * UIDS_EACH)  # from before the settings changed
    assert uids.take() == 2 * UIDS_EACH
    with pytest.raises(ValueError, match="used twice"):
        uids.reserve(77 * UIDS_EACH)
    uids.give_back(77 * UIDS_EACH)
    uids.give_back(3 * UIDS_EACH)
    assert [uids.take(), uids.take()] == [UIDS_EACH, 3 * UIDS_EACH]
    with pytest.raises(QuotaExceeded):
        uids.take()


def test_what_belongs_to_others_is_left_out() -> None:
    spans = parse_subids("root:100000:65536\nbroken\nuser:x:1\n#:1:2:3\nalice:200000:1\n")
    assert spans == [(100_000, 65_536), (200_000, 1)]
    uids = UidRanges(UIDS_EACH, 4, excluded=spans)
    assert uids.total == 1
    assert uids.take() == 4 * UIDS_EACH


@given(st.lists(st.integers(0, 9), max_size=60))
def test_no_range_is_held_twice(moves: list[int]) -> None:
    uids, held = UidRanges(0, 5), []
    for move in moves:
        if move < 6:
            try:
                start = uids.take()
            except QuotaExceeded:
                assert len(held) == 5
                continue
            assert start not in held
            held.append(start)
        elif held:
            uids.give_back(held.pop(move % len(held)))
