"""Values of Python that become Arrow's: copies that stay as they are, and what Arrow would take for other values.

Arrow takes some values for one another without an error: a datetime without a zone for one in UTC, a datetime for its date,
text for bytes, what a mask hides for a value.
"""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, SupportsIndex

import numpy as np
import pyarrow as pa

_MOMENTS = (dt.datetime, dt.date, dt.time, dt.timedelta)
_CONSTANT = frozenset((str, bytes, int, float, bool, complex, type(None), decimal.Decimal, uuid.UUID, *_MOMENTS))
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_LISTS = (list, tuple, set, frozenset)
_TEMPORAL = (dt.date, dt.time, np.datetime64)
_BYTES = (bytes, bytearray, memoryview)


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
        if (is_equal := super().__eq__(other)) is NotImplemented:  # which counts as true
            return NotImplemented
        return is_equal and self.nanosecond == getattr(other, "nanosecond", 0)

    def __ne__(self, other: object) -> bool:  # datetime has its own
        return not self == other

    def __hash__(self) -> int:
        whole = super().__hash__()  # that of the moment without nanoseconds, which is equal
        return hash((whole, self.nanosecond)) if self.nanosecond else whole

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        plain = dt.datetime.combine(self.date(), self.timetz())
        return (NanosecondDatetime.of, (plain, self.nanosecond))


_NANOSECONDS = frozenset((dt.datetime, np.datetime64, NanosecondDatetime))


def arrow_array(values: Sequence[Any], kind: pa.DataType | None = None) -> Any:
    """Return values as an array of Arrow, with the nanoseconds of moments and durations.

    Arrow cuts those of a `NanosecondDatetime`, and takes no `datetime64` beside a `datetime`: a column of nanoseconds has both.

    Args:
        values: Of one column.
        kind: Its type; None: as the values have it.

    Raises:
        pyarrow.ArrowException: They have no such type, or no type has them all.
        OverflowError: A number has more than 64 bits.
    """
    types = set(map(type, values)) - {type(None)}
    are_durations = types == {dt.timedelta, np.timedelta64}
    are_moments = types <= _NANOSECONDS and (NanosecondDatetime in types or len(types) > 1)
    if not (are_durations or are_moments):
        return pa.array(values, kind)
    counts = [None if value is None else _nanoseconds(value) for value in values]
    array: Any = pa.array([value for value in values if isinstance(value, dt.datetime)][:1])
    zone = None if are_durations else getattr(array.type, "tz", None)
    unit: Literal["ns", "us"] = "ns" if any(count % 1000 for count in counts if count is not None) else "us"
    found: Any = pa.duration(unit) if are_durations else pa.timestamp(unit, zone)
    whole = counts if unit == "ns" else [None if count is None else count // 1000 for count in counts]
    return pa.array(whole, found).cast(found if kind is None else kind)


def _nanoseconds(value: Any) -> int | None:
    """Return how many nanoseconds a duration has, or a moment from 1970 on."""
    if isinstance(value, np.datetime64 | np.timedelta64):
        if np.isnat(value):
            return None
        whole = value.astype(f"{value.dtype.kind}8[s]")  # not all years have a count of smaller units
        return int(whole.astype(int)) * 1_000_000_000 + int((value - whole) / np.timedelta64(1, "ns"))
    since = value if isinstance(value, dt.timedelta) else value.replace(tzinfo=value.tzinfo or dt.UTC) - _EPOCH
    return since // dt.timedelta(microseconds=1) * 1000 + getattr(value, "nanosecond", 0)


def owned_row(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a row that stays as it is when the user's code fills the same dict, list or array again for the next one."""
    if _CONSTANT.issuperset(map(type, row.values())):
        return dict(row)
    return {name: owned(value) for name, value in row.items()}


def owned(value: Any) -> Any:
    """Return a value that stays as it is, the same one if it cannot change."""
    kind = type(value)
    if kind in _CONSTANT or isinstance(value, np.generic):
        result = value
    elif kind is dict:
        result = owned_row(value)
    elif kind in (list, tuple):
        result = value[:] if _CONSTANT.issuperset(map(type, value)) else kind(map(owned, value))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        result = value.copy()
    elif isinstance(value, bytearray | memoryview):
        result = bytes(value)
    else:
        result = _copied(value)
    return result


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what has no copy is no value of a table either: Arrow's refusal names the column
        return value


def mixed_kinds(groups: Sequence[Iterable[Any]], *, at_any_depth: bool = True) -> str | None:
    """Return what is wrong with values of one column of which Arrow would take some for others.

    Args:
        groups: The values; each group can be iterated several times.
        at_any_depth: Compare what is within lists and dicts, too; else the values alone.

    Returns:
        What the values are, and the cure, to stand behind the column's name; None: nothing is wrong.
    """
    types = set(map(type, chain.from_iterable(groups))) - {type(None), int, float, bool}
    found = {"text"} if any(issubclass(kind, str) for kind in types) else set[str]()
    if any(issubclass(kind, _BYTES) for kind in types):
        found.add("bytes")
    if any(issubclass(kind, _TEMPORAL) for kind in types):
        found |= {_moment(value) for value in chain.from_iterable(groups) if isinstance(value, _TEMPORAL)} - {"none"}
    if "times of a day with a zone" in found:
        return "has times of a day with a zone, which Arrow drops: give them as text"
    if any(issubclass(kind, np.ma.MaskedArray) for kind in types):
        return "has masked arrays, whose masks Arrow drops: give array.tolist(), which has None there"
    if len(found) > 1:
        return f"has values of several types ({' and '.join(sorted(found))}): give it one type"
    return _mixed_within(groups, types) if at_any_depth else None


def _moment(value: dt.date | dt.time | np.datetime64) -> str:
    if isinstance(value, np.datetime64):
        return "none" if np.isnat(value) else "moments without a zone"
    if isinstance(value, dt.time):
        return "times of a day" if value.tzinfo is None else "times of a day with a zone"
    if isinstance(value, dt.datetime):
        if type(value).__name__ == "NaTType":  # pandas': missing
            return "none"
        return "moments without a zone" if value.tzinfo is None else "moments with a zone"
    return "days"


def _mixed_within(groups: Sequence[Iterable[Any]], types: set[type]) -> str | None:
    within: list[Iterable[Any]] = []
    if any(issubclass(kind, _LISTS) for kind in types):
        within += [value for value in chain.from_iterable(groups) if isinstance(value, _LISTS)]
    if any(issubclass(kind, np.ndarray) for kind in types):
        arrays = (value for value in chain.from_iterable(groups) if isinstance(value, np.ndarray))
        within += [array.ravel().tolist() for array in arrays if array.dtype == object]  # [n]
    fields: dict[Any, list[Any]] = {}
    if any(issubclass(kind, Mapping) for kind in types):
        for value in chain.from_iterable(groups):
            for key, field in value.items() if isinstance(value, Mapping) else ():
                fields.setdefault(key, []).append(field)
    parts: list[Sequence[Iterable[Any]]] = [within] if within else []
    wrongs = (mixed_kinds(part) for part in [*parts, *([values] for values in fields.values())])
    return next((wrong for wrong in wrongs if wrong), None)
