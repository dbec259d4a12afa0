"""How long each row of an index is: a table beside the index, made by a counting sort in two walks.

    open_lengths(index, "num_tokens", directory) → LengthTable → order.packs.packed.Packed

The expression sees the rows that the index's filter keeps, in the sandbox, as weights do. The file is immutable and named by
what decides it, so it is made once per node, whatever the packs, and a resumed run finds the same one. Its head has the
distinct lengths, rising, and the rows of each. Memory is that of the lengths, whatever the rows.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sqlstream.errors import ConfigError
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import is_there
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.sorted_rows import LAYOUT_VERSION, SortedRows, checked_ids, numbers_by_id, selected, write_sorted_rows
from sqlstream.index.sql.expressions import one_expression, rows_of
from sqlstream.index.sql.functions import changes
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.types.models import FORMAT_VERSION, ROW, fingerprint, quote
from sqlstream.index.types.values import columns_of, numbers_of
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


class LengthTable(SortedRows):
    """The rows by length.

    Args:
        path: The file.
        digest: What decides it, beside the index: it belongs into a run's state.
    """

    number_type = "<u4"

    def __init__(self, path: Path, digest: str) -> None:
        super().__init__(path, digest)
        lengths, counts = np.frombuffer(self.head, "<i8").reshape(2, -1)  # [L], [L]
        self.lengths: Int64Array = lengths  # [L]
        """The distinct lengths, rising."""
        self.counts: Int64Array = counts  # [L]
        """Rows of each."""


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
    key = fingerprint(
        {**parts, "index": index.queried, "layout": LAYOUT_VERSION, **changes(length, index.engine, index.columns)}
    )
    path = directory / f"{key}.lengths.npy"

    def build(place: Workplace) -> Path:
        return _build(index, length, place, path.name, tuning or LengthTuning(), show_progress=show_progress)

    build_once(directory, key, lambda: path if is_there(path) else None, build, show_progress=show_progress)
    index.hold(path)
    os.utime(path)  # last used
    return LengthTable(path, fingerprint(parts))


def _build(index: Index, length: str, place: Workplace, name: str, tuning: LengthTuning, *, show_progress: bool) -> Path:
    """Write the table: each row's length first, then the rows in two walks over those."""
    by_id = numbers_by_id(index, LengthTable.number_type, place)  # [row ids, padded]
    _evaluate(index, length, by_id, place, tuning, show_progress=show_progress)
    histogram: dict[int, int] = {}
    for _, values in selected(index, by_id, tuning.rows_at_a_time):
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
    temporary, chunks = place.temporary("table"), selected(index, by_id, tuning.rows_at_a_time)
    head = np.stack((lengths, counts)).astype("<i8").tobytes()
    write_sorted_rows(temporary, head, chunks, lambda values: np.searchsorted(lengths, values), counts, by_id)
    return place.publish(temporary, name)


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
            rows, values = columns_of(batch)
            ids = checked_ids(rows, index, f"packs by {length!r}")  # [n]
            values = values if column is None else numbers_of(column, values)
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
            else f"a length is a whole number of 1 or more, and {MAX_LENGTH} at most: leave such rows out with "
            "where=, or mend the table"
        )
        raise ConfigError(f"packs by {length!r}: row {row} has {value!r}: {cure}")
    return np.asarray(values).astype(np.uint32)  # [n]


def _sandbox(index: Index, expression: str, place: Workplace) -> Sandbox:
    """Return a sandbox for (row, length) of the selected rows, in the engine of the index."""
    query = f"SELECT {ROW}, ({one_expression('length', expression, index.engine)}) AS length FROM {rows_of(index.selection)}"
    return Sandbox(index, query, engine=index.engine, scratch=place.temporary("duckdb"))
