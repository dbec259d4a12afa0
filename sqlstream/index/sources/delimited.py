"""CSV and TSV files: read once for the types, once for the rows.

Arrow guesses types from the first block and fails, or loses text, when a later block differs. Here a column is a number only
if every value of the file reads back as it was written: one '007' or one '12a' anywhere keeps the whole column as text.
An empty field is None, a quoted empty one ('""') is ''. In columns of numbers and of true/false, NA, NULL and the like are
None.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from sqlstream.errors import SourceError
from sqlstream.index.sources.base import BATCH_ROWS, PLAIN, Reading, arrow_errors

_BLOCK_BYTES = 4 << 20
_CURE = (
    "Check that it is whole and UTF-8 (else give encoding), that quotes are closed, "
    f"and that a row is below {_BLOCK_BYTES >> 20} MiB"
)
_DELIMITERS = ",;\t|"
_WHOLE = r"^(?:0|-?[1-9][0-9]*)$"  # no '007', '+5', '-0': ids, phone numbers
_NUMBER = r"^[+-]?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?[eE][+-]?[0-9]+)$"
_SPECIAL = r"^(?:nan|NaN|NAN|[+-]?(?:inf|Inf|INF|[Ii]nfinity))$"
_BOOL = r"^(?:true|True|TRUE|false|False|FALSE)$"
_TRUE = ("true", "True", "TRUE")
_MISSING = ("NA", "N/A", "n/a", "#N/A", "NULL", "Null", "null", "None")
_EXACT_DIGITS = 15  # that a float64 always holds
_INT64_DIGITS = 18  # that an int64 always holds


class DelimitedTable:
    """A text file with a header line and one row a line (more when quoted)."""

    num_rows: int | None = None
    _usual_delimiter = ","

    def __init__(self, path: Path, name: str, reading: Reading = PLAIN) -> None:
        self._path, self._name, self._reading = path, name, reading
        with arrow_errors(name, _CURE):
            self._encoding = reading.encoding_of(path)
            self._delimiter = reading.delimiter or self._find_delimiter()
        self._header = self._read_header()
        self._types: dict[str, pa.DataType] = {}

    def schema(self) -> pa.Schema:
        """Return the columns; reads the file once."""
        kinds: dict[str, set[str]] = {column: set() for column in self._header}
        if len(kinds) == len(self._header):  # else the merge of schemas names the column that comes twice
            for batch in self._text_batches(self._header):
                for column, values in zip(self._header, batch.columns, strict=True):
                    if "text" not in kinds[column]:
                        kinds[column] |= _kinds(values)
        self._types = {column: decide(seen) for column, seen in kinds.items()}
        return pa.schema([pa.field(column, self._types[column]) for column in self._header])

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows; `schema` comes first."""
        for block in self._text_batches(names):
            for start in range(0, block.num_rows, BATCH_ROWS):
                batch = block.slice(start, BATCH_ROWS)
                columns = [_convert(values, self._types[name]) for name, values in zip(names, batch.columns, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, names=list(names))

    def _find_delimiter(self) -> str:
        """Return the usual delimiter, or another one when the first line has only that."""
        with self._reading.open_text(self._path, errors="replace") as file:
            line = next((line for line in file if line.strip()), "")
        if self._usual_delimiter in line:
            return self._usual_delimiter
        return next((mark for mark in _DELIMITERS if mark in line), self._usual_delimiter)

    def _lines(self, file: Iterable[str]) -> Any:
        """Return Python's reader, which keeps count of lines; its slower walk serves the header and errors."""
        quote = self._reading.quote_char
        if not quote:
            return csv.reader(file, delimiter=self._delimiter, quotechar=None, quoting=csv.QUOTE_NONE)
        return csv.reader(file, delimiter=self._delimiter, quotechar=quote)

    def _read_header(self) -> list[str]:
        with arrow_errors(self._name, _CURE), self._reading.open_text(self._path) as file:
            try:
                header: list[str] | None = next((row for row in self._lines(file) if row), None)
            except (UnicodeDecodeError, csv.Error) as error:
                raise SourceError(
                    f"{self._name}: the header is not text in {self._encoding.removesuffix('-sig').upper()} ({error}): "
                    "save the file as UTF-8, or give encoding"
                ) from error
        if header is None:
            raise SourceError(f"{self._name} is empty: it needs a header line with the names of the columns")
        return header

    def _text_batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield blocks with every value as text."""
        try:
            yield from pacsv.open_csv(
                self._reading.open_stream(self._path),
                read_options=pacsv.ReadOptions(block_size=_BLOCK_BYTES, encoding=self._encoding.removesuffix("-sig")),
                parse_options=pacsv.ParseOptions(
                    delimiter=self._delimiter, quote_char=self._reading.quote_char or False, newlines_in_values=True
                ),
                convert_options=pacsv.ConvertOptions(
                    column_types=dict.fromkeys(self._header, pa.string()),
                    include_columns=list(names),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            self._raise_if_ragged(error)
            if isinstance(error, UnicodeDecodeError):
                raise SourceError(f"{self._name} is not in {self._encoding} ({error}): give another encoding") from error
            with arrow_errors(self._name, _CURE):
                raise

    def _raise_if_ragged(self, cause: Exception) -> None:
        """Find the first row of the wrong length; only a file that failed is read this way, so it may be slow."""
        previous = csv.field_size_limit(2**31 - 1)
        try:
            with self._reading.open_text(self._path, errors="replace") as file:
                reader, line = self._lines(file), 1
                for row in reader:
                    if row and len(row) != len(self._header):
                        raise SourceError(
                            f"{self._name}, line {line}: {len(row)} values, but the header has {len(self._header)} columns: "
                            "complete the row, or quote values that hold the delimiter"
                        ) from cause
                    line = reader.line_num + 1
        except (csv.Error, OSError):
            return  # Arrow's own words say more
        finally:
            csv.field_size_limit(previous)


class TabDelimitedTable(DelimitedTable):
    """The same with tabs."""

    _usual_delimiter = "\t"


def decide(kinds: set[str]) -> pa.DataType:
    """Return the type of a column whose values are of these kinds.

    Example:
        >>> decide({"whole", "number"}), decide({"whole", "text"})
        (DataType(double), DataType(string))
    """
    seen = kinds - {"missing", "long"}
    if not kinds:
        return pa.null()
    if seen == {"bool"}:
        return pa.bool_()
    if seen == {"whole"}:
        return pa.int64()
    if "wide" in seen and seen <= {"whole", "wide"} and "negative" not in seen:
        return pa.uint64()
    if seen and seen <= {"whole", "number"} and "long" not in kinds:
        return pa.float64()
    return pa.string()


def _kinds(column: Any) -> set[str]:
    """Return which kinds of value are in a block of texts."""
    values = column.drop_null()
    kinds: set[str] = set()
    for kind, pattern in (("whole", _WHOLE), ("number", _NUMBER), ("number", _SPECIAL), ("bool", _BOOL)):
        if not len(values):
            return kinds
        matches = pc.match_substring_regex(values, pattern)
        found = values.filter(matches)
        if len(found):
            kinds |= _whole_kinds(found) if kind == "whole" else {kind}
        values = values.filter(pc.invert(matches))
    if not len(values):
        return kinds
    return kinds | ({"missing"} if pc.all(_is_one_of(values, _MISSING)).as_py() else {"text"})


def _whole_kinds(values: Any) -> set[str]:
    longest = pc.max(pc.utf8_length(values)).as_py()
    kinds = {"whole"} | ({"long"} if longest > _EXACT_DIGITS else set())
    if longest <= _INT64_DIGITS:
        return kinds
    try:
        values.cast(pa.int64())
    except pa.ArrowInvalid:
        try:
            values.cast(pa.uint64())
        except pa.ArrowInvalid:
            return {"text"}  # no integer type holds all of them, and a float would lose digits
        return kinds | {"wide"}
    return kinds


def _is_one_of(values: Any, words: tuple[str, ...]) -> Any:
    return pc.is_in(values, pa.array(words))  # made when it is used: Arrow's first conversion imports pandas, 30 MB of a worker


def _convert(values: Any, kind: pa.DataType) -> Any:
    if pa.types.is_string(kind):
        return values
    if pa.types.is_null(kind):
        return pa.nulls(len(values))
    present = pc.if_else(_is_one_of(values, _MISSING), pa.scalar(None, pa.string()), values)
    if pa.types.is_boolean(kind):
        return pc.if_else(pc.is_valid(present), _is_one_of(present, _TRUE), pa.scalar(None, pa.bool_()))
    return present.cast(kind)
