"""Where weights change: at a place that is given, or the next epoch, on any number of workers with any prefetch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, StateError
from tests.stream.mixtures import MixedJob, Seen
from tests.stream.tables import make_table

G = 12
STEPS = 60
"""Of an epoch: more than workers plan, with the prefetch of these tests."""
OTHERS = {"web": 0, "code": 1, "av": 1}
LAYOUTS = [(0, 1), (0, 150), (1, 10), (2, 10)]


def endless(folder: Path, num_workers: int, prefetch: int, **options: Any) -> MixedJob:
    given = {"epoch_size": STEPS * G, "infinite_iteration": True} | options
    return MixedJob(folder, 1, num_workers, G, prefetch=prefetch, **given)


def taken(iterator: Iterator[list[Seen]], num_steps: int) -> list[list[Seen]]:
    return [next(iterator) for _ in range(num_steps)]


def first_without(batches: list[list[Seen]], stream: str) -> int:
    """The first step from which on a stream does not come."""
    return max((step + 1 for step, batch in enumerate(batches) if any(name == stream for name, *_ in batch)), default=0)


def test_an_endless_iteration_changes_with_the_next_epoch_on_any_layout(tmp_path: Path) -> None:
    found = []
    for num_workers, prefetch in LAYOUTS:
        with endless(tmp_path, num_workers, prefetch) as job:
            iterator = iter(job.loaders[0])
            begun = taken(iterator, 2)
            job.mixed.reweight(OTHERS)
            found.append(begun + taken(iterator, 2 * STEPS))
    assert first_without(found[0], "web") == STEPS
    assert all(batches == found[0] for batches in found)


def test_a_next_epoch_that_is_planned_is_refused_and_a_later_one_is_the_same_on_any_layout(tmp_path: Path) -> None:
    found = []
    for num_workers, prefetch in LAYOUTS:
        with endless(tmp_path, num_workers, prefetch, epoch_size=2 * G) as job:
            iterator = iter(job.loaders[0])
            begun = taken(iterator, 3)
            with pytest.raises(StateError, match=r"from epoch 2 on.*first possible one is \d+; give at_epoch=\d+"):
                job.mixed.reweight(OTHERS)
            with pytest.raises(StateError, match="from epoch 1 on"):
                job.mixed.reweight(OTHERS, at_epoch=1)
            job.mixed.reweight(OTHERS, at_epoch=30)
            state = job.loaders[0].state_dict()
            rest = taken(iterator, 70)
            found.append(begun + rest)
        with endless(tmp_path, 1, 10, epoch_size=2 * G) as job:
            job.load(state)
            assert taken(iter(job.loaders[0]), 70) == rest
    assert first_without(found[0], "web") == 30 * 2
    assert all(batches == found[0] for batches in found)


def test_rows_change_their_weights_from_a_later_epoch_on(tmp_path: Path) -> None:
    options: dict[str, Any] = {"columns_to_download": [], "shuffle_seed": 1, "batch_size": 4}
    with StreamingDataset(make_table(tmp_path, 24), tmp_path / "cache", **options) as dataset:
        epochs = [[sample["__row__"] for sample in dataset]]
        with pytest.raises(StateError, match=r"from epoch 0 on.*give at_epoch=1"):
            dataset.reweight("row < 12", at_epoch=0)
        with pytest.raises(ConfigError, match=r"at_step=1 .*at_epoch=2"):
            dataset.reweight("row < 12", at_step=1, at_epoch=2)
        dataset.reweight("row < 12", at_epoch=2)
        epochs += [[sample["__row__"] for sample in dataset] for _ in range(2)]
    assert [len(set(epoch)) for epoch in epochs] == [24, 24, 12]


def test_a_mixture_without_an_end_changes_at_a_step(tmp_path: Path) -> None:
    found = []
    for num_workers in (0, 2):
        with MixedJob(tmp_path, 1, num_workers, G, prefetch=10, stop="never", epoch_size=None) as job:
            iterator = iter(job.loaders[0])
            begun = taken(iterator, 2)
            with pytest.raises(ConfigError, match="stop='never' has none: give at_step="):
                job.mixed.reweight(OTHERS)
            with pytest.raises(StateError, match=r"which has no end: the first possible one is \d+.*give at_step="):
                job.mixed.reweight(OTHERS, at_step=2)
            job.mixed.reweight(OTHERS, at_step=60)
            found.append(begun + taken(iterator, 68))
    assert first_without(found[0], "web") == 60
    assert Counter(name for batch in found[0][60:] for name, *_ in batch) == Counter({"code": 60, "av": 60})
    assert found[0] == found[1]


def test_workers_of_a_plain_loader_cannot_change_weights_within_an_endless_iteration(tmp_path: Path) -> None:
    options: dict[str, Any] = {"columns_to_download": [], "shuffle_seed": 1, "batch_size": 4, "infinite_iteration": True}
    with StreamingDataset(make_table(tmp_path, 24), tmp_path / "cache", **options) as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=list, multiprocessing_context="fork")
        next(iter(loader))
        with pytest.raises(StateError, match="use StreamingDataLoader"):
            dataset.reweight("row < 12")
