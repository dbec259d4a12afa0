"""Steps in which each lane has a bucket of its own: ranks, workers, resumption within and between steps, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sqlstream import (
    Buckets,
    Lengths,
    MixedDataset,
    MultiStreamDataLoader,
    StreamingDataLoader,
    StreamingDataset,
    StreamOptions,
)
from sqlstream.errors import ConfigError, StateError
from tests.stream.bucket_runs import BUDGET, LANES, drawn, seen, some_runs, write_lengths

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
SIZES = {10: 4, 20: 2, 30: 1}
"""Samples of a lane by bucket: a quarter of 160 tokens."""
OF_STREAM = {"name": "a", "ratio": 1, "batch_size": 4, "batch_gpu": 4}


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    with some_runs(write_lengths(tmp_path)) as make:
        yield make


def test_ranks_have_buckets_of_their_own_and_each_row_comes_once_a_round(runs: Any) -> None:
    run = runs(4, batches=LANES)
    steps = [run.lanes() for _ in range(24)]
    kinds = [tuple((bucket, len(lane)) for lane in step for bucket in {bucket for _, _, bucket, _ in lane}) for step in steps]
    assert {lane for step in kinds for lane in step} == set(SIZES.items())
    assert any(len(set(step)) > 1 for step in kinds), "lanes of a step differ"
    rows = [sample[:2] for step in steps for lane in step for sample in lane]
    assert len(set(rows)) == len(rows)


def test_epochs_have_the_steps_and_the_samples_that_loader_and_dataset_say(runs: Any) -> None:
    for num_ranks in (1, 2):
        run = runs(num_ranks, batches=LANES)
        for _ in range(3):
            num_batches, num_samples = {len(loader) for loader in run.loaders}, run.datasets[0].epoch_size
            batches = [list(loader) for loader in run.loaders]
            assert {len(own) for own in batches} == num_batches, "all ranks make as many steps"
            assert sum(len(batch) for own in batches for batch in own) == num_samples


@pytest.mark.parametrize("layout", [(2, 0), (4, 0), (2, 2), (1, 3)], ids=str)
def test_steps_of_lanes_are_the_same_on_every_layout(layout: tuple[int, int], runs: Any) -> None:
    one, other = runs(batches=LANES), runs(*layout, batches=LANES)
    for _ in range(12):
        assert other.step() == one.step()


def test_a_run_resumed_after_every_step_goes_on_on_any_ranks_that_divide_the_lanes(runs: Any) -> None:
    whole = runs(2, batches=LANES)
    states, steps = [whole.state()], []
    for _ in range(12):
        steps.append(whole.step())
        states.append(whole.state())
    others = [runs(num_ranks, batches=LANES) for num_ranks in (1, 2, 4)]
    for number, state in enumerate(states[:11]):
        for run in others:
            run.load(state)
            assert [run.step(), run.step()] == steps[number : number + 2], f"after {number} steps on {len(run.loaders)} ranks"


def test_a_state_within_a_step_goes_on_where_the_lanes_that_are_left_divide(runs: Any) -> None:
    whole = runs(batches=LANES)
    lanes = [lane for _ in range(3) for lane in whole.lanes()]
    run, alone, pair, four = (runs(ranks, batches=LANES) for ranks in (1, 1, 2, 4))
    taken = [run._next(0)]
    for number in range(1, 8):
        state = run.state()
        alone.load(state)
        assert alone._next(0) == lanes[number]
        if number % 2 == 0:
            pair.load(state)
            assert [pair._next(0), pair._next(1)] == lanes[number : number + 2]
        else:
            with pytest.raises(
                StateError, match=r"cannot go on on 2 ranks within a step, after [13] of its 4 lanes: use 1 rank"
            ):
                pair.load(state)
        if number % 4:
            with pytest.raises(StateError, match=r"cannot go on on 4 ranks within a step"):
                four.load(state)
        taken.append(run._next(0))
    assert taken == lanes[:8]
    four.loaders[0].load_state_dict(state, strict=False)
    assert next(iter(four.loaders[0])) == lanes[4], "at the start of the step"


def test_the_lanes_follow_the_ranks_of_the_first_start_which_the_state_carries(runs: Any) -> None:
    budget = replace(LANES, rank_multiple=None)
    two = runs(2, batches=budget)
    first = [two.lanes() for _ in range(3)]
    assert {len(step) for step in first} == {2}
    state, following = two.state(), two.lanes()
    one = runs(1, batches=budget)
    one.load(state)
    assert [one._next(0), one._next(0)] == following
    with pytest.raises(ConfigError, match=r"has 2 lanes, which 4 ranks do not divide: use 2 ranks"):
        runs(4, batches=budget).load(state)


def test_samples_of_a_batch_say_what_it_weighs_in_its_step(runs: Any) -> None:
    def weight_and_size(samples: list[dict[str, Any]]) -> tuple[float, int]:
        (weight,) = {sample["__batch_weight__"] for sample in samples}
        return weight, len(samples)

    for num_ranks, num_workers in ((4, 0), (1, 2)):
        run = runs(num_ranks, batches=LANES)
        rounds = 4 // num_ranks
        loaders = [
            StreamingDataLoader(
                dataset,
                num_workers=num_workers,
                collate_fn=weight_and_size,
                multiprocessing_context="fork" if num_workers else None,
            )
            for dataset in run.datasets
        ]
        batches = [list(loader) for loader in loaders]
        for step in range(len(batches[0]) // rounds):
            lanes = [own[step * rounds + round_] for round_ in range(rounds) for own in batches]
            total = sum(size for _, size in lanes)
            assert [weight for weight, _ in lanes] == [size * 4 / total for _, size in lanes]


def test_a_failed_sample_is_replaced_within_the_bucket_of_its_lane(runs: Any) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["row"] % 9 == 4:
            raise ValueError("broken")
        return drawn(sample)

    run = runs(2, batches=LANES, transforms=[fail], max_failure_ratio=1.0)
    for _ in range(16):
        for lane in run.lanes():
            assert {len(lane)} == {SIZES[bucket] for _, _, bucket, _ in lane}
            assert not any(row % 9 == 4 for _, row, _, _ in lane)


def test_a_plain_loader_is_given_lanes(runs: Any) -> None:
    expected, (dataset,) = runs(batches=LANES), runs(batches=LANES).datasets
    for batch in DataLoader(dataset, batch_size=None, collate_fn=seen):
        assert batch == expected._next(0)


def test_weights_that_change_hold_from_the_next_epoch_on_and_come_with_the_state(runs: Any) -> None:
    run, other = runs(2, batches=LANES), runs(1, batches=LANES)
    run.step()
    for dataset in run.datasets:
        dataset.reweight("row < 20")
    num_left = len(run.loaders[0]) // 2 - 1
    for _ in range(num_left):
        run.step()
    state, following = run.state(), [run.step() for _ in range(6)]
    other.load(state)
    assert [other.step() for _ in range(6)] == following
    assert all(row < 20 for step in following[1:] for _, row, _, _ in step), "the first step has lanes of the epoch before"


def test_what_lanes_cannot_be_had_with_is_refused(runs: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_canonical_nodes=2 cannot be had with sync='lane'"):
        runs(batches=LANES, num_canonical_nodes=2)
    table, cache, options = tmp_path / "rows.parquet", tmp_path / "cache", StreamOptions.init_group([OF_STREAM])
    with StreamingDataset(table, cache, batches=LANES) as dataset:
        mixed = MixedDataset({"a": dataset}, unit="batch", epoch_size=60)
        with pytest.raises(ConfigError, match=r"stream 'a' has batches= with sync='lane'.*give its Buckets sync='step'"):
            list(StreamingDataLoader(mixed, batch_size=4))
    with (
        StreamingDataset(table, cache, batches=LANES) as dataset,
        pytest.raises(ConfigError, match=r"stream 'a' has batches= with sync='lane'"),
    ):
        MultiStreamDataLoader([dataset], options)
    run = runs(2, batches=BUDGET)
    run.step()
    with pytest.raises(StateError, match="blocks="):
        runs(2, batches=LANES).load(run.state())
    few = Buckets("length", Lengths((30,)), global_batch_tokens=30 * 64, sync="lane", rank_multiple=64)
    with pytest.raises(
        ConfigError, match=r"sync='lane' leaves epochs without a step: a step takes 64 batches, and epoch 0 has"
    ):
        runs(batches=few)
