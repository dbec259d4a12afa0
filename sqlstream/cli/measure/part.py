"""Some rows and what a function makes of them, as a file that is there whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlstream.errors import SampleError, StorageError, TransformError, text_of

if TYPE_CHECKING:
    from sqlstream.stream.dataset import StreamingDataset

PART_ROWS = 4096
"""Rows of a part: what is computed again after a crash, at most, by each process. Arbitrary."""
TOGETHER = 64
"""Rows whose objects are downloaded together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """What is measured, and how; sent to the processes that do it."""

    src: str
    dst: str
    columns: tuple[str, ...]
    """The columns that are computed."""
    transform: str
    """`module:function`."""
    on: str
    """The column by which the result is joined."""
    options: dict[str, Any]
    """Further options of the dataset."""
    makes_null: bool
    """A row that fails has NULL; else it is an error."""
    part_rows: int = PART_ROWS
    """Rows of a part."""
    parts: str = ""
    """The directory of the parts."""

    def open(self) -> StreamingDataset:
        """Return the dataset of the rows, whose samples are not transformed."""
        from sqlstream.stream.dataset import StreamingDataset

        return StreamingDataset(self.src, self.dst, show_progress=False, **self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPart:
    """What became of a part."""

    num_rows: int
    num_computed: int
    """Rows for which the function was asked."""
    num_failed: int


def measure_part(measure: Measure, dataset: StreamingDataset, bound: tuple[int, int]) -> MeasuredPart:
    """Write the table of some rows.

    Raises:
        TransformError: A value is none of a table, or of another type than others.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sqlstream.index.types.arrow import arrays_of

    start, stop = bound
    num_computed = num_failed = 0
    key = next(column for column in dataset.index.sql_columns if column.name == measure.on)
    keys: list[tuple[Any, ...]] = []
    columns: dict[str, list[Any]] = {name: [] for name in measure.columns}
    for first in range(start, stop, TOGETHER):
        numbers = range(first, min(first + TOGETHER, stop))
        ids = dataset.index.row_ids(np.array(numbers)).tolist()
        rows = dict(zip(numbers, dataset.index.rows(ids), strict=True))
        keys += [(row[dataset.index.sql_columns.index(key)],) for row in dataset.index.stored_rows(ids)]
        lacking = [number for number, row in rows.items() if any(row.get(name) is None for name in measure.columns)]
        for number, found in zip(lacking, _computed(measure, dataset, lacking), strict=True):
            num_computed, num_failed = num_computed + (found is not None), num_failed + (found is None)
            rows[number] |= found if found is not None else dict.fromkeys(measure.columns)
        for name, values in columns.items():
            values += [row[name] for row in rows.values()]
    path = path_of(measure, start, stop)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    arrays = {name: _array(measure, name, values, bound) for name, values in columns.items()}
    pq.write_table(pa.table({measure.on: arrays_of([key], keys)[0], **arrays}), temporary)
    os.replace(temporary, path)
    return MeasuredPart(num_rows=stop - start, num_computed=num_computed, num_failed=num_failed)


def _array(measure: Measure, name: str, values: list[Any], bound: tuple[int, int]) -> Any:
    """Return the values of a column.

    Raises:
        TransformError: No column of a table can have them.
    """
    import pyarrow as pa

    from sqlstream.python_values import arrow_array

    try:
        return arrow_array(values)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise TransformError(
            f"--transform {measure.transform} gave values for {name!r} in rows {bound[0]} to {bound[1] - 1} that no column of "
            f"a table holds ({error}): return numbers, texts, bytes, times, lists or dicts, of one type for all rows"
        ) from error


def _computed(measure: Measure, dataset: StreamingDataset, numbers: list[int]) -> Iterator[dict[str, Any] | None]:
    """Yield the values of rows; None for one that fails and may."""
    function = function_of(measure)
    if not measure.makes_null:
        for number, sample in zip(numbers, dataset[numbers], strict=True):
            yield _values(measure, function, sample, number)
        return
    for number in numbers:
        try:
            yield _values(measure, function, dataset[number], number)
        except (SampleError, StorageError):
            yield None


def _values(measure: Measure, function: Callable[..., Any], sample: dict[str, Any], number: int) -> dict[str, Any]:
    """Return what a function gives for a row.

    Raises:
        TransformError: It fails, or gives no value.
    """
    try:
        found = function(sample)
    except Exception as error:
        raise TransformError(f"--transform {measure.transform} failed on row {number}: {text_of(error)}") from error
    values = found if isinstance(found, dict) else dict.fromkeys(measure.columns if len(measure.columns) == 1 else (), found)
    missing = [name for name in measure.columns if values.get(name) is None]
    if missing:
        raise TransformError(
            f"--transform {measure.transform} gave no {', '.join(missing)} for row {number}: return the value of a single "
            "--column, or a dict that has all of them"
        )
    try:
        return {name: value.item() if hasattr(value := values[name], "item") else value for name in measure.columns}
    except (ValueError, RuntimeError) as error:  # of numpy, of torch
        raise TransformError(
            f"--transform {measure.transform} gave an array of several values for row {number} ({error}): return one value "
            "for each column, or .tolist() for a column of lists"
        ) from error


def path_of(measure: Measure, start: int, stop: int) -> Path:
    """Return the file of a part."""
    return Path(measure.parts) / f"{start:012d}-{stop:012d}.parquet"


def function_of(measure: Measure) -> Any:
    """Return the user's function."""
    from sqlstream.storage.backends.functions import load_function

    return load_function("--transform", measure.transform, [])
