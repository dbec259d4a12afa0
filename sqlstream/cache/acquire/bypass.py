"""What `on_cache_error="bypass"` does: objects that a broken cache cannot take are downloaded to private files.

A private file belongs to the hold on it and goes with it. So a failing disk, a ledger that cannot be rebuilt or a directory
that is gone stops no step that can read remotely. That the cache is full is no fault of it: `CacheFullError` is raised as ever.
Files of a trainer that was killed stay below the system's temporary directory until that is cleaned.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlstream.cache.acquire.holds import NOTHING, Hold, PrivateFile
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import CacheDiskError, CacheError, CacheFullError, SqlStreamError
from sqlstream.process import locks
from sqlstream.process.interrupts import Changes
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""How long a cache that failed is left alone: each try may take a failing disk's time-out. Arbitrary."""
_UNLIMITED = 1 << 62
_DISK_ERRORS = frozenset((errno.EDQUOT, errno.EIO, errno.ENOSPC, errno.EROFS))


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """A download to a private file."""

    file: PrivateFile
    hold: weakref.ref[Hold]
    """The waiting thread has dropped it: then only the file is closed."""


class Bypass:
    """The way around a cache directory in this process.

    Args:
        owner: This process in the ledger.
        settled: Notified whenever a hold may have become whole.
    """

    def __init__(self, owner: Owner, settled: Changes) -> None:
        self._settled = settled
        self._state = owner.state
        self._fetchers: weakref.WeakSet[Fetcher] = weakref.WeakSet()
        self.is_allowed = False
        """Whether anybody in this process goes around the cache."""
        self._has_warned = False
        self.directory = f"{tempfile.gettempdir()}/sqlstream-bypass-{uuid.uuid4().hex}"
        """Where private files are, those of a trainer and of its workers; the trainer removes it."""
        self._remove = weakref.finalize(self, remove_directory, self.directory, os.getpid())
        self.after_fork_in_child()
        locks.call_after_fork(self)
        owner.defer(self)

    def after_fork_in_child(self) -> None:
        """Downloads and files stay with the parent."""
        self._awaited: dict[str, _Awaited] = {}
        self._left_alone_until = 0.0
        self._num_objects = self._num_counting = 0

    def allow(self, fetcher: Fetcher) -> None:
        """Take the way around for whatever `fetcher` is to bring."""
        self._fetchers.add(fetcher)
        self.is_allowed = True

    def allows(self, fetcher: Fetcher) -> bool:
        """Return whether what `fetcher` is to bring may go around the cache."""
        return self.is_allowed and fetcher in self._fetchers

    @property
    def is_cache_left_alone(self) -> bool:
        """Whether the cache failed a moment ago, and is not even tried."""
        return self._left_alone_until > 0.0 and time.monotonic() < self._left_alone_until

    @contextlib.contextmanager
    def tolerated(self) -> Iterator[None]:
        """Let a fault of the cache in the body pass, if anybody in this process wants that; what it was to write is lost."""
        try:
            yield
        except CacheError as error:
            if not self.is_allowed or isinstance(error, CacheFullError):
                raise
            self.note(error)

    def close(self) -> None:
        """Remove all private files: the last user has closed the cache."""
        self._remove()

    def join(self, directory: str) -> None:
        """Put private files into the directory of another process: the trainer that has spawned us."""
        self._remove.detach()
        self.directory = directory

    def note(self, error: Exception) -> None:
        """Say once why the cache is bypassed, and leave it alone for a while."""
        self._left_alone_until = time.monotonic() + RETRY_SECONDS
        if not self._has_warned:
            self._has_warned = True
            logger.error("the cache fails, objects are read past it (on_cache_error='bypass'): %s", error)

    def acquire(self, groups: Sequence[Sequence[ObjectRef]], fetcher: Fetcher) -> list[Hold]:
        """Return a hold on private files for each group, whose objects are on their way.

        Raises:
            CacheError: The temporary directory fails, too.
        """
        holds = [Hold(group, "", {}, NOTHING) for group in groups]
        for hold in holds:
            self.bring(hold, fetcher)
        return holds

    def bring(self, hold: Hold, fetcher: Fetcher) -> None:
        """Bring all objects of a hold to private files; its error, if it had one, is forgotten."""
        if any(ref.is_stored_sample for ref in hold.refs):  # made on this node, and lost with the cache
            hold.is_void = True
            return
        with locks.uninterrupted():  # a handler that raised before they are sent for would leave their files open
            refs = {ref.key: ref for ref in hold.refs}
            files = self._files(refs)
            with self._state:  # from here on the cache's own downloads have no say in it
                hold.files, hold.error = files, None
                hold.outstanding = frozenset(file.name.encode() for file in files.values())
                for file in files.values():
                    self._awaited[file.name] = _Awaited(file, weakref.ref(hold))
            requests = [_request(refs[key], file) for key, file in files.items()]
            self._num_objects += len(requests)
            try:
                fetcher.submit(requests, self._on_events)
            except SqlStreamError as error:
                self._on_events([FetchDone(ticket=request.ticket, error=error) for request in requests])

    # -- counting: with whatever transaction works again --------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Nothing is worth a transaction of its own."""
        return False

    def write(self, tx: LedgerTransaction, *, is_flush: bool) -> None:  # noqa: ARG002 - one row, whatever the occasion
        """Count objects that were read past the cache."""
        self._num_counting = self._num_objects
        tx.count({"bypassed": self._num_counting})

    def written(self) -> None:
        """It is committed."""
        self._num_objects -= self._num_counting
        self._num_counting = 0

    def give_up(self) -> None:
        """It is lost."""
        self._num_objects = self._num_counting = 0

    # -- what the helper says (receiver thread) -----------------------------------------------------------------------

    def _on_events(self, events: Sequence[FetchEvent]) -> None:
        for event in events:
            if isinstance(event, FetchDone) and (awaited := self._awaited.pop(event.ticket, None)) is not None:
                self._settle(awaited, event)
        self._settled.notify_all()

    def _settle(self, awaited: _Awaited, done: FetchDone) -> None:
        error: Exception | None = done.error
        try:
            if error is None:
                os.ftruncate(awaited.file.fd, done.size_bytes)  # a failed try may have written more
        except OSError as failure:
            error = CacheDiskError(f"cannot write {awaited.file.path}: {failure.strerror}; mend that disk, or set TMPDIR")
        finally:
            locks.close_descriptor(awaited.file.fd)
        if (hold := awaited.hold()) is not None:
            with self._state:
                hold.error = hold.error or error
                hold.outstanding -= {awaited.file.name.encode()}

    def _files(self, refs: Mapping[bytes, ObjectRef]) -> dict[bytes, PrivateFile]:
        files: dict[bytes, PrivateFile] = {}
        try:
            for key, ref in refs.items():
                files[key] = self._file(ref.ext)
        except CacheError:
            for file in files.values():
                locks.close_descriptor(file.fd)
            raise
        return files

    def _file(self, ext: str) -> PrivateFile:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.directory, 0o700)
            name = uuid.uuid4().hex
            path = f"{self.directory}/{name}{ext}"
            with locks.fork_guard():
                fd = locks.adopt_descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            return PrivateFile(name, path, fd, os.getpid())
        except OSError as error:
            raise CacheDiskError(
                f"the cache fails, and so does the temporary directory ({error}): mend that disk, or set TMPDIR"
            ) from error


def is_fault(error: Exception) -> bool:
    """Return whether an error says that the cache, or its disk, is broken; not that it is full, or that storage failed."""
    if isinstance(error, SqlStreamError) and error.context.get("errno") in _DISK_ERRORS:
        return True
    return isinstance(error, CacheError) and not isinstance(error, CacheFullError)


def _request(ref: ObjectRef, file: PrivateFile) -> FetchRequest:
    return FetchRequest(
        ticket=file.name,
        url=ref.url,
        fd=file.fd,
        granted_bytes=_UNLIMITED,
        expected_bytes=ref.size_bytes,
        expected_etag=ref.etag,
        span=ref.span,
        access=ref.access,
    )


def remove_directory(directory: str, pid: int) -> None:
    """Remove a private directory; not in a forked child of its owner."""
    if os.getpid() == pid:
        shutil.rmtree(directory, ignore_errors=True)
