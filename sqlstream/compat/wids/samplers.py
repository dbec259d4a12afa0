"""The samplers of wids: the same numbers in the same order."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch.distributed
from torch.utils.data import Sampler

from sqlstream.errors import ConfigError

_EPOCH_STEP = 1289738273
"""Difference of the seeds of two epochs, as theirs has it: the orders are the same."""


def _shuffled(
    ranges: Sequence[range], rng: random.Random, *, shuffles_samples: bool = True, shuffles_ranges: bool = True
) -> Iterator[int]:
    """Yield the numbers of ranges, one range after the other."""
    order = list(range(len(ranges)))
    if shuffles_ranges:
        rng.shuffle(order)
    for place in order:
        numbers = list(ranges[place])
        if shuffles_samples:
            rng.shuffle(numbers)
        yield from numbers


class ShardListSampler(Sampler[int]):
    """The samples of one shard after the other, shards and samples shuffled; the shards of the first epoch are in order.

    Args:
        dataset: A `ShardListDataset`.
        lengths: Samples of each shard; None: those of the dataset.
        seed: Seed of the order.
        shufflefirst: Shuffle the shards of the first epoch, too.
    """

    def __init__(
        self, dataset: Any, *, lengths: Sequence[int] | None = None, seed: int = 0, shufflefirst: bool = False
    ) -> None:
        ends = [*accumulate(dataset.lengths if lengths is None else lengths)]
        self.ranges = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.seed, self.shufflefirst, self.epoch = seed, shufflefirst, 0

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of an epoch."""
        rng = random.Random(self.seed + _EPOCH_STEP * self.epoch)
        yield from _shuffled(self.ranges, rng, shuffles_ranges=self.shufflefirst or self.epoch > 0)
        self.epoch += 1


ShardedSampler = ShardListSampler


class ChunkedSampler(Sampler[int]):
    """The samples of one chunk of the numbers after the other, chunks and samples shuffled.

    Args:
        dataset: A dataset with a length.
        dslength_per_replica: What `len()` returns; -1: the number of samples.
        num_samples: How many of the first samples, or first and last; None: all.
        chunksize: Samples of a chunk.
        seed: Seed of the order.
        shuffle: Shuffle chunks and samples.
        shufflefirst: Shuffle the chunks of the first epoch, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        dslength_per_replica: int = -1,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = True,
        shufflefirst: bool = False,
    ) -> None:
        low, high = num_samples if isinstance(num_samples, tuple) else (0, len(dataset) if num_samples is None else num_samples)
        self.dslength_per_replica = dslength_per_replica if dslength_per_replica > 0 else high - low
        self.ranges = [range(start, min(start + chunksize, high)) for start in range(low, high, chunksize)]
        self.seed, self.shuffle, self.shufflefirst, self.epoch = seed, shuffle, shufflefirst, 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of an epoch."""
        rng = random.Random(self.seed + _EPOCH_STEP * self.epoch)
        shuffles_ranges = self.shuffle and (self.shufflefirst or self.epoch > 0)
        yield from _shuffled(self.ranges, rng, shuffles_samples=self.shuffle, shuffles_ranges=shuffles_ranges)
        self.epoch += 1

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.dslength_per_replica


def DistributedChunkedSampler(  # noqa: N802 - theirs
    dataset: Any,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    shuffle: bool = True,
    shufflefirst: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    chunksize: int = 1000000,
) -> ChunkedSampler:
    """Return a sampler of this rank's part of the numbers, which is the same in each epoch.

    Args:
        dataset: A dataset with a length.
        num_replicas: Number of ranks; None: those of torch.distributed.
        num_samples: How many of the first samples; None: all.
        rank: This rank; None: that of torch.distributed.
        shuffle: Shuffle chunks and samples.
        shufflefirst: Shuffle the chunks of the first epoch, too.
        seed: Seed of the order.
        drop_last: Ignored, as theirs is, with a warning.
        chunksize: Samples of a chunk.

    Raises:
        ConfigError: The rank is not one of the ranks.
    """
    if drop_last is not None:
        warnings.warn("DistributedChunkedSampler ignores drop_last", stacklevel=2)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        num_replicas = num_replicas or torch.distributed.get_world_size()
        rank = torch.distributed.get_rank() if rank is None else rank
    elif num_replicas is None or rank is None:
        warnings.warn(
            "DistributedChunkedSampler: torch.distributed is not initialised; a single process is assumed", stacklevel=2
        )
        num_replicas, rank = 1, 0
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"rank={rank} is not one of num_replicas={num_replicas}: ranks count from 0")
    num_samples = num_samples or len(dataset)
    share = -(-num_samples // num_replicas)
    return ChunkedSampler(
        dataset,
        dslength_per_replica=math.ceil(len(dataset) / num_replicas),
        num_samples=(min(rank * share, num_samples), min((rank + 1) * share, num_samples)),
        chunksize=chunksize,
        seed=seed,
        shuffle=shuffle,
        shufflefirst=shufflefirst,
    )
