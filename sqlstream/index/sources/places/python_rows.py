"""Rows that the user's code gives as dicts, as Arrow tables: each with its own values, of kinds that Arrow keeps apart.

Arrow takes some values for one another without an error: a datetime without a zone for one in UTC, a datetime for its date,
text for bytes, what a mask hides for a value. Such columns are refused here.
"""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.errors import SchemaError
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.index.types.schema import normal_type

_MOMENTS = (dt.datetime, dt.date, dt.time, dt.timedelta)
_CONSTANT = frozenset((str, bytes, int, float, bool, complex, type(None), decimal.Decimal, uuid.UUID, *_MOMENTS))
_LISTS = (list, tuple, set, frozenset)
_TEMPORAL = (dt.date, dt.time)
_BYTES = (bytes, bytearray, memoryview)


def owned_row(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a row that stays as it is when the user's generator fills the same dict, list or array again for the next one."""
    if _CONSTANT.issuperset(map(type, row.values())):
        return dict(row)
    return {name: _owned(value) for name, value in row.items()}


def _owned(value: Any) -> Any:
    kind = type(value)
    if kind in _CONSTANT or isinstance(value, np.generic):
        owned = value
    elif kind is dict:
        owned = owned_row(value)
    elif kind in (list, tuple):
        owned = value[:] if _CONSTANT.issuperset(map(type, value)) else kind(map(_owned, value))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        owned = value.copy()
    elif isinstance(value, bytearray | memoryview):
        owned = bytes(value)
    else:
        owned = _copied(value)
    return owned


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what has no copy is no value of a table either: Arrow's refusal names the column
        return value


def owned_table(table: pa.Table) -> pa.Table:
    """Return a table with memory of its own: Arrow reads arrays of numpy and frames of pandas in place.

    Columns of views lie in memory of Arrow or polars, which nothing changes, and digests of indexes go by their buffers.
    """
    if any("view" in str(field.type) for field in table.schema):
        return table
    return pa.concat_tables([table, table.slice(0, 0)]).combine_chunks()  # two pieces are copied


def table_of_rows(rows: Sequence[Mapping[Any, Any]], name: str) -> pa.Table:
    """Return dicts as a table with all of their keys, in the order of first appearance.

    Raises:
        SchemaError: A column has values of several types, or two keys are one name.
    """
    load_pandas()
    columns = dict.fromkeys(column for row in rows for column in row)
    if len(set(map(str, columns))) < len(columns):
        twice = next(column for column in columns if not isinstance(column, str) and str(column) in columns)
        raise SchemaError(
            f"the rows of {name} have the keys {str(twice)!r} and {twice!r}, which name one column: rename one of them"
        )
    return pa.table({str(column): _column([row.get(column) for row in rows], column, name) for column in columns})


def table_of_frame(frame: Any, name: str) -> pa.Table:
    """Return a frame of pandas as a table; a named index of it is a column.

    Raises:
        SchemaError: A column has values of several types, or of one that Arrow has not.
    """
    has_index = any(level is not None for level in frame.index.names)  # a nameless one only counts rows
    try:
        table = pa.Table.from_pandas(frame.reset_index() if has_index else frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        said = "; ".join(error.args) if isinstance(error, pa.ArrowException) else error  # Arrow's text is a tuple here
        raise SchemaError(f"the rows of {name} cannot be taken as a table ({said}): change what is said, or drop it") from error
    for column, dtype in frame.dtypes.items():
        if dtype.kind == "O":
            refuse_mixed([frame[column].array], column, name)
    return table


def _column(values: Sequence[Any], column: object, name: str) -> Any:
    refuse_mixed([values], column, name)
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(
            f"the rows of {name}: column {column!r} has values of several types ({error}): give it one type"
        ) from error


def refuse_mixed(groups: Sequence[Iterable[Any]], column: object, name: str) -> None:
    """Refuse values of a column that Arrow would take for others, at any depth.

    Args:
        groups: The values; each group can be iterated several times.
        column: The column's name.
        name: What errors call the source.

    Raises:
        SchemaError: There are such values.
    """
    types = set(map(type, chain.from_iterable(groups))) - {type(None), int, float, bool}
    found = {"text"} if any(issubclass(kind, str) for kind in types) else set[str]()
    if any(issubclass(kind, _BYTES) for kind in types):
        found.add("bytes")
    if any(issubclass(kind, _TEMPORAL) for kind in types):
        found |= {_moment(value) for value in chain.from_iterable(groups) if isinstance(value, _TEMPORAL)} - {"none"}
    if "times of a day with a zone" in found:
        raise SchemaError(
            f"the rows of {name}: column {column!r} has times of a day with a zone, which Arrow drops: give them as text"
        )
    if any(issubclass(kind, np.ma.MaskedArray) for kind in types):
        raise SchemaError(
            f"the rows of {name}: column {column!r} has masked arrays, whose masks Arrow drops: give array.tolist(), "
            "which has None there"
        )
    if len(found) > 1:
        both = " and ".join(sorted(found))
        raise SchemaError(f"the rows of {name}: column {column!r} has values of several types ({both}): give it one type")
    _refuse_mixed_within(groups, types, column, name)


def _moment(value: dt.date | dt.time) -> str:
    if isinstance(value, dt.time):
        return "times of a day" if value.tzinfo is None else "times of a day with a zone"
    if isinstance(value, dt.datetime):
        if type(value).__name__ == "NaTType":  # pandas': missing
            return "none"
        return "moments without a zone" if value.tzinfo is None else "moments with a zone"
    return "days"


def _refuse_mixed_within(groups: Sequence[Iterable[Any]], types: set[type], column: object, name: str) -> None:
    within: list[Iterable[Any]] = []
    if any(issubclass(kind, _LISTS) for kind in types):
        within += [value for value in chain.from_iterable(groups) if isinstance(value, _LISTS)]
    if any(issubclass(kind, np.ndarray) for kind in types):
        arrays = (value for value in chain.from_iterable(groups) if isinstance(value, np.ndarray))
        within += [array.ravel().tolist() for array in arrays if array.dtype == object]  # [n]
    if within:
        refuse_mixed(within, column, name)
    if any(issubclass(kind, Mapping) for kind in types):
        fields: dict[Any, list[Any]] = {}
        for value in chain.from_iterable(groups):
            for key, field in value.items() if isinstance(value, Mapping) else ():
                fields.setdefault(key, []).append(field)
        for field_values in fields.values():
            refuse_mixed([field_values], column, name)


def refuse_conflicts(one: pa.Schema, other: pa.Schema) -> None:
    """Refuse columns of which Arrow makes one type that does not hold the values of both: text as bytes, decimals as floats.

    Raises:
        pyarrow.ArrowTypeError: There is such a column.
    """
    for field in other:
        if field.name not in one.names:
            continue
        known, new = (_leaves(kind) for kind in (one.field(field.name).type, field.type))
        for place in known.keys() & new.keys():
            if known[place] != new[place]:
                raise pa.ArrowTypeError(
                    f"Unable to merge: Field {field.name} has incompatible types: {one.field(field.name).type} vs {field.type}"
                )


_MADE_OTHERS = (
    (pa.types.is_string, "text"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_decimal, "decimals"),
    (pa.types.is_floating, "floats"),
)


def _leaves(given: pa.DataType) -> dict[str, str]:
    """Return by its place in a type each type that Arrow would make another one of."""
    kind: Any = normal_type(given)
    if kind is None:
        return {}
    if pa.types.is_nested(kind):
        fields = (kind.field(at) for at in range(kind.num_fields))
        return {f"{field.name}/{place}": leaf for field in fields for place, leaf in _leaves(field.type).items()}
    said = next((said for is_one, said in _MADE_OTHERS if is_one(kind)), None)
    return {} if said is None else {"": said}
