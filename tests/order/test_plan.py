"""The order of epochs: pure, different each epoch, in constant memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.order import MAX_REPLACEMENTS, Plan
from sqlstream.order.blocks import BlockLayout
from sqlstream.world import World


def plan_of(num_samples: int, seed: int | None = 7, num_canonical_nodes: int = 1) -> Plan:
    return Plan(num_samples=num_samples, seed=seed, batch_size=4, num_canonical_nodes=num_canonical_nodes)


@given(
    num_samples=st.integers(0, 500), seed=st.integers(0, (1 << 64) - 1), epoch=st.integers(0, 10**6), parts=st.integers(1, 9)
)
def test_an_epoch_holds_each_row_once(num_samples: int, seed: int, epoch: int, parts: int) -> None:
    rows = plan_of(num_samples, seed, parts).rows(epoch, 0, num_samples)
    assert sorted(rows.tolist()) == list(range(num_samples))


@given(
    num_samples=st.integers(0, 300),
    seed=st.none() | st.integers(0, (1 << 64) - 1),
    epoch=st.integers(0, 1000),
    parts=st.integers(1, 5),
    cuts=st.none() | st.lists(st.integers(0, 300), max_size=20),
    window=st.integers(1, 4),
)
def test_positions_of_rows_are_the_inverse_of_rows_at_positions(
    num_samples: int, seed: int | None, epoch: int, parts: int, cuts: list[int] | None, window: int
) -> None:
    blocks = None
    if cuts is not None:  # blocks of any size, empty ones among them
        bounds = np.array([0, *sorted(min(cut, num_samples) for cut in cuts), num_samples])
        blocks = BlockLayout(bounds=bounds, window=window)
    plan = Plan(num_samples=num_samples, seed=seed, batch_size=4, num_canonical_nodes=parts, blocks=blocks)
    rows = plan.rows(epoch, 0, num_samples)
    positions = plan.order.positions_of(epoch, rows)
    assert positions is not None
    assert positions.tolist() == list(range(num_samples))


@pytest.mark.parametrize(
    ("parts", "golden"),
    [
        (1, [361833, 810107, 594762, 784021, 223005, 588363, 436828, 146956]),
        (4, [874345, 796098, 207764, 326961, 842617, 498830, 520059, 793999]),
    ],
)
def test_the_first_rows_of_a_plan_never_change_within_a_version(parts: int, golden: list[int]) -> None:
    assert plan_of(1_000_000, seed=42, num_canonical_nodes=parts).rows(3, 0, 8).tolist() == golden


@pytest.mark.parametrize("parts", [1, 4])
def test_any_slice_of_an_epoch_equals_that_slice_of_the_whole(parts: int) -> None:
    plan = plan_of(1003, num_canonical_nodes=parts)
    whole = plan.rows(2, 0, 1003)
    for start, stop in [(0, 0), (0, 1), (5, 69), (1002, 1003), (500, 1003)]:
        assert np.array_equal(plan.rows(2, start, stop), whole[start:stop])
    assert np.array_equal(plan.order.rows_at(2, np.array([7, 3, 7])).row, whole[[7, 3, 7]])


def test_without_a_seed_every_epoch_is_as_written() -> None:
    for parts in (1, 4):
        plan = plan_of(20, seed=None, num_canonical_nodes=parts)
        assert plan.rows(0, 3, 9).tolist() == plan.rows(5, 3, 9).tolist() == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("parts", [1, 4])
def test_epochs_and_seeds_give_different_orders(parts: int) -> None:
    drawn = [plan_of(1000, seed, parts).rows(epoch, 0, 1000) for seed in (0, 1, 2) for epoch in (0, 1, 2)]
    for i, first in enumerate(drawn):
        for second in drawn[:i]:
            assert np.count_nonzero(first == second) < 12  # 1 expected, as for orders drawn by chance


def test_rows_of_different_parts_do_not_meet_again_in_the_next_epoch() -> None:
    plan = plan_of(4000, num_canonical_nodes=4)
    together = [{frozenset(plan.rows(epoch, p, p + 4).tolist()) for p in range(0, 4000, 4)} for epoch in (0, 1)]
    assert not together[0] & together[1]


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_epoch_is_refused(position: int) -> None:
    with pytest.raises(IndexError, match=rf"{position} to {position} are not within \[0, 10\)"):
        plan_of(10).rows(0, position, position + 1)


def test_a_billion_rows_take_no_memory() -> None:
    plan = plan_of(10**9)
    tracemalloc.start()
    try:
        rows = plan.rows(4, 500_000_000, 500_000_064)
        first = next(plan.partition(World(rank=3, world_size=8, worker=1, num_workers=2), consumed=500_000_000).blocks())
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(rows.tolist())) == 64
    assert first[:5].tolist() == [500_000_044, 500_000_045, 500_000_046, 500_000_047, 500_000_108]
    assert peak_bytes < 100_000


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("seed", [None, 7])
def test_replacements_are_other_rows_of_the_same_part_and_always_the_same(seed: int | None, parts: int) -> None:
    plan = plan_of(43, seed, parts)
    rows = plan.rows(2, 0, 43)
    for position in range(43):
        drawn = list(plan.replacements(2, position))
        assert drawn == list(plan.replacements(2, position))
        assert len(set(drawn)) == MAX_REPLACEMENTS
        assert rows[position] not in drawn
        assert set(drawn) <= set(rows[position % parts :: parts].tolist())


def test_replacements_differ_between_positions_and_epochs() -> None:
    plan = plan_of(1000)
    drawn = [tuple(plan.replacements(epoch, position)) for epoch in range(5) for position in range(50)]
    assert len(set(drawn)) == len(drawn)


def test_replacements_spread_over_all_other_rows() -> None:
    plan = plan_of(6, seed=None)
    first = [next(plan.replacements(epoch, 2)) for epoch in range(1000)]
    assert set(first) == {0, 1, 3, 4, 5}
    assert min(np.bincount(first)[[0, 1, 3, 4, 5]]) > 150  # 200 expected


@pytest.mark.parametrize(("num_samples", "expected"), [(1, 0), (2, 1), (4, 3), (6, 5), (7, 5)])
def test_replacements_end_where_there_are_no_other_rows(num_samples: int, expected: int) -> None:
    assert len(list(plan_of(num_samples).replacements(0, 0))) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": -1}, "num_samples=-1"),
        ({"num_samples": (1 << 48) + 1}, "num_samples=281474976710657"),
        ({"seed": -1}, "shuffle_seed=-1"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_canonical_nodes": 0}, "num_canonical_nodes=0"),
    ],
)
def test_a_plan_out_of_range_is_refused_by_name_and_value(options: dict[str, int], message: str) -> None:
    valid: dict[str, int] = {"num_samples": 10, "seed": 1, "batch_size": 2}
    with pytest.raises(ConfigError, match=message):
        Plan(**(valid | options))  # type: ignore[arg-type]  # mypy cannot match a dict with Tail
