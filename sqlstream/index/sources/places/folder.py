"""Folders as Hugging Face `datasets` lays them out: `metadata.csv`, `.jsonl` or `.parquet` beside the files that it describes.

    train/metadata.csv: file_name,caption     →   index         | file_name     | caption
                        cat/1.jpg,a cat           train/cat/1.jpg | train/cat/1.jpg | a cat

`file_name`, `*_file_name` and the lists `file_names`, `*_file_names` are paths relative to their metadata file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import Any

from sqlstream.errors import SchemaError, SourceError
from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.sources.base.derived import DerivedTable

METADATA = re.compile(r"(?:.*/)?metadata\.(?:csv|jsonl|parquet)")
"""Paths of metadata files."""
FILE_NAME = "file_name"
PATHS = re.compile(r"(?:(.*)_)?file_name(s?)")
"""Columns of paths: what stands before `file_name`, and whether they hold lists."""


def with_paths(table: TableFile, folder: str, key: str, name: str) -> DerivedTable:
    """Return a metadata file's table with paths relative to the root, and the key column if it has none.

    Args:
        table: The metadata file.
        folder: Its place relative to the root, '' or with a slash at its end.
        key: The key column; a path names the sample when the table has no such column.
        name: The metadata file, for errors.

    Raises:
        SchemaError: It has no `file_name`, so it does not say what its rows describe.
    """
    columns = table.schema().names
    paths = [column for column in columns if PATHS.fullmatch(column)]
    if not paths:
        raise SchemaError(
            f"{name} has no column {FILE_NAME!r} (it has {', '.join(map(repr, columns[:30]))}), which says "
            "what its rows describe: add it, or give data_type to take the files of the folder as they are"
        )
    rewrites = dict.fromkeys(paths, _below(folder, name))
    return DerivedTable(table, {}, rewrites, {key: FILE_NAME} if FILE_NAME in paths else {})


def _below(folder: str, name: str) -> Callable[[Any], Any]:
    def rewrite(value: Any) -> Any:
        if isinstance(value, list):
            return [rewrite(item) for item in value]
        path = posixpath.normpath(folder + value)
        if "://" in value or value.startswith("/") or path.split("/", 1)[0] == "..":
            raise SourceError(
                f"{name}: the file name {value!r} leads out of its folder: give paths relative to the metadata file"
            )
        return path

    return rewrite
