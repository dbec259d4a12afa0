"""Rows and tables that the user's code gives, as Arrow tables: each with its own values, of kinds that Arrow keeps apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from sqlstream.errors import SchemaError
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.index.types.schema import normal_type
from sqlstream.python_values import arrow_array, mixed_kinds


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
            _refuse_mixed(frame[column].array, column, name)
    return table


def _column(values: Sequence[Any], column: object, name: str) -> Any:
    _refuse_mixed(values, column, name)
    try:
        return arrow_array(values)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise SchemaError(
            f"the rows of {name}: column {column!r} has values of several types ({error}): give it one type"
        ) from error


def _refuse_mixed(values: Iterable[Any], column: object, name: str) -> None:
    if wrong := mixed_kinds([values]):
        raise SchemaError(f"the rows of {name}: column {column!r} {wrong}")


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
