"""JSON Lines (.jsonl, .ndjson): one object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from sqlstream.errors import SourceError
from sqlstream.index.sources.json_values import JsonRecords, Record, as_record

_BOM = b"\xef\xbb\xbf"


class JsonLinesTable(JsonRecords):
    """A text file of JSON objects, one a line; empty lines are skipped."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(name)
        self._path = path

    def records(self) -> Iterator[Record]:
        """Yield the lines' objects."""
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(_BOM).strip()
                if not text:
                    continue
                try:
                    value = json.loads(text.decode())
                except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
                    raise SourceError(
                        f"{self._name}, line {number}: no JSON object ({error}): mend or remove the line"
                    ) from error
                yield as_record(value, f"line {number}", self._name)
