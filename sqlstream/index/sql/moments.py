"""Values in users' SQL, spelled as the file spells those of the column that they are compared with. Pure: text in, text out.

A moment is a text in the file, all of one column with as many digits, so that their order is that of time. A shorter text of
the same moment is another text to SQLite: `created > '2024-01-31'` kept what was made at midnight, `created = '2024-01-31'`
kept nothing, and `created > '2024-01-31T10:00'` lost the rest of that day, since a T comes after a blank. The same holds for
times of a day, for dates beside `'2024-01-31 00:00'`, for columns of other units beside each other, and for `'true'` beside the
1 of a boolean. A decimal, an unsigned integer of 64 bits and a UUID are of no type in the file, so that SQLite compares
`price < '1'` and `id = '0b6e…'` as a number, or bytes, with a text: every number is less than any text.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from sqlstream.index.sql.dialect import Token, as_written, tokens, translated
from sqlstream.index.types.models import MOMENT_DIGITS, Column

_TYPE = re.compile(
    r"(timestamp|date32|time32|time64|bool|decimal|uint64|uuid)(?:\[(day|s|ms|us|ns)(, tz=.*)?\]|\d+\(\d+, -?\d+\))?"
)
_MOMENTS = frozenset("timestamp date32 time32 time64".split())
_NUMBERS = frozenset("decimal uint64".split())
_TIME_DIGITS = 6  # of a time of a day in the file, whatever its unit
_MOMENT = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[ T](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?\s?(Z|[+-]\d\d(?::?\d\d)?)?)?", re.IGNORECASE | re.ASCII
)
_TIME = re.compile(r"(\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,9}))?)?", re.ASCII)
_MIDNIGHT = re.compile(r"[ T]00:00(?::00(?:\.0{1,9})?)?", re.IGNORECASE)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
_TRUTH = {"true": "1", "t": "1", "false": "0", "f": "0"}
_COMPARISONS = tuple(
    words.split() for words in ("is not distinct from", "is distinct from", "is not", "is", *"= == <> != < <= > >=".split())
)
_SAME = frozenset("min max".split())
"""What gives one of a column's values."""
_NEW = frozenset("is not from when".split())
"""What stands beside a value that earlier versions did not compare."""
_IS = re.compile(r"\bis\b|\bcase\b")
_ENDS = frozenset(
    "( ) , ; and or not where when then else end on having select distinct all as from order group partition asc desc nulls "
    "limit union except intersect window join left right full inner cross natural".split()
)
"""What may stand beside a comparison without being a part of one of its sides."""


class _Spelling(NamedTuple):
    """How the file spells the values of a column."""

    kind: str
    """The word for it in Arrow's types."""
    num_digits: int
    """Digits of the seconds of a moment."""
    has_zone: bool
    """It holds moments of UTC."""

    @classmethod
    def of(cls, column: Column) -> Self | None:
        """Return that of a column; None: its values are what they are."""
        match = _TYPE.fullmatch(column.type)
        return None if match is None else cls(match[1], MOMENT_DIGITS.get(match[2] or "", 0), match[3] is not None)

    def spelled(self, text: str) -> str | None:
        """Return, as SQL, the value that the user's text stands for; None if it is none."""
        if self.kind == "bool":
            return _TRUTH.get(text.strip().lower())
        if self.kind in _NUMBERS:
            return text.strip() if _NUMBER.fullmatch(text.strip()) else None
        if self.kind == "uuid":
            with contextlib.suppress(ValueError):
                return f"x'{uuid.UUID(text.strip()).hex}'"
            return None
        if self.kind == "timestamp":
            whole = whole_moment(text, self.num_digits, has_zone=self.has_zone)
        elif self.kind == "date32":
            day, rest = text.strip()[:10], text.strip()[10:]
            whole = day if _MOMENT.fullmatch(day) and _MIDNIGHT.fullmatch(rest) else None
        else:
            time = _TIME.fullmatch(text.strip())
            fraction = "" if time is None else (time[3] or "").rstrip("0").ljust(_TIME_DIGITS, "0")
            whole = None if time is None else f"{time[1]}:{time[2] or '00'}.{fraction}"
        return None if whole is None else f"'{whole}'"

    def lacks(self, other: _Spelling) -> str:
        """Return what must be put behind a value, so that it is spelled as that of a finer column."""
        if other.kind != "timestamp" or self.kind not in ("timestamp", "date32"):
            return ""
        start = " 00:00:00" if self.kind == "date32" else ""
        num_missing = other.num_digits - self.num_digits
        return start + ("." if num_missing > 0 and not self.num_digits else "") + "0" * num_missing


def is_moment(column: Column) -> bool:
    """Return True for a column of moments, days or times of a day, which are texts to SQLite."""
    return (spelling := _Spelling.of(column)) is not None and spelling.kind in _MOMENTS


def with_whole_moments(statement: str, columns: Sequence[Column]) -> str:
    """Return a statement in which what is compared with a column of moments has all of its digits; and the like of other types.

    Args:
        statement: One SELECT, as SQLite gets it.
        columns: Those of the table.
    """
    kinds = _kinds(columns)
    if not kinds or ("'" not in statement and len(kinds) == 1):
        return statement
    found = [*tokens(statement)]
    for one in _comparisons(found, kinds):
        found[one.at] = one.spelled
    return as_written(found)


def compares_anew(sql: str, columns: Sequence[Column]) -> bool:
    """Return True if a value in users' SQL is compared otherwise than in earlier versions.

    They left a text as it is beside numbers and UUIDs, and any value behind IS and in CASE.

    Args:
        sql: A query or expression.
        columns: Those of the table.
    """
    lower, kinds = sql.lower(), _kinds(columns)
    if not any(name in lower for name in kinds) or ("'" not in sql and _IS.search(lower) is None):
        return False  # most: without 0.1 s to import the tokenizer
    with contextlib.suppress(ValueError):  # what is no SQL is refused where it is run
        return any(one.is_new for one in _comparisons(tokens(translated(sql)), kinds))
    return False


class _Comparison(NamedTuple):
    """A value that must be spelled as the column that it is compared with."""

    at: int
    """Which token it is."""
    spelled: Token
    """What stands in its place."""
    is_new: bool
    """Earlier versions left it as it is written."""


def _kinds(columns: Sequence[Column]) -> dict[str, _Spelling]:
    return {column.physical.lower(): kind for column in columns if (kind := _Spelling.of(column)) is not None}


def _comparisons(found: Sequence[Token], kinds: dict[str, _Spelling]) -> Iterator[_Comparison]:
    """Yield the values of a statement that are to be spelled otherwise."""
    words = words_of(found)
    computed, openings, has_new = computed_names(words, kinds), _openings(words), not _SAME.isdisjoint(words)
    for at, token in enumerate(found):
        place = at + 1
        own = kinds.get(words[place])
        first = place - 2 if own is not None and words[place - 1] == "." else place
        if own is None and words[place] != "'":
            continue
        name = compared_with(words, first, place, openings[place])
        other = kinds.get(name)
        if other is None or any(one.gives(name, place) or one.gives(words[place], place) for one in computed):
            continue
        is_new = has_new or other.kind in (*_NUMBERS, "uuid") or not _NEW.isdisjoint((words[first - 1], words[place + 1]))
        if own is None and (spelled := other.spelled(token.name)) is not None:
            yield _Comparison(at, Token(f" {spelled} ", spelled.strip("'"), token.before), is_new)
        elif own is not None and (lacking := own.lacks(other)):
            yield _Comparison(at, Token(f"{token.text} || '{lacking}'", token.name, token.before), is_new)


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


def words_of(found: Sequence[Token]) -> list[str]:
    """Return the words of a statement in lower case, a quote in the place of each text, with '' before and after them."""
    return ["", *(token.name.lower() if token.text[0] != "'" else "'" for token in found), ""]


def compared_with(words: Sequence[str], first: int, last: int, opening: int = 0) -> str:
    """Return the name that a value is compared with; '' if it is compared with none.

    Args:
        words: A statement, see `words_of`.
        first: The place of the first word of the value.
        last: That of its last one.
        opening: That of the bracket or CASE around it; 0: there is none, or lists and CASE do not matter.
    """
    before, after = words[first - 1], words[last + 1]
    for comparison in _COMPARISONS:
        start, stop = first - len(comparison), last + 1 + len(comparison)
        if words[start:first] == comparison and _is_end(after):
            return _name_before(words, start)
        if words[last + 1 : stop] == comparison and _is_end(before):
            return _name_after(words, stop)
    if before == "between" and after == "and":
        return _name_before(words, first - 1)
    if before == "and" and words[first - 3 : first - 2] == ["between"] and _is_end(after):
        return _name_before(words, first - 3)
    if words[opening] == "case":
        return _name_after(words, opening + 1) if (before, after) == ("when", "then") else ""
    is_listed = words[opening - 1] == "in" and before in ("(", ",") and after in (",", ")")
    return _name_before(words, opening - 1) if is_listed else ""


def _openings(words: Sequence[str]) -> list[int]:
    """Return the place of the innermost bracket or CASE around each word; 0: there is none."""
    found, around = list[int](), [0]
    for place, word in enumerate(words):
        if len(around) > 1 and (word == ")" or (word == "end" and words[around[-1]] == "case")):
            around.pop()
        found.append(around[-1])
        if word in ("(", "case"):
            around.append(place)
    return found


class ComputedName(NamedTuple):
    """A subquery that computes a column under the name of one that the table has."""

    name: str
    start: int
    stop: int

    def gives(self, name: str, place: int) -> bool:
        """Return whether a name stands for the computed column at a place."""
        return name == self.name and not self.start < place < self.stop


def computed_names(words: Sequence[str], kinds: dict[str, Any]) -> list[ComputedName]:
    """Return the subqueries that compute a column under a name of `kinds`, in which columns get the kind that they had.

    Args:
        words: A statement, see `words_of`.
        kinds: What is known of columns, by name; a name that a query gives to one of them as it is comes to it.
    """
    found, brackets = list[ComputedName](), list[tuple[int, set[str]]]()
    for at, word in enumerate(words):
        if word == "(":
            brackets.append((at, set()))
        elif word == ")" and brackets:
            start, names = brackets.pop()
            found += [ComputedName(name, start, at) for name in sorted(names)]
        elif words[at - 1] == "as" and word and not (brackets and words[brackets[-1][0] - 1] == "cast"):
            of = _name_before(words, at - 1)
            if of in kinds:
                kinds.setdefault(word, kinds[of])
            if word in kinds and kinds.get(of) != kinds[word]:
                sources = [names for start, names in brackets if words[start - 1] in ("from", "join", "as", ",")]
                if sources:
                    sources[-1].add(word)
    return found


def _is_end(word: str) -> bool:
    return not word or word.partition(" ")[0] in _ENDS  # the tokenizer joins `order by`


def _name_before(words: Sequence[str], end: int) -> str:
    """Return the name that ends before `end`, if it stands alone; of `a.b`, b; of `max(b)`, too."""
    last = end - 2 if words[end - 1] == "not" else end - 1
    is_call = words[last] == ")"
    last -= is_call
    first = last - 2 if words[last - 1] == "." else last
    if is_call:
        first = first - 2 if words[first - 1] == "(" and words[first - 2] in _SAME else 0
    return words[last] if first and _is_end(words[first - 1]) else ""


def _name_after(words: Sequence[str], start: int) -> str:
    """Return the name that begins at `start`, if it stands alone; of `a.b`, b; of `max(b)`, too."""
    is_call = words[start] in _SAME and words[start + 1 : start + 2] == ["("]
    first = start + 2 * is_call
    last = first + 2 if words[first + 1 : first + 2] == ["."] else first
    if is_call and words[last + 1 : last + 2] != [")"]:
        return ""
    return words[last] if _is_end(words[last + 1 + is_call]) else ""
