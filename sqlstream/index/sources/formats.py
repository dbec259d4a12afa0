"""Which extension is which table format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sqlstream.errors import ConfigError
from sqlstream.index.sources.base import OpenTable, TableFile
from sqlstream.index.sources.delimited import DelimitedTable, TabDelimitedTable
from sqlstream.index.sources.json_array import JsonArrayTable
from sqlstream.index.sources.json_lines import JsonLinesTable
from sqlstream.index.sources.parquet import ParquetTable
from sqlstream.storage import urls

FORMATS: Mapping[str, OpenTable] = {
    ".csv": DelimitedTable,
    ".tsv": TabDelimitedTable,
    ".json": JsonArrayTable,
    ".jsonl": JsonLinesTable,
    ".ndjson": JsonLinesTable,
    ".parquet": ParquetTable,
}
PATH_LIST = ".txt"
"""A text file whose lines are paths of table files."""


def is_table(url: str) -> bool:
    """Return True if the extension of `url` is one of a table format."""
    return urls.extension(url) in FORMATS


def check_table(url: str, src: str) -> None:
    """Raise ConfigError unless `url`, a part of the source `src`, is a table file."""
    if not is_table(url):
        found = urls.extension(url)
        what = f"has the unknown extension {found!r}" if found else "has no extension"
        of_source = "" if url == src else f" (in {urls.redact(src)})"
        raise ConfigError(
            f"{urls.redact(url)}{of_source} {what}: an index is one of {', '.join(FORMATS)}, a wildcard over these, "
            f"a {PATH_LIST} file with one path a line, or a directory of samples (end it with '/' and give data_type)"
        )


def open_table(path: Path, url: str) -> TableFile:
    """Open the local file `path`, which holds the table file `url`."""
    return FORMATS[urls.extension(url)](path, urls.redact(url))
