"""Finds a quote in a CSV file that nothing closes: a reader takes all lines up to the next quote as one value.

A file whose quotes all stand where a field begins or ends is well formed, which numpy sees as fast as the file is read. Any
other file is read once more by Python's reader: text such as `5" pipe`, or `"a" b` within one line, is read as it stands; a row
of several lines whose quotes do not match, or that the file's end cuts off, is an error.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.base import Reading
from sqlstream.index.sources.base.byte_source import ByteSource

BLOCK_BYTES = 1 << 20
"""Arbitrary: some blocks are in the processor's cache."""
_BOM = b"\xef\xbb\xbf"
_ASCII_INSIDE = re.compile(r"utf-?8(-sig)?|ascii|latin-?1|iso-?8859-?\d+|(cp|windows-?)125\d", re.IGNORECASE)
"""Encodings in which a byte below 128 is always that character of ASCII."""


def check_quotes(
    source: ByteSource, name: str, reading: Reading, delimiter: str, rows_of: Callable[[Iterable[str], bool], Any]
) -> None:
    """Raise if a quoted value swallows lines that are rows of their own.

    Args:
        source: The file.
        name: What errors call it.
        reading: Compression, encoding, quotes.
        delimiter: Between two values.
        rows_of: (lines, is_strict) → Python's CSV reader.

    Raises:
        SourceError: A quote is never closed, or is closed in the middle of a value some lines later.
    """
    quote = reading.quote_char
    if not quote:
        return
    if _ASCII_INSIDE.fullmatch(reading.encoding_of(source)) and f"{quote}{delimiter}".isascii() and len(delimiter) == 1:
        marks = np.frombuffer(f"{delimiter}{quote}\r\n".encode(), np.uint8)  # [4]
        if is_well_formed(source, reading, ord(quote), marks):
            return
    previous = csv.field_size_limit(2**31 - 1)
    try:
        with reading.open_text(source, errors="replace") as file:
            _check_rows(rows_of(file, True), name)
    finally:
        csv.field_size_limit(previous)


def is_well_formed(source: ByteSource, reading: Reading, quote: int, marks: np.ndarray, block_bytes: int = BLOCK_BYTES) -> bool:
    """Return whether each opening quote follows one of `marks`, each closing one precedes one, and the last one is closed."""
    num_quotes, carried = 0, b"\n"
    with reading.open_bytes(source) as file:
        block = file.read(block_bytes).removeprefix(_BOM)
        while carried:
            more = file.read(block_bytes) if block else b""
            data = np.frombuffer(carried + (block or b"\n"), np.uint8)  # [n]; the first byte was looked at, the last waits
            at = np.flatnonzero(data[1:-1] == quote) + 1  # [q]
            opens = (np.arange(len(at)) + num_quotes) % 2 == 0  # [q]
            neighbours = np.where(opens, data[at - 1], data[at + 1])  # [q]
            if not np.isin(neighbours, marks).all():
                return False
            num_quotes += len(at)
            carried, block = (data[-2:].tobytes(), more) if block else (b"", b"")
    return num_quotes % 2 == 0


def _check_rows(rows: Any, name: str) -> None:
    while True:
        first_line = rows.line_num + 1
        try:
            if next(rows, None) is None:
                return
        except csv.Error as error:
            num_lines = rows.line_num - first_line + 1
            if num_lines > 1 or "unexpected end of data" in str(error):
                raise SourceError(
                    f"{name}, line {first_line}: a quote is opened here and never closed, so that {num_lines} lines would "
                    "be one value: close it, double a quote that is text, or give quote_char='' if quotes mean nothing here"
                ) from error
