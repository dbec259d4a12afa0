"""Uncompressed TAR shards as chunks of a lazy index, one shard each: the second kind of chunk, for tests alone.

It reads what the fixtures hold, ustar headers of plain files, and knows no damage: no reader for anybody's archives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from sqlstream.index.build.chunks import ChunkPlace, ChunkStore
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.byte_source import ByteSource, Span, bytes_of
from sqlstream.index.types.models import SourceFile
from sqlstream.order import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader

_TYPES: dict[str, pa.DataType] = {"key": pa.string(), "txt": pa.binary(), "cls": pa.binary()}
SCHEMA = pa.schema(_TYPES)
_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A file in a shard."""

    name: str
    start: int
    stop: int


def members_of(shard: ByteSource) -> Iterator[Member]:
    """Yield the files of a shard, by its headers alone."""
    offset = 0
    while (header := shard.read_at(offset, _BLOCK)).strip(b"\0"):
        prefix, name = (header[start : start + size].rstrip(b"\0").decode() for start, size in ((345, 155), (0, 100)))
        start, size = offset + _BLOCK, int(header[124:136].rstrip(b"\0 "), 8)
        yield Member(name=f"{prefix}/{name}" if prefix else name, start=start, stop=start + size)
        offset = start + -(-size // _BLOCK) * _BLOCK


Sample = dict[str, Span]
"""Where the parts of a sample lie, by extension."""


def samples_of(members: Sequence[Member]) -> dict[str, Sample]:
    """Return the samples of a shard, by key: neighbours of one name are one."""
    found: dict[str, Sample] = {}
    for member in members:
        key, _, extension = member.name.rpartition(".")
        found.setdefault(key, {})[extension] = (member.start, member.stop)
    return found


class TarChunks:
    """Shards as chunks.

    Args:
        shards: The files.
        samples: Of each shard.
        is_whole: A chunk is fetched as the whole shard; False: as its members.
    """

    def __init__(self, shards: Sequence[SourceFile], samples: Sequence[dict[str, Sample]], *, is_whole: bool) -> None:
        self._shards, self._samples, self._is_whole = shards, samples, is_whole

    def bounds(self, store: ChunkStore) -> Int64Array:
        """Count the samples."""
        del store  # what it would write down is here
        return np.cumsum([0, *map(len, self._samples)], dtype=np.int64)

    def counts(self, store: ChunkStore) -> None:
        """All are counted."""

    def look_up(self, numbers: Sequence[int], store: ChunkStore, remote: RemoteReader, *, in_ranges: bool) -> None:
        """All is known."""

    def place_of(self, number: int, store: ChunkStore) -> ChunkPlace:
        """Name the members, or the shard; nothing of a local one."""
        del store
        shard = self._shards[number]
        if not urls.is_remote(shard.url):
            return ChunkPlace(file=shard, spans=())
        assert shard.size_bytes is not None
        spans = [(0, shard.size_bytes)]
        if not self._is_whole:
            spans = [span for sample in self._samples[number].values() for span in sample.values()]
        return ChunkPlace(file=shard, spans=tuple(spans), version=shard.etag or "")

    def read(self, number: int, files: Sequence[Path], store: ChunkStore) -> pa.RecordBatch:
        """Cut the samples out."""
        with self.place_of(number, store).opened(files) as shard:
            rows = [
                {"key": key, "txt": _part(shard, sample["txt"]), "cls": _part(shard, sample["cls"])}
                for key, sample in self._samples[number].items()
            ]
        return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def _part(shard: ByteSource, span: Span) -> bytes:
    return shard.read_at(span[0], span[1] - span[0])


def open_shards(
    path: Path, shards: Sequence[SourceFile], remote: RemoteReader, *, is_whole: bool, condition: str | None = None
) -> LazyIndex:
    """Return the lazy index of shards, whose file is written at `path`."""
    samples = [samples_of([*members_of(bytes_of(shard, remote))]) for shard in shards]
    with contextlib.closing(IndexWriter(path, "key")) as writer:
        for shard, of_shard in zip(shards, samples, strict=True):
            writer.begin_source(shard, SCHEMA)
            writer.count_elsewhere(len(of_shard))
        own = {"fingerprint": path.stem, "lineage": path.stem, "src": "shards", "base_url": "", "key_column": "key"}
        writer.finish({**own, "is_lazy": 1})
    return LazyIndex(path, chunks=TarChunks(shards, samples, is_whole=is_whole), condition=condition)
