"""How long each row of an index is: a table beside the index, made by a counting sort in two walks.

    open_lengths(index, "num_tokens", directory) → LengthTable → order.packed.Packed

The expression sees the rows that the index's filter keeps, in the sandbox, as weights do. The file is immutable and named by
what decides it, so it is made once per node, whatever the packs, and a resumed run finds the same one. As int64 of a .npy file
it holds: the number of distinct lengths, and of rows; the lengths, rising; the rows of each; the selected rows, sorted by
length; the length of each row id, two of 32 bits in a word. Memory is that of the lengths, whatever the rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sqlstream.errors import ConfigError, QueryError
from sqlstream.index.file.index import MAX_MAPPED_BYTES, Index
from sqlstream.index.file.intact import is_there
from sqlstream.index.file.npy import finish_npy, load_npy, unload, write_header
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.sql.expressions import one_expression, rows_of
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.types.models import FORMAT_VERSION, ROW, fingerprint, quote
from sqlstream.order.permute import Int64Array
from sqlstream.progress import progress

LENGTHS_VERSION = 1
"""Changes whenever a table would change."""
MAX_LENGTH = (1 << 32) - 1
"""A length has 32 bits in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTuning:
    """Sizes of what is built."""

    max_lengths: int = 1 << 20
    """More distinct lengths would take gigabytes as a plan."""
    rows_at_a_time: int = 65_536
    """Rows that are in memory together: half a megabyte a column. Arbitrary."""


class LengthTable:
    """The rows by length; pickles as a path, and maps the file on first use.

    Args:
        path: The file.
        digest: What decides it, beside the index: it belongs into a run's state.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self.digest = digest
        self._mapped: np.memmap | None = None
        words = self._words()  # [all]
        num_lengths, self.num_rows = int(words[0]), int(words[1])
        """Selected rows."""
        self.lengths: Int64Array = np.array(words[2 : 2 + num_lengths])  # [L]
        """The distinct lengths, rising."""
        self.counts: Int64Array = np.array(words[2 + num_lengths : 2 + 2 * num_lengths])  # [L]
        """Rows of each."""
        self._first = 2 + 2 * num_lengths

    def __reduce__(self) -> tuple[type[Self], tuple[Path, str]]:
        """Pickle the path: another process maps the file itself."""
        return type(self), (self.path, self.digest)

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the selected rows at places of the table: [n]."""
        words = self._words()  # [all]
        rows: Int64Array = np.asarray(words[self._first + places], np.int64)  # [n]
        self._release(words)
        return rows

    def lengths_of(self, row_ids: Sequence[int]) -> list[int]:
        """Return the lengths of selected rows by id."""
        words = self._words()  # [all]
        lengths = words[self._first + self.num_rows :].view("<u4")  # [row ids, padded]
        found: list[int] = lengths[np.asarray(row_ids, np.int64)].tolist()
        self._release(words)
        return found

    def _words(self) -> np.memmap:
        if self._mapped is None:
            self._mapped = load_npy(self.path)
        return self._mapped

    def _release(self, words: np.memmap) -> None:
        if words.nbytes > MAX_MAPPED_BYTES:  # else a worker's memory grows with the table
            unload(words)


def open_lengths(
    index: Index, length: str, directory: Path, *, show_progress: bool = False, tuning: LengthTuning | None = None
) -> LengthTable:
    """Return the table of lengths, made when no earlier run has done it.

    Args:
        index: The rows, and their filter when there is one.
        length: SQL over a row, or a column.
        directory: Where index files are.
        show_progress: Show a bar if stderr is a terminal.
        tuning: Sizes; None: the usual ones.

    Raises:
        QueryError: The expression does not run.
        ConfigError: A row has no length, or there are too many lengths.
    """
    parts = {"format": FORMAT_VERSION, "version": LENGTHS_VERSION, "length": length}
    key = fingerprint({**parts, "index": index.fingerprint})
    path = directory / f"{key}.lengths.npy"

    def build(place: Workplace) -> Path:
        return _build(index, length, place, path.name, tuning or LengthTuning(), show_progress=show_progress)

    build_once(directory, key, lambda: path if is_there(path) else None, build, show_progress=show_progress)
    index.hold(path)
    os.utime(path)  # last used
    return LengthTable(path, fingerprint(parts))


def _build(index: Index, length: str, place: Workplace, name: str, tuning: LengthTuning, *, show_progress: bool) -> Path:
    """Write the table: each row's length first, then the rows in two walks over those."""
    num_words = -(-index.num_rows // 2)
    by_id = np.memmap(place.temporary("lengths"), "<u4", "w+", shape=(max(1, num_words) * 2,))  # [row ids, padded]; on disk
    _evaluate(index, length, by_id, place, tuning, show_progress=show_progress)
    histogram: dict[int, int] = {}
    for _, values in _chunks(index, by_id, tuning.rows_at_a_time):
        distinct, numbers = np.unique(values, return_counts=True)  # [l], [l]
        for value, number in zip(distinct.tolist(), numbers.tolist(), strict=True):
            histogram[value] = histogram.get(value, 0) + number
        if len(histogram) > tuning.max_lengths:
            raise ConfigError(
                f"packs by {length!r}: the rows have more than {tuning.max_lengths} distinct lengths: round them up in SQL, as "
                "in (num_tokens + 15) / 16 * 16"
            )
    lengths = np.array(sorted(histogram), np.int64)  # [L]
    counts = np.array([histogram[value] for value in lengths.tolist()], np.int64)  # [L]
    temporary, first, num_rows = place.temporary("table"), 2 + 2 * len(lengths), int(counts.sum())
    count = first + num_rows + len(by_id) // 2
    with open(temporary, "w+b") as file:
        write_header(file, count)
        offset = file.tell()
        file.truncate(offset + 8 * count)
        words = np.memmap(temporary, "<i8", "r+", offset=offset, shape=(count,))  # [count]; the disk's, not ours
        words[:first] = np.concatenate(([len(lengths), num_rows], lengths, counts))
        next_place = first + np.cumsum(counts) - counts  # [L]
        for rows, values in _chunks(index, by_id, tuning.rows_at_a_time):
            in_turn = np.argsort(values, kind="stable")  # [n]
            number = np.searchsorted(lengths, values[in_turn])  # [n]; of the length
            here, begins, sizes = np.unique(number, return_index=True, return_counts=True)  # [l], [l], [l]
            words[next_place[number] + np.arange(len(rows)) - np.repeat(begins, sizes)] = rows[in_turn]
            next_place[here] += sizes
        words[first + num_rows :] = by_id.view("<i8")
        words.flush()
        finish_npy(file, count)
    return place.publish(temporary, name)


def _chunks(index: Index, by_id: np.memmap, size: int) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield selected rows and their lengths, `size` at a time: [n], [n]."""
    for start in range(0, len(index), size):
        rows = np.arange(start, min(start + size, len(index)))  # [n]
        yield rows, np.asarray(by_id[index.row_ids(rows)], np.int64)


def _evaluate(
    index: Index, length: str, by_id: np.memmap, place: Workplace, tuning: LengthTuning, *, show_progress: bool
) -> None:
    """Write the length of each selected row by its id."""
    column = next((column for column in index.sql_columns if column.name == length), None)
    with (
        contextlib.closing(_sandbox(index, length if column is None else quote(column.physical), place)) as sandbox,
        progress(len(index), " rows", "measuring", show_progress) as bar,
    ):
        _, batches = sandbox.run(sandbox.statement, tuning.rows_at_a_time)
        for batch in batches:
            rows, values = zip(*batch, strict=True)
            ids = np.asarray(rows)  # [n]
            if ids.dtype.kind != "i" or ids.min() < 0 or ids.max() >= index.num_rows:
                raise QueryError(
                    f"packs by {length!r}: the index's query gives a column {ROW!r} that holds no row ids: name it differently"
                )
            by_id[ids] = _whole_numbers(length, rows, values)
            bar.update(len(rows))


def _whole_numbers(length: str, rows: Sequence[int], values: Sequence[Any]) -> NDArray[np.uint32]:
    """Return lengths of rows: [n].

    Raises:
        ConfigError: One is none.
    """
    for row, value in zip(rows, values, strict=True):
        if isinstance(value, int | float) and 1 <= value <= MAX_LENGTH and value % 1 == 0:
            continue
        cure = (
            "measure such rows once by `sqlstream index measure`, or leave them out with where="
            if value is None
            else "a length is a whole number of 1 or more: leave such rows out with where=, or mend the table"
        )
        raise ConfigError(f"packs by {length!r}: row {row} has {value!r}: {cure}")
    return np.asarray(values).astype(np.uint32)  # [n]


def _sandbox(index: Index, expression: str, place: Workplace) -> Sandbox:
    """Return a sandbox for (row, length) of the selected rows, in the engine of the index's filter."""
    selection = index.selection
    engine = "sqlite" if selection is None else selection.engine
    query = f"SELECT {ROW}, ({one_expression('length', expression, engine)}) AS length FROM {rows_of(selection)}"
    return Sandbox(index, query, engine=engine, scratch=place.temporary("duckdb"))
