"""The type of a query's column that bears a name of the source's: that one, or one of its kind which holds more."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from sqlstream.index.types import nested, values
from sqlstream.index.types.models import ENCODING, JSON

_YEARS = r"(?:(?!0000)\d{4}-\d\d-\d\d |(?:0000|-\d{4,}|\d{5,})-\d\d-\d\d[ T])"  # as the file spells moments (`values`)
_MOMENT = re.compile(_YEARS + r"\d\d:\d\d:\d\d(\.(?:\d{3}){1,3})?")  # with no zone: those of an index are in UTC
"""Other spellings are texts: SQL compares them as such."""
_TIME = re.compile(r"\d\d:\d\d:\d\d(\.\d{1,6})?")  # 'fromisoformat' also reads '10', and cuts digits off
_UNITS = ("s", "ms", "us", "ns")
_NANOSECOND_YEARS = range(1678, 2262)
"""Years that 64 bits of nanoseconds hold whole."""


def candidates(field: pa.Field[Any]) -> list[pa.Field[Any]]:
    """Return the fields that a query's column may have which bears the name of `field`, the narrowest first.

    A list, struct or map has numbers that are wide enough, or is any JSON: later rows may tell which. Other types widen as
    `fitting` sees values.
    """
    kind: Any = field.type
    if not types.is_nested(kind):
        return [field]
    kinds = dict.fromkeys([kind, *(nested.with_wide_numbers(kind, as_floats=as_floats) for as_floats in (False, True))])
    return [*map(field.with_type, kinds), pa.field(field.name, pa.string(), metadata={ENCODING: JSON})]


def fitting(fields: Sequence[pa.Field[Any]], stored: Sequence[Any]) -> list[pa.Field[Any]]:
    """Return those of some fields that hold `stored` values, with a wider type of its kind where they ask for it.

    Args:
        fields: Candidates that hold the values before these.
        stored: Values of a query's result, as SQLite has them.
    """
    present = [value for value in stored if value is not None]
    if not present or not fields:
        return [*fields]
    nested_kinds = [field.type for field in fields if types.is_nested(field.type)]
    if nested_kinds and set(map(type, present)) == {str} and (kinds := nested.holding(nested_kinds, present)):
        return [*map(fields[0].with_type, kinds), fields[-1]]
    field = fields[-1]
    if not values.could_be(field, present):
        return []
    kind = field.type if values.encoding(field) else _widened(field.type, present)
    return [] if kind is None else [field.with_type(kind)]


def are_floats(stored: Sequence[Any]) -> bool:
    """Return True if a float holds each of the integers among `stored`."""
    integers, most = [value for value in stored if type(value) is int], values.MAX_EXACT_INTEGER
    if not integers or -most <= min(integers) <= max(integers) <= most:  # nearly always
        return True
    return all(float(value) == value for value in integers)


def _widened(kind: Any, present: Sequence[Any]) -> Any:
    if types.is_uint64(kind):
        return kind if all(isinstance(value, int) or values.is_large_unsigned(value) for value in present) else None
    if types.is_integer(kind):
        bits = kind.bit_width - types.is_signed_integer(kind)
        low = -(1 << bits) if types.is_signed_integer(kind) else 0
        return kind if low <= min(present) <= max(present) < 1 << bits else pa.int64()
    if types.is_floating(kind):
        return _float(kind, present)
    if types.is_timestamp(kind):
        return _timestamp(kind, present)
    if types.is_time(kind):
        return _time(kind, present)
    return _decimal(kind, present) if types.is_decimal(kind) else kind


def _float(kind: pa.DataType, present: Sequence[Any]) -> pa.DataType | None:
    if not are_floats(present):
        return None
    exact = np.array(present, np.float64)  # [n]
    with np.errstate(over="ignore"):
        held = exact.astype(kind.to_pandas_dtype())  # [n]
    return kind if (held == exact).all() else pa.float64()


def _timestamp(kind: Any, present: Sequence[str]) -> pa.DataType | None:
    found = [*map(_MOMENT.fullmatch, present)]
    if None in found:
        return None
    fractions = {match[1] for match in found if match}  # a few, as a rule; with their zeros, which SQL sees
    unit = max(kind.unit, _unit(fractions), key=_UNITS.index)
    if unit == "ns" != kind.unit and any(int(text[: text.index("-", 1)]) not in _NANOSECOND_YEARS for text in present):
        return None
    return pa.timestamp(unit, kind.tz)


def _time(kind: Any, present: Sequence[str]) -> pa.DataType | None:
    found = [_TIME.fullmatch(text) for text in present]
    if None in found:
        return None
    unit = max(kind.unit, _unit({(match[1] or "").rstrip("0.") for match in found if match}), key=_UNITS.index)
    return pa.time32(unit) if unit in ("s", "ms") else pa.time64(unit)


def _unit(fractions: Collection[str | None]) -> str:
    """Return the coarsest unit that has all digits of some fractions of a second, which begin with a point."""
    return _UNITS[-(-max(len(fraction or ".") - 1 for fraction in fractions) // 3)]


def _decimal(kind: Any, present: Sequence[Any]) -> Any:
    decode = values.codec(pa.field("", kind)).decoder(kind)
    assert decode is not None
    digits: int = max(len(decode(value).as_tuple().digits) for value in present)  # type: ignore[attr-defined]  # a Decimal
    if digits <= kind.precision:
        return kind
    return pa.decimal128(digits, kind.scale) if digits <= 38 else pa.decimal256(digits, kind.scale)
