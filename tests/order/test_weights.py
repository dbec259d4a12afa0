"""Weights: counts of an epoch, of many epochs, and random access."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array
from sqlstream.order.plan import Plan
from sqlstream.order.weights import WeightedRows, scale_of, scale_weights


def table(weights: list[float]) -> Int64Array:
    """Return the cumulative table of a few weights."""
    array = np.array(weights, np.float64)
    return np.cumsum(scale_weights(array, scale_of(float(array.sum()))))


def counts(rows: WeightedRows, seed: int, epoch: int) -> Int64Array:
    """Return how often each row comes in an epoch."""
    return np.bincount(rows.rows_at(seed, epoch, np.arange(rows.num_positions)), minlength=rows.num_rows)


WEIGHTS = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60).filter(lambda w: sum(w) > 1e-3)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS, st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_every_count_is_within_one_of_its_expectation(weights: list[float], size: int, seed: int, epoch: int) -> None:
    rows = WeightedRows(num_rows=len(weights), num_positions=size, cumulative=table(weights))
    expected = size * np.array(weights) / sum(weights)
    found = counts(rows, seed, epoch)
    assert found.sum() == size
    assert np.abs(found - expected).max() <= 1 + 1e-6
    assert not found[np.array(weights) == 0].any()


@settings(max_examples=40, deadline=None)
@given(WEIGHTS, st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 10_000))
def test_the_slots_up_to_a_row_are_those_of_it_and_of_all_before(
    weights: list[float], size: int, seed: int, epoch: int
) -> None:
    sums = table(weights)
    rows = WeightedRows(num_rows=len(weights), num_positions=size, cumulative=sums)
    assert rows.slots_before(seed, epoch, sums).tolist() == np.cumsum(counts(rows, seed, epoch)).tolist()


def test_over_a_hundred_epochs_every_count_is_within_one_and_their_sum_near_its_expectation() -> None:
    rng = np.random.default_rng(3)
    weights = np.where(rng.random(2000) < 0.2, 0, rng.exponential(1, 2000))
    rows = WeightedRows(num_rows=2000, num_positions=1500, cumulative=table(weights.tolist()))
    expected = 1500 * weights / weights.sum()
    by_epoch = np.stack([counts(rows, 5, epoch) for epoch in range(100)])
    assert np.abs(by_epoch - expected).max() <= 1 + 1e-9
    assert np.abs(by_epoch.sum(0) - 100 * expected).max() < 4  # independent draws: up to 3.5 * sqrt(100 * expected) = 80


@pytest.mark.parametrize("value", [1.0, 0.1, 1e-9, 1e300, 1 / 3])
def test_equal_weights_give_each_row_exactly_once(value: float) -> None:
    rows = WeightedRows(num_rows=999, num_positions=999, cumulative=table([value] * 999))
    for epoch in range(5):
        assert (rows.rows_at(1, epoch, np.arange(999)) == np.arange(999)).all()


def test_whole_weights_give_exactly_their_share() -> None:
    weights = [1.0, 4.0, 0.0, 1.0, 2.5, 1.5]
    rows = WeightedRows(num_rows=6, num_positions=20, cumulative=table(weights))
    for epoch in range(50):
        assert counts(rows, 9, epoch).tolist() == [2, 8, 0, 2, 5, 3]


def test_a_length_without_weights_repeats_and_leaves_out_evenly() -> None:
    longer = WeightedRows(num_rows=10, num_positions=25)
    assert set(counts(longer, 0, 0).tolist()) == {2, 3}
    shorter = WeightedRows(num_rows=10, num_positions=5)
    over_epochs = np.stack([counts(shorter, 0, epoch) for epoch in range(20)]).sum(0)
    assert np.abs(over_epochs - 10).max() <= 1


def test_a_slot_is_the_same_alone_in_any_company_and_in_another_process() -> None:
    cumulative = table([float(at % 7) for at in range(5000)])
    rows = WeightedRows(num_rows=5000, num_positions=8000, cumulative=cumulative)
    whole = rows.rows_at(11, 3, np.arange(8000))
    assert [int(rows.rows_at(11, 3, np.array([slot]))[0]) for slot in (0, 17, 7999)] == whole[[0, 17, 7999]].tolist()
    program = (
        "import numpy as np; from sqlstream.order.weights import *\n"
        "w = np.array([float(at % 7) for at in range(5000)]); c = np.cumsum(scale_weights(w, scale_of(float(w.sum()))))\n"
        "print(WeightedRows(num_rows=5000, num_positions=8000, cumulative=c).rows_at(11, 3, np.arange(8000)).sum())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) == whole.sum()


GOLDEN = [[0, 1, 1, 1, 3, 4, 4, 4, 4], [0, 1, 1, 1, 4, 4, 4, 4, 5]]


def test_golden_rows_never_change() -> None:
    rows = WeightedRows(num_rows=6, num_positions=9, cumulative=table([1, 2, 0, 0.5, 3, 0.25]))
    assert [rows.rows_at(42, epoch, np.arange(9)).tolist() for epoch in range(2)] == GOLDEN


def test_epochs_and_seeds_differ() -> None:
    rows = WeightedRows(num_rows=1000, num_positions=300, cumulative=table([1.0] * 1000))
    seen = {tuple(rows.rows_at(seed, epoch, np.arange(300)).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(seen) > 5  # a start anywhere in a step of 3 1/3 rows: some epochs may coincide


def test_huge_epochs_stay_exact() -> None:
    size = (1 << 48) - 59
    rows = WeightedRows(num_rows=3, num_positions=size, cumulative=table([1, 1, 2]))
    slots = np.array([0, size // 4 - 5, size // 4 + 5, size // 2 + 5, size - 1])
    assert rows.rows_at(1, 0, slots).tolist() == [0, 0, 1, 2, 2]
    fast = WeightedRows(num_rows=3, num_positions=(1 << 31), cumulative=table([1, 1, 2]))
    assert fast.rows_at(1, 0, np.array([(1 << 31) - 1])).tolist() == [2]


def test_a_plan_shuffles_slots_and_resumes_anywhere() -> None:
    rows = WeightedRows(num_rows=50, num_positions=120, cumulative=table([1.0, 5.0] * 25))
    plan = Plan(num_samples=rows.num_positions, seed=4, batch_size=8)
    whole = rows.rows_at(plan.seed, 2, plan.rows(2, 0, 120))
    assert np.bincount(whole, minlength=50).tolist() == np.bincount(np.sort(whole), minlength=50).tolist()
    for start in range(0, 120, 8):
        assert (rows.rows_at(plan.seed, 2, plan.rows(2, start, 120)) == whole[start:]).all()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch_size=0"):
        WeightedRows(num_rows=3, num_positions=0)
    with pytest.raises(ConfigError, match="2 weights for 3 rows"):
        WeightedRows(num_rows=3, num_positions=3, cumulative=np.array([1, 2]))
    with pytest.raises(IndexError, match=r"\[0, 3\)"):
        WeightedRows(num_rows=3, num_positions=3).rows_at(0, 0, np.array([3]))
