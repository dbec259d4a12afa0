"""Users' SQL before SQLite sees it. Pure: text in, text out.

`sds` ran filters on DuckDB, where they silently mean something else than in SQLite. So that a script keeps its rows:
- `/` divides as in DuckDB and Python (3/2 is 1.5, SQLite alone says 1), `//` gives whole numbers of whole numbers;
- `"name"` is always a column: SQLite takes a misspelled one for a text, and a filter on it for true or false;
- a column called `index` (the default key) needs no quotes, like other words that only SQLite reserves.
- `left(…)` and `right(…)` are functions, not joins;
- `ILIKE` becomes SQLite's operator MATCH, whose function is ours.
`LIKE` minds upper and lower case (set in `sandbox`); functions of DuckDB that SQLite lacks are in `duckdb_compat`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from sqlstream.errors import QueryError
from sqlstream.index.types.models import ROW, VIEWS

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

_DATES = frozenset("date time datetime julianday unixepoch strftime".split())
"""SQLite's functions that take the moment where they are given none, or 'now'."""
_VOLATILE = frozenset(
    "random uuid uuidv4 uuidv7 gen_random_uuid setseed now today get_current_time get_current_timestamp transaction_timestamp "
    "current_date current_time current_timestamp localtime localtimestamp nextval currval txid_current".split()
)
"""DuckDB's functions that give another value each time (`volatile`, or the same within one query only)."""
_MOMENTS = frozenset("current_date current_time current_timestamp localtime localtimestamp".split())
"""Those of them that need no brackets."""
_ROWIDS = frozenset({"rowid", "oid", "_rowid_"})
"""What SQLite calls the number of a row in a table; of a view some builds of it give NULL."""


def to_sqlite(query: str, columns: Collection[str]) -> str:
    r"""Return one SELECT statement as SQLite must read it, without comments.

    Args:
        query: The user's text.
        columns: The names of columns in it.

    Raises:
        QueryError: No single SELECT statement, or one that asks for SQLite's own row numbers.

    Example:
        >>> to_sqlite('SELECT * FROM dataframe WHERE width / height > 1.5 AND "index" != \'a/b\'; -- wide', ["index"])
        "SELECT * FROM dataframe WHERE width *1.0/ height > 1.5 AND `index` != 'a/b'"
    """
    _check_query(query)
    _check_rowids(query, columns)
    statement = translated(query, _ONLY_SQLITE & {column.lower() for column in columns}).strip().rstrip("; ")
    if has_word(statement, ";"):
        raise QueryError(f"the query {shortened(query)!r} is more than one statement: give one SELECT")
    if not re.match(r"(?:select|with)\b", statement, re.IGNORECASE):
        raise QueryError(f"the query {shortened(query)!r} is no SELECT: give 'SELECT … FROM dataframe WHERE …'")
    return statement


def translated(text: str, reserved: Collection[str] = _ONLY_SQLITE) -> str:
    """Return SQL as SQLite must read it, without comments.

    Args:
        text: A statement or an expression.
        reserved: Words (lower case) that are names here.
    """
    parts = []
    for token in _TOKEN.finditer(text):
        kind, word = str(token.lastgroup), token[0]
        if kind == "space":
            word = " "
        elif kind == "quoted":
            word = _tick(word[1:-1].replace('""', '"'))
        elif kind == "word" and (word.lower() in reserved or (word.lower() in _JOINS and _CALL.match(text, token.end()))):
            word = _tick(word)
        elif kind == "word" and word.lower() == "ilike":
            word = "MATCH"
        elif kind == "whole":
            word = "/"
        elif word == "/":
            word = "*1.0/"
        parts.append(word)
    return "".join(parts)


def check_closed(text: str) -> None:
    """Raise ValueError for quotes and comments without an end, and for brackets that do not match: what could leave its place.

    Example:
        >>> check_closed("1) FROM dataframe UNION ALL SELECT (2")
        Traceback (most recent call last):
        ValueError: a bracket ')' closes none that it opens
    """
    opened: list[str] = []
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if token.lastgroup == "space" and mark.startswith("/*") and (len(mark) < 4 or not mark.endswith("*/")):
            raise ValueError("it has '/*' without its end: close the comment")
        if token.lastgroup != "other":
            continue
        if mark in ("'", '"', "`", "[", "\0"):
            raise ValueError(f"it has {mark!r} without its end: close the quote")
        if mark == "(":
            opened.append(mark)
        elif mark == ")":
            if not opened:
                raise ValueError("a bracket ')' closes none that it opens")
            opened.pop()
    if opened:
        raise ValueError("it has '(' without its end: close the bracket")


def bare(query: str) -> str:
    r"""Return a query, or an expression, without comments and final semicolons, so that others can be built around it.

    Example:
        >>> bare("SELECT * FROM dataframe; -- all")
        'SELECT * FROM dataframe'
    """
    return "".join(" " if token.lastgroup == "space" else token[0] for token in _TOKEN.finditer(query)).strip().rstrip("; ")


def bracketed(query: str) -> str:
    """Return a query in brackets, which it cannot leave.

    Raises:
        QueryError: Its own brackets, quotes or comments do not match.
    """
    _check_query(query)
    return f"({bare(query)})"


def words(statement: str) -> Iterator[re.Match[str]]:
    """Yield the tokens of a statement, blanks and comments left out."""
    return (token for token in _TOKEN.finditer(statement) if token.lastgroup != "space")


def has_word(statement: str, word: str) -> bool:
    """Return True if `word` (lower case) stands in the statement outside of texts and quoted names."""
    return any(token[0].lower() == word for token in _TOKEN.finditer(statement) if token.lastgroup in ("word", "other"))


def check_repeatable(query: str, columns: Collection[str], engine: str = "sqlite") -> None:
    """Raise QueryError for what gives other rows at another moment: nodes would disagree, and the first answer is kept.

    Args:
        query: The user's SQL.
        columns: Names of columns, which may be those of functions.
        engine: What will run it, "sqlite" or "duckdb".

    Example:
        >>> check_repeatable("SELECT * FROM dataframe WHERE day > date('2026-01-01', '-7 days')", ["day"])
    """
    tokens = [token[0].lower() for token in words(query)]
    names = {column.lower() for column in columns}
    for place, word in enumerate(tokens):
        if engine == "sqlite":
            is_other = word in _DATES and _is_of_now(word, _arguments(tokens, place + 1))
        elif word in _VOLATILE:
            is_name = word not in _MOMENTS or word in names or tokens[place - 1 : place] == ["."]
            is_other = tokens[place + 1 : place + 2] == ["("] or not is_name
        else:
            is_other = word == "tablesample" or tokens[place : place + 2] == ["using", "sample"]
        if is_other:
            raise QueryError(
                f"the query {shortened(query)!r} depends on the moment or on chance ({word}): other nodes and later runs would "
                "get other rows. Write the date itself; for a random part use hash(column, seed) % n",
                query=query,
            )


def _arguments(tokens: Sequence[str], start: int) -> Sequence[str] | None:
    """Return the tokens within the brackets that open at `start`; None if none do."""
    if tokens[start : start + 1] != ["("]:
        return None
    depth = 0
    for place in range(start, len(tokens)):
        depth += (tokens[place] == "(") - (tokens[place] == ")")
        if depth == 0:
            return tokens[start + 1 : place]
    return tokens[start + 1 :]


def _is_of_now(function: str, arguments: Sequence[str] | None) -> bool:
    if arguments is None:  # a column of that name
        return False
    return not arguments or "'now'" in arguments or (function == "strftime" and "," not in arguments)


def _check_rowids(query: str, columns: Collection[str]) -> None:
    """Raise QueryError for a row number that would be NULL, unless a column has that name, or `AS` gives it to a result."""
    names, before = {column.lower() for column in columns}, ""
    for token in words(query):
        name = token[0].strip('"`[]').lower() if token.lastgroup in ("word", "quoted", "tick") else ""
        if name in _ROWIDS - names and before != "as":
            raise QueryError(
                f"the query {shortened(query)!r} reads {token[0]!r}, which is no column here: the number of a row is {ROW!r}",
                query=query,
            )
        before = token[0].lower()


def _check_query(query: str) -> None:
    try:
        check_closed(query)
    except ValueError as error:
        raise QueryError(f"the query {shortened(query)!r} is no single SELECT: {error}", query=query) from error


def does_not_run(query: str, why: str, columns: Sequence[str], engine: str = "") -> QueryError:
    """Return the error of a query that does not run, with the columns at hand."""
    listed = ", ".join([ROW, *columns[:50]]) + (", …" if len(columns) > 50 else "")
    return QueryError(
        f"the query {shortened(query)!r} does not run{engine}: {why}. The table is {VIEWS[0]!r}, its columns: {listed}",
        query=query,
    )


def shortened(query: str) -> str:
    """Return the query fit for an error message."""
    one_line = " ".join(query.split())
    return one_line if len(one_line) <= 300 else one_line[:300] + "…"


def _tick(name: str) -> str:
    """Return a name in backticks, which SQLite never takes for a text."""
    return "`" + name.replace("`", "``") + "`"
