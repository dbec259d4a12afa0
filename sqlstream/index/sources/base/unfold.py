"""Bounds what rows become in memory: a few bytes of Parquet or Arrow can stand for gigabytes.

A dictionary, a run, a view or a shared prefix says one long value for many rows. Neither the bytes of a file nor those of its
batches in Arrow's compact form say what they unfold to. So rows are counted before they are unfolded:

- `row_bytes` counts what each row of a batch becomes, without making it; `bounded` cuts a batch by it.
- `parquet_batches` reads Parquet in batches that the longest value of each dictionary bounds, which is looked up in the
  dictionary's own page, whatever the footer says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.base import BATCH_ROWS, plain_batch

BATCH_BYTES = 16 << 20
"""What a batch may become, one row apart; arbitrary: long captions, fewer rows."""
LONGEST_ROW_BYTES = 512 << 20
"""What one row may become: half of what SQLite takes as one value."""
CHUNK_BYTES = 2 << 30
"""What a chunk of a lazy index may become; a process has eight of them in memory."""
_PARQUET_BYTES = 4 * BATCH_BYTES  # of a batch while Arrow holds it, counted by the longest value and not by each
_MOST_UNFOLDED = 1000  # times its bytes in the file that a column of lists of numbers may become
_USUAL_RATIO, _FEW_ROWS = 64, 256  # arbitrary: what compresses better is read row by row where each may repeat the one before


def row_bytes(array: Any) -> np.ndarray | float:
    """Return how many bytes each row of an array becomes when it is unfolded; one number where all are alike.

    Args:
        array: Of any type; dictionaries, runs and views are looked at as they are.
    """
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return row_bytes(array.storage)
    if types.is_dictionary(kind):
        return _chosen(row_bytes(array.dictionary), array.indices)
    if types.is_run_end_encoded(kind):
        ends = np.clip(_numbers(array.run_ends) - array.offset, 0, len(array))  # [r]
        lengths = np.diff(ends, prepend=0)  # [r]
        sizes = row_bytes(array.values)
        return sizes if isinstance(sizes, float) else np.repeat(sizes, lengths)
    if any(is_one(kind) for is_one in _TEXTS):
        return _text_bytes(array)
    if types.is_nested(kind):
        return _nested_bytes(array, kind)
    return 16.0 if types.is_null(kind) or kind.bit_width < 128 else kind.bit_width / 8


_TEXTS: tuple[Callable[[Any], bool], ...] = (
    types.is_string, types.is_large_string, types.is_string_view, types.is_binary, types.is_large_binary, types.is_binary_view
)  # fmt: skip


def _text_bytes(array: Any) -> np.ndarray:
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        lengths = np.frombuffer(array.buffers()[1], np.int32)[
            4 * array.offset :: 4
        ]  # [>= n]; a view has 16 bytes, first its length
        return lengths[: len(array)].astype(np.float64)
    return _numbers(pc.binary_length(array)).astype(np.float64)


def _numbers(array: Any) -> np.ndarray:
    """Return an array of integers, 0 for null.

    Arrow's own ways to numpy, and from Python's 0, import pandas where it is installed: half a second of a first batch (m).
    """
    if not len(array):
        return np.zeros(0, np.int64)
    values = np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype())[array.offset :][: len(array)]  # [n]
    return np.where(_is_present(array), values, 0) if array.null_count else values


def _is_present(array: Any) -> np.ndarray:
    """Return which values of an array are not null."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    bits = np.unpackbits(np.frombuffer(array.is_valid().buffers()[1], np.uint8), bitorder="little")  # [>= n]
    return bits[: len(array)].astype(np.bool_)


def _nested_bytes(array: Any, kind: Any) -> np.ndarray | float:
    if types.is_struct(kind):
        total: np.ndarray | float = 0.0
        for child in array.flatten():
            total = total + row_bytes(child)
        return total
    if types.is_fixed_size_list(kind):
        sizes = row_bytes(array.flatten()) if not array.null_count else _one_by_one(array)
        if isinstance(sizes, float) or array.null_count:
            return sizes * kind.list_size if isinstance(sizes, float) else sizes
        return np.asarray(np.reshape(sizes, (len(array), kind.list_size)).sum(axis=1))
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        starts = _numbers(array.offsets).astype(np.int64)  # [n]
        stops = starts + _numbers(array.sizes)  # [n]
    else:
        bounds = _numbers(array.offsets).astype(np.int64)  # [n + 1]
        starts, stops = bounds[:-1], bounds[1:]  # [n]
    children = pa.StructArray.from_arrays([array.keys, array.items], ["k", "v"]) if types.is_map(kind) else array.values
    sizes = row_bytes(children)
    if isinstance(sizes, float):
        return np.asarray((stops - starts) * sizes)
    sums = np.concatenate([[0.0], np.cumsum(sizes)])  # [children + 1]
    return np.asarray(sums[stops] - sums[starts])


def _one_by_one(array: Any) -> np.ndarray:
    """Return the sizes of fixed lists of which some are null: Arrow flattens them without the null ones."""
    sizes = np.zeros(len(array))  # [n]
    present = np.flatnonzero(_is_present(array))  # [p]
    for at in present:
        of_items = row_bytes(array[int(at)].values)
        sizes[at] = of_items * array.type.list_size if isinstance(of_items, float) else of_items.sum()
    return sizes


def _chosen(sizes: np.ndarray | float, indices: Any) -> np.ndarray | float:
    if isinstance(sizes, float):
        return sizes
    chosen = _numbers(indices).astype(np.int64)  # [n]
    found = sizes[chosen] if len(sizes) else np.zeros(len(chosen))  # [n]
    return np.where(_is_present(indices), found, 0.0)


def bounded(batch: pa.RecordBatch, name: str, most_bytes: int = BATCH_BYTES) -> Iterator[pa.RecordBatch]:
    """Yield a batch in pieces of at most `BATCH_ROWS` rows that unfold to at most `most_bytes`, or to one row; views as texts.

    Args:
        batch: As Arrow has it.
        name: The file, for errors.
        most_bytes: Of a piece, unfolded.

    Raises:
        SourceError: One row unfolds to more than `LONGEST_ROW_BYTES`.
    """
    sizes = np.zeros(batch.num_rows)  # [n]
    for column in batch.columns:
        sizes += row_bytes(column)
    if sizes.size and sizes.max() > LONGEST_ROW_BYTES:
        raise SourceError(
            f"{name}: a row unfolds to {sizes.max():.0f} bytes, more than the {LONGEST_ROW_BYTES} that an index takes: leave "
            "its long columns out with index_cols_to_keep"
        )
    sums = np.cumsum(sizes)  # [n]
    start = 0
    while start < batch.num_rows:
        before = sums[start - 1] if start else 0.0
        stop = int(np.searchsorted(sums, before + most_bytes, side="right"))
        stop = min(max(stop, start + 1), start + BATCH_ROWS, batch.num_rows)
        yield plain_batch(batch.slice(start, stop - start))
        start = stop


def together(batches: Iterable[pa.RecordBatch], name: str, most_bytes: int = CHUNK_BYTES) -> pa.RecordBatch:
    """Return batches as one, which takes them into memory whole.

    Raises:
        SourceError: They unfold to more than `most_bytes`.
    """
    taken, total = [], 0.0
    for batch in batches:
        total += sum(float(np.sum(np.zeros(batch.num_rows) + row_bytes(column))) for column in batch.columns)
        if total > most_bytes:
            raise SourceError(
                f"{name}: a chunk unfolds to more than {most_bytes} bytes, and a lazy index has whole chunks in memory: write "
                "it with smaller row groups, keep fewer columns (index_cols_to_keep), or leave lazy_index_chunk_size out"
            )
        taken.append(batch)
    return pa.Table.from_batches(taken).combine_chunks().to_batches()[0]


def parquet_batches(
    open_file: Callable[[list[str]], pq.ParquetFile],
    groups: Sequence[int],
    columns: Sequence[str],
    name: str,
    *,
    use_threads: bool = True,
    most_list_bytes: int = 1 << 30,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of row groups.

    Args:
        open_file: Opens the file; the columns of the list are read as dictionaries.
        groups: Numbers of row groups.
        columns: Names of top-level columns.
        name: The file, for errors.
        use_threads: Decode columns side by side; not in a process that was forked.
        most_list_bytes: What lists of numbers may become in a row group where that is `_MOST_UNFOLDED` times their bytes.

    Raises:
        SourceError: A row, or a column of lists, unfolds to more than an index takes.
    """
    file = open_file([])
    leaves = _Leaves(file.metadata, columns, most_list_bytes)
    folded = open_file(leaves.texts) if leaves.texts else file
    for group in groups:
        longest = _longest_values(folded, group, leaves.texts) if leaves.texts else {}
        num_rows, lists = leaves.plan(group, longest, name)
        chosen = open_file(lists) if lists else file
        for batch in chosen.iter_batches(num_rows, row_groups=[group], columns=list(columns), use_threads=use_threads):
            # By name: Arrow also reads a column 'a.b' when it is asked for 'a'.
            yield from bounded(batch.select(list(columns)), name)


class _Leaves:
    """The columns of a file as Parquet has them: the leaves of nested ones, each with its sizes."""

    def __init__(self, metadata: pq.FileMetaData, columns: Sequence[str], most_list_bytes: int) -> None:
        self._most_list_bytes = most_list_bytes
        self._metadata = metadata
        paths = [(at, metadata.schema.column(at)) for at in range(metadata.num_columns)]
        names = frozenset(columns)
        # A name may hold dots: what begins like a wanted one is looked at, too.
        self._wanted = [(at, c) for at, c in paths if not names.isdisjoint(accumulate(c.path.split("."), "{}.{}".format))]
        self.texts = [column.path for _, column in self._wanted if column.physical_type == "BYTE_ARRAY"]
        """Paths of those whose values have lengths of their own."""

    def plan(self, group: int, longest: dict[str, int], name: str) -> tuple[int, list[str]]:
        """Return how many rows of a group to read at a time, and which columns of lists to leave folded."""
        row_group = self._metadata.row_group(group)
        num_rows = max(row_group.num_rows, 1)
        of_row, lists = row_group.total_byte_size / num_rows, []
        fewest = 1
        for at, column in self._wanted:
            chunk = row_group.column(at)
            is_text, is_list = column.physical_type == "BYTE_ARRAY", bool(column.max_repetition_level)
            length = longest.get(column.path) if is_text else max(column.length or 0, 8)
            if length is None and "DELTA_BYTE_ARRAY" not in chunk.encodings:
                length = 0
            if length is None:  # no dictionary, but prefixes: each value may repeat those before it
                length = chunk.total_uncompressed_size
                if chunk.total_uncompressed_size < _USUAL_RATIO * chunk.total_compressed_size:
                    fewest = _FEW_ROWS
            unfolded = chunk.num_values * length
            if is_list and is_text and unfolded > _PARQUET_BYTES and column.path in longest:
                lists.append(column.path)
            elif is_list and unfolded > max(self._most_list_bytes, _MOST_UNFOLDED * chunk.total_compressed_size):
                raise SourceError(
                    f"{name}: the lists in column {column.path!r} unfold from {chunk.total_compressed_size} to {unfolded} "
                    "bytes in one row group: write it with smaller row groups, or leave it out with index_cols_to_keep"
                )
            else:
                of_row += length * max(1.0, chunk.num_values / num_rows)
        return int(max(fewest, min(BATCH_ROWS, _PARQUET_BYTES / max(of_row, 1)))), lists


def _longest_values(file: pq.ParquetFile, group: int, paths: list[str]) -> dict[str, int]:
    """Return the length of the longest value in each column's dictionary, 0 where it has none and values are as they stand.

    A column of an encoding that Arrow does not read as a dictionary is left out.
    """
    longest = {}
    for path in paths:
        try:
            first = next(file.iter_batches(1, row_groups=[group], columns=[path], use_threads=False), None)
        except (pa.ArrowNotImplementedError, OSError):  # Arrow says either; a file that cannot be read says so again
            continue
        longest[path] = max((_longest(column) for column in first.columns), default=0) if first is not None else 0
    return longest


def _longest(array: Any) -> int:
    """Return the longest value of the dictionaries within an array."""
    if types.is_dictionary(array.type):
        sizes = row_bytes(array.dictionary)
        return int(sizes if isinstance(sizes, float) else max(sizes, default=0))
    if types.is_struct(array.type):
        return max((_longest(child) for child in array.flatten()), default=0)
    if types.is_map(array.type):
        return max(_longest(array.keys), _longest(array.items))
    return _longest(array.values) if types.is_nested(array.type) else 0
