"""Packs as streams: of a MixedDataset, where a draw is a pack, and of a MultiStreamDataLoader, with batches of their own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlstream import (
    MixedDataset,
    MultiStreamDataLoader,
    Packs,
    StreamingDataLoader,
    StreamingDataset,
    StreamOptions,
)
from sqlstream.errors import ConfigError
from sqlstream.world import World
from tests.stream.pack_runs import LENGTHS, NUM_ROWS, PACKS, failing, seen, tokenize, write_table

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "rows.parquet")


def mixed(table: Path, num_ranks: int = 1, rank: int = 0, **options: Any) -> MixedDataset:
    """Packs of two capacities, 2 to 1, in epochs of 36; what `tokens` says is that of rows."""
    given: dict[str, Any] = {"transforms": [tokenize], "show_progress": False}
    streams = {
        "long": StreamingDataset(table, table.parent / "c", batches=Packs("n", 64), shuffle_seed=3, **given),
        "cut": StreamingDataset(table, table.parent / "c", batches=Packs("n", 8, on_long="split"), shuffle_seed=4, **given),
    }
    world = World(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
    mixture: dict[str, Any] = {"weights": [2, 1], "epoch_size": 36, "world": world} | options
    return MixedDataset(streams, **mixture)


def test_a_stream_of_packs_gives_the_packs_that_it_gives_alone(table: Path) -> None:
    with mixed(table) as dataset:
        found = [dict(pack) for _ in range(2) for pack in dataset]
        alone: dict[str, list[Any]] = {"long": [], "cut": []}
        for name, stream in dataset.streams.items():
            for epoch in range(6):
                stream.set_epoch(epoch)
                alone[name] += seen(list(stream))
        for name, packs in alone.items():
            ours = seen([pack for pack in found if pack["__stream__"] == name])
            assert ours == packs[: len(ours)]
        assert Counter(pack["__stream__"] for pack in found) == {"long": 48, "cut": 24}


def test_a_mixture_of_packs_goes_on_after_any_step_on_any_ranks_in_one_small_state(table: Path) -> None:
    with mixed(table) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, collate_fn=seen)
        steps, states = [], []
        for _ in range(2):
            for batch in loader:
                steps.append(frozenset(batch))
                states.append(json.loads(json.dumps(loader.state_dict())))
    for number in range(0, 17, 3):
        parts = []
        for rank in range(2):
            with mixed(table, 2, rank) as dataset:
                loader = StreamingDataLoader(dataset, batch_size=2, collate_fn=seen)
                loader.load_state_dict(states[number])
                parts.append(next(iter(loader)))
        assert frozenset(parts[0] + parts[1]) == steps[number + 1], f"after {number + 1} steps"


def test_failed_rows_of_a_mixture_are_replaced_within_their_stream_and_length(table: Path) -> None:
    bad = [row for row in range(NUM_ROWS) if LENGTHS[row] == 12]
    given: dict[str, Any] = {"show_progress": False, "batches": PACKS, "max_failure_ratio": 1.0}
    failed = StreamingDataset(table, table.parent / "c", transforms=[failing(*bad)], shuffle_seed=3, **given)
    good = StreamingDataset(table, table.parent / "c", transforms=[tokenize], shuffle_seed=3, **given)
    with MixedDataset({"bad": failed}, epoch_size=16) as dataset, MixedDataset({"bad": good}, epoch_size=16) as other:
        packs, before = list(dataset), list(other)
    assert not {row for pack in packs for row in pack["__rows__"]} & set(bad)
    for pack, whole in zip(packs, before, strict=True):
        assert all(LENGTHS[row] <= LENGTHS[old] for row, old in zip(pack["__rows__"], whole["__rows__"], strict=True))


@pytest.mark.parametrize("weights", [None, "n / 3.0"])
def test_weighted_packs_go_on_over_epochs_of_different_lengths(weights: str | None, table: Path) -> None:
    """With weights an epoch has some packs more or fewer; the stream gives those that it gives alone, whatever the state."""
    given: dict[str, Any] = {"transforms": [tokenize], "show_progress": False, "shuffle_seed": 3, "weights": weights}

    def opened() -> StreamingDataset:
        return StreamingDataset(table, table.parent / "c", batches=Packs("n", 24), **given)

    with opened() as alone:
        sizes, packs = [], []
        for _ in range(9):
            sizes.append(alone.epoch_size)
            packs += seen(list(alone))
        assert (len(set(sizes)) > 1) == (weights is not None), sizes
    with MixedDataset({"one": opened()}, epoch_size=20) as dataset:
        states, found = [], []
        loader = StreamingDataLoader(dataset, batch_size=4, collate_fn=seen)
        for _ in range(7):
            for batch in loader:
                found += batch
                states.append(json.loads(json.dumps(loader.state_dict())))
    assert found == packs[: len(found)]
    assert len(found) == 140 < len(packs)
    with MixedDataset({"one": opened()}, epoch_size=20) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, collate_fn=seen)
        for number in (30, 3, 17, 9):
            loader.load_state_dict(states[number])
            assert next(iter(loader)) == packs[(number + 1) * 4 : (number + 2) * 4]
    if weights is not None:
        with opened() as one, pytest.raises(ConfigError, match="has weights, which tokens='n' would have to weigh"):
            MixedDataset({"one": one}, tokens="n", epoch_size=8)


def test_shares_of_tokens_are_exact_with_packs(table: Path) -> None:
    with mixed(table, weights=[1, 1], tokens="n", epoch_size=None, stop="first_exhausted") as dataset:
        packs = dataset.streams["long"].epoch_size, dataset.streams["cut"].epoch_size
        weights = dataset.weights
        assert weights["long"] * packs[1] == weights["cut"] * packs[0], "as many tokens of each, in packs of their own size"
        batch = next(iter(StreamingDataLoader(dataset, batch_size=1)))
        assert batch["cu_seqlens"][-1] in (8, 64), "collated by default"


# -- of a MultiStreamDataLoader ---------------------------------------------------------------------------------------


class Job:
    """All ranks in this process: packs of two capacities, one with weights, and batches of 4 and 8 in rounds."""

    def __init__(self, table: Path, num_ranks: int, num_workers: int = 0, **options: Any) -> None:
        given: dict[str, Any] = {"transforms": [tokenize], "show_progress": False}
        configs = [
            {"name": "long", "ratio": 2, "batch_size": 4, "batch_gpu": 1},
            {"name": "cut", "ratio": 1, "batch_size": 8, "batch_gpu": 2},
        ]
        self.loaders = []
        for rank in range(num_ranks):
            streams = [
                StreamingDataset(table, table.parent / "c", batches=Packs("n", 40), shuffle_seed=3, weights="n", **given),
                StreamingDataset(table, table.parent / "c", batches=Packs("n", 8, on_long="split"), shuffle_seed=4, **given),
            ]
            world = World(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
            arguments: dict[str, Any] = {"collate_fn": named, "multiprocessing_context": "fork" if num_workers else None}
            loader = MultiStreamDataLoader(
                streams, StreamOptions.init_group(configs), num_workers, world=world, **(arguments | options)
            )
            self.loaders.append(loader)

    def step(self) -> tuple[str, frozenset[Any]]:
        """The stream of the next step, and the packs that all ranks take in its rounds."""
        packs: list[Any] = []
        while True:
            batches = [next(iter(loader)) for loader in self.loaders]
            packs += [pack for batch in batches for pack in batch["packs"]]
            if not batches[0].num_accum_rounds_left:
                return str(batches[0].stream_name), frozenset(packs)

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        state: dict[str, Any] = json.loads(json.dumps(states[0]))
        return state

    def load(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def named(packs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"packs": seen(packs)}


@pytest.fixture
def jobs(table: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(num_ranks: int = 1, num_workers: int = 0, **options: Any) -> Job:
        made.append(Job(table, num_ranks, num_workers, **options))
        return made[-1]

    yield make
    for job in made:
        job.close()


def test_streams_of_packs_go_on_after_every_step_on_every_layout(jobs: Any) -> None:
    whole = jobs(2)
    states, steps = [whole.state()], []
    for _ in range(11):
        steps.append(whole.step())
        states.append(whole.state())
    assert Counter(name for name, _ in steps[:9]) == {"long": 6, "cut": 3}
    assert all(len(packs) == {"long": 4, "cut": 8}[name] for name, packs in steps)
    assert len({pack[0] for name, packs in steps for pack in packs if name == "long"}) > 1, "over the end of an epoch"
    one, four = jobs(1), jobs(4)
    for number, state in enumerate(states[:11]):
        job = four if number % 5 == 2 else one
        job.load(state)
        assert job.step() == steps[number], f"after {number} steps on {len(job.loaders)} ranks"
    with_workers = jobs(2, 2)
    with_workers.load(states[5])
    assert [with_workers.step() for _ in range(2)] == steps[5:7]


def test_batches_of_packs_are_collated_as_packs(jobs: Any) -> None:
    job = jobs(collate_fn=None)
    batch = next(iter(job.loaders[0]))
    num_packs, capacity = batch["input_ids"].shape
    assert capacity == {"long": 40, "cut": 8}[str(batch.stream_name)]
    assert batch["cu_seqlens"][-1] == num_packs * capacity
    assert batch.num_samples_in_step == {"long": 4, "cut": 8}[str(batch.stream_name)], "packs are what is counted"
