# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random

from opendsec.images.lazy.readahead import AROUND, LARGEST, STREAMS, ReadAhead


def test_single_reads_here_and_there_load_nothing_more() -> None:
    ahead = ReadAhead(10_000)
    for first in range(0, 10_000, 50):
        assert not ahead.note(first, first + 1)


def test_a_sequential_reader_is_ever_further_ahead_and_names_each_chunk_once() -> None:
    ahead, count = ReadAhead(4000), 4000
    loaded: set[int] = set()
    waits = []
    for chunk in range(0, count, 2):
        for one in (chunk, chunk + 1):
            if one not in loaded:
                waits.append(one)
        found = ahead.note(chunk, chunk + 1)
        assert loaded.isdisjoint(found)
        loaded.update(found)
        touched = chunk + 2
        assert len([one for one in loaded if one >= touched]) <= max(1, touched // 2)
        assert len(found) <= LARGEST and found.stop <= count
    assert len(waits) < 20 and max(waits) < 50


def test_streams_do_not_disturb_one_another() -> None:
    ahead = ReadAhead(100_000)
    heads = [n * 5000 for n in range(STREAMS)]
    loaded = 0
    for step in range(100):
        for head in heads:
            loaded += len(ahead.note(head + step, head + step))
    assert loaded > STREAMS * 90


def test_reads_out_of_order_and_repeated_belong_to_their_stream() -> None:
    ahead = ReadAhead(1000)
    loaded: set[int] = set()
    order = list(range(300))
    random.Random(1).shuffle(order)
    for start in range(0, 300, 4):
        group = list(range(start, start + 4))
        random.Random(start).shuffle(group)
        for chunk in group:
            loaded.update(ahead.note(chunk, chunk))
            loaded.update(ahead.note(chunk, chunk))
    assert len(loaded) > 250


def test_what_lies_around_is_more_where_more_was_asked_for_and_stays_within_the_layer() -> None:
    ahead = ReadAhead(3 * AROUND + 3)
    ahead.note(20, 20)
    assert ahead.around(20) == range(AROUND, AROUND + AROUND // 2)
    ahead.note(30, 30)
    assert ahead.around(30) == range(AROUND, 2 * AROUND)
    ahead.note(3 * AROUND + 1, 3 * AROUND + 1)
    assert ahead.around(3 * AROUND + 1) == range(3 * AROUND, 3 * AROUND + 3)
