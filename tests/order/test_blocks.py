"""Block shuffle: each row once, blocks together, windows mixed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.order import Int64Array
from sqlstream.order.blocks import MAX_BLOCKS, BlockLayout, shuffle_blocks


def bounds_of(sizes: list[int]) -> Int64Array:
    return np.cumsum([0, *sizes])


@given(
    sizes=st.lists(st.integers(0, 40), max_size=30),
    window=st.integers(1, 8),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 99),
)
def test_an_epoch_holds_each_row_once(sizes: list[int], window: int, seed: int, epoch: int) -> None:
    rows = shuffle_blocks(bounds_of(sizes), window, seed, epoch).rows_at(np.arange(sum(sizes)))
    assert sorted(rows.tolist()) == list(range(sum(sizes)))


def test_no_block_comes_back_once_its_window_is_over() -> None:
    order = shuffle_blocks(bounds_of([10] * 50), window=4, seed=1, epoch=0)
    blocks = order.rows_at(np.arange(500)) // 10
    windows = [set(blocks[start : start + 40].tolist()) for start in range(0, 500, 40)]
    assert [len(window) for window in windows] == [4] * 12 + [2]
    assert sorted(block for window in windows for block in window) == list(range(50))


def test_rows_of_a_window_are_mixed_over_its_blocks() -> None:
    order = shuffle_blocks(bounds_of([100] * 40), window=10, seed=1, epoch=0)
    blocks = order.rows_at(np.arange(1000)) // 100
    assert len(set(blocks[:50].tolist())) == 10
    assert np.count_nonzero(blocks[1:] == blocks[:-1]) < 160  # 99 expected, 900 if blocks stayed whole


def test_epochs_differ_in_blocks_and_in_rows() -> None:
    first, second = (shuffle_blocks(bounds_of([10] * 50), 4, 1, epoch) for epoch in (0, 1))
    assert first.blocks.tolist() != second.blocks.tolist()
    assert first.rows_at(np.arange(500)).tolist() != second.rows_at(np.arange(500)).tolist()


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    window=st.integers(1, 8),
    seed=st.one_of(st.none(), st.integers(0, 99)),
    data=st.data(),
)
def test_what_is_known_of_an_order_stays_when_more_becomes_known(
    sizes: list[int], window: int, seed: int | None, data: st.DataObject
) -> None:
    bounds = bounds_of(sizes)
    kept = np.array([data.draw(st.integers(0, size)) for size in sizes])
    whole = shuffle_blocks(bounds, window, seed, 3, kept)
    rows = whole.rows_at(np.arange(whole.num_positions)).tolist()
    assert whole.is_whole
    assert sorted(rows) == [first + i for first, size in zip(bounds, kept, strict=False) for i in range(size)]
    known, order = np.full(len(sizes), -1), shuffle_blocks(bounds, window, seed, 3, np.full(len(sizes), -1))
    while not order.is_whole:
        assert order.rows_at(np.arange(order.num_positions)).tolist() == rows[: order.num_positions]
        known[order.next_blocks] = kept[order.next_blocks]
        order = shuffle_blocks(bounds, window, seed, 3, known)
    assert order.rows_at(np.arange(order.num_positions)).tolist() == rows


def test_a_window_says_its_positions_and_none_without_seed_is_as_written() -> None:
    order = shuffle_blocks(bounds_of([10] * 5), window=2, seed=None, epoch=7)
    assert order.rows_at(np.arange(50)).tolist() == list(range(50))
    assert [order.window_of(position) for position in (0, 19, 20, 49)] == [range(20), range(20), range(20, 40), range(40, 50)]


def test_the_order_never_changes_within_a_version() -> None:
    order = shuffle_blocks(bounds_of([4, 0, 3, 5]), window=2, seed=42, epoch=1)
    assert order.rows_at(np.arange(12)).tolist() == [1, 3, 2, 11, 10, 9, 7, 0, 8, 6, 5, 4]


def test_falling_bounds_and_positions_outside_are_refused() -> None:
    with pytest.raises(ConfigError, match="block 1 has bounds 5 to 3"):
        shuffle_blocks(np.array([0, 5, 3]), 1, 0, 0)
    with pytest.raises(ConfigError, match="window=0"):
        shuffle_blocks(np.array([0, 5]), 0, 0, 0)
    with pytest.raises(IndexError, match=r"5 to 5 are not within \[0, 5\)"):
        shuffle_blocks(np.array([0, 5]), 1, 0, 0).rows_at(np.array([5]))


def test_as_many_blocks_as_the_limit_says_are_taken() -> None:
    """The refusal said that 2**24 are more than 2**24."""
    assert len(BlockLayout.of_size(1, num_rows=MAX_BLOCKS, window=1).bounds) == MAX_BLOCKS + 1
    with pytest.raises(ConfigError, match="16777217 blocks"):
        BlockLayout.of_size(1, num_rows=MAX_BLOCKS + 1, window=1)
