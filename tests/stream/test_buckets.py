"""Batches of one bucket each in the stream: what samples say, resumption at every step into other layouts, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlstream import Buckets, Lengths, StreamingDataLoader
from sqlstream.errors import ConfigError, StateError
from tests.stream.bucket_runs import GLOBAL_BATCH, NUM_ROWS, drawn, seen, some_runs, write_lengths

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
LAYOUTS = [(1, 0), (2, 0), (4, 0), (8, 0), (2, 2), (1, 3)]
"""Ranks, and workers of each."""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_lengths(tmp_path)


@pytest.fixture
def runs(table: Path) -> Iterator[Any]:
    with some_runs(table) as make:
        yield make


def test_every_batch_is_of_one_bucket_and_samples_say_it(runs: Any) -> None:
    run = runs(2)
    for loader in run.loaders:
        assert loader.batch_size == GLOBAL_BATCH // 2, "left out, it is what the dataset says"
    steps = [run.step() for _ in range(24)]
    assert {len(step) for step in steps} == {GLOBAL_BATCH}
    assert all(len({bucket for _, _, bucket, _ in step}) == 1 for step in steps)
    assert {bucket for step in steps for _, _, bucket, _ in step} == {10, 20, 30}
    by_row = {(number, row) for step in steps for number, row, _, _ in step}
    assert len(by_row) == 24 * GLOBAL_BATCH, "no row comes twice in a round"


def test_epochs_have_the_steps_that_the_loader_says(runs: Any) -> None:
    (loader,) = runs().loaders
    lengths = []
    for _ in range(6):
        lengths.append(len(loader))
        assert len(list(loader)) == lengths[-1]
    assert len(set(lengths)) > 1, "leftovers make some epochs longer"
    assert sum(lengths) * GLOBAL_BATCH >= 6 * NUM_ROWS - 3 * GLOBAL_BATCH


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=str)
def test_global_batches_are_the_same_on_every_layout(layout: tuple[int, int], runs: Any) -> None:
    one, other = runs(), runs(*layout)
    for _ in range(13):
        assert other.step() == one.step()


def test_a_run_resumed_at_every_step_on_every_layout_goes_on_as_if_it_had_not_stopped(runs: Any) -> None:
    """16 steps are three epochs of different lengths; the state of each goes into every layout without workers."""
    whole = runs(2)
    states, steps = [whole.state()], []
    for _ in range(16):
        steps.append(whole.step())
        states.append(whole.state())
    others = {num_ranks: runs(num_ranks) for num_ranks in (1, 2, 4, 8)}
    for number, state in enumerate(states[:14]):
        assert len(json.dumps(state)) < 2000
        for run in others.values():
            run.load(state)
            assert [run.step(), run.step()] == steps[number : number + 2], f"after {number} steps on {len(run.loaders)} ranks"
    with_workers = runs(2, 2)
    for number in (1, 7, 12):
        with_workers.load(states[number])
        assert [with_workers.step() for _ in range(3)] == steps[number : number + 3]


def test_an_endless_iteration_goes_on_over_epochs_of_different_lengths(runs: Any) -> None:
    one, endless = runs(), runs(1, 2, infinite_iteration=True)
    assert [endless.step() for _ in range(17)] == [one.step() for _ in range(17)]


def test_the_dataset_alone_gives_the_samples_of_a_loader(runs: Any) -> None:
    run = runs(2)
    (first,) = {tuple(seen([sample for sample, _ in zip(dataset, range(4), strict=False)])) for dataset in run.datasets[:1]}
    assert set(first) <= set(runs(2).step())


def test_a_row_that_is_asked_for_says_its_bucket(runs: Any) -> None:
    (dataset,) = runs().datasets
    assert len(dataset) == NUM_ROWS
    assert [dataset[row]["__bucket__"] for row in (0, 5, -1)] == [dataset[row]["length"] for row in (0, 5, -1)]


def test_a_failed_sample_is_replaced_within_its_bucket(runs: Any) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["row"] % 9 == 4:
            raise ValueError("broken")
        return drawn(sample)

    run = runs(transforms=[fail], max_failure_ratio=1.0)
    steps = [run.step() for _ in range(12)]
    assert all(len({bucket for _, _, bucket, _ in step}) == 1 for step in steps)
    assert not any(row % 9 == 4 for step in steps for _, row, _, _ in step)


def test_a_state_of_other_buckets_is_refused(runs: Any) -> None:
    run = runs()
    run.step()
    state = run.state()
    others = [
        Buckets("length", Lengths((10, 30)), global_batch_size=GLOBAL_BATCH),
        Buckets("length", Lengths((10, 20, 30)), global_batch_size=4),
        None,
    ]
    for batches in others:
        other = runs(batches=batches)
        with pytest.raises(StateError, match="blocks="):
            other.loaders[0].load_state_dict(state)
    other = runs(batches=others[1])
    other.loaders[0].load_state_dict({**state, "epoch": 1}, strict=False)
    assert len(other.step()) == 4


def test_some_of_the_rows_have_buckets_of_their_own(runs: Any) -> None:
    (dataset,) = runs().datasets
    with dataset.select("length > 10") as part:
        loader = StreamingDataLoader(part, collate_fn=seen)
        assert {sample[2] for batch in loader for sample in batch} <= {20, 30}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"epoch_size": 0}, "epoch_size=0"),
    ({"epoch_size": 2**48 + 1}, "epoch_size=281474976710657 is out of range: give at most"),
    ({"weights": "length - 100"}, "weights are finite and 0 or more"),
    ({"shuffle_block_size": 4}, "shuffle_block_size=4 cannot be had"),
    ({"unaligned_worker_index": True}, "unaligned_worker_index=True cannot be had"),
    ({"refresh": "epoch"}, "leave one of them out"),
    ({"lazy_index_chunk_size": 4}, "lazy index"),
    ({"batches": "length"}, "batches='length' says no batches"),
    ({"batches": Buckets("length", global_batch_size=64)}, "leaves epochs without a batch"),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_what_does_not_go_with_batches_is_refused(options: dict[str, Any], problem: str, runs: Any) -> None:
    with pytest.raises(ConfigError, match=problem):
        runs(**options)


def test_a_contradicting_batch_size_is_refused_with_the_one_that_fits(runs: Any) -> None:
    (dataset,) = runs().datasets
    with pytest.raises(ConfigError, match=r"batch_size=3 on 1 ranks contradicts global_batch_size=8.*give batch_size=8"):
        StreamingDataLoader(dataset, batch_size=3)
    with pytest.raises(ConfigError, match="batch_size=1 on 1 ranks contradicts"):
        StreamingDataLoader(dataset, batch_size=1)
    assert len(next(iter(StreamingDataLoader(dataset, batch_size=8, collate_fn=seen)))) == 8
    with pytest.raises(ConfigError, match="global_batch_size=8 of batches= is not divided by 3 ranks: use 2 ranks"):
        runs(3)
