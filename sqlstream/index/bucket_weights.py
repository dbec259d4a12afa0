"""Weights of the rows of buckets: the sums of an index's weights, in the order of a table of buckets.

    open_bucket_weights(index, "1 + 3 * (score > 6)", table, directory) → WeightTable → BucketSumsFile

A round of a bucket takes rows as they weigh among its own (`order/bucket_rates.py`), so their sums must lie together. The file
is made of that of the weights and that of the buckets, once per node, and is named by both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from sqlstream.errors import ConfigError
from sqlstream.index.buckets import BucketTable
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import is_there
from sqlstream.index.file.npy import finish_npy, load_npy, write_header
from sqlstream.index.file.sums import SumsFile
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.types.models import fingerprint
from sqlstream.index.weights import WeightsSpec, WeightTable, open_weights
from sqlstream.order.permute import Int64Array

_ROWS_AT_A_TIME = 65_536


class BucketSumsFile:
    """The sums of the weights of the rows of buckets, found in a file with little of it in memory.

    Args:
        path: The file.
        sizes: Rows of each bucket.
    """

    def __init__(self, path: Path, sizes: tuple[int, ...]) -> None:
        mapped = load_npy(path)  # [n]
        stops = np.cumsum(np.array(sizes, dtype=np.int64))  # [B]
        self._before: dict[int, int] = {0: 0}
        """Weight of the rows before the start of each bucket, and before the end of the last."""
        self._before |= zip(stops.tolist(), np.asarray(mapped[stops - 1]).tolist(), strict=True)
        self._file = SumsFile(path)

    def total(self, start: int, stop: int) -> int:
        """Return the weight of the rows `[start, stop)` of the table, which are those of a bucket."""
        return self._before[stop] - self._before[start]

    def places(self, start: int, points: Int64Array) -> Int64Array:
        """Return the places of the rows, counted from `start`, at points of a line that begins there: [n]."""
        found: Int64Array = self._file.searchsorted(points + self._before[start]) - start  # [n]
        return found


def open_bucket_weights(index: Index, spec: WeightsSpec, table: BucketTable, directory: Path) -> WeightTable:
    """Return the table of the weights of rows in buckets, in the order of these; made when no earlier run has done it.

    Args:
        index: The rows, and their filter when there is one.
        spec: What they weigh.
        table: Their buckets.
        directory: Where index files are.

    Raises:
        QueryError: The expression does not run.
        ConfigError: These are no weights, or all rows that are in a bucket weigh nothing.
    """
    weights = open_weights(index, spec, directory)
    key = fingerprint({"weights": weights.fingerprint, "buckets": table.path.name})
    path = directory / f"{key}.bucket-weights.npy"

    def build(place: Workplace) -> Path:
        return _build(weights.cumulative(), table, place, path.name)

    build_once(directory, key, lambda: path if is_there(path) else None, build)
    index.hold(path)
    sums = load_npy(path, table.num_rows)
    os.utime(path)  # last used
    if not sums[-1]:
        raise ConfigError("all rows that have a bucket weigh 0: give at least one of them a weight above 0")
    return replace(weights, path=path, num_rows=len(sums), total=int(sums[-1]))


def _build(cumulative: Int64Array, table: BucketTable, place: Workplace, name: str) -> Path:
    """Write the sums, some rows of the table at a time."""
    temporary, last = place.temporary("sums"), 0
    with open(temporary, "wb") as file:
        write_header(file, table.num_rows)
        for rows in _chunks(table):
            weights = np.asarray(cumulative[rows]) - np.where(rows > 0, np.asarray(cumulative[rows - 1]), 0)  # [n]
            sums = np.cumsum(weights) + last  # [n]
            last = int(sums[-1])
            file.write(sums.astype("<i8").tobytes())
        finish_npy(file, table.num_rows)
    return place.publish(temporary, name)


def _chunks(table: BucketTable) -> Iterator[Int64Array]:
    """Yield the selected rows in the order of the table: [n]."""
    for start in range(0, table.num_rows, _ROWS_AT_A_TIME):
        yield table.rows_at(np.arange(start, min(start + _ROWS_AT_A_TIME, table.num_rows)))
