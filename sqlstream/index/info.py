"""What is known of index files without reading their rows; needs no pyarrow."""

from __future__ import annotations

from pathlib import Path

from sqlstream.index.models import IndexInfo, SelectionInfo, SourceFile
from sqlstream.index.store import connect, damage_named, positions_path, read_columns, read_selection


def describe(path: Path, selection: SelectionInfo | None = None) -> IndexInfo:
    """Return what an index file (and a selection on it) is.

    Raises:
        IndexDatabaseError: The file is damaged, or none of ours.
    """
    with damage_named(path):
        connection = connect(path)
        try:
            meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
            columns = read_columns(connection)
            sources = connection.execute("SELECT url, size_bytes, etag FROM sources ORDER BY position").fetchall()
        finally:
            connection.close()
    size_bytes = path.stat().st_size
    if selection is not None:
        size_bytes += positions_path(path.parent, selection.fingerprint).stat().st_size
    return IndexInfo(
        fingerprint=meta["fingerprint"] if selection is None else selection.fingerprint,
        path=str(path),
        src=meta["src"],
        key_column=meta["key_column"],
        columns=columns,
        num_rows=meta["num_rows"],
        num_selected=meta["num_rows"] if selection is None else selection.num_selected,
        size_bytes=size_bytes,
        sources=tuple(SourceFile(url=url, size_bytes=size, etag=etag) for url, size, etag in sources),
        query=meta.get("query") if selection is None else selection.query,
        created_at=meta["created_at"],
        is_lazy=bool(meta.get("is_lazy")),
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
