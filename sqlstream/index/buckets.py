"""Which rows of an index are in which bucket: a table beside the index, made by a counting sort in two walks.

    open_buckets(index, Buckets("width, height", into=…), directory) → BucketTable → order.bucketed.Bucketed

The expressions see the rows that the index's filter keeps, in the sandbox, as weights do. The file is immutable and named by
what decides it, so it is made once per node, and a resumed run finds the same one. Its head is a JSON text that says the
buckets. Memory is that of the buckets and of 2**20 distinct values, whatever the rows.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sqlstream.config import AspectBuckets, Buckets, BucketValue, Lengths, VideoBuckets, plain_number
from sqlstream.errors import ConfigError, text_of
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import is_there
from sqlstream.index.file.workplace import Workplace, build_once, workplace
from sqlstream.index.sorted_rows import LAYOUT_VERSION, SortedRows, checked_ids, numbers_by_id, selected, write_sorted_rows
from sqlstream.index.sql.expressions import rows_of, several_expressions
from sqlstream.index.sql.functions import changes
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.types.models import FORMAT_VERSION, ROW, fingerprint, quote
from sqlstream.index.types.values import unsigned_back
from sqlstream.progress import progress

logger = logging.getLogger(__name__)

BUCKETS_VERSION = 1
"""Changes whenever a table, or the order that is made of it, would change."""
MAX_VALUES = 1 << 20
"""Distinct values that are remembered with their bucket, some 200 MB."""
_NONE = 0xFFFF
"""Number of no bucket: the row is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTuning:
    """Sizes of what is built."""

    max_buckets: int = 4096
    """More are a mistake: a bucket of a few rows fills a batch once in many epochs."""
    rows_at_a_time: int = 65_536
    """Rows that are in memory together: half a megabyte a column. Arbitrary."""


class BucketTable(SortedRows):
    """The rows of each bucket.

    Args:
        path: The file.
        digest: What decides it, beside the index: it belongs into a run's state.
    """

    number_type = "<u2"

    def __init__(self, path: Path, digest: str) -> None:
        super().__init__(path, digest)
        described: dict[str, Any] = json.loads(self.head)
        self.values: tuple[BucketValue, ...] = tuple(map(_from_json, described["values"]))
        """What names each bucket."""
        self.sizes: tuple[int, ...] = tuple(described["sizes"])
        """Rows of each bucket."""
        self._shown: tuple[BucketValue | None, ...] = (*self.values, *(None,) * (_NONE + 1 - len(self.values)))

    def values_of(self, row_ids: Sequence[int]) -> list[BucketValue | None]:
        """Return the buckets of rows by id; None: the row is in none."""
        return list(map(self._shown.__getitem__, self.numbers_of(row_ids)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sorter:
    """How values become buckets."""

    buckets: Buckets
    map_value: Callable[[Any], BucketValue]
    """From the value of `by`, or the tuple of values, to a bucket."""
    tuning: BucketTuning

    def bucket_of(self, values: tuple[Any, ...], row_id: int) -> BucketValue | None:
        """Return the bucket of a row's values; None: the row is left out.

        Raises:
            ConfigError: The values are unknown, or have no bucket.
        """
        what = f"batches by {self.buckets.by!r}: row {row_id} has {values[0] if len(values) == 1 else values!r}"
        if None in values:
            if self.buckets.unknown == "raise":
                raise ConfigError(
                    f"{what}, which is not known: give unknown='drop' to leave such rows out, or "
                    "find the values, such as by `sqlstream index measure`, and join them"
                )
            return None
        value = values[0] if len(values) == 1 else values
        try:
            found = self.map_value(value)
        except ValueError as error:
            raise ConfigError(f"{what}, which {error}") from error
        into = self.buckets.into
        if (
            self.buckets.max_crop is not None
            and isinstance(into, AspectBuckets | VideoBuckets)
            and into.crop_of(value) > self.buckets.max_crop
        ):
            return None
        found = _plain(found)
        if not _names_bucket(found):
            raise ConfigError(f"{what}, whose bucket is {found!r}: a bucket is a number, a text, or a tuple of these")
        return found


def _asked(buckets: Buckets, into: Callable[[Any], BucketValue], value: Any) -> BucketValue:
    """Return what the user's function makes of a value, numbers of numpy as those of Python.

    Raises:
        ConfigError: It fails.
    """
    try:
        bucket: BucketValue = _plain(into(value))
    except Exception as error:
        raise ConfigError(
            f"batches by {buckets.by!r}: into= failed on {value!r}: {text_of(error)}; have it give a bucket for "
            "each value, or leave such rows out with where="
        ) from error
    return bucket


def open_buckets(
    index: Index, buckets: Buckets, directory: Path, *, show_progress: bool = False, tuning: BucketTuning | None = None
) -> BucketTable:
    """Return the table of buckets, made when no earlier run has done it.

    Args:
        index: The rows, and their filter when there is one.
        buckets: What their buckets are.
        directory: Where index files are.
        show_progress: Show a bar if stderr is a terminal.
        tuning: Sizes; None: the usual ones.

    Raises:
        QueryError: The expressions do not run.
        ConfigError: A row has no bucket, no row has one, or there are too many buckets.
    """
    tuning = tuning or BucketTuning()
    into, known = buckets.into, dict[Any, BucketValue]()
    by_value: object
    map_value: Callable[[Any], BucketValue]
    if isinstance(into, AspectBuckets | Lengths | VideoBuckets):
        by_value, map_value = into.fingerprint, into.bucket_of
    elif into is None:
        by_value, map_value = None, _itself
    else:  # code has no name that changes with it: what it gives for each value has
        for values in _distinct(index, buckets, directory, tuning):
            if None not in values:
                value = values[0] if len(values) == 1 else values
                known[value] = _asked(buckets, into, value)
        by_value, map_value = [[repr(value), repr(known[value])] for value in known], known.__getitem__
    sorter = _Sorter(buckets=buckets, map_value=map_value, tuning=tuning)
    parts = {
        "format": FORMAT_VERSION,
        "version": BUCKETS_VERSION,
        "by": buckets.by,
        "into": by_value,
        "max_crop": buckets.max_crop,
        "unknown": buckets.unknown,
    }
    key = fingerprint(
        {**parts, "index": index.queried, "layout": LAYOUT_VERSION, **changes(buckets.by, index.engine, index.columns)}
    )
    path = directory / f"{key}.buckets.npy"

    def build(place: Workplace) -> Path:
        return _build(index, sorter, place, path.name, show_progress=show_progress)

    build_once(directory, key, lambda: path if is_there(path) else None, build, show_progress=show_progress)
    index.hold(path)
    os.utime(path)  # last used
    table = BucketTable(path, fingerprint(parts))
    _tell(table, buckets, len(index))
    return table


def _tell(table: BucketTable, buckets: Buckets, num_rows: int) -> None:
    """Log rows that are left out."""
    if table.num_rows < num_rows:
        logger.info("batches by %r leave %d of %d rows out", buckets.by, num_rows - table.num_rows, num_rows)


def _build(index: Index, sorter: _Sorter, place: Workplace, name: str, *, show_progress: bool) -> Path:
    """Write the table: each row's bucket first, then the rows in two walks over those."""
    codes = numbers_by_id(index, BucketTable.number_type, place)  # [row ids, padded]
    codes[:] = _NONE
    found = _evaluate(index, sorter, codes, place, show_progress=show_progress)
    ranks = sorted(range(len(found)), key=lambda number: _sort_key(found[number]))
    new_numbers = np.full(_NONE + 1, _NONE, np.uint16)  # [2**16]; numbers as they were given, to numbers in sorted order
    new_numbers[ranks] = np.arange(len(ranks), dtype=np.uint16)
    size = sorter.tuning.rows_at_a_time
    for start in range(0, len(codes), size):
        codes[start : start + size] = new_numbers[codes[start : start + size]]
    sizes = np.zeros(len(found), np.int64)  # [B]
    for _, code in selected(index, codes, size):
        sizes += np.bincount(code[code != _NONE], minlength=len(sizes))
    if not sizes.sum():
        raise ConfigError(
            f"batches by {sorter.buckets.by!r} leave out all {len(index)} rows: change by=, max_crop= or unknown="
        )
    head = json.dumps({"values": [found[rank] for rank in ranks], "sizes": sizes.tolist()}).encode()
    temporary = place.temporary("table")
    write_sorted_rows(temporary, head, selected(index, codes, size), _itself, sizes, codes)
    return place.publish(temporary, name)


def _evaluate(index: Index, sorter: _Sorter, codes: np.memmap, place: Workplace, *, show_progress: bool) -> list[BucketValue]:
    """Write the number of each row's bucket; return the buckets by number."""
    numbers: dict[BucketValue, int] = {}
    known: dict[tuple[Any, ...], int] = {}
    with (
        contextlib.closing(_sandbox(index, sorter.buckets, place.temporary("duckdb"))) as sandbox,
        progress(len(index), " rows", "sorting into buckets", show_progress) as bar,
    ):
        _, batches = sandbox.run(sandbox.statement, sorter.tuning.rows_at_a_time)
        read = _reader(index, sorter.buckets)
        for batch in batches:
            ids = checked_ids([row[0] for row in batch], index, f"batches by {sorter.buckets.by!r}")  # [n]
            of_batch = []
            for row_id, *values in batch:
                key = tuple(values)
                if (number := known.get(key)) is None:
                    value = sorter.bucket_of(read(key), row_id)
                    number = _NONE if value is None else numbers.setdefault(value, len(numbers))
                    if len(numbers) > sorter.tuning.max_buckets:
                        raise ConfigError(
                            f"batches by {sorter.buckets.by!r} have more than {sorter.tuning.max_buckets} buckets: map values "
                            "to fewer ones with into=, such as AspectBuckets or Lengths, or round them in SQL"
                        )
                    if len(known) >= MAX_VALUES:
                        known.clear()
                    known[key] = number
                of_batch.append(number)
            codes[ids] = of_batch
            bar.update(len(batch))
    return list(numbers)


def _distinct(index: Index, buckets: Buckets, directory: Path, tuning: BucketTuning) -> list[tuple[Any, ...]]:
    """Return the distinct values of `by`, sorted.

    Raises:
        ConfigError: There are too many for a function.
    """
    key = fingerprint({"distinct": buckets.by, "index": index.queried, **changes(buckets.by, index.engine, index.columns)})
    with (
        workplace(directory, key, is_brief=True) as place,
        contextlib.closing(_sandbox(index, buckets, place.temporary("duckdb"), is_distinct=True)) as sandbox,
    ):
        found: list[tuple[Any, ...]] = []
        _, batches = sandbox.run(sandbox.statement, tuning.rows_at_a_time)
        read = _reader(index, buckets)
        for batch in batches:
            found += map(read, batch)
            if len(found) > MAX_VALUES:
                raise ConfigError(
                    f"batches by {buckets.by!r} have more than {MAX_VALUES} distinct values, each of which into= would be "
                    "asked for: round them in SQL"
                )
    return sorted(found, key=_sort_key)


def _sandbox(index: Index, buckets: Buckets, scratch: Path, *, is_distinct: bool = False) -> Sandbox:
    """Return a sandbox for (row, values…) of the selected rows, or for their distinct values, in the engine of the index."""
    physical = {column.name: quote(column.physical) for column in index.sql_columns}
    wanted = [
        f"({physical.get(text, text)}) AS value_{n}"
        for n, text in enumerate(several_expressions("by", buckets.by, index.engine))
    ]
    columns = ", ".join(wanted)
    what = f"DISTINCT {columns}" if is_distinct else f"{ROW}, {columns}"
    return Sandbox(index, f"SELECT {what} FROM {rows_of(index.selection)}", engine=index.engine, scratch=scratch)


def _reader(index: Index, buckets: Buckets) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return what makes the values of `by` of those that the index file has."""
    types = {column.name: column.type for column in index.sql_columns}
    are_unsigned = [types.get(text) == "uint64" for text in several_expressions("by", buckets.by, index.engine)]

    def read(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(unsigned_back(v) if is_it else v for v, is_it in zip(values, are_unsigned, strict=True))

    return read if any(are_unsigned) else _itself


def _itself(value: Any) -> Any:
    return value


def _plain(value: Any) -> BucketValue:
    """Return a bucket with numbers of Python in place of numpy's and torch's, which JSON does not take."""
    if isinstance(value, float | str):  # their spelling is in the names of tables, and in states
        return value
    return tuple(map(_plain, value)) if isinstance(value, tuple) else plain_number(value)


def _names_bucket(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_names_bucket, value))
    return isinstance(value, int | str) or (isinstance(value, float) and not math.isnan(value))  # NaN equals none, nor itself


def _from_json(value: Any) -> Any:
    return tuple(map(_from_json, value)) if isinstance(value, list) else value


def _sort_key(value: Any) -> tuple[Any, ...]:
    """Return what sorts values of several types: numbers before texts before tuples."""
    if isinstance(value, tuple):
        return (3, tuple(map(_sort_key, value)))
    return (0, 0) if value is None else (1, value) if isinstance(value, int | float) else (2, str(value))
