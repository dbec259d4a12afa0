"""A dataset as the rows that are selected of a table: how many there are, and the sample of any of them, by its number."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Self, SupportsIndex

import numpy as np
import torch

from sqlstream.cache import Cache
from sqlstream.cache.session import FailureRecord
from sqlstream.index.file.index import Index
from sqlstream.stream.frameworks.plain_loader import warn_of_ranks
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.run.schedule import Schedule


class SelectedRows:
    """What a `StreamingDataset` is beside a stream: rows in the order of the index, whatever the order of the stream is."""

    name: str
    """Name in reports."""
    _pipeline: Pipeline
    _schedule: Schedule

    def __len__(self) -> int:
        """Return the number of selected rows; UnknownLengthError while a lazy index does not know how many its filter keeps.

        These are the rows of all ranks: `num_steps` counts the batches of one.
        """
        warn_of_ranks(lambda: self._schedule.world, self._pipeline.warnings)
        return len(self.index)

    def __getitem__(self, index: Any) -> Any:
        """Return the sample of selected row `index` (negative from the end), after transforms; a list if they make several.

        A slice, or a list, range or array of numbers, gives the list of their samples, whose objects are acquired together. The
        paths in a sample stay valid for the next 64 accesses of this process.

        Raises:
            TypeError: `index` is neither a whole number nor several of them.
            IndexError: There is no such row.
            SampleError, StorageError: It cannot be made; never another row's sample.
        """
        if type(index) is not int:  # most accesses are
            if isinstance(index, slice):
                return self._sliced(index)
            if isinstance(index, list | range) or (isinstance(index, np.ndarray | torch.Tensor) and index.ndim == 1):
                return self.__getitems__(_without_mask(index))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """Return the samples of several selected rows, in the order asked; their objects are acquired together."""
        engine = self._pipeline.access_engine or self._pipeline.begin_accesses()
        return engine.rows(indices, int(self._schedule.counter.next_epoch))

    def _sliced(self, rows: slice) -> list[Any]:
        index = self.index
        was_known = index.known_length is not None
        try:
            return self.__getitems__(_numbers_of(rows, index))
        except IndexError:
            if was_known or index.known_length is None:
                raise
        return self.__getitems__(_numbers_of(rows, index))  # a lazy index has counted its rows on the way

    @property
    def index(self) -> Index:
        """The index that the rows come from."""
        return self._pipeline.index

    @property
    def cache(self) -> Cache:
        """The cache that the objects go through."""
        return self._pipeline.cache

    def get_identifier_desc(self) -> str:
        """Return a line that names this dataset in logs."""
        known = self.index.known_length
        return f"{self.name} ({'an unknown number of' if known is None else known} samples of {self.index.src})"

    def failures(self) -> list[FailureRecord]:
        """Return what failed in this cache, in any process: URLs that could not be downloaded, rows that made no sample.

        Each names row, URL, global step (in its epoch), error, count and time; the most frequent first.
        """
        return self.cache.failures()

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all pins back, end helper process and threads, close all files. Also at the end of a `with` block."""
        self._pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        """Return name, rows, source, columns, seed and cache directory; nothing is read."""
        seed = self._schedule.identity.shuffle_seed
        order = "" if seed is None else f"; shuffle_seed={seed}"
        closed = "; closed" if self.cache.is_closed else ""
        return f"{type(self).__name__}({self.name}: {self.index.summary}{order}; cache {self.cache.path}{closed})"


def _numbers_of(rows: slice, index: Index) -> range:
    """Return the numbers of the rows of a slice; while a lazy index does not know its length, as if there were enough.

    Raises:
        TypeError: Its bounds are no whole numbers.
        UnknownLengthError: It ends where the rows end, or counts from there, and how many there are is not known.
    """
    bounds = (rows.start, rows.stop, rows.step)
    if not all(bound is None or hasattr(bound, "__index__") for bound in bounds):
        shown = ":".join("" if bound is None else repr(bound) for bound in bounds[: 2 if rows.step is None else 3])
        raise TypeError(f"dataset[{shown}]: the bounds of a slice are whole numbers, such as dataset[0:3]")
    if index.known_length is None and rows.stop is not None and rows.stop >= 0 and (rows.start or 0) >= 0:
        return range(*rows.indices(max(rows.start or 0, rows.stop)))
    return range(*rows.indices(len(index)))


def _without_mask(numbers: Any) -> Any:
    """Return what are numbers of rows, and not, as numpy and torch allow it, True or False for each row.

    Raises:
        TypeError: It is a mask.
    """
    is_mask = "bool" in str(numbers.dtype) if hasattr(numbers, "dtype") else any(type(one) is bool for one in numbers)
    if is_mask:
        raise TypeError(
            f"dataset[{reprlib.repr(numbers)}]: True and False are no numbers of rows: give the numbers, or choose rows by a "
            "condition with where="
        )
    return numbers
