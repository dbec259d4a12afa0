"""What is known of index files without reading their rows, and which of them are damaged; needs no pyarrow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.connection import read_columns, reading
from sqlstream.index.file.intact import check_plain, is_intact
from sqlstream.index.file.npy import load_npy
from sqlstream.index.file.selection import positions_path, read_selection
from sqlstream.index.types.models import DamagedShard, IndexInfo, JoinedTable, SelectionInfo, SourceFile
from sqlstream.index.types.origins import JoinedColumns

_DAMAGED = "SELECT shard, num_samples, damage FROM shards WHERE damage IS NOT NULL ORDER BY shard"


def describe(path: Path, selection: SelectionInfo | None = None) -> IndexInfo:
    """Return what an index file (and a selection on it) is.

    Raises:
        IndexDatabaseError: The file is damaged, or none of ours.
    """
    with reading(path) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        columns = read_columns(connection)
        sources = connection.execute("SELECT url, size_bytes, etag FROM sources ORDER BY position").fetchall()
        has_shards = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'shards'").fetchone()
        damaged = connection.execute(_DAMAGED).fetchall() if has_shards else []
    files = [SourceFile(url=url, size_bytes=size, etag=etag) for url, size, etag in sources]
    joined = []
    for name, num_sources, names in JoinedColumns.of(meta):
        joined.append(JoinedTable(name=name, columns=names, sources=tuple(files[:num_sources])))
        del files[:num_sources]
    size_bytes = path.stat().st_size
    problem = meta.get("key_problem")
    if selection is not None:
        problem = problem and selection.key_problem
        size_bytes += positions_path(path.parent, selection.fingerprint).stat().st_size
    return IndexInfo(
        fingerprint=meta["fingerprint"] if selection is None else selection.fingerprint,
        path=str(path),
        src=meta["src"],
        key_column=meta["key_column"] if problem is None else None,
        columns=columns,
        num_rows=meta["num_rows"],
        num_selected=meta["num_rows"] if selection is None else selection.num_selected,
        size_bytes=size_bytes,
        sources=tuple(files),
        query=meta.get("query") if selection is None else selection.query,
        created_at=meta["created_at"],
        is_lazy=bool(meta.get("is_lazy")),
        joined=tuple(joined),
        num_uncounted=int(meta.get("num_uncounted") or 0),
        damaged=tuple(DamagedShard(shard=shard, num_samples=num, damage=damage) for shard, num, damage in damaged),
    )


def list_indexes(directory: Path) -> list[IndexInfo]:
    """Return every index in `directory` (`<dst>/index`), selections after the index file that they select from."""
    selections = [found for path in sorted(directory.glob("*.selection.json")) if (found := read_selection(path)) is not None]
    indexes = []
    for path in sorted(directory.glob("*.sqlite")):
        indexes.append(describe(path))
        own = [s for s in selections if s.base == path.stem and positions_path(directory, s.fingerprint).exists()]
        indexes.extend(describe(path, selection) for selection in own)
    return indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexProblem:
    """A file that is not as it was written."""

    path: str
    explanation: str
    repaired: bool
    """It was removed; the next run that wants it builds it again."""


def verify_indexes(directory: Path, *, repair: bool = False) -> tuple[list[IndexProblem], int]:
    """Return what is damaged in `directory` (`<dst>/index`), and how many files were read.

    Args:
        directory: Where index files are.
        repair: Remove what is damaged.
    """
    problems, num_files = [], 0
    for path in sorted(directory.iterdir()):
        check = next((check for suffix, check in _CHECKS.items() if path.name.endswith(suffix)), None)
        if check is None:
            continue
        num_files += 1
        is_ours = False
        try:
            check_plain(path)
            is_ours = True
            if is_intact(path, most_bytes=None) is False:
                raise IndexDatabaseError(f"{path} is not as it was written: its checksum is another one")
            check(path)
        except FileNotFoundError:  # removed meanwhile
            continue
        except (IndexDatabaseError, OSError, ValueError) as error:
            if repair and is_ours:
                path.unlink(missing_ok=True)
            problems.append(IndexProblem(path=str(path), explanation=str(error), repaired=repair and is_ours))
    return problems, num_files


def _check_sqlite(path: Path) -> None:
    describe(path)
    if is_intact(path, most_bytes=None) is None:  # of a version that wrote no checksum
        with reading(path) as connection:
            found = [line for (line,) in connection.execute("PRAGMA integrity_check").fetchmany(3)]
        if found != ["ok"]:
            raise IndexDatabaseError(f"{path} is damaged: {'; '.join(map(str, found))}")


_CHECKS: dict[str, Callable[[Path], object]] = {
    ".sqlite": _check_sqlite,
    ".positions.npy": load_npy,
    ".weights.npy": load_npy,
    ".lengths.npy": load_npy,
    ".buckets.npy": load_npy,
    ".selection.json": read_selection,
}
