"""Chunks of source files as objects of the cache: named by their file, its version, and their bytes in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.session import ObjectParts, ObjectRef
from sqlstream.errors import FetchCancelledError, SourceChangedError
from sqlstream.index.build.chunks import ChunkPlace


class ChunkObjects:
    """Names chunks for the cache, and compares what has come with what was indexed.

    Args:
        cache: The cache of their bytes.
        dataset: Id of the dataset in the ledger.
    """

    def __init__(self, cache: Cache, dataset: int | None) -> None:
        self._cache = cache
        self._dataset = dataset

    def refs(self, place: ChunkPlace) -> list[ObjectRef]:
        """Return the objects of a chunk, one for each of its spans; none of a local file."""
        file = place.file
        parts = ObjectParts(
            file.url,
            file.size_bytes,
            etag=file.etag,
            version=place.version,
            dataset=self._dataset,
            identity=self._cache.identity,
            access=file.access,
        )
        if place.unpack is not None:
            return [parts.unpacked(place.unpack)]
        return [parts.whole()] if place.is_shard else [*map(parts.part, place.spans)]

    @contextlib.contextmanager
    def fetched(self, place: ChunkPlace, refs: Sequence[ObjectRef]) -> Iterator[list[Path]]:
        """Give the files of a chunk's objects, which are held meanwhile; waits for them.

        Raises:
            SourceChangedError: The chunk's file is another version.
            StorageError: It cannot be read.
        """
        if not refs:
            yield []
            return
        hold = self._cache.hold(refs)
        try:
            self.check_unchanged(place, refs)
            yield [self._cache.path_of(ref, hold) for ref in refs]
        finally:
            self._cache.session.release(hold)

    def check_unchanged(self, place: ChunkPlace, refs: Sequence[ObjectRef]) -> None:
        """Compare a chunk's file with what was indexed; the bytes of another version do not stay in the cache.

        Raises:
            SourceChangedError: It is another version.
            StorageError: It cannot be read.
        """
        try:
            while True:
                with contextlib.suppress(FetchCancelledError):  # an iteration of another thread has ended: asked again
                    return place.check_unchanged(self._cache.fetcher)
        except SourceChangedError:
            for ref in refs:
                self._cache.session.discard(ref)
            raise
