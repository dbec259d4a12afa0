"""Weights and sizes of epochs where rows share batches by bucket, and their changes, in the stream and in its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqlstream import Buckets, Lengths
from sqlstream.errors import ConfigError
from tests.stream.bucket_runs import NUM_ROWS, some_runs, write_lengths

MAP = Lengths((10, 20, 30))
BUDGET = Buckets("length", MAP, global_batch_tokens=80, rank_multiple=4)
HEAVY = "CASE WHEN row % 2 THEN 3 ELSE 1 END"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    with some_runs(write_lengths(tmp_path)) as make:
        yield make


def rows_of(loader: Any, num_epochs: int = 1) -> Counter[int]:
    return Counter(row for _ in range(num_epochs) for batch in loader for _, row, _, _ in batch)


def test_rows_come_as_often_as_they_weigh_in_batches_of_their_bucket(runs: Any) -> None:
    run = runs(batches=BUDGET, weights=HEAVY)
    seen = rows_of(run.loaders[0], 20)
    odd, even = (sum(seen[row] for row in range(first, NUM_ROWS, 2)) for first in (1, 0))
    assert abs(odd / even - 3 * 21 / 22) < 0.1
    steps = [run.step() for _ in range(10)]
    assert all(len({bucket for _, _, bucket, _ in step}) == 1 for step in steps)


def test_epoch_size_is_that_of_an_epoch_but_for_leftovers(runs: Any) -> None:
    run = runs(batches=BUDGET, epoch_size=20)
    (loader,), (dataset,) = run.loaders, run.datasets
    sizes = []
    for _ in range(12):
        sizes.append(dataset.epoch_size)
        assert sum(map(len, loader)) == sizes[-1]
    assert abs(sum(sizes) - 12 * 20) < 3 * 8


def test_a_change_of_weights_holds_from_the_next_epoch_on_and_states_carry_it(runs: Any) -> None:
    whole = runs(2, batches=BUDGET, weights=HEAVY)
    for loader in whole.loaders:
        list(loader)
    for dataset in whole.datasets:
        dataset.reweight("row < 20")
    states, steps = [], []
    for _ in range(9):
        steps.append(whole.step())
        states.append(whole.state())
    assert {row for step in steps for _, row, _, _ in step} <= set(range(20))
    for num_ranks in (1, 4):
        resumed = runs(num_ranks, batches=BUDGET, weights=HEAVY)
        for number in (0, 3, 6):
            resumed.load(states[number])
            assert [resumed.step(), resumed.step()] == steps[number + 1 : number + 3]


def test_workers_that_run_already_read_a_change_of_weights(runs: Any) -> None:
    run, expected = runs(1, 2, batches=BUDGET), runs(batches=BUDGET)
    for one in (run, expected):
        list(one.loaders[0])
        one.datasets[0].reweight("row < 20")
    assert [run.step() for _ in range(6)] == [expected.step() for _ in range(6)]


def test_weights_of_another_step_or_without_a_row_are_refused(runs: Any) -> None:
    (dataset,) = runs(batches=BUDGET).datasets
    with pytest.raises(ConfigError, match=r"at_step=3 cannot be had with batches=.*they hold from the next epoch on"):
        dataset.reweight("row", at_step=3)
    with pytest.raises(ConfigError, match="weights 'length = 20' add up to 0"):
        runs(batches=Buckets("nullif(length, 20)", global_batch_size=4, unknown="drop"), weights="length = 20")
    with pytest.raises(ConfigError, match="num_canonical_nodes=2 with weights="):
        runs(batches=BUDGET, weights=HEAVY, num_canonical_nodes=2)
    for leftovers in ("carry", "repeat"):
        dataset = runs(batches=replace(BUDGET, leftovers=leftovers), num_canonical_nodes=2).datasets[0]
        with pytest.raises(ConfigError, match=r"reweight\(\) with Buckets and num_canonical_nodes=2 cannot be had"):
            dataset.reweight("row < 20")
