"""Batches by bucket in streams of a mixture: a stream for each tier, its batches as it gives them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sqlstream import (
    Buckets,
    Lengths,
    MixedDataset,
    MultiStreamDataLoader,
    StreamingDataLoader,
    StreamingDataset,
    StreamOptions,
)
from sqlstream.errors import ConfigError
from sqlstream.world import World
from tests.stream.bucket_runs import drawn, seen, write_lengths

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
GLOBAL_BATCH = 4
SHORT = Buckets("length", Lengths((10, 20)), global_batch_size=GLOBAL_BATCH)
ANY = Buckets("row % 2", global_batch_size=GLOBAL_BATCH)
WEIGHTS = {"short": 2, "any": 1}
Open = Callable[..., StreamingDataset]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    table = write_lengths(tmp_path)
    with ExitStack() as stack:

        def make(name: str, **options: Any) -> StreamingDataset:
            tiers: dict[str, dict[str, Any]] = {"short": {"batches": SHORT, "where": "length <= 20"}, "any": {"batches": ANY}}
            given: dict[str, Any] = {"shuffle_seed": 5, "show_progress": False, "transforms": [drawn]} | tiers[name] | options
            return stack.enter_context(StreamingDataset(table, tmp_path / "cache", **given))

        yield make


def mixed(opened: Open, num_ranks: int = 1, num_workers: int = 0, **options: Any) -> list[StreamingDataLoader]:
    """The loaders of all ranks."""
    context = "fork" if num_workers else None
    loaders = []
    for rank in range(num_ranks):
        streams = {name: opened(name) for name in WEIGHTS}
        world = World(rank=rank, world_size=num_ranks)
        given: dict[str, Any] = {"weights": WEIGHTS, "unit": "batch", "epoch_size": 60} | options
        dataset = MixedDataset(streams, world=world, **given)
        size = GLOBAL_BATCH // num_ranks
        loaders.append(
            StreamingDataLoader(
                dataset, batch_size=size, num_workers=num_workers, collate_fn=named, multiprocessing_context=context
            )
        )
    return loaders


def named(samples: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(sample["__stream__"], *own) for sample, own in zip(samples, seen(samples), strict=True)]


def seen_dict(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"seen": seen(samples)}


def steps_of(loaders: list[StreamingDataLoader], num_steps: int) -> list[frozenset[tuple[Any, ...]]]:
    """The next global batches, over the ends of epochs."""
    steps: list[frozenset[tuple[Any, ...]]] = []
    while len(steps) < num_steps:
        steps += [frozenset(sample for batch in batches for sample in batch) for batches in zip(*loaders, strict=True)]
    return steps[:num_steps]


def test_a_tier_gives_the_batches_that_it_gives_alone_over_epochs_of_different_lengths(opened: Open) -> None:
    steps = steps_of(mixed(opened), 45)
    for name, share in WEIGHTS.items():
        ours = [frozenset(sample[1:] for sample in step) for step in steps if {sample[0] for sample in step} == {name}]
        assert len(ours) == 15 * share
        assert ours == [frozenset(batch) for batch in first_epochs(opened(name))][: len(ours)]


@pytest.mark.parametrize("layout", [(2, 0), (4, 0), (2, 2)], ids=str)
def test_batches_of_tiers_are_the_same_on_every_layout(layout: tuple[int, int], opened: Open) -> None:
    assert steps_of(mixed(opened, *layout), 15) == steps_of(mixed(opened), 15)


def test_a_mixture_of_tiers_goes_on_after_every_step(opened: Open) -> None:
    whole = mixed(opened)
    states, steps = [], []
    for _ in range(2):
        for batch in whole[0]:
            steps.append(frozenset(batch))
            states.append(whole[0].state_dict())
    for num_ranks in (1, 2):
        loaders = mixed(opened, num_ranks)
        for number in range(0, 20, 3):
            for loader in loaders:
                loader.load_state_dict(states[number])
            assert steps_of(loaders, 2) == steps[number + 1 : number + 3]


def test_a_failed_sample_of_a_tier_is_replaced_within_its_bucket(opened: Open) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["row"] % 9 == 4:
            raise ValueError("broken")
        return drawn(sample)

    options: dict[str, Any] = {"transforms": [fail], "max_failure_ratio": 1.0}
    dataset = MixedDataset({name: opened(name, **options) for name in WEIGHTS}, unit="batch", epoch_size=60)
    for batch in StreamingDataLoader(dataset, batch_size=GLOBAL_BATCH, collate_fn=named):
        assert len({(stream, bucket) for stream, _, _, bucket, _ in batch}) == 1
        assert not any(row % 9 == 4 for _, _, row, _, _ in batch)


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_row_of_a_tier_that_gives_no_sample_or_several_is_an_error_before_a_batch_is_of_several_buckets(
    num_samples: int, opened: Open
) -> None:
    def several(sample: dict[str, Any]) -> list[dict[str, Any]]:
        return [drawn(sample)] * (num_samples if sample["row"] % 9 == 4 else 1)

    streams = {name: opened(name, transforms=[several]) for name in WEIGHTS}
    batches = iter(StreamingDataLoader(MixedDataset(streams, unit="batch"), batch_size=GLOBAL_BATCH, collate_fn=named))
    with pytest.raises(ConfigError, match="a row gives no sample, or several"):  # noqa: PT012 - some batches come before
        while True:
            assert len({(stream, bucket) for stream, _, _, bucket, _ in next(batches)}) == 1


def test_a_loader_of_streams_gives_the_batches_of_tiers_in_rounds(opened: Open) -> None:
    opts = StreamOptions.init_group(
        [
            {"name": "short", "ratio": 2, "batch_size": GLOBAL_BATCH, "batch_gpu": 2},
            {"name": "any", "ratio": 1, "batch_size": GLOBAL_BATCH, "batch_gpu": 4},
        ]
    )
    steps: dict[Any, tuple[Any, list[Any]]] = {}
    with MultiStreamDataLoader(
        [opened("short"), opened("any")], opts, shuffle_seed=1, epoch_size=30, collate_fn=seen_dict
    ) as loader:
        for batch in loader:
            steps.setdefault(batch.step, (batch.stream_name, []))[1].extend(batch["seen"])
    for name, share in WEIGHTS.items():
        ours = [frozenset(samples) for own, samples in steps.values() if own == name]
        assert len(ours) == 10 * share
        assert ours == [frozenset(batch) for batch in first_epochs(opened(name))][: len(ours)]


def first_epochs(dataset: StreamingDataset) -> list[list[tuple[Any, ...]]]:
    loader = StreamingDataLoader(dataset, collate_fn=seen)
    return [batch for _ in range(8) for batch in loader]


def test_what_a_mixture_cannot_give_whole_is_refused(opened: Open) -> None:
    with pytest.raises(ConfigError, match=r"stream 'short' has batches=, which a mixture gives whole.*give unit='batch'"):
        mixed(opened, unit="sample")
    dataset = MixedDataset({name: opened(name) for name in WEIGHTS}, unit="batch", epoch_size=60)
    with pytest.raises(ConfigError, match=r"stream 'short' has batches= of 4 samples, and takes 2 in a step"):
        list(StreamingDataLoader(dataset, batch_size=2))
    uneven = opened("any", batches=Buckets("row % 2", global_batch_size={0: 4, 1: 2}))
    with pytest.raises(ConfigError, match=r"stream 'any' has batches= of several sizes"):
        list(StreamingDataLoader(MixedDataset({"any": uneven}, unit="batch", epoch_size=60), batch_size=4))
