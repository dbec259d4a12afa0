"""Datasets that store what they decode, and what tests compare of samples."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sqlstream import StreamingDataset
from sqlstream.errors import DecodeError
from sqlstream.order import Int64Array
from sqlstream.stream.iterated import IteratedDataset
from sqlstream.transforms.base import Sample, Transform
from sqlstream.transforms.presets import CacheTransform
from tests.stream.sources import Photos

SIZE = 4000
"""Bytes of the tensor that `Decode` makes."""


class Decode:
    """Stands in for a decoder: a tensor that depends on the file, and a line in a log for each call, from any process.

    Args:
        log: The file.
        size: Of the tensor.
    """

    def __init__(self, log: Path, size: int = SIZE) -> None:
        self.log = log
        self.size = size

    def __call__(self, sample: Sample) -> Sample:
        with self.log.open("a") as log:
            log.write(f"{sample['__row__']}\n")
        digest = hashlib.sha256(Path(sample.pop("image")).read_bytes()).digest()
        sample["pixels"] = torch.tensor(list(digest) * (self.size // 32), dtype=torch.uint8)  # [n]
        return sample


def num_decoded(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def opened(photos: Photos, folder: Path, *after: Transform, is_stored: bool = True, **options: Any) -> StreamingDataset:
    """A dataset that decodes photos, stores them decoded if `is_stored`, and goes on with `after`."""
    before = [Decode(folder / "log")]
    transforms = [CacheTransform("decoded", before) if is_stored else before[0], *after]
    return with_transforms(photos, folder / ("cache" if is_stored else "plain"), transforms, **options)


def with_transforms(photos: Photos, directory: Path, transforms: Sequence[Transform], **options: Any) -> StreamingDataset:
    """A dataset of photos in a cache directory of its own."""
    defaults = {
        "columns_to_download": ["image"],
        "shuffle_seed": 7,
        "batch_size": 4,
        "show_progress": False,
        "none_to_empty_str": True,
    }
    return StreamingDataset(photos.src, directory, transforms=transforms, **{**defaults, "cache_limit": None, **options})


def rows_in_order(dataset: IteratedDataset, epoch: int, start: int, stop: int) -> Int64Array:
    """The rows at positions `[start, stop)` of an epoch, as the dataset's order has them."""
    return dataset.schedule.steps.order.rows_at(epoch, np.arange(start, stop)).row


def whole(samples: list[dict[str, Any]]) -> list[tuple[tuple[str, Any], ...]]:
    return [tuple(sorted(sample.items())) for sample in samples]


def global_states() -> tuple[Any, ...]:
    numpy_state = np.random.get_state(legacy=False)
    return random.getstate(), numpy_state["state"]["key"].tobytes(), torch.get_rng_state().numpy().tobytes()


class Refuse:
    """Fails on some rows.

    Args:
        rows: Their numbers.
    """

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def __call__(self, sample: Sample) -> Sample:
        if sample["__row__"] in self.rows:
            raise DecodeError(f"row {sample['__row__']}")
        return sample
