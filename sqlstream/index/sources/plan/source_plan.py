"""What will be read of a source, before any of it is."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.index.sources.places.directory import LAYOUT
from sqlstream.index.sources.plan.parts import DirectoryPart, SourcePart, innermost
from sqlstream.index.types.models import fingerprint
from sqlstream.index.types.origins import Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedSource:
    """A table whose columns the rows of the source get."""

    name: str
    """As the user calls it."""
    src: str
    """The table, without credentials."""
    parts: tuple[SourcePart, ...]
    base_url: str | None
    """Where relative paths in its columns start, which are made absolute; None: where those of the source do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """What will be read."""

    src: str
    """As the user gave it, without credentials."""
    base_url: str
    """Where relative paths in the rows start; credentials included."""
    key_column: str
    parts: tuple[SourcePart, ...]
    paths_base_url: str
    """Where paths start once the index has them: that of a local source, if there are several. Their paths are absolute by
    then, and below a remote base an absolute one would be taken for a key of its store."""
    provenance: Provenance
    """Who wrote each of `all_parts`, and which places the user named."""

    has_database: bool = False
    """True: `sql_query` is run there, and not on the index."""

    has_versions: bool = True
    """False with tables in memory and databases: other content there is another source, not a new version of the same."""

    starts_at_tables: bool = False
    """Relative paths of remote tables that a local list names start at these tables, not at the list."""

    joins: tuple[JoinedSource, ...] = ()
    """Tables that are joined, in their order."""

    @property
    def joined_parts(self) -> tuple[SourcePart, ...]:
        """The parts of the tables that are joined."""
        return tuple(part for join in self.joins for part in join.parts)

    @property
    def all_parts(self) -> tuple[SourcePart, ...]:
        """All that is read: first the parts of joined tables, then the source's."""
        return (*self.joined_parts, *self.parts)

    @property
    def layout(self) -> int | None:
        """Version of the columns that directories have (`directory.LAYOUT`); None: there is no directory."""
        return LAYOUT if any(isinstance(innermost(part), DirectoryPart) for part in self.parts) else None

    def digests(self) -> list[str]:
        """Return for each of `all_parts` a digest of what it is and its version."""
        return [fingerprint({"part": part.identity()}) for part in self.all_parts]
