"""Numbers that SQLite has no number for, and what a query may do with columns that hold some. Pure.

An integer above int64 is a BLOB in the file, a decimal that no REAL says exactly is a TEXT (`types/values.py`). SQLite takes
every text and blob for larger than every number in a comparison, and a blob for 0 in arithmetic: `price < 1` loses
0.123456789012345678, and `hash % 100 = 0` keeps half of all 64-bit hashes. Such a query is refused, if there are such values.
Rejected: a view with REAL in their place, which would change the digits of what a query gives.

So is one that asks whether texts are more or less than a number: SQLite makes a text of the number, and '10' comes before '9'.
Moments, days and times are texts, too (`created > 1700000000` would keep every row), and one that computes with them: SQLite
computes with what a text begins with (`day + 1` would be 2025).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sqlstream.index.sql.dialect import tokens
from sqlstream.index.sql.moments import compared_with, computed_names, is_moment, words_of
from sqlstream.index.sql.sqlglot_import import load_sqlglot
from sqlstream.index.types.models import Column

if TYPE_CHECKING:
    from sqlglot import exp

_DECIMAL = re.compile(r"decimal\d+\((\d+), ")
_EXACT_DIGITS = 15
"""Decimal digits that a REAL always holds."""
_MOST = 1 << 63
_PLAIN = frozenset("select alias group distinct count hash typeof hex".split())
"""Where a value is only handed on, or told from others."""
_OF_TEXT = frozenset("add sub mul div mod neg cast abs round floor ceil sqrt sum avg total".split())
"""What makes a number of a text first."""
_OF_BLOB = frozenset("ordered min max".split())
"""What goes by the order of numbers, of which blobs are the last."""
_ORDER = frozenset("< <= > >= between".split())
_ARITHMETIC = frozenset("+ - * / // %".split())
_BEFORE_STAR = frozenset(("select", "distinct", "all", ",", "("))
"""After one of them `*` means all columns, and `+` and `-` are signs."""
_NUMBER = re.compile(r"[0-9.]+(?:e[+-]?[0-9]+)?")
_COMPARISONS = frozenset("eq neq gt gte lt lte between in".split())


def stored_as(column: Column) -> str | None:
    """Return the SQLite type of those values of a column that are no numbers in the file; None: all are, or none should be."""
    if column.type == "uint64":
        return "blob"
    match = _DECIMAL.match(column.type)
    return "text" if match is not None and int(match[1]) > _EXACT_DIGITS else None


def computed_with(statement: str, columns: Sequence[Column]) -> list[Column]:
    """Return the columns that a statement compares or computes with in a way that is wrong for values that are no numbers.

    Args:
        statement: One SELECT, as SQLite gets it.
        columns: What it reads.
    """
    suspects = {column.physical.lower(): column for column in columns if stored_as(column) is not None}
    named = {token.name.lower() for token in tokens(statement)} if suspects else set()
    suspects = {name: column for name, column in suspects.items() if name in named}
    if not suspects:
        return []  # most statements: without 0.3 s to import sqlglot
    load_sqlglot("sqlite")
    import sqlglot
    from sqlglot import exp

    try:
        trees = [tree for tree in sqlglot.parse(statement, read="sqlite") if tree is not None]
    except (sqlglot.errors.SqlglotError, RecursionError):
        return [*suspects.values()]
    uses = [node for tree in trees for node in tree.find_all(exp.Column)]
    known = _with_aliases(uses, suspects)
    wrong = [column for node in uses if (column := known.get(node.name.lower())) is not None and not _is_right(node, column)]
    return [column for column in suspects.values() if column in wrong]


def ordered_by_number(statement: str, columns: Sequence[Column]) -> Column | None:
    """Return a column of texts of which a statement asks whether they are more or less than a number; None: it asks of none.

    Args:
        statement: One SELECT, as SQLite gets it.
        columns: What it reads.
    """
    texts = {column.physical.lower(): column for column in columns if column.type == "string" or is_moment(column)}
    found = tokens(statement) if texts else ()
    words = words_of(found)
    computed = computed_names(words, texts)
    for place, token in enumerate(found, 1):
        if token.text[0] not in "'\"`[" and _NUMBER.fullmatch(words[place]) is not None:
            first = place - 1 if words[place - 1] == "-" else place
            name = compared_with(words, first, place) if _ORDER & {words[first - 1], words[place + 1]} else ""
            if name in texts and not any(one.gives(name, place) for one in computed):
                return texts[name]
    return None


def computed_moment(statement: str, columns: Sequence[Column]) -> Column | None:
    """Return a column of moments, days or times that a statement adds to something, or the like; None: there is none.

    Args:
        statement: One SELECT, as SQLite gets it.
        columns: What it reads.
    """
    moments = {column.physical.lower(): column for column in columns if is_moment(column)}
    words = words_of(tokens(statement)) if moments else []
    computed = computed_names(words, moments)
    for place, word in enumerate(words):
        if word not in moments or any(one.gives(word, place) for one in computed):
            continue
        first = place - 2 if words[place - 1] == "." else place
        is_after = words[first - 1] in _ARITHMETIC and words[first - 2] not in _BEFORE_STAR
        if is_after or words[place + 1] in _ARITHMETIC:
            return moments[word]
    return None


def _with_aliases(uses: Sequence[exp.Column], columns: Mapping[str, Column]) -> dict[str, Column]:
    """Return columns by all names that a statement gives them."""
    known, size = dict(columns), 0
    while size < len(known):
        size = len(known)
        for node in uses:
            if node.name.lower() in known and (outer := _around(node)) is not None and outer.key == "alias":
                known.setdefault(outer.alias.lower(), known[node.name.lower()])
    return known


def _around(node: exp.Expr) -> exp.Expr | None:
    """Return what a node is a part of, brackets apart."""
    outer = node.parent
    while outer is not None and outer.key == "paren":
        outer = outer.parent
    return outer


def _is_right(node: exp.Column, column: Column) -> bool:
    """Return True if what is done with a value is right for text and blobs, too."""
    outer = _around(node)
    if outer is None or (outer.key == "window" and node.arg_key == "partition_by"):
        return True
    name = outer.name.lower() if outer.key == "anonymous" else outer.key
    if name in _PLAIN or (name == "is" and outer.expression.key == "null"):
        return True
    if stored_as(column) == "text":
        return name in _OF_TEXT
    return name in _OF_BLOB or (name in _COMPARISONS and all(map(_is_small, _others(outer, node))))


def _others(outer: exp.Expr, node: exp.Expr) -> Iterator[exp.Expr]:
    """Yield what a comparison compares a node with."""
    for part in outer.iter_expressions():
        if node not in part.walk():
            yield part


def _is_small(node: exp.Expr) -> bool:
    """Return True for a number that SQLite compares as it is written: its magnitude fits int64."""
    while node.key in ("neg", "paren"):
        node = node.this
    return node.key == "literal" and not node.args.get("is_string") and abs(float(node.name)) < _MOST
