"""Samples as a subclass makes them: its `__getitem__` or `get_item` is the last transform of an iteration.

    engine ─ sample of row r ─→ MakeItem ─→ dataset[r] ─→ get_item(r) of the drop-in: the sample that the engine has made
                                                     └──→ any other row: by random access

So what it draws from the global generators depends on (seed, epoch, position) alone, as with any transform of ours, and the
objects of the row are here when it runs.
"""

from __future__ import annotations

import threading
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from sqlstream.transforms.base import Sample
from sqlstream.transforms.draw_free import GivenCode
from sqlstream.transforms.rng import RNG_KEY
from sqlstream.transforms.stream_name import STREAM

if TYPE_CHECKING:
    from sqlstream.compat.streaming.base.dataset import StreamingDataset

_ITEM = "item"
_METHODS = ("__getitem__", "get_item")
"""Methods that give items, which a subclass may override."""


class _Here(threading.local):
    """What this thread makes an item of."""

    offered: tuple[Any, int, Sample] | None = None
    """A dataset, the number of a sample of it, and that sample."""
    reads_rows = False
    """The drop-in itself asks for a row, of which no item is to be made."""


_here = _Here()


def methods_of(kind: type) -> frozenset[Any]:
    """Return the methods of a class and its bases that give items."""
    return frozenset(vars(base)[name] for base in kind.__mro__ for name in _METHODS if name in vars(base))


class MakeItem:
    """The last transform of a stream of a dataset whose class says what an item is.

    Args:
        dataset: The dataset.
        ours: Methods that its class may inherit: they read samples, and draw nothing.
    """

    calls_given_code = True

    def __init__(self, dataset: StreamingDataset, ours: frozenset[Any]) -> None:
        self._dataset = dataset
        self._ours = ours
        self.first = 0
        """Number of the first sample of the stream."""
        self.__name__ = f"{type(dataset).__name__}.__getitem__"

    @property
    def given_code(self) -> GivenCode:
        """What a subclass may have of its own, where items are made."""
        return GivenCode(asked=tuple((self._dataset, name) for name in (*_METHODS, "size")), ours=self._ours)

    def __call__(self, sample: Sample) -> Sample:
        """Return a sample that holds the item."""
        here = _here
        if here.reads_rows:
            return sample
        dataset, number, outer = self._dataset, self.first + sample["__row__"], here.offered
        del sample[RNG_KEY], sample["__shard__"], sample["__url__"], sample["__sample_key__"], sample["__row__"]
        del sample["__epoch__"]  # STREAM comes behind all transforms
        here.offered = (dataset, number, sample)
        try:
            return {_ITEM: dataset[number]}
        finally:
            here.offered = outer


item_of = itemgetter(_ITEM)
"""Returns the item that a sample holds."""


def without_added(sample: Sample) -> Sample:
    """Remove the fields that are not the shard's; return the sample."""
    del sample["__shard__"], sample["__url__"], sample["__sample_key__"], sample["__row__"], sample["__epoch__"]
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
