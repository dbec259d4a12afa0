"""The order of a lazy index with a filter: how many rows a chunk keeps is known once it has been read.

Chunks are shuffled, then the kept rows of a window of chunks. So a position needs the counts of its window and of the windows
before it only: the order is the same whether all counts are known from an earlier run, or become known on the way. Until they
are known, an epoch counts as long as the index; its end is found when it is reached, at the same position by all ranks.

Rows are numbered here by chunk: number k of a chunk is its first row's id + k, for its k-th kept row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from sqlstream.errors import UnknownLengthError
from sqlstream.order import MAX_REPLACEMENTS, BlockOrder, Int64Array, Partition, Permutation, Plan, shuffle_blocks
from sqlstream.world import World

_REPLACEMENTS = 201
"""Purpose of a permutation; another number than those in `order`."""


class Chunks(Protocol):
    """Chunks, and how many of their rows a filter keeps."""

    @property
    def bounds(self) -> Int64Array:
        """First row of each chunk, and the end: [num_chunks + 1]."""
        ...

    def sizes(self) -> Int64Array:
        """Return how many rows of each chunk are kept, -1 where it is not known yet: [num_chunks]."""
        ...


class Orders:
    """The orders of epochs, as far as they are known.

    Args:
        chunks: How many rows each chunk keeps.
        window: Chunks whose rows are shuffled together.
    """

    def __init__(self, chunks: Chunks, window: int) -> None:
        self._chunks = chunks
        self._window = window
        self._whole: dict[tuple[int | None, int], BlockOrder] = {}

    def of_epoch(self, seed: int | None, epoch: int) -> BlockOrder:
        """Return the order of an epoch, as far as it is known now."""
        order = self._whole.get((seed, epoch))
        if order is None:
            order = shuffle_blocks(self._chunks.bounds, self._window, seed, epoch, self._chunks.sizes())
            if order.is_whole:
                self._whole = {**dict(list(self._whole.items())[-1:]), (seed, epoch): order}  # this epoch's and the next one's
        return order

    def total(self) -> int | None:
        """Return the number of rows of an epoch; None while it is not known."""
        sizes = self._chunks.sizes()
        return None if (sizes < 0).any() else int(sizes.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredPlan(Plan):
    """A plan over the rows that a filter keeps; `num_samples` are all rows, kept or not."""

    orders: Orders

    def order(self, epoch: int) -> BlockOrder:
        """Return the order of an epoch, as far as it is known now."""
        return self.orders.of_epoch(self.seed, epoch)

    def _rows_at(self, epoch: int, positions: Int64Array) -> Int64Array:
        return self.order(epoch).rows_at(positions)

    def replacements(self, epoch: int, position: int) -> Iterator[int]:
        """Yield rows to try instead of the one at `position`, from the same window."""
        others_of = self.order(epoch).window_of(position)
        num_others = len(others_of) - 1
        shuffle = Permutation.keyed(num_others, _REPLACEMENTS, self.seed or 0, epoch, position)
        others = others_of.start + shuffle.forward(np.arange(min(MAX_REPLACEMENTS, num_others), dtype=np.int64))
        others += others >= position
        yield from self.rows_at(epoch, others).tolist()

    def partition(self, world: World, consumed: int = 0, first_worker: int = 0) -> Partition:
        """Return a worker's share of the rest of an epoch: exact when all counts are known, else an upper bound."""
        partition = Plan.partition(self, world, consumed, first_worker)
        total = self.orders.total()
        return partition if total is None else replace(partition, num_positions=total)

    def num_steps(self, world: World) -> int:
        """Return the steps of an epoch.

        Raises:
            UnknownLengthError: It is not known yet.
        """
        if self.orders.total() is None:
            raise UnknownLengthError(
                "the steps of an epoch are not known yet: the filter of a lazy index has not been run on all of its chunks. "
                "One whole pass finds them out, for later runs, too; or leave lazy_index_chunk_size out"
            )
        return Plan.num_steps(self, world)
