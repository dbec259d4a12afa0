"""The objects that this process leads: their parts, their way through the helper, their publication.

Everything here happens in two threads: `start` in whoever acquires, the rest in the fetcher's receiver thread. So finished
downloads are published while the trainer thinks, and nobody on the node waits for a process that is busy elsewhere.

A download never waits for room. One that turns out larger than its reservation extends it in place; if that fails, it is
given up, what was learned of its size is kept, and it takes its turn again: two downloads cannot block each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlstream import locks
from sqlstream.cache.disk import Disk, Part
from sqlstream.cache.holds import Hold, Holdings
from sqlstream.cache.keys import ObjectRef, charged_bytes
from sqlstream.cache.ledger import Publication
from sqlstream.cache.owner import Owner
from sqlstream.cache.room import Room, make_room
from sqlstream.errors import CacheError, CacheFullError, SqlStreamError
from sqlstream.storage import urls
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest, GrantNeeded

logger = logging.getLogger(__name__)

STEP_BYTES = 8 << 20
"""A reservation of unknown length grows in these steps: few transactions, little overshoot."""
FIRST_GUESS_BYTES = 64 << 10
"""Reserved for the first object of its kind: a usual JPEG; later ones go by what was seen."""
GUESS_MARGIN = 1.25
"""Reserve this much more than the mean seen: most objects then need no second transaction."""


@dataclass(slots=True, eq=False)
class Lead:
    """One object on its way, led by this process."""

    ref: ObjectRef
    part: Part
    charged_bytes: int
    fetcher: Fetcher
    holds: list[Hold] = field(default_factory=list)
    """Samples of this process that wait for it."""
    is_given_up: bool = False
    """Cancelled for want of room: it takes its turn again."""
    error: CacheError | None = None
    """Why it was cancelled, if it must not be tried again."""


class Downloads:
    """The leads of this process; maps are guarded by `locks.fork_guard()`.

    Args:
        disk: Where parts and data live.
        owner: This process in the ledger.
        holdings: What this process holds.
    """

    def __init__(self, disk: Disk, owner: Owner, holdings: Holdings) -> None:
        self._disk = disk
        self._owner = owner
        self._holdings = holdings
        self.after_fork_in_child()
        locks.call_after_fork(self)

    def after_fork_in_child(self) -> None:
        """Leads, and whoever waits for them, stay with the parent."""
        self.leads: dict[bytes, Lead] = {}
        self._by_ticket: dict[str, Lead] = {}
        self._sizes: dict[str, float] = {}
        self._learned: dict[bytes, int] = {}
        self.settled = threading.Condition()
        """Notified whenever a hold may have become whole."""

    # -- starting -----------------------------------------------------------------------------------------------------

    def reservation_bytes(self, ref: ObjectRef, limit_bytes: int | None) -> int:
        """Return what to count for an object before it comes: its size if known, else a guess that fits the limit."""
        known = ref.size_bytes if ref.size_bytes is not None else self._learned.get(ref.key)
        if known is not None:
            return charged_bytes(known)
        guess = charged_bytes(int(self._sizes.get(ref.ext, FIRST_GUESS_BYTES) * GUESS_MARGIN))
        return guess if limit_bytes is None else min(guess, limit_bytes // 4096 * 4096)

    def add(self, lead: Lead) -> None:
        """Note a lead whose row is written; inside the transaction that writes it."""
        self.leads[lead.ref.key] = lead
        self._by_ticket[lead.part.name] = lead

    def discard(self, leads: Sequence[Lead]) -> None:
        """Forget leads whose transaction failed; their files go, their rows were rolled back (or are reaped)."""
        for lead in leads:
            self._disk.remove_part(lead.part.name)
            self._settle(lead, None, None)

    def start(self, leads: Sequence[Lead]) -> None:
        """Send leads, committed and with their room counted, to the helper."""
        by_fetcher: dict[Fetcher, list[FetchRequest]] = {}
        failed: dict[Lead, SqlStreamError | None] = {}
        for lead in leads:
            try:
                self._disk.allocate(lead.part, lead.charged_bytes)
            except OSError as error:
                failed[lead] = self._disk_error(lead, error)
                continue
            request = FetchRequest(
                ticket=lead.part.name,
                url=lead.ref.url,
                fd=lead.part.fd,
                granted_bytes=lead.charged_bytes,
                expected_bytes=lead.ref.size_bytes,
                expected_etag=lead.ref.etag,
            )
            by_fetcher.setdefault(lead.fetcher, []).append(request)
        if failed:
            self._finish({}, failed)
        for fetcher, requests in by_fetcher.items():
            fetcher.submit(requests, self._on_events)

    def cancel(self, fetcher: Fetcher) -> None:
        """Give up what `fetcher` still brings (its dataset is being closed)."""
        with locks.fork_guard():
            mine = [lead for lead in self.leads.values() if lead.fetcher is fetcher]
            for lead in mine:
                lead.is_given_up = True
        if mine:
            fetcher.cancel([lead.part.name for lead in mine])

    # -- what the helper says (receiver thread) -----------------------------------------------------------------------

    def _on_events(self, events: Sequence[FetchEvent]) -> None:
        needs = [event for event in events if isinstance(event, GrantNeeded)]
        done = [event for event in events if isinstance(event, FetchDone)]
        try:
            if done:
                self._on_done(done)
            if needs:
                self._on_needs(needs)
        except Exception as error:  # whatever it is: those who wait must hear of it, and the receiver goes on
            logger.exception("publishing downloads failed")
            self._fail_all([event.ticket for event in events], error)

    def _on_done(self, events: Sequence[FetchDone]) -> None:
        whole: dict[Lead, FetchDone] = {}
        failed: dict[Lead, SqlStreamError | None] = {}
        for event in events:
            lead = self._by_ticket.get(event.ticket)
            if lead is None:
                continue
            if event.error is None:
                try:
                    self._disk.publish(lead.part, lead.ref.key, lead.ref.ext, event.size_bytes)
                    whole[lead] = event
                except OSError as error:
                    failed[lead] = self._disk_error(lead, error)
            else:
                failed[lead] = lead.error or (None if lead.is_given_up else event.error)
        self._finish(whole, failed, events)

    def _finish(
        self, whole: dict[Lead, FetchDone], failed: dict[Lead, SqlStreamError | None], events: Sequence[FetchDone] = ()
    ) -> None:
        """Publish what is whole and give back what failed, in one transaction; then wake who waits."""
        for lead in failed:
            self._disk.remove_part(lead.part.name)  # unlink, then uncount
        with self._owner.transaction() as tx:
            tx.publish([_publication(lead, event) for lead, event in whole.items()])
            for lead, error in failed.items():
                tx.remove_filling(lead.ref.key, lead.part.name)
                if error is not None:
                    tx.record_failure(urls.redact(lead.ref.url), str(error))
            tx.count(_counters(events, num_failures=sum(error is not None for error in failed.values())))
        for lead, event in whole.items():
            self._learn(lead.ref, event.size_bytes)
            self._settle(lead, charged_bytes(event.size_bytes), None)
        for lead, error in failed.items():
            self._settle(lead, None, error)
        with self.settled:
            self.settled.notify_all()

    def _on_needs(self, events: Sequence[GrantNeeded]) -> None:
        """Extend reservations that turned out too small, or give those downloads up."""
        granted: list[Lead] = []
        refused: list[Lead] = []
        for event in events:
            lead = self._by_ticket.get(event.ticket)
            if lead is None:
                continue
            extended = self._extend(lead, event.size_bytes)
            (granted if extended else refused).append(lead)
        for lead in granted:
            try:
                self._disk.allocate(lead.part, lead.charged_bytes)
                lead.fetcher.grant(lead.part.name, lead.charged_bytes)
            except OSError as error:
                lead.error = self._disk_error(lead, error)
                refused.append(lead)
        for lead in refused:
            lead.is_given_up = True
            lead.fetcher.cancel([lead.part.name])

    def _extend(self, lead: Lead, size_bytes: int | None) -> bool:
        if size_bytes is not None:
            self._learned[lead.ref.key] = size_bytes
        target = charged_bytes(size_bytes) if size_bytes is not None else lead.charged_bytes + STEP_BYTES
        room = Room.AGAIN
        while room is Room.AGAIN:
            with self._owner.transaction() as tx:
                limit_bytes = tx.account().limit_bytes
                if limit_bytes is not None and target > limit_bytes:
                    lead.error = cannot_fit({lead.ref.url: target}, limit_bytes)
                    return False
                assert self._owner.id is not None
                room = make_room(tx, self._disk, target - lead.charged_bytes, owner=self._owner.id)
                if room is Room.ENOUGH:
                    tx.extend(lead.ref.key, lead.part.name, target)
        if room is Room.NONE:
            self._learned[lead.ref.key] = target
            return False
        lead.charged_bytes = target
        return True

    # -- settling -----------------------------------------------------------------------------------------------------

    def _settle(self, lead: Lead, charge: int | None, error: SqlStreamError | None) -> None:
        """Take a lead off the board and tell the samples that wait for it how it ended."""
        key = lead.ref.key
        with locks.fork_guard():
            if self._by_ticket.pop(lead.part.name, None) is None:
                return
            if self.leads.get(key) is lead:
                del self.leads[key]
            self._disk.close_part(lead.part)
            for hold in lead.holds:
                if charge is not None:
                    self._holdings.set_charge(hold, key, charge)
                    hold.outstanding.discard(key)
                elif error is not None:
                    hold.error = error
                else:
                    hold.is_void = True

    def _fail_all(self, tickets: Sequence[str], error: Exception) -> None:
        """The ledger or the disk refused: the rows stay, over-counted, until somebody reaps them."""
        cause = error if isinstance(error, SqlStreamError) else CacheError(f"publishing failed: {error!r}")
        for ticket in tickets:
            lead = self._by_ticket.get(ticket)
            if lead is not None:
                self._settle(lead, None, cause)
        with self.settled:
            self.settled.notify_all()

    def _learn(self, ref: ObjectRef, size_bytes: int) -> None:
        """Follow the mean size of objects with this extension."""
        mean = self._sizes.get(ref.ext, float(size_bytes))
        self._sizes[ref.ext] = mean + (size_bytes - mean) / 8
        self._learned.pop(ref.key, None)

    def _disk_error(self, lead: Lead, error: OSError) -> CacheError:
        return CacheError(
            f"cannot write {urls.redact(lead.ref.url)} to the cache at {self._disk.root}: {error.strerror}. "
            "Free space on that disk, or lower the limit so that it fits",
            url=urls.redact(lead.ref.url),
        )


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


def _publication(lead: Lead, event: FetchDone) -> Publication:
    return Publication(
        key=lead.ref.key,
        url=urls.redact(lead.ref.url),
        ext=lead.ref.ext,
        size_bytes=event.size_bytes,
        charged_bytes=charged_bytes(event.size_bytes),
        etag=event.etag,
        dataset=lead.ref.dataset,
    )


def _counters(events: Sequence[FetchDone], *, num_failures: int) -> dict[str, int]:
    return {
        "requests": sum(event.num_requests for event in events),
        "downloaded_bytes": sum(event.downloaded_bytes for event in events),
        "retries": sum(event.num_retries for event in events),
        "wait_microseconds": int(1e6 * sum(event.seconds for event in events)),
        "failures": num_failures,
    }
