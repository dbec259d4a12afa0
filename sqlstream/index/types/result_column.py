"""Which type a column of a query's result has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sqlstream.index.types.fitting import are_floats, candidates, fitting
from sqlstream.index.types.models import ANY, ENCODING
from sqlstream.index.types.values import is_large_unsigned

if TYPE_CHECKING:
    from sqlstream.index.file.index import Index

_NATURAL = {int: pa.int64(), float: pa.float64(), str: pa.string(), bytes: pa.binary()}


class ResultColumn:
    """Finds the type of a result column: the source's of that column, or a wider one that holds the values, else SQLite's.

    The column of the source is the one that it renames, else the one of its name.

    Args:
        name: Of the column.
        base: What is queried.
        columns_read: Columns of it that the query looks at, as SQL spells them.
        renamed: Columns of the result that are columns of the table, see `renamed_columns`.
    """

    def __init__(self, name: str, base: Index, columns_read: Collection[str], renamed: Mapping[str, str]) -> None:
        self.name = name
        self._source = next((column for column in base.columns if column.name == name), None)
        if (own := renamed.get(name.lower())) is not None:
            of_sql = [column for column in base.sql_columns if not column.is_member]  # SQL has the sizes of members
            self._source = next((column for column in of_sql if column.physical.lower() == own), self._source)
        self._fields = [] if self._source is None else candidates(self._source.field.with_name(name))
        self._kinds: set[type] = set()
        self._is_float, self._is_negative = True, False
        read = [column.field.type for column in base.sql_columns if column.physical in columns_read]
        self._are_numbers = any(map(pa.types.is_uint64, read))
        """Bytes so far can be integers above 2^63."""
        self._reads_bytes = any(map(pa.types.is_binary, read))

    def look_at(self, column: tuple[Any, ...]) -> None:
        """Take some stored values into account."""
        self._kinds |= set(map(type, column)) - {type(None)}
        self._fields = fitting(self._fields, column)
        if int in self._kinds and self._is_float:
            self._is_float = are_floats(column)
        if self._are_numbers and bytes in self._kinds:
            self._are_numbers = all(map(is_large_unsigned, (value for value in column if type(value) is bytes)))
        if self._fields and pa.types.is_uint64(self._fields[0].type) and not self._is_negative:
            self._is_negative = any(type(value) is int and value < 0 for value in column)

    def field(self, said: pa.Field[Any] | None) -> pa.Field[Any]:
        """Return name and type.

        Args:
            said: What the engine of the query says of it; None: nothing.
        """
        if self._fields and (said is None or (self._source is not None and self._source.is_member)):
            field = self._fields[0]
            is_unsigned = pa.types.is_uint64(field.type)  # with files of int64 beside uint64, negative ones are its own
            if not (is_unsigned and self._kinds == {int} and self._is_negative):
                return field
        if said is not None:
            return said.with_name(self.name)  # the engine spells it as SQL does
        if self._kinds == {int, float} and self._is_float:
            return pa.field(self.name, pa.float64())
        if self._has_numbers_as_bytes:
            return pa.field(self.name, pa.uint64())
        if len(self._kinds) > 1:
            return pa.field(self.name, pa.string(), metadata={ENCODING: ANY})
        return pa.field(self.name, _NATURAL[next(iter(self._kinds))] if self._kinds else pa.null())

    @property
    def _has_numbers_as_bytes(self) -> bool:
        """Bytes are integers above 2^63 under another name, or the largest of them: nothing else gives such ones."""
        has_others = self._kinds == {int, bytes} or not self._reads_bytes  # a column of bytes has no integers
        return bytes in self._kinds and self._kinds <= {int, bytes} and self._are_numbers and has_others
