"""Filters: a user's SELECT becomes the positions of rows, or another index file when it computes columns."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.config import IndexOptions
from sqlstream.errors import EmptySelectionError, IndexDatabaseError, QueryError, SchemaError
from sqlstream.index.build.checks import warn_of_names
from sqlstream.index.build.content import content_of_result
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import check_plain, is_there
from sqlstream.index.file.key_check import find_duplicate
from sqlstream.index.file.npy import finish_npy, write_header
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.selection import positions_path, read_selection, selection_path
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.named.find import chained_columns
from sqlstream.index.sql.dialect import has_word, shortened
from sqlstream.index.sql.functions import changes
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.sql.syntax_trees import given_names, keeps_rows, renamed_columns
from sqlstream.index.types.models import ANY, FORMAT_VERSION, ROW, Column, SelectionInfo, fingerprint, identity
from sqlstream.index.types.result_column import ResultColumn
from sqlstream.index.types.values import columns_of, encoding
from sqlstream.progress import Progress, progress
from sqlstream.sample_types import SAMPLE_FIELDS

logger = logging.getLogger(__name__)

_POSITIONS_AT_A_TIME = 65_536
_ROWS_AT_A_TIME = 8_192
_TELLS_NUMBERS = "tells_numbers"
"""In `meta` of a result whose integers above 2^63 are told from bytes."""
_TELLS_RENAMED = "tells_renamed"
"""In `meta` of a result whose columns that only rename others have the types of these."""


def open_selection(
    base: Index, options: IndexOptions, directory: Path, *, show_progress: bool, base_key: str | None = None
) -> Index:
    """Return what `options.sql_query` selects from `base`; found when an earlier run has done it.

    Args:
        base: All rows.
        options: The query, and what its result must have.
        directory: Where index files are.
        show_progress: Show a bar if stderr is a terminal.
        base_key: Names the rows in the fingerprint of the result; None: the fingerprint of `base`.

    Raises:
        QueryError: The query does not run, or keeps no row.
        SchemaError: Its result lacks a key column that was asked for, or a column to download.
    """
    chosen = _Filter(base, options, directory, base_key or base.fingerprint)

    def select(place: Workplace) -> Index:
        scratch = place.temporary("duckdb")
        with (
            contextlib.closing(Sandbox(base, chosen.query, engine=options.sql_engine, scratch=scratch)) as sandbox,
            progress(options.max_size, " rows", "selecting", show_progress) as bar,
        ):
            warn_of_names(base, chosen.query, options.sql_engine)
            if chosen.keeps_rows() and sandbox.describe() == [ROW, *sandbox.columns]:
                return chosen.write_positions(sandbox, place, bar)
            return chosen.write_table(sandbox, place, bar)

    return build_once(directory, chosen.key, chosen.find, select, show_progress=show_progress)


def computes_columns(options: IndexOptions) -> bool:
    """Return True if a query makes the columns of samples, so that the source need not have them."""
    return options.sql_query is not None and not keeps_rows(options.sql_query, options.sql_engine)


def computed_downloads(options: IndexOptions) -> tuple[str, ...]:
    """Return the columns to download to which a query gives values by AS."""
    if not computes_columns(options):
        return ()
    given = given_names(str(options.sql_query), options.sql_engine)
    return tuple(name for name in options.columns_to_download if name in given)


def row_ids(given: Sequence[Any], base: Index, query: str) -> np.ndarray:
    """Return what a query gives as `row`, if it is rows of `base`.

    Raises:
        QueryError: It is something else.
    """
    if not all(type(row_id) is int and 0 <= row_id < base.num_rows for row_id in given):
        raise QueryError(f"the query {shortened(query)!r} gives a column {ROW!r} that holds no row ids: name it differently")
    return np.array(given, "<i8")  # [n]


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


class _Filter:
    """A query on an index, and where its result is: positions of the index's rows, or a file of what it computes."""

    def __init__(self, base: Index, options: IndexOptions, directory: Path, base_key: str) -> None:
        assert options.sql_query is not None
        self._base, self._options, self._directory, self.query = base, options, directory, options.sql_query
        self.key = fingerprint(
            {
                "format": FORMAT_VERSION,
                "base": base_key,
                "query": self.query,
                "max_size": options.max_size,
                "download": sorted(options.columns_to_download),
                "allow_missing": options.allow_missing_columns,
                "engine": options.sql_engine,
                **changes(self.query, options.sql_engine, base.columns),
            }
        )
        self._shown = f"the query {shortened(self.query)!r}"

    def keeps_rows(self) -> bool:
        """Return True if positions can hold the result; for most other queries that imports sqlglot."""
        return keeps_rows(self.query, self._options.sql_engine)

    def find(self) -> Index | None:
        """Return the result of an earlier run; None when there is none, or it is damaged."""
        computed = Index(self._directory / f"{self.key}.sqlite", base_url=self._base.base_url)
        if computed.is_usable():
            is_of_layout = computed.meta.get("layout") == self._base.meta.get("layout")
            if is_of_layout and self._tells_numbers(computed) and self._tells_renamed(computed):
                return computed
            computed.close()
            return None
        path = selection_path(self._directory, self.key)
        check_plain(path)
        selection = None
        try:
            selection = read_selection(path)
        except IndexDatabaseError as error:
            logger.warning("%s", error)
        if not is_there(positions_path(self._directory, self.key)) or selection is None:
            return None
        if not self.keeps_rows():  # positions of an earlier version, which went by the names of columns
            return None
        if selection != self._selection(selection.num_selected, selection.key_problem):
            logger.warning("the index file %s is damaged: building it again", path)
            return None
        return self._with_positions(selection)

    def _tells_numbers(self, computed: Index) -> bool:
        """Return False for a result of an earlier version that may have integers above 2^63 as bytes."""
        if _TELLS_NUMBERS in computed.meta or not any(
            pa.types.is_uint64(column.field.type) for column in self._base.sql_columns
        ):
            return True
        of_base = {column.name for column in self._base.columns}
        own = [column.field for column in computed.sql_columns if column.name not in of_base]
        return not any(pa.types.is_binary(field.type) or encoding(field) == ANY for field in own)

    def _tells_renamed(self, computed: Index) -> bool:
        """Return False for a result of an earlier version whose renamed columns may have SQLite's types."""
        return _TELLS_RENAMED in computed.meta or all(name == own for name, own in renamed_columns(self.query).items())

    def write_positions(self, sandbox: Sandbox, place: Workplace, bar: Progress) -> Index:
        """Write the ids of the rows that the query keeps, in its order, then the file that makes them valid."""
        statement = sandbox.statement
        if not has_word(statement, "order", self._options.sql_engine):  # else the outer SELECT might lose the order
            statement = f"SELECT {ROW} FROM ({statement})"
        temporary, room = place.temporary("positions"), IndexRoom(self._directory, self._options)
        with open(temporary, "wb") as file:
            write_header(file, 0)
            count = 0
            _, batches = sandbox.run(statement, _POSITIONS_AT_A_TIME)
            make_room = room.on_growth(temporary)
            for batch in _limited(batches, self._options.max_size, bar):
                make_room()
                file.write(row_ids([row[0] for row in batch], self._base, self.query).tobytes())
                count += len(batch)
            if not count:
                raise self._empty()
            finish_npy(file, count)
        room.need(0)
        selection = self._selection(count, self._key_problem(temporary))
        place.publish(temporary, positions_path(self._directory, self.key).name)
        description = place.temporary("selection")
        with open(description, "w") as text:
            text.write(selection.to_json())
            text.flush()
            os.fsync(text.fileno())
        place.publish(description, selection_path(self._directory, self.key).name)
        return self._with_positions(selection)

    def _key_problem(self, path: Path) -> str | None:
        """Return why keys cannot name the selected rows; they are looked at only where those of all rows are not good."""
        key = self._base.wanted_key
        if self._base.key_problem is None or key not in [column.name for column in self._base.columns if not column.is_content]:
            return self._base.key_problem
        ids = np.unique(np.load(path, mmap_mode="r"))  # [n]; a row that is selected twice is meant so
        hashes = np.empty(len(ids), np.int64)  # [n]

        def fetch(some: Any) -> list[tuple[int, Any]]:
            rows = zip(some, self._base.rows(ids[list(some)].tolist()), strict=True)
            return [(at, None if row[key] is None else str(row[key])) for at, row in rows]

        for start in range(0, len(ids), _ROWS_AT_A_TIME):
            for at, value in fetch(range(start, min(start + _ROWS_AT_A_TIME, len(ids)))):
                if value is None:
                    return f"row {ids[at]}, which the query selects, has no value in the index column {key!r}"
                hashes[at] = hash(value)
        twice = find_duplicate(hashes, fetch)
        if twice is None:
            return None
        rows = f"rows {ids[twice[0]]} and {ids[twice[1]]}, which the query selects,"
        return f"{rows} have the same value {twice[2]!r} in the index column {key!r}"

    def write_table(self, sandbox: Sandbox, place: Workplace, bar: Progress) -> Index:
        """Write the index file of a query with columns of its own."""
        known = sandbox.result_fields()
        names, batches = sandbox.run(sandbox.statement, _ROWS_AT_A_TIME)
        names = self._logical(names, sandbox.columns)
        hidden = names[: len(sandbox.columns) + 1] == [ROW, *(column.name for column in self._base.sql_columns)]
        self._check_columns(names[hidden:], self._base.columns if hidden else ())
        typed = dict(zip(names, known.values(), strict=True)) if known else {}
        renamed = renamed_columns(self.query)
        kinds = [ResultColumn(name, self._base, sandbox.columns_read, renamed) for name in names]
        temporary = place.temporary()
        room = IndexRoom(temporary.parent, self._options)
        with contextlib.closing(IndexWriter(temporary, self._base.wanted_key, room=room)) as writer:
            for name in names[hidden:]:
                writer.add_column(pa.field(name, pa.null()), "BLOB")
            content = content_of_result(self._base, writer) if hidden else None
            missing = [name for name in self._options.columns_to_download if name not in writer.columns]
            for name in missing:  # allowed, see _check_columns
                writer.add_column(pa.field(name, pa.null()), "BLOB")
            for rows in _limited(batches, self._options.max_size, bar):
                columns = columns_of(rows)
                ids = row_ids(columns[0], self._base, self.query) if hidden else ()
                if content is not None:
                    content.add(list(map(int, ids)))
                for kind, column in zip(kinds, columns, strict=True):
                    kind.look_at(column)
                writer.write_values(dict(zip(names[hidden:], columns[hidden:], strict=True)))
            if not writer.num_rows:
                raise self._empty()
            if content is not None:
                content.finish()
            own: dict[str, object] = {"fingerprint": self.key, "query": self.query, "base": self._base.fingerprint}
            own |= {_TELLS_NUMBERS: True, _TELLS_RENAMED: True}
            own |= chained_columns(writer, self._options.columns_to_download)
            meta = self._base.meta
            same: dict[str, object] = {name: meta[name] for name in ("src", "base_url", "key_column", "layout") if name in meta}
            writer.finish({**own, **same}, {kind.name: kind.field(typed.get(kind.name)) for kind in kinds[hidden:]})
        path = place.publish(temporary, f"{self.key}.sqlite")
        return Index(path, base_url=self._base.base_url)

    def _logical(self, names: list[str], physical: list[str]) -> list[str]:
        """Return the result's names with those of source columns as the source spells them."""
        logical = {identity(p): column.name for p, column in zip(physical, self._base.sql_columns, strict=True)}
        return [logical.get(identity(name), name) for name in names]

    def _check_columns(self, names: list[str], kept: Sequence[Column]) -> None:
        """Look at what the query gives, beside content of the columns that are kept with it."""
        if twice := [name for name in names if names.count(name) > 1]:
            raise QueryError(f"{self._shown} gives {twice[0]!r} more than once: name one of them with AS")
        if taken := [name for name in names if name in SAMPLE_FIELDS]:
            raise QueryError(
                f"{self._shown} gives a column {taken[0]!r}, a field that every sample gets, whose values "
                "would be lost: give it another name with AS"
            )
        key = self._options.key_column
        wanted = [
            () if key is None else (key,),
            () if self._options.allow_missing_columns else self._options.columns_to_download,
        ]
        members = [column.name for column in self._base.columns if column.is_member]
        if not kept and (named := [name for name in names if name in members]):
            raise SchemaError(
                f"{self._shown} gives {named[0]!r}, whose content lies in shards, beside columns of its own: begin it with "
                "'SELECT *', which keeps all content, and put what it computes behind that"
            )
        in_place = {column.name for column in self._base.columns if column.is_in_place}
        given = {*names, *(column.name for column in kept if column.is_in_place)}
        for name in chain.from_iterable(wanted):
            if name not in given and name in in_place:
                raise SchemaError(
                    f"{self._shown} gives no {name!r}, whose content stays in its files: begin it with 'SELECT *', "
                    "which keeps all content, and put what it computes behind that"
                )
            if name not in given:
                what = "the index column" if name == key else "a column of columns_to_download"
                raise SchemaError(
                    f"{self._shown} gives no {name!r}, which is {what}: select it as well "
                    f"(it gives {', '.join(map(repr, names))})"
                )

    def _selection(self, num_selected: int, key_problem: str | None) -> SelectionInfo:
        return SelectionInfo(
            fingerprint=self.key,
            base=self._base.path.stem,
            query=self.query,
            engine=self._options.sql_engine,
            max_size=self._options.max_size,
            num_selected=num_selected,
            key_problem=key_problem,
        )

    def _with_positions(self, selection: SelectionInfo) -> Index:
        return Index(self._base.path, selection=selection, base_url=self._base.base_url)

    def _empty(self) -> EmptySelectionError:
        return EmptySelectionError(f"{self._shown} keeps no row: loosen its conditions", query=self.query)
