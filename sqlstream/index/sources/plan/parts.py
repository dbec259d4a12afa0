"""The parts of a source: what is read one after the other, each with its version and its way to a table."""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from sqlstream.config import DamagedShards, MissingShards
from sqlstream.errors import DamagedShardError, SchemaError, SourceError
from sqlstream.index.sources.base.access import local_copy
from sqlstream.index.sources.base.base import PLAIN, Reading, TableFile
from sqlstream.index.sources.base.byte_source import LocalBytes
from sqlstream.index.sources.base.derived import DerivedTable, below
from sqlstream.index.sources.formats import by_extension
from sqlstream.index.sources.formats.by_extension import open_table
from sqlstream.index.sources.places import database, folder
from sqlstream.index.sources.places.database import DatabaseTable
from sqlstream.index.sources.places.directory import DirectoryTable
from sqlstream.index.sources.places.listing import Listing
from sqlstream.index.sources.places.memory import MemoryTable, SpooledTable
from sqlstream.index.sources.shards.layout import CURE_OF_COPY, Scratch, ShardLayout
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.types.models import SourceFile, fingerprint
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.sample_types import DataSampleType
from sqlstream.storage.base import urls
from sqlstream.storage.base.checksum import is_content_hash
from sqlstream.storage.base.identity import object_name
from sqlstream.storage.base.protocols import RemoteReader

Temporary = Callable[[str], Path]
"""Gives a new path for a temporary file of this purpose; what is left there is removed after the build."""


class SourcePart(Protocol):
    """One table of a source."""

    @property
    def source(self) -> SourceFile:
        """What it is, with its version."""
        ...

    def identity(self) -> object:
        """Return what a fingerprint must tell apart (JSON)."""
        ...

    def open(self, temporary: Temporary, remote: RemoteReader) -> AbstractContextManager[TableFile]:
        """Give the table, on the local disk, for the time of the context."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePart:
    """A table file."""

    source: SourceFile
    reading: Reading = PLAIN

    def identity(self) -> object:
        """Return URL and version (without one, a digest of the URL with its query), and how it is read.

        An ETag that is no hash of the content names it only together with the whole URL.
        """
        file = self.source
        shown, name = urls.redact(file.url), object_name(file.url)
        version: list[object] = [shown, file.size_bytes, file.etag or file.content or fingerprint({"url": name})]
        if name != shown and not is_content_hash(file.etag) and file.etag is not None:
            version.append({"name": fingerprint({"url": name})})
        if file.etag is not None and file.content:
            version.append({"content": file.content})
        return version if self.reading == PLAIN else [*version, asdict(self.reading)]

    @contextlib.contextmanager
    def open(self, temporary: Temporary, remote: RemoteReader) -> Iterator[TableFile]:
        """Read it in place, or download it."""
        with local_copy(self.source, temporary("download"), remote) as path:
            yield open_table(LocalBytes(path), self.source.url, self.reading)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataPart:
    """A metadata file of a folder."""

    file: FilePart
    root: str
    """The folder, with a slash at its end."""
    key_column: str

    @property
    def source(self) -> SourceFile:
        """The metadata file."""
        return self.file.source

    def identity(self) -> object:
        """Return its version."""
        return {"metadata": self.file.identity()}

    @contextlib.contextmanager
    def open(self, temporary: Temporary, remote: RemoteReader) -> Iterator[TableFile]:
        """Read it, paths relative to the root."""
        place = posixpath.dirname(self.source.url.removeprefix(self.root))
        with self.file.open(temporary, remote) as table:
            yield folder.with_paths(table, place and place + "/", self.key_column, urls.redact(self.source.url))


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryPart:
    """A directory of samples."""

    listing: Listing
    kind: DataSampleType
    version: tuple[str, int]
    """Digest of its listing, number of files."""
    label_column: str | None = None

    @property
    def source(self) -> SourceFile:
        """The directory."""
        return SourceFile(url=self.listing.directory, size_bytes=None, etag=self.version[0])

    def identity(self) -> object:
        """Return its version."""
        return {
            "directory": urls.redact(self.listing.directory),
            "version": list(self.version),
            "kind": self.kind,
            "label": self.label_column,
        }

    @contextlib.contextmanager
    def open(self, temporary: Temporary, remote: RemoteReader) -> Iterator[TableFile]:  # noqa: ARG002 - the listing has it
        """List it, group and sort its files."""
        table = DirectoryTable(self.listing, self.kind, temporary("listing"), self.label_column)
        try:
            table.read(self.version)
            yield table
        finally:
            table.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPart:
    """A table of the user's program."""

    table: MemoryTable | SpooledTable
    digest: str

    @property
    def source(self) -> SourceFile:
        """Its content, by digest."""
        return SourceFile(url="memory", size_bytes=None, etag=self.digest)

    def identity(self) -> object:
        """Return the digest of its content."""
        return {"memory": self.digest}

    @contextlib.contextmanager
    def open(self, temporary: Temporary, remote: RemoteReader) -> Iterator[TableFile]:  # noqa: ARG002 - it is here
        """Give it."""
        yield self.table


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabasePart:
    """The result of a query in a database."""

    url: str
    query: str
    version: str | None
    """As the user gave it: a database names none."""

    @property
    def source(self) -> SourceFile:
        """The database."""
        return SourceFile(url=self.url, size_bytes=None, etag=self.version)

    def identity(self) -> object:
        """Return database, query and version."""
        return {"database": database.identity(self.url), "query": self.query, "version": self.version}

    @contextlib.contextmanager
    def open(self, temporary: Temporary, remote: RemoteReader) -> Iterator[TableFile]:  # noqa: ARG002 - drivers read
        """Run the query, and keep its result on disk meanwhile."""
        spool = temporary("result")
        try:
            yield DatabaseTable(self.url, self.query, spool)
        finally:
            spool.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPart:
    """One shard."""

    source: SourceFile
    layout: ShardLayout
    damaged: DamagedShards = DamagedShards.RAISE
    """What becomes of its samples if it is damaged."""
    missing: MissingShards = MissingShards.RAISE
    """What becomes of it if it is not there."""

    def identity(self) -> object:
        """Return its version, what it is read as, and what is left out of it."""
        rule: dict[str, str] = {} if self.damaged is DamagedShards.RAISE else {"damaged": self.damaged}
        if self.missing.leaves_out:
            rule["missing"] = self.missing
        return {"shard": FilePart(source=self.source).identity(), "layout": self.layout.identity(), **rule}

    def samples(self, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return its samples, and its damage, if it has some: that of one that was not there is that it has none.

        Raises:
            DamagedShardError: It is damaged, and that is to be raised.
            SchemaError: A column has the name of a field that its samples get.
            SourceError: See `ShardLayout.samples`.
        """
        if self.source.is_missing:
            return ShardSamples.none(missing_shard(self.source.url))
        is_remote = urls.is_remote(self.source.url)
        try:
            found = self.layout.samples(self.source, remote, scratch)
        except DamagedShardError as error:
            found = ShardSamples.none(error)
        except SourceError as error:
            if is_remote and scratch.here is not None and type(error) is SourceError:
                # A bit that a disk has lost may make a member one that is not read.
                raise SourceError(f"{error}{CURE_OF_COPY}", **error.context) from error
            raise
        if taken := found.taken_columns:
            raise SchemaError(
                f"{urls.redact(self.source.url)} has a column {taken[0]!r}, a field that every sample of a shard gets, whose "
                "values would be lost: write the shard again with another name for it"
            )
        if (damage := found.damage) is None:
            return found
        if is_remote and (scratch.here is not None or scratch.files is not None):
            damage = DamagedShardError(f"{damage}{CURE_OF_COPY}", **damage.context)
            damage.__cause__ = found.damage
        if self.damaged is DamagedShards.RAISE:
            raise damage
        return replace(found, damage=damage) if self.damaged is DamagedShards.UNTIL_DAMAGE else ShardSamples.none(damage)

    @contextlib.contextmanager
    def open(self, temporary: Temporary, remote: RemoteReader) -> Iterator[ShardSamples]:
        """Read its table."""
        yield self.samples(remote, Scratch(temporary))


def missing_shard(url: str) -> DamagedShardError:
    """Return what is wrong with a shard that is not there, and is left out."""
    return DamagedShardError(f"{urls.redact(url)} is not there, and left out (missing_shards)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedPart:
    """A part whose rows get constants, and whose paths are made absolute."""

    part: SourcePart
    constants: Mapping[str, str | int | None] = field(default_factory=dict)
    base_url: str | None = None
    """Where relative paths in `path_columns` start; None: they stay relative."""
    path_columns: tuple[str, ...] = ()
    keeps_rooted: bool = False
    """Leave a path that begins with a slash as it is, also where `base_url` is remote."""

    @property
    def source(self) -> SourceFile:
        """That of the part."""
        return self.part.source

    def identity(self) -> object:
        """Return the part's, and what is added."""
        return [self.part.identity(), dict(self.constants), self.base_url and urls.redact(self.base_url)]

    @contextlib.contextmanager
    def open(self, temporary: Temporary, remote: RemoteReader) -> Iterator[TableFile]:
        """Open the part and add to it."""
        with self.part.open(temporary, remote) as table:
            yield self.derived(table)

    def derived(self, table: TableFile) -> TableFile:
        """Return a table with what is added."""
        constants: dict[str, Any] = {name: _scalar(value) for name, value in self.constants.items()}
        rewrites = {}
        if self.base_url is not None:
            rewrites = dict.fromkeys(self.path_columns, below(self.base_url, keeps_rooted=self.keeps_rooted))
        return DerivedTable(table, constants, rewrites, says_place=True)


def innermost(part: SourcePart) -> SourcePart:
    """Return what a part reads, without what is added to it."""
    while isinstance(part, DerivedPart):
        part = part.part
    return part


def over(part: SourcePart, table: TableFile) -> TableFile:
    """Return a table that a part reads, or a piece of it, with all that is added to the part."""
    return part.derived(over(part.part, table)) if isinstance(part, DerivedPart) else table


def parquet_part(part: SourcePart) -> FilePart | DerivedPart | None:
    """Return the part if it is one Parquet file, read as it is or with columns added; else None."""
    inner = innermost(part)
    is_parquet = isinstance(inner, FilePart) and by_extension.format_of(inner.source.url) == ".parquet"
    return part if is_parquet and isinstance(part, FilePart | DerivedPart) else None


def _scalar(value: Any) -> Any:
    load_pandas()
    return pa.scalar(value)  # its stubs know no unions
