"""The rows of an engine: from an index that is built, or from one whose rows are fetched when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.index.file.index import Index
from sqlstream.order import Int64Array
from sqlstream.stream.run.shares import PLANNED_TOGETHER, SHUFFLED_TOGETHER, EpochShare


class PlannedSpan(NamedTuple):
    """Some neighbouring positions of a share, and the rows at these positions."""

    share: EpochShare
    """The share, with the end of its epoch if that has become known."""
    places: Int64Array
    """Places, counted from the share's start: [n]."""
    positions: Int64Array
    """Positions of the epoch: [n]."""
    row_ids: list[int]


class RowSource(Protocol):
    """Rows, and the order in which a share takes them."""

    def walk(self, share: EpochShare) -> Iterator[PlannedSpan]:
        """Yield what is left of a share, in order."""
        ...

    def ids_of(self, numbers: Int64Array) -> list[int]:
        """Return the ids of rows as the plan numbers them."""
        ...

    def ids_at(self, selected: Sequence[int]) -> list[int]:
        """Return the ids of selected rows, counted from 0 in the index's order.

        Raises:
            IndexError: There are not so many.
        """
        ...

    def rows(self, row_ids: Sequence[int]) -> list[dict[str, object]]:
        """Return rows, in the order asked."""
        ...

    def close(self) -> None:
        """Release what is held for later."""
        ...


class IndexRows:
    """The rows of a built index."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def walk(self, share: EpochShare) -> Iterator[PlannedSpan]:
        """Yield what is left of a share."""
        for start in range(share.taken, share.partition.num_samples, SHUFFLED_TOGETHER):
            places, positions = share.planned(start, SHUFFLED_TOGETHER)
            slots = share.slots_at(positions)
            for first in range(0, len(places), PLANNED_TOGETHER):
                some = slice(first, first + PLANNED_TOGETHER)
                row_ids = self.ids_of(share.rows_at(positions[some], slots[some]))
                yield PlannedSpan(share, places[some], positions[some], row_ids)

    def ids_of(self, numbers: Int64Array) -> list[int]:
        """Return the ids of selected rows."""
        found: list[int] = self._index.row_ids(numbers).tolist()
        return found

    def ids_at(self, selected: Sequence[int]) -> list[int]:
        """Return the ids of selected rows."""
        if self._index.selection is not None:
            return self.ids_of(np.array(selected, dtype=np.int64))
        if selected and not 0 <= min(selected) <= max(selected) < len(self._index):
            raise IndexError(f"rows {min(selected)}…{max(selected)} are not all in [0, {len(self._index)})")
        return list(map(int, selected))

    def rows(self, row_ids: Sequence[int]) -> list[dict[str, object]]:
        """Return rows by id."""
        return self._index.rows(row_ids)

    def close(self) -> None:
        """Nothing is held."""
