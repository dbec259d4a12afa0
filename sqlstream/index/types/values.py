"""Arrow values as SQLite holds them, and back: what goes in comes out.

| Arrow | in the file | why |
|---|---|---|
| bool, integers | INTEGER | |
| uint64 above int64 | BLOB of 8 bytes, big endian | sorts after every number, as it should |
| floats | REAL (in a column of no type), NaN as the text 'NaN' | SQLite stores NaN as NULL, and -0.0 as 0.0 in REAL columns |
| string; binary | TEXT; BLOB | |
| uuid; bool8 | BLOB of 16 bytes; INTEGER | given back as `uuid.UUID` and `bool` |
| timestamp (UTC), date, time | TEXT, ISO 8601 with a blank | `created > '2024-01-31'` works in SQL, see `sql/moments.py` |
| duration | INTEGER of its unit | |
| decimal | the number if that is exact, else TEXT | `price > 10` works in SQL, see `sql/numbers.py`; no digit is lost |
| list, struct, map | JSON text | SQLite's json functions work on it |
"""

from __future__ import annotations

import datetime as dt
import json
import operator
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from sqlstream.errors import SourceError
from sqlstream.index.types import moments, nested
from sqlstream.index.types.models import ANY, BOOL8, ENCODING, JSON, UUID, Column, Decode

NAN = "NaN"
"""NaN in the file; `float` reads it."""
_INT64_MAX = 2**63 - 1
_EXACT = Context(prec=76)  # digits of decimal256


MAX_EXACT_INTEGER = 1 << 53
"""A float64 holds all integers up to this one."""


class Encoded(NamedTuple):
    """One column of a batch as SQLite takes it."""

    values: list[Any]
    has_nan: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """How values of one family of types are stored."""

    accepts: Callable[[Any], bool]
    """Whether an Arrow type is of the family."""
    affinity: str
    """SQLite type of the values, as users' SQL sees them; BLOB means none."""
    stored: tuple[type, ...]
    """Python types of stored values."""
    encode: Callable[[Any, Any], Encoded]
    """(array, type of the table's column) → stored values.  # [n]"""
    decoder: Callable[[Any], Decode | None] = lambda _: None
    """Type → what turns a stored value back; None where it is itself."""
    is_own: Callable[[Any, Any], bool] = lambda _decoded, _stored: True
    """Whether a stored value really is one of the family, when its Python type alone does not tell."""
    has_several_forms: bool = False
    """Whether values that a sample has as one text may be stored in several forms, by the unit, scale or type of their file."""


def encoding(field: pa.Field[Any]) -> bytes:
    """Return the field's own encoding, or b'' where its Arrow type says all."""
    return (field.metadata or {}).get(ENCODING, b"")


def codec(field: pa.Field[Any]) -> Codec:
    """Return how values of `field` (of a normal type, see `schema.normalise`) are stored."""
    if (own := _OF_ENCODING.get(encoding(field))) is not None:
        return own
    return next(known for known in _CODECS if known.accepts(field.type))


def affinity(field: pa.Field[Any]) -> str:
    """Return the SQLite type of a column of `field` in users' SQL; BLOB means that values are what they are."""
    return codec(field).affinity


def has_several_forms(field: pa.Field[Any]) -> bool:
    """Return True if values of `field` that are equal in samples may be stored as several, which only decoding tells."""
    return codec(field).has_several_forms


def declared(field: pa.Field[Any]) -> str:
    """Return the type that a column of `field` is declared with in the file."""
    return "BLOB" if affinity(field) == "REAL" else affinity(field)  # a REAL column makes 0.0 of -0.0


def encoder(column: pa.Array[Any], field: pa.Field[Any], source: str) -> Callable[[pa.Array[Any]], Encoded]:
    """Return what returns values of a column as SQLite takes them: some of its values, or others of their type.

    Args:
        column: One column of a batch, as its source gives it.
        field: The column as the table has it; of a normal type.
        source: Where it is from, for errors: the function raises SourceError where a value has no exact form, e.g. nanoseconds
            within a list.
    """
    own, wanted = _plain(column.slice(0, 0)).type, field.type
    codec_of_own = next(known for known in _CODECS if known.accepts(own))  # its own type: the table's may be wider
    is_plain, is_widened = own.equals(column.type), makes_floats(own, wanted)

    def encode(array: pa.Array[Any]) -> Encoded:
        try:
            plain = array if is_plain else _plain(array)
            if is_widened:
                check_floats_hold(plain)
            return codec_of_own.encode(plain, wanted)
        except (ValueError, OverflowError, TypeError) as error:  # pa.ArrowInvalid is a ValueError
            raise SourceError(
                f"{source}, column {field.name!r}: a value has no exact form in the index ({error}): leave it out or round it"
            ) from error

    return encode


def makes_floats(own: Any, wanted: Any) -> bool:
    """Return True if a column of the type `wanted` has floats where one of the type `own` has integers, in lists, too."""
    if types.is_list(wanted) and hasattr(own, "value_type"):  # every kind of list
        return makes_floats(own.value_type, wanted.value_type)
    return types.is_integer(own) and types.is_floating(wanted)


def check_floats_hold(integers: Any) -> None:
    """Raise ValueError if one of some integers, or of those in lists, has digits that no float has: their column is of floats.

    Those above 2^63 - 1 are refused in any case: they are stored in a form that no float has.
    """
    while types.is_nested(integers.type):
        integers = _plain(integers.flatten())
    low, high = pc.min(integers).as_py(), pc.max(integers).as_py()
    if low is None or high is None or -MAX_EXACT_INTEGER <= low <= high <= MAX_EXACT_INTEGER:
        return
    for value in integers.to_pylist():
        if value is not None and (value >= 1 << 63 or float(value) != value):
            raise ValueError(f"{value} has digits that no float holds, and other files have floats in this column")


def encode_named(array: pa.Array[Any], field: pa.Field[Any], source: str) -> Encoded:
    """Return all values of a column as SQLite takes them; see `encoder`.

    Args:
        array: One column of a batch.
        field: The column as the table has it.
        source: Where it is from, for errors.

    Raises:
        SourceError: A value has no exact form.
    """
    return encoder(array, field, source)(array)


def decoder(column: Column) -> Decode | None:
    """Return what turns a stored value (never None) back, or None where it is itself."""
    return codec(column.field).decoder(column.field.type)


def could_be(field: pa.Field[Any], stored: Sequence[Any]) -> bool:
    """Return True if all `stored` values (None apart) could be values of `field`: a query's result may bear its name only."""
    kind = codec(field)
    present = [value for value in stored if value is not None]
    if not set(map(type, present)) <= set(kind.stored):
        return False
    decode = kind.decoder(field.type)
    if decode is None:
        return True
    try:
        return all(kind.is_own(decode(value), value) for value in present)
    except (ValueError, TypeError, ArithmeticError):
        return False


def _plain(array: Any) -> Any:
    """Return the array without dictionaries, runs and extensions."""
    if isinstance(array, pa.ExtensionArray):
        storage: Any = array.storage
        return _plain(storage if array.type.extension_name != BOOL8 else storage.cast(pa.bool_()))
    if types.is_dictionary(array.type):
        return _plain(array.dictionary_decode())
    if types.is_run_end_encoded(array.type):
        return _plain(pc.call_function("run_end_decode", [array]))
    return array


def _objects(array: Any, _kind: Any = None) -> Encoded:
    """Return Python's values, None for null; `to_numpy` is hardly faster, and imports pandas where it is installed (m)."""
    return Encoded(array.to_pylist())


def _floats(array: Any, _kind: Any) -> Encoded:
    array = array.cast(pa.float64())
    values = _objects(array).values
    if not pc.any(pc.is_nan(array)).as_py():
        return Encoded(values)
    return Encoded([NAN if value != value else value for value in values], has_nan=True)  # noqa: PLR0124 (only NaN differs from itself)


def _unsigned(array: Any, _kind: Any) -> Encoded:
    return Encoded([v.to_bytes(8, "big") if v is not None and v > _INT64_MAX else v for v in array.to_pylist()])


def is_large_unsigned(stored: bytes) -> bool:
    """Return whether bytes are what the file has of an integer above int64."""
    return len(stored) == 8 and stored[0] >= 0x80


def unsigned_back(stored: Any) -> object:
    """Return the number that a value of a column of uint64 stands for."""
    return int.from_bytes(stored, "big") if isinstance(stored, bytes) else stored


def numbers_of(column: Column, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the numbers that values of a column, as the index file has them, stand for."""
    return tuple(map(unsigned_back, values)) if column.type == "uint64" else values


def columns_of(rows: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the columns of rows, none of no rows.

    `zip(*rows)` makes an iterator for each row, over which the collector of cycles then goes: 15 times the time of many rows.
    """
    return [tuple(map(operator.itemgetter(at), rows)) for at in range(len(rows[0]) if rows else 0)]


def _decimals(array: Any, kind: Any) -> Encoded:
    return Encoded([None if value is None else _decimal(value) for value in array.cast(kind).to_pylist()])


def _decimal(value: Decimal) -> int | float | str:
    whole = int(value)
    if value == whole and abs(whole) <= _INT64_MAX:
        return whole
    number = float(value)
    return number if Decimal(repr(number)) == value else str(value)


def rescaled(text: str, scale: int) -> str:
    """Return the text of a decimal with so many digits behind the point, as a column of this scale has it."""
    return str(Decimal(text).quantize(Decimal(1).scaleb(-scale), context=_EXACT))


def _decimal_decoder(kind: Any) -> Decode:
    quantum = Decimal(1).scaleb(-kind.scale)
    return lambda v: Decimal(repr(v) if isinstance(v, float) else v).quantize(quantum, context=_EXACT)


def _nested(array: Any, kind: Any) -> Encoded:
    dump = nested.dumper(kind)
    coarse = nested.in_microseconds(
        array.type
    )  # with pandas installed, to_pylist cuts nanoseconds off or makes objects of them
    array = array if coarse.equals(array.type) else array.cast(coarse)
    return Encoded([None if value is None else dump(value) for value in array.to_pylist()])


def _is_container(decoded: Any, _stored: Any) -> bool:
    return isinstance(decoded, (list, dict))


def _never(_kind: Any) -> bool:
    return False


_INTEGERS = Codec(accepts=types.is_integer, affinity="INTEGER", stored=(int,), encode=_objects)
_TEXTS = Codec(
    accepts=lambda t: types.is_string(t) or types.is_large_string(t) or types.is_string_view(t),
    affinity="TEXT",
    stored=(str,),
    encode=_objects,
)
_CODECS = (
    Codec(accepts=types.is_null, affinity="BLOB", stored=(), encode=lambda array, _: Encoded([None] * len(array))),
    Codec(
        accepts=types.is_boolean,
        affinity="INTEGER",
        stored=(int,),
        encode=lambda array, _: _objects(array.cast(pa.int8())),
        decoder=lambda _: bool,
        is_own=lambda decoded, stored: decoded == stored,
    ),
    Codec(accepts=types.is_uint64, affinity="BLOB", stored=(int, bytes), encode=_unsigned, decoder=lambda _: unsigned_back),
    _INTEGERS,
    Codec(accepts=types.is_floating, affinity="REAL", stored=(int, float), encode=_floats, decoder=lambda _: float),
    _TEXTS,
    Codec(
        accepts=lambda t: (
            types.is_binary(t) or types.is_large_binary(t) or types.is_fixed_size_binary(t) or types.is_binary_view(t)
        ),
        affinity="BLOB",
        stored=(bytes,),
        encode=_objects,
    ),
    Codec(
        accepts=types.is_decimal,
        affinity="BLOB",
        stored=(int, float, str),
        encode=_decimals,
        decoder=_decimal_decoder,
        is_own=lambda decoded, stored: decoded == Decimal(str(stored)),
        has_several_forms=True,
    ),
    Codec(
        accepts=types.is_timestamp,
        affinity="TEXT",
        stored=(str,),
        encode=lambda array, _: Encoded(moments.timestamps(array)),
        decoder=moments.timestamp_decoder,
        is_own=moments.is_moment,
        has_several_forms=True,
    ),
    Codec(
        accepts=types.is_date,
        affinity="TEXT",
        stored=(str,),
        encode=lambda array, _: Encoded(moments.dates(array)),
        decoder=lambda _: moments.date_back,
        is_own=moments.is_date,
    ),
    Codec(
        accepts=types.is_time,
        affinity="TEXT",
        stored=(str,),
        encode=lambda array, _: Encoded(moments.times(array)),
        decoder=lambda _: dt.time.fromisoformat,
    ),
    Codec(
        accepts=types.is_duration,
        affinity="INTEGER",
        stored=(int,),
        encode=lambda array, _: _objects(array.cast(pa.int64())),
        decoder=moments.duration_decoder,
    ),
    Codec(
        accepts=types.is_nested,
        affinity="TEXT",
        stored=(str,),
        encode=_nested,
        decoder=nested.loader,
        has_several_forms=True,
    ),
)
_OF_ENCODING = {
    JSON: Codec(
        accepts=_never,
        affinity="TEXT",
        stored=(str,),
        encode=_objects,
        decoder=lambda _: json.loads,
        is_own=_is_container,
        has_several_forms=True,
    ),
    UUID: Codec(
        accepts=_never,
        affinity="BLOB",
        stored=(bytes,),
        encode=_objects,
        decoder=lambda _: lambda stored: uuid.UUID(bytes=stored),
    ),
    ANY: Codec(accepts=_never, affinity="BLOB", stored=(int, float, str, bytes), encode=_objects, has_several_forms=True),
}
"""Codecs of fields whose Arrow type does not tell it all."""
