"""Weights, epoch_size and reweight in the stream and in its state."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, QueryError, StateError
from sqlstream.stream.run.weighting import Weighting
from tests.stream.tables import Job, make_table, others

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
NUM_ROWS, GLOBAL_BATCH = 24, 8
UPPER_HALF = "CASE WHEN score >= 0.5 THEN 3 ELSE 1 END"
OpenJob = Callable[..., Job]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[OpenJob]:
    jobs: list[Job] = []

    def open_job(num_ranks: int = 1, num_workers: int = 0, loader_options: dict[str, Any] | None = None, **options: Any) -> Job:
        src = make_table(tmp_path, NUM_ROWS)
        options = {"prefetch": 4} | options
        jobs.append(
            Job(
                src,
                tmp_path / "cache",
                num_ranks,
                num_workers,
                GLOBAL_BATCH,
                dataset_options=options,
                loader_options=loader_options or {},
            )
        )
        return jobs[-1]

    yield open_job
    for opened in jobs:
        opened.close()


def rows_in(steps: list[list[tuple[int, int]]]) -> Counter[int]:
    return Counter(row for step in steps for _, row in step)


def epoch_of(job: Job) -> Counter[int]:
    return Counter(row for batch in job.loaders[0] for _, row in batch)


def test_rows_come_as_often_as_their_weights_say(job: OpenJob) -> None:
    for weights in (UPPER_HALF, [1] * 12 + [3] * 12):
        weighted = job(weights=weights)
        counts = [epoch_of(weighted) for _ in range(4)]
        assert all(sum(count.values()) == NUM_ROWS for count in counts)
        total = sum(counts, Counter())
        assert all(abs(total[row] - 4 * (1.5 if row >= 12 else 0.5)) <= 1 for row in range(NUM_ROWS)), total


def test_a_row_of_weight_zero_never_comes(job: OpenJob) -> None:
    weighted = job(weights="score >= 0.5")
    assert set(epoch_of(weighted)) == set(range(12, 24))
    assert len(weighted.loaders[0].dataset) == NUM_ROWS


@pytest.mark.parametrize(("epoch_size", "expected"), [(8, 8), (48, 24), (60, 24)])
def test_an_epoch_is_as_long_as_it_is_told(job: OpenJob, epoch_size: int, expected: int) -> None:
    sized = job(epoch_size=epoch_size)
    dataset = sized.loaders[0].dataset
    assert (dataset.epoch_size, len(dataset), len(sized.loaders[0])) == (epoch_size, NUM_ROWS, -(-epoch_size // GLOBAL_BATCH))
    counts = epoch_of(sized)
    assert sum(counts.values()) == epoch_size
    assert len(counts) == expected
    assert max(counts.values()) - min(counts.values()) <= 1


def test_wrong_weights_and_sizes_are_refused(job: OpenJob) -> None:
    with pytest.raises(ConfigError, match="epoch_size=0"):
        job(epoch_size=0)
    with pytest.raises(QueryError, match="no_such_column"):
        job(weights="no_such_column")
    with pytest.raises(ConfigError, match="shape"):
        job(weights=[1, 2])


LAYOUTS = [(1, 0), (2, 2), (4, 0), (1, 3)]


@pytest.mark.parametrize("options", [{"weights": UPPER_HALF}, {"epoch_size": 40}, {"weights": [1.5, 0] * 12, "epoch_size": 20}])
def test_weighted_runs_resume_after_every_step_on_other_layouts(job: OpenJob, options: dict[str, Any]) -> None:
    jobs = {layout: job(*layout, **options) for layout in LAYOUTS}
    total = 2 * len(jobs[1, 0].loaders[0])
    states, reference = [jobs[1, 0].state()], []
    for step in jobs[1, 0].steps(total):
        reference.append(step)
        states.append(json.loads(json.dumps(jobs[1, 0].state())))
    for first, second in others(LAYOUTS):
        for stop in range(0, total + 1, 2):
            jobs[first].load(states[stop])
            delivered = reference[:stop] + list(jobs[first].steps(min(1, total - stop)))
            jobs[second].load(jobs[first].state())
            delivered += jobs[second].steps(total - len(delivered))
            assert delivered == reference


@pytest.mark.parametrize(("num_workers", "is_persistent"), [(0, False), (2, False), (2, True)])
def test_reweight_holds_from_the_next_epoch_and_is_part_of_the_state(
    job: OpenJob, num_workers: int, is_persistent: bool
) -> None:
    loader_options = {"persistent_workers": True} if is_persistent else {}
    running = job(1, num_workers, loader_options)
    list(running.steps(1))
    running.loaders[0].dataset.reweight("score < 0.5")
    begun = running.state()
    rest = list(running.steps(2))
    assert len({row for step in rest for _, row in step}) == 16, "the epoch under way changed"
    second = list(running.steps(3))
    assert {row for step in second for _, row in step} == set(range(12))
    running.loaders[0].dataset.reweight(None)
    third = list(running.steps(3))
    assert {row for step in third for _, row in step} == set(range(NUM_ROWS))
    elsewhere = job(2, 1)
    elsewhere.load(json.loads(json.dumps(begun)))
    assert list(elsewhere.steps(5)) == rest + second
    elsewhere.load(running.state())
    assert elsewhere.loaders[0].dataset.state_dict()["weights"] == running.state()["weights"]
    assert len(running.state()["weights"]) == 2


@pytest.mark.parametrize("weights", [None, UPPER_HALF])
def test_a_run_that_is_reweighted_before_its_first_step_goes_on_in_a_dataset_made_as_it_was(
    job: OpenJob, weights: str | None
) -> None:
    running = job(weights=weights)
    begun = running.state()
    for expression in ("score >= 0.5", "score < 0.5"):
        running.loaders[0].dataset.reweight(expression)
    list(running.steps(1))
    state, rest = running.state(), list(running.steps(5))
    assert {row for step in rest for _, row in step} == set(range(12))
    fresh = job(2, 0, weights=weights)
    fresh.load(json.loads(json.dumps(state)))
    assert list(fresh.steps(5)) == rest
    before = state | {"weights": state["weights"][-1:]}  # as earlier versions wrote it
    for saved, expected in [(before, state), (begun, begun)]:
        running.load(saved)
        assert running.state() == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reweight_at_a_step_changes_what_comes_after_it_alone(job: OpenJob, num_workers: int) -> None:
    """Long epochs, so that steps are left which no worker has planned."""
    size = 800
    reference = list(job(epoch_size=size).steps(100))
    running = job(1, num_workers, {"prefetch_factor": 1} if num_workers else None, epoch_size=size)
    dataset = running.loaders[0].dataset
    begun = list(running.steps(5))
    with pytest.raises(StateError, match=r"first possible one is \d+") as refused:
        dataset.reweight("score < 0.5", at_step=6)
    first = int(str(refused.value).split("first possible one is ")[1].split(",")[0])
    assert 5 < first < 50
    dataset.reweight("score < 0.5", at_step=first)
    state = running.state()
    begun += running.steps(90)
    with pytest.raises(StateError, match=r"epoch 0, which has 100 steps: no step of it is possible"):
        dataset.reweight(None, at_step=99)
    begun += running.steps(5)
    assert begun[:first] == reference[:first]
    assert {row for step in begun[first:] for _, row in step} == set(range(12))
    elsewhere = job(4, 0, epoch_size=size)
    elsewhere.load(state)
    assert list(elsewhere.steps(95)) == begun[5:]


def test_an_endless_iteration_changes_weights_with_an_epoch_that_is_given(job: OpenJob) -> None:
    running = job(1, 2, {"prefetch_factor": 1}, infinite_iteration=True)
    list(running.steps(2))
    running.loaders[0].dataset.reweight("score < 0.5", at_epoch=10)
    (change,) = running.state()["weights"]
    epochs: dict[int, set[int]] = {}
    for step in running.steps(3 * (change["epoch"] + 2)):
        for epoch, row in step:
            epochs.setdefault(epoch, set()).add(row)
    assert epochs[change["epoch"] - 1] == set(range(NUM_ROWS))
    assert epochs[change["epoch"]] == set(range(12))
    assert epochs[change["epoch"] + 1] == set(range(12))


def test_states_of_other_weights_are_refused_with_both(job: OpenJob) -> None:
    plain, weighted, sized, array = job(), job(weights=UPPER_HALF), job(epoch_size=40), job(weights=np.arange(24.0))
    for one, other, name in [
        (plain, weighted, "first_weights=None"),
        (weighted, plain, r"first_weights='\w+', this dataset None"),
        (weighted, array, r"first_weights='\w+', this dataset '\w+'"),
        (plain, sized, "epoch_size=24, this dataset 40"),
    ]:
        with pytest.raises(StateError, match=name):
            other.load(one.state())
    list(plain.steps(1))
    plain.loaders[0].dataset.reweight(np.arange(24.0) ** 2)
    fresh = job(num_canonical_nodes=1)
    with pytest.raises(StateError, match=r"weights \w+ from epoch 1 on that were given as an array"):
        fresh.load(plain.state())


def test_a_failing_row_is_replaced_by_another_one_though_it_stands_at_many_positions(tmp_path: Path) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] == 3:
            raise ValueError("always")
        return sample

    with StreamingDataset(
        make_table(tmp_path, NUM_ROWS),
        tmp_path / "cache",
        transforms=[fail],
        weights="CASE WHEN score = 0.125 THEN 5 ELSE 1 END",
        max_failure_ratio=1.0,
        show_progress=False,
    ) as dataset:
        rows = [sample["__row__"] for sample in dataset]
    assert len(rows) == NUM_ROWS
    assert 3 not in rows


class _Meanwhile:
    """Memory of weights that another process changes twice before each of its first parts is read."""

    def __init__(self, memory: torch.Tensor, writer: Weighting) -> None:  # [bytes]
        self.memory = memory  # [bytes]
        self.writer, self.num_changes = writer, 0

    def __getitem__(self, part: slice) -> torch.Tensor:  # [bytes]
        for _ in range(2 if self.num_changes < 8 else 0):
            self.num_changes += 1
            self.writer.add(1 + self.num_changes, 0, None)
        return self.memory[part]


def test_a_worker_that_reads_while_weights_change_takes_whole_changes() -> None:
    writer = Weighting(8, 8, lambda weights: pytest.fail("no weights here"), None)
    reader = copy.copy(writer)  # with the same memory, as a worker has it
    writer.add(1, 0, None)
    assert reader.version == 1
    reader._shared = copy.copy(writer._shared)
    meanwhile = _Meanwhile(reader._shared._shared, writer)
    reader._shared._shared = meanwhile  # type: ignore[assignment]
    assert [change.epoch for change in reader.changes] == list(range(1, meanwhile.num_changes + 2))
