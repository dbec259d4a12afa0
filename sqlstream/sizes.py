"""Sizes, limits and durations as users write them."""

from __future__ import annotations

import re
from enum import Enum
from typing import TypeAlias

from sqlstream.errors import ConfigError


class AsItIs(Enum):
    """The type of `AS_IT_IS`."""

    AS_IT_IS = "as it is"
    __repr__ = __str__ = lambda _: "AS_IT_IS"  # the name under which it is imported


AS_IT_IS = AsItIs.AS_IT_IS
"""What a setting of a shared directory is that a user leaves out: the one in force there, which that user never changes."""
Limit: TypeAlias = int | AsItIs | None
"""Most bytes of a cache; None: no limit, which is a limit given; AS_IT_IS: the one in force."""
_UNITS = {"": 1, "b": 1, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30, "tb": 1 << 40}
_TOO_MANY_BYTES = 1 << 63
"""A ledger, and what its users say of themselves, hold 64 bits."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_bytes(value: int | str | None, name: str = "limit") -> int | None:
    """Return a number of bytes: `10_000`, `'100mb'`, `'1.5 GB'`; units are powers of 1024, as in `sds`.

    Args:
        value: A count, a text with a unit, or None for "no limit".
        name: The option's name, for the error.

    Raises:
        ConfigError: Not a size, or negative.

    Example:
        >>> parse_bytes("10kb")
        10240
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", str(value).lower())
    unit = match[2].replace("i", "") if match else ""
    if match is None or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r} is not a size: give bytes as a whole number, or a text such as '500mb', '10gb'")
    scale = _UNITS[unit if unit in _UNITS else unit + "b"]
    return int(match[1]) * scale if match[1].isdecimal() else int(float(match[1]) * scale)  # floats have 53 bits


def parse_limit(value: int | str | AsItIs | None, name: str = "limit") -> Limit:
    """Return a limit of a cache: a number of bytes, None for no limit, or AS_IT_IS.

    Raises:
        ConfigError: Not a size, negative, or more than a ledger holds.

    Example:
        >>> parse_limit("10kb"), parse_limit(None), parse_limit(AS_IT_IS)
        (10240, None, AS_IT_IS)
    """
    if isinstance(value, AsItIs):
        return value
    limit = parse_bytes(value, name)
    if limit is not None and limit >= _TOO_MANY_BYTES:
        raise ConfigError(f"{name}={value!r} is out of range: give less than 2**63 bytes, or None for no limit")
    return limit


def parse_duration(value: str, name: str = "older-than") -> float:
    """Return seconds of a text such as `'90s'`, `'12h'`, `'7d'`.

    Raises:
        ConfigError: Not a duration.

    Example:
        >>> parse_duration("7d")
        604800.0
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", value.lower())
    if match is None:
        raise ConfigError(f"{name}={value!r} is not a duration: give a number with s, m, h, d or w, such as '7d'")
    return float(match[1]) * _SECONDS[match[2]]
