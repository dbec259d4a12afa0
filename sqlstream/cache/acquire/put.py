"""Puts bytes that this process has made into the cache: a download that comes from memory.

So they obey every rule of one: their exact size is counted before the first byte, they are written to part/, renamed when
whole, and become ready with the next transaction; whatever dies in between, nothing leaks. Nothing here waits: what finds no
room now is not stored.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlstream.cache.acquire.acquirer import Acquirer
from sqlstream.cache.acquire.outcomes import DownloadSource
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.refs import KEY_BYTES, ObjectRef
from sqlstream.cache.recovery import recover
from sqlstream.disk_room import cure_of
from sqlstream.errors import CacheDiskError, CacheError
from sqlstream.storage.base import urls
from sqlstream.storage.fetcher import FetchDone, FetchRequest, Sink


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
        owner: This process in its ledger.
        disk: Its files.
    """

    def __init__(self, acquirer: Acquirer, owner: Owner, disk: Disk) -> None:
        self._acquirer = acquirer
        self._owner = owner
        self._disk = disk

    def put(self, items: Sequence[PutItem]) -> str | None:
        """Store those for which there is room; what is here already, or on its way, stays as it is.

        Args:
            items: At most a window's worth: each of them keeps a file open until the next transaction.

        Returns:
            Why some were not stored, None if all are here. They are counted as `unstored` in the statistics.
        """
        memory = Memory({item.ref.key: item.data for item in items})
        try:
            holds = self._acquirer.acquire([[item.ref] for item in items], memory)
            for hold in holds:
                self._acquirer.release(hold)
            num_unstored = len(items) - sum(hold.error is None for hold in holds)
            if num_unstored:
                self._owner.run(lambda tx: tx.count({"unstored": num_unstored}))
        except CacheError as error:
            return str(error)
        finally:
            memory.bodies = {}  # downloads are kept until their rows are ready
        if len(holds) < len(items):
            need_bytes = self._disk.unit.charge(len(items[len(holds)].data))
            return f"no room for {need_bytes} bytes now, the rest of the cache is in use or waited for: raise cache_limit"
        return next((str(hold.error) for hold in holds if hold.error is not None), None)

    def discard(self, ref: ObjectRef) -> bool:
        """Remove an entry whose bytes proved damaged; False if others use it, or the cache fails, and it stays."""
        owner = self._owner

        def remove(tx: LedgerTransaction) -> bool:
            rows = tx.find([ref.key]).values()
            free = [row for row in rows if row.is_ready and not tx.pinned_by_others(row.key, owner.id)]
            return len(recover.remove(tx, self._disk, free)) == len(rows)

        try:
            return owner.run(remove)
        except CacheError:
            return False


class Memory:
    """Brings bytes that are in memory: writes them in the calling thread, before `submit` returns.

    Args:
        bodies: The bytes of each object, by its key.
        others: What brings objects that are not among them; None: there are none.
    """

    def __init__(self, bodies: Mapping[bytes, bytes], others: DownloadSource | None = None) -> None:
        self.bodies = bodies
        self._others = others

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Write the bodies, each into its part."""
        if others := [request for request in requests if _key_of(request) not in self.bodies]:
            assert self._others is not None, "nothing brings them"
            self._others.submit(others, sink)
        if made := [request for request in requests if _key_of(request) in self.bodies]:
            sink([self._written(request) for request in made])

    def grant(self, ticket: str, granted_bytes: int) -> None:
        """The sizes of bodies are known: none of them asks for more room."""
        if self._others is not None:
            self._others.grant(ticket, granted_bytes)

    def cancel(self, tickets: Sequence[str]) -> None:
        """No body is ever under way."""
        if self._others is not None:
            self._others.cancel(tickets)

    def share_node(self, num_sharing: int) -> None:
        """Bodies use no network."""
        if self._others is not None:
            self._others.share_node(num_sharing)

    def _written(self, request: FetchRequest) -> FetchDone:
        data = self.bodies[_key_of(request)]
        try:
            num_written = 0
            while num_written < len(data):
                num_written += os.pwrite(request.fd, memoryview(data)[num_written:], num_written)
        except OSError as failure:
            text = f"cannot write {urls.redact(request.url)} to the cache ({failure.strerror}): {cure_of(failure)}"
            error = CacheDiskError(text, errno=failure.errno)
            return FetchDone(ticket=request.ticket, error=error)
        return FetchDone(ticket=request.ticket, size_bytes=len(data))


def _key_of(request: FetchRequest) -> bytes:
    """Return the key of what is asked for: a ticket is the name of a part, or of a private file (key, dot, uuid)."""
    return bytes.fromhex(request.ticket[: 2 * KEY_BYTES])
