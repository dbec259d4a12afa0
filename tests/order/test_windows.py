"""Windows of rows that are packed among themselves."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.config import OnLong
from sqlstream.errors import ConfigError
from sqlstream.order import Filtered, Shuffled, Windows, is_counted, pack_window, plan_packs
from tests.order.several import Counted


@settings(max_examples=40)
@given(st.integers(0, 90), st.integers(1, 20), st.integers(1, 5))
def test_each_row_is_in_one_window_of_its_part(num_rows: int, size: int, num_parts: int) -> None:
    rows = Shuffled(num_rows=num_rows, seed=3, num_canonical_nodes=num_parts)
    order = Windows(order=rows, size=size, num_parts=num_parts)
    windows = np.arange(order.num_positions(1))
    draws = order.rows_at(1, windows)
    assert sorted(draws.row.tolist()) == list(range(num_rows))
    assert (np.diff(draws.starts) <= size).all()
    assert (np.diff(draws.starts) >= 1).all()
    for window, (start, stop) in enumerate(pairwise(draws.starts.tolist())):
        assert set(draws.position[start:stop] % num_parts) == {window % num_parts}
        assert order.rows_at(1, windows[window : window + 1]).row.tolist() == draws.row[start:stop].tolist()
    with pytest.raises(IndexError):
        order.rows_at(1, np.array([len(windows)]))


def test_a_failed_row_is_replaced_as_its_own_order_says() -> None:
    rows = Shuffled(num_rows=50, seed=3)
    order = Windows(order=rows, size=8)
    assert list(order.replacements(2, 3, 5)) == list(rows.replacements(2, 29))
    with pytest.raises(ConfigError, match="rows of a window=0"):
        Windows(order=rows, size=0)


def test_windows_of_rows_that_a_filter_leaves_become_known_on_the_way() -> None:
    kept = np.array([4, 0, 10, 1, 9, 3])
    whole = Windows(order=Filtered(chunks=Counted(kept), window=2, seed=3), size=5)
    counted = Counted(np.full(6, -1))
    order = Windows(order=Filtered(chunks=counted, window=2, seed=3), size=5)
    assert not is_counted(order, 0)
    for window in range(whole.num_positions(0)):
        while needed := order.needs(0, window):
            counted.kept[needed[0]] = kept[needed[0]]
        assert order.rows_at(0, np.array([window])).row.tolist() == whole.rows_at(0, np.array([window])).row.tolist()
    assert is_counted(order, 0)
    assert order.num_positions(0) == whole.num_positions(0) == 6


LENGTHS = st.lists(st.integers(1, 40), max_size=40)


@settings(max_examples=50)
@given(LENGTHS, st.sampled_from(["drop", "truncate", "split"]), st.one_of(st.none(), st.integers(1, 4)), st.booleans())
def test_a_window_is_packed_as_a_plan_of_its_lengths(lengths: list[int], on_long: str, max_rows: Any, has_key: bool) -> None:
    packs = pack_window(lengths, 16, max_rows, OnLong(on_long), (3, 0, 5) if has_key else None)
    taken = Counter(part for pack in packs for part in pack)
    assert set(taken.values()) <= {1}
    values = {"drop": [n for n in lengths if n <= 16], "truncate": [min(n, 16) for n in lengths], "split": lengths}[on_long]
    size_of = {part: min(lengths[part.row] - part.part * 16, 16) for part in taken}
    assert sum(size_of.values()) == sum(values)
    assert all(sum(size_of[part] for part in pack) <= 16 for pack in packs)
    assert all(len(pack) <= (max_rows or 16) for pack in packs)
    sizes, counts = np.unique(np.array(list(size_of.values()), dtype=np.int64), return_counts=True)
    assert len(packs) == plan_packs(sizes, counts, 16, max_rows).num_packs
    assert all(pack == sorted(pack) for pack in packs), "rows of a pack come in the order of the window"
    if not has_key:
        assert packs == sorted(packs), "packs come in the order of their first rows"


def test_the_packs_of_windows_come_in_another_order_for_each_key_and_a_long_row_may_be_an_error() -> None:
    lengths = [9] * 30
    orders = {tuple(map(tuple, pack_window(lengths, 10, None, OnLong.RAISE, (1, 0, window)))) for window in range(5)}
    assert len(orders) == 5
    with pytest.raises(ConfigError, match="longer than a pack of 8"):
        pack_window(lengths, 8, None, OnLong.RAISE, None)
