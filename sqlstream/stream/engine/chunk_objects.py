"""Chunks of source files as objects of the cache: named by their file, its version, and their bytes in it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sqlstream.cache import Cache
from sqlstream.cache.session import ObjectRef
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
        return [
            ObjectRef.part_of(
                place.file.url,
                span,
                place.file.size_bytes,
                etag=place.file.etag,
                version=place.version,
                dataset=self._dataset,
                identity=self._cache.identity,
                access=place.file.access,
            )
            for span in place.spans
        ]

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
