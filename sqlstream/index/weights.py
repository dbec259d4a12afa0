"""Weights of an index's rows: an SQL expression, a column, or an array becomes a table of sums, memory-mapped beside the index.

    open_weights(index, "1 + 3 * (score > 6)", directory) → WeightTable → order.weights.WeightedRows

The expression sees the rows that the index's filter keeps, and nothing else, in the sandbox: `1.0 / count(*) OVER (PARTITION BY
label)` balances the classes of the *selected* rows. The file is immutable and named by its content's fingerprint, so it is
evaluated once per node, and a resumed run finds the same one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sqlstream.errors import ConfigError
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import is_there
from sqlstream.index.file.npy import finish_npy, load_npy, write_header
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.sorted_rows import checked_ids
from sqlstream.index.sql.expressions import one_expression, rows_of
from sqlstream.index.sql.functions import changes
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.types.models import FORMAT_VERSION, ROW, fingerprint, quote
from sqlstream.index.types.values import columns_of, numbers_of
from sqlstream.order.permute import Int64Array
from sqlstream.order.weights import WEIGHTS_VERSION, scale_of, scale_weights
from sqlstream.progress import progress

WeightsSpec: TypeAlias = str | ArrayLike
"""An SQL expression, the name of a column, or one number for each selected row."""
_ROWS_AT_A_TIME = 65_536
_NUMBERS = (int, float, type(None))  # a tuple: each value is asked, and a union takes three times as long


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTable:
    """The sums of the weights of an index's selected rows; pickles as a path."""

    path: Path
    """An int64 .npy file: the sum of the scaled weights up to and with each selected row."""
    num_rows: int
    """Selected rows."""
    total: int
    """Sum of all scaled weights; above 0."""
    fingerprint: str
    """Names index and weights: equal for equal ones, at the same place."""
    digest: str
    """Names the weights alone: equal for equal ones, of whatever index. It belongs into a run's state."""

    def cumulative(self) -> Int64Array:
        """Return the sums, mapped: [num_rows]."""
        return load_npy(self.path, self.num_rows)


class RowSequence(Protocol):
    """Selected rows in another order than theirs, such as those of buckets."""

    @property
    def num_rows(self) -> int:
        """How many there are: some may be left out."""

    @property
    def digest(self) -> str:
        """A text for what decides the order."""

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the rows at places of it: [n]."""


def open_weights(
    index: Index, spec: WeightsSpec, directory: Path, *, sequence: RowSequence | None = None, show_progress: bool = False
) -> WeightTable:
    """Return the table of weights, evaluated when no earlier run has done it.

    Args:
        index: The rows, and their filter when there is one.
        spec: What they weigh: 0 leaves a row out, fractions are fine, 2 comes twice as often as 1.
        directory: Where index files are.
        sequence: Which rows are summed up, and in which order; None: the selection.
        show_progress: Show a bar if stderr is a terminal.

    Raises:
        QueryError: The expression does not run.
        ConfigError: A weight is negative, not finite or missing, all are 0, or the array has another length.
    """
    array = None if isinstance(spec, str) else _as_array(spec, index)
    what: object = spec if array is None else blake2b(array.tobytes(), digest_size=16).hexdigest()
    parts = {"format": FORMAT_VERSION, "version": WEIGHTS_VERSION, "weights": what}
    order = {} if sequence is None else {"sequence": sequence.digest}
    if isinstance(spec, str):
        order |= changes(spec, index.engine, index.columns)
    key = fingerprint({**parts, "index": index.queried, **order})
    path, num_rows = directory / f"{key}.weights.npy", len(index) if sequence is None else sequence.num_rows

    def build(place: Workplace) -> Path:
        return _build(index, spec, array, place, path.name, sequence, show_progress=show_progress)

    build_once(directory, key, lambda: path if is_there(path) else None, build, show_progress=show_progress)
    index.hold(path)
    sums = load_npy(path, num_rows)
    os.utime(path)  # last used
    return WeightTable(path=path, num_rows=len(sums), total=int(sums[-1]), fingerprint=key, digest=fingerprint(parts))


def weights_of_part(spec: WeightsSpec, index: Index, part: Index) -> WeightsSpec:
    """Return the weights of some of an index's rows, which another index selects: an expression holds for both.

    Args:
        spec: The weights of the rows of `index`.
        index: All of the rows.
        part: Those that weights are asked for, of the same file.

    Raises:
        ConfigError: An array has several numbers for one row, since the filter of `index` selects it more than once.
    """
    if isinstance(spec, str):
        return spec
    array = _as_array(spec, index)
    ids = index.row_ids(np.arange(len(index)))  # [n]
    order = np.argsort(ids, kind="stable")  # [n]
    rising = ids[order]  # [n]
    if (rising[1:] == rising[:-1]).any():
        raise ConfigError(
            "weights (an array) have several numbers for a row that is selected more than once: give them as SQL, or to "
            "the selection by reweight()"
        )
    wanted = part.row_ids(np.arange(len(part)))  # [m]
    return array[order[np.searchsorted(rising, wanted)]]


def _as_array(spec: ArrayLike, index: Index) -> NDArray[np.float64]:
    try:
        given = np.ma.asarray(spec) if isinstance(spec, np.ma.MaskedArray) else np.asarray(spec)  # [n]
    except (ValueError, TypeError, RuntimeError) as error:  # lists of several lengths; tensors of torch that numpy has not
        raise ConfigError(f"weights are no numbers ({error}): give an SQL expression, a column, or one number a row") from error
    is_plain = given.dtype.kind in "biuf"
    wrong = None if is_plain else next((at for at, value in enumerate(given.flat) if not _is_real(value)), None)
    if wrong is not None:
        raise ConfigError(
            f"weights (an array) are no numbers: row {wrong} of the selected ones has {_text(given.flat[wrong])}, which is "
            "no real number of 64 bits: give an SQL expression, a column, or one number a row"
        )
    array = np.ascontiguousarray(np.ma.filled(given.astype(np.float64), np.nan))  # [n]; what is masked has no value
    if array.shape != (len(index),):
        raise ConfigError(f"weights have the shape {array.shape}, but {len(index)} rows are selected: give one number a row")
    return array


def _is_real(value: Any) -> bool:
    if isinstance(value, complex | np.complexfloating | np.datetime64 | np.timedelta64):  # which numpy would cast
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _text(value: Any) -> str:
    """Return a value for a message; Python does not write out integers of thousands of digits."""
    return f"an integer of {value.bit_length()} bits" if isinstance(value, int) else repr(value)[:80]


def _build(
    index: Index,
    spec: WeightsSpec,
    array: NDArray[np.float64] | None,
    place: Workplace,
    name: str,
    sequence: RowSequence | None,
    *,
    show_progress: bool,
) -> Path:
    """Write the sums in two walks over the weights: their sum gives the scale."""
    if array is None:
        by_row = place.temporary("weights")
        _evaluate(index, str(spec), by_row, place, show_progress=show_progress)
        weights = np.memmap(by_row, np.float64, "r", shape=(index.num_rows,))
    total, num_rows = 0.0, len(index) if sequence is None else sequence.num_rows

    def chunks() -> Iterator[tuple[Int64Array, NDArray[np.float64]]]:
        for start in range(0, num_rows, _ROWS_AT_A_TIME):
            positions = np.arange(start, min(start + _ROWS_AT_A_TIME, num_rows))  # [n]
            positions = positions if sequence is None else sequence.rows_at(positions)  # [n]
            yield positions, array[positions] if array is not None else np.asarray(weights[index.row_ids(positions)])

    for positions, chunk in chunks():
        _check(chunk, positions, index, spec)
        total += float(chunk.sum())
    if not 0 < total < float("inf"):
        raise ConfigError(f"weights {_shown(spec)} add up to {total:g}: give at least one row a weight above 0, and none huge")
    temporary, scale, last = place.temporary("sums"), scale_of(total), 0
    with open(temporary, "wb") as file:
        write_header(file, num_rows)
        for _, chunk in chunks():
            sums = np.cumsum(scale_weights(chunk, scale)) + last  # [n]
            last = int(sums[-1])
            file.write(sums.astype("<i8").tobytes())
        finish_npy(file, num_rows)
    return place.publish(temporary, name)


def _evaluate(index: Index, expression: str, path: Path, place: Workplace, *, show_progress: bool) -> None:
    """Write the weight of each row id, NaN where no weight is known, as float64."""
    by_row = np.memmap(path, np.float64, "w+", shape=(index.num_rows,))  # [num_rows]; the disk's, not ours
    by_row[:] = np.nan
    column = next((column for column in index.sql_columns if column.name == expression), None)
    wanted = expression if column is None else quote(column.physical)
    with (
        contextlib.closing(_sandbox(index, wanted, place)) as sandbox,
        progress(len(index), " rows", "weighing", show_progress) as bar,
    ):
        _, batches = sandbox.run(sandbox.statement, _ROWS_AT_A_TIME)
        for batch in batches:
            rows, values = columns_of(batch)
            ids = checked_ids(rows, index, f"weights {_shown(expression)}")  # [n]
            values = values if column is None else numbers_of(column, values)
            by_row[ids] = _numbers(values, rows, expression)
            bar.update(len(rows))
    by_row.flush()


def _sandbox(index: Index, expression: str, place: Workplace) -> Sandbox:
    """Return a sandbox for (row, weight) of the selected rows, in the engine of the index."""
    query = f"SELECT {ROW}, ({one_expression('weights', expression, index.engine)}) AS weight FROM {rows_of(index.selection)}"
    return Sandbox(index, query, engine=index.engine, scratch=place.temporary("duckdb"))


def _numbers(values: Sequence[Any], rows: Sequence[int], expression: str) -> NDArray[np.float64]:
    wrong = next((at for at, value in enumerate(values) if not isinstance(value, _NUMBERS)), None)
    if wrong is not None:
        raise ConfigError(f"weights {_shown(expression)}: row {rows[wrong]} has {values[wrong]!r}, which is no number: cast it")
    return np.array(values, np.float64)  # [n]; None becomes NaN


def _check(weights: NDArray[np.float64], positions: Int64Array, index: Index, spec: WeightsSpec) -> None:
    good = np.isfinite(weights) & (weights >= 0)  # [n]
    if good.all():
        return
    at = int(np.argmin(good))
    value = "no value (NULL or NaN)" if np.isnan(weights[at]) else f"{weights[at]:g}"
    row = int(index.row_ids(positions[at : at + 1])[0])
    key = "" if index.key_column is None else f" ({index.key_column}={index.rows([row])[0][index.key_column]!r})"
    raise ConfigError(
        f"weights {_shown(spec)}: row {row}{key} has {value}: weights are finite and 0 or more; "
        "coalesce(…, 0) leaves rows without a value out, greatest(…, 0) negative ones"
    )


def _shown(spec: WeightsSpec) -> str:
    return repr(spec) if isinstance(spec, str) else "(an array)"
