"""Checks that options of all kinds share."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from enum import StrEnum
from typing import TypeVar, overload

from sqlstream.errors import ConfigError

Word = TypeVar("Word", bound=StrEnum)
INT64_MAX = 2**63 - 1
"""The largest whole number of 64 bits."""


def check_word(option: str, value: object, words: Collection[str]) -> None:
    """Raise ConfigError unless a value is one of some words."""
    if not isinstance(value, str) or value not in words:  # arrays compare with words one by one, lists have no hash
        raise ConfigError(f"{option}={value!r} is unknown: give one of {', '.join(words)}")


def flag_of(option: str, value: object) -> bool:
    """Return a flag as one of Python's: 0, 1 and those of numpy are taken, texts such as 'false', which are true, are not.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(value, Hashable) or value not in (True, False):
        raise ConfigError(f"{option}={value!r} is no bool: give True or False")
    return bool(value)


def word_of(option: str, value: str, kind: type[Word]) -> Word:
    """Return the member of an enumeration that an option names.

    Raises:
        ConfigError: There is no such member.
    """
    check_word(option, value, tuple(kind))
    return kind(value)


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
    """Return a number that is `least` or more; where that is a whole number, as one of Python's, and `most` or less.

    Whole numbers of numpy overflow, and JSON does not take them. Positions, and what shares memory, have 64 bits.

    Raises:
        ConfigError: It is out of range, or no such number.
    """
    must_be_whole = isinstance(least, int)
    try:
        is_right = not isinstance(value, bool) and not (value % 1 and must_be_whole)
    except (TypeError, ValueError):  # a text, or an array, say
        is_right = False
    if not is_right:
        raise ConfigError(f"{name}={value!r} is no {'whole number' if must_be_whole else 'number'}: give {least} or more")
    if value < least:
        raise ConfigError(f"{name}={value!r} is out of range: give {least} or more")
    if must_be_whole and value > most:
        raise ConfigError(f"{name}={value!r} is out of range: give at most {most}")
    return int(value) if must_be_whole else value
