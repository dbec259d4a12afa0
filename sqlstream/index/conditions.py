"""Which queries judge each row by itself, and so can filter a table of which only a part is here. Pure: text in, text out."""

from __future__ import annotations

from sqlstream.errors import QueryError
from sqlstream.index.dialect import bare, has_word, shortened, words
from sqlstream.index.models import VIEWS

_NOT_BY_ROW = ("select", "with", "group", "having", "order", "limit", "offset", "union", "intersect", "except", "over", "join")


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
    conditions = [] if query is None else [_condition(bare(query), query)]
    conditions += [] if where is None else [bare(where)]
    for condition in conditions:
        for word in _NOT_BY_ROW:
            if condition is not None and has_word(condition, word):
                raise _refused(query or where or "", f"it has {word.upper()}")
    present = [condition for condition in conditions if condition is not None]
    return " AND ".join(f"({condition})" for condition in present) if present else None


def _condition(text: str, query: str) -> str | None:
    tokens = list(words(text))
    begin = [token[0].lower().strip('"`[]') for token in tokens[:4]]
    if begin[:3] != ["select", "*", "from"] or begin[3:] not in ([name] for name in VIEWS):
        raise _refused(query, "it does not begin with SELECT * FROM dataframe")
    if len(tokens) == 4:
        return None
    if tokens[4][0].lower() != "where":
        raise _refused(query, f"{tokens[4][0]!r} follows the table")
    return text[tokens[4].end() :].strip()


def _refused(query: str, why: str) -> QueryError:
    return QueryError(
        f"the query {shortened(query)!r} cannot filter a lazy index, of which only a part is here: {why}. Give SELECT * FROM "
        "dataframe WHERE …, which judges each row by itself, or leave lazy_index_chunk_size out",
        query=query,
    )
