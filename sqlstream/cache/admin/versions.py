"""Entries of another version than a listing names: they are dropped before they are taken for the object."""

from __future__ import annotations

from collections.abc import Iterable, Set

from sqlstream.cache.directory import CacheDirectory
from sqlstream.cache.ledger.ledger import LedgerTransaction, positions
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.recovery import recover
from sqlstream.storage.base.etags import same_version

_READY = (
    "SELECT entry.key, size, etag FROM json_each(?) CROSS JOIN entry ON entry.key = substr(?, value, 16) WHERE +state = 'ready'"
)


def drop_other_versions(directory: CacheDirectory, refs: Iterable[ObjectRef]) -> Set[bytes]:
    """Remove entries whose size or ETag is not the one that a listing names, so that they are fetched again.

    A key holds no version of an object, so that a listed one and one that is named in a table are one entry.

    Args:
        directory: The cache.
        refs: Objects that are about to be acquired; only those that a listing named are looked at.

    Returns:
        The keys of entries that stay, since others use them.
    """
    listed = {ref.key: ref for ref in refs if ref.is_listed}
    if not listed:
        return frozenset()
    found = directory.ledger.database.read(_READY, (positions(len(listed)), b"".join(listed)))
    other = [key for key, size_bytes, etag in found if _differs(listed[key], size_bytes, etag)]

    def remove(tx: LedgerTransaction) -> set[bytes]:
        rows = [row for row in tx.find(other).values() if row.is_ready]
        pinned = tx.pinned()  # by us, too: another dataset of this process may use it
        free = [row for row in rows if row.key not in pinned]
        removed = {row.key for row in recover.remove(tx, directory.disk, free)}
        return {row.key for row in rows} - removed

    if not other:
        return frozenset()
    directory.kept.let_go()
    return directory.owner.run(remove)


def _differs(ref: ObjectRef, size_bytes: int, etag: str | None) -> bool:
    return (ref.size_bytes is not None and ref.size_bytes != size_bytes) or not same_version(ref.etag, etag)
