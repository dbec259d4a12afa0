"""JSON Lines (.jsonl, .ndjson): one object a line."""

from __future__ import annotations

from collections.abc import Iterator

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.base import PLAIN, Reading, arrow_errors
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.sources.formats.json_values import CURE, JsonRecords, Record

_BOM = b"\xef\xbb\xbf"


class JsonLinesTable(JsonRecords):
    """A text file of JSON objects, one a line; empty lines are skipped."""

    def __init__(self, source: ByteSource, name: str, reading: Reading = PLAIN) -> None:
        super().__init__(name)
        self._source, self._reading = source, reading

    def records(self) -> Iterator[Record]:
        """Yield the lines' objects."""
        with arrow_errors(self._name, CURE):
            encoding = self._reading.encoding_of(self._source)
            yield from self._text_records() if encoding != "utf-8-sig" else self._records()

    def _text_records(self) -> Iterator[Record]:
        """Yield the objects of a text in another encoding, in which a line's end may be more bytes than one."""
        with self._reading.open_text(self._source) as file:
            try:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._record(number, line.encode())
            except UnicodeError as error:
                raise SourceError(f"{self._name} is not in its encoding ({error}): give another encoding") from error

    def _records(self) -> Iterator[Record]:
        with self._reading.open_bytes(self._source) as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(_BOM).strip()
                if text:
                    yield self._record(number, text)

    def _record(self, number: int, text: bytes) -> Record:
        try:
            value = self.parse(text.decode())
        except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
            raise SourceError(f"{self._name}, line {number}: no JSON object ({error}): mend or remove the line") from error
        return self.record(value, f"line {number}")
