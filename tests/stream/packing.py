"""A dataset whose workers pack what they make, without an index and a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.utils.data import IterableDataset, get_worker_info

from sqlstream.stream.transport.packing import BatchPacker
from sqlstream.transforms.base import Sample


class Samples(IterableDataset[Sample]):
    """So many samples, in turn from each worker; packed or not."""

    def __init__(self, sample_of: Callable[[int], Sample], num_samples: int, packing: BatchPacker | None = None) -> None:
        self.sample_of = sample_of
        self.num_samples = num_samples
        self.packing = packing

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        samples = map(self.sample_of, range(first, self.num_samples, step))
        return samples if self.packing is None else self.packing.gather(samples)
