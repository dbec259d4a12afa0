"""CSV and TSV files: read once for the types, once for the rows.

Arrow guesses types from the first block and fails, or loses text, when a later block differs. Here a column is a number only
if every value of the file reads back as it was written: one '007' or one '12a' anywhere keeps the whole column as text. Only
a few numbers too large for their type, among numbers that are not, are rounded (or infinite), which one warning says.
An empty field is None, a quoted empty one ('""') is ''. In columns of numbers and of true/false this, NA, NULL and the like are
None, and among floats '-0' is one.
"""

from __future__ import annotations

import csv
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.base import BATCH_ROWS, PLAIN, Reading, arrow_errors
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.sources.formats.quoting import check_quotes
from sqlstream.index.types.models import ALL_MISSING
from sqlstream.index.types.pandas_import import load_pandas

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 << 20
"""The most that a row may be."""
_CURE = (
    "Check that it is whole and UTF-8 (else give encoding), that quotes are closed, "
    f"and that a row is below {BLOCK_BYTES >> 20} MiB"
)
_DELIMITERS = ",;\t|"
_FOR_EXCEL = re.compile(r"sep=.?", re.IGNORECASE)
_WHOLE = r"^(?:0|-?[1-9][0-9]*)$"  # no '007', '+5', '-0': ids, phone numbers
_NUMBER = r"^[+-]?(?:(?:0|[1-9][0-9]*)?\.[0-9]+|(?:0|[1-9][0-9]*)\.|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?[eE][+-]?[0-9]+)$"
_MINUS_ZERO = r"^-0$"  # among floats the one that it says; no integer is written so
_SPECIAL = r"^(?:nan|NaN|NAN|[+-]?(?:inf|Inf|INF|[Ii]nfinity))$"
_BOOL = r"^(?:true|True|TRUE|false|False|FALSE)$"
_PATTERNS = (("whole", _WHOLE), ("number", _NUMBER), ("number", _SPECIAL), ("minus zero", _MINUS_ZERO), ("bool", _BOOL))
_TRUE = ("true", "True", "TRUE")
_MAYBE_HUGE = r"^.{18,}[0-9]$|[0-9.][eE]\+?[0-9]{3,}$"  # no fewer digits make a number that no type holds
_MISSING = ("", "NA", "N/A", "n/a", "#N/A", "NULL", "Null", "null", "None")
_EXACT_DIGITS = 15  # that a float64 always holds
_INT64_DIGITS = 18  # that an int64 always holds
_INT64_MAX, _UINT64_MAX = 2**63 - 1, 2**64 - 1
_MOST_HUGE = 0.01  # of a column's values; arbitrary: with more of them they are names, and not mistakes
_SHOWN_DIGITS = 40  # of a number in a message


class DelimitedTable:
    """A text file with a header line and one row a line (more when quoted)."""

    _usual_delimiter = ","

    def __init__(self, source: ByteSource, name: str, reading: Reading = PLAIN, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._source, self._name, self._reading = source, name, reading
        self._block_bytes = block_bytes
        with arrow_errors(name, _CURE):
            self._encoding = reading.encoding_of(source)
            self._delimiter = reading.delimiter or self._find_delimiter()
        self._header = self._read_header()
        self._types: dict[str, pa.DataType] = {}

    def schema(self) -> pa.Schema:
        """Return the columns; reads the file once."""
        with arrow_errors(self._name, _CURE):
            check_quotes(self._source, self._name, self._reading, self._delimiter, self._lines)
        seen = {column: _Seen() for column in self._header}
        num_rows = 0
        if len(seen) == len(self._header):  # else the merge of schemas names the column that comes twice
            for batch in self._text_batches(self._header):
                for column, values in zip(self._header, batch.columns, strict=True):
                    seen[column].add(values, num_rows)
                num_rows += batch.num_rows
        self._types = {column: of_column.type_of(f"{self._name}: column {column!r}") for column, of_column in seen.items()}
        return pa.schema([pa.field(column, self._types[column], metadata=seen[column].metadata) for column in self._header])

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows; `schema` comes first."""
        for block in self._text_batches(names):
            for start in range(0, block.num_rows, BATCH_ROWS):
                batch = block.slice(start, BATCH_ROWS)
                columns = [_convert(values, self._types[name]) for name, values in zip(names, batch.columns, strict=True)]
                yield pa.RecordBatch.from_arrays(columns, names=list(names))

    def _find_delimiter(self) -> str:
        """Return the usual delimiter, or another one when the first line has only that."""
        with self._reading.open_text(self._source, errors="replace") as file:
            line = next((line for line in file if line.strip()), "")
        if self._usual_delimiter in line:
            return self._usual_delimiter
        return next((mark for mark in _DELIMITERS if mark in line), self._usual_delimiter)

    def _lines(self, file: Iterable[str], is_strict: bool = False) -> Any:
        """Return Python's reader, which keeps count of lines; its slower walk serves the header and errors."""
        quote = self._reading.quote_char
        if not quote:
            return csv.reader(file, delimiter=self._delimiter, quotechar=None, quoting=csv.QUOTE_NONE)
        return csv.reader(file, delimiter=self._delimiter, quotechar=quote, strict=is_strict)

    def _read_header(self) -> list[str]:
        with arrow_errors(self._name, _CURE), self._reading.open_text(self._source) as file:
            try:
                header: list[str] | None = next((row for row in self._lines(file) if row), None)
            except (UnicodeDecodeError, csv.Error) as error:
                raise SourceError(
                    f"{self._name}: the header is not text in {self._encoding.removesuffix('-sig').upper()} ({error}): "
                    "save the file as UTF-8, or give encoding"
                ) from error
        if header is None:
            raise SourceError(f"{self._name} is empty: it needs a header line with the names of the columns")
        if any("\0" in name for name in header):
            raise SourceError(
                f"{self._name}: the header has NUL, as texts in UTF-16 and UTF-32 without a byte order mark do: give encoding, "
                "as 'utf-16-le' or 'utf-16-be'"
            )
        if _FOR_EXCEL.fullmatch(self._delimiter.join(header)):
            raise SourceError(
                f"{self._name} begins with {self._delimiter.join(header)!r}, a note for Excel in the place of the names of the "
                "columns: remove that line"
            )
        return header

    def _text_batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield blocks with every value as text."""
        try:
            yield from pacsv.open_csv(
                self._reading.open_stream(self._source),
                read_options=pacsv.ReadOptions(block_size=self._block_bytes, encoding=self._encoding.removesuffix("-sig")),
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
            with self._reading.open_text(self._source, errors="replace") as file:
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


class _Seen:
    """What the values of a column are, block after block."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self._num_values = self._num_huge = 0
        self._first: dict[str, tuple[int, str]] = {}
        """Row and value of the first that is huge, or long."""
        self._missing: str | None = None
        """A word for a missing value; None: none was seen."""

    def add(self, values: Any, first_row: int) -> None:
        """Take in a block of texts, whose first row is the file's row `first_row`."""
        if "text" in self.kinds:
            return
        found = _kinds(values)
        self.kinds |= found
        self._num_values += len(values) - values.null_count
        if found == {"missing"} and self._missing is None:
            self._missing = values.drop_null()[0].as_py()
        for kind in found & {"huge", "long"}:
            pattern = _whole_of_more_digits(_EXACT_DIGITS) if kind == "long" else _MAYBE_HUGE
            rows = pc.indices_nonzero(pc.match_substring_regex(values, pattern)).to_pylist()
            rows = [row for row in rows if kind == "long" or _is_huge(values[row].as_py())]
            self._num_huge += len(rows) if kind == "huge" else 0
            if rows:
                self._first.setdefault(kind, (first_row + rows[0], values[rows[0]].as_py()))

    @property
    def metadata(self) -> dict[bytes, bytes] | None:
        """What the column's field says beside its type."""
        return {ALL_MISSING: self._missing.encode()} if self.kinds == {"missing"} and self._missing is not None else None

    def type_of(self, column: str) -> pa.DataType:
        """Return the column's type; say once when it rounds a number, or keeps numbers as text."""
        kinds = self.kinds
        if "huge" in kinds and self._num_huge > max(1, self._num_values * _MOST_HUGE):  # ids, say, and not exceptions
            kinds = kinds | {"long"}
        chosen = decide(kinds)
        if "text" in kinds or not self._first or not (pa.types.is_string(chosen) or pa.types.is_float64(chosen)):
            return chosen
        row, value = self._first.get("huge") or self._first["long"]
        shown = value if len(value) <= _SHOWN_DIGITS else f"{value[:_SHOWN_DIGITS]}… ({len(value)} digits)"
        if pa.types.is_float64(chosen) and "huge" in kinds:
            logger.warning(
                "%s is REAL: row %d has %s, which no %s, so this is %s (%d more values are too large)",
                column, row, shown, *_fate(value), self._num_huge - 1,
            )  # fmt: skip
        elif pa.types.is_string(chosen) and self.kinds <= {"whole", "number", "long", "huge", "wide", "negative", "missing"}:
            logger.warning(
                "%s is text, although its values are numbers: no type of number holds row %d's %s beside its other values "
                "exactly; cast it in your query to compare numbers",
                column, row, shown,
            )  # fmt: skip
        return chosen


def decide(kinds: set[str]) -> pa.DataType:
    """Return the type of a column whose values are of these kinds.

    Example:
        >>> decide({"whole", "number"}), decide({"whole", "text"}), decide({"whole", "huge"})
        (DataType(double), DataType(string), DataType(double))
    """
    seen = kinds - {"missing", "long", "negative"}
    seen -= {"minus zero"} if "number" in seen else set()
    if not kinds:
        return pa.null()
    if seen == {"bool"}:
        return pa.bool_()
    if seen == {"whole"}:
        return pa.int64()
    if "wide" in seen and seen <= {"whole", "wide"} and "negative" not in kinds:
        return pa.uint64()
    if seen and seen <= {"whole", "number", "huge"} and "long" not in kinds:
        return pa.float64()
    return pa.string()


def _kinds(column: Any) -> set[str]:
    """Return which kinds of value are in a block of texts."""
    values = column.drop_null()
    kinds: set[str] = set()
    for kind, pattern in _PATTERNS:
        if not len(values):
            return kinds
        matches = pc.match_substring_regex(values, pattern)
        found = values.filter(matches)
        if len(found):
            kinds |= _whole_kinds(found) if kind == "whole" else {kind}
            if pattern == _NUMBER and pc.any(pc.is_inf(found.cast(pa.float64()))).as_py():
                kinds.add("huge")
        values = values.filter(pc.invert(matches))
    if not len(values):
        return kinds
    return kinds | ({"missing"} if pc.all(_is_one_of(values, _MISSING)).as_py() else {"text"})


def _whole_kinds(values: Any) -> set[str]:
    """Return which kinds of integer are in a block of their texts."""
    lengths = pc.utf8_length(values)
    kinds = {"negative"} if pc.any(pc.starts_with(values, "-")).as_py() else set()
    for digits, kind in ((_EXACT_DIGITS, "whole"), (_INT64_DIGITS, "long")):
        if pc.min(lengths).as_py() <= digits:
            kinds.add(kind)
        if pc.max(lengths).as_py() <= digits:
            return kinds | {"whole"}
        values = values.filter(pc.match_substring_regex(values, _whole_of_more_digits(digits)))
        lengths = pc.utf8_length(values)
    for value in values.unique().to_pylist():
        kinds |= {"huge"} if _is_huge(value) else {"wide", "long"} if int(value) > _INT64_MAX else {"whole", "long"}
    return kinds


def _whole_of_more_digits(num_characters: int) -> str:
    return rf"^.{{{num_characters},}}[0-9]$"


def _is_huge(text: str) -> bool:
    """Return whether no integer type holds it, or, of a number that is not whole, no float."""
    if text.removeprefix("-").isdecimal():
        return len(text) > len(str(_UINT64_MAX)) or not -_INT64_MAX - 1 <= int(text) <= _UINT64_MAX
    try:
        return math.isinf(float(text))
    except ValueError:  # the column is text
        return False


def _fate(huge: str) -> tuple[str, str]:
    """Return what does not hold a number that is too large, and what becomes of it."""
    return ("type of number holds", "infinite") if math.isinf(float(huge)) else ("integer type holds", "rounded")


def _is_one_of(values: Any, words: tuple[str, ...]) -> Any:
    load_pandas()
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
