"""Rows of an index as Arrow, with the types that their source had; JSON columns are text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.index.types import values
from sqlstream.index.types.models import ROW, UUID, Column


def schema_of(columns: Sequence[Column], *, physical: bool) -> pa.Schema:
    """Return the Arrow schema of rows.

    Args:
        columns: Of the index.
        physical: Take the names that SQL sees, the row id first; False: the source's names, no row id.
    """
    if physical:
        return pa.schema([pa.field(ROW, pa.int64()), *(pa.field(column.physical, _kind(column)) for column in columns)])
    return pa.schema([pa.field(column.name, _kind(column)) for column in columns])


def arrays_of(columns: Sequence[Column], stored: Sequence[Sequence[Any]]) -> list[Any]:
    """Return stored rows (without their ids) as one Arrow array a column."""
    by_column = list(zip(*stored, strict=True)) if stored else [()] * len(columns)
    return [_array(column, of_column) for column, of_column in zip(columns, by_column, strict=True)]


def _kind(column: Column) -> pa.DataType:
    return pa.string() if values.encoding(column.field) not in (b"", UUID) else column.field.type


def _array(column: Column, stored: Sequence[Any]) -> Any:
    own = values.encoding(column.field)
    if own not in (b"", UUID):
        return pa.array([None if value is None else str(value) for value in stored], pa.string())
    decode = values.decoder(column)
    if decode is None or own == UUID:
        return pa.array(stored, column.field.type)
    if pa.types.is_timestamp(column.field.type):
        moments = np.array(
            ["NaT" if value is None else value for value in stored], f"datetime64[{column.field.type.unit}]"
        )  # [n]
        return pa.array(moments).cast(column.field.type)  # texts are UTC, and the cast keeps the instant
    return pa.array([None if value is None else decode(value) for value in stored], column.field.type)
