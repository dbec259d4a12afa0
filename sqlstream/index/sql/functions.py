"""Functions that users' SQL has beside SQLite's own; all are pure, so that a filter gives the same rows everywhere."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from sqlstream.index.sql import duckdb_compat
from sqlstream.index.sql.moments import compares_anew
from sqlstream.index.types.models import Column

_SQLITE = frozenset(
    """
    abs avg ceil ceiling coalesce count cume_dist date datetime degrees dense_rank exp first_value floor glob
    group_concat hex ifnull iif instr json json_array json_array_length json_extract json_group_array
    json_group_object json_object json_quote json_type json_valid julianday lag last_value lead length like ln log log10
    log2 lower ltrim max min mod nth_value ntile nullif percent_rank pi pow power radians rank
    replace round row_number rtrim sign sqrt strftime substr substring sum time total trim trunc typeof unicode
    unixepoch upper -> ->>
    """.split()
)
"""SQLite's own that the sandbox lets through: nothing random, no files, no printf (one call of it can take seconds)."""


_BOUNDED = frozenset(
    """
    abs ceil ceiling coalesce date datetime degrees exp floor glob ifnull iif json_array_length json_extract json_type
    json_valid julianday length like ln log log10 log2 lower max min mod nullif pi pow power radians round sign sqrt
    strftime substr substring time trunc typeof unicode unixepoch upper -> ->>
    hash random_uniform contains starts_with prefix ends_with suffix left right reverse strlen md5
    url_decode unquote_plus parse_filename parse_dirpath
    len array_length list_contains array_contains list_has greatest least isnan isinf isfinite
    year month day hour minute second date_part epoch
    """.split()
)
"""Not in it: what looks at one argument for each byte of another (`instr`, `replace`, `trim`), patterns, and what grows."""


_INSTEAD = {
    "random": "random_uniform(row, seed)",
    "randomblob": "random_uniform(row, seed)",
    "printf": "||, round(number, digits) and lpad(number, width, '0')",
    "format": "||, round(number, digits) and lpad(number, width, '0')",
}
"""What does the same as functions that are not let through."""


def instead_of(function: str) -> str | None:
    """Return what users' SQL may have in place of a function that it may not call; None: nothing does the same."""
    return _INSTEAD.get(function.lower())


def is_allowed(function: str) -> bool:
    """Return True if users' SQL may call it."""
    return function.lower() in _SQLITE or function.lower() in _OURS


def is_bounded(function: str) -> bool:
    """Return True if one call takes no longer than a few looks at its arguments, and gives no more than they are."""
    return function.lower() in _BOUNDED


def changes(sql: str, engine: str, columns: Sequence[Column]) -> dict[str, str]:
    """Return what a name of a result that is kept needs beside its SQL: what had other values in earlier versions.

    Args:
        sql: The query or expression.
        engine: What runs it, "sqlite" or "duckdb".
        columns: Those of the table.

    Example:
        >>> changes("mod(hash(key, 1), 10) = 0", "sqlite", ()), changes("score > 1", "sqlite", ())
        ({'mod': 'exact'}, {})
    """
    if engine != "sqlite":
        return {}
    found = {"mod": "exact"} if _MOD.search(sql) else {}
    return found | ({"texts": "spelled"} if compares_anew(sql, columns) else {})


def register(connection: sqlite3.Connection, report: Callable[[Exception], None]) -> None:
    """Give `connection` our functions.

    Args:
        connection: Where users' SQL will run.
        report: Gets what a function raises; SQLite says only that it raised.
    """
    for name, function in (*_SCALARS.items(), *duckdb_compat.SCALARS.items()):
        num_arguments = _NUM_ARGUMENTS.get(name, -1)
        connection.create_function(name, num_arguments, _reporting(name, function, report), deterministic=True)
    for name, aggregate in duckdb_compat.AGGREGATES.items():
        finalize = {"finalize": _reporting(name, aggregate.finalize, report)}
        connection.create_aggregate(name, 1, type(name, (aggregate,), finalize))


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
    """SQL `text REGEXP pattern`: whether the pattern is found anywhere in the text; see `duckdb_compat.regexp_matches`."""
    return duckdb_compat.regexp_matches(text, pattern)


def _reporting(name: str, function: Callable[..., object], report: Callable[[Exception], None]) -> Callable[..., Any]:
    def call(*arguments: Any) -> object:
        try:
            return function(*arguments)
        except Exception as error:
            what = str(error).replace(f"{getattr(function, '__name__', name)}()", f"{name}()")
            report(ValueError(f"{name.upper() if name == 'regexp' else name} says {what!r}"))
            raise

    return call


_MOD = re.compile(r"\bmod\s*\(", re.IGNORECASE)
_SCALARS: dict[str, Callable[..., object]] = {"hash": hash_value, "random_uniform": random_uniform, "regexp": regexp}
_NUM_ARGUMENTS = {"match": 2, "mod": 2, "regexp": 2, "lower": 1, "upper": 1}
"""Of functions that SQLite has itself: its own one of two arguments wins over ours of any number."""
_OURS = frozenset({*_SCALARS, *duckdb_compat.SCALARS, *duckdb_compat.AGGREGATES})
