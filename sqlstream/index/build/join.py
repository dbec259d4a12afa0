"""Columns of other tables by key, as the rows of the source are written: `join={"latents": "latents.parquet"}, on="id"`.

    source: id | caption      latents: id | latent     →   id | caption | latent
            b  | a dog                 a  | a.npy          b  | a dog   | b.npy
            a  | a cat                 b  | b.npy          a  | a cat   | a.npy

Each joined table is first written to a temporary SQLite file with an index on its keys; then every batch of the source asks it
for the rows of its keys. So rows keep their order, and neither table is in memory, however large. A join in one SQL statement
was rejected: it sorts all rows twice, those of the source with all their columns.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import types

from sqlstream.config import IndexOptions, Missing
from sqlstream.errors import SchemaError, SourceError
from sqlstream.index.file.connection import GuardedConnection, read_columns
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.workplace import Workplace
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.base import BATCH_ROWS, TableFile
from sqlstream.index.sources.base.derived import SOURCE_COLUMN, DerivedRows, below, derived_rows, is_text
from sqlstream.index.sources.plan.source_plan import JoinedSource, SourcePlan
from sqlstream.index.types.models import MOMENT_DIGITS, ROW, Column, quote
from sqlstream.index.types.schema import normalise
from sqlstream.index.types.values import Encoded, columns_of, decoder, encode_named, encoding
from sqlstream.index.types.views import padded_moments
from sqlstream.progress import progress
from sqlstream.sample_types import SAMPLE_FIELDS
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

T = TypeVar("T")
_PRAGMAS = ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE", "cache_size=-64000")
_MOST_BYTES = 16 << 20
"""Joined values in memory at a time, by the average row; arbitrary: as many rows as a batch has, unless rows are large."""
_COMPARED = (types.is_integer, types.is_boolean, types.is_string, types.is_binary, types.is_decimal, types.is_temporal)
"""Types of keys: values that are equal exactly, and stored in one way."""


class TableRows(NamedTuple):
    """Rows on their way into the index, with what is joined to them."""

    batch: pa.RecordBatch
    as_written: Mapping[str, pa.Array[Any] | list[Any]]
    """Columns that the tables have otherwise, see `IndexWriter.write_batch`."""
    stored: Mapping[str, Encoded]
    """Joined columns."""

    @classmethod
    def of(cls, rows: DerivedRows) -> TableRows:
        """Return rows to which nothing is joined."""
        return cls(rows.batch, rows.as_written, {})

    def head(self, num_rows: int) -> TableRows:
        """Return the first so many of them."""
        return TableRows(
            self.batch.slice(0, num_rows),
            {name: values[:num_rows] for name, values in self.as_written.items()},
            {name: Encoded(values[:num_rows], has_nan) for name, (values, has_nan) in self.stored.items()},
        )


@contextlib.contextmanager
def open_joins(
    plan: SourcePlan, options: IndexOptions, place: Workplace, remote: RemoteReader, *, show_progress: bool
) -> Iterator[JoinedTables | None]:
    """Yield the tables that are joined, as files of the workplace; None: there are none.

    Raises:
        SchemaError: One of them lacks the column of keys, or has keys that cannot be compared.
        SourceError: A key is there twice.
    """
    if options.join is None:
        yield None
        return
    with contextlib.ExitStack() as stack:
        tables = []
        for join in plan.joins:
            path = place.temporary("join")
            stack.callback(path.unlink, missing_ok=True)
            _write_table(join, options, path, (place, remote), show_progress=show_progress)
            tables.append(stack.enter_context(contextlib.closing(_KeyedTable(join, options.join.on, path))))
            IndexRoom(path.parent, options).need(0)  # the index on its keys is there now
        yield JoinedTables(tables, options)


def _write_table(
    join: JoinedSource, options: IndexOptions, path: Path, reading: tuple[Workplace, RemoteReader], *, show_progress: bool
) -> None:
    """Write a joined table to `path`, as an index file without a key column."""
    assert options.join is not None
    (place, remote), on = reading, options.join.on
    room = IndexRoom(path.parent, options)
    with contextlib.closing(IndexWriter(path, "", room=room)) as writer:
        with progress(None, " rows", f"reading {join.src}, which is joined", show_progress) as bar:
            for part in join.parts:
                with part.open(place.temporary, remote) as table:
                    schema = table.schema()
                    names = [name for name in dict.fromkeys(schema.names) if name != SOURCE_COLUMN]
                    if on not in names:
                        raise _no_column(on, f"{urls.redact(part.source.url)}, which join calls {join.name!r},", names)
                    writer.begin_source(part.source, pa.schema([schema.field(schema.names.index(name)) for name in names]))
                    for batch, _ in derived_rows(table, names):
                        if batch.num_rows:
                            writer.write_batch(batch)
                            bar.update(batch.num_rows)
        writer.finish({}, is_durable=False)


class _KeyedTable:
    """A joined table in a file of its own.

    Args:
        join: What it is.
        on: Its column of keys.
        path: The file.
    """

    def __init__(self, join: JoinedSource, on: str, path: Path) -> None:
        self.name, self.src, self.base_url = join.name, join.src, join.base_url
        self._on = on
        self._db = sqlite3.connect(path, isolation_level=None, factory=GuardedConnection)
        try:
            for pragma in _PRAGMAS:
                self._db.execute(f"PRAGMA {pragma}")
            columns = read_columns(self._db)
            self.key = next(column for column in columns if column.name == on)
            self.columns = tuple(column for column in columns if column.name != on)
            self._check_keys()
            (num_rows,) = self._db.execute("SELECT count(*) FROM rows").fetchone()
            row_bytes = path.stat().st_size // max(1, num_rows)
            most = min(BATCH_ROWS, self._db.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER))
            self.rows_at_a_time = max(1, min(most, _MOST_BYTES // max(1, row_bytes)))
            """Keys that are asked for together."""
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Close its file."""
        self._db.close()

    def find(self, keys: Iterable[Any], columns: Sequence[Column]) -> dict[Any, tuple[Any, ...]]:
        """Return rows by key, of the keys that are there: the key, then the stored values of some columns."""
        wanted = list({key for key in keys if key is not None})
        listed = ", ".join(quote(column.physical) for column in (self.key, *columns))
        marks = ", ".join("?" * len(wanted))
        asked = f"{quote(self.key.physical)} IN ({marks})"  # a long list looks to SQLite as if reading all rows were cheaper
        found = self._db.execute(f"SELECT {listed} FROM rows INDEXED BY joined_by WHERE {asked}", wanted)
        return {row[0]: row for row in found}

    def _check_keys(self) -> None:
        """Make the index on the keys, and look whether one is there twice.

        Raises:
            SourceError: It is.
        """
        key = quote(self.key.physical)
        if types.is_timestamp(self.key.field.type):  # files of coarser units have fewer digits
            whole = padded_moments(key, MOMENT_DIGITS[self.key.field.type.unit])
            self._db.execute(f"UPDATE rows SET {key} = {whole} WHERE {key} <> {whole}")
        self._db.execute(f"CREATE INDEX joined_by ON rows ({key})")
        twice = self._db.execute(
            f"SELECT min({ROW}), max({ROW}), {key} FROM rows WHERE {key} IS NOT NULL GROUP BY {key} HAVING count(*) > 1 LIMIT 1"
        ).fetchone()
        if twice is not None:
            raise SourceError(
                f"{self._place_of(twice[0])} and {self._place_of(twice[1])} of the joined table {self.name!r} have the same "
                f"value {twice[2]!r} in {self._on!r}: a row can get the columns of one of them only, so leave one out"
            )

    def _place_of(self, row: int) -> str:
        """Return the file of a row, and its number there."""
        statement = f"SELECT url, first_row FROM sources WHERE first_row <= {row} ORDER BY position DESC LIMIT 1"
        url, first_row = self._db.execute(statement).fetchone()
        return f"row {row - first_row} of {url}"


class JoinedTables:
    """All tables that are joined to one source, one after the other.

    Args:
        tables: Them.
        options: What is kept of them, and what becomes of rows without a partner.
    """

    def __init__(self, tables: Sequence[_KeyedTable], options: IndexOptions) -> None:
        assert options.join is not None
        self._tables, self._options = tables, options
        self._on, self._missing = options.join.on, options.join.missing
        self._names: list[dict[str, str]] | None = None
        """For each table what its columns are called in the index; decided by the first file of the source."""
        self._key_field: pa.Field[Any] | None = None
        self._file, self._first_row = "", 0
        self._kept_bits: list[tuple[np.ndarray, int]] = []
        self._at_a_time = min(table.rows_at_a_time for table in tables)

    def begin(self, schema: pa.Schema, file: str) -> list[pa.Field[Any]]:
        """Begin the next file of the source; return the columns that its rows get, and that are kept.

        Args:
            schema: Its columns.
            file: Its name, for errors.

        Raises:
            SchemaError: It has no column of keys, or keys of another type than a table has; or a name is taken.
        """
        if self._on not in schema.names:
            raise _no_column(self._on, file, schema.names)
        self._key_field = normalise(schema.field(schema.names.index(self._on)), file)
        for table in self._tables:
            _check_types(self._on, self._key_field, file, table)
        if self._names is None:
            self._names = self._named(schema.names, file)
        joined = {name for names in self._names for name in names.values()}
        if taken := sorted(joined.intersection(schema.names)):
            raise SchemaError(
                f"{file} has a column {taken[0]!r}, and so has a joined table, whose column got that name since the first file "
                "of the source has none: give all files of the source the column, or none"
            )
        self._file, self._first_row = file, 0
        self._kept_bits.clear()
        return [
            column.field.with_name(names[column.name])
            for table, names in zip(self._tables, self._names, strict=True)
            for column in table.columns
            if self._keeps(names[column.name])
        ]

    def _named(self, own: Sequence[str], file: str) -> list[dict[str, str]]:
        """Return for each table what its columns are called: as there, or after its name as well where that is taken."""
        taken, found = {*own, *SAMPLE_FIELDS}, []
        for table in self._tables:
            names = {}
            for column in table.columns:
                name = column.name if column.name not in taken else f"{table.name}_{column.name}"
                if name in taken:
                    raise SchemaError(
                        f"the column {column.name!r} of the joined table {table.name!r} can be called neither that nor "
                        f"{name!r}, which {file} or another joined table has: give the table another name in join"
                    )
                taken.add(name)
                names[column.name] = name
            found.append(names)
        return found

    def rows(self, table: TableFile, names: Sequence[str]) -> Iterator[TableRows]:
        """Yield the rows of the file begun last, with what is joined to them.

        Args:
            table: The file.
            names: Its columns that are kept.

        Raises:
            SourceError: A row has no partner, and must.
        """
        wanted = list(names) if self._on in names else [*names, self._on]
        for batch, as_written in derived_rows(table, wanted):
            for start in range(0, batch.num_rows, self._at_a_time):
                some = batch.slice(start, self._at_a_time)
                rows = self._joined(some, {name: array.slice(start, self._at_a_time) for name, array in as_written.items()})
                self._first_row += some.num_rows
                yield rows._replace(batch=rows.batch.select(list(names)), as_written=_only(rows, [*names, *rows.stored]))

    def _joined(self, batch: pa.RecordBatch, as_written: Mapping[str, pa.Array[Any]]) -> TableRows:
        """Return one batch with what is joined to it."""
        assert self._key_field is not None
        assert self._names is not None
        written = as_written.get(self._on, batch.column(self._on))  # a key that is a path may have been made absolute
        keys = encode_named(written, self._key_field, self._file).values
        stored: dict[str, Encoded] = {}
        before: dict[str, pa.Array[Any] | list[Any]] = dict(as_written)
        is_kept = np.ones(batch.num_rows, bool)  # [n]
        for table, names in zip(self._tables, self._names, strict=True):
            columns = [column for column in table.columns if self._keeps(names[column.name])]
            of_rows: list[Any] = list(map(table.find(keys, columns).get, keys))
            if None in of_rows:
                has_partner = np.fromiter((row is not None for row in of_rows), bool, len(of_rows))  # [n]
                if self._missing is Missing.RAISE:
                    raise self._no_partner(table, int(has_partner.argmin()), keys)
                is_kept &= has_partner
                nothing = (None,) * (1 + len(columns))
                of_rows = [nothing if row is None else row for row in of_rows]
            of_columns = columns_of(of_rows)[1:]
            for column, values in zip(columns, map(list, of_columns), strict=True):
                name = names[column.name]
                stored[name] = Encoded(values, column.has_nan)
                if table.base_url is not None and name in self._options.columns_to_download and is_text(column.field.type):
                    stored[name], before[name] = _made_absolute(column, values, table.base_url, table.src), values
        rows = TableRows(batch, before, stored)
        if not self.leaves_out:
            return rows
        self._kept_bits.append((np.packbits(is_kept), len(is_kept)))
        return rows if is_kept.all() else _filtered(rows, is_kept)

    def _keeps(self, name: str) -> bool:
        """Return whether a joined column goes into the index."""
        options = self._options
        return options.columns_to_keep is None or name in (
            *options.columns_to_keep,
            *options.columns_to_download,
            options.wanted_key,
        )

    def given(self, joins: Sequence[JoinedSource]) -> str:
        """Return, as an index file keeps it, what each table gives (`JoinedColumns`)."""
        named = self._names or [{} for _ in joins]
        kept = [[name for name in names.values() if self._keeps(name)] for names in named]
        return json.dumps([[join.name, len(join.parts), names] for join, names in zip(joins, kept, strict=True)])

    @property
    def leaves_out(self) -> bool:
        """Rows without a partner are left out."""
        return self._missing is Missing.DROP

    def kept(self, listed: Iterator[T]) -> Iterator[T]:
        """Return of something for each row of the file begun last what belongs to rows that were not left out."""
        if not self.leaves_out:
            return listed
        bits = (np.unpackbits(packed, count=count).tolist() for packed, count in self._kept_bits)
        return compress(listed, chain.from_iterable(bits))

    def _no_partner(self, table: _KeyedTable, at: int, keys: Sequence[Any]) -> SourceError:
        has = (
            f"{self._on}={keys[at]!r}, which no row has" if keys[at] is not None else f"no value in {self._on!r} for a partner"
        )
        return SourceError(
            f"row {self._first_row + at} of {self._file} has {has} in {table.src}, the joined table {table.name!r}: add it, or "
            "give missing='null' (its columns are None there), or missing='drop' (such rows are left out)"
        )


def _only(rows: TableRows, names: Sequence[str]) -> Mapping[str, pa.Array[Any] | list[Any]]:
    return {name: written for name, written in rows.as_written.items() if name in names}


def _filtered(rows: TableRows, is_kept: np.ndarray) -> TableRows:
    """Return the rows of which `is_kept` says True."""
    mask, flags = pa.array(is_kept), is_kept.tolist()
    as_written = {
        name: list(compress(written, flags)) if isinstance(written, list) else written.filter(mask)
        for name, written in rows.as_written.items()
    }
    stored = {name: Encoded(list(compress(values, flags)), has_nan) for name, (values, has_nan) in rows.stored.items()}
    return TableRows(rows.batch.filter(mask), as_written, stored)


def _made_absolute(column: Column, values: Sequence[Any], base_url: str, src: str) -> Encoded:
    """Return stored paths of a joined table as those of several sources are: below the place of their own table."""
    decode, rewrite = decoder(column) or (lambda value: value), below(base_url)
    paths = [None if value is None else rewrite(decode(value)) for value in values]
    return encode_named(pa.array(paths, column.field.type), column.field, src)


def can_be_key(kind: pa.DataType) -> bool:
    """Return whether values of a type can name rows that are joined."""
    return any(is_one(kind) for is_one in _COMPARED)


def _check_types(on: str, own: pa.Field[Any], file: str, table: _KeyedTable) -> None:
    """Look whether keys of the source and of a joined table can be equal at all.

    Raises:
        SchemaError: They cannot; an empty column can be compared with all others.
    """
    theirs = table.key.field
    for field, where in ((own, file), (theirs, table.src)):
        if not types.is_null(field.type) and not can_be_key(field.type):
            raise SchemaError(
                f"{where} has values of type {field.type} in {on!r}, which cannot name rows that are joined: "
                "use a column of integers or text"
            )
    if types.is_null(own.type) or types.is_null(theirs.type):
        return
    are_integers = types.is_integer(own.type) and types.is_integer(theirs.type)
    if not are_integers and (not own.type.equals(theirs.type) or encoding(own) != encoding(theirs)):
        raise SchemaError(
            f"the column {on!r}, by which tables are joined, is {_readable(own)} in {file} and {_readable(theirs)} in "
            f"{table.src} (joined as {table.name!r}): write it with one type in both tables"
        )


def _readable(field: pa.Field[Any]) -> str:
    return encoding(field).decode() or str(field.type)


def _no_column(on: str, where: str, names: Sequence[str]) -> SchemaError:
    listed = ", ".join(map(repr, names[:30])) or "no columns"
    return SchemaError(
        f"{where} has no column {on!r}, by which tables are joined: it has {listed}; join by a column that all tables have"
    )
