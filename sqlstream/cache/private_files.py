"""A session without a cache: each object is downloaded to a private file, which belongs to the hold on it and goes with it.

It stands in for a cache that fails (`failover`). Files of a trainer that was killed stay below the system's temporary directory
until that is cleaned.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from sqlstream.cache.acquire.outcomes import DownloadSource
from sqlstream.cache.acquire.put import Memory, PutItem
from sqlstream.cache.acquire.reserve import NextUses
from sqlstream.cache.directory import remove_directory
from sqlstream.cache.files.read_hold import ReadLock
from sqlstream.cache.ledger.reports import Failure
from sqlstream.cache.ledger.shard_units import ChosenUnit, ShardWish
from sqlstream.cache.model.policies import POLICIES, Policy
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.disk_room import FULL, cure_of
from sqlstream.errors import CacheClosedError, CacheDiskError, CacheError, FetchCancelledError, SqlStreamError
from sqlstream.process import fork, locks
from sqlstream.process.interrupts import Changes
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest

LOOK_SECONDS = 0.02
"""How often a wait looks whether its objects are here, beside being told."""
_UNLIMITED = 1 << 62


@dataclass(slots=True, eq=False)
class PrivateFile:
    """An object outside of any cache."""

    name: str
    path: str
    fd: int
    """Open until the object is here."""
    pid: int
    is_retained: bool = False
    """A sample that left has its path: a worker that ends leaves the file to the trainer, which removes the directory."""

    def remove(self) -> None:
        """Unlink it; a forked child has no say."""
        if os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def __del__(self) -> None:
        if not self.is_retained:
            self.remove()


@dataclass(slots=True, eq=False, weakref_slot=True)
class PrivateHold:
    """The private files of one sample's objects; some objects may still be on their way."""

    is_read_hold: ClassVar[bool] = False
    is_released: ClassVar[bool] = False
    """Nothing takes it from its user."""
    charges: ClassVar[Mapping[bytes, int]] = MappingProxyType({})
    open_files: ClassVar[Mapping[str, ReadLock]] = MappingProxyType({})
    refs: Sequence[ObjectRef]
    source: DownloadSource
    """What brings its objects."""
    files: dict[bytes, PrivateFile] = field(default_factory=dict)
    """Where its objects are, by key."""
    outstanding: frozenset[bytes] = frozenset()
    """Keys that are not here yet."""
    error: Exception | None = None
    is_void: bool = False
    """It has no files: one of its objects was made on this node, or its room went to a hold that was needed first."""
    is_claimed: bool = False
    """Its files are in use, or were."""
    paths: list[str] = field(default_factory=list)
    """Where its objects are, in their order, once it is open."""

    @property
    def is_settled(self) -> bool:
        """Return whether waiting is over, one way or the other."""
        return not self.outstanding or self.error is not None or self.is_void

    def claim(self) -> bool:
        """Begin to use it; False if it has no files."""
        self.is_claimed = True  # before the look: who takes its files looks the other way round
        if self.is_void or len(self.files) == 0 < len(self.refs):
            return False
        self.paths = [self.files[ref.key].path for ref in self.refs]
        return True

    def close(self) -> None:
        """Remove its files; safe to call twice."""
        files, self.files = self.files, {}
        for file in files.values():
            file.remove()


@dataclass(frozen=True, slots=True, eq=False)
class _Awaited:
    """A download to a private file."""

    file: PrivateFile
    key: bytes
    hold: weakref.ref[PrivateHold]
    """The waiting thread has dropped it: then only the file is closed."""


class PrivateFilesSession:
    """The session that needs no cache directory; see `CacheSession`. What it promises ends with the process.

    Args:
        fetcher: What brings objects.
    """

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self.directory = f"{_temporary_directory()}/sqlstream-bypass-{uuid.uuid4().hex}"
        """Where private files are, those of a trainer and of its workers; the trainer removes it."""
        self._remove = weakref.finalize(self, remove_directory, self.directory, os.getpid())
        self._state = locks.StateLock()
        self.is_closed = False
        self.after_fork_in_child()
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Downloads and files stay with the parent."""
        self._awaited: dict[str, _Awaited] = {}
        self._ahead: weakref.WeakSet[PrivateHold] = weakref.WeakSet()
        """Holds that were acquired with others, and that no thread has waited for or used."""
        self._is_short = False
        """The disk was full: one sample is held ahead from then on."""
        self._settled = Changes()

    def join(self, directory: str) -> None:
        """Put private files into the directory of another process: the trainer that has spawned this one."""
        self._remove.detach()
        self.directory = directory

    @property
    def directories(self) -> tuple[str, ...]:
        """The one folder of its files."""
        return (f"{self.directory}/",)

    @property
    def policy(self) -> Policy:
        """Nothing is evicted: the default."""
        return POLICIES["lru"]

    # -- holds --------------------------------------------------------------------------------------------------------

    def acquire(
        self,
        groups: Sequence[Sequence[ObjectRef]],
        next_uses: NextUses = None,  # noqa: ARG002 - nothing is evicted
        *,
        for_reading: bool = False,  # noqa: ARG002 - all holds are alike
    ) -> list[PrivateHold]:
        """Return a hold for each group, whose objects are on their way; of the first one alone once the disk was full.

        Raises:
            CacheError: The temporary directory fails, too.
        """
        holds = [self.acquire_one(group) for group in (groups[:1] if self._is_short else groups)]
        with self._state:
            self._ahead.update(holds)
        return holds

    def acquire_one(
        self,
        group: Sequence[ObjectRef],
        next_use: int | None = None,  # noqa: ARG002 - nothing is evicted
        *,
        for_reading: bool = False,  # noqa: ARG002 - all holds are alike
    ) -> PrivateHold:
        """Return a hold on the objects of one sample, which are on their way."""
        hold = PrivateHold(group, self.fetcher)
        if any(ref.is_stored_sample for ref in group):  # made on this node, and lost with the cache
            hold.is_void = True
        else:
            self._bring(hold)
        return hold

    def _bring(self, hold: PrivateHold) -> None:
        if self.is_closed:
            raise CacheClosedError("the dataset or cache was closed: open it again to read more")
        with locks.uninterrupted():  # a handler that raised before they are sent for would leave their files open
            refs = {ref.key: ref for ref in hold.refs}
            hold.files = self._files(refs)
            hold.outstanding = frozenset(refs)
            with self._state:
                for key, file in hold.files.items():
                    self._awaited[file.name] = _Awaited(file, key, weakref.ref(hold))
            requests = [_request(refs[key], file) for key, file in hold.files.items()]
            try:
                hold.source.submit(requests, self._on_events)
            except SqlStreamError as error:
                self._on_events([FetchDone(ticket=request.ticket, error=error) for request in requests])

    @contextlib.contextmanager
    def prefetched(self, refs: Sequence[ObjectRef]) -> Iterator[None]:  # noqa: ARG002 - each hold brings its own
        """Nothing is fetched ahead: a file of another hold would serve none."""
        yield

    def split(self, hold: PrivateHold) -> list[PrivateHold]:
        """Return an open hold for each object of an open hold, in its place."""
        files, hold.files = hold.files, {}
        refs = {ref.key: ref for ref in hold.refs}
        pieces = [PrivateHold((ref,), hold.source, {key: files[key]}) for key, ref in refs.items()]
        for piece in pieces:
            piece.claim()
        return pieces

    def wait(self, hold: PrivateHold, timeout_seconds: float | None = None) -> PrivateHold:
        """Wait until every object is here, or one failed; on a full disk, what is ahead of its use makes room first."""
        with self._state:
            self._ahead.discard(hold)
        num_looks = 0
        while True:
            while not hold.is_settled and (timeout_seconds is None or num_looks * LOOK_SECONDS < timeout_seconds):
                self._settled.wait(LOOK_SECONDS, is_over=lambda: hold.is_settled)
                num_looks += 1
            if hold.is_void:
                hold.error = None  # of a download that no sample needs any more
                return hold
            if getattr(hold.error, "context", {}).get("errno") not in FULL:
                return hold
            if not self._has_made_room():
                hold.error = CacheDiskError(f"the cache fails, and {self.directory} is full: set TMPDIR to a larger disk")
                return hold
            hold.close()
            hold.error = None
            self._bring(hold)

    def _has_made_room(self) -> bool:
        """Remove the files of holds that are not needed yet, which are acquired again; False if there are none."""
        with self._state:
            ahead, self._ahead, self._is_short = list(self._ahead), weakref.WeakSet(), True
        for hold in ahead:
            hold.is_void = True
            if not hold.is_claimed:
                hold.close()
        dropped = {name for name, awaited in list(self._awaited.items()) if getattr(awaited.hold(), "is_void", True)}
        self.fetcher.cancel([*dropped])
        while not dropped.isdisjoint(self._awaited):  # until then their bytes are on the disk
            self._settled.wait(LOOK_SECONDS, is_over=lambda: dropped.isdisjoint(self._awaited))
        return bool(ahead or dropped)

    def open(self, hold: PrivateHold) -> bool:
        """Begin to use a hold."""
        return hold.claim()

    def release(self, hold: PrivateHold) -> None:
        """Remove its files."""
        hold.close()

    def retain(self, hold: PrivateHold) -> PrivateHold:
        """Keep the files of an open hold until it is released, also beyond the end of this process, if it is a worker."""
        for file in hold.files.values():
            file.is_retained = True
        return hold

    def warn_of_paths(self) -> None:
        """No limit takes paths away."""

    def hand_over(self, give: Callable[[int], None]) -> None:
        """The trainer has the files already: they lie in its directory."""

    def expect(self, num_processes: int) -> None:
        """Note how many processes of this node share the network."""
        self.fetcher.share_node(num_processes)

    def expect_forks(self, num_objects: int | None) -> None:
        """Prepare for helpers of processes that are forked from this one: each of them reads all of its objects."""
        if num_objects != 0:
            self.fetcher.expect_forks()

    def flush(self) -> None:
        """Nothing waits."""

    def rest(self) -> None:
        """End the helper process; the next object starts it again."""
        self.fetcher.stop()

    def close(self) -> None:
        """End the helper process, and remove all private files."""
        self.is_closed = True
        try:
            self.fetcher.close()
        finally:
            self._remove()

    # -- what a cache would keep --------------------------------------------------------------------------------------

    def stored(self, keys: Sequence[bytes]) -> set[bytes]:  # noqa: ARG002 - as in the protocol
        """Nothing is stored."""
        return set()

    def put(self, items: Sequence[PutItem]) -> str | None:
        """Store nothing, and say so."""
        return "they are read past the cache" if items else None

    def hold_made(self, group: Sequence[ObjectRef], bodies: Mapping[bytes, bytes]) -> PrivateHold:
        """Return an open hold on objects of which this process has made some."""
        memory = Memory(bodies, self.fetcher)
        while True:
            hold = PrivateHold(group, memory)
            self._bring(hold)
            self.wait(hold)
            if hold.error is None and hold.claim():
                return hold
            hold.close()
            if hold.error is not None:
                raise hold.error

    def discard(self, ref: ObjectRef) -> bool:  # noqa: ARG002 - as in the protocol
        """Nothing is stored."""
        return True

    def drop_other_versions(self, refs: Iterable[ObjectRef]) -> Set[bytes]:  # noqa: ARG002 - as in the protocol
        """Nothing is kept of any version."""
        return frozenset()

    def register(self, name: str, src: str, fingerprint: str) -> int | None:  # noqa: ARG002 - as in the protocol
        """There is no ledger."""
        return None

    def limit_in_force(self) -> int | None:
        """No limit holds for private files."""
        return None

    def shard_unit(self, _wish: ShardWish, choose: Callable[[int | None], ChosenUnit]) -> ChosenUnit:
        """Return what this process chooses: no limit holds for private files."""
        return choose(None)

    def note_failures(self, failed: Sequence[Failure]) -> None:
        """There is no ledger."""

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
                if isinstance(error, FetchCancelledError):  # no more was asked of the fetcher: who waits for it asks again
                    hold.is_void = True
                else:
                    hold.error = hold.error or error
                hold.outstanding -= {awaited.key}

    def _files(self, refs: Mapping[bytes, ObjectRef]) -> dict[bytes, PrivateFile]:
        files: dict[bytes, PrivateFile] = {}
        try:
            for key, ref in refs.items():
                files[key] = self._file(ref)
        except CacheError:
            for file in files.values():
                locks.close_descriptor(file.fd)
            raise
        return files

    def _file(self, ref: ObjectRef) -> PrivateFile:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.directory, 0o700)
            name = f"{ref.key.hex()}.{uuid.uuid4().hex}"
            path = f"{self.directory}/{name}{ref.ext}"
            with locks.fork_guard():
                fd = locks.adopt_descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            return PrivateFile(name, path, fd, os.getpid())
        except OSError as error:
            is_disk_right = error.errno in (errno.EMFILE, errno.ENFILE)
            cure = cure_of(error) if is_disk_right else "mend that disk, or set TMPDIR"
            raise CacheDiskError(f"the cache fails, and so does the temporary directory ({error}): {cure}") from error


def _temporary_directory() -> str:
    """Return where private files go; of a machine on which no such directory takes a file, one that says so when it is used."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "/tmp"  # noqa: S108 - the cache may never fail


def _request(ref: ObjectRef, file: PrivateFile) -> FetchRequest:
    return FetchRequest(
        ticket=file.name,
        url=ref.url,
        fd=file.fd,
        granted_bytes=_UNLIMITED,
        expected_bytes=ref.size_bytes,
        expected_etag=ref.etag,
        span=ref.span,
        whole_bytes=ref.whole_bytes,
        unpack=ref.unpack,
        access=ref.access,
    )
