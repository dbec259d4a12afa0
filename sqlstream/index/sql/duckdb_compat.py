"""Functions that DuckDB has and SQLite lacks, for filters that were written for `sds`. Pure; NULL in gives NULL out.

- in place of SQLite's own: `lower` `upper`, which know the letters of ASCII only, and `mod`, which makes floats of integers

- text: `contains` `starts_with` `prefix` `ends_with` `suffix` `left` `right` `reverse` `split_part` `concat` `concat_ws`
  `strlen` `md5`
- names and URLs: `url_encode` `url_decode` `unquote_plus` (which DuckDB gets from us, see `MACROS`) `parse_filename`
  `parse_dirpath` `lpad` `rpad` `strpos`
- patterns: `regexp_matches` `regexp_full_match` `regexp_extract` `regexp_replace` `ILIKE` (rewritten as MATCH)
- lists (JSON text here): `len` `array_length` `list_contains` `array_contains` `list_has`
- numbers: `greatest` `least` (NULLs left out) `isnan` (NaN is NULL here, so NULL is NaN) `isfinite` `isinf`
- times (ISO text here): `year` `month` `day` `hour` `minute` `second` `date_part` `epoch`
- aggregates: `median` `stddev` `variance` `count_if` `bool_and` `bool_or` `any_value`
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import math
import re
import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar
from urllib.parse import quote, unquote, unquote_plus

_PATTERN_LENGTH = 1_000
_TEXT_LENGTH = 1 << 20
_RESULT_LENGTH = 16 << 20
_PATTERN_WORDS = re.compile("regexp|match", re.IGNORECASE)
_SEPARATOR = re.compile(r"[/\\]")


def has_patterns(statement: str) -> bool:
    """Return False if a statement for SQLite certainly calls no function that matches patterns, which Arrow does."""
    return _PATTERN_WORDS.search(statement) is not None


def regexp_matches(text: str | None, pattern: str | None) -> int | None:
    """Return whether the pattern is found anywhere in the text.

    RE2's syntax and promise: time grows with the length of the text, whatever the pattern (Python's `re` can take for ever on
    one value, where no time budget reaches it).

    Raises:
        ValueError: Pattern or text is too long, or the pattern is no regular expression.
    """
    if pattern is None or text is None:
        return None
    _check_lengths(text, pattern)
    return int(_called("match_substring_regex", text, _options(pattern)))


def regexp_full_match(text: str | None, pattern: str | None) -> int | None:
    """Return whether the pattern matches the whole text."""
    return None if pattern is None else regexp_matches(text, rf"\A(?:{pattern})\z")


def regexp_extract(text: str | None, pattern: str | None, group: int = 0) -> str | None:
    """Return the first match of the pattern, or a group of it; '' when there is none."""
    if pattern is None or text is None:
        return None
    if not regexp_matches(text, pattern):
        return ""
    whole = rf"(?s:\A.*?)({pattern})(?s:.*\z)"
    return str(_replaced(text, whole, rf"\{group + 1}", None))


def regexp_replace(text: str | None, pattern: str | None, replacement: str | None, options: str = "") -> str | None:
    r"""Return the text with the first match replaced, or all with 'g'; `\1` in the replacement is the first group."""
    if text is None or pattern is None or replacement is None:
        return None
    _check_lengths(text, pattern)
    _check_growth(text, pattern, replacement)
    return str(_replaced(text, f"(?i){pattern}" if "i" in options else pattern, replacement, None if "g" in options else 1))


def ilike(pattern: str | None, text: str | None) -> int | None:
    """Return whether `text ILIKE pattern`: as LIKE, whatever the case."""
    if pattern is None or text is None:
        return None
    words = {"%": ".*", "_": "."}
    return regexp_matches(text, rf"(?si)\A{''.join(words.get(c) or re.escape(c) for c in pattern)}\z")


def _replaced(text: str, pattern: str, replacement: str, count: int | None) -> Any:
    import pyarrow.compute as pc

    return _called("replace_substring_regex", text, pc.ReplaceSubstringOptions(pattern, replacement, max_replacements=count))


def _called(function: str, text: str, options: Any) -> Any:
    """Return what a function of Arrow makes of a text; Arrow is not imported where no pattern is (`has_patterns`)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.get_function(function).call([pa.scalar(str(text))], options).as_py()


def _check_lengths(text: str, pattern: str) -> None:
    if len(pattern) > _PATTERN_LENGTH or len(str(text)) > _TEXT_LENGTH:
        raise ValueError(
            f"regular expressions take patterns of {_PATTERN_LENGTH} and texts of {_TEXT_LENGTH} characters at most"
        )


def _check_growth(text: str, pattern: str, replacement: str) -> None:
    """Raise ValueError for a result that Arrow could not allocate: it would end the process."""
    if len(text) * len(replacement) <= _RESULT_LENGTH:
        return
    count = int(_called("count_substring_regex", text, _options(pattern)))
    most = len(text) * (1 + replacement.count("\\")) + (count + 1) * len(replacement)
    if most > _RESULT_LENGTH:
        raise ValueError(f"the result may have {most} characters, and {_RESULT_LENGTH} are the most")


@lru_cache(maxsize=64)
def _options(pattern: str) -> Any:
    import pyarrow.compute as pc

    return pc.MatchSubstringOptions(pattern)


def _strict(function: Callable[..., object]) -> Callable[..., object]:
    """Return `function` with NULL out for any NULL in."""
    return lambda *arguments: None if None in arguments else function(*arguments)


def _in_case(change: Callable[[str], str]) -> Callable[..., object]:
    """Return what changes the case of each letter that stays one letter, as DuckDB does ('ß' stays)."""

    def call(value: Any) -> str:
        text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
        return change(text) if text.isascii() else "".join(one if len(one := change(c)) == 1 else c for c in text)

    return _strict(call)


def _split_part(text: str, separator: str, number: int) -> str:
    parts = text.split(separator) if separator else [text]
    at = number - 1 if number > 0 else number
    return parts[at] if number and -len(parts) <= at < len(parts) else ""


def _padded(text: Any, count: int, fill: Any, *, is_left: bool) -> str:
    """Return a text with `count` characters: cut at its end, or filled."""
    if count > _TEXT_LENGTH:
        raise ValueError(f"a text is filled to {_TEXT_LENGTH} characters at most, not to {count}")
    kept, marks = str(text)[: max(0, count)], str(fill)
    num_missing = max(0, count - len(kept))
    if num_missing and not marks:
        raise ValueError("there is nothing to fill with: give a character")
    filling = (marks * (num_missing // len(marks) + 1))[:num_missing] if num_missing else ""
    return filling + kept if is_left else kept + filling


def _filename(path: Any, trims: Any = False) -> str:
    """Return the last part of a path, without its extension if `trims`."""
    name = _SEPARATOR.split(str(path))[-1]
    return name.rpartition(".")[0] or name if trims else name


def _dirpath(path: Any) -> str:
    """Return a path without its last part."""
    text = str(path)
    return text[: max(0, len(text) - len(_filename(text)) - 1)]


def _items(value: str) -> list[Any]:
    items = json.loads(value)
    if not isinstance(items, list):
        raise TypeError(f"{value[:40]!r} is no list")
    return items


def _length(value: Any) -> int:
    """Return the length of a list, else of the text, which may stand in brackets as one does: `[Music]`."""
    text = str(value)
    if text.startswith("[") and text.endswith("]"):
        with contextlib.suppress(ValueError):
            return len(_items(text))
    return len(text)


def _remainder(number: Any, divisor: Any) -> int | float | None:
    """Return what is left of a number, with its sign: of integers exactly, as `%` does; NULL of a division by zero."""
    if isinstance(number, int) and isinstance(divisor, int):
        rest = abs(number) % abs(divisor) if divisor else None
        return rest if rest is None or number >= 0 else -rest
    if isinstance(number, bytes) or isinstance(divisor, bytes):
        return None
    try:
        return math.fmod(float(number), float(divisor))
    except ValueError:  # by zero, of infinity, or of a text that is no number
        return None


def _moment(value: str) -> dt.datetime:
    try:
        moment = dt.datetime.fromisoformat(str(value)[:26])
    except ValueError:
        raise ValueError(f"{str(value)[:40]!r} is no day or moment: give one as 2024-01-31 10:00:00") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _part(name: str) -> Callable[..., object]:
    return _strict(lambda value: _field(name, str(value)))


def _field(name: str, text: str) -> object:
    """Return a part of a moment, or of a time of a day."""
    is_time = text[2:3] == ":" and name in ("hour", "minute", "second")
    return getattr(dt.time.fromisoformat(text) if is_time else _moment(text), name)


def _date_part(name: str, value: str) -> object:
    known = {"dow": lambda m: m.isoweekday() % 7, "doy": lambda m: m.timetuple().tm_yday, "epoch": lambda m: m.timestamp()}
    lower = name.lower()
    if lower in known:
        return known[lower](_moment(value))
    if lower not in _PARTS:
        raise ValueError(f"date_part({name!r}, …) is unknown: give one of {', '.join([*_PARTS, *known])}")
    return _field(lower, str(value))


def _extreme(choose: Callable[[list[Any]], Any]) -> Callable[..., object]:
    def call(*values: Any) -> object:
        present = [value for value in values if value is not None]
        return choose(present) if present else None

    return call


_PARTS = ("year", "month", "day", "hour", "minute", "second")
SCALARS: dict[str, Callable[..., object]] = {
    "regexp_matches": regexp_matches,
    "regexp_full_match": regexp_full_match,
    "regexp_extract": regexp_extract,
    "regexp_replace": regexp_replace,
    "match": ilike,
    "lower": _in_case(str.lower),
    "upper": _in_case(str.upper),
    "contains": _strict(lambda text, part: int(str(part) in str(text))),
    "starts_with": _strict(lambda text, part: int(str(text).startswith(str(part)))),
    "prefix": _strict(lambda text, part: int(str(text).startswith(str(part)))),
    "ends_with": _strict(lambda text, part: int(str(text).endswith(str(part)))),
    "suffix": _strict(lambda text, part: int(str(text).endswith(str(part)))),
    "left": _strict(lambda text, count: str(text)[:count]),
    "right": _strict(lambda text, count: str(text)[-count:] if count else ""),
    "reverse": _strict(lambda text: str(text)[::-1]),
    "split_part": _strict(lambda text, separator, number: _split_part(str(text), separator, number)),
    "concat": lambda *parts: "".join(str(part) for part in parts if part is not None),
    "concat_ws": lambda mark, *parts: None if mark is None else mark.join(str(part) for part in parts if part is not None),
    "url_encode": _strict(lambda text: quote(str(text), safe="")),
    "url_decode": _strict(lambda text: unquote(str(text))),
    "unquote_plus": _strict(lambda text: unquote_plus(str(text))),
    "parse_filename": _strict(_filename),
    "parse_dirpath": _strict(_dirpath),
    "lpad": _strict(lambda text, count, fill: _padded(text, count, fill, is_left=True)),
    "rpad": _strict(lambda text, count, fill: _padded(text, count, fill, is_left=False)),
    "strpos": _strict(lambda text, part: str(text).find(str(part)) + 1),
    "strlen": _strict(lambda text: len(str(text).encode())),
    "md5": _strict(lambda text: hashlib.md5(str(text).encode(), usedforsecurity=False).hexdigest()),
    "len": _strict(_length),
    "array_length": _strict(lambda value: len(_items(value))),
    "list_contains": _strict(lambda value, item: int(item in _items(value))),
    "array_contains": _strict(lambda value, item: int(item in _items(value))),
    "list_has": _strict(lambda value, item: int(item in _items(value))),
    "mod": _strict(_remainder),
    "greatest": _extreme(max),
    "least": _extreme(min),
    "isnan": lambda value: int(value is None),
    "isinf": _strict(lambda value: int(math.isinf(value))),
    "isfinite": lambda value: int(value is not None and math.isfinite(value)),
    **{name: _part(name) for name in _PARTS},
    "date_part": _strict(_date_part),
    "epoch": _strict(lambda value: _moment(value).timestamp()),
}
"""Functions of one row, by name; any number of arguments."""
MACROS = ("unquote_plus(text) AS url_decode(replace(text, '+', ' '))",)
"""Functions that we add to DuckDB, for which SQLite has those above."""


class _Values:
    """An aggregate over the values that are not NULL; `finish` makes the result of a list that is not empty."""

    least: ClassVar[int]
    """Fewer values than these give NULL."""
    take: ClassVar[Callable[[list[Any], Any], object]]
    """Adds one value to the list, or what is needed of it."""
    finish: ClassVar[Callable[[list[Any]], Any]]
    """From what was taken to the result."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def step(self, value: Any) -> None:
        """Take one value."""
        if value is not None:
            type(self).take(self.values, value)

    def finalize(self) -> Any:
        """Return the result, NULL of too few values."""
        return type(self).finish(self.values) if len(self.values) >= self.least else None


def _aggregate(
    name: str,
    finish: Callable[[list[Any]], Any],
    least: int = 1,
    take: Callable[[list[Any], Any], object] = list.append,
) -> type[_Values]:
    return type(name, (_Values,), {"finish": staticmethod(finish), "least": least, "take": staticmethod(take)})


def _take_float(values: list[Any], value: Any) -> None:
    values.append(float(value))


def _take_truth(values: list[Any], value: Any) -> None:
    values.append(bool(value))


def _take_first(values: list[Any], value: Any) -> None:
    if not values:
        values.append(value)


AGGREGATES: dict[str, type[_Values]] = {
    "median": _aggregate("median", statistics.median),
    "stddev": _aggregate("stddev", statistics.stdev, 2, _take_float),
    "variance": _aggregate("variance", statistics.variance, 2, _take_float),
    "count_if": _aggregate("count_if", sum, 0, _take_truth),
    "bool_and": _aggregate("bool_and", lambda values: int(all(values)), 1, _take_truth),
    "bool_or": _aggregate("bool_or", lambda values: int(any(values)), 1, _take_truth),
    "any_value": _aggregate("any_value", lambda values: values[0], 1, _take_first),
}
"""Aggregates of one column, by name. They hold the column's numbers, 10^7 of them in some 300 MB; `median` its texts, too."""
