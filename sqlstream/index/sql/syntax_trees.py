"""What a query is made of, by its syntax tree: whether it keeps rows, judges them one by one, gives names. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from sqlstream.errors import QueryError
from sqlstream.index.sql.dialect import has_word, shortened, translated
from sqlstream.index.sql.sqlglot_import import load_sqlglot
from sqlstream.index.types.models import ROW, VIEWS

if TYPE_CHECKING:
    from sqlglot import exp

_FILTER = re.compile(rf"select \* from ({'|'.join(VIEWS)})(?: (?:where|order|limit)\b|[; ]*$)", re.IGNORECASE)
_COMMENT = re.compile(r"--|/\*")
_OTHER_ROWS = re.compile(r"\b(select|union|except|intersect|values|with)\b", re.IGNORECASE)
_NO_COLUMNS = frozenset("from where group having qualify windows distinct order limit offset sample with".split())
"""Clauses that choose rows and compute no column."""


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
        trees = _written(query, engine)
    except ValueError:
        return False
    return len(trees) == 1 and _keeps(trees[0], frozenset(VIEWS))


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
    if not isinstance(tree, exp.Select) or "from" not in clauses_of(tree) or len(tree.expressions) != 1:
        return False
    value, others = tree.expressions[0], clauses_of(tree) - {"expressions"} - _NO_COLUMNS
    sources = [source_of(tree), *(join.this for join in tree.args.get("joins") or ())]
    if value.key == "column" and value.is_star and clauses_of(value) == {"this", "table"} and not clauses_of(value.this):
        sources = [source for source in sources if source.alias_or_name.lower() == value.table.lower()]
        others -= {"joins", "laterals"}
    elif value.key != "star" or clauses_of(value):
        return False
    return not others and len(sources) == 1 and _keeps_source(sources[0], kept)


def _keeps_source(source: exp.Expr, kept: frozenset[str]) -> bool:
    """Return the same of what a query takes rows from: a table, a query in brackets, or one that WITH names."""
    alias = source.args.get("alias")
    if clauses_of(source) - {"this", "alias"} - _NO_COLUMNS or (alias is not None and alias.columns):
        return False
    if source.key == "table":
        return source.this.key == "identifier" and source.name.lower() in kept
    return source.key in ("cte", "subquery") and _keeps(source.this, kept)


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
        trees = _written(query, engine)
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
    sources = [source_of(select)] if "from" in clauses_of(select) else []
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
        trees = _written(query, engine)
    except ValueError:
        return frozenset()
    selects = [select for tree in trees for select in tree.find_all(exp.Select)]
    return frozenset(value.alias for select in selects for value in select.expressions if value.key == "alias")


@lru_cache(maxsize=64)
def renamed_columns(query: str) -> Mapping[str, str]:
    """Return which columns of a query's result are columns of the table, by name, in lower case, as SQL compares names.

    What is computed is left out, and of several tables what no table's name stands before.

    Args:
        query: One SELECT for SQLite, as the user wrote it.

    Example:
        >>> renamed_columns("SELECT created AS day, n AS twice FROM (SELECT at AS created, 2 * n AS n FROM dataframe)")
        {'day': 'at'}
    """
    try:
        trees = _written(query, "sqlite")
    except ValueError:
        return {}
    return {name: own for name, own in _renamed(trees[0], {}).items() if own} if len(trees) == 1 else {}


def _renamed(tree: exp.Expr, named: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return `renamed_columns` of a query, with '' for what is computed; `named` are those of the queries of WITH."""
    from sqlglot import exp

    with_clause = tree.args.get("with_") or tree.args.get("with")
    for table in with_clause.expressions if with_clause else ():
        named = {**named, table.alias.lower(): {} if table.args["alias"].columns else _renamed(table.this, named)}
    if isinstance(tree, exp.SetOperation | exp.Subquery):
        return _renamed(tree.this, named)
    if not isinstance(tree, exp.Select) or "from" not in clauses_of(tree):
        return {}
    sources = [source_of(tree), *(join.this for join in tree.args.get("joins") or ())]
    inner = {
        source.alias_or_name.lower(): named.get(source.name.lower(), {})
        if source.key == "table"
        else _renamed(source.this, named)
        for source in sources
    }
    only = next(iter(inner)) if len(sources) == 1 else ""
    found: dict[str, str] = {}
    for value in tree.expressions:
        column, name = value.unalias(), value.alias_or_name.lower()
        of = inner.get((column.table.lower() if column.key == "column" else "") or only)
        if value.is_star:
            found |= of or {}
        else:
            found[name] = "" if of is None or column.key != "column" else of.get(column.name.lower(), column.name.lower())
    return found


@lru_cache(maxsize=64)
def judges_rows(statement: str) -> bool:
    """Return True if a SELECT looks at one row at a time: `SELECT … FROM dataframe WHERE …`, or such on that.

    Args:
        statement: As SQLite gets it.
    """
    try:
        trees = parsed(statement, "sqlite")
    except ValueError:
        return False
    return len(trees) == 1 and _is_by_row(trees[0])


def _is_by_row(tree: exp.Expr) -> bool:
    clauses = clauses_of(tree)
    if tree.key != "select" or not {"expressions", "from"} <= clauses <= {"expressions", "from", "where", "limit", "offset"}:
        return False
    source = source_of(tree)
    is_table = source.key == "table" and clauses_of(source) == {"this"} and source.this.key == "identifier"
    is_plain = _is_by_row(source.this) if source.key == "subquery" else is_table
    parts = [*tree.expressions, *(part for name in ("where", "limit", "offset") if (part := tree.args.get(name)))]
    return is_plain and not any(several_rows(part) for part in parts)


def several_rows(tree: exp.Expr) -> str | None:
    """Return what in an expression looks at other rows than one; None when nothing does."""
    from sqlglot import exp

    for node in tree.walk():
        if isinstance(node, exp.Query | exp.Window | exp.AggFunc | exp.Values) or node.args.get("field") is not None:
            return "SELECT" if isinstance(node, exp.Query) else node.key.upper()
    return None


def source_of(tree: exp.Expr) -> exp.Expr:
    """Return what a SELECT takes its rows from, joins apart."""
    source: exp.Expr = (tree.args.get("from_") or tree.args["from"]).this
    return source


def clauses_of(tree: exp.Expr) -> set[str]:
    """Return which parts a node has."""
    return {name.rstrip("_") for name, value in tree.args.items() if value}


def parsed(text: str, dialect: str) -> list[exp.Expr]:
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


def _written(query: str, engine: str) -> list[exp.Expr]:
    """Return the statements of a query as the user wrote it, for one of our engines.

    Raises:
        ValueError: It does not parse.
    """
    return parsed(translated(query) if engine == "sqlite" else query, engine)
