"""Who wrote the values of an index: its user, or somewhere else.

By row, since one index may have rows of both, and by column, since tables of both may be joined.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlstream.storage.base import urls
from sqlstream.storage.base.access import OWN, OWN_ROWS, Allowed, Origin, Rules, is_below, origin_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who wrote the tables of a source, as its plan knows it; an index file has their URLs only."""

    tables: tuple[Origin, ...]
    """Of each table, in the order of the index's sources."""
    places: frozenset[str] = frozenset()
    """Hosts and buckets that the user named as the source, or in a list of the user's own (`credentials.place_of`)."""


Sources = list[tuple[str, int]]
"""URL and first row of each table of an index, those that are joined first; none where rows are computed from all tables."""


class JoinedColumns(NamedTuple):
    """What one of the joined tables gives to the rows of an index."""

    name: str
    """As the user calls the table."""
    num_sources: int
    """Its files; those of all joined tables are the first sources of the index, in their order."""
    columns: tuple[str, ...]
    """As the index calls them."""

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> list[JoinedColumns]:
        """Return what an index file says of its joined tables."""
        return [cls(name, num, tuple(names)) for name, num, names in json.loads(meta.get("joined", "[]"))]


class Origins:
    """Who wrote which values of an index.

    Args:
        read: Gives its tables.
        provenance: Who wrote them, and maybe more that are not indexed; None: what their URLs tell.
        src: What the user named, as the index has it.
        joined: What joined tables give.
    """

    def __init__(
        self, read: Callable[[], Sources], provenance: Provenance | None, src: str, joined: Sequence[JoinedColumns] = ()
    ) -> None:
        sources = read()
        if provenance is None:
            named = [url for url, _ in sources] or src.split(" + ")
            provenance = Provenance(tables=tuple(map(origin_of_source, named)))
        self.places = provenance.places
        """Hosts and buckets that the user named."""
        self._starts: list[int] = []
        self._runs: list[Origin] = []
        self._joined: dict[str, _Writer] = {}
        self._num_joined = 0
        for _, num_sources, columns in joined:
            own = slice(self._num_joined, self._num_joined + num_sources)
            where = ", ".join(url for url, _ in sources[own])
            self._joined |= dict.fromkeys(columns, _Writer(least_trusted(provenance.tables[own]), where))
            self._num_joined += num_sources
        self._read_all, self._src = read, src
        for (_, start), origin in zip(sources[self._num_joined :], provenance.tables[self._num_joined :], strict=False):
            if not self._runs or self._runs[-1] != origin:
                self._starts.append(start)
                self._runs.append(origin)
        if not self._runs:
            self._starts, self._runs = [0], [least_trusted(provenance.tables)]
        self.are_own = not any(
            origin.is_foreign for origin in [*self._runs, *(writer.origin for writer in self._joined.values())]
        )
        """Whether the user wrote all values."""

    def of(self, row_id: int, column: str | None = None) -> Origin:
        """Return who wrote a value of a row.

        Args:
            row_id: The row.
            column: The column; None: the value may be made of any of the row's.
        """
        own = self._runs[bisect_right(self._starts, row_id) - 1]
        if not self._joined:
            return own
        if column is None:
            return least_trusted([own, *(writer.origin for writer in self._joined.values())])
        return own if (writer := self._joined.get(column)) is None else writer.origin

    def table_of(self, row_id: int, column: str | None = None) -> str:
        """Return the table that a value comes from, for messages: its URL without credentials; of computed rows the source."""
        own = next((url for url, first_row in reversed(self._read_all()[self._num_joined :]) if first_row <= row_id), self._src)
        if column is None:
            return ", ".join(dict.fromkeys([own, *(writer.where for writer in self._joined.values())]))
        return own if (writer := self._joined.get(column)) is None else writer.where


@dataclass(frozen=True, slots=True, kw_only=True)
class RowJudge:
    """What the rows of an index may name."""

    origins: Origins
    rules: Rules
    base_url: str
    """Where relative paths of rows start."""

    @property
    def allows_all(self) -> bool:
        """The user wrote every row, and credentials go to every host."""
        return self.origins.are_own and not self.rules.credential_hosts

    def url_of(self, written: str) -> str:
        """Return the URL that a row's text names, or the path.

        An absolute path below an allowed root is that file; below a remote index it would else be a key of its store.
        """
        roots = self.rules.allowed_roots
        return written if roots and any(is_below(written, root) for root in roots) else urls.join(self.base_url, written)

    def located(self, row_id: int, column: str | None, written: str) -> Allowed:
        """Return what a row's text names, and how it is read; see `judge`."""
        url, access = self.url_of(written), OWN
        if not self.allows_all:
            url, access = self.judge(row_id, column, url, written)
        return Allowed(url if urls.is_remote(url) else urls.local_name(url), access)

    def judge(self, row_id: int, column: str | None, url: str, written: str) -> Allowed:
        """Return what is read for a row's URL, and how.

        Args:
            row_id: The row.
            column: Whose value it is; None: it may be made of any of the row's.
            url: It.
            written: The row's own text.

        Raises:
            AccessDeniedError: The row may not name it.
        """
        origins = self.origins
        origin = origins.of(row_id, column)
        return self.rules.judge(url, origin, named_by=lambda: origins.table_of(row_id, column), written=written)


class _Writer(NamedTuple):
    origin: Origin
    where: str


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
