"""Checks that options of all kinds share."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from numbers import Number
from typing import Any, TypeVar, overload

from sqlstream.errors import ConfigError

Word = TypeVar("Word", bound=StrEnum)
INT64_MAX = 2**63 - 1
"""The largest whole number of 64 bits."""


def is_word(value: object, *words: str) -> bool:
    """Return whether a value is one of some words: arrays, which compare with words one by one, are none."""
    return isinstance(value, str) and value in words


def check_word(option: str, value: object, words: Collection[str]) -> None:
    """Raise ConfigError unless a value is one of some words."""
    if not is_word(value, *words):
        raise ConfigError(f"{option}={value!r} is unknown: give one of {', '.join(words)}")


def flag_of(option: str, value: object) -> bool:
    """Return a flag as one of Python's: 0, 1 and those of numpy are taken, texts such as 'false', which are true, are not.

    Raises:
        ConfigError: It is none.
    """
    flag = plain_number(value)
    if not isinstance(flag, int | float) or flag not in (True, False):
        raise ConfigError(f"{option}={value!r} is no bool: give True or False")
    return bool(flag)


def word_of(option: str, value: str, kind: type[Word]) -> Word:
    """Return the member of an enumeration that an option names.

    Raises:
        ConfigError: There is no such member.
    """
    check_word(option, value, tuple(kind))
    return kind(value)


def list_of(option: str, values: Any, cure: str) -> list[Any]:
    """Return what a list holds, or any other iterable that is no text.

    Raises:
        ConfigError: It is none; an array without a dimension says so only as it is iterated.
    """
    with contextlib.suppress(TypeError):
        if not isinstance(values, str | bytes):
            return list(values)
    raise ConfigError(f"{option}={values!r} is no list: {cure}")


def names_of(option: str, names: Sequence[str] | None, what: str = "column names") -> tuple[str, ...]:
    """Return names as a tuple.

    Args:
        option: What the user calls them.
        names: The names.
        what: What they name.

    Raises:
        ConfigError: A single text was given, whose letters would be taken for names, or what is no list of texts.
    """
    cure = f"give a list of {what}"
    if isinstance(names, str):
        raise ConfigError(f"{option}={names!r} is a text: {cure}, [{names!r}]")
    try:
        found = tuple(() if names is None else names)
    except TypeError:
        raise ConfigError(f"{option}={names!r} is no list: {cure}") from None
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ConfigError(f"{option} holds {wrong[0]!r}, which is no text: {cure}")
    return found


@overload
def check_at_least(name: str, value: int, least: int, most: float = INT64_MAX) -> int: ...
@overload
def check_at_least(name: str, value: float, least: float) -> float: ...
def check_at_least(name: str, value: float, least: float, most: float = INT64_MAX) -> float:
    """Return a number that is `least` or more, as one of Python's; where that is a whole number, `most` or less.

    Whole numbers of numpy overflow, and JSON does not take them. Positions, and what shares memory, have 64 bits; a number that
    may have a fraction is one that a float holds. Callers keep what is returned: what was given may be a float without a
    fraction, or a tensor, which no slice takes.

    Raises:
        ConfigError: It is out of range, or no such number.
    """
    must_be_whole, number = isinstance(least, int), plain_number(value)
    is_number = isinstance(number, Number) and not isinstance(number, bool | complex)
    if not is_number or (must_be_whole and number % 1):
        raise ConfigError(f"{name}={value!r} is no {'whole number' if must_be_whole else 'number'}: give {least} or more")
    if not number >= least:  # NaN is neither
        raise ConfigError(f"{name}={value!r} is out of range: give {least} or more")
    most = most if must_be_whole else sys.float_info.max
    if math.inf > number > most:
        raise ConfigError(f"{name}={value!r} is out of range: give at most {most}")
    return int(number) if must_be_whole else number


def plain_number(value: Any) -> Any:
    """Return the number of Python that a scalar of numpy or torch holds; anything else as it is."""
    shape = getattr(value, "shape", None)
    return value.item() if isinstance(shape, tuple) and not shape and hasattr(value, "item") else value
