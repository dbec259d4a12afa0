"""Writes a prepared index (filtered, weighted, shuffled, split) as Parquet, so that it can be a source again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.index.file.index import Index
from sqlstream.index.sql.functions import hash_value
from sqlstream.index.types.arrow import arrays_of, schema_of
from sqlstream.index.weights import WeightTable
from sqlstream.order import Shuffled
from sqlstream.order.permute import Int64Array
from sqlstream.order.weights import WeightedRows

REST = "train"
"""The split of the rows that no other one takes."""
_ROWS_AT_A_TIME = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Which rows are written, in which order, into how many files."""

    seed: int | None = None
    """Shuffles the rows, draws with weights, and splits; None: in the index's order."""
    num_rows: int | None = None
    """How many rows are drawn with weights; None: as many as are selected."""
    splits: Mapping[str, float] = field(default_factory=dict)
    """Share of each split; the rest is `train`. A row's split depends on its key (without one on its number)
    and the seed alone: also when others come."""
    row_group_rows: int = 100_000
    """Rows of a row group: what a reader fetches at a time."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_at_least("row-group-rows", self.row_group_rows, 1)
        for name, share in self.splits.items():
            if not name.replace("-", "_").isidentifier() or name == REST:
                raise ConfigError(f"split {name!r} is no name: give letters, digits and '_' ({REST!r} is the rest)")
            if not 0 < share < 1:
                raise ConfigError(f"split {name}={share:g} is out of range: give a share between 0 and 1")
        if sum(self.splits.values()) >= 1:
            raise ConfigError(f"splits add up to {sum(self.splits.values()):g}: leave something for {REST!r}")


def export(index: Index, options: ExportOptions, directory: Path, weights: WeightTable | None = None) -> dict[str, Path]:
    """Write Parquet files into `directory`; return them by split ('' when there are no splits).

    Args:
        index: The rows, and their filter when there is one.
        options: Order and splits.
        directory: Where the files are made; they are whole when this returns.
        weights: How often each row comes.

    Raises:
        ConfigError: A split has no row.
    """
    schema = schema_of(index.columns, physical=False)
    names = [*options.splits, REST] if options.splits else [""]
    paths = {name: directory / f"{name or 'all'}.parquet" for name in names}
    counts = dict.fromkeys(names, 0)
    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(_Groups(path, schema, options.row_group_rows)) for name, path in paths.items()}
        for positions in _order(index, options, weights):
            ids = index.row_ids(positions).tolist()
            stored = index.stored_rows(ids)
            for name, rows in _by_split(index, options, ids, stored).items():
                writers[name].write(pa.Table.from_arrays(arrays_of(index.columns, rows), schema=schema))
                counts[name] += len(rows)
    if empty := [name for name, count in counts.items() if not count]:
        raise ConfigError(f"split {empty[0]!r} has no row: the index has too few ({len(index)}), give a larger share")
    return paths


def _order(index: Index, options: ExportOptions, weights: WeightTable | None) -> Iterator[Int64Array]:
    """Yield the positions of the index in the order wanted."""
    num_rows = options.num_rows or len(index)
    drawn = WeightedRows(
        num_rows=len(index), num_positions=num_rows, cumulative=None if weights is None else weights.cumulative()
    )
    order = Shuffled(num_rows=num_rows, seed=options.seed)
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        slots = order.rows_at(0, np.arange(start, min(start + _ROWS_AT_A_TIME, num_rows))).row
        is_plain = weights is None and num_rows == len(index)
        yield slots if is_plain else drawn.rows_at(options.seed, 0, slots)


def _by_split(
    index: Index, options: ExportOptions, ids: Sequence[int], rows: Sequence[tuple[Any, ...]]
) -> dict[str, list[tuple[Any, ...]]]:
    """Return rows by split; what names a row, its key or its number, chooses the split."""
    if not options.splits:
        return {"": list(rows)}
    key = next((column.position for column in index.columns if column.name == index.key_column), None)
    names = [*options.splits, REST]
    bounds = np.cumsum(list(options.splits.values()))  # [num_splits]
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row_id, row in zip(ids, rows, strict=True):
        share = hash_value(row_id if key is None else row[key], options.seed or 0) / 2**63
        found.setdefault(names[int(np.searchsorted(bounds, share, side="right"))], []).append(row)
    return found


class _Groups:
    """A Parquet file whose row groups have the size wanted."""

    def __init__(self, path: Path, schema: pa.Schema, num_rows: int) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._num_rows, self._held, self._num_held = num_rows, list[pa.Table](), 0

    def write(self, table: pa.Table) -> None:
        """Take rows; whole groups are written."""
        self._held.append(table)
        self._num_held += table.num_rows
        if self._num_held >= self._num_rows:
            held = pa.concat_tables(self._held)
            whole = held.num_rows - held.num_rows % self._num_rows
            self._writer.write_table(held.slice(0, whole), row_group_size=self._num_rows)
            self._held, self._num_held = [held.slice(whole)], held.num_rows - whole

    def __enter__(self) -> _Groups:
        return self

    def __exit__(self, *exception: object) -> None:
        """Write the rest."""
        if self._num_held and exception[0] is None:
            self._writer.write_table(pa.concat_tables(self._held))
        self._writer.close()
