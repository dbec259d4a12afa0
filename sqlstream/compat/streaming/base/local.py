"""MosaicML's `LocalDataset`: shards on this machine as a map of torch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from sqlstream.compat.streaming.base.array import Array
from sqlstream.compat.streaming.base.dataset import StreamingDataset


class LocalDataset(Array, Dataset[Any]):
    """The samples of shards in a local directory, by number.

    Args:
        local: The directory.
        split: Subdirectory of it.

    Raises:
        ConfigError: It has no index of shards, or they hold pickles.
    """

    def __init__(self, local: str, split: str | None = None) -> None:
        self.local = local
        self.split = split or ""
        self._dataset = StreamingDataset(local=local, split=split)
        self.shards = self._dataset.shards
        self.num_samples = self._dataset.num_samples

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.num_samples

    def get_item(self, sample_id: int) -> dict[str, Any]:
        """Return a sample by its number.

        Raises:
            IndexError: There is no such sample.
        """
        sample: dict[str, Any] = self._dataset.get_item(sample_id)
        return sample
