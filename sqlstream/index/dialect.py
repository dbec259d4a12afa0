"""Users' SQL before SQLite sees it. Pure: text in, text out.

`sds` ran filters on DuckDB, where they silently mean something else than in SQLite. So that a script keeps its rows:
- `/` divides as in DuckDB and Python (3/2 is 1.5, SQLite alone says 1), `//` gives whole numbers of whole numbers;
- `"name"` is always a column: SQLite takes a misspelled one for a text, and a filter on it for true or false;
- a column called `index` (the default key) needs no quotes, like other words that only SQLite reserves.
- `left(…)` and `right(…)` are functions, not joins;
- `ILIKE` becomes SQLite's operator MATCH, whose function is ours.
`LIKE` minds upper and lower case (set in `sandbox`); functions of DuckDB that SQLite lacks are in `duckdb_functions`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from sqlstream.errors import QueryError

_TOKEN = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?(?:\*/|\Z))
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")*")
    |(?P<tick>`(?:[^`]|``)*`|\[[^\]]*\])
    |(?P<word>[^\W\d]\w*)
    |(?P<number>\d[\w.]*)
    |(?P<whole>//)
    |(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_JOINS = ("left", "right")  # functions only where a bracket follows
_CALL = re.compile(r"\s*\(")
_ONLY_SQLITE = frozenset("add alter commit delete drop index insert set transaction update".split())
"""Words that SQLite reserves, DuckDB does not, and no SELECT needs."""


def to_sqlite(query: str, columns: Iterable[str]) -> str:
    r"""Return one SELECT statement as SQLite must read it, without comments.

    Args:
        query: The user's text.
        columns: The names of columns in it.

    Raises:
        QueryError: No single SELECT statement.

    Example:
        >>> to_sqlite('SELECT * FROM dataframe WHERE width / height > 1.5 AND "index" != \'a/b\'; -- wide', ["index"])
        "SELECT * FROM dataframe WHERE width *1.0/ height > 1.5 AND `index` != 'a/b'"
    """
    reserved = _ONLY_SQLITE & {column.lower() for column in columns}
    parts = []
    for token in _TOKEN.finditer(query):
        kind, text = str(token.lastgroup), token[0]
        if kind == "space":
            text = " "
        elif kind == "quoted":
            text = _tick(text[1:-1].replace('""', '"'))
        elif kind == "word" and (text.lower() in reserved or (text.lower() in _JOINS and _CALL.match(query, token.end()))):
            text = _tick(text)
        elif kind == "word" and text.lower() == "ilike":
            text = "MATCH"
        elif kind == "whole":
            text = "/"
        elif text == "/":
            text = "*1.0/"
        elif text in ("'", '"', "`", "[", "\0"):
            raise QueryError(f"the query {shortened(query)!r} has {text!r} without its end: close the quote")
        parts.append(text)
    statement = "".join(parts).strip().rstrip("; ")
    if has_word(statement, ";"):
        raise QueryError(f"the query {shortened(query)!r} is more than one statement: give one SELECT")
    if not re.match(r"(?:select|with)\b", statement, re.IGNORECASE):
        raise QueryError(f"the query {shortened(query)!r} is no SELECT: give 'SELECT … FROM dataframe WHERE …'")
    return statement


def bare(query: str) -> str:
    r"""Return a query, or an expression, without comments and final semicolons, so that others can be built around it.

    Example:
        >>> bare("SELECT * FROM dataframe; -- all")
        'SELECT * FROM dataframe'
    """
    return "".join(" " if token.lastgroup == "space" else token[0] for token in _TOKEN.finditer(query)).strip().rstrip("; ")


def with_where(query: str | None, where: str | None) -> str | None:
    """Return `query` (None: all rows) with one more condition on its result; None when neither is given.

    Example:
        >>> with_where(None, "n > 6 OR n < 1"), with_where("SELECT * FROM dataframe LIMIT 9;", "n > 6")
        ('SELECT * FROM dataframe WHERE (n > 6 OR n < 1)', 'SELECT * FROM (SELECT * FROM dataframe LIMIT 9) WHERE (n > 6)')
    """
    if where is None:
        return query
    return f"SELECT * FROM {'dataframe' if query is None else f'({bare(query)})'} WHERE ({bare(where)})"


def words(statement: str) -> Iterator[re.Match[str]]:
    """Yield the tokens of a statement, blanks and comments left out."""
    return (token for token in _TOKEN.finditer(statement) if token.lastgroup != "space")


def has_word(statement: str, word: str) -> bool:
    """Return True if `word` (lower case) stands in the statement outside of texts and quoted names."""
    return any(token[0].lower() == word for token in _TOKEN.finditer(statement) if token.lastgroup in ("word", "other"))


def shortened(query: str) -> str:
    """Return the query fit for an error message."""
    one_line = " ".join(query.split())
    return one_line if len(one_line) <= 300 else one_line[:300] + "…"


def _tick(name: str) -> str:
    """Return a name in backticks, which SQLite never takes for a text."""
    return "`" + name.replace("`", "``") + "`"
