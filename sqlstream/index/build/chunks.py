"""Chunks of a lazy index, whatever they are made of: where their bytes are, and the rows in them."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from sqlstream.errors import ObjectChangedError, SourceChangedError
from sqlstream.index.sources.base.access import indexed_file, named_errors
from sqlstream.index.sources.base.byte_source import ByteSource, LocalBytes, Pieces, Span, bytes_of
from sqlstream.index.types.models import Column, SourceFile
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, Unpack

KEPT_BYTES = 64 << 20
"""Rows of chunks that a process keeps in memory, those of two windows in any case: some 500 bytes a sample of TAR
shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """Where the bytes of a chunk are."""

    file: SourceFile
    spans: tuple[Span, ...]
    """What to bring of it; none of a local file, which is read in place, nor where it has nothing that is wanted."""
    version: str = ""
    """What tells its bytes from those of another version: that of the server, else a hash of how the file ends."""
    ending: bytes = field(default=b"", repr=False)
    """How the file ends, where its server names no versions; else empty."""
    is_shard: bool = False
    """It is all of a shard, whose members are not known yet."""
    unpack: Unpack | None = None
    """How all that the file holds is made of it, which is compressed as a whole: that is fetched in place of spans; None: it is
    not."""

    def check_unchanged(self, remote: RemoteReader) -> None:
        """Compare the file, of which bytes have come, with what was indexed, where its server names no versions.

        Its end is read again: that of a Parquet file holds places, sizes and (of most writers) the extremes of all columns.

        Raises:
            SourceChangedError: It is another version.
            StorageError: It cannot be read.
        """
        if self.ending:
            with named_errors(self.file.url):
                if not _ends_in(self.file, self.ending, remote):
                    raise SourceChangedError(
                        f"{urls.redact(self.file.url)} changed since its footer was read: open the dataset again"
                    )

    @contextlib.contextmanager
    def opened(self, files: Sequence[Path]) -> Iterator[ByteSource]:
        """Give the file, of which the spans can be read, or all of a local one.

        Args:
            files: The bytes of each span.

        Raises:
            SourceChangedError: A local file is not what was indexed.
        """
        if urls.is_remote(self.file.url):
            assert self.file.size_bytes is not None
            with contextlib.closing(Pieces(self.spans, files, self.file.size_bytes)) as pieces:
                yield pieces
            return
        if indexed_file(self.file.url) != self.file:
            raise SourceChangedError(f"{urls.redact(self.file.url)} changed since its footer was read: open the dataset again")
        yield LocalBytes(Path(self.file.url))


class Sized(Protocol):
    """What a process keeps in memory."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        ...


def drop_oldest(kept: OrderedDict[int, Any], *, num_least: int, max_bytes: int = KEPT_BYTES) -> None:
    """Drop what was used longest ago, until the rest has a size; other threads may do the same.

    Args:
        kept: Values with a size (`Sized`), the one used last at the end.
        num_least: So many stay, whatever they have.
        max_bytes: The size.
    """
    if len(kept) <= num_least:
        return
    values: list[Sized] = [*kept.values()]
    excess = sum(value.nbytes for value in values) - max_bytes
    while excess > 0 and len(kept) > num_least:
        try:
            excess -= kept.popitem(last=False)[1].nbytes
        except KeyError:  # another thread has dropped it
            return


class ChunkStore(Protocol):
    """The file of a lazy index, in which its chunk source has tables of its own."""

    path: Path

    @property
    def columns(self) -> Sequence[Column]:
        """The columns of the index."""
        ...

    def stored(self, statement: str, parameters: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows that a statement finds in the file."""
        ...


class ChunkSource(Protocol):
    """The rows of a lazy index, before any filter: chunks numbered from 0, each read as a whole. Picklable."""

    def bounds(self, store: ChunkStore) -> Int64Array:
        """Return the first row of each chunk, and the end: [num_chunks + 1]. Where counts are not known: numbers with room."""
        ...

    def counts(self, store: ChunkStore) -> Int64Array | None:
        """Return how many rows each chunk has, -1 where that is not known yet: [num_chunks]; None: `bounds` says it."""
        ...

    def look_up(self, numbers: Sequence[int], store: ChunkStore, remote: RemoteReader, *, in_ranges: bool) -> None:
        """Learn what must be known of chunks before their places are asked for.

        Args:
            numbers: Of the chunks.
            store: The file of the index.
            remote: Asks for it.
            in_ranges: Also what says which rows they have: they will not be fetched.

        Raises:
            SourceError: A chunk is damaged.
            StorageError: It cannot be read.
        """
        ...

    def place_of(self, number: int, store: ChunkStore) -> ChunkPlace:
        """Return where the bytes of a chunk are."""
        ...

    def read(self, number: int, files: Sequence[Path], store: ChunkStore) -> pa.RecordBatch:
        """Return the rows of a chunk, with those columns of the index that its file has.

        Args:
            number: Of the chunk.
            files: The bytes of each span of its place.
            store: The file of the index.

        Raises:
            SourceError: They are not what was indexed.
        """
        ...


def _ends_in(file: SourceFile, ending: bytes, remote: RemoteReader) -> bool:
    if file.size_bytes is None or file.size_bytes < len(ending):
        return False
    try:
        return bytes_of(file, remote).read_at(file.size_bytes - len(ending), len(ending)) == ending
    except ObjectChangedError:
        return False
