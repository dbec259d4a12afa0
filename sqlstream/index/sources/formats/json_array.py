"""JSON (.json): one array of objects; or one object a line, as C4 and other data sets have it under this name.

The first character says which of the two it is: `[`, or `{`. An array is streamed with the standard library's `raw_decode` over
a growing window of text. Rejected: `ijson`, a dependency that is slower than the C scanner of `json` for rows of small objects
and turns floats into Decimals unless told otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.base import PLAIN, Reading, arrow_errors
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.sources.formats.json_lines import JsonLinesTable
from sqlstream.index.sources.formats.json_values import CURE, MAYBE_HUGE, JsonRecords, Record

CHUNK = 1 << 20
"""Characters read at a time."""
_LONGEST = 256 << 20  # characters of one element: more is a quote that was never closed
_TAIL = 16  # an error this near to the window's end may be a token that is cut there ('\\u00', '-Infini')
_BLANK = " \t\n\r"


class JsonTable(JsonRecords):
    """A file that holds one JSON array of objects, or one object a line."""

    def __init__(self, source: ByteSource, name: str, reading: Reading = PLAIN, *, chunk: int = CHUNK) -> None:
        super().__init__(name)
        self._source, self._reading, self._chunk = source, reading, chunk

    def records(self) -> Iterator[Record]:
        """Yield the array's elements, or the lines' objects."""
        with arrow_errors(self._name, CURE), self._reading.open_text(self._source) as file:
            window = _Window(file, self._name, self, self._chunk)
            if (start := window.take()) == "{":
                yield from self._lines()
                return
            if start != "[":
                found = "nothing" if start == "" else repr(start)
                raise SourceError(
                    f"{self._name} starts with {found}, not with an array ('[') or a line ('{{') of objects: write it as one"
                )
            number = 0
            while (separator := window.take()) != "]" if number else not window.take_if("]"):
                if number and separator != ",":
                    window.fail(f"expected ',' or ']' after element {number}")
                number += 1
                yield self.record(window.decode(number), f"element {number}")
            if rest := window.take():
                window.fail(f"expected the end of the file after ']', found {rest!r}")

    def _lines(self) -> Iterator[Record]:
        """Yield the objects of a file that has one a line.

        Raises:
            SourceError: It is one document, or a line of it is no object.
        """
        is_first = True
        try:
            for record in JsonLinesTable(self._source, self._name, self._reading).records():
                yield record
                is_first = False
        except SourceError as error:
            if not is_first:
                raise
            raise SourceError(
                f"{self._name} starts with '{{', and its first line is no object: {error}; a document has its rows in an array "
                "('['), or one a line"
            ) from error


class _Window:
    """The part of a text that is in memory, and a reading position in it."""

    def __init__(self, file: TextIO, name: str, records: JsonRecords, chunk: int) -> None:
        self._file, self._name, self._huge, self._chunk = file, name, records.huge, chunk
        self._text, self._at, self._line = "", 0, 1
        self._is_whole = False
        self._usual, self._watching = json.JSONDecoder(), json.JSONDecoder(parse_float=records.parse_float)
        self._decoder = self._usual

    def take(self) -> str:
        """Return the next character that is not blank, '' at the end."""
        self._skip_blank()
        character = self._text[self._at : self._at + 1]
        self._at += len(character)
        return character

    def take_if(self, character: str) -> bool:
        """Take the next character only if it is this one."""
        self._skip_blank()
        is_next = self._text.startswith(character, self._at)
        self._at += is_next
        return is_next

    def decode(self, number: int) -> object:
        """Return the next JSON value, element `number` of the array."""
        self._skip_blank()
        size = self._chunk
        while True:
            self._huge.clear()  # of an attempt that came to the window's end
            try:
                value, self._at = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                may_be_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _TAIL
                if self._is_whole or not may_be_cut or len(self._text) - self._at > _LONGEST:
                    self._at = min(error.pos, len(self._text))
                    self.fail(f"element {number}: {error.msg}", error)
                self._read(size)
                size *= 2  # so a long element is scanned a few times, not once a chunk
            except RecursionError as error:
                self.fail(f"element {number} is nested too deeply", error)
            except ValueError as error:  # an integer of more digits than Python reads
                self.fail(f"element {number}: {error}", error)
            else:
                return value  # complete: elements are objects, whose end is their '}' (a cut number is refused as no object)

    def fail(self, what: str, cause: Exception | None = None) -> None:
        """Raise a SourceError at the reading position."""
        line = self._line + self._text.count("\n", 0, self._at)
        raise SourceError(f"{self._name}, line {line}: {what}: the file is cut short or is no JSON, write it again") from cause

    def _skip_blank(self) -> None:
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANK:
                self._at += 1
            if self._at < len(self._text) or self._is_whole:
                return
            self._read(self._chunk)

    def _read(self, size: int) -> None:
        self._line += self._text.count("\n", 0, self._at)
        try:
            more = self._file.read(size)
        except UnicodeError as error:
            raise SourceError(
                f"{self._name}, after line {self._line}: not in its encoding ({error}): save it as UTF-8, or give encoding"
            ) from error
        self._is_whole = not more
        self._text, self._at = self._text[self._at :] + more, 0
        self._decoder = self._watching if MAYBE_HUGE.search(self._text) else self._usual
