"""Batches whose sizes differ by bucket: what a budget gives, whole batches of a loader, resumption, canonical nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sqlstream import Buckets, Lengths, StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, StateError
from sqlstream.world import World
from tests.stream.bucket_runs import BUCKETS, BUDGET, GLOBAL_BATCH, NUM_ROWS, drawn, seen, some_runs, write_lengths

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
MAP = Lengths((10, 20, 30))
SIZES = {10: 16, 20: 8, 30: 4}
"""Samples of a global batch by bucket: 160 tokens, in multiples of 4, and at least 4."""


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    with some_runs(write_lengths(tmp_path)) as make:
        yield make


def bucket_of(step: frozenset[tuple[Any, ...]]) -> Any:
    (bucket,) = {bucket for _, _, bucket, _ in step}
    return bucket


def test_a_batch_has_as_many_samples_as_the_budget_of_tokens_holds(runs: Any) -> None:
    run = runs(2, batches=BUDGET)
    assert all(loader.batch_size is None for loader in run.loaders), "it differs by bucket"
    steps = [run.step() for _ in range(24)]
    assert {(bucket_of(step), len(step)) for step in steps} == set(SIZES.items())
    drawn_rows = [sample[:2] for step in steps for sample in step]
    assert len(set(drawn_rows)) == len(drawn_rows), "no row comes twice in a round"


def test_sizes_may_be_given_by_bucket(runs: Any) -> None:
    run = runs(batches=Buckets("length", MAP, global_batch_size={10: 6, 20: 3, 30: 2}))
    assert {(bucket_of(step), len(step)) for step in (run.step() for _ in range(20))} == {(10, 6), (20, 3), (30, 2)}


def test_epochs_have_the_steps_and_the_samples_that_loader_and_dataset_say(runs: Any) -> None:
    run = runs(batches=BUDGET)
    ((loader,), (dataset,)) = run.loaders, run.datasets
    for _ in range(4):
        num_steps, num_samples = len(loader), dataset.epoch_size
        batches = list(loader)
        assert (len(batches), sum(map(len, batches))) == (num_steps, num_samples)


@pytest.mark.parametrize("layout", [(2, 0), (4, 0), (2, 2), (1, 3)], ids=str)
def test_batches_of_all_sizes_are_the_same_on_every_layout(layout: tuple[int, int], runs: Any) -> None:
    one, other = runs(batches=BUDGET), runs(*layout, batches=BUDGET)
    for _ in range(12):
        assert other.step() == one.step()


def test_a_run_of_uneven_steps_resumed_at_every_step_goes_on_as_if_it_had_not_stopped(runs: Any) -> None:
    whole = runs(2, batches=BUDGET)
    states, steps = [whole.state()], []
    for _ in range(14):
        steps.append(whole.step())
        states.append(whole.state())
    others = [runs(num_ranks, batches=BUDGET) for num_ranks in (1, 2, 4)]
    for number, state in enumerate(states[:12]):
        for run in others:
            run.load(state)
            assert [run.step(), run.step()] == steps[number : number + 2], f"after {number} steps on {len(run.loaders)} ranks"
    with_workers = runs(2, 2, batches=BUDGET)
    for number in (1, 8):
        with_workers.load(states[number])
        assert [with_workers.step() for _ in range(3)] == steps[number : number + 3]


def test_an_endless_iteration_of_uneven_steps_goes_on_over_epochs(runs: Any) -> None:
    one, endless = runs(batches=BUDGET), runs(1, 2, batches=BUDGET, infinite_iteration=True)
    assert [endless.step() for _ in range(14)] == [one.step() for _ in range(14)]


def test_a_budget_follows_the_ranks_of_the_first_start_which_the_state_carries(runs: Any) -> None:
    budget = Buckets("length", MAP, global_batch_tokens=120)
    one, four = runs(1, batches=budget), runs(4, batches=budget)
    assert {len(one.step()) for _ in range(20)} == {12, 6, 4}
    begun = {bucket_of(step): len(step) for step in (four.step() for _ in range(20))}
    assert begun == {10: 12, 20: 4, 30: 4}, "multiples of 4 ranks"
    state, following = four.state(), [four.step() for _ in range(6)]
    assert state["version"] == 5
    resumed = runs(2, batches=budget)
    resumed.load(state)
    assert [resumed.step() for _ in range(2)] == following[:2]
    once_more = runs(1, batches=budget)
    once_more.load(resumed.state())
    assert [once_more.step() for _ in range(4)] == following[2:]
    eight = runs(8, batches=budget)
    with pytest.raises(ConfigError, match=r"batch of bucket 20 has 4 samples, which 8 ranks do not divide: use 4 ranks"):
        eight.load(state)


def test_a_state_of_another_budget_is_refused(runs: Any) -> None:
    run = runs(batches=BUDGET)
    run.step()
    other = runs(batches=Buckets("length", MAP, global_batch_tokens=80, rank_multiple=4))
    with pytest.raises(StateError, match="blocks="):
        other.load(run.state())


def test_a_state_that_is_refused_leaves_the_batches_of_the_ranks_of_now(tmp_path: Path) -> None:
    """They were multiples of the ranks of the state, for a run that began anew."""

    def loader_of(num_rows: int, num_ranks: int) -> StreamingDataLoader:
        batches = Buckets("number % 2", global_batch_tokens=9, tokens=lambda _: 1)
        world = World(rank=0, world_size=num_ranks, local_world_size=num_ranks)
        rows = [{"number": number} for number in range(num_rows)]
        dataset = StreamingDataset(rows, tmp_path / "cache", shuffle_seed=1, batches=batches, world=world, show_progress=False)
        return StreamingDataLoader(dataset, collate_fn=lambda samples: [sample["number"] for sample in samples])

    state, want, loader = loader_of(60, 2).state_dict(), list(loader_of(40, 1)), loader_of(40, 1)
    with pytest.raises(StateError, match="it was 60, and is 40"):
        loader.load_state_dict(state)
    assert list(loader) == want


def test_samples_that_are_skipped_leave_batches_of_one_bucket(runs: Any) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["row"] % 4 == 1:
            raise ValueError("broken")
        return drawn(sample)

    run = runs(transforms=[fail], max_failure_ratio=1.0, on_error="skip", batches=BUDGET)
    steps = [run.step() for _ in range(12)]
    assert all(len({bucket for _, _, bucket, _ in step}) == 1 for step in steps)
    assert any(len(step) < SIZES[bucket_of(step)] for step in steps)
    expected = runs(batches=BUDGET)
    kept = [{sample[:3] for sample in expected.step() if sample[1] % 4 != 1} for _ in range(12)]
    assert [{sample[:3] for sample in step} for step in steps] == [some for some in kept if some]


def test_a_plain_loader_is_given_whole_batches(runs: Any) -> None:
    expected = runs(batches=BUDGET)
    (dataset,) = runs(batches=BUDGET).datasets
    for num_workers in (0, 2):
        context = "fork" if num_workers else None
        loader = DataLoader(dataset, batch_size=None, collate_fn=seen, num_workers=num_workers, multiprocessing_context=context)
        for batch in loader:
            assert frozenset(batch) == expected.step()
    for batch_size in (1, GLOBAL_BATCH):
        with pytest.raises(ConfigError, match=r"give it batch_size=None, then the dataset yields whole batches"):
            list(DataLoader(dataset, batch_size=batch_size))


def test_rows_stay_on_their_canonical_nodes(runs: Any, tmp_path: Path) -> None:
    whole = runs(batches=BUDGET, num_canonical_nodes=2)
    nodes: list[set[int]] = [set(), set()]
    worlds = [World(rank=rank, world_size=2, node=rank, num_nodes=2) for rank in range(2)]
    options: dict[str, Any] = {"shuffle_seed": 5, "batches": BUDGET, "num_canonical_nodes": 2, "transforms": [drawn]}
    table = tmp_path / "rows.parquet"
    datasets = [StreamingDataset(table, tmp_path / "cache", world=world, **options) for world in worlds]
    loaders = [StreamingDataLoader(dataset, collate_fn=seen) for dataset in datasets]
    for _ in range(5):
        for batches in zip(*loaders, strict=True):
            assert frozenset(sample for batch in batches for sample in batch) == whole.step(), "as on one node"
            for rows, batch in zip(nodes, batches, strict=True):
                rows.update(row for _, row, _, _ in batch)
    for dataset in datasets:
        dataset.close()
    assert not nodes[0] & nodes[1]
    assert nodes[0] | nodes[1] == set(range(NUM_ROWS))


def test_a_limit_of_rows_and_a_filter_come_first_and_ranks_that_share_samples_have_the_same_batches(runs: Any) -> None:
    whole = runs(batches=BUDGET, max_size=30, where="length < 30")
    steps = [whole.step() for _ in range(12)]
    assert {bucket_of(step) for step in steps} == {10, 20}
    assert len({row for step in steps for _, row, _, _ in step}) == 30
    pairs = runs(4, batches=BUDGET, max_size=30, where="length < 30", replication=2)
    for step in steps[:6]:
        batches = [pairs._next(rank) for rank in range(4)]
        assert batches[0] == batches[1]
        assert batches[2] == batches[3]
        assert frozenset(batches[0] + batches[2]) == step


class Looking(StreamingDataset):
    """A dataset that looks at its samples."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


def test_a_subclass_that_looks_at_samples_is_refused(runs: Any, tmp_path: Path) -> None:
    runs(batches=BUCKETS)
    with (
        Looking(tmp_path / "rows.parquet", tmp_path / "cache", batches=BUCKETS) as dataset,
        pytest.raises(ConfigError, match="Looking has an __iter__ of its own"),
    ):
        StreamingDataLoader(dataset)
