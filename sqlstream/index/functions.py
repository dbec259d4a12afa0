"""Functions that users' SQL has beside SQLite's own; all are pure, so that a filter gives the same rows everywhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_REGEXP_PATTERN_LENGTH = 1_000
_REGEXP_TEXT_LENGTH = 1 << 20
_ALLOWED = frozenset(
    """
    abs avg ceil ceiling coalesce count cume_dist date datetime degrees dense_rank exp first_value floor glob
    group_concat hash hex ifnull iif instr json json_array json_array_length json_extract json_group_array
    json_group_object json_object json_quote json_type json_valid julianday lag last_value lead length like ln log log10
    log2 lower ltrim max min mod nth_value ntile nullif percent_rank pi pow power radians random_uniform rank regexp
    replace round row_number rtrim sign sqrt strftime substr substring sum time total trim trunc typeof unicode
    unixepoch upper -> ->>
    """.split()
)
"""What the sandbox lets through: nothing random, no files, no printf (one call of it can take seconds)."""


def is_allowed(function: str) -> bool:
    """Return True if users' SQL may call it."""
    return function.lower() in _ALLOWED


def register(connection: sqlite3.Connection, report: Callable[[Exception], None]) -> None:
    """Give `connection` our functions.

    Args:
        connection: Where users' SQL will run.
        report: Gets what a function raises; SQLite says only that it raised.
    """
    for name, function in (("hash", hash_value), ("random_uniform", random_uniform), ("regexp", regexp)):
        connection.create_function(name, 2, _reporting(function, report), deterministic=True)


def hash_value(value: Any, seed: int) -> int:
    """SQL `hash(x, seed)`: a whole number in [0, 2^63), spread evenly, the same on every machine.

    Args:
        value: Any SQL value; 1, 1.0 and '1' differ.
        seed: Another seed gives an unrelated number.
    """
    content = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    text = f"{type(value).__name__}\0{seed}\0".encode() + content
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def random_uniform(row: Any, seed: int) -> float:
    """SQL `random_uniform(row, seed)`: a number in [0, 1) for each row, the same on every machine."""
    return (hash_value(row, seed) >> 10) / (1 << 53)


def regexp(pattern: str | None, text: str | None) -> int | None:
    """SQL `text REGEXP pattern`: whether the pattern is found anywhere in the text.

    RE2's syntax and promise: time grows with the length of the text, whatever the pattern (Python's `re` can take for ever on
    one value, where no time budget reaches it).

    Raises:
        ValueError: Pattern or text is too long, or the pattern is no regular expression.
    """
    if pattern is None or text is None:
        return None
    if len(pattern) > _REGEXP_PATTERN_LENGTH or len(str(text)) > _REGEXP_TEXT_LENGTH:
        raise ValueError(
            f"REGEXP takes patterns of {_REGEXP_PATTERN_LENGTH} and texts of {_REGEXP_TEXT_LENGTH} characters at most"
        )
    return int(pc.get_function("match_substring_regex").call([pa.scalar(str(text))], _options(pattern)).as_py())


def _reporting(function: Callable[[Any, Any], object], report: Callable[[Exception], None]) -> Callable[[Any, Any], Any]:
    def call(one: Any, two: Any) -> object:
        try:
            return function(one, two)
        except Exception as error:
            report(error)
            raise

    return call


@lru_cache(maxsize=64)
def _options(pattern: str) -> Any:
    return pc.MatchSubstringOptions(pattern)
