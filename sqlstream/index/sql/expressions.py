"""Users' expressions (`where`, `weights`) and what a query is made of, by their syntax trees. Pure: text in, verdict out.

An expression is put into brackets within a statement. So it must be one expression by two accounts that know nothing of each
other: its tokens say that it never leaves these brackets, the parser says that it is one expression. What runs are the user's
own tokens: sqlglot's translation from DuckDB to SQLite changes what queries mean (`strftime` gets its arguments swapped,
`max(a, b)` loses `b`, `greatest` gives NULL for any NULL, `ILIKE` folds ASCII only, `"name"` becomes a text when misspelled).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
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
from sqlstream.index.types.models import ROW, VIEWS, SelectionInfo

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
_FILTER = re.compile(rf"select \* from ({'|'.join(VIEWS)})(?: (?:where|order|limit)\b|[; ]*$)", re.IGNORECASE)
_COMMENT = re.compile(r"--|/\*")
_OTHER_ROWS = re.compile(r"\b(select|union|except|intersect|values|with)\b", re.IGNORECASE)
_NO_COLUMNS = frozenset("from where group having qualify windows distinct order limit offset sample with".split())
"""Clauses that choose rows and compute no column."""
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
        trees = [] if is_several else _parsed(f"SELECT {translated(stripped) if engine == 'sqlite' else stripped}", engine)
    except ValueError as error:
        raise _refused(argument, text, str(error)) from error
    if is_several:  # not within `try`: the error is a ValueError, which would be wrapped in another of its kind
        raise _refused(argument, text, "it is more than one statement")
    values = trees[0].expressions
    if others := _clauses(trees[0]) - {"expressions"}:
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
        if why := _several_rows(_parsed(f"SELECT {translated(condition)}", "sqlite")[0].expressions[0]):
            raise _not_by_row(query or where or "", why)
    return " AND ".join(f"({condition})" for condition in present) if present else None


@lru_cache(maxsize=64)
def keeps_rows(query: str, engine: str = "sqlite") -> bool:
    """Return True if each row of a query's result is, in all its columns, a row of the table.

    The names of its columns do not tell: `SELECT row, url || '#x' AS url FROM dataframe` gives those of the table.

    Args:
        query: One SELECT, as the user wrote it.
        engine: What runs it, "sqlite" or "duckdb".

    Example:
        >>> keeps_rows("SELECT * FROM dataframe WHERE n > 6"), keeps_rows("SELECT row, n + 1 AS n FROM dataframe")
        (True, False)
    """
    plain = " ".join(query.split())
    if (
        engine == "sqlite"
        and _FILTER.match(plain)
        and not _OTHER_ROWS.search(plain, len("select"))
        and not _COMMENT.search(plain)
    ):
        return True  # most queries: without 0.3 s to import sqlglot
    try:
        trees = _parsed(translated(query) if engine == "sqlite" else query, engine)
    except ValueError:
        return False
    return len(trees) == 1 and _keeps(trees[0], frozenset(VIEWS))


def check_distinct(query: str, engine: str = "sqlite") -> None:
    """Raise QueryError for SELECT DISTINCT * on the rows of the table: `*` has the number of each row, so all are distinct.

    Args:
        query: One SELECT, as the user wrote it.
        engine: What runs it, "sqlite" or "duckdb".

    Example:
        >>> check_distinct("SELECT DISTINCT url FROM dataframe")
    """
    try:
        if not has_word(query, "distinct", engine):  # most queries: sqlglot reads no tree
            return
        trees = _parsed(translated(query) if engine == "sqlite" else query, engine)
    except ValueError:
        return  # what is wrong with it is said elsewhere
    from sqlglot import exp

    named = {cte.alias.lower(): cte.this for tree in trees for cte in tree.find_all(exp.CTE)}
    for select in (select for tree in trees for select in tree.find_all(exp.Select)):
        distinct = select.args.get("distinct")
        if distinct is not None and not distinct.args.get("on") and _has_stars_of_rows(select, named):
            raise QueryError(
                f"the query {shortened(query)!r} has DISTINCT *, which leaves no row out, since * has the number of each row: "
                f"name the columns (SELECT DISTINCT url, caption), or keep the first row of each with WHERE {ROW} IN "
                f"(SELECT min({ROW}) FROM dataframe GROUP BY url, caption)",
                query=query,
            )


def _has_stars_of_rows(select: exp.Expr, named: Mapping[str, exp.Expr]) -> bool:
    """Return whether a `*` of a SELECT stands for numbers of rows, too; `named` are the queries of WITH."""
    sources = [_source(select)] if "from" in _clauses(select) else []
    sources += [join.this for join in select.args.get("joins") or ()]
    for value in select.expressions:
        of = value.table.lower() if value.key == "column" else ""
        excluded = [str(name.name).lower() for name in value.args.get("except_") or value.args.get("except") or ()]
        if value.is_star and ROW not in excluded:
            seen = [source for source in sources if not of or source.alias_or_name.lower() == of]
            if any(_has_row(source, named) for source in seen):
                return True
    return False


def _has_row(source: exp.Expr, named: Mapping[str, exp.Expr]) -> bool:
    """Return whether what a query takes rows from has a column with the number of a row."""
    if source.key == "table" and source.name.lower() not in named:
        return source.name.lower() in VIEWS
    query, others = (named[source.name.lower()], dict(named)) if source.key == "table" else (source.this, dict(named))
    others.pop(source.name.lower(), None)  # it may name itself
    while query.key in ("subquery", "union", "except", "intersect"):
        query = query.this
    if query.key != "select":
        return False
    return any(value.alias_or_name.lower() == ROW for value in query.expressions) or _has_stars_of_rows(query, others)


@lru_cache(maxsize=64)
def given_names(query: str, engine: str = "sqlite") -> frozenset[str]:
    """Return the names that a query, or one within it, gives to values by AS.

    Args:
        query: One SELECT, as the user wrote it.
        engine: What runs it, "sqlite" or "duckdb".

    Example:
        >>> sorted(given_names("SELECT *, url AS image FROM (SELECT a || b AS url FROM dataframe)"))
        ['image', 'url']
    """
    load_sqlglot(engine)
    from sqlglot import exp

    try:
        trees = _parsed(translated(query) if engine == "sqlite" else query, engine)
    except ValueError:
        return frozenset()
    selects = [select for tree in trees for select in tree.find_all(exp.Select)]
    return frozenset(value.alias for select in selects for value in select.expressions if value.key == "alias")


@lru_cache(maxsize=64)
def judges_rows(statement: str) -> bool:
    """Return True if a SELECT looks at one row at a time: `SELECT … FROM dataframe WHERE …`, or such on that.

    Args:
        statement: As SQLite gets it.
    """
    try:
        trees = _parsed(statement, "sqlite")
    except ValueError:
        return False
    return len(trees) == 1 and _is_by_row(trees[0])


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
        why = why or _writes(_parsed(query, read_as))
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


def _is_by_row(tree: exp.Expr) -> bool:
    clauses = _clauses(tree)
    if tree.key != "select" or not {"expressions", "from"} <= clauses <= {"expressions", "from", "where", "limit", "offset"}:
        return False
    source = _source(tree)
    is_table = source.key == "table" and _clauses(source) == {"this"} and source.this.key == "identifier"
    is_plain = _is_by_row(source.this) if source.key == "subquery" else is_table
    parts = [*tree.expressions, *(part for name in ("where", "limit", "offset") if (part := tree.args.get(name)))]
    return is_plain and not any(_several_rows(part) for part in parts)


def _keeps(tree: exp.Expr, kept: frozenset[str]) -> bool:
    """Return `keeps_rows` of a query; `kept` names, in lower case, the tables that hold the table's own rows."""
    from sqlglot import exp

    with_clause = tree.args.get("with_") or tree.args.get("with")
    for table in with_clause.expressions if with_clause else ():
        kept = kept | {table.alias.lower()} if _keeps_source(table, kept) else kept - {table.alias.lower()}
    if isinstance(tree, exp.SetOperation):
        return _keeps(tree.left, kept) and _keeps(tree.right, kept)
    if isinstance(tree, exp.Subquery):
        return _keeps_source(tree, kept)
    if not isinstance(tree, exp.Select) or "from" not in _clauses(tree) or len(tree.expressions) != 1:
        return False
    value, others = tree.expressions[0], _clauses(tree) - {"expressions"} - _NO_COLUMNS
    sources = [_source(tree), *(join.this for join in tree.args.get("joins") or ())]
    if value.key == "column" and value.is_star and _clauses(value) == {"this", "table"} and not _clauses(value.this):
        sources = [source for source in sources if source.alias_or_name.lower() == value.table.lower()]
        others -= {"joins", "laterals"}
    elif value.key != "star" or _clauses(value):
        return False
    return not others and len(sources) == 1 and _keeps_source(sources[0], kept)


def _keeps_source(source: exp.Expr, kept: frozenset[str]) -> bool:
    """Return the same of what a query takes rows from: a table, a query in brackets, or one that WITH names."""
    alias = source.args.get("alias")
    if _clauses(source) - {"this", "alias"} - _NO_COLUMNS or (alias is not None and alias.columns):
        return False
    if source.key == "table":
        return source.this.key == "identifier" and source.name.lower() in kept
    return source.key in ("cte", "subquery") and _keeps(source.this, kept)


def _several_rows(tree: exp.Expr) -> str | None:
    """Return what in an expression looks at other rows than one; None when nothing does."""
    from sqlglot import exp

    for node in tree.walk():
        if isinstance(node, exp.Query | exp.Window | exp.AggFunc | exp.Values) or node.args.get("field") is not None:
            return "SELECT" if isinstance(node, exp.Query) else node.key.upper()
    return None


def _condition(query: str) -> str | None:
    """Return the text after WHERE of SELECT * FROM dataframe WHERE …; None without one."""
    try:
        check_closed(query)
        stripped = bare(query)
        trees = _parsed(translated(stripped), "sqlite")
    except ValueError as error:
        raise _not_by_row(query, str(error)) from error
    if len(trees) != 1 or trees[0].key != "select":
        raise _not_by_row(query, "it is no SELECT * FROM dataframe")
    tree = trees[0]
    if others := _clauses(tree) - {"expressions", "from", "where"}:
        raise _not_by_row(query, f"it has {sorted(others)[0].upper()}")
    source = _source(tree) if "from" in _clauses(tree) else tree
    is_table = source.key == "table" and _clauses(source) == {"this"} and source.name.lower() in VIEWS
    if not is_table or [value.key for value in tree.expressions] != ["star"] or _clauses(tree.expressions[0]):
        raise _not_by_row(query, "it does not begin with SELECT * FROM dataframe")
    return as_written(tokens(stripped)[len("SELECT * FROM dataframe WHERE".split()) :]) if "where" in _clauses(tree) else None


def _source(tree: exp.Expr) -> exp.Expr:
    """Return what a SELECT takes its rows from, joins apart."""
    source: exp.Expr = (tree.args.get("from_") or tree.args["from"]).this
    return source


def _clauses(tree: exp.Expr) -> set[str]:
    """Return which parts a node has."""
    return {name.rstrip("_") for name, value in tree.args.items() if value}


def _parsed(text: str, dialect: str) -> list[exp.Expr]:
    """Return the statements of a text.

    Raises:
        ValueError: It does not parse.
    """
    import sqlglot

    try:
        return [tree for tree in sqlglot.parse(text, read=dialect) if tree is not None and tree.key != "semicolon"]
    except (sqlglot.errors.SqlglotError, RecursionError) as error:
        lines = [" ".join(line.split()) for line in str(error).splitlines()]
        raise ValueError(
            lines[0].replace("\x1b[4m", "").replace("\x1b[0m", "")[:200] if lines else "it does not parse"
        ) from error


def _refused(argument: str, text: str, why: str) -> QueryError:
    return QueryError(f"{argument}={shortened(text)!r} is not one SQL expression: {why}: {_CURE}", query=text)


def _not_by_row(query: str, why: str) -> QueryError:
    return QueryError(
        f"the query {shortened(query)!r} cannot filter a lazy index, of which only a part is here: {why}. Give SELECT * FROM "
        "dataframe WHERE …, which judges each row by itself, or leave lazy_index_chunk_size out",
        query=query,
    )
