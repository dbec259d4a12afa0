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
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from sqlstream.errors import SourceError
from sqlstream.index.types import nested
from sqlstream.index.types.models import ANY, BOOL8, ENCODING, JSON, UUID, Column

Decode = Callable[[Any], object]

NAN = "NaN"
"""NaN in the file; `float` reads it."""
_INT64_MAX = 2**63 - 1
_EXACT = Context(prec=76)  # digits of decimal256
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


class NanosecondDatetime(dt.datetime):
    """A moment with its zone, and nanoseconds below its microseconds, as `pandas.Timestamp` is one.

    Equal to a moment only if the nanoseconds are equal, too. What `datetime` computes from it has microseconds.
    """

    nanosecond: int = 0
    """Nanoseconds below the microsecond, in [0, 1000)."""

    @classmethod
    def of(cls, moment: dt.datetime, nanosecond: int) -> NanosecondDatetime:
        """Return `moment` and `nanosecond` more."""
        parts = (*moment.timetuple()[:6], moment.microsecond, moment.tzinfo)
        made = cls(*parts, fold=moment.fold)
        made.nanosecond = nanosecond
        return made

    def isoformat(self, sep: str = "T", timespec: str = "auto") -> str:
        """Return the text with all nine digits, unless `timespec` asks for fewer."""
        if timespec != "auto":
            return super().isoformat(sep, timespec)
        text = super().isoformat(sep, "microseconds")
        return f"{text[:26]}{self.nanosecond:03}{text[26:]}"

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.nanosecond == getattr(other, "nanosecond", 0)

    def __ne__(self, other: object) -> bool:  # datetime has its own
        return not self == other

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.nanosecond))

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        plain = dt.datetime.combine(self.date(), self.timetz())
        return (NanosecondDatetime.of, (plain, self.nanosecond))


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


def _timestamps(array: Any, _kind: Any) -> Encoded:
    """Return UTC texts; years that Arrow will not print go through numpy."""
    naive = array.cast(pa.timestamp(array.type.unit))  # drops the zone and keeps the instant
    texts = naive.cast(pa.string()).to_pylist()
    for at in _unprinted(texts):
        texts[at] = str(np.datetime64(naive[at].value, array.type.unit))
        if texts[at] == "NaT":
            raise ValueError(f"{naive[at].value} {array.type.unit} stands for no time at all")
    return Encoded(texts)


def _timestamp_decoder(kind: Any) -> Decode:
    zone = pa.lib.string_to_tzinfo(kind.tz) if kind.tz else None

    def decode(text: str) -> object:
        try:
            moment = dt.datetime.fromisoformat(text[:26])
        except ValueError:
            return np.datetime64(text)  # a year outside 1…9999
        has_more = text[26:].strip("0")
        if zone is None:
            return np.datetime64(text, "ns") if has_more else moment  # datetime cannot hold it
        try:
            moment = moment.replace(tzinfo=dt.UTC).astimezone(zone)
        except OverflowError:
            return np.datetime64(text)  # a year outside 1…9999 in its zone
        return NanosecondDatetime.of(moment, int(text[26:29].ljust(3, "0"))) if has_more else moment

    return decode


def _dates(array: Any, _kind: Any) -> Encoded:
    days = array.cast(pa.date32())
    texts = days.cast(pa.string()).to_pylist()
    for at in _unprinted(texts):
        texts[at] = str(np.datetime64(days[at].value, "D"))
    return Encoded(texts)


def _date_back(text: str) -> object:
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        return np.datetime64(text)  # a year outside 1…9999


def _times(array: Any, _kind: Any) -> Encoded:
    texts = array.cast(pa.time64("us")).cast(pa.string()).to_pylist()  # the first cast refuses to cut nanoseconds
    if wrong := _unprinted(texts):
        raise ValueError(f"{array[wrong[0]].value} {array.type.unit} after midnight is no time of a day")
    return Encoded(texts)


def _unprinted(texts: Sequence[str | None]) -> list[int]:
    """Return which values Arrow could not write as text."""
    return [at for at, text in enumerate(texts) if text is not None and text.startswith("<")]  # '<value out of range: …>'


def _duration_decoder(kind: Any) -> Decode:
    if kind.unit == "ns":
        return lambda v: np.timedelta64(v, "ns") if v % 1000 else dt.timedelta(microseconds=v // 1000)
    return lambda v: _duration(v, kind.unit)


def _duration(count: int, unit: Any) -> object:
    try:
        return dt.timedelta(microseconds=count * _MICROSECONDS[unit])
    except OverflowError:
        return np.timedelta64(count, unit)  # more than 999 999 999 days


def _nested(array: Any, kind: Any) -> Encoded:
    dump = nested.dumper(kind)
    coarse = nested.in_microseconds(
        array.type
    )  # with pandas installed, to_pylist cuts nanoseconds off or makes objects of them
    array = array if coarse.equals(array.type) else array.cast(coarse)
    return Encoded([None if value is None else dump(value) for value in array.to_pylist()])


def _is_container(decoded: Any, _stored: Any) -> bool:
    return isinstance(decoded, (list, dict))


def _is_moment(_decoded: Any, stored: Any) -> bool:
    return len(stored) >= len("2024-02-29 12:30:00")  # numpy also reads '2024'


def _is_date(decoded: Any, stored: Any) -> bool:
    return str(decoded) == stored and (isinstance(decoded, dt.date) or decoded.dtype == "M8[D]")  # both also read '2024'


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
        encode=_timestamps,
        decoder=_timestamp_decoder,
        is_own=_is_moment,
        has_several_forms=True,
    ),
    Codec(accepts=types.is_date, affinity="TEXT", stored=(str,), encode=_dates, decoder=lambda _: _date_back, is_own=_is_date),
    Codec(accepts=types.is_time, affinity="TEXT", stored=(str,), encode=_times, decoder=lambda _: dt.time.fromisoformat),
    Codec(
        accepts=types.is_duration,
        affinity="INTEGER",
        stored=(int,),
        encode=lambda array, _: _objects(array.cast(pa.int64())),
        decoder=_duration_decoder,
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
