"""CRC-32 of cached files: noted as an object comes, compared once by each process that asks for it (`verify_reads="crc"`).

A file whose bytes changed at equal size is damage that nothing else sees. One without a checksum, for no user asked for it as
it came, is read at the first look, and what it has then is noted: changes are found from there on.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from sqlstream.cache.acquire.downloads import Downloads
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.files.disk import Disk, FileIdentity
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction, positions
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.recovery import recover
from sqlstream.cache.recovery.recover import VERIFY_BATCH, Finding
from sqlstream.config import word_of
from sqlstream.errors import CacheError
from sqlstream.process import fork, locks

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
"""Read at a time: as much as the processor's cache holds; Python lets other threads run meanwhile."""
_FIND = (
    "SELECT entry.key, ext, crc32, url, size FROM json_each(?) CROSS JOIN entry ON entry.key = substr(?, value, 16) "
    "WHERE state = 'ready'"
)


class VerifyReads(StrEnum):
    """Whether cached files are compared with their checksums."""

    NEVER = "never"
    CRC = "crc"
    """Each process compares each file before it gives it to a user for the first time."""


class Known(NamedTuple):
    """A whole object, and the checksum that is known of it."""

    key: bytes
    ext: str
    crc32: int | None
    url: str
    size_bytes: int


def check_verify_reads(value: VerifyReads | str) -> VerifyReads:
    """Return what `verify_reads` says.

    Raises:
        ConfigError: An unknown word.
    """
    return word_of("verify_reads", value, VerifyReads)


def crc32_of(fd: int) -> int:
    """Return the CRC-32 of all bytes of an open file."""
    crc = 0
    for crc in _running_crc32(fd):  # noqa: B007 - the last one
        pass
    return crc


def _running_crc32(fd: int) -> Iterator[int]:
    """Yield the CRC-32 of an open file up to each chunk."""
    crc = offset = 0
    while chunk := os.pread(fd, _CHUNK_BYTES, offset):
        crc = zlib.crc32(chunk, crc)
        offset += len(chunk)
        yield crc


class _Unwritten(NamedTuple):
    """A checksum that the ledger does not have yet."""

    crc32: int
    ext: str
    seen: FileIdentity | None
    """The file that it is of: by the time that it is written, another process may have evicted and fetched the object anew."""


class Checksums:
    """What this process has compared, and what it is to note.

    Args:
        disk: The directory's files.
        ledger: The directory's ledger.
        owner: This process in the ledger.
        downloads: What this process leads.
    """

    def __init__(self, disk: Disk, ledger: Ledger, owner: Owner, downloads: Downloads) -> None:
        self._disk = disk
        self._ledger = ledger
        self._owner = owner
        self._users: set[int] = set()
        self.after_fork_in_child()
        downloads.checksum_of = self.of_download
        owner.defer(self)
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Another process looks for itself."""
        self._compared: dict[bytes, int] = {}
        """When the file that was compared has last changed, by key: another process may have fetched the object anew since."""
        self._unwritten: dict[bytes, _Unwritten] = {}
        self._num_writing = 0

    def ask(self, user: int, *, verifies: bool) -> None:
        """Note whether one user (a dataset or cache object) of this process wants checksums."""
        (self._users.add if verifies else self._users.discard)(user)

    def of_download(self, key: bytes, fd: int) -> int | None:
        """Return the checksum of an object that has just come, None if no user of this process wants any."""
        if not self._users:
            return None
        self._compared[key] = os.fstat(fd).st_ctime_ns
        return crc32_of(fd)

    def find_wrong(self, refs: Sequence[ObjectRef]) -> list[Known]:
        """Compare the files of objects that are held, but those compared since they last changed; return the wrong ones."""
        keys = [ref.key for ref in refs if not self._is_compared(ref)]
        return [known for known in find(self._ledger, keys) if not self._agrees(known)] if keys else []

    def _is_compared(self, ref: ObjectRef) -> bool:
        compared_ns = self._compared.get(ref.key)
        found = None if compared_ns is None else self._disk.identity_of_data(ref.key, ref.ext)
        return found is not None and found.changed_ns == compared_ns

    def remove(self, wrong: Sequence[Known]) -> None:
        """Remove files that do not have their bytes, so that they are fetched again.

        Raises:
            CacheError: Another process uses one, or this one has a lock on it.
        """
        for known in wrong:
            self._owner.run(lambda tx, known=known: quarantine(tx, self._disk, known, self._owner.id))  # type: ignore[misc]

    def _agrees(self, known: Known) -> bool:
        seen = self._disk.identity_of_data(known.key, known.ext)
        found = read_crc32(self._disk, known)
        if found is not None and known.crc32 is None:
            self._unwritten[known.key] = _Unwritten(found, known.ext, seen)
        elif found != known.crc32:
            return False
        if seen is not None:
            self._compared[known.key] = seen.changed_ns
        return True

    # -- with the owner's transactions --------------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether checksums are to be noted."""
        return bool(self._unwritten)

    def write(self, tx: LedgerTransaction, *, is_flush: bool) -> None:  # noqa: ARG002 - few, and only once for an entry
        """Note the checksums of files that had none."""
        unwritten = [*self._unwritten.items()]  # in one step: other threads add to it
        self._num_writing = len(unwritten)
        if unwritten:
            tx.connection.executemany(
                "UPDATE entry SET crc32 = ? WHERE key = ? AND state = 'ready' AND crc32 IS NULL",
                [(noted.crc32, key) for key, noted in unwritten if self._is_still(key, noted)],
            )

    def _is_still(self, key: bytes, noted: _Unwritten) -> bool:
        return noted.seen is not None and self._disk.identity_of_data(key, noted.ext) == noted.seen

    def written(self) -> None:
        """They are committed; those that came since wait on."""
        for key in list(self._unwritten)[: self._num_writing]:
            del self._unwritten[key]
        self._num_writing = 0

    def give_up(self) -> None:
        """They are lost: the next owner compares anew."""
        self.after_fork_in_child()


def find(ledger: Ledger, keys: Sequence[bytes]) -> list[Known]:
    """Return what is known of those of `keys` whose objects are whole."""
    return [Known._make(row) for row in ledger.database.read(_FIND, (positions(len(keys)), b"".join(keys)))]


def num_without(ledger: Ledger) -> int:
    """Return how many whole objects have no checksum; a scan."""
    return int(ledger.database.read("SELECT count(*) FROM entry WHERE state = 'ready' AND crc32 IS NULL")[0][0])


def read_crc32(disk: Disk, known: Known) -> int | None:
    """Return the checksum of an entry's file, None if it cannot be read."""
    path, crc = disk.data_path(known.key, known.ext), 0
    with locks.uninterrupted() as section:  # a handler that raised between two lines would leave the file open
        try:
            fd = locks.open_descriptor(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            chunks = _running_crc32(fd)
            while True:
                try:
                    crc = next(chunks)
                except StopIteration:
                    return crc
                except OSError:
                    return None
                if section.has_signal and section.depth == 1:  # else the caller holds what a handler may want
                    section.let_through()
        finally:
            locks.close_descriptor(fd)


def quarantine(tx: LedgerTransaction, disk: Disk, known: Known, owner: str | None) -> None:
    """Remove a file whose bytes are not those of its checksum, and its row, so that it is fetched again.

    Raises:
        CacheError: Others than `owner` pin it, or a process reads it under a lock.
    """
    row, crc = tx.find([known.key]).get(known.key), _crc32_in(tx, known.key)  # it may have come anew since
    if row is None or crc is None or read_crc32(disk, known) == crc:
        return
    if tx.pinned_by_others(row.key, owner) or not recover.remove(tx, disk, [row]):
        raise CacheError(
            f"the cached file of {row.url} does not have the bytes that came, and another process uses it: "
            f"find out what writes into {disk.root}/data"
        )
    tx.count({"quarantined": 1})
    logger.warning("the cached file of %s does not have the bytes that came: fetching it again", row.url)


def _crc32_in(tx: LedgerTransaction, key: bytes) -> int | None:
    """Return the checksum that the ledger has of a whole object, None if it has none."""
    row = tx.connection.execute("SELECT crc32 FROM entry WHERE key = ? AND state = 'ready'", (key,)).fetchone()
    return None if row is None else row[0]


def verify_content(ledger: Ledger, disk: Disk, *, repair: bool) -> list[Finding]:
    """Return the entries whose files do not have their checksums, removed when `repair`; those without one are not read."""
    findings: list[Finding] = []
    last = b""
    columns = "key, ext, crc32, url, size"
    query = f"SELECT {columns} FROM entry WHERE key > ? AND state = 'ready' AND crc32 IS NOT NULL ORDER BY key LIMIT ?"
    while rows := [Known._make(row) for row in ledger.database.read(query, (last, VERIFY_BATCH))]:
        last = rows[-1].key
        for known in rows:
            if read_crc32(disk, known) != known.crc32:
                findings += _verify_once_more(ledger, disk, known, repair=repair)
    return findings


def _verify_once_more(ledger: Ledger, disk: Disk, known: Known, *, repair: bool) -> list[Finding]:
    with ledger.transaction() as tx:
        row = tx.find([known.key]).get(known.key)
        size_bytes = disk.data_size(known.key, known.ext)
        if (
            row is None
            or _crc32_in(tx, known.key) != known.crc32
            or size_bytes != known.size_bytes
            or read_crc32(disk, known) == known.crc32
        ):
            return []  # gone, fetched again, or of another size, which is a finding of its own
        is_free = not (row.key in tx.pinned() or disk.is_read(row.key, row.ext))
        cure = "a repair forgets it, and it is fetched again when it is wanted"
        if not is_free:
            cure = "a running process reads it: repair again when that has ended"
        repaired = repair and is_free and bool(recover.remove(tx, disk, [row]))
        if repaired:
            tx.count({"quarantined": 1})
    return [
        Finding(
            kind="wrong content",
            key=row.key.hex(),
            url=row.url,
            bytes=row.charged_bytes,
            explanation=f"the file's bytes are not those that came: the disk, or another program, changed them; {cure}",
            repaired=repaired,
        )
    ]
