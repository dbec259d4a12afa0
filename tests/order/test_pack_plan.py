"""Plans of packs: as few packs as best fit decreasing makes row by row, none over its capacity, every row in one."""

from __future__ import annotations

import bisect
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.order import PackPlan, plan_packs


def planned(lengths: list[int], capacity: int, max_rows: int | None = None) -> PackPlan:
    distinct, counts = np.unique(np.array(lengths, np.int64), return_counts=True)  # [L], [L]
    return plan_packs(distinct, counts, capacity, max_rows)


def packs_of(plan: PackPlan) -> list[Counter[int]]:
    """The lengths in each pack, with how many rows of each."""
    packs = []
    for pattern, num_packs in enumerate(np.diff(plan.stops, prepend=0).tolist()):
        entries = slice(int(plan.entry_starts[pattern]), int(plan.entry_starts[pattern + 1]))
        lengths = plan.lengths[plan.entry_length[entries]].tolist()
        one = Counter[int](dict(zip(lengths, plan.entry_rows[entries].tolist(), strict=True)))
        packs += [one] * num_packs
    return packs


def best_fit_row_by_row(lengths: list[int], capacity: int) -> int:
    """How many packs best fit decreasing makes of single rows."""
    rooms: list[int] = []
    num_packs = 0
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(rooms, length)
        num_packs += at == len(rooms)
        bisect.insort(rooms, (capacity if at == len(rooms) else rooms.pop(at)) - length)
    return num_packs


@given(st.lists(st.integers(1, 40), max_size=200), st.integers(40, 90))
def test_a_plan_has_the_packs_of_best_fit_decreasing_row_by_row(lengths: list[int], capacity: int) -> None:
    plan = planned(lengths, capacity)
    assert plan.num_packs == best_fit_row_by_row(lengths, capacity)
    packs = packs_of(plan)
    assert sum(packs, Counter()) == Counter(lengths), "every row is in one pack"
    assert all(sum(pack.elements()) <= capacity for pack in packs)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=80), st.integers(1, 5))
def test_no_pack_has_more_rows_than_it_may(lengths: list[int], max_rows: int) -> None:
    plan = planned(lengths, 20, max_rows)
    packs = packs_of(plan)
    assert sum(packs, Counter()) == Counter(lengths)
    assert plan.most_rows == max(pack.total() for pack in packs) <= max_rows
    assert all(sum(pack.elements()) <= 20 for pack in packs)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_the_draws_of_a_length_are_numbered_through_all_packs(lengths: list[int]) -> None:
    plan = planned(lengths, 30)
    drawn: dict[int, list[int]] = {number: [] for number in range(len(plan.lengths))}
    for pattern, num_packs in enumerate(np.diff(plan.stops, prepend=0).tolist()):
        for entry in range(int(plan.entry_starts[pattern]), int(plan.entry_starts[pattern + 1])):
            size = int(plan.entry_rows[entry]) * num_packs
            drawn[int(plan.entry_length[entry])] += range(int(plan.entry_base[entry]), int(plan.entry_base[entry]) + size)
    for number, draws in drawn.items():
        assert sorted(draws) == list(range(int(plan.counts[number])))


def test_the_plans_of_the_reference_come_out() -> None:
    """The numbers of its prototype, and of TRL's code for the first one."""
    golden = np.clip(np.exp(np.random.RandomState(0).randn(1000) * 0.8 + 5.5).astype(int), 1, 2048)
    plan = planned(golden.tolist(), 2048)
    assert (plan.num_packs, len(plan.stops), plan.most_rows) == (158, 157, 31)
    many = np.clip(np.exp(np.random.RandomState(2).randn(1_000_000) * 1.2 + 6.0).astype(int), 1, 4096)
    plan = planned(many.tolist(), 4096)
    assert (plan.num_packs, len(plan.stops), plan.most_rows) == (181_638, 5500, 404)
    assert plan.fill > 0.99998
    plan = planned([5, 3, 7, 2, 4, 6, 1, 8, 3, 2], 8)
    assert sorted(sorted(pack.elements(), reverse=True) for pack in packs_of(plan)) == [
        [2],
        [4, 3],
        [5, 3],
        [6, 2],
        [7, 1],
        [8],
    ]


def test_rows_that_no_pack_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths from 3 to 9 are not within 1 to 8"):
        planned([3, 9], 8)
    with pytest.raises(ValueError, match="lengths from 0"):
        planned([0, 3], 8)
    assert planned([], 8).num_packs == 0
