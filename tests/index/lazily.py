"""Lazy indexes of local files, for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlstream.config import LazyOptions
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.lazy_build import open_lazy_index
from tests.index.sources import FolderReader, NoReader, options

CHUNK_ROWS = 100


def open_lazily(directory: Path, src: Any, remote: FolderReader | None = None, **changes: Any) -> LazyIndex:
    place = directory / "index"
    place.mkdir(exist_ok=True)
    lazy = LazyOptions(chunk_rows=changes.pop("chunk_rows", CHUNK_ROWS))
    wanted = replace(options(src, **changes), lazy=lazy)
    return open_lazy_index(wanted, place, remote or NoReader(), show_progress=False)


def rows_of(index: LazyIndex) -> list[dict[str, object]]:
    """All kept rows of a local source."""
    chunks = [index.read(number, []) for number in range(len(index.bounds) - 1)]
    return [row for chunk in chunks for row in chunk.rows(chunk.row_ids)]
