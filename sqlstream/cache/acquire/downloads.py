"""The objects that this process leads: their parts, their way through the helper, their publication.

`start` runs in a thread that acquires, the rest in the fetcher's receiver thread. A whole object is renamed to data/ and handed
to the samples of this process at once; that its row becomes ready is deferred to the next transaction of this process, so that
publishing costs none of its own (others who wait for it see the renamed file). Until then its part stays locked.

A download never waits for room. One that turns out larger than its reservation extends it in place; if that fails, it is
given up, what was learned of its size is kept, and it takes its turn again: two downloads cannot block each other.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from sqlstream.cache.acquire.holds import Hold, Holds
from sqlstream.cache.acquire.outcomes import DownloadSource, Lead, Outcomes, Sizes
from sqlstream.cache.acquire.owner import Owner
from sqlstream.cache.acquire.room import Room, despite_full_disk, forget_limit_of_the_dead, give_way, make_room, says_full
from sqlstream.cache.files.disk import LEDGER_ROOM_BYTES, Disk
from sqlstream.cache.files.layout import AllocationUnit
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.model.rows import Publication
from sqlstream.cache.model.tuning import CacheTuning
from sqlstream.cache.recovery.free_space import FreeSpace
from sqlstream.disk_room import FULL, cure_of, lack_of_inodes
from sqlstream.errors import CacheDiskError, CacheError, CacheFullError, FetchCancelledError, SqlStreamError
from sqlstream.process import fork, interrupts
from sqlstream.process.interrupts import Changes
from sqlstream.storage.base import urls
from sqlstream.storage.fetcher import FetchDone, FetchEvent, FetchRequest, GrantNeeded

logger = logging.getLogger(__name__)

STEP_BYTES = 8 << 20  # by which a reservation of unknown length grows: few transactions, little overshoot
MAX_DEFERRED = 64
"""Deferred writes of this process; more are written at once. A window's worth: they keep parts open."""


class Downloads:
    """The leads of this process; maps are guarded by the owner's `state`.

    Args:
        disk: Where parts and data live.
        owner: This process in the ledger.
        holdings: What this process holds.
        wake: Called when something was deferred.
        tuning: Times and thresholds.
    """

    def __init__(self, disk: Disk, owner: Owner, holdings: Holds, wake: Callable[[], None], tuning: CacheTuning) -> None:
        self._disk = disk
        self._owner = owner
        self._holdings = holdings
        self._wake = wake
        self._tuning = tuning
        self.free_space = FreeSpace(disk)
        self.checksum_of: Callable[[bytes, int], int | None] = lambda _key, _fd: None  # which is noted of an object
        self.after_fork_in_child()
        owner.defer(self)
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Leads, and the threads that wait for them, stay with the parent."""
        self.leads: dict[bytes, Lead] = {}
        self._by_ticket: dict[str, Lead] = {}
        self.sizes = Sizes(self._disk)
        self._whole: dict[Lead, Publication] = {}
        self._failed: dict[Lead, SqlStreamError | None] = {}
        self._ended: list[FetchDone] = []
        self._writing: Outcomes | None = None
        """What the current transaction writes of it."""
        self.settled = Changes()
        """Notified whenever a hold may have become whole."""

    # -- starting -----------------------------------------------------------------------------------------------------

    def add(self, lead: Lead) -> None:
        """Note a lead whose row is written; inside the transaction that writes it."""
        with self._owner.state:
            self.leads[lead.ref.key] = lead
            self._by_ticket[lead.part.name] = lead

    def join(self, hold: Hold) -> None:
        """Have a hold hear of the leads that it waits for; of one that has ended since the transaction began, at once."""
        with self._owner.state:
            for key in hold.outstanding & self.leads.keys():
                lead = self.leads[key]
                if (publication := self._whole.get(lead)) is not None:
                    self._holdings.arrive(hold, key, publication.charged_bytes)
                elif lead in self._failed:
                    hold.is_void = True
                else:
                    lead.waiting.append(weakref.ref(hold))

    def discard(self, leads: Sequence[Lead]) -> None:
        """Forget leads whose transaction was rolled back; their files go."""
        for lead in leads:
            self._disk.remove_part(lead.part.name)
        with self._owner.state:
            for lead in leads:
                lead.tell(self._holdings, None, None)
            known = self._take_off(leads)
        for lead in known:
            self._disk.close_part(lead.part)

    def start(self, leads: Sequence[Lead]) -> None:
        """Send leads, committed and with their room counted, to the helper; what cannot start ends with its error."""
        unsent = dict.fromkeys(leads)
        try:
            by_source: dict[DownloadSource, list[Lead]] = {}
            for lead in leads:
                if (error := self._allocate(lead)) is None and not (lead.gave_way or lead.is_given_up):
                    by_source.setdefault(lead.source, []).append(lead)
                else:
                    del unsent[lead]
                    self._end(failed={lead: error})
            for source, theirs in by_source.items():
                try:
                    source.submit([_request(lead) for lead in theirs], self._on_events)
                except SqlStreamError as error:
                    self._end(failed=dict.fromkeys(theirs, error))
                for lead in theirs:
                    del unsent[lead]
        finally:
            if unsent:  # Ctrl-C: no event would ever come for them
                self._end(failed=dict.fromkeys(unsent))

    def cancel(self, source: DownloadSource) -> None:
        """Give up what `source` still brings (its dataset is being closed)."""
        with self._owner.state:
            mine = [lead for lead in self._by_ticket.values() if lead.source is source and lead not in self._whole]
            for lead in mine:
                lead.is_given_up = True
        if mine:
            source.cancel([lead.part.name for lead in mine])

    def give_way(self, need_bytes: int) -> bool:
        """Give back what is not used yet on a disk that is full; see `room.give_way`."""
        pauses_seconds = self._tuning.full_disk_pauses_seconds
        return give_way(self._owner, self._disk, self._holdings, self.free_space, need_bytes, pauses_seconds=pauses_seconds)

    def _write(self, lead: Lead, write: Callable[[], None], *, need_bytes: int = 0) -> CacheError | None:
        """Call `write`; return why it failed for good. On a full disk a lead may have to give way, which is no error."""
        try:
            despite_full_disk(self._owner, self._disk, write, need_bytes=need_bytes)
        except OSError as error:
            if interrupts.is_of_handler(error):
                raise
            lead.gave_way = error.errno in FULL and self.give_way(lead.charged_bytes)
            return None if lead.gave_way else _disk_error(self._disk, lead, error)
        return None

    def _allocate(self, lead: Lead) -> CacheError | None:
        """Ready a lead's part for what was counted; see `_write`."""
        takes_room = lead.must_allocate or lead.charged_bytes >= self._tuning.allocate_from_bytes
        allocate = partial(self._disk.allocate, lead.part, lead.charged_bytes, takes_room=takes_room)
        return self._write(lead, allocate, need_bytes=lead.charged_bytes + LEDGER_ROOM_BYTES)

    # -- what the helper says (receiver thread) -----------------------------------------------------------------------

    def _on_events(self, events: Sequence[FetchEvent]) -> None:
        try:
            self._on_done([event for event in events if isinstance(event, FetchDone)])
            for event in events:
                if isinstance(event, GrantNeeded) and (lead := self._by_ticket.get(event.ticket)):
                    self._on_need(lead, event.size_bytes)
            if len(self._whole) + len(self._failed) > MAX_DEFERRED:
                self._owner.flush()
        except Exception as error:
            if interrupts.is_of_handler(error):  # the main thread brings it itself, as `put` does
                raise
            logger.exception("writing downloads to the cache ledger failed; it is tried again with the next transaction")

    def _on_done(self, events: Sequence[FetchDone]) -> None:
        whole: dict[Lead, Publication] = {}
        failed: dict[Lead, SqlStreamError | None] = {}
        again: list[Lead] = []
        try:
            for event in events:
                lead = self._by_ticket.get(event.ticket)
                if lead is None:
                    continue
                if event.error is not None:
                    if _must_be_asked_again(self._disk, lead, event.error):
                        again.append(lead)
                        continue
                    # Given up, also by a rest of the fetcher that came after this lead: who waits for it asks again.
                    is_given_up = lead.is_given_up or isinstance(event.error, FetchCancelledError)
                    failed[lead] = lead.error or (None if is_given_up else event.error)
                    continue
                publish = partial(self._disk.publish, lead.part, lead.ref.key, lead.ref.ext, event.size_bytes)
                disk_error = self._write(lead, publish)
                if disk_error is not None or lead.gave_way:
                    failed[lead] = disk_error
                    continue
                try:
                    whole[lead] = _publication(self._disk, lead, event, self.checksum_of(lead.ref.key, lead.part.fd))
                except OSError as error:
                    if interrupts.is_of_handler(error):
                        raise
                    failed[lead] = _disk_error(self._disk, lead, error)
        finally:  # a handler may raise while room is made: the files of those before it are in data/, and must be counted
            with self._owner.state:
                self._ended += events
            self._end(whole, failed)
        self.start(again)

    def _on_need(self, lead: Lead, size_bytes: int | None) -> None:
        """Extend a reservation that turned out too small, or give that download up."""
        try:
            if self._extend(lead, size_bytes):
                lead.error = self._allocate(lead)
                if lead.error is None and not lead.gave_way:
                    lead.source.grant(lead.part.name, lead.charged_bytes)
                    return
        except CacheDiskError as error:  # of the ledger
            lead.gave_way = says_full(error) and self.give_way(lead.charged_bytes)
            lead.error = None if lead.gave_way else error
        except Exception as error:  # whatever it is: those who wait must hear of it
            logger.exception("extending a reservation failed")
            lead.error = error if isinstance(error, CacheError) else CacheError(f"extending a reservation failed: {error!r}")
        lead.is_given_up = True
        lead.source.cancel([lead.part.name])

    def _extend(self, lead: Lead, size_bytes: int | None) -> bool:
        """Count more bytes for a download; those under way finish before anybody in line for room starts."""
        room = Room.AGAIN
        while room is Room.AGAIN:
            room = self._owner.run(lambda tx: self._extend_once(tx, lead, size_bytes))
        if room is Room.ENOUGH:
            lead.charged_bytes = self.sizes.needed[lead.ref.key]
        return room is Room.ENOUGH

    def _extend_once(self, tx: LedgerTransaction, lead: Lead, size_bytes: int | None) -> Room:
        assert self._owner.id is not None
        limit_bytes = tx.account().limit_bytes
        target = _target_bytes(lead.charged_bytes, size_bytes, limit_bytes, self._disk.unit)
        self.sizes.needed[lead.ref.key] = target
        if limit_bytes is not None and target > limit_bytes:
            if forget_limit_of_the_dead(tx, self._disk, self._owner.id):
                return Room.AGAIN
            lead.error = cannot_fit({lead.ref.url: target}, limit_bytes)
        else:
            lead.error = self.free_space.cannot_hold(tx, lead.ref.url, target)
        if lead.error is not None:  # nothing is counted or evicted for it
            return Room.NONE
        room = make_room(
            tx, self._disk, target - lead.charged_bytes, owner=self._owner.id, in_line=False, free_space=self.free_space
        )
        if room is Room.ENOUGH and not tx.extend(lead.ref.key, lead.part.name, target):
            return Room.NONE  # the ledger was replaced under us: nothing counts these bytes
        return room

    # -- ending -------------------------------------------------------------------------------------------------------

    def _end(
        self, whole: Mapping[Lead, Publication] | None = None, failed: Mapping[Lead, SqlStreamError | None] | None = None
    ) -> None:
        """Tell the samples that wait how downloads ended, and defer what the ledger must know."""
        for lead in failed or ():
            self._disk.remove_part(lead.part.name)  # unlink, then uncount
        with self._owner.state:
            for lead, publication in (whole or {}).items():
                self._whole[lead] = publication
                self.sizes.learn(lead.ref, publication.size_bytes)
                lead.tell(self._holdings, publication.charged_bytes, None)
            for lead, error in (failed or {}).items():
                self._failed[lead] = error
                lead.tell(self._holdings, None, error)
        self.settled.notify_all()
        self._wake()
        if self._owner.is_closed:  # no transaction of it will come
            self.give_up()

    @property
    def is_waiting(self) -> bool:
        """Whether downloads have ended that are not written yet."""
        return bool(self._whole or self._failed or self._ended)

    def write(self, tx: LedgerTransaction, *, is_flush: bool) -> None:  # noqa: ARG002 - others wait for all of it
        """Make what is whole ready, with its real charge, and give back what failed."""
        self._gather().write(tx, self._disk)

    def written(self) -> None:
        """Give the locks of what was written back; waiters elsewhere wake."""
        ended, self._writing = self._writing, None
        if ended is None or not (ended.whole or ended.failed or ended.done):
            return
        with self._owner.state:
            for lead in ended.whole:
                self._whole.pop(lead, None)
            for lead in ended.failed:
                self._failed.pop(lead, None)
            del self._ended[: len(ended.done)]
            known = self._take_off([*ended.whole, *ended.failed])
        for lead in known:
            self._disk.close_part(lead.part)

    def give_up(self) -> None:
        """Give all locks back: others find the files renamed, or reap the parts."""
        self._gather()
        self.written()

    def _gather(self) -> Outcomes:
        with self._owner.state:
            self._writing = Outcomes(dict(self._whole), dict(self._failed), list(self._ended))
        return self._writing

    def _take_off(self, leads: Sequence[Lead]) -> list[Lead]:
        """Forget leads; return those that were known, whose parts are to be closed."""
        known = [lead for lead in leads if self._by_ticket.pop(lead.part.name, None) is not None]
        for lead in known:
            if self.leads.get(lead.ref.key) is lead:
                del self.leads[lead.ref.key]
        return known


def _target_bytes(charged_bytes: int, size_bytes: int | None, limit_bytes: int | None, unit: AllocationUnit) -> int:
    """Return what a download is to count that needs more than it does, by its size or, where that is unknown, by a step."""
    if size_bytes is not None and size_bytes > charged_bytes:  # else more came than was announced: it must not wait for ever
        return unit.charge(size_bytes)
    target = unit.charge(charged_bytes + STEP_BYTES)
    if limit_bytes is None:
        return target
    return max(min(target, limit_bytes // unit.num_bytes * unit.num_bytes), charged_bytes + unit.num_bytes)


def cannot_fit(need_bytes: Mapping[str, int], limit_bytes: int) -> CacheFullError:
    """Return the error for the objects of one sample that can never be here together.

    Args:
        need_bytes: What each URL needs at least.
        limit_bytes: The limit in force.
    """
    largest = urls.redact(max(need_bytes, key=lambda url: need_bytes[url]))
    together = f", and the {len(need_bytes) - 1} objects needed with it," if len(need_bytes) > 1 else ""
    return CacheFullError(
        f"{largest}{together} needs {sum(need_bytes.values())} bytes on disk, the cache limit is {limit_bytes} bytes: "
        "raise cache_limit",
        url=largest,
    )


def _must_be_asked_again(disk: Disk, lead: Lead, error: SqlStreamError) -> bool:
    """Return whether writing a lead has met a full disk for the first time: then what it took goes to the ledger's need."""
    if lead.error is not None or lead.must_allocate or error.context.get("errno") not in FULL:
        return False
    lead.must_allocate = True
    with contextlib.suppress(OSError):
        disk.allocate(lead.part, 0, takes_room=False)
    return True


def _disk_error(disk: Disk, lead: Lead, error: OSError) -> CacheDiskError:
    url, cure = urls.redact(lead.ref.url), cure_of(error)
    return CacheDiskError(
        f"cannot write {url} to the cache at {disk.root}: {error.strerror}{lack_of_inodes(disk.root)}. "
        f"{cure[0].upper()}{cure[1:]}",
        url=url,
    )


def _publication(disk: Disk, lead: Lead, event: FetchDone, crc32: int | None) -> Publication:
    return Publication(
        key=lead.ref.key,
        url=urls.redact(lead.ref.url),
        ext=lead.ref.ext,
        size_bytes=event.size_bytes,
        charged_bytes=disk.unit.charge(event.size_bytes),
        etag=event.etag,
        dataset=lead.ref.dataset,
        crc32=crc32,
        shard=lead.ref.shard_key,
    )


def _request(lead: Lead) -> FetchRequest:
    return FetchRequest(
        ticket=lead.part.name,
        url=lead.ref.url,
        fd=lead.part.fd,
        granted_bytes=lead.charged_bytes,
        expected_bytes=lead.ref.size_bytes,
        expected_etag=lead.ref.etag,
        span=lead.ref.span,
        whole_bytes=lead.ref.whole_bytes,
        unpack=lead.ref.unpack,
        access=lead.ref.access,
    )
