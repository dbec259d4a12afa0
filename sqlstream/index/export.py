"""Writes a prepared index (filtered, weighted, shuffled, split) as files that can be a source again."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.index.export_formats import writer
from sqlstream.index.file.index import Index
from sqlstream.index.splits import REST, plan_splits
from sqlstream.index.sql.functions import hash_value
from sqlstream.index.types.arrow import arrays_of, schema_of
from sqlstream.index.weights import WeightTable
from sqlstream.order import Shuffled
from sqlstream.order.permute import Int64Array
from sqlstream.order.weights import WeightedRows

logger = logging.getLogger(__name__)

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
    max_rows: Mapping[str, int] = field(default_factory=dict)
    """Most rows of a split; those that come later go to `train`."""
    row_group_rows: int = 100_000
    """Rows of a row group: what a reader fetches at a time."""
    extension: str = ".parquet"
    """The kind of file: `.parquet`, `.arrow`, `.csv`, `.jsonl`."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_at_least("row-group-rows", self.row_group_rows, 1)
        if self.num_rows is not None:
            check_at_least("num-rows", self.num_rows, 1)
        for name, share in self.splits.items():
            if not name.replace("-", "_").isidentifier() or name == REST:
                raise ConfigError(f"split {name!r} is no name: give letters, digits and '_' ({REST!r} is the rest)")
            if not 0 < share < 1:
                raise ConfigError(f"split {name}={share:g} is out of range: give a share between 0 and 1")
        for name, num_rows in self.max_rows.items():
            if name not in self.splits:
                raise ConfigError(f"max-rows {name}={num_rows} names no split: give it a share, such as split {name}=0.1")
            check_at_least(f"max-rows {name}", num_rows, 1)
        if sum(self.splits.values()) >= 1:
            raise ConfigError(f"splits add up to {sum(self.splits.values()):g}: leave something for {REST!r}")


@dataclass(frozen=True, slots=True)
class Exported:
    """A file that an export wrote."""

    path: Path
    num_rows: int


def export(index: Index, options: ExportOptions, directory: Path, weights: WeightTable | None = None) -> dict[str, Exported]:
    """Write files into `directory`; return them by split ('' when there are no splits).

    Args:
        index: The rows, and their filter when there is one.
        options: Order and splits.
        directory: Where the files are made; they are whole when this returns.
        weights: How often each row comes.

    Raises:
        ConfigError: A split has no row, or a column a type that this kind of file cannot hold.
    """
    columns = index.sql_columns
    if left := [column.name for column in index.columns if column.is_in_place or column.is_member]:
        logger.warning(
            "the content of %s stays in the files of %s, and is not exported: what is written has the other columns, and sizes "
            "of parts of shards",
            ", ".join(map(repr, left)),
            index.src,
        )
    schema = schema_of(columns, physical=False)
    names = [*options.splits, REST] if options.splits else [""]
    paths = {name: directory / f"{name or 'all'}{options.extension}" for name in names}
    counts = dict.fromkeys(names, 0)
    with contextlib.ExitStack() as stack:
        writers = {name: stack.enter_context(writer(path, schema, options.row_group_rows)) for name, path in paths.items()}
        for positions in _order(index, options, weights):
            ids = index.row_ids(positions).tolist()
            stored = index.stored_rows(ids)
            for name, rows in _by_split(index, options, ids, stored, counts).items():
                writers[name].write(pa.Table.from_arrays(arrays_of(columns, rows), schema=schema))
    if empty := [name for name, count in counts.items() if not count]:
        raise ConfigError(f"split {empty[0]!r} has no row: the index has too few ({len(index)}), give a larger share")
    return {name: Exported(path, counts[name]) for name, path in paths.items()}


def _order(index: Index, options: ExportOptions, weights: WeightTable | None) -> Iterator[Int64Array]:
    """Yield the positions of the index in the order wanted."""
    num_rows = len(index) if options.num_rows is None else options.num_rows
    drawn = WeightedRows(
        num_rows=len(index), num_positions=num_rows, cumulative=None if weights is None else weights.cumulative()
    )
    order = Shuffled(num_rows=num_rows, seed=options.seed)
    for start in range(0, num_rows, _ROWS_AT_A_TIME):
        slots = order.rows_at(0, np.arange(start, min(start + _ROWS_AT_A_TIME, num_rows))).row
        is_plain = weights is None and num_rows == len(index)
        yield slots if is_plain else drawn.rows_at(options.seed, 0, slots)


def _by_split(
    index: Index, options: ExportOptions, ids: Sequence[int], rows: Sequence[tuple[Any, ...]], counts: dict[str, int]
) -> dict[str, list[tuple[Any, ...]]]:
    """Return rows by split, counted into `counts`; what names a row, its key or its number, chooses the split."""
    if not options.splits:
        counts[""] += len(rows)
        return {"": list(rows)}
    key = next((at for at, column in enumerate(index.sql_columns) if column.name == index.key_column), None)
    planned = plan_splits(options.splits)
    stops = [split.stop for split in planned]
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row_id, row in zip(ids, rows, strict=True):
        name = planned[bisect_right(stops, hash_value(row_id if key is None else row[key], options.seed or 0))].name
        if counts[name] >= options.max_rows.get(name, counts[name] + 1):
            name = REST
        counts[name] += 1
        found.setdefault(name, []).append(row)
    return found
