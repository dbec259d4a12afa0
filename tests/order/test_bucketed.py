"""Batches of one bucket each: every draw once, every row once a round, leftovers carried."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.order import MAX_REPLACEMENTS, Bucketed, Draws, WeightsSince
from tests.order.buckets import FixedWeights, Sums, Table

GOLDEN_SIZES = [20, 16, 20, 12, 20, 16]
GOLDEN_ROWS = [4, 7, 1, 9, 6, 3, 5, 8, 12, 10, 13, 11, 15, 14, 15, 16]
GOLDEN_KEYS = [
    (1, 2),
    (1, 3),
    (1, 4),
    (1, 5),
    (1, 6),
    (1, 7),
    (1, 8),
    (1, 9),
    (1, 10),
    (1, 11),
    (1, 12),
    (1, 13),
    (1, 15),
    (1, 16),
    (2, 14),
    (2, 15),
]
BUCKETS = st.lists(st.integers(1, 60), min_size=1, max_size=6).map(tuple)


def opened(sizes: tuple[int, ...], batch_size: int, seed: int | None = 3) -> Bucketed:
    return Bucketed(rows=Table(sizes), batch_size=batch_size, seed=seed)


def epoch_of(order: Bucketed, epoch: int) -> Draws:
    return order.rows_at(epoch, np.arange(order.num_positions(epoch)))


def bucket_of(sizes: tuple[int, ...], row: int) -> int:
    return int(np.searchsorted(np.cumsum(sizes), row, side="right"))


def test_the_numbers_of_steps_are_those_of_the_reference() -> None:
    tiny = opened((5,) * 40, 16)
    assert [tiny.num_positions(epoch) // 16 for epoch in range(5)] == [12, 13, 13, 11, 14]


def test_golden_rows_and_keys_never_change() -> None:
    """Computed by the prototype of the reference (`Buckets.batch`, `Buckets.member`)."""
    order = opened((10, 4, 3), 4, seed=3)
    assert [order.num_positions(epoch) for epoch in range(6)] == GOLDEN_SIZES
    draws = epoch_of(order, 1)
    assert draws.row.tolist() == GOLDEN_ROWS
    assert list(zip(draws.epoch.tolist(), draws.position.tolist(), strict=True)) == GOLDEN_KEYS


@given(BUCKETS, st.integers(1, 16), st.integers(0, 5))
def test_every_draw_comes_once_and_every_row_once_a_round(sizes: tuple[int, ...], batch_size: int, seed: int) -> None:
    if max(sizes) < batch_size:
        return
    order, keys, rows = opened(sizes, batch_size, seed), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    ends = np.cumsum(sizes)
    for epoch in range(5):
        draws = epoch_of(order, epoch)
        keys.update(zip(draws.epoch.tolist(), draws.position.tolist(), strict=True))
        rows.update(zip(draws.epoch.tolist(), draws.row.tolist(), strict=True))
        buckets = np.searchsorted(ends, draws.row, side="right").reshape(-1, batch_size)  # [steps, G]
        assert (buckets == buckets[:, :1]).all(), "a batch is of one bucket"
    assert set(keys.values()) <= {1}
    assert set(rows.values()) <= {1}, "a row comes once in a round"
    for bucket, size in enumerate(sizes):
        start = int(ends[bucket]) - size
        drawn = sorted(number * size + place - start for number, place in keys if start <= place < start + size)
        assert drawn == list(range(len(drawn))), "no draw is left out: what fills no batch opens the next one"
        assert 5 * size - batch_size < len(drawn) < 5 * size + batch_size, "each bucket comes as often as the others"


@given(BUCKETS, st.integers(1, 16), st.integers(0, 40))
def test_an_epoch_has_about_as_many_positions_as_rows(sizes: tuple[int, ...], batch_size: int, epoch: int) -> None:
    if max(sizes) < batch_size:
        return
    num_positions = opened(sizes, batch_size).num_positions(epoch)
    assert num_positions % batch_size == 0
    assert abs(num_positions - sum(sizes)) < len(sizes) * batch_size


def test_rows_of_small_buckets_come_as_often_as_those_of_large_ones() -> None:
    order, seen = opened((400, 5, 3), 16), Counter[int]()
    for epoch in range(64):
        seen.update(epoch_of(order, epoch).row.tolist())
    assert {seen[row] for row in range(405, 408)} <= set(range(59, 70))
    assert {seen[row] for row in range(400)} <= {63, 64, 65}
    assert {seen[row] for row in range(400, 405)} <= set(range(60, 69))


def test_what_seeds_a_sample_does_not_depend_on_the_batch_size() -> None:
    """Draw d of a bucket is the same row with the same key, whatever G: the first round of each is whole in both."""
    keys = []
    for batch_size in (4, 8):
        order, found = opened((40, 24), batch_size), dict[tuple[int, int], int]()
        for epoch in range(3):
            draws = epoch_of(order, epoch)
            found.update(zip(zip(draws.epoch.tolist(), draws.position.tolist(), strict=True), draws.row.tolist(), strict=True))
        keys.append({key: row for key, row in found.items() if key[0] == 0})
    assert keys[0] == keys[1]
    assert len(keys[0]) == 64


def test_without_a_seed_batches_come_bucket_by_bucket_and_rows_as_written() -> None:
    order = opened((8, 8), 4, seed=None)
    assert epoch_of(order, 0).row.tolist() == [*range(8), *range(8, 16)]


def test_an_epoch_whose_draws_64_bits_do_not_count_is_refused() -> None:
    """Its numbers wrapped: rows came twice in a round."""
    order = opened((1 << 40, 5), 16)
    assert order.num_positions((1 << 23) - 3) > 0
    with pytest.raises(ConfigError, match=r"epoch=8388607 of batches by bucket is out of range: .* an epoch below 8388606"):
        order.num_positions((1 << 23) - 1)


def test_epochs_differ() -> None:
    order = opened((50, 30), 8)
    for one, two in pairwise([epoch_of(order, epoch).row.tolist()[:16] for epoch in range(4)]):
        assert one != two


def test_replacements_are_of_the_same_bucket() -> None:
    sizes = (30, 9, 12)
    order = opened(sizes, 3)
    for position in range(0, order.num_positions(2), 5):
        failed = int(order.rows_at(2, np.array([position])).row[0])
        others = list(order.replacements(2, position))
        assert others == list(order.replacements(2, position))
        assert len(set(others)) == MAX_REPLACEMENTS
        assert failed not in others
        assert {bucket_of(sizes, row) for row in others} == {bucket_of(sizes, failed)}


def test_an_epoch_without_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=16 leaves epochs without a batch.*give 9 or fewer"):
        opened((9, 5), 16)
    opened((5,) * 40, 16)  # each epoch has some


def test_a_position_beyond_the_epoch_is_refused_although_another_epoch_has_it() -> None:
    order = opened((5,) * 40, 16)
    assert order.num_positions(4) > order.num_positions(3)
    with pytest.raises(IndexError):
        order.rows_at(3, np.array([order.num_positions(3)]))


def counted(order: Bucketed, epochs: range) -> Counter[int]:
    seen: Counter[int] = Counter()
    for epoch in epochs:
        seen.update(epoch_of(order, epoch).row.tolist())
    return seen


def test_rows_come_as_often_as_they_weigh_in_batches_of_their_bucket() -> None:
    weights = [1] * 20 + [3] * 20 + [0] * 5 + [2] * 15
    order = Bucketed(
        rows=Table((45, 15)), batch_size=4, seed=3, weights=FixedWeights((WeightsSince(0, Sums(weights)),))
    )  # fmt: skip
    seen, unit = counted(order, range(100)), 100 * 60 / sum(weights)
    assert not set(seen) & set(range(40, 45)), "a row of weight 0 never comes"
    for row, weight in enumerate(weights):
        assert abs(seen[row] - unit * weight) < 0.05 * unit * weight + 3, f"row {row} of weight {weight}"
    draws = epoch_of(order, 7)
    assert {bucket_of((45, 15), row) for row in draws.row.tolist()} == {0, 1}
    assert not set(order.replacements(7, 3)) & {*range(40, 45), int(draws.row[3])}


def test_an_epoch_of_another_size_has_the_share_of_each_bucket() -> None:
    order = Bucketed(rows=Table((300, 90, 7)), batch_size=4, seed=3, epoch_size=100)
    sizes = [order.num_samples(epoch) for epoch in range(40)]
    assert abs(sum(sizes) - 4000) < 3 * 4
    seen = counted(order, range(40))
    for start, stop in ((0, 300), (300, 390), (390, 397)):
        counts = [seen[row] for row in range(start, stop)]
        assert max(counts) - min(counts) <= 1, "each row once a round"
        assert abs(sum(counts) / (stop - start) - 4000 / 397) < 4 / (stop - start) + 0.1


def test_a_change_of_weights_holds_from_its_epoch_on_with_generators_of_its_own() -> None:
    sums = Sums([0] * 30 + [1] * 10)
    table = Table((30, 10))
    before = Bucketed(rows=table, batch_size=4, seed=3)
    weights = FixedWeights((WeightsSince(0, None), WeightsSince(3, sums), WeightsSince(5, None)))
    changed = Bucketed(rows=table, batch_size=4, seed=3, weights=weights)
    keys: Counter[tuple[int, int]] = Counter()
    for epoch in range(8):
        draws = epoch_of(changed, epoch)
        keys.update(zip(draws.epoch.tolist(), draws.position.tolist(), strict=True))
        if epoch < 3:
            assert draws.row.tolist() == epoch_of(before, epoch).row.tolist()
        assert (set(draws.row.tolist()) <= set(range(30, 40))) == (3 <= epoch < 5)
    assert set(keys.values()) == {1}


def test_parts_do_not_go_with_weights() -> None:
    weights = FixedWeights((WeightsSince(0, Sums([1] * 40)),))
    with pytest.raises(ConfigError, match="num_canonical_nodes=2 with weights="):
        Bucketed(rows=Table((20, 20)), batch_size=4, seed=3, num_parts=2, weights=weights)


@given(BUCKETS, st.lists(st.integers(1, 12), min_size=6, max_size=6), st.integers(0, 5))
@settings(max_examples=25)
def test_batches_of_several_sizes_take_every_draw_once(sizes: tuple[int, ...], batches: list[int], seed: int) -> None:
    own = tuple(batches[: len(sizes)])
    if not any(size >= batch for size, batch in zip(sizes, own, strict=True)):
        return
    order, keys = Bucketed(rows=Table(sizes), batch_size=own, seed=seed), Counter[tuple[int, int]]()
    for epoch in range(4):
        steps = np.arange(order.num_positions(epoch) // order.step_size)  # [steps]
        widths, buckets = order.sizes_at(epoch, steps), order.buckets_at(epoch, steps)
        assert widths.tolist() == [own[bucket] for bucket in buckets.tolist()]
        assert order.num_samples(epoch) == widths.sum()
        places = [step * order.step_size + np.arange(width) for step, width in zip(steps, widths, strict=True)]
        draws = order.rows_at(epoch, np.concatenate(places))
        assert [bucket_of(sizes, row) for row in draws.row.tolist()] == np.repeat(buckets, widths).tolist()
        keys.update(zip(draws.epoch.tolist(), draws.position.tolist(), strict=True))
    assert set(keys.values()) == {1}
    ends = np.cumsum(sizes)
    for bucket, size in enumerate(sizes):
        start = int(ends[bucket]) - size
        drawn = sorted(number * size + place - start for number, place in keys if start <= place < start + size)
        assert drawn == list(range(len(drawn)))


def test_a_position_beyond_the_batch_of_its_step_is_refused() -> None:
    order = Bucketed(rows=Table((40, 20)), batch_size=(8, 4), seed=3)
    narrow = int(np.flatnonzero(order.sizes_at(0, np.arange(5)) == 4)[0])
    with pytest.raises(IndexError, match="beyond the batch"):
        order.rows_at(0, np.array([narrow * 8 + 4]))


@pytest.mark.parametrize("seed", [None, 3])
def test_a_step_that_is_asked_for_alone_has_the_rows_that_it_has_among_others(seed: int | None) -> None:
    order = Bucketed(rows=Table((300, 41, 7)), batch_size=(8, 4, 2), seed=seed)
    for epoch in range(3):
        steps = range(order.num_positions(epoch) // order.step_size)
        places = [np.arange(width) + step * 8 for step, width in enumerate(order.sizes_at(epoch, np.array(steps)).tolist())]
        whole = order.rows_at(epoch, np.concatenate(places))
        alone = [order.rows_at(epoch, positions) for positions in places]
        for name in ("epoch", "position", "row"):
            assert np.concatenate([getattr(one, name) for one in alone]).tolist() == getattr(whole, name).tolist()
        some = [order.rows_at(epoch, np.concatenate((places[step], places[-1]))).row.tolist() for step in steps]
        assert some == [[*one.row.tolist(), *alone[-1].row.tolist()] for one in alone], "steps that are far apart"


@pytest.mark.parametrize("num_parts", [1, 2])
def test_leftovers_that_are_dropped_are_other_rows_in_each_epoch_and_those_of_repeats_come_twice(num_parts: int) -> None:
    sizes = (50, 22, 9)
    for leftovers, num_steps in (("drop", 12 + 5 + 2), ("repeat", 13 + 6 + 3)):
        order = Bucketed(rows=Table(sizes), batch_size=4, seed=3, leftovers=leftovers, num_parts=num_parts)
        seen, missing = Counter[int](), set[frozenset[int]]()
        for epoch in range(8):
            assert order.num_positions(epoch) == num_steps * 4, "epochs are equal"
            rows = Counter(epoch_of(order, epoch).row.tolist())
            seen += rows
            missing.add(frozenset(range(81)) - set(rows))
            assert {bucket_of(sizes, row) for row in rows} == {0, 1, 2}
            assert max(rows.values()) == (1 if leftovers == "drop" else 2)
        assert set(seen) == set(range(81))
        assert (len(missing) > 4) == (leftovers == "drop"), "repeats leave none out"
        draws = np.arange(3 * num_steps * 4)
        places = order.places_of_draws(draws)
        assert places.epoch.tolist() == np.repeat([0, 1, 2], num_steps * 4).tolist()
        assert places.position.tolist() == list(range(num_steps * 4)) * 3
    with pytest.raises(
        ConfigError, match=r"leftovers='drop' leaves all rows of 1 of 3 buckets out.*: 2. Give leftovers='carry'"
    ):
        Bucketed(rows=Table(sizes), batch_size=10, seed=3, leftovers="drop")
    assert Bucketed(rows=Table((3,)), batch_size=8, seed=3, leftovers="repeat").num_positions(5) == 8
