"""Samples of a dataset for a storm: their objects, and what their transforms draw."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sqlstream import StreamingDataset
from sqlstream.errors import SqlStreamError
from sqlstream.transforms import rng as rng_of
from sqlstream.transforms.presets import LoadFromDiskTransform
from tests.cache.hostile_server import trouble_with
from tests.cache.storm_reads import NUM_RETRIES, OPTIONS, Reads, Task, limit_of


def draw(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform: draw from the sample's own generator and from those of the process, letting others draw in between."""
    drawn = []
    for _ in range(2):
        drawn += [int(rng_of(sample).integers(1 << 30)), random.getrandbits(30), int(np.random.randint(1 << 30))]
        drawn.append(int(torch.randint(1 << 30, ())))
        time.sleep(0.0002)
    return {**sample, "draws": drawn}


def open_dataset(task: Task, *, has_objects: bool) -> StreamingDataset:
    """Open a dataset of all objects on the cache of the storm."""
    return StreamingDataset(
        task.table,
        task.root / ("disk/cache" if has_objects else "plain"),
        columns_to_download=["object"] if has_objects else [],
        transforms=[LoadFromDiskTransform(["object"]), draw] if has_objects else [draw],
        shuffle_seed=5,
        cache_limit=limit_of(task.sizes),
        storage_options=OPTIONS,
        num_downloading_retries=NUM_RETRIES,
        num_random_access_retries=0,
        show_progress=False,
    )


def drawn_alone(task: Task) -> list[list[int]]:
    """Return what each row draws where no other thread runs."""
    with open_dataset(task, has_objects=False) as dataset:
        return [list(sample["draws"]) for sample in dataset.__getitems__(range(len(task.urls)))]


def take_samples(reads: Reads, dataset: StreamingDataset, numbers: Sequence[int]) -> None:
    """Take samples of a dataset, and see what they have drawn."""
    for number in numbers:
        try:
            sample = dataset[number]
        except SqlStreamError as error:
            reads.told.note_error(error)
            continue
        reads.note(trouble_with(sample["object"], number, reads.task.sizes[number]))
        reads.told.counts["samples"] += 1
        if sample["draws"] != reads.task.draws[number]:
            reads.told.troubles.append(f"row {number} drew {sample['draws']}, not {reads.task.draws[number]}")
