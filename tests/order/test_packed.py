"""Packs as an order: each row once an epoch, other neighbours each epoch, long rows as asked."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.config import OnLong
from sqlstream.errors import ConfigError
from sqlstream.order import MAX_REPLACEMENTS, Continued, Draws, Order, Packed, plan_packs
from sqlstream.order.packs.pack_plan import divided
from tests.order.packs import RowsByLength

LENGTHS = [int(length) for length in np.random.RandomState(4).randint(1, 31, 200)]
GOLDEN = [[10, 5], [8, 6], [0, 9, 3], [1], [7, 2, 4]]


def opened(lengths: list[int], capacity: int = 30, seed: int | None = 3, **options: Any) -> Packed:
    return Packed(rows=RowsByLength.of(lengths), capacity=capacity, seed=seed, **options)


def epoch_of(order: Order, epoch: int) -> Draws:
    return order.rows_at(epoch, np.arange(order.num_positions(epoch)))


def packs_of(draws: Draws) -> list[tuple[int, ...]]:
    rows, starts = draws.row.tolist(), draws.starts.tolist()
    return [tuple(rows[start:stop]) for start, stop in pairwise(starts)]


def sizes_of(order: Packed, draws: Draws) -> list[int]:
    """The length of each draw in its pack."""
    rows: Any = order.rows
    length = rows.lengths_of(draws.row)  # [m]
    part = 0 if draws.part is None else draws.part
    return np.minimum(length - part * order.capacity, order.capacity).tolist()  # type: ignore[no-any-return]  # of numpy


def test_golden_packs_never_change() -> None:
    """Rows are numbered by length here: the lengths are 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 8."""
    assert list(map(list, packs_of(epoch_of(opened([5, 3, 7, 2, 4, 6, 1, 8, 3, 2, 8], 12), 1)))) == GOLDEN


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(0, 5))
def test_each_row_comes_once_an_epoch_in_a_pack_that_has_room_for_it(lengths: list[int], seed: int) -> None:
    order = opened(lengths, seed=seed)
    for epoch in (0, 3):
        draws = epoch_of(order, epoch)
        assert sorted(draws.row.tolist()) == list(range(len(lengths)))
        assert np.add.reduceat(np.array(sizes_of(order, draws)), draws.starts[:-1]).max() <= 30
        assert draws.position.tolist() == draws.row.tolist(), "what seeds the generators is the row's, whatever the packs"


def test_a_pack_that_is_asked_for_alone_is_that_of_the_whole_epoch() -> None:
    order = opened(LENGTHS)
    whole = packs_of(epoch_of(order, 2))
    some = np.array([17, 3, 3, 0])
    assert packs_of(order.rows_at(2, some)) == [whole[position] for position in some.tolist()]
    with pytest.raises(IndexError):
        order.rows_at(2, np.array([len(whole)]))
    assert len(order.rows_at(2, np.array([], dtype=np.int64)).row) == 0
    sent: Packed = pickle.loads(pickle.dumps(order))
    assert packs_of(epoch_of(sent, 2)) == whole
    assert sent.fingerprint == order.fingerprint


def test_rows_have_other_neighbours_in_each_epoch_and_long_rows_do_not_come_first() -> None:
    order = opened(LENGTHS)
    neighbours = []
    for epoch in (0, 1):
        packs = packs_of(epoch_of(order, epoch))
        assert sorted(map(len, packs)) == sorted(map(len, packs_of(epoch_of(order, 9)))), "the plan is that of every epoch"
        neighbours.append({pair for pack in packs for pair in pairwise(sorted(pack))})
        firsts = [max(pack) == pack[0] for pack in packs if len(pack) > 1]
        assert 0.2 < sum(firsts) / len(firsts) < 0.8
    assert len(neighbours[0] & neighbours[1]) < 0.3 * len(neighbours[0])
    assert packs_of(epoch_of(opened(LENGTHS, seed=4), 0)) != packs_of(epoch_of(order, 0))


def test_without_a_seed_packs_come_by_pattern_and_rows_as_written() -> None:
    order = opened([8, 8, 4, 4, 4], 12, seed=None)
    assert [sorted(pack) for pack in packs_of(epoch_of(order, 0))] == [[0, 3], [1, 4], [2]]
    assert packs_of(epoch_of(order, 0)) == packs_of(epoch_of(order, 1))


def test_long_rows_are_dropped_truncated_or_split() -> None:
    lengths = [3, 9, 10, 11, 25, 25, 40]
    with pytest.raises(ConfigError, match=r"4 rows are longer than a pack of 10: row 6 has 40\. Give Packs"):
        opened(lengths, 10)
    dropped = epoch_of(opened(lengths, 10, on_long=OnLong.DROP), 0)
    assert sorted(dropped.row.tolist()) == [0, 1, 2]
    truncated = epoch_of(opened(lengths, 10, on_long=OnLong.TRUNCATE), 0)
    assert sorted(truncated.row.tolist()) == [0, 1, 2, 3, 4, 5, 6]
    assert truncated.part is None
    order = opened(lengths, 10, on_long=OnLong.SPLIT)
    split = epoch_of(order, 0)
    assert split.part is not None
    parts = Counter(zip(split.row.tolist(), split.part.tolist(), strict=True))
    assert set(parts.values()) == {1}
    assert sorted(parts) == [
        *[(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0), (4, 1), (4, 2), (5, 0), (5, 1), (5, 2)],
        *[(6, 0), (6, 1), (6, 2), (6, 3)],
    ]
    assert sum(sizes_of(order, split)) == sum(lengths), "no value is lost"
    some = order.rows_at(0, np.array([2, 1]))
    whole = split.of_positions(1, 3)
    assert some.part is not None
    assert whole.part is not None
    assert sorted(some.part.tolist()) == sorted(whole.part.tolist())
    with pytest.raises(ConfigError, match="no row fits a pack of 2: the shortest has 3"):
        opened(lengths, 2, on_long=OnLong.DROP)


def test_replacements_are_of_the_same_length_or_of_shorter_ones() -> None:
    rows = RowsByLength.of(LENGTHS)
    order = opened(LENGTHS)
    for position in range(0, order.num_positions(1), 3):
        draws = order.rows_at(1, np.array([position]))
        for draw, row in enumerate(draws.row.tolist()):
            others = list(order.replacements(1, position, draw))
            assert others == list(order.replacements(1, position, draw))
            assert row not in others
            assert len(set(others)) == len(others) <= MAX_REPLACEMENTS
            lengths = rows.lengths_of(np.array([row, *others])).tolist()
            assert lengths == sorted(lengths, reverse=True), "the nearest lengths first"
            assert others or lengths[0] <= 2


def test_a_part_of_a_long_row_is_replaced_by_a_row_that_fits() -> None:
    lengths = [4, 4, 4, 9, 25, 25, 35]
    order, rows = opened(lengths, 10, on_long=OnLong.SPLIT), RowsByLength.of(lengths)
    draws = epoch_of(order, 0)
    sizes, numbers = sizes_of(order, draws), np.searchsorted(draws.starts, np.arange(len(draws.row)), side="right") - 1
    for draw, (size, position) in enumerate(zip(sizes, numbers.tolist(), strict=True)):
        others = list(order.replacements(0, position, draw - int(draws.starts[position])))
        assert others
        assert all(min(length, 10) <= size for length in rows.lengths_of(np.array(others)).tolist())


def test_what_decides_packs_is_in_the_text_that_states_compare() -> None:
    texts = {
        opened(LENGTHS, capacity, max_rows=max_rows, on_long=on_long).packing
        for capacity in (30, 40)
        for max_rows in (None, 5)
        for on_long in OnLong
    }
    assert len(texts) == 16
    assert opened(LENGTHS, max_rows=2).plans[0].most_rows == 2


# -- parts of canonical nodes, and epochs of another size -------------------------------------------------------------


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(2, 5), st.sampled_from(list(OnLong)[1:]))
def test_each_row_stays_in_its_part_which_has_as_many_packs_as_positions(
    lengths: list[int], num_parts: int, on_long: OnLong
) -> None:
    if on_long is OnLong.DROP:
        lengths = [*lengths, 3]
    order = opened(lengths, num_parts=num_parts, on_long=on_long)
    whole = opened(lengths, on_long=on_long)
    parts: list[dict[Any, int]] = []
    for epoch in (0, 3):
        draws, size = epoch_of(order, epoch), order.num_positions(epoch)
        assert [plan.num_packs for plan in order.plans] == [len(range(part, size, num_parts)) for part in range(num_parts)]
        taken = list(zip(draws.row.tolist(), [0] * len(draws.row) if draws.part is None else draws.part.tolist(), strict=True))
        plain = epoch_of(whole, epoch)
        assert sorted(draws.row.tolist()) == sorted(plain.row.tolist()), "each comes as without parts"
        assert np.add.reduceat(np.array(sizes_of(order, draws)), draws.starts[:-1]).max() <= 30
        positions = np.repeat(np.arange(size), np.diff(draws.starts))
        parts.append(dict(zip(taken, (positions % num_parts).tolist(), strict=True)))
        some = np.array([size - 1, 0])
        assert packs_of(order.rows_at(epoch, some)) == [packs_of(draws)[size - 1], packs_of(draws)[0]]
    assert parts[0] == parts[1]
    assert order.num_positions(0) <= whole.num_positions(0) + 2 * num_parts
    for position in range(min(4, order.num_positions(0))):
        own = {row for (row, part), of in parts[0].items() if of == position % num_parts and not part}
        assert set(order.replacements(0, position)) <= own, "what stands in for a failed row is on the same node"


def test_packs_are_divided_until_each_row_has_one_of_its_own() -> None:
    lengths, counts = np.array([3, 5, 9], np.int64), np.array([7, 4, 2], np.int64)
    plan = plan_packs(lengths, counts, 12)
    for num_packs in range(plan.num_packs, 14):
        more = divided(plan, num_packs)
        assert more.num_packs == num_packs
        sizes = np.diff(more.stops, prepend=0)  # [T]
        of_entry = np.repeat(sizes, np.diff(more.entry_starts)) * more.entry_rows  # [E]
        assert np.bincount(more.entry_length, of_entry).tolist() == counts.tolist()
        assert np.add.reduceat(lengths[more.entry_length] * more.entry_rows, more.entry_starts[:-1]).max() <= 12


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("size", [4, 40, 66])
def test_an_epoch_of_another_size_goes_on_where_the_one_before_has_ended(size: int, num_parts: int) -> None:
    packed = opened(LENGTHS[:40], num_parts=num_parts)
    order = Continued(order=packed, epoch_size=size, num_parts=num_parts)
    rounds: list[list[Any]] = [[] for _ in range(num_parts)]
    for epoch in range(12):
        for position, pack in enumerate(packs_of(epoch_of(packed, epoch))):
            rounds[position % num_parts].append(pack)
    found: list[list[Any]] = [[] for _ in range(num_parts)]
    for epoch in range(3):
        draws = epoch_of(order, epoch)
        for position, pack in enumerate(packs_of(draws)):
            found[position % num_parts].append(pack)
        assert order.num_positions(epoch) == size
        again = order.rows_at(epoch, np.array([size - 1]))
        assert packs_of(again) == [packs_of(draws)[-1]]
        assert again.epoch[0] == draws.epoch[-1]
    assert all(of == whole[: len(of)] for of, whole in zip(found, rounds, strict=True))
    assert list(order.replacements(0, 1)) == list(packed.replacements(0, 1))
    with pytest.raises(IndexError):
        order.rows_at(0, np.array([size]))
    with pytest.raises(ConfigError, match="epoch_size=5 is no multiple of num_canonical_nodes=2: give 4 or 6"):
        Continued(order=packed, epoch_size=5, num_parts=2)
