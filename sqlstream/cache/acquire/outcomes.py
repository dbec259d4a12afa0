"""What is known of downloads: how large objects of a kind are, and how those ended that no transaction has written yet."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sqlstream.cache.acquire.holds import Hold, Holds
from sqlstream.cache.files.disk import Disk, Part
from sqlstream.cache.ledger.ledger import LedgerTransaction
from sqlstream.cache.ledger.reports import Failure, record_failures, record_hosts
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import Publication
from sqlstream.errors import CacheError, SqlStreamError
from sqlstream.storage.base import urls
from sqlstream.storage.fetcher import FetchDone, FetchRequest, Sink

FIRST_GUESS_BYTES = 64 << 10
"""Reserved for the first object of its kind: a usual JPEG; later ones go by what was seen."""
GUESS_MARGIN = 1.25
"""Reserve this much more than the mean seen: most objects then need no second transaction."""


class DownloadSource(Protocol):
    """What brings objects: the client of a helper process, or memory."""

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Begin downloads; `sink` hears how they go, in any thread.

        Raises:
            SqlStreamError: None of them has begun.
        """

    def grant(self, ticket: str, granted_bytes: int) -> None:
        """Let a download write so many bytes in all."""

    def cancel(self, tickets: Sequence[str]) -> None:
        """Give downloads up; each still ends with an event."""

    def share_node(self, num_sharing: int) -> None:
        """Note how many processes of this node share the network."""


@dataclass(slots=True, eq=False)
class Lead:
    """One object on its way, led by this process."""

    ref: ObjectRef
    part: Part
    charged_bytes: int
    source: DownloadSource
    waiting: list[weakref.ref[Hold]] = field(default_factory=list)
    """Holds of this process that wait for it. One that is dropped gives its pins back at once, not when the download ends."""
    must_allocate: bool = False
    """Writing it has met a full disk: the next try takes its room on the disk first."""
    gave_way: bool = False
    """The disk stayed full: it takes its turn again, when others have given back what they do not use yet."""
    is_given_up: bool = False
    """Cancelled for want of room: it takes its turn again."""
    error: CacheError | None = None
    """Why it was cancelled, if it must not be tried again."""

    def tell(self, holdings: Holds, charge: int | None, error: SqlStreamError | None) -> None:
        """Tell the samples that wait for it how it ended."""
        for reference in self.waiting:
            hold = reference()
            if hold is None:  # dropped
                continue
            if charge is not None:
                holdings.arrive(hold, self.ref.key, charge)
            elif error is not None:
                hold.error = error
            else:
                hold.is_void = True
        self.waiting = []


class Sizes:
    """What objects need, as far as it was seen.

    Args:
        disk: Whose allocation unit counts.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._means: dict[str, float] = {}
        self.needed: dict[bytes, int] = {}
        """What a download that had too little asked for, by key."""

    def reservation_bytes(self, ref: ObjectRef, *, is_least: bool = False) -> int:
        """Return what to count for an object before it comes: its size if known, else a guess, or the least that counts."""
        known = ref.size_bytes if ref.size_bytes is not None else self.needed.get(ref.key)
        if known is not None:
            return self._disk.unit.charge(known)
        guess = self._means.get(ref.ext, FIRST_GUESS_BYTES) * GUESS_MARGIN
        return self._disk.unit.charge(1 if is_least else int(guess))

    def learn(self, ref: ObjectRef, size_bytes: int) -> None:
        """Follow the mean size of objects with this extension."""
        mean = self._means.get(ref.ext, float(size_bytes))
        self._means[ref.ext] = mean + (size_bytes - mean) / 8
        self.needed.pop(ref.key, None)


class Outcomes(NamedTuple):
    """How downloads ended."""

    whole: dict[Lead, Publication]
    failed: dict[Lead, SqlStreamError | None]
    done: list[FetchDone]

    def write(self, tx: LedgerTransaction, disk: Disk) -> None:
        """Make what is whole ready, with its real charge, and give back what failed."""
        if self.whole:
            tx.publish(self.whole.values())
        for lead in self.failed:
            if disk.remove_part(lead.part.name):  # else it stays counted, until a process can reap it
                tx.remove_filling(lead.ref.key, lead.part.name)
        errors = {lead: error for lead, error in self.failed.items() if error is not None}
        if errors:
            tx.count({"failures": len(errors)})
            record_failures(tx, (Failure(url=urls.redact(lead.ref.url), error=str(errors[lead])) for lead in errors))
        if self.done:
            tx.count(_counters(self.done))
            record_hosts(tx, self.done)


def _counters(ended: Sequence[FetchDone]) -> dict[str, int]:
    return {
        "requests": sum(done.num_requests for done in ended),
        "downloaded_bytes": sum(done.downloaded_bytes for done in ended),
        "retries": sum(done.num_retries for done in ended),
        "wait_microseconds": int(1e6 * sum(done.seconds for done in ended)),
    }
