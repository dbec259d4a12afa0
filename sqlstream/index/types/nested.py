"""Lists, structs and maps of Arrow as JSON text, and back, exactly.

Plain JSON cannot say bytes, times, decimals and NaN; the Arrow type says where they are, so they go in as text
(bytes as base64) and come out by type.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow import types

from sqlstream.index.types.pandas_import import load_pandas

Convert = Callable[[Any], Any]
_CONTAINERS = frozenset((list, tuple, dict))
_Leaf = tuple[Callable[[Any], bool], Convert, Callable[[Any], Convert]]


def dumper(kind: Any) -> Callable[[Any], str]:
    """Return what writes one Python value of the normal Arrow type `kind` as JSON text."""
    convert = _conversion(kind, back=False)
    if convert is None:
        return json.dumps
    if not _only_floats(kind):
        return lambda value: json.dumps(convert(value))

    def dump(value: Any) -> str:
        try:
            return json.dumps(value, allow_nan=False)  # embeddings are long: no Python code per number
        except ValueError:
            return json.dumps(convert(value))

    return dump


def loader(kind: Any) -> Callable[[str], Any]:
    """Return what reads the text of `dumper(kind)`."""
    convert = _conversion(kind, back=True)
    if convert is None:
        return json.loads
    if not _only_floats(kind):
        return lambda text: convert(json.loads(text))
    floats = json.JSONDecoder(parse_int=_float_of_integer).decode  # `[1]`: another file has integers, or a query made it
    return lambda text: convert(floats(text)) if '"' in text else floats(text)


def holding(kinds: Sequence[Any], texts: Sequence[str]) -> list[Any]:
    """Return those of some types that hold the values of JSON texts: nothing is cut, lost or added.

    Args:
        kinds: Normal types, each a wider form of the one before.
        texts: The values.
    """
    load_pandas()
    found: list[Any] = []
    held: pa.Array[Any] | None = None
    for kind in kinds:
        if (held := _widened(held, kind)) is None:
            held = _held(kind, texts)
        if held is not None:
            found.append(kind)
    return found


def with_wide_numbers(kind: Any, *, as_floats: bool) -> Any:
    """Return the type with 64 bits for the numbers in it.

    Args:
        kind: A normal type.
        as_floats: Make floats of its integers, too.

    Example:
        >>> with_wide_numbers(pa.struct([("at", pa.list_(pa.int8()))]), as_floats=True)
        StructType(struct<at: list<item: double>>)
    """
    if types.is_struct(kind):
        return pa.struct([field.with_type(with_wide_numbers(field.type, as_floats=as_floats)) for field in kind])
    if types.is_map(kind):
        return pa.map_(kind.key_type, with_wide_numbers(kind.item_type, as_floats=as_floats))
    if types.is_list(kind):
        return pa.list_(with_wide_numbers(kind.value_type, as_floats=as_floats))
    if types.is_floating(kind) or (as_floats and types.is_integer(kind)):
        return pa.float64()
    return pa.int64() if types.is_integer(kind) and not types.is_uint64(kind) else kind


def in_microseconds(kind: Any) -> Any:
    """Return the type with microseconds, which Python's values have, where it has nanoseconds."""
    if types.is_map(kind):
        return pa.map_(in_microseconds(kind.key_type), in_microseconds(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([field.with_type(in_microseconds(field.type)) for field in kind])
    if types.is_dictionary(kind) and not in_microseconds(kind.value_type).equals(kind.value_type):
        kind = kind.value_type
    listed: Any = kind
    if types.is_nested(kind) and not types.is_union(kind):  # every kind of list
        value = in_microseconds(listed.value_type)
        return listed if value.equals(listed.value_type) else pa.list_(listed.value_field.with_type(value))
    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind):
        return pa.time64("us")
    return pa.duration("us") if types.is_duration(kind) and kind.unit == "ns" else kind


def _conversion(kind: Any, *, back: bool) -> Convert | None:
    """Return the conversion to JSON values, or back; None where the value is one."""
    if types.is_struct(kind):
        return _of_struct({field.name: _conversion(field.type, back=back) for field in kind})
    if types.is_map(kind):
        pair = tuple if back else list
        key, item = (_conversion(child, back=back) or _same for child in (kind.key_type, kind.item_type))
        return lambda pairs: [pair((key(k), None if v is None else item(v))) for k, v in pairs]
    if types.is_list(kind):
        convert = _conversion(kind.value_type, back=back)
        return None if convert is None else lambda values: [None if v is None else convert(v) for v in values]
    for is_leaf, to_json, from_json in _LEAVES:
        if is_leaf(kind):
            return from_json(kind) if back else to_json
    return None


def _held(kind: Any, texts: Sequence[str]) -> pa.Array[Any] | None:
    """Return the values of JSON texts as Arrow has them, None if it would change some: it makes 1 of 1.5, and 1.0 of True."""
    load, dump = loader(kind), dumper(kind)
    try:
        loaded = [load(text) for text in texts]
        array = pa.array(loaded, in_microseconds(kind))
        back = array.to_pylist()
        is_held = _are_same(back, loaded)
        if is_held and _conversion(kind, back=True) is not None and not _only_floats(kind):  # base64 passes over what is none
            is_held = [json.loads(dump(value)) for value in back] == [json.loads(text) for text in texts]
    except (ValueError, TypeError, ArithmeticError, AttributeError):  # AttributeError: a list in place of an object
        return None
    return array if is_held else None


def _widened(array: pa.Array[Any] | None, kind: Any) -> pa.Array[Any] | None:
    """Return the array with the wider type `kind`; None if that does not hold all of its numbers."""
    try:
        return None if array is None else array.cast(in_microseconds(kind))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _are_same(one: Any, other: Any) -> bool:
    """Return True for equal values of the same Python types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_same(value, other[name]) for name, value in one.items())
    if not isinstance(one, list | tuple):
        return bool(one == other or one != one)  # noqa: PLR0124 (NaN)
    if [*map(type, one)] != [*map(type, other)]:
        return False
    if one == other and _CONTAINERS.isdisjoint(map(type, one)):  # embeddings are long: no Python code per number
        return True
    return all(map(_are_same, one, other))


def _float(number: Any) -> Any:
    """Return a number of JSON, or the word for one, as a float; what is none stays: a boolean, an integer that no float is."""
    if type(number) is int:
        return _float_of_integer(number)
    return number if type(number) is bool else float(number)


def _float_of_integer(digits: Any) -> Any:
    whole = int(digits)
    return made if (made := float(whole)) == whole else whole


def _of_struct(fields: dict[str, Convert | None]) -> Convert | None:
    todo = {name: convert for name, convert in fields.items() if convert is not None}
    if not todo:
        return None
    return lambda value: {name: todo[name](v) if name in todo and v is not None else v for name, v in value.items()}


def _only_floats(kind: Any) -> bool:
    """Return True for lists (of lists) of floats: only NaN and infinities need words, and no other text is in them."""
    return _only_floats(kind.value_type) if types.is_list(kind) else bool(types.is_floating(kind))


def _moment_reader(kind: Any) -> Convert:
    zone = pa.lib.string_to_tzinfo(kind.tz) if kind.tz else None
    return lambda v: dt.datetime.fromisoformat(v).astimezone(zone) if zone else dt.datetime.fromisoformat(v)


def _same(value: Any) -> Any:
    return value


_LEAVES: tuple[_Leaf, ...] = (
    (types.is_floating, lambda v: v if math.isfinite(v) else str(v), lambda _: _float),
    (types.is_binary, lambda v: base64.b64encode(v).decode(), lambda _: base64.b64decode),
    (types.is_timestamp, lambda v: v.isoformat(), _moment_reader),
    (types.is_date, lambda v: v.isoformat(), lambda _: dt.date.fromisoformat),
    (types.is_time, lambda v: v.isoformat(), lambda _: dt.time.fromisoformat),
    (types.is_duration, lambda v: v // dt.timedelta(microseconds=1), lambda _: lambda v: dt.timedelta(microseconds=v)),
    (types.is_decimal, str, lambda _: Decimal),
)
"""(which types, to JSON, type → back); other values are JSON."""
