"""Who wrote the rows of an index: its user, or somewhere else. By row, since one index may have rows of both."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sqlstream.storage.base.access import OWN_ROWS, Origin, origin_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who wrote the tables of a source, as its plan knows it; an index file has their URLs only."""

    tables: tuple[Origin, ...]
    """Of each table, in the order of the index's sources."""
    places: frozenset[str] = frozenset()
    """Hosts and buckets that the user named as the source, or in a list of the user's own (`credentials.place_of`)."""


Sources = list[tuple[str, int]]
"""URL and first row of each table of an index; none where rows are computed from those of all tables."""


class Origins:
    """Who wrote which rows of an index.

    Args:
        read: Gives its tables.
        provenance: Who wrote them, and maybe more that are not indexed; None: what their URLs tell.
        src: What the user named, as the index has it.
    """

    def __init__(self, read: Callable[[], Sources], provenance: Provenance | None, src: str) -> None:
        self._read, self._src = read, src
        sources = read()
        if provenance is None:
            named = [url for url, _ in sources] or src.split(" + ")
            provenance = Provenance(tables=tuple(map(origin_of_source, named)))
        self.places = provenance.places
        """Hosts and buckets that the user named."""
        self._starts: list[int] = []
        self._runs: list[Origin] = []
        for (_, start), origin in zip(sources, provenance.tables, strict=False):
            if not self._runs or self._runs[-1] != origin:
                self._starts.append(start)
                self._runs.append(origin)
        if not self._runs:
            self._starts, self._runs = [0], [least_trusted(provenance.tables)]
        self.are_own = not any(origin.is_foreign for origin in self._runs)
        """Whether the user wrote all rows."""

    def of(self, row_id: int) -> Origin:
        """Return who wrote a row."""
        return self._runs[bisect_right(self._starts, row_id) - 1]

    def table_of(self, row_id: int) -> str:
        """Return the table that a row comes from, for messages: its URL without credentials; of computed rows the source."""
        return next((url for url, first_row in reversed(self._read()) if first_row <= row_id), self._src)


def least_trusted(tables: Sequence[Origin]) -> Origin:
    """Return who counts as the writer of what is computed from several tables: a stranger if one of them is foreign."""
    foreign = [origin for origin in tables if origin.is_foreign]
    return Origin(is_foreign=True, is_private=all(origin.is_private for origin in foreign)) if foreign else OWN_ROWS


def origin_of_source(url: str) -> Origin:
    """Return who wrote a source, by its stored URL; databases in files of this machine are the user's own."""
    return OWN_ROWS if is_local_database(url) else origin_at(url)


def is_local_database(url: str) -> bool:
    """Return whether the URL of a database names a file of this machine, or memory.

    Not DuckDB's URLs of services (`md:`), nor drivers of SQLite that speak to a server; a server on this machine may hold
    anyone's rows.

    Example:
        >>> [is_local_database(url) for url in ("sqlite:///a.db", "duckdb:///md:a", "postgresql:///a", "sqlite+libsql://h")]
        [True, False, False, False]
    """
    dialect, _, rest = url.partition("://")
    if not rest.startswith("/") and rest:
        return False
    path = rest.partition("?")[0]
    if dialect.lower() in ("sqlite", "sqlite+pysqlite", "sqlite+aiosqlite"):
        return True
    return dialect.lower() in ("duckdb", "duckdb+duckdb_engine") and ":" not in path.replace("/:memory:", "")
