"""Samples as a subclass makes them: its `__getitem__` or `get_item` is the last transform of an iteration.

    engine ─ sample of row r ─→ MakeItem ─→ dataset[r] ─→ get_item(r) of the drop-in: the sample that the engine has made
                                                     └──→ any other row: by random access

So what it draws from the global generators depends on (seed, epoch, position) alone, as with any transform of ours, and the
objects of the row are here when it runs.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from sqlstream.transforms.base import Sample
from sqlstream.transforms.rng import PRIVATE_FIELDS
from sqlstream.transforms.stream_name import STREAM

if TYPE_CHECKING:
    from sqlstream.compat.streaming.base.dataset import StreamingDataset

_ITEM = "item"
_ADDED = ("__shard__", "__url__", "__sample_key__", "__row__", "__epoch__")
"""Fields of our samples that are not the shard's."""


class _Here(threading.local):
    """What this thread makes an item of."""

    offered: tuple[Any, int, Sample] | None = None
    """A dataset, the number of a sample of it, and that sample."""
    reads_rows = False
    """The drop-in itself asks for a row, of which no item is to be made."""


_here = _Here()


class MakeItem:
    """The last transform of a stream of a dataset whose class says what an item is.

    Args:
        dataset: The dataset.
        stream: Number of the stream.
    """

    calls_given_code = True

    def __init__(self, dataset: StreamingDataset, stream: int) -> None:
        self._dataset = dataset
        self._stream = stream
        self.__name__ = f"{type(dataset).__name__}.__getitem__"

    def __call__(self, sample: Sample) -> Sample:
        """Return a sample that holds the item."""
        here = _here
        if here.reads_rows:
            return sample
        dataset, number = self._dataset, self._dataset.first_of_stream(self._stream) + sample["__row__"]
        for name in PRIVATE_FIELDS:
            sample.pop(name, None)
        outer, here.offered = here.offered, (dataset, number, without_added(sample))
        try:
            return {_ITEM: dataset[number]}
        finally:
            here.offered = outer


def item_of(sample: Sample) -> Any:
    """Return the item that a sample holds."""
    return sample[_ITEM]


def without_added(sample: Sample) -> Sample:
    """Remove the fields that are not the shard's; return the sample."""
    for name in _ADDED:
        del sample[name]
    sample.pop(STREAM, None)
    return sample


def offered(dataset: object, number: int) -> Sample | None:
    """Return the sample that this thread makes an item of; None: it is of another dataset, or another one."""
    found = _here.offered
    return found[2] if found is not None and found[0] is dataset and found[1] == number else None


class ReadsRows:
    """While it is entered, no items are made in this thread."""

    def __enter__(self) -> None:
        self._outer, _here.reads_rows = _here.reads_rows, True

    def __exit__(self, *exception: object) -> None:
        _here.reads_rows = self._outer
