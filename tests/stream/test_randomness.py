"""Transforms draw the same numbers for a position of an epoch on every layout, and leave the trainer's generators alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import TransformError
from sqlstream.stream.chain.python_generator import PythonGenerator, PythonState
from sqlstream.transforms import rng
from tests.stream.kit import global_states, whole
from tests.stream.tables import Job, make_table, others

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def draw(sample: dict[str, Any]) -> dict[str, Any]:
    """An augmentation that draws from every generator there is, twice."""
    for number in range(2):
        sample[f"drawn-{number}"] = (
            random.random(),
            np.random.rand(2).tobytes(),
            torch.rand(2).numpy().tobytes(),
            rng(sample).random(),
        )
    return sample


def draw_before(row: dict[str, Any]) -> dict[str, Any]:
    """The same, before the download."""
    row["before"] = (random.random(), np.random.rand(), float(torch.rand(())), rng(row).random())
    return row


def draw_thrice(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Several samples of one, made while they are asked for."""
    for number in range(3):
        yield {**sample, "number": number, "late": (random.random(), float(torch.rand(())), rng(sample).random())}


OPTIONS: dict[str, Any] = {"transforms": [draw], "predownload_transforms": [draw_before]}


def test_augmented_samples_are_equal_on_all_layouts_and_after_resumption(tmp_path: Path) -> None:
    src, layouts = make_table(tmp_path, 22), [(1, 0), (1, 2), (2, 3), (4, 0)]
    loader_options = {"collate_fn": whole}
    jobs = {
        layout: Job(src, tmp_path / "cache", *layout, 8, dataset_options=OPTIONS, loader_options=loader_options)
        for layout in layouts
    }
    reference, states = [], [jobs[1, 0].state()]
    for step in jobs[1, 0].steps(6):
        reference.append(step)
        states.append(jobs[1, 0].state())
    drawn = {dict(sample)["drawn-0"] for step in reference for sample in step}
    assert len(drawn) == 44, "positions share their numbers"
    for first, second in others(layouts):
        jobs[first].load(states[0])
        assert list(jobs[first].steps(6)) == reference
        jobs[second].load(states[2])
        assert list(jobs[second].steps(4)) == reference[2:]
    for job in jobs.values():
        job.close()


def test_the_trainers_own_generators_go_on_as_if_no_sample_was_made(tmp_path: Path) -> None:
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False, **OPTIONS) as dataset:
        before = global_states()
        for _ in dataset:
            assert global_states() == before
        dataset[3]
        assert global_states() == before


def test_a_loader_without_workers_puts_the_trainers_generators_back_once_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_collate, restored, restore = [], [], PythonGenerator.restore

    def count(generator: PythonGenerator, state: PythonState) -> None:
        restored.append(state)
        restore(generator, state)

    monkeypatch.setattr(PythonGenerator, "restore", count)

    def collate(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        at_collate.append(global_states())
        return samples

    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False, **OPTIONS) as dataset:
        reference = list(dataset)
        restored.clear()
        loader = StreamingDataLoader(dataset, batch_size=4, collate_fn=collate)
        loader.set_epoch(0)
        batches, samples = iter(loader), []  # torch draws here
        before = global_states()
        for batch in batches:
            assert global_states() == before
            samples += batch
        assert samples == reference
        assert at_collate == [before, before]
        assert len(restored) == 2, "once for each batch, not for each sample and each of its stages"


def test_a_batch_that_fails_puts_the_trainers_generators_back(tmp_path: Path) -> None:
    def fail_in_the_end(sample: dict[str, Any]) -> dict[str, Any]:
        if random.random() >= 0 and sample["__row__"] == 3:
            raise ValueError
        return sample

    options: dict[str, Any] = {"transforms": [fail_in_the_end], "on_error": "raise", "shuffle_seed": None}
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False, **options) as dataset:
        batches = iter(StreamingDataLoader(dataset, batch_size=8))
        before = global_states()
        with pytest.raises(TransformError):
            next(batches)
        assert global_states() == before


def test_who_looks_at_samples_on_their_way_to_a_loader_draws_as_if_no_sample_was_made(tmp_path: Path) -> None:
    class Watched(StreamingDataset):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for sample in super().__iter__():
                seen.append(global_states())
                yield sample

    seen: list[tuple[Any, ...]] = []
    with Watched(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False, **OPTIONS) as dataset:
        batches = iter(StreamingDataLoader(dataset, batch_size=4, collate_fn=whole))
        before = global_states()
        assert len(list(batches)) == 2
        assert seen == [before] * 8


def test_a_transform_that_reads_another_dataset_goes_on_with_its_own_numbers(tmp_path: Path) -> None:
    table = make_table(tmp_path, 8)
    with StreamingDataset(table, tmp_path / "other", show_progress=False, infinite_iteration=True, **OPTIONS) as other:
        of_other = iter(StreamingDataLoader(other, batch_size=2, collate_fn=whole))

        def draw_around(sample: dict[str, Any], *, reads: bool) -> dict[str, Any]:
            first = random.random(), np.random.rand()
            if reads:
                other[3], next(of_other)
            sample["drawn"] = (first, random.random(), np.random.rand(), float(torch.rand(())))
            return sample

        drawn = []
        for reads in (False, True):
            transforms = [partial(draw_around, reads=reads)]
            with StreamingDataset(table, tmp_path / "cache", transforms=transforms, show_progress=False) as dataset:
                batches = StreamingDataLoader(dataset, batch_size=4, collate_fn=whole)
                drawn.append([dict(sample)["drawn"] for batch in batches for sample in batch])
        assert drawn[0] == drawn[1]


def test_a_failing_transform_restores_the_generators_too(tmp_path: Path) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(random.random())

    options: dict[str, Any] = {"on_error": "skip", "max_failure_ratio": 1.0, "show_progress": False}
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", transforms=[fail], **options) as dataset:
        before = global_states()
        assert list(dataset) == []
        assert global_states() == before


def test_several_samples_of_a_row_draw_the_same_numbers_whatever_happens_between_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"transforms": [draw_thrice, draw], "show_progress": False}
    with StreamingDataset(make_table(tmp_path, 4), tmp_path / "cache", **options) as dataset:
        reference = list(dataset)
        dataset.set_epoch(0)
        again = []
        for sample in dataset:
            again.append(sample)
            random.random(), np.random.rand(), torch.rand(3)
        assert again == reference
        assert len({sample["late"] for sample in reference}) == 12
        assert len({sample["drawn-0"] for sample in reference}) == 12


def test_no_private_field_leaves_with_a_sample(tmp_path: Path) -> None:
    with StreamingDataset(make_table(tmp_path, 4), tmp_path / "cache", show_progress=False, **OPTIONS) as dataset:
        assert set(next(iter(dataset))) == {
            "index", "score", "before", "drawn-0", "drawn-1", "__sample_key__", "__row__", "__epoch__",
        }  # fmt: skip


def test_epochs_and_seeds_change_the_numbers(tmp_path: Path) -> None:
    drawn = []
    for seed in (1, 2):
        with StreamingDataset(
            make_table(tmp_path, 8), tmp_path / "cache", shuffle_seed=seed, show_progress=False, **OPTIONS
        ) as dataset:
            drawn += [sample["drawn-0"] for _ in range(2) for sample in dataset]
    assert len(set(drawn)) == 32


def test_seeding_the_global_generators_can_be_switched_off(tmp_path: Path) -> None:
    with StreamingDataset(
        make_table(tmp_path, 8), tmp_path / "cache", seed_transforms=False, show_progress=False, **OPTIONS
    ) as dataset:
        random.seed(4)
        expected = [random.random() for _ in range(3)]
        random.seed(4)
        sample = dataset[0]
        assert [sample["before"][0], sample["drawn-0"][0], sample["drawn-1"][0]] == expected
        assert sample["drawn-0"][3] == dataset[0]["drawn-0"][3]  # its own generator is seeded all the same
