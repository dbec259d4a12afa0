"""Arrow's values of time as SQLite holds them, and back: moments, days, times of a day, durations."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.index.types.models import Decode
from sqlstream.python_values import NanosecondDatetime

_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


def timestamps(array: Any) -> list[str | None]:
    """Return UTC texts; years that Arrow will not print go through numpy."""
    naive = array.cast(pa.timestamp(array.type.unit))  # drops the zone and keeps the instant
    texts: list[str | None] = naive.cast(pa.string()).to_pylist()
    for at in _unprinted(texts):
        texts[at] = str(np.datetime64(naive[at].value, array.type.unit))
        if texts[at] == "NaT":
            raise ValueError(f"{naive[at].value} {array.type.unit} stands for no time at all")
    return texts


def timestamp_decoder(kind: Any) -> Decode:
    """Return what makes moments of the texts of a column of this type."""
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


def dates(array: Any) -> list[str | None]:
    """Return days as texts."""
    days = array.cast(pa.date32())
    texts: list[str | None] = days.cast(pa.string()).to_pylist()
    for at in _unprinted(texts):
        texts[at] = str(np.datetime64(days[at].value, "D"))
    return texts


def date_back(text: str) -> object:
    """Return the day that a text stands for."""
    try:
        return dt.date.fromisoformat(text)
    except ValueError:
        return np.datetime64(text)  # a year outside 1…9999


def times(array: Any) -> list[str | None]:
    """Return times of a day as texts."""
    texts: list[str | None] = (
        array.cast(pa.time64("us")).cast(pa.string()).to_pylist()
    )  # the first cast refuses to cut nanoseconds
    if wrong := _unprinted(texts):
        raise ValueError(f"{array[wrong[0]].value} {array.type.unit} after midnight is no time of a day")
    return texts


def _unprinted(texts: Sequence[str | None]) -> list[int]:
    """Return which values Arrow could not write as text."""
    return [at for at, text in enumerate(texts) if text is not None and text.startswith("<")]  # '<value out of range: …>'


def duration_decoder(kind: Any) -> Decode:
    """Return what makes durations of counts of this type's unit."""
    if kind.unit == "ns":
        return lambda v: np.timedelta64(v, "ns") if v % 1000 else dt.timedelta(microseconds=v // 1000)
    return lambda v: _duration(v, kind.unit)


def _duration(count: int, unit: Any) -> object:
    try:
        return dt.timedelta(microseconds=count * _MICROSECONDS[unit])
    except OverflowError:
        return np.timedelta64(count, unit)  # more than 999 999 999 days


def is_moment(_decoded: Any, stored: Any) -> bool:
    """Return whether a text that reads as a moment is one."""
    return len(stored) >= len("2024-02-29 12:30:00")  # numpy also reads '2024'


def is_date(decoded: Any, stored: Any) -> bool:
    """Return whether a text that reads as a day is one."""
    return str(decoded) == stored and (isinstance(decoded, dt.date) or decoded.dtype == "M8[D]")  # both also read '2024'
