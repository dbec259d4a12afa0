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
from typing import Any

import numpy as np

_MOMENTS = (dt.datetime, dt.date, dt.time, dt.timedelta)
_CONSTANT = frozenset((str, bytes, int, float, bool, complex, type(None), decimal.Decimal, uuid.UUID, *_MOMENTS))
_LISTS = (list, tuple, set, frozenset)
_TEMPORAL = (dt.date, dt.time)
_BYTES = (bytes, bytearray, memoryview)


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


def mixed_kinds(groups: Sequence[Iterable[Any]]) -> str | None:
    """Return what is wrong with values of one column of which Arrow would take some for others, at any depth.

    Args:
        groups: The values; each group can be iterated several times.

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
    return _mixed_within(groups, types)


def _moment(value: dt.date | dt.time) -> str:
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
