"""Users' expressions (`where`, `weights`) and queries of databases, judged before they run. Pure: text in, verdict out.

An expression is put into brackets within a statement. So it must be one expression by two accounts that know nothing of each
other: its tokens say that it never leaves these brackets, the parser says that it is one expression. What runs are the user's
own tokens: sqlglot's translation from DuckDB to SQLite changes what queries mean (`strftime` gets its arguments swapped,
`max(a, b)` loses `b`, `greatest` gives NULL for any NULL, `ILIKE` folds ASCII only, `"name"` becomes a text when misspelled).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from sqlstream.errors import QueryError
from sqlstream.index.sql.dialect import (
    Token,
    as_written,
    bare,
    bracketed,
    check_closed,
    has_word,
    shortened,
    tokens,
    translated,
)
from sqlstream.index.sql.sqlglot_import import load_sqlglot
from sqlstream.index.sql.syntax_trees import clauses_of, parsed, several_rows, source_of
from sqlstream.index.types.models import VIEWS, SelectionInfo

if TYPE_CHECKING:
    from sqlglot import exp

_DIALECTS = {
    "postgresql": "postgres",
    "cockroachdb": "postgres",
    "mariadb": "mysql",
    "mssql": "tsql",
    "teradatasql": "teradata",
}
"""SQLAlchemy's names of databases whose SQL sqlglot calls otherwise."""
_RUN_COMMENT = re.compile(r"/\*M?!")
_CURE = "give one expression, such as score > 6; names that are words of SQL go into double quotes"


def one_expression(argument: str, text: str, engine: str = "sqlite") -> str:
    """Return a user's expression without comments and final semicolons, as others can be built around it.

    Args:
        argument: What the user calls it.
        text: The expression.
        engine: What will run it, "sqlite" or "duckdb".

    Raises:
        QueryError: It is no single expression.

    Example:
        >>> one_expression("where", "n > 6 -- large;")
        'n > 6'
    """
    try:
        check_closed(text, engine)
        stripped = bare(text, engine)
        is_several = has_word(stripped, ";", engine)
        trees = [] if is_several else parsed(f"SELECT {translated(stripped) if engine == 'sqlite' else stripped}", engine)
    except ValueError as error:
        raise _refused(argument, text, str(error)) from error
    if is_several:  # not within `try`: the error is a ValueError, which would be wrapped in another of its kind
        raise _refused(argument, text, "it is more than one statement")
    values = trees[0].expressions
    if others := clauses_of(trees[0]) - {"expressions"}:
        raise _refused(argument, text, f"it has {sorted(others)[0].upper()}")
    if len(values) != 1:
        raise _refused(argument, text, f"it is {len(values)} values a row" if values else "it is empty")
    if values[0].key in ("alias", "aliases", "command") or values[0].is_star:
        raise _refused(argument, text, f"it is {'a *' if values[0].is_star else 'a value with a name'}")
    return stripped


def several_expressions(argument: str, text: str, engine: str = "sqlite") -> tuple[str, ...]:
    """Return users' expressions, which commas divide, as `one_expression` gives each.

    Args:
        argument: What the user calls them.
        text: The expressions.
        engine: What will run them, "sqlite" or "duckdb".

    Raises:
        QueryError: One of them is no single expression.

    Example:
        >>> several_expressions("by", "width, max(height, 1)")
        ('width', 'max(height, 1)')
    """
    try:
        check_closed(text, engine)
        found = tokens(text, engine)
    except ValueError as error:
        raise _refused(argument, text, str(error)) from error
    parts, depth = [list[Token]()], 0
    for token in found:
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if token.text == "," and not depth:
            parts.append([])
        else:
            parts[-1].append(token)
    return tuple(one_expression(argument, as_written(part), engine) for part in parts)


def with_where(query: str | None, where: str | None, engine: str = "sqlite") -> str | None:
    """Return `query` (None: all rows) with one more condition on its result; None when neither is given.

    Args:
        query: One SELECT.
        where: The condition.
        engine: What will run them, "sqlite" or "duckdb".

    Raises:
        QueryError: The condition is no single expression, or the query's brackets, quotes or comments do not match.

    Example:
        >>> with_where(None, "n > 6 OR n < 1"), with_where("SELECT * FROM dataframe LIMIT 9;", "n > 6")
        ('SELECT * FROM dataframe WHERE (n > 6 OR n < 1)', 'SELECT * FROM (SELECT * FROM dataframe LIMIT 9) WHERE (n > 6)')
    """
    if where is None:
        return query
    condition = one_expression("where", where, engine)
    return f"SELECT * FROM {'dataframe' if query is None else bracketed(query, engine)} WHERE ({condition})"


def rows_of(selection: SelectionInfo | None) -> str:
    """Return what holds the selected rows, in their order, after FROM: the table, or a filter in brackets.

    Args:
        selection: The filter of an index; None: it has none.
    """
    if selection is None:
        return VIEWS[0]
    source = bracketed(selection.query, selection.engine)
    return source if selection.max_size is None else f"(SELECT * FROM {source} LIMIT {selection.max_size})"


def condition_of(query: str | None, where: str | None) -> str | None:
    """Return the one condition that a row must fulfil for `query` and `where`; None when every row does.

    Args:
        query: `SELECT * FROM dataframe WHERE …`.
        where: One more condition.

    Raises:
        QueryError: The query looks at several rows at a time, or computes columns.

    Example:
        >>> condition_of("SELECT * FROM dataframe WHERE n > 6 -- big", "m < 1")
        '(n > 6) AND (m < 1)'
    """
    conditions = [] if query is None else [_condition(query)]
    conditions += [] if where is None else [one_expression("where", where)]
    present = [condition for condition in conditions if condition is not None]
    for condition in present:
        if why := several_rows(parsed(f"SELECT {translated(condition)}", "sqlite")[0].expressions[0]):
            raise _not_by_row(query or where or "", why)
    return " AND ".join(f"({condition})" for condition in present) if present else None


def one_select(query: str, dialect: str, name: str) -> str:
    """Return a database's query without comments and semicolons at its end, as drivers can build others around it.

    Args:
        query: In the database's own SQL.
        dialect: Its name in a SQLAlchemy URL.
        name: The database, for the error.

    Raises:
        QueryError: It is no single SELECT that only reads.

    Example:
        >>> one_select("SELECT * FROM photos; -- all", "postgresql", "db")
        'SELECT * FROM photos'
    """
    read_as = _read_as(dialect)
    try:
        why = "a comment that MySQL runs" if "mysql" in read_as and _RUN_COMMENT.search(query) else None
        why = why or _writes(parsed(query, read_as))
    except ValueError as error:
        why = str(error)
    if why is not None:
        raise QueryError(
            f"the query {shortened(query)!r} is not sent to {name}: {why}: give one read-only SELECT (or WITH … SELECT); what "
            "is more than that belongs into a view of the database",
            query=query,
        )
    return without_end(query, read_as)


def without_end(query: str, dialect: str) -> str:
    """Return a query without comments and semicolons at its end; `dialect` is as sqlglot calls it.

    Raises:
        ValueError: It has a quote or comment without its end, or nothing else.
    """
    load_sqlglot(dialect)
    import sqlglot

    try:
        return query[: max(token.end + 1 for token in sqlglot.tokenize(query, read=dialect) if token.text != ";")]
    except sqlglot.errors.SqlglotError as error:
        raise ValueError(" ".join(str(error).split())[:200]) from error


def _read_as(dialect: str) -> str:
    """Return how sqlglot calls the SQL of a database; '' is what all have in common."""
    load_sqlglot("")
    from sqlglot.dialects.dialect import Dialect

    name = _DIALECTS.get(dialect, dialect)
    read_as = name if Dialect.get(name) is not None else ""
    load_sqlglot(read_as)
    return read_as


def _writes(trees: list[exp.Expr]) -> str | None:
    """Return why statements are no single SELECT that only reads; None when they are."""
    from sqlglot import exp

    if len(trees) != 1:
        return f"it is {len(trees)} statements"
    if not isinstance(trees[0], exp.Query):
        return f"it is {trees[0].key.upper()}"
    kinds = (exp.Insert, exp.Update, exp.Delete, exp.Merge, exp.DDL, exp.Copy, exp.Into, exp.Command, exp.Lock)
    found = next((node for node in trees[0].walk() if isinstance(node, kinds) and not isinstance(node, exp.Query)), None)
    return None if found is None else f"it has {found.key.upper()}"


def _condition(query: str) -> str | None:
    """Return the text after WHERE of SELECT * FROM dataframe WHERE …; None without one."""
    try:
        check_closed(query)
        stripped = bare(query)
        trees = parsed(translated(stripped), "sqlite")
    except ValueError as error:
        raise _not_by_row(query, str(error)) from error
    if len(trees) != 1 or trees[0].key != "select":
        raise _not_by_row(query, "it is no SELECT * FROM dataframe")
    tree = trees[0]
    if others := clauses_of(tree) - {"expressions", "from", "where"}:
        raise _not_by_row(query, f"it has {sorted(others)[0].upper()}")
    source = source_of(tree) if "from" in clauses_of(tree) else tree
    is_table = source.key == "table" and clauses_of(source) == {"this"} and source.name.lower() in VIEWS
    if not is_table or [value.key for value in tree.expressions] != ["star"] or clauses_of(tree.expressions[0]):
        raise _not_by_row(query, "it does not begin with SELECT * FROM dataframe")
    return as_written(tokens(stripped)[len("SELECT * FROM dataframe WHERE".split()) :]) if "where" in clauses_of(tree) else None


def _refused(argument: str, text: str, why: str) -> QueryError:
    return QueryError(f"{argument}={shortened(text)!r} is not one SQL expression: {why}: {_CURE}", query=text)


def _not_by_row(query: str, why: str) -> QueryError:
    return QueryError(
        f"the query {shortened(query)!r} cannot filter a lazy index, of which only a part is here: {why}. Give SELECT * FROM "
        "dataframe WHERE …, which judges each row by itself, or leave lazy_index_chunk_size out",
        query=query,
    )
