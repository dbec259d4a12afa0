"""Users' SQL before SQLite sees it, by the tokens that sqlglot finds in it. Pure: text in, text out.

`sds` ran filters on DuckDB, where they silently mean something else than in SQLite. So that a script keeps its rows:
- `/` divides as in DuckDB and Python (3/2 is 1.5, SQLite alone says 1), `//` gives whole numbers of whole numbers;
- `"name"` is always a column: SQLite takes a misspelled one for a text, and a filter on it for true or false;
- a column called `index` (the default key) needs no quotes, like other words that only SQLite reserves.
- `left(…)` and `right(…)` are functions, not joins;
- `ILIKE` becomes SQLite's operator MATCH, whose function is ours;
- a `CAST` to a type that SQLite does not know is refused: it would make a number of the value (`CAST('2024-01-31' AS DATE)` is
  2024). `STRING` is its `TEXT`;
- `strftime(x, '%Y')`, DuckDB's order, is refused: it would be NULL.
`LIKE` minds upper and lower case (set in `sandbox`); functions of DuckDB that SQLite lacks are in `duckdb_compat`.

Texts and quoted names are spelled anew and comments are left out, so SQLite sees the same tokens as we do, whatever quotes and
comments it knows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from sqlstream.errors import QueryError
from sqlstream.index.sql.sqlglot_import import load_sqlglot
from sqlstream.index.types.models import ROW, VIEWS, Column

_BLANK = re.compile(r"\s+|--[^\n]*|/\*.*?\*/", re.DOTALL)
_BLANKS = re.compile(r"\s+")
_START = "( "  # before a text, whose first word else may be a command that swallows the rest
_TRUE_DIVISION = "*1.0/"
_JOINS = ("left", "right")  # functions only where a bracket follows
_ONLY_SQLITE = frozenset("add alter commit delete drop index insert set transaction update".split())
"""Words that SQLite reserves, DuckDB does not, and no SELECT needs."""

_DATES = frozenset("date time datetime julianday unixepoch strftime".split())
"""SQLite's functions that take the moment where they are given none, or 'now'."""
_OF_MACHINE = frozenset(("'localtime'", "'utc'"))
"""Modifiers of these functions."""
_VOLATILE = frozenset(
    "random uuid uuidv4 uuidv7 gen_random_uuid setseed now today get_current_time get_current_timestamp transaction_timestamp "
    "current_date current_time current_timestamp localtime localtimestamp nextval currval txid_current".split()
)
"""DuckDB's functions that give another value each time (`volatile`, or the same within one query only)."""
_MOMENTS = frozenset("current_date current_time current_timestamp localtime localtimestamp".split())
"""Those of them that need no brackets."""
_CASTS = re.compile(r"(?!interval).*(?:int|char|clob|text|blob|real|floa|doub)|(?:numeric|decimal|dec)\b", re.IGNORECASE)
"""Types that mean in SQLite's CAST what they say: all others make a number of the value."""
_ROWIDS = frozenset({"rowid", "oid", "_rowid_"})
"""What SQLite calls the number of a row in a table; of a view some builds of it give NULL."""
_UNKNOWN_COLUMN = re.compile(r"""(?:no such column: |Referenced column )"?([^"]+)(?:"|$)""")
"""How SQLite and DuckDB say that there is no such column."""

MAX_SQL_LENGTH = 200_000
"""Characters of a query for SQLite: long lists of values are honest."""


class Token(NamedTuple):
    """A word, number, text, name or sign of a query."""

    text: str
    """As it is written."""
    name: str
    """Without its quotes."""
    before: str
    """A blank for each run of blanks, and for each comment, between it and the token before."""


@lru_cache(maxsize=2)  # a query and its translation are asked for in turn; long IN lists are megabytes of tokens
def tokens(text: str, engine: str = "sqlite") -> tuple[Token, ...]:
    """Return what a text is made of; comments count as blanks.

    Args:
        text: A query or an expression.
        engine: In whose dialect it is, "sqlite" or "duckdb".

    Raises:
        ValueError: A quote or comment without its end, or what is no SQL; or it is longer than SQLite may read.
    """
    load_sqlglot(engine)
    import sqlglot

    if engine == "sqlite" and len(text) > MAX_SQL_LENGTH:  # asked first: tokens of a megabyte take half a minute
        raise ValueError(
            f"it has {len(text)} characters, and at most {MAX_SQL_LENGTH} are read: list fewer values, or filter by a column"
        )
    whole, found, end = _START + text, list[Token](), len(_START)
    try:
        parts = sqlglot.tokenize(whole, read=engine)[1:]
    except (sqlglot.errors.TokenError, ValueError) as error:
        raise ValueError("it has a quote or a comment without its end: close it") from error
    for part in parts:
        before, own = _BLANK.sub(" ", whole[end : part.start]), whole[part.start : part.end + 1]
        if before.strip() or "\0" in own:
            raise ValueError(f"it has {(before + own).strip()!r}, which is no SQL")
        is_quoted = own[-1] in "'\"`]$"
        found.append(Token(own if is_quoted else _BLANKS.sub(" ", own), part.text, before))
        end = part.end + 1
    if rest := _BLANK.sub("", whole[end:]):
        raise ValueError(f"it has {rest!r}, which is no SQL")  # what sqlglot takes for a comment, and no database does
    return tuple(found)


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
    with _named(query):
        check_closed(query)
        statement = translated(query, _ONLY_SQLITE & {column.lower() for column in columns}).strip().rstrip("; ")
        if has_word(statement, ";"):
            raise ValueError("it is more than one statement: give one SELECT")
    _check_rowids(query, columns)
    _check_casts(query)
    _check_formats(query)
    if not re.match(r"(?:select|with)\b", statement, re.IGNORECASE):
        raise QueryError(f"the query {shortened(query)!r} is no SELECT: give 'SELECT … FROM dataframe WHERE …'")
    return statement


def translated(text: str, reserved: Collection[str] = _ONLY_SQLITE) -> str:
    """Return SQL as SQLite must read it, without comments.

    Args:
        text: A statement or an expression.
        reserved: Words (lower case) that are names here.

    Raises:
        ValueError: A quote or comment without its end, or what is no SQL.
    """
    found, parts = tokens(text), list[str]()
    types = _cast_types(found)
    for at, token in enumerate(found):
        word, mark = token.text.lower(), token.text[0]
        is_call = found[at + 1 : at + 2] and found[at + 1].text == "("
        if mark == "'":
            spelled = "'" + token.name.replace("'", "''") + "'"
        elif mark in '"`[' or word in reserved or (word in _JOINS and is_call):
            spelled = "`" + token.name.replace("`", "``") + "`"  # which SQLite never takes for a text
        elif word == "/" and parts and parts[-1] == _TRUE_DIVISION and not token.before:
            parts[-1] = "/"
            continue
        else:
            spelled = {"ilike": "MATCH", "/": _TRUE_DIVISION}.get(word, token.text)
            spelled = "TEXT" if at in types and word == "string" else spelled
        parts += [token.before, spelled] if token.before else [spelled]
    return "".join(parts)


def check_closed(text: str, engine: str = "sqlite") -> None:
    """Raise ValueError for quotes and comments without an end, and for brackets that do not match: what could leave its place.

    Example:
        >>> check_closed("1) FROM dataframe UNION ALL SELECT (2")
        Traceback (most recent call last):
        ValueError: a bracket ')' closes none that it opens
    """
    depth = 0
    for token in tokens(text, engine):
        depth += (token.text == "(") - (token.text == ")")
        if depth < 0:
            raise ValueError("a bracket ')' closes none that it opens")
    if depth:
        raise ValueError("it has '(' without its end: close the bracket")


def bare(query: str, engine: str = "sqlite") -> str:
    r"""Return a query, or an expression, without comments and final semicolons, so that others can be built around it.

    Example:
        >>> bare("SELECT * FROM dataframe; -- all")
        'SELECT * FROM dataframe'
    """
    return as_written(tokens(query, engine)).rstrip("; ")


def as_written(some: Sequence[Token]) -> str:
    """Return the text of neighbouring tokens."""
    return "".join(token.before + token.text for token in some).strip()


def bracketed(query: str, engine: str = "sqlite") -> str:
    """Return a query in brackets, which it cannot leave.

    Raises:
        QueryError: Its own brackets, quotes or comments do not match.
    """
    with _named(query):
        check_closed(query, engine)
        return f"({bare(query, engine)})"


def has_word(statement: str, word: str, engine: str = "sqlite") -> bool:
    """Return True if `word` (lower case), or a keyword that begins with it, stands in the statement outside of quotes."""
    return any(token.text.lower().partition(" ")[0] == word for token in tokens(statement, engine))


def check_repeatable(query: str, columns: Collection[str], engine: str = "sqlite") -> None:
    """Raise QueryError for what gives other rows at another moment: nodes would disagree, and the first answer is kept.

    Args:
        query: The user's SQL.
        columns: Names of columns, which may be those of functions.
        engine: What will run it, "sqlite" or "duckdb".

    Example:
        >>> check_repeatable("SELECT * FROM dataframe WHERE day > date('2026-01-01', '-7 days')", ["day"])
    """
    with _named(query):
        words = [token.text.lower() for token in tokens(query, engine)]
    names = {column.lower() for column in columns}
    for place, word in enumerate(words):
        if engine == "sqlite":
            arguments = _arguments(words, place + 1) if word in _DATES else None
            if zone := next((text for text in arguments or () if text in _OF_MACHINE), None):
                raise QueryError(
                    f"the query {shortened(query)!r} goes by the time zone of the machine ({zone}), which is another one on "
                    "other nodes: columns with a zone are in UTC here; write datetime(x, '+9 hours')",
                    query=query,
                )
            is_other = word in _DATES and _is_of_now(word, arguments)
        elif word in _VOLATILE:
            is_name = word not in _MOMENTS or word in names or words[place - 1 : place] == ["."]
            is_other = words[place + 1 : place + 2] == ["("] or not is_name
        else:
            is_other = word == "tablesample" or words[place : place + 2] == ["using", "sample"]
        if is_other:
            raise QueryError(
                f"the query {shortened(query)!r} depends on the moment or on chance ({word}): other nodes and later runs would "
                "get other rows. Write the date itself; for a random part use hash(column, seed) % n",
                query=query,
            )


def _arguments(words: Sequence[str], start: int) -> Sequence[str] | None:
    """Return the words within the brackets that open at `start`; None if none do."""
    if words[start : start + 1] != ["("]:
        return None
    depth = 0
    for place in range(start, len(words)):
        depth += (words[place] == "(") - (words[place] == ")")
        if depth == 0:
            return words[start + 1 : place]
    return words[start + 1 :]


def _is_of_now(function: str, arguments: Sequence[str] | None) -> bool:
    if arguments is None:  # a column of that name
        return False
    return not arguments or "'now'" in arguments or (function == "strftime" and "," not in arguments)


def _check_rowids(query: str, columns: Collection[str]) -> None:
    """Raise QueryError for a row number that would be NULL, unless a column has that name, or `AS` gives it to a result."""
    names, before = {column.lower() for column in columns}, ""
    for token in tokens(query):
        if token.text[0] != "'" and token.name.lower() in _ROWIDS - names and before != "as":
            raise QueryError(
                f"the query {shortened(query)!r} reads {token.text!r}, which is no column here: the number of a row is {ROW!r}",
                query=query,
            )
        before = token.text.lower()


def _cast_types(found: Sequence[Token]) -> list[int]:
    """Return where the types of CASTs begin."""
    begins, brackets = list[int](), list[bool]()
    for at, token in enumerate(found):
        if token.text == "(":
            brackets.append(at > 0 and found[at - 1].text.lower() == "cast")
        elif token.text == ")" and brackets:
            brackets.pop()
        elif token.text.lower() == "as" and brackets and brackets[-1]:
            begins.append(at + 1)
    return begins


def _check_casts(query: str) -> None:
    """Raise QueryError for a CAST that SQLite would take for one to a number."""
    found = tokens(query)
    for at in _cast_types(found):
        words = [token.text for token in found[at:]]
        kind = " ".join(words[: words.index(")")])
        if kind.lower() != "string" and not _CASTS.match(kind):
            raise QueryError(
                f"the query {shortened(query)!r} has a CAST to {kind.upper()}, of which SQLite makes a number, so that rows "
                "would be wrong: write date(x) or datetime(x) for moments and x = 'true' or x <> 0 for booleans, or use "
                "sql_engine='duckdb'",
                query=query,
            )


def _check_formats(query: str) -> None:
    """Raise QueryError for strftime(x, '%Y'), which DuckDB knows: SQLite takes the format first, and gives NULL."""
    found = tokens(query)
    words = [token.text.lower() for token in found]
    for at, word in enumerate(words):
        arguments = _arguments(words, at + 1) if word == "strftime" else None
        if arguments and arguments[0][0] != "'" and arguments[-1][0] == "'" and "%" in arguments[-1]:
            raise QueryError(
                f"the query {shortened(query)!r} calls strftime with the format behind the moment, of which SQLite makes NULL: "
                f"write strftime({found[at + 1 + len(arguments)].text}, x)",
                query=query,
            )


@contextlib.contextmanager
def _named(query: str) -> Iterator[None]:
    """Say of which query it is what its tokens are not."""
    try:
        yield
    except ValueError as error:
        raise QueryError(f"the query {shortened(query)!r} is no single SELECT: {error}", query=query) from error


def renamed(query: str, columns: Sequence[Column], engine: str = "sqlite") -> Column | None:
    """Return a column of which a query has the name, which SQL gives to something else; None: there is none.

    Args:
        query: One SELECT, as the user wrote it.
        columns: Those of the table.
        engine: What runs it, "sqlite" or "duckdb".
    """
    others = {column.name: column for column in columns if column.physical != column.name}
    words = [token.name for token in tokens(query, engine) if token.text[0] != "'"] if others else []
    return next((others[word] for word in words if word in others), None)


def does_not_run(query: str, why: str, columns: Sequence[Column], engine: str = "") -> QueryError:
    """Return the error of a query that does not run, with the columns at hand."""
    seen = [column.physical for column in columns if not column.is_in_place]
    listed = ", ".join([ROW, *seen[:50]]) + (", …" if len(seen) > 50 else "")
    left = (column.name for column in columns if column.is_in_place)
    if (named := next((name for name in left if re.search(rf"\b{re.escape(name)}\b", why, re.IGNORECASE)), None)) is not None:
        why += (
            f" (the content of {named!r} stays in its files, where no query reads it: do not name it, or, of MDS shards, give "
            "index_members, which makes columns of it; samples have it where the query begins with 'SELECT *')"
        )
    unknown = _UNKNOWN_COLUMN.search(why)
    if unknown is not None and f'"{unknown[1]}"' in query:
        why += f" (text needs single quotes: '{unknown[1]}')"
    return QueryError(
        f"the query {shortened(query)!r} does not run{engine}: {why}. The table is {VIEWS[0]!r}, its columns: {listed}",
        query=query,
    )


def shortened(query: str) -> str:
    """Return the query fit for an error message."""
    one_line = " ".join(query.split())
    return one_line if len(one_line) <= 300 else one_line[:300] + "…"
