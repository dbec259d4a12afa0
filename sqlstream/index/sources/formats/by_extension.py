"""Which extension is which table format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from sqlstream.errors import ConfigError
from sqlstream.index.sources.base.base import OpenTable, Reading, TableFile
from sqlstream.index.sources.base.byte_source import ByteSource
from sqlstream.index.sources.formats.arrow_file import ArrowTable
from sqlstream.index.sources.formats.delimited import DelimitedTable, TabDelimitedTable
from sqlstream.index.sources.formats.json_array import JsonTable
from sqlstream.index.sources.formats.json_lines import JsonLinesTable
from sqlstream.index.sources.formats.parquet import ParquetTable
from sqlstream.storage.base import urls
from sqlstream.storage.members.names import tar_extension
from sqlstream.storage.members.unpack import MAGIC_BYTES, Compression, compression_of

FORMATS: Mapping[str, OpenTable] = {
    ".csv": DelimitedTable,
    ".tsv": TabDelimitedTable,
    ".json": JsonTable,
    ".jsonl": JsonLinesTable,
    ".ndjson": JsonLinesTable,
    ".parquet": ParquetTable,
    ".arrow": ArrowTable,
    ".feather": ArrowTable,
    ".ipc": ArrowTable,
}
COMPRESSED = frozenset({".gz", ".zst", ".zstd"})
"""Extensions after that of a text format. Its first bytes tell: a server may have undone gzip on the way."""
_OF_ARROW: Mapping[Compression | None, Literal["gzip", "zstd"]] = {Compression.GZIP: "gzip", Compression.ZSTD: "zstd"}
TEXTS = frozenset((".csv", ".tsv", ".json", ".jsonl", ".ndjson"))
"""Formats of text, which has an encoding."""
PATH_LIST = ".txt"
"""A text file whose lines are paths of table files."""


def format_of(url: str) -> str:
    """Return the extension of the format.

    Example:
        >>> format_of("s3://bucket/a.csv.gz"), format_of("a.parquet"), format_of("a.tar.gz")
        ('.csv', '.parquet', '.gz')
    """
    name = url if "::" in url else urls.named(url).rstrip("/").rpartition("/")[2]  # of a chain the member has the name
    last = urls.extension(name)
    if last in COMPRESSED:
        inner = urls.extension(name[: -len(last)])
        if inner in TEXTS:
            return inner
    return last


def is_table(url: str) -> bool:
    """Return True if the extension of `url` is one of a table format."""
    return format_of(url) in FORMATS


def wildcard_with(path: str) -> str:
    """Return the pattern of all tables or shards of the format of `path` in its folder.

    Example:
        >>> wildcard_with("part-0.parquet"), wildcard_with("2024/a.b.csv.gz"), wildcard_with("train/0.tar.gz")
        ('*.parquet', '2024/*.csv.gz', 'train/*.tar.gz')
    """
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}*{name[name.lower().rindex(tar_extension(name) or format_of(name)) :]}"


def check_table(url: str, src: str) -> None:
    """Raise ConfigError unless `url`, a part of the source `src`, is a table file."""
    if not is_table(url):
        found = format_of(url)
        what = f"has the unknown extension {found!r}" if found else "has no extension"
        of_source = "" if url == src else f" (in {urls.redact(src)})"
        raise ConfigError(
            f"{urls.redact(url)}{of_source} {what}: an index is one of {', '.join(FORMATS)} (text also as .gz or .zst), "
            f"a wildcard over these, a {PATH_LIST} file with one path a line, the URL of a database, "
            "or a directory of samples (end it with '/' and give data_type)"
        )


def open_table(source: ByteSource, url: str, reading: Reading) -> TableFile:
    """Open the table file `url`, whose bytes are those of `source`."""
    extension = format_of(url)
    if extension in TEXTS:
        compression = compression_of(source.read_at(0, MAGIC_BYTES))
        reading = replace(reading, compression=_OF_ARROW.get(compression))
    return FORMATS[extension](source, urls.redact(url), reading)
