"""Shards as objects of the cache: how they are named, and how they come whole as they are indexed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.session import AnyHold, ObjectParts, ObjectRef
from sqlstream.errors import CacheFullError, FetchCancelledError
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.protocols import Unpack

logger = logging.getLogger(__name__)


def parts_of(file: SourceFile, dataset: int | None, identity: Identity | None) -> ObjectParts:
    """Return what names the objects of a shard.

    Args:
        file: The shard.
        dataset: Id of the dataset in the ledger.
        identity: What identifies objects beside their URL; None: nothing.
    """
    return ObjectParts(
        file.url,
        file.size_bytes,
        etag=file.etag,
        version=file.etag or file.content,
        dataset=dataset,
        identity=identity,
        access=file.access,
    )


class CachedShards:
    """Brings whole shards into the cache as they are indexed, where the first epoch finds them; `ShardFiles`.

    A shard that finds no room at once is read by ranges: nothing waits for room, since several threads hold a shard each.

    Args:
        cache: The cache.
        dataset: Id of the dataset in the ledger.
    """

    def __init__(self, cache: Cache, dataset: int | None) -> None:
        self._cache, self._dataset = cache, dataset
        self._has_told = False

    @contextlib.contextmanager
    def held(self, file: SourceFile, unpack: Unpack | None) -> Iterator[Path | None]:
        """Give the file of a shard, or of its content, which is pinned meanwhile; see `ShardFiles.held`."""
        session, ref = self._cache.session, self._ref(file, unpack)
        with contextlib.ExitStack() as stack:
            path: Path | None = None
            for hold in session.acquire([[ref]]):
                stack.callback(session.release, hold)
                settled = session.wait(hold)
                if settled is not hold:
                    stack.callback(session.release, settled)
                path = self._opened(settled, ref)
            if path is None and not self._has_told:
                self._has_told = True
                name = urls.redact(file.url)
                logger.info("%s has no room in the cache as it is indexed: it is read again for its content", name)
            yield path

    def discard(self, file: SourceFile, unpack: Unpack | None) -> None:
        """Remove a shard that is damaged from the cache, unless it is in use."""
        self._cache.session.discard(self._ref(file, unpack))

    def _ref(self, file: SourceFile, unpack: Unpack | None) -> ObjectRef:
        parts = parts_of(file, self._dataset, self._cache.identity)
        return parts.whole() if unpack is None else parts.unpacked(unpack)

    def _opened(self, hold: AnyHold, ref: ObjectRef) -> Path | None:
        """Return the file of a settled hold; None: it was given up."""
        if isinstance(hold.error, CacheFullError | FetchCancelledError):
            return None
        if hold.error is not None:
            raise hold.error
        return self._cache.path_of(ref, hold) if self._cache.session.open(hold) else None
