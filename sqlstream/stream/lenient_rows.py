"""Rows of a lazy index of shards that goes on without those that do not come (`missing_shards`), or are damaged."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sqlstream.cache.session import CacheSession, Failure
from sqlstream.errors import CacheError, DamagedShardError, EmptySelectionError, StorageError
from sqlstream.index.build.lazy import ChunkRows
from sqlstream.index.build.lazy_shards.index import LazyShardIndex
from sqlstream.order import Int64Array
from sqlstream.storage.base import urls
from sqlstream.stream.engine.lazy_rows import LazyRows

logger = logging.getLogger(__name__)


class LenientRows(LazyRows):
    """The rows of a lazy index of which shards may be left out; the ledger has each of these among the failures."""

    _index: LazyShardIndex
    _left_out: StorageError | DamagedShardError | None = None
    """Why the last one is."""

    def count(self, chunks: Int64Array) -> None:
        """Read shards; those that an earlier epoch was without are not in memory as empty ones any more."""
        for chunk in self._index.to_count(chunks.tolist()):
            self._loaded.pop(chunk, None)
        super().count(chunks)

    def check_rows(self) -> None:
        """Raise the error of a shard if none has samples."""
        try:
            super().check_rows()
        except EmptySelectionError:
            if self._left_out is not None:
                raise self._left_out from None
            raise

    def _look_up(self, chunks: Sequence[int]) -> None:
        super()._look_up(chunks)
        self._note_left_out()

    def _read(self, chunk: int) -> ChunkRows:
        try:
            rows = super()._read(chunk)
        except StorageError as error:
            if not self._index.leave_out(chunk, error):
                raise
            rows = super()._read(chunk)
        self._note_left_out()
        return rows

    def _note_left_out(self) -> None:
        self._left_out = note_left_out(self._index, self._session) or self._left_out


def note_left_out(index: LazyShardIndex, session: CacheSession) -> StorageError | DamagedShardError | None:
    """Write down which shards are left out since this was done last, and return why the last one is; None: none is."""
    if not (said := index.take_said()):
        return None
    try:
        session.note_failures([Failure(url=urls.redact(str(error.context["url"])), error=str(error)) for error in said])
    except CacheError as problem:  # a run goes on without the report
        logger.warning("that shards are left out could not be written down: %s", problem)
    return said[-1]
