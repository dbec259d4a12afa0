"""The columns of an index file as users' SQL sees them: their final types, and the expressions of the views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa

from sqlstream.index.types.models import ANY, JSON, MOMENT_DIGITS, Column, quote
from sqlstream.index.types.values import affinity, encoding


def typed(column: Column, field: pa.Field[Any]) -> Column:
    """Return a column whose final type is known."""
    serialised = pa.schema([field]).serialize().to_pybytes()
    return replace(column, arrow_field=serialised, type=_readable(field))


def _readable(field: pa.Field[Any]) -> str:
    own = encoding(field)
    return "json" if own in (JSON, ANY) else own.decode() or str(field.type)


def in_view(column: Column, *, with_all_digits: bool) -> str:
    """Return the column as users' SQL sees it.

    Args:
        column: The column.
        with_all_digits: Its values are moments, of which some have too few digits: texts of one moment must be equal.
    """
    name = quote(column.physical)
    if column.expression != name:
        return column.expression
    wanted = affinity(column.field)
    if with_all_digits:
        return f"CAST({padded_moments(name, MOMENT_DIGITS[column.field.type.unit])} AS {wanted}) AS {name}"
    value = f"CASE typeof({name}) WHEN 'text' THEN NULL ELSE {name} END" if column.has_nan else name
    if wanted != "BLOB" and (column.has_nan or wanted != column.declared):
        value = f"CAST({value} AS {wanted})"
    return value if value == name else f"{value} AS {name}"


def padded_moments(name: str, num_digits: int) -> str:
    """Return, in SQL, the texts of a column of moments with so many digits of the second, but for years beyond four digits."""
    bare = len("2024-02-29 12:30:00")
    have = [digits for digits in MOMENT_DIGITS.values() if digits < num_digits]
    cases = [(bare + 1 + digits if digits else bare, ("" if digits else ".") + "0" * (num_digits - digits)) for digits in have]
    whens = " ".join(f"WHEN {length} THEN {name} || '{zeros}'" for length, zeros in cases)
    return f"CASE length({name}) {whens} ELSE {name} END" if whens else name
