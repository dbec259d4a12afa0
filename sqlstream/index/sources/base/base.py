"""What every table format does: say its columns, then give its rows in batches."""

from __future__ import annotations

import codecs
import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.index.types.schema import normal_type

BATCH_ROWS = 16_384
"""Rows converted to Python values at a time: some MiB, and larger is not faster."""
_BUFFER_BYTES = 1 << 20  # arbitrary: a decompressed block
_MARKS = (  # UTF-32 first: its mark begins as that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a file of text is read; formats that are no text ignore it."""

    compression: Literal["gzip", "zstd"] | None = None
    """By the file's first bytes."""
    encoding: str | None = None
    """None: UTF-8, or what a byte order mark says."""
    delimiter: str | None = None
    """Of CSV; None: found out."""
    quote_char: str = '"'
    """Of CSV; '' quotes nothing."""

    def open_bytes(self, source: ByteSource) -> io.BufferedReader:
        """Open the content, decompressed."""
        return io.BufferedReader(self.open_stream(source), _BUFFER_BYTES)

    def open_stream(self, source: ByteSource) -> Any:
        """Open the content as Arrow reads it, decompressed."""
        file = source.open()
        return file if self.compression is None else pa.CompressedInputStream(file, self.compression)

    def open_text(self, source: ByteSource, *, errors: str = "strict") -> io.TextIOWrapper:
        """Open the content as text, lines as they are."""
        return io.TextIOWrapper(self.open_bytes(source), encoding=self.encoding_of(source), errors=errors, newline="")

    def encoding_of(self, source: ByteSource) -> str:
        """Return the name of the text's encoding; byte order marks are skipped with it."""
        named = codecs.lookup(self.encoding or "utf-8").name
        if self.encoding is None or named.startswith(("utf-16-", "utf-32-")):  # which take a mark for a character
            with self.open_bytes(source) as file:
                start = file.read(4)
            for mark, encoding in _MARKS:
                if start.startswith(mark) and (self.encoding is None or named.startswith(encoding)):
                    return encoding
        return "utf-8-sig" if named == "utf-8" else str(self.encoding)  # UTF-8 may have a mark, also where it is named


PLAIN = Reading()
"""UTF-8, not compressed, commas."""


class TableFile(Protocol):
    """One table file. Made from (source, name, reading); `name` is the redacted URL, for errors."""

    def schema(self) -> pa.Schema:
        """Return the columns with types that hold for the whole file (formats without types are read once for it)."""
        ...

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order, with the columns `names` (each in the schema), a bounded number of bytes at a time."""
        ...


class OpenTable(Protocol):
    """The constructor of a format."""

    def __call__(self, source: ByteSource, name: str, reading: Reading = ..., /) -> TableFile:
        """Open `source`, which errors call `name`."""
        ...


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns without metadata: ours says how values are encoded, which no file may claim."""
    return pa.schema([field.remove_metadata() for field in schema])


def plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows without runs and views, of which Arrow cannot take some (`filter`, `take`)."""
    return pa.RecordBatch.from_arrays([_plain_array(column) for column in batch.columns], names=batch.schema.names)


def _plain_array(array: Any) -> Any:
    if pa.types.is_run_end_encoded(array.type):
        return _plain_array(pc.call_function("run_end_decode", [array]))
    if not _has_views(array.type):
        return array
    array = _without_list_views(array)
    if pa.types.is_dictionary(array.type):
        return pa.DictionaryArray.from_arrays(array.indices, _plain_array(array.dictionary))
    kind = normal_type(array.type)
    return array if kind is None else array.cast(kind)  # None: no index can hold it, as its schema says


def _without_list_views(array: Any) -> Any:
    """Return the array with lists in place of list views: Arrow's casts of these lose rows, without an error."""
    kind = array.type
    if not _has(kind, _is_list_view):
        return array
    if pa.types.is_struct(kind):
        children = [_without_list_views(child) for child in array.flatten()]
        return pa.StructArray.from_arrays(children, names=[field.name for field in kind], mask=array.is_null())
    load_pandas()
    if pa.types.is_map(kind) or pa.types.is_dictionary(kind):
        return pa.array(array.to_pylist(), normal_type(kind))
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)  # [n]
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, _without_list_views(array.flatten()), mask=array.is_null())


def _is_list_view(kind: Any) -> bool:
    return pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)


def _is_view(kind: Any) -> bool:
    return pa.types.is_string_view(kind) or pa.types.is_binary_view(kind) or _is_list_view(kind)


def _has_views(kind: Any) -> bool:
    return _has(kind, _is_view)


def _has(kind: Any, is_one: Callable[[Any], bool]) -> bool:
    """Return whether a type, or one within it, is such a one."""
    if pa.types.is_dictionary(kind):
        return _has(kind.value_type, is_one)
    return is_one(kind) or any(_has(kind.field(at).type, is_one) for at in range(kind.num_fields))


@contextlib.contextmanager
def arrow_errors(name: str, cure: str) -> Iterator[None]:
    """Turn what Arrow and the disk say about a broken file into a SourceError that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeError) as error:  # UTF-16 without its mark is no UnicodeDecodeError
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise SourceError(f"{name} cannot be read: {first_line[:300]}. {cure}") from error
