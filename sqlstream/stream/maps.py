"""The dataset as a map with a sampler of batches, for loaders that take samples by index, in the order of the stream.

DataLoader(MapView(dataset), batch_sampler=EpochBatches(dataset, batch_size=16))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, Sampler

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.stream.dataset import StreamingDataset


class MapView(Dataset[Any]):
    """A StreamingDataset that torch takes for a map: `DataLoader` then allows samplers and batch samplers.

    Args:
        dataset: The dataset; it stays usable by itself.
    """

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return the sample of selected row `index`."""
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of several selected rows; their objects are acquired together."""
        return self.dataset.__getitems__(indices)


class EpochBatches(Sampler[list[int]]):
    """The selected rows of each of this rank's batches, as the stream would give them; each iteration is the next epoch.

    Args:
        dataset: The dataset whose order they have.
        batch_size: Samples of this rank's batch.

    Raises:
        ConfigError: The dataset has `refresh`, which only iterations of it or of a StreamingDataLoader can heed; or its batches
            are no rows by number: of packs, or of a lazy index that finds out on the way which rows there are.
    """

    def __init__(self, dataset: StreamingDataset, batch_size: int) -> None:
        batch_size = check_at_least("batch_size", batch_size, 1)
        if dataset._pipeline.options.refresh is not None:
            raise ConfigError("refresh='epoch' changes rows by number: iterate the dataset, or a StreamingDataLoader of it")
        if dataset._pipeline.options.order.is_packed:
            raise ConfigError(
                "batches=Packs(…) makes samples of several rows each: iterate a StreamingDataLoader of the dataset"
            )
        if isinstance(dataset.index, LazyIndex) and dataset.index.learns_sizes:
            raise ConfigError(
                f"which rows {dataset.index.src} has by number is found out on the way, since its index is lazy: leave "
                "lazy_index_chunk_size out, or iterate a StreamingDataLoader of the dataset"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self.epoch = 0

    def __len__(self) -> int:
        """Return the batches of this rank in an epoch."""
        return self._dataset.schedule.batches_of(self.epoch, self._batch_size).partition.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the next epoch."""
        share = self._dataset.schedule.batches_of(self.epoch, self._batch_size)
        self.epoch += 1
        for positions in share.current_partition.blocks(block=self._batch_size):
            yield share.order.rows_at(share.epoch, positions).row.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self.epoch = check_at_least("epoch", epoch, 0)
