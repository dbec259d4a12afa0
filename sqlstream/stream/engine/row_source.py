"""The rows of an engine: from an index that is built, or from one whose rows are fetched when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sqlstream.index.file.index import Index
from sqlstream.order import Int64Array


class RowSource(Protocol):
    """The rows of one dataset, as its order numbers them."""

    @property
    def num_ahead(self) -> int:
        """Rows that are announced (`expect`) before they are needed; 0: all are here."""

    @property
    def ids_are_numbers(self) -> bool:
        """All rows are selected: the id of a row is its number."""

    @property
    def known_length(self) -> int | None:
        """Selected rows; None while it is not known."""

    def __len__(self) -> int:
        """Return the number of selected rows.

        Raises:
            UnknownLengthError: It is not known.
        """

    def expect(self, numbers: Int64Array) -> None:
        """Begin to fetch what rows need; does not wait."""

    def expect_chunks(self, chunks: Int64Array) -> None:
        """Begin to fetch chunks; does not wait."""

    def count(self, chunks: Int64Array) -> None:
        """Run the filter, so that it becomes known how many rows of some of these chunks are kept."""

    def check_rows(self) -> None:
        """Raise QueryError if a filter keeps no row, and all chunks are counted."""

    def ids_of(self, numbers: Int64Array) -> list[int]:
        """Return the ids of rows."""

    def ids_at(self, selected: Sequence[int]) -> list[int]:
        """Return the ids of selected rows, counted from 0 in the index's order.

        Raises:
            IndexError: There are not so many.
        """

    def rows(self, row_ids: Sequence[int]) -> list[dict[str, object]]:
        """Return rows, in the order asked."""

    def stored_rows(self, row_ids: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return rows as an index file has them, in the order asked."""

    def close(self) -> None:
        """Release what is held for later."""


class IndexRows:
    """The rows of a built index."""

    num_ahead = 0

    def __init__(self, index: Index) -> None:
        self._index = index
        self.ids_are_numbers = index.selection is None
        self.known_length = len(index)
        self.rows, self.stored_rows = index.rows, index.stored_rows

    def __len__(self) -> int:
        return self.known_length

    def expect(self, numbers: Int64Array) -> None:
        """Nothing is fetched."""

    def expect_chunks(self, chunks: Int64Array) -> None:
        """There are no chunks."""

    def count(self, chunks: Int64Array) -> None:
        """All is counted."""

    def check_rows(self) -> None:
        """An epoch may be empty."""

    def ids_of(self, numbers: Int64Array) -> list[int]:
        """Return the ids of selected rows."""
        found: list[int] = self._index.row_ids(numbers).tolist()
        return found

    def ids_at(self, selected: Sequence[int]) -> list[int]:
        """Return the ids of selected rows."""
        return self.ids_of(np.array(selected, dtype=np.int64))

    def close(self) -> None:
        """Nothing is held."""
