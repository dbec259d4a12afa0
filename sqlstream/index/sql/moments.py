"""Texts of moments in users' SQL, spelled as the file spells moments. Pure: text in, text out.

A moment is a text in the file, all of one column with as many digits, so that their order is that of time. A shorter text of
the same moment is another text to SQLite: `created > '2024-01-31'` kept what was made at midnight, `created = '2024-01-31'`
kept nothing, and `created > '2024-01-31T10:00'` lost the rest of that day, since a T comes after a blank.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Sequence

from sqlstream.index.sql.dialect import Token, as_written, tokens
from sqlstream.index.types.models import Column

_TYPE = re.compile(r"timestamp\[(s|ms|us|ns)(, tz=.*)?\]")
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?\s?(Z|[+-]\d\d(?::?\d\d)?)?)?", re.IGNORECASE | re.ASCII
)
_COMPARISONS = frozenset("= == <> != < <= > >=".split())
_ENDS = frozenset(
    "( ) , ; and or not where when then else end on having select order group limit union except intersect window".split()
)
"""What may stand beside a comparison without being a part of one of its sides."""


def with_whole_moments(statement: str, columns: Sequence[Column]) -> str:
    """Return a statement in which texts that are compared with a column of moments have all of its digits.

    Args:
        statement: One SELECT, as SQLite gets it.
        columns: Those of the table.
    """
    kinds = {column.physical.lower(): match for column in columns if (match := _TYPE.fullmatch(column.type)) is not None}
    if not kinds or "'" not in statement:
        return statement
    found = [*tokens(statement)]
    words = ["", *(token.name.lower() if token.text[0] != "'" else "'" for token in found), ""]
    for at, token in enumerate(found):
        if words[at + 1] == "'" and (kind := kinds.get(_compared_with(words, at + 1))) is not None:
            whole = whole_moment(token.name, _DIGITS[kind[1]], has_zone=kind[2] is not None)
            found[at] = token if whole is None else Token(f"'{whole}'", whole, token.before)
    return as_written(found)


def whole_moment(text: str, num_digits: int, *, has_zone: bool) -> str | None:
    """Return the text of a moment as a column has it; None if it is none, or has a zone that the column has not.

    Args:
        text: As the user writes it.
        num_digits: Digits of the column's seconds; further ones are kept, as they make a moment later.
        has_zone: The column holds moments of UTC.

    Example:
        >>> whole_moment("2024-01-31T10:00+02:00", 3, has_zone=True), whole_moment("2024-01-31", 0, has_zone=False)
        ('2024-01-31 08:00:00.000', '2024-01-31 00:00:00')
    """
    match = _MOMENT.fullmatch(text.strip())
    if match is None or (match[5] is not None and not has_zone):
        return None
    zone = "+00:00" if match[5] is None or match[5] in "Zz" else match[5]
    try:
        moment = dt.datetime.fromisoformat(f"{match[1]} {match[2] or '00:00'}:{match[3] or '00'}{zone}").astimezone(dt.UTC)
    except (ValueError, OverflowError):
        return None
    fraction = (match[4] or "").rstrip("0").ljust(num_digits, "0")
    return f"{moment:%Y-%m-%d %H:%M:%S}".zfill(19) + (f".{fraction}" if fraction else "")


def _compared_with(words: Sequence[str], at: int) -> str:
    """Return the name that a text is compared with; '' if it is compared with none.

    Args:
        words: A statement, in lower case, with '' before and after it, and a quote in the place of each text.
        at: The place of the text.
    """
    before, after = words[at - 1], words[at + 1]
    if before in _COMPARISONS and _is_end(after):
        return _name_before(words, at - 1)
    if after in _COMPARISONS and _is_end(before):
        return _name_after(words, at + 2)
    if before == "between" and after == "and":
        return _name_before(words, at - 1)
    if before == "and" and words[at - 2 : at - 1] == ["'"] and words[at - 3 : at - 2] == ["between"] and _is_end(after):
        return _name_before(words, at - 3)
    start = at
    while words[start - 1] == "," and words[start - 2] == "'":
        start -= 2
    return _name_before(words, start - 2) if words[start - 2 : start] == ["in", "("] and after in (",", ")") else ""


def _is_end(word: str) -> bool:
    return not word or word.partition(" ")[0] in _ENDS  # the tokenizer joins `order by`


def _name_before(words: Sequence[str], end: int) -> str:
    """Return the name that ends before `end`, if it stands alone; of `a.b`, b."""
    last = end - 2 if words[end - 1] == "not" else end - 1
    first = last - 2 if words[last - 1] == "." else last
    return words[last] if _is_end(words[first - 1]) else ""


def _name_after(words: Sequence[str], start: int) -> str:
    """Return the name that begins at `start`, if it stands alone; of `a.b`, b."""
    last = start + 2 if words[start + 1 : start + 2] == ["."] else start
    return words[last] if _is_end(words[last + 1]) else ""
