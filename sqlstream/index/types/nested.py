"""Lists, structs and maps of Arrow as JSON text, and back, exactly.

Plain JSON cannot say bytes, times, decimals and NaN; the Arrow type says where they are, so they go in as text
(bytes as base64) and come out by type.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyarrow import types

Convert = Callable[[Any], Any]
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
    return lambda text: convert(json.loads(text)) if '"' in text else json.loads(text)


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
    (types.is_floating, lambda v: v if math.isfinite(v) else str(v), lambda _: float),
    (types.is_binary, lambda v: base64.b64encode(v).decode(), lambda _: base64.b64decode),
    (types.is_timestamp, lambda v: v.isoformat(), _moment_reader),
    (types.is_date, lambda v: v.isoformat(), lambda _: dt.date.fromisoformat),
    (types.is_time, lambda v: v.isoformat(), lambda _: dt.time.fromisoformat),
    (types.is_duration, lambda v: v // dt.timedelta(microseconds=1), lambda _: lambda v: dt.timedelta(microseconds=v)),
    (types.is_decimal, str, lambda _: Decimal),
)
"""(which types, to JSON, type → back); other values are JSON."""
