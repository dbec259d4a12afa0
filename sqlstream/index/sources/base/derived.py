"""Columns that a table gets on its way into the index: constants, such as hive partitions, and paths written anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.storage.base import urls

Rewrite = Callable[[Any], Any]
"""From a text of a column to another one, or a list of texts to another; None stays None."""
SOURCE_COLUMN = "__source__"
"""Which of several sources a row comes from, as the user gave it."""


class DerivedRows(NamedTuple):
    """Rows on their way into the index."""

    batch: pa.RecordBatch
    as_written: Mapping[str, pa.Array[Any]]
    """Columns that the table has otherwise than `batch`, which says where the table lies."""


class DerivedTable:
    """A table with more columns, and some changed.

    Args:
        table: The table.
        constants: Columns with one value, as Arrow scalars; a column of the table of the same name wins.
        rewrites: By column name; names that the table lacks, and columns that are no text (or lists of it), are left alone.
        copies: New column → column of the table that it starts as (and is then rewritten as).
        says_place: What `rewrites` give says where the table lies.
    """

    def __init__(
        self,
        table: TableFile,
        constants: Mapping[str, Any],
        rewrites: Mapping[str, Rewrite] | None = None,
        copies: Mapping[str, str] | None = None,
        *,
        says_place: bool = False,
    ) -> None:
        self.table, self._schema = table, table.schema()
        self._says_place = says_place
        self.listed: Callable[[], Iterator[str]] = getattr(table, "listed", lambda: iter(()))
        """What a listing says of the files of each row (`DirectoryTable.listed`); nothing of other tables."""
        self.row_rule: str | None = getattr(table, "row_rule", None)
        """See `DirectoryTable.row_rule`."""
        own = set(self._schema.names)
        self._constants = {name: value for name, value in constants.items() if name not in own}
        self._copies = {name: origin for name, origin in (copies or {}).items() if name not in own and origin in own}
        self._rewrites = {
            name: rewrite
            for name, rewrite in (rewrites or {}).items()
            if name in own and is_text(self._schema.field(name).type)
        }

    def schema(self) -> pa.Schema:
        """Return the columns: copies, the table's own, constants."""
        copies = [self._schema.field(origin).with_name(name) for name, origin in self._copies.items()]
        constants = [pa.field(name, value.type) for name, value in self._constants.items()]
        return pa.schema([*copies, *self._schema, *constants])

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        return (rows.batch for rows in self.rows(names))

    def rows(self, names: Sequence[str]) -> Iterator[DerivedRows]:
        """Yield the rows, and what of them the table has otherwise."""
        origins = {name: self._copies.get(name, name) for name in names if name not in self._constants}
        for batch, before in derived_rows(self.table, list(dict.fromkeys(origins.values()))):
            columns: list[pa.Array[Any]] = []
            as_written: dict[str, pa.Array[Any]] = {}
            for name in names:
                if name in self._constants:
                    columns.append(pa.repeat(self._constants[name], batch.num_rows))
                    if name == SOURCE_COLUMN:
                        as_written[name] = pa.nulls(batch.num_rows)
                    continue
                origin = origins[name]
                column, rewrite = batch.column(origin), self._rewrites.get(origin)
                columns.append(column if rewrite is None else _rewritten(column, rewrite))
                if origin in before or (self._says_place and rewrite is not None):
                    as_written[name] = before.get(origin, column)
            yield DerivedRows(pa.RecordBatch.from_arrays(columns, names=list(names)), as_written)


def derived_rows(table: TableFile, names: Sequence[str]) -> Iterator[DerivedRows]:
    """Yield the rows of any table, and what of them it has otherwise; rows of which nothing is wanted are rows, too."""
    if not names:
        return (DerivedRows(batch, {}) for batch in _bare_rows(table))
    return table.rows(names) if isinstance(table, DerivedTable) else (DerivedRows(batch, {}) for batch in table.batches(names))


def _bare_rows(table: TableFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table without columns."""
    if isinstance(table, DerivedTable):
        return _bare_rows(table.table)
    if getattr(table, "counts_rows", False) or not (some := table.schema().names[:1]):
        return table.batches([])
    return (batch.select([]) for batch in table.batches(some))  # formats count the rows of a column


def below(base_url: str, *, keeps_rooted: bool = False) -> Rewrite:
    """Return what makes relative paths absolute: they start at `base_url`; with `keeps_rooted` those with a slash stay."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(rewritten, value))
        if value is not None and (chain := urls.chain_of(value)) is not None:  # its archive may be relative
            return f"{chain.kind}://{chain.inner}::{rewritten(chain.outer)}"
        return value if value is None or (keeps_rooted and value.startswith("/")) else urls.join(base_url, value)

    return rewritten


def is_text(kind: Any) -> bool:
    """Return whether values of an Arrow type are texts, or lists of them."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _rewritten(column: Any, rewrite: Rewrite) -> Any:
    load_pandas()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return pa.array([None if value is None else rewrite(value) for value in column.to_pylist()], kind)
