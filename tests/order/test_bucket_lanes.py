"""Steps of several batches: every draw once, lanes carried over the ends of epochs, the same steps on any ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import ConfigError, StateError
from sqlstream.order import Bucketed, BucketLanes, Steps, WeightsSince
from sqlstream.world import World
from tests.order.buckets import FixedWeights, Sums, Table

SIZES, BATCHES = (23, 15, 5), (4, 2, 1)
Key = tuple[int, int]


def opened(
    num_lanes: int, sizes: tuple[int, ...] = SIZES, batches: tuple[int, ...] = BATCHES, seed: int | None = 3, **options: Any
) -> BucketLanes:
    order = Bucketed(rows=Table(sizes), batch_size=batches, seed=seed, **options)
    return BucketLanes(batches=order, num_lanes=num_lanes)


def lanes_of(order: BucketLanes, epoch: int) -> list[list[Key]]:
    """The keys (round, place among all buckets) of each lane of an epoch; bucket and row follow from them."""
    lanes = np.arange(order.num_positions(epoch) // order.batches.step_size)  # [n]
    found = []
    for lane, size in zip(lanes.tolist(), order.sizes_at(epoch, lanes).tolist(), strict=True):
        draws = order.rows_at(epoch, lane * order.batches.step_size + np.arange(size))
        found.append(list(zip(draws.epoch.tolist(), draws.position.tolist(), strict=True)))
    return found


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=5).map(tuple),
    st.lists(st.integers(1, 6), min_size=5, max_size=5),
    st.integers(1, 6),
    st.integers(0, 5),
)
@settings(max_examples=40)
def test_every_draw_comes_once_and_each_epoch_has_whole_steps(
    sizes: tuple[int, ...], batches: list[int], num_lanes: int, seed: int
) -> None:
    try:
        order = opened(num_lanes, sizes, tuple(batches[: len(sizes)]), seed)
    except ConfigError:
        return  # too few rows for a step in each epoch
    keys, num_lanes_given = Counter[Key](), 0
    for epoch in range(5):
        lanes = lanes_of(order, epoch)
        assert lanes
        assert len(lanes) % num_lanes == 0
        assert order.num_samples(epoch) == sum(map(len, lanes))
        ends = np.cumsum(sizes)
        for lane in lanes:
            assert len({int(np.searchsorted(ends, place, side="right")) for _, place in lane}) == 1, "a lane is of one bucket"
            keys.update(lane)
        num_lanes_given += len(lanes)
    assert set(keys.values()) == {1}
    behind = sum(order.batches.num_batches(epoch) for epoch in range(5)) - num_lanes_given
    assert 0 <= behind < num_lanes, "what fills no step is given by the next epoch"
    given_alone = Counter(key for epoch in range(5) for key in keys_of(order.batches, epoch))
    assert set(keys) <= set(given_alone)
    assert sum(given_alone.values()) - sum(keys.values()) <= behind * max(batches)


def keys_of(order: Bucketed, epoch: int) -> list[Key]:
    steps = np.arange(order.num_batches(epoch))  # [n]
    widths = order.sizes_at(epoch, steps)  # [n]
    places = np.concatenate([step * order.step_size + np.arange(width) for step, width in zip(steps, widths, strict=True)])
    draws = order.rows_at(epoch, places)
    return list(zip(draws.epoch.tolist(), draws.position.tolist(), strict=True))


@pytest.mark.parametrize("leftovers", ["drop", "repeat"])
def test_with_other_leftovers_a_last_step_is_left_out_or_takes_lanes_twice(leftovers: str) -> None:
    order = opened(4, (50, 22, 9), (4, 4, 4), leftovers=leftovers)
    num_batches = order.batches.num_batches(0)
    assert num_batches == (19 if leftovers == "drop" else 22)
    for epoch in range(4):
        lanes = lanes_of(order, epoch)
        assert len(lanes) == (16 if leftovers == "drop" else 24)
        assert len({tuple(lane) for lane in lanes}) == min(len(lanes), num_batches)
        assert order.num_samples(epoch) == sum(map(len, lanes))


def test_lanes_that_an_epoch_leaves_over_keep_the_weights_of_then() -> None:
    weights = FixedWeights((WeightsSince(0, None), WeightsSince(2, Sums([0] * 38 + [1] * 5))))
    order, before = opened(4, weights=weights), opened(4)
    carried = before.batches.batches_before(2) % 4
    assert carried
    assert lanes_of(order, 2)[:carried] == lanes_of(before, 2)[:carried]
    keys = Counter(key for epoch in range(5) for lane in lanes_of(order, epoch) for key in lane)
    assert set(keys.values()) == {1}


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 1), (2, 1), (2, 3), (4, 2)])
def test_ranks_take_whole_lanes_and_give_the_same_steps(num_ranks: int, num_workers: int) -> None:
    order = opened(4)
    expected = lanes_of(order, 1)
    steps, got = Steps(order=order, batch_size=None, batches=order), dict[int, list[Key]]()
    for rank in range(num_ranks):
        for worker in range(num_workers):
            world = World(rank=rank, world_size=num_ranks).with_worker(worker, num_workers)
            share, place = steps.partition(1, world), 0
            while place < share.num_samples:
                stop = share.end_of_batch(place)
                positions = share.positions(place, stop)
                draws = order.rows_at(1, positions)
                got[int(positions[0]) // order.batches.step_size] = list(
                    zip(draws.epoch.tolist(), draws.position.tolist(), strict=True)
                )
                place = share.next_place(stop)
    assert [got[lane] for lane in sorted(got)] == expected


def test_the_weights_of_the_lanes_make_the_mean_of_their_means_that_of_the_step() -> None:
    order = opened(4)
    for step in range(order.num_positions(0) // order.step_size):
        lanes = step * 4 + np.arange(4)  # [4]
        sizes = order.sizes_at(0, lanes)  # [4]
        weights = [order.weight_at(0, int(lane) * order.batches.step_size) for lane in lanes]
        assert np.allclose(np.array(weights) / 4, sizes / sizes.sum())


def test_what_no_rank_can_take_is_refused() -> None:
    order = opened(4)
    steps = Steps(order=order, batch_size=None, batches=order)
    with pytest.raises(ConfigError, match=r"has 4 lanes, which 3 ranks do not divide: use 2 ranks.*rank_multiple=3"):
        steps.partition(0, World(rank=0, world_size=3))
    lane = order.batches.step_size
    steps.partition(0, World(rank=0, world_size=2), 2 * lane)
    with pytest.raises(StateError, match=r"on 4 ranks within a step, after 2 of its 4 lanes: use 1 or 2 ranks, a state of a"):
        steps.partition(0, World(rank=0, world_size=4), 2 * lane)
    with pytest.raises(
        ConfigError, match=r"sync='lane' leaves epochs without a step: a step takes 40 batches, and epoch 0 has"
    ):
        opened(40)
    with pytest.raises(ConfigError, match=r"batch_size=3 contradicts batches=, whose lanes have 1 to 4 samples by bucket"):
        Steps(order=order, batch_size=3, batches=order).batch_size_on(World())
    with pytest.raises(IndexError):
        order.rows_at(0, np.array([order.num_positions(0)]))
