"""The selected rows of an index, sorted by a number of each: a table beside the index, made by a counting sort.

    numbers_by_id ─ the numbers of rows, by id ─ write_sorted_rows ─→ file ─→ SortedRows.rows_at, numbers_of

Batches by bucket (the number is that of the bucket) and packs (it is the length) are made from it. As int64 of a .npy file it
holds: bytes of the head, and sorted rows; the head, padded, which says what the numbers mean; the selected rows, sorted; the
number of each row id, several in a word. Memory is that of the head, whatever the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from sqlstream.errors import QueryError
from sqlstream.index.file.index import MAX_MAPPED_BYTES, Index
from sqlstream.index.file.npy import finish_npy, load_npy, unload, write_header
from sqlstream.index.file.workplace import Workplace
from sqlstream.index.types.models import ROW
from sqlstream.order.permute import Int64Array

LAYOUT_VERSION = 2
"""Changes with the file."""
WORD_BYTES = 8


class SortedRows:
    """A table of sorted rows; pickles as a path, and maps the file on first use.

    Args:
        path: The file.
        digest: What decides it, beside the index: it belongs into a run's state.
    """

    number_type: ClassVar[str]
    """The type of numbers, as numpy names it; several of them fill a word."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self._mapped: np.memmap | None = None
        self._numbers: np.ndarray | None = None
        words = self._words()  # [all]
        num_bytes, self.num_rows = int(words[0]), int(words[1])
        """Sorted rows; those that are left out are none of them."""
        self._first = 2 + -(-num_bytes // WORD_BYTES)
        self.head = np.asarray(words[2 : self._first]).tobytes()[:num_bytes]
        """What the numbers mean."""

    def __reduce__(self) -> tuple[type[Self], tuple[Path, str]]:
        """Pickle the path: another process maps the file itself."""
        return type(self), (self.path, self.digest)

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the selected rows at places of the table: [n]."""
        words = self._words()  # [all]
        rows: Int64Array = np.asarray(words[self._first + places], np.int64)  # [n]
        self._release(words)
        return rows

    def numbers_of(self, row_ids: Sequence[int]) -> list[int]:
        """Return the numbers of rows by id."""
        if self._numbers is None:
            self._numbers = self._words()[self._first + self.num_rows :].view(self.number_type)  # [row ids, padded]
        found: list[int] = self._numbers[np.asarray(row_ids, np.int64)].tolist()
        self._release(self._words())
        return found

    def _words(self) -> np.memmap:
        if self._mapped is None:
            self._mapped = load_npy(self.path)
        return self._mapped

    def _release(self, words: np.memmap) -> None:
        if words.nbytes > MAX_MAPPED_BYTES:  # else a worker's memory grows with the table
            unload(words)


def numbers_by_id(index: Index, number_type: str, place: Workplace) -> np.memmap:
    """Return room for a number of each row id, zeros, which is the disk's memory and not ours: [row ids, padded]."""
    per_word = WORD_BYTES // np.dtype(number_type).itemsize
    shape = (max(1, -(-index.num_rows // per_word)) * per_word,)
    return np.memmap(place.temporary("numbers"), number_type, "w+", shape=shape)


def checked_ids(ids: Sequence[int], index: Index, what: str) -> Int64Array:
    """Return the row ids that a query over an index gave: [n].

    Raises:
        QueryError: They are none; `what` says whose query it was.
    """
    found = np.asarray(ids)  # [n]
    if found.dtype.kind != "i" or found.min() < 0 or found.max() >= index.num_rows:
        raise QueryError(f"{what}: the index's query gives a column {ROW!r} that holds no row ids: name it differently")
    return found.astype(np.int64)  # [n]


def selected(index: Index, by_id: np.memmap, rows_at_a_time: int) -> Iterator[tuple[Int64Array, np.ndarray]]:
    """Yield selected rows and their numbers, some at a time: [n], [n]."""
    for start in range(0, len(index), rows_at_a_time):
        rows = np.arange(start, min(start + rows_at_a_time, len(index)))  # [n]
        yield rows, np.asarray(by_id[index.row_ids(rows)])


def write_sorted_rows(
    path: Path,
    head: bytes,
    chunks: Iterator[tuple[Int64Array, np.ndarray]],
    rank_of: Callable[[np.ndarray], Int64Array],
    sizes: Int64Array,
    by_id: np.memmap,
) -> None:
    """Write a table.

    Args:
        path: The file.
        head: What the numbers mean.
        chunks: Selected rows and their numbers, rising.
        rank_of: From numbers to the places of their groups in the order of the table; rows beyond the last are left out.
        sizes: Rows of each group: [groups].
        by_id: The number of each row id.
    """
    padded = head + b" " * (-len(head) % WORD_BYTES)
    first, num_rows = 2 + len(padded) // WORD_BYTES, int(sizes.sum())
    numbers = by_id.view("<i8")  # [words]
    count = first + num_rows + len(numbers)
    with open(path, "w+b") as file:
        write_header(file, count)
        offset = file.tell()
        file.truncate(offset + WORD_BYTES * count)
        words = np.memmap(path, "<i8", "r+", offset=offset, shape=(count,))  # [count]; the disk's, not ours
        words[:2] = len(head), num_rows
        words[2:first] = np.frombuffer(padded, "<i8")
        next_place = first + np.cumsum(sizes) - sizes  # [groups]
        for rows, of_rows in chunks:
            rank = rank_of(of_rows)  # [n]
            in_turn = np.argsort(rank, kind="stable")  # [n]
            in_turn = in_turn[: np.searchsorted(rank[in_turn], len(sizes))]  # [m]
            rank = rank[in_turn]  # [m]
            here, begins, counts = np.unique(rank, return_index=True, return_counts=True)  # [g], [g], [g]
            words[next_place[rank] + np.arange(len(rank)) - np.repeat(begins, counts)] = rows[in_turn]
            next_place[here] += counts
        words[first + num_rows :] = numbers
        words.flush()
        finish_npy(file, count)
