"""Filters: a user's SELECT becomes the positions of rows, or another index file when it computes columns."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.config import IndexOptions
from sqlstream.errors import QueryError, SchemaError, SourceError
from sqlstream.index.file.index import Index, positions_path, read_selection, selection_path
from sqlstream.index.file.intact import is_there
from sqlstream.index.file.key_check import find_duplicate
from sqlstream.index.file.npy import finish_npy, write_header
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sql.dialect import has_word, shortened
from sqlstream.index.sql.expressions import keeps_rows
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.types import values
from sqlstream.index.types.models import ANY, ENCODING, FORMAT_VERSION, ROW, SelectionInfo, fingerprint
from sqlstream.progress import Progress, progress
from sqlstream.sample_types import SAMPLE_FIELDS

logger = logging.getLogger(__name__)

_POSITIONS_AT_A_TIME = 65_536
_ROWS_AT_A_TIME = 8_192
_NATURAL = {int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}


def open_selection(base: Index, options: IndexOptions, directory: Path, *, show_progress: bool) -> Index:
    """Return what `options.sql_query` selects from `base`; found when an earlier run has done it.

    Raises:
        QueryError: The query does not run, or keeps no row.
        SchemaError: Its result lacks the key, or a column to download.
        SourceError: A selected row has no key, or the key of another.
    """
    assert options.sql_query is not None
    parts = {
        "format": FORMAT_VERSION,
        "base": base.fingerprint,
        "query": options.sql_query,
        "max_size": options.max_size,
        "download": sorted(options.columns_to_download),
        "allow_missing": options.allow_missing_columns,
        "engine": options.sql_engine,
    }
    key = fingerprint(parts)

    def select(place: Workplace) -> Index:
        assert options.sql_query is not None
        with (
            contextlib.closing(
                Sandbox(base, options.sql_query, engine=options.sql_engine, scratch=place.temporary("duckdb"))
            ) as sandbox,
            progress(options.max_size, " rows", "selecting", show_progress) as bar,
        ):
            if _keeps_rows(options) and sandbox.describe() == [ROW, *sandbox.columns]:
                return _Positions(base, options, place, key).write(sandbox, directory, bar)
            return _Table(base, options, place, key).write(sandbox, bar)

    return build_once(directory, key, lambda: _existing(base, options, key, directory), select, show_progress=show_progress)


def _selection_of(base: Index, options: IndexOptions, key: str, num_selected: int) -> SelectionInfo:
    assert options.sql_query is not None
    return SelectionInfo(
        fingerprint=key,
        base=base.fingerprint,
        query=options.sql_query,
        engine=options.sql_engine,
        max_size=options.max_size,
        num_selected=num_selected,
    )


def _existing(base: Index, options: IndexOptions, key: str, directory: Path) -> Index | None:
    computed = Index(directory / f"{key}.sqlite", base_url=base.base_url)
    if computed.is_usable():
        return computed
    path = selection_path(directory, key)
    selection = read_selection(path)
    if (
        not is_there(positions_path(directory, key)) or selection is None or not _keeps_rows(options)
    ):  # earlier ones went by names
        return None
    if selection != _selection_of(base, options, key, selection.num_selected):
        logger.warning("the index file %s is damaged: building it again", path)
        return None
    return _with_positions(base, selection)


def _keeps_rows(options: IndexOptions) -> bool:
    assert options.sql_query is not None
    return keeps_rows(options.sql_query, options.sql_engine)


def _with_positions(base: Index, selection: SelectionInfo) -> Index:
    return Index(base.path, selection=selection, base_url=base.base_url)


def _limited(rows: Iterator[list[tuple[Any, ...]]], max_size: int | None, bar: Progress) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the batches up to `max_size` rows in all."""
    left = max_size
    for batch in rows:
        taken = batch if left is None else batch[:left]
        bar.update(len(taken))
        yield taken
        if left is not None:
            left -= len(taken)
            if not left:
                return


class _Positions:
    """A query that gives rows of the index as they are: their ids are kept, in its order."""

    def __init__(self, base: Index, options: IndexOptions, place: Workplace, key: str) -> None:
        self._base, self._options, self._place, self._key = base, options, place, key

    def write(self, sandbox: Sandbox, directory: Path, bar: Progress) -> Index:
        """Write the positions, then the file that makes them valid."""
        statement = sandbox.statement
        if not has_word(statement, "order", self._options.sql_engine):  # else the outer SELECT might lose the order
            statement = f"SELECT {ROW} FROM ({statement})"
        temporary, room = self._place.temporary("positions"), IndexRoom(directory, self._options)
        with open(temporary, "wb") as file:
            write_header(file, 0)
            count = 0
            _, batches = sandbox.run(statement, _POSITIONS_AT_A_TIME)
            make_room = room.on_growth(temporary)
            for batch in _limited(batches, self._options.max_size, bar):
                make_room()
                file.write(_row_ids([row[0] for row in batch], self._base, self._options).tobytes())
                count += len(batch)
            if not count:
                raise _empty(self._options)
            finish_npy(file, count)
        room.need(0)
        self._check_keys(temporary)
        selection = _selection_of(self._base, self._options, self._key, count)
        self._place.publish(temporary, positions_path(directory, self._key).name)
        description = self._place.temporary("selection")
        with open(description, "w") as text:
            text.write(json.dumps(asdict(selection)))
            text.flush()
            os.fsync(text.fileno())
        self._place.publish(description, selection_path(directory, self._key).name)
        return _with_positions(self._base, selection)

    def _check_keys(self, path: Path) -> None:
        """Look at the selected keys, only where those of all rows are not known to be good."""
        if self._base.key_problem is None:
            return
        ids = np.unique(np.load(path, mmap_mode="r"))  # [n]; a row that is selected twice is meant so
        key = self._base.key_column
        hashes = np.empty(len(ids), np.int64)  # [n]

        def fetch(some: Any) -> list[tuple[int, Any]]:
            return [(at, row[key]) for at, row in zip(some, self._base.rows(ids[list(some)].tolist()), strict=True)]

        for start in range(0, len(ids), _ROWS_AT_A_TIME):
            for at, value in fetch(range(start, min(start + _ROWS_AT_A_TIME, len(ids)))):
                if value is None:
                    raise SourceError(
                        f"{self._base.src}: row {ids[at]}, which the query selects, has no value in the index column {key!r}"
                    )
                hashes[at] = hash(repr(value))  # repr: a key may be a list
        twice = find_duplicate(hashes, fetch)
        if twice is not None:
            raise SourceError(
                f"{self._base.src}: rows {ids[twice[0]]} and {ids[twice[1]]}, which the query selects, have the same value "
                f"{twice[2]!r} in the index column {key!r}: select one of them, or name another column with index_col_name"
            )


class _Table:
    """A query with columns of its own: its result becomes an index file."""

    def __init__(self, base: Index, options: IndexOptions, place: Workplace, key: str) -> None:
        self._base, self._options, self._place, self._key = base, options, place, key

    def write(self, sandbox: Sandbox, bar: Progress) -> Index:
        """Write and publish the index file."""
        known = sandbox.result_fields()
        names, batches = sandbox.run(sandbox.statement, _ROWS_AT_A_TIME)
        names = self._logical(names, sandbox.columns)
        hidden = names[: len(sandbox.columns) + 1] == [ROW, *(column.name for column in self._base.columns)]
        self._check_columns(names)
        kinds = [_ResultColumn(name, self._base) for name in names]
        temporary = self._place.temporary()
        room = IndexRoom(temporary.parent, self._options)
        with contextlib.closing(IndexWriter(temporary, self._base.key_column, room=room)) as writer:
            for name in names[hidden:]:
                writer.add_column(pa.field(name, pa.null()), "BLOB")
            missing = [name for name in self._options.columns_to_download if name not in names]
            for name in missing:  # allowed, see _check_columns
                writer.add_column(pa.field(name, pa.null()), "BLOB")
            for rows in _limited(batches, self._options.max_size, bar):
                columns = list(zip(*rows, strict=True))
                if hidden:
                    _row_ids(columns[0], self._base, self._options)
                for kind, column in zip(kinds, columns, strict=True):
                    kind.look_at(column)
                writer.write_values(dict(zip(names[hidden:], columns[hidden:], strict=True)))
            if not writer.num_rows:
                raise _empty(self._options)
            own = {"fingerprint": self._key, "query": self._options.sql_query, "base": self._base.fingerprint}
            same = {name: self._base.meta[name] for name in ("src", "base_url", "key_column")}
            writer.finish({**own, **same}, {kind.name: known.get(kind.name) or kind.field() for kind in kinds[hidden:]})
        self._check_written(temporary)
        path = self._place.publish(temporary, f"{self._key}.sqlite")
        return Index(path, base_url=self._base.base_url)

    def _logical(self, names: list[str], physical: list[str]) -> list[str]:
        """Return the result's names with those of source columns as the source spells them."""
        logical = {p.lower(): column.name for p, column in zip(physical, self._base.columns, strict=True)}
        return [logical.get(name.lower(), name) for name in names]

    def _check_columns(self, names: list[str]) -> None:
        if twice := [name for name in names if names.count(name) > 1]:
            raise QueryError(f"the query {_text(self._options)!r} gives {twice[0]!r} more than once: name one of them with AS")
        if taken := [name for name in names if name in SAMPLE_FIELDS]:
            raise QueryError(
                f"the query {_text(self._options)!r} gives a column {taken[0]!r}, a field that every sample gets, whose values "
                "would be lost: give it another name with AS"
            )
        key = self._base.key_column
        wanted = [key, *(() if self._options.allow_missing_columns else self._options.columns_to_download)]
        for name in wanted:
            if name not in names:
                what = "the index column" if name == key else "a column of columns_to_download"
                raise SchemaError(
                    f"the query {_text(self._options)!r} gives no {name!r}, which is {what}: select it as well "
                    f"(it gives {', '.join(map(repr, names))})"
                )

    def _check_written(self, temporary: Path) -> None:
        written = Index(temporary)
        try:
            if written.key_problem is not None:
                raise SourceError(
                    f"the result of the query {_text(self._options)!r} cannot be sampled: {written.key_problem}: "
                    "select keys that differ"
                )
        finally:
            written.close()


class _ResultColumn:
    """Finds the type of a result column: the source's of that name while all values could be its, else what SQLite gives."""

    def __init__(self, name: str, base: Index) -> None:
        self.name = name
        self._source = next((column for column in base.columns if column.name == name), None)
        self._kinds: set[type] = set()

    def look_at(self, column: tuple[Any, ...]) -> None:
        """Take some stored values into account."""
        self._kinds |= set(map(type, column)) - {type(None)}
        if self._source is not None and not values.could_be(self._source.field, column):
            self._source = None

    def field(self) -> pa.Field[Any]:
        """Return name and type."""
        if self._source is not None:
            return self._source.field
        if self._kinds == {int, float}:
            return pa.field(self.name, pa.float64())
        if len(self._kinds) > 1:
            return pa.field(self.name, pa.string(), metadata={ENCODING: ANY})
        return pa.field(self.name, _NATURAL[next(iter(self._kinds))] if self._kinds else pa.null())


def _row_ids(ids: Sequence[Any], base: Index, options: IndexOptions) -> np.ndarray:
    if not all(type(row_id) is int and 0 <= row_id < base.num_rows for row_id in ids):
        raise QueryError(f"the query {_text(options)!r} gives a column {ROW!r} that holds no row ids: name it differently")
    return np.array(ids, "<i8")  # [n]


def _empty(options: IndexOptions) -> QueryError:
    return QueryError(f"the query {_text(options)!r} keeps no row: loosen its conditions", query=options.sql_query)


def _text(options: IndexOptions) -> str:
    return shortened(options.sql_query or "")
