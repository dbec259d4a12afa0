"""Puts bytes that this process has made into the cache: a download that comes from memory.

So they obey every rule of one: their exact size is counted before the first byte, they are written to part/, renamed when
whole, and become ready with the next transaction; whatever dies in between, nothing leaks. Nothing here waits: what finds no
room now is not stored.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from sqlstream.cache.acquire.acquirer import Acquirer
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.refs import KEY_BYTES, ObjectRef
from sqlstream.cache.recovery import recover
from sqlstream.config import StorageOptions
from sqlstream.errors import CacheDiskError, CacheError
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchRequest, Sink


@dataclass(frozen=True, slots=True, kw_only=True)
class PutItem:
    """Bytes, and where they go."""

    ref: ObjectRef
    """Its `size_bytes` is the length of `data`."""
    data: bytes


class Putter:
    """Stores bytes under keys, many in one transaction.

    Args:
        acquirer: Of the cache directory.
        disk: Its files.
    """

    def __init__(self, acquirer: Acquirer, disk: Disk) -> None:
        self._acquirer = acquirer
        self._disk = disk
        self._writer = _Writer()

    def put(self, items: Sequence[PutItem]) -> str | None:
        """Store those for which there is room; what is here already, or on its way, stays as it is.

        Args:
            items: At most a window's worth: each of them keeps a file open until the next transaction.

        Returns:
            Why some were not stored, None if all are here. They are counted as `unstored` in the statistics.
        """
        self._writer.here.bodies = {item.ref.key: item.data for item in items}
        try:
            holds = self._acquirer.acquire([[item.ref] for item in items], self._writer)
            for hold in holds:
                self._acquirer.release(hold)
            num_unstored = len(items) - sum(hold.error is None for hold in holds)
            if num_unstored:
                self._acquirer.owner.run(lambda tx: tx.count({"unstored": num_unstored}))
        except CacheError as error:
            return str(error)
        finally:
            self._writer.here.bodies = {}
        if len(holds) < len(items):
            need_bytes = self._disk.unit.charge(len(items[len(holds)].data))
            return f"no room for {need_bytes} bytes now, the rest of the cache is in use or waited for: raise cache_limit"
        return next((str(hold.error) for hold in holds if hold.error is not None), None)

    def discard(self, ref: ObjectRef) -> bool:
        """Remove an entry whose bytes proved damaged; False if others use it, or the cache fails, and it stays."""
        owner = self._acquirer.owner

        def remove(tx: LedgerTransaction) -> bool:
            rows = tx.find([ref.key]).values()
            free = [row for row in rows if row.is_ready and not tx.pinned_by_others(row.key, owner.id)]
            return len(recover.remove(tx, self._disk, free)) == len(rows)

        try:
            return owner.run(remove)
        except CacheError:
            return False


class _ThreadItem(threading.local):
    """What a thread stores now: `submit` is called in the thread that stores."""

    def __init__(self) -> None:
        self.bodies: dict[bytes, bytes] = {}


class _Writer(Fetcher):
    """Stands in for a Fetcher: writes what is in memory, in the calling thread, before `submit` returns; no helper process."""

    def __init__(self) -> None:
        super().__init__(StorageOptions())
        self.here = _ThreadItem()

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Write the bodies, each into its part."""
        sink([self._written(request) for request in requests])

    def cancel(self, tickets: Sequence[str]) -> None:
        """Nothing is ever under way."""

    def _written(self, request: FetchRequest) -> FetchDone:
        data = self.here.bodies[bytes.fromhex(request.ticket[: 2 * KEY_BYTES])]  # a ticket is a part's name: key, dot, uuid
        try:
            num_written = 0
            while num_written < len(data):
                num_written += os.pwrite(request.fd, memoryview(data)[num_written:], num_written)
        except OSError as failure:
            text = f"cannot write {request.url} to the cache: {failure.strerror}; free space on that disk"
            error = CacheDiskError(text, errno=failure.errno)
            return FetchDone(ticket=request.ticket, error=error)
        return FetchDone(ticket=request.ticket, size_bytes=len(data))
