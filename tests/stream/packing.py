"""Batches that a worker packs, without an index and a cache."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from sqlstream.stream.transport.arena import Arena, OpenArenas
from sqlstream.stream.transport.packed_collate import NUM_SPARE_SLOTS, batch_of
from sqlstream.stream.transport.packing import BatchPacker, PackedBatch
from sqlstream.transforms.base import Sample


class Samples(IterableDataset[Sample]):
    """So many samples, in turn from each worker."""

    def __init__(self, sample_of: Callable[[int], Sample], num_samples: int) -> None:
        self.sample_of = sample_of
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(self.sample_of, range(first, self.num_samples, step))


class Packing:
    """A worker and its trainer in one process."""

    def __init__(self, prefetch_factor: int, *, gives_views: bool = False) -> None:
        self.arena = Arena(prefetch_factor + NUM_SPARE_SLOTS)
        self.arenas = OpenArenas()
        self.packer = BatchPacker(self.arena, self.arenas.token, gives_views=gives_views)

    def __call__(self, samples: Iterable[Sample]) -> PackedBatch:
        """Return the batch that torch's default makes of samples, on its way."""
        self.packer.begin()
        return self.packer.pack(batch_of(list(samples), self.packer.stack))

    def send(self, batch: Any) -> Any:
        """Return any batch as the trainer gets it."""
        self.packer.begin()
        return sent(self.packer.pack(batch))

    def is_taken(self) -> list[bool]:
        """Return for each slot whether the trainer has it."""
        gc.collect()
        return [bool(flag) for flag in self.arena.memory[: self.arena.num_slots]]


def sent(batch: Any) -> Any:
    """Return a batch as the trainer gets it."""
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(batch)))
