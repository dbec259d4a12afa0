"""Helpers of the index tests: options in short, and a remote reader that serves a local folder."""

from __future__ import annotations

import builtins
import contextlib
import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.config import IndexOptions
from sqlstream.errors import ObjectNotFoundError
from sqlstream.index.build.build import open_index
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import stamp_sqlite
from sqlstream.index.sources.base.base import TableFile
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.protocols import DownloadRoom, ObjectInfo


class FolderReader:
    """Serves `folder` as `base`; counts what is asked. Stands for the helper process, whose own tests are in tests/storage."""

    def __init__(self, folder: Path, base: str = "s3://bucket") -> None:
        self.folder, self.base = folder, base
        self.count: Counter[str] = Counter()
        self.num_bytes = 0
        """Bytes of ranges."""

    def with_access(self, access: Access) -> FolderReader:
        self.count["with_access"] += 1
        return self

    def head(self, url: str) -> ObjectInfo:
        self.count["head"] += 1
        return self._info(url)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.count["list"] += 1
        for path in sorted(self.folder.rglob("*")):
            url = f"{self.base}/{path.relative_to(self.folder)}"
            if path.is_file() and url.startswith(prefix):
                yield self._info(url)

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        self.count["download"] += 1
        assert room is not None
        room.need(self._path(url).stat().st_size)
        info = self._info(url)
        shutil.copyfile(self._path(url), path)
        return info

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> builtins.list[bytes]:
        self.count["get_ranges"] += 1
        data = self._path(url).read_bytes()
        self.num_bytes += sum(stop - start for start, stop in ranges)
        return [data[start:stop] for start, stop in ranges]

    def _path(self, url: str) -> Path:
        return self.folder / url.removeprefix(self.base + "/")

    def _info(self, url: str) -> ObjectInfo:
        if not self._path(url).is_file():
            raise ObjectNotFoundError(f"{url}: 404")
        status = self._path(url).stat()
        return ObjectInfo(url=url, size_bytes=status.st_size, etag=str(status.st_mtime_ns))


class NoReader(FolderReader):
    """For local sources: whoever asks it anything fails."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"))


def options(src: Any, **changes: Any) -> IndexOptions:
    """Return options for `src`."""
    return IndexOptions(src=str(src) if isinstance(src, Path) else src, **changes)


def build(directory: Path, src: Any, remote: FolderReader | None = None, **changes: Any) -> Index:
    """Open the index of `src` in `directory/index`."""
    place = directory / "index"
    place.mkdir(exist_ok=True)
    return open_index(options(src, **changes), place, remote or NoReader(), show_progress=False)


def all_rows(index: Index) -> list[dict[str, object]]:
    """Return every selected row, in order."""
    import numpy as np

    return index.rows(index.row_ids(np.arange(len(index))).tolist())


def rows_in(table: TableFile) -> list[dict[str, object]]:
    """Return the rows of one file, without an index."""
    return [row for batch in table.batches(table.schema().names) for row in batch.to_pylist()]


def write_csv(path: Path, text: str) -> Path:
    """Write a text file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


ROWS: list[dict[str, object]] = [
    {"index": "a", "n": 1, "x": 1.5, "ok": True, "text": "one, two"},
    {"index": "b", "n": None, "x": -2.0, "ok": False, "text": None},
    {"index": "c", "n": -3, "x": None, "ok": None, "text": "line\nbreak"},
]


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write `rows` in the format of the path's extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    elif path.suffix in (".jsonl", ".ndjson"):
        path.write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [mark.join(rows[0])]
        for row in rows:
            cells = ["" if v is None else f'"{v}"' if isinstance(v, str) else str(v) for v in row.values()]
            lines.append(mark.join(cells))
        path.write_text("\n".join(lines) + "\n")
    return path


def make_samples(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def forget_content(index: Index) -> None:
    """Have the file of an index say nothing of its content, as those of earlier versions."""
    index.close()
    with contextlib.closing(sqlite3.connect(index.path)) as file:
        file.execute("DELETE FROM meta WHERE key = 'content'")
        file.commit()
    stamp_sqlite(index.path)
