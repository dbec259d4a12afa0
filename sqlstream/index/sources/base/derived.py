"""Columns that a table gets on its way into the index: constants, such as hive partitions, and paths written anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from sqlstream.index.sources.base.base import TableFile
from sqlstream.storage.base import urls

Rewrite = Callable[[Any], Any]
"""From a text of a column to another one, or a list of texts to another; None stays None."""


class DerivedTable:
    """A table with more columns, and some changed.

    Args:
        table: The table.
        constants: Columns with one value, as Arrow scalars; a column of the table of the same name wins.
        rewrites: By column name; names that the table lacks, and columns that are no text (or lists of it), are left alone.
        copies: New column → column of the table that it starts as (and is then rewritten as).
    """

    def __init__(
        self,
        table: TableFile,
        constants: Mapping[str, Any],
        rewrites: Mapping[str, Rewrite] | None = None,
        copies: Mapping[str, str] | None = None,
    ) -> None:
        self._table, self._schema = table, table.schema()
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
            if name in own and _is_text(self._schema.field(name).type)
        }

    def schema(self) -> pa.Schema:
        """Return the columns: copies, the table's own, constants."""
        copies = [self._schema.field(origin).with_name(name) for name, origin in self._copies.items()]
        constants = [pa.field(name, value.type) for name, value in self._constants.items()]
        return pa.schema([*copies, *self._schema, *constants])

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        origins = {name: self._copies.get(name, name) for name in names if name not in self._constants}
        for batch in self._table.batches(list(dict.fromkeys(origins.values()))):
            columns = []
            for name in names:
                if name in self._constants:
                    columns.append(pa.repeat(self._constants[name], batch.num_rows))
                    continue
                column, rewrite = batch.column(origins[name]), self._rewrites.get(origins[name])
                columns.append(column if rewrite is None else _rewritten(column, rewrite))
            yield pa.RecordBatch.from_arrays(columns, names=list(names))


def below(base_url: str, *, keeps_rooted: bool = False) -> Rewrite:
    """Return what makes relative paths absolute: they start at `base_url`; with `keeps_rooted` those with a slash stay."""

    def rewritten(value: Any) -> Any:
        if isinstance(value, list):
            return list(map(rewritten, value))
        return value if value is None or (keeps_rooted and value.startswith("/")) else urls.join(base_url, value)

    return rewritten


def _is_text(kind: Any) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _rewritten(column: Any, rewrite: Rewrite) -> Any:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return pa.array([None if value is None else rewrite(value) for value in column.to_pylist()], kind)
