"""Rows of an index as Arrow, with the types that their source had; JSON columns are text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.errors import SchemaError
from sqlstream.index.types import values
from sqlstream.index.types.models import ANY, JSON, ROW, SHARD_URL, UUID, Column
from sqlstream.index.types.pandas_import import load_pandas

_TEXTS = (JSON, ANY, SHARD_URL)
"""Encodings whose values are texts in Arrow."""


def schema_of(columns: Sequence[Column], *, physical: bool) -> pa.Schema:
    """Return the Arrow schema of rows.

    Args:
        columns: Of the index.
        physical: Take the names that SQL sees, the row id first; False: the source's names, no row id.
    """
    if physical:
        return pa.schema([pa.field(ROW, pa.int64()), *(pa.field(column.physical, _kind(column.field)) for column in columns)])
    return pa.schema([pa.field(column.name, _kind(column.field)) for column in columns])


def arrays_of(columns: Sequence[Column], stored: Sequence[Sequence[Any]]) -> list[Any]:
    """Return stored rows (without their ids) as one Arrow array a column."""
    return _arrays([column.field for column in columns], stored)


def table_of(fields: Sequence[pa.Field[Any]], stored: Sequence[Sequence[Any]]) -> pa.Table:
    """Return rows as a table.

    Args:
        fields: Names and types of their columns.
        stored: The rows, as an index stores values of these types.
    """
    schema = pa.schema([pa.field(field.name, _kind(field)) for field in fields])
    return pa.Table.from_arrays(_arrays(fields, stored), schema=schema)


def _arrays(fields: Sequence[pa.Field[Any]], stored: Sequence[Sequence[Any]]) -> list[Any]:
    load_pandas()
    by_column = values.columns_of(stored) or [()] * len(fields)
    return [_array(field, of_column) for field, of_column in zip(fields, by_column, strict=True)]


def _kind(field: pa.Field[Any]) -> pa.DataType:
    own = values.encoding(field)
    return pa.uuid() if own == UUID else pa.string() if own in _TEXTS else field.type


def _array(field: pa.Field[Any], stored: Sequence[Any]) -> Any:
    own = values.encoding(field)
    if own in _TEXTS:
        return pa.array([None if value is None else str(value) for value in stored], pa.string())
    decode = values.codec(field).decoder(field.type)
    if decode is None or own == UUID:
        return pa.array(stored, _kind(field))
    if pa.types.is_timestamp(field.type):
        moments = np.array(["NaT" if value is None else value for value in stored], f"datetime64[{field.type.unit}]")  # [n]
        return pa.array(moments).cast(field.type)  # texts are UTC, and the cast keeps the instant
    try:
        return pa.array([None if value is None else decode(value) for value in stored], field.type)
    except OverflowError as error:  # files of int64 beside some of uint64
        raise SchemaError(
            f"column {field.name!r} has negative integers in some files and integers above 2^63 in others (samples have both), "
            "which no type of Arrow holds: write it with one type, or leave it out of the query"
        ) from error
