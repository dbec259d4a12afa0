"""This process's place in the line for room: the oldest waiter of the node goes first."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

from sqlstream import locks
from sqlstream.cache.ledger import LedgerTransaction
from sqlstream.cache.owner import Owner


@dataclass(slots=True, eq=False, weakref_slot=True)
class Place:
    """A thread in line; forgotten with its frame, whatever ended that."""

    line: Line
    need_bytes: int = 0

    def wait_for(self, need_bytes: int) -> None:
        """Take or keep the place in the ledger, for so many bytes."""
        self.need_bytes = need_bytes
        self.line.enter()


class Line:
    """Which threads of this process wait for room, as one place in the ledger: that of the first of them.

    Args:
        owner: This process in the ledger.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self.after_fork_in_child()
        locks.call_after_fork(self)

    def after_fork_in_child(self) -> None:
        """Nobody waits in the child."""
        self._places: weakref.WeakSet[Place] = weakref.WeakSet()
        self._is_entered = False

    @contextlib.contextmanager
    def place(self) -> Iterator[Place]:
        """A place for the calling thread, given up at the end of the body."""
        place = Place(line=self)
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.discard(place)
            if place.need_bytes:
                self._owner.run(self._write)

    def enter(self) -> None:
        """Write this process's place."""
        self._owner.run(self._write)

    @property
    def is_stale(self) -> bool:
        """Whether the ledger says that we wait and nobody does (Ctrl-C between two steps)."""
        return self._is_entered and not self._need_bytes

    def leave_if_nobody_waits(self, tx: LedgerTransaction) -> None:
        """Give a stale place up."""
        if self.is_stale:
            self._write(tx)

    @property
    def _need_bytes(self) -> int:
        return max((place.need_bytes for place in list(self._places)), default=0)

    def _write(self, tx: LedgerTransaction) -> None:
        assert self._owner.id is not None
        need_bytes = self._need_bytes
        if need_bytes:
            self._is_entered = True
            tx.wait_in_line(self._owner.id, need_bytes)
        elif self._is_entered:
            tx.leave_line(self._owner.id)
            self._is_entered = False
