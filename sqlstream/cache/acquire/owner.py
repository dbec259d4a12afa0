"""This process as the ledger knows it: an id, a locked file, a limit and its pins.

Counts live in memory; the ledger sees which keys an owner pins, all of them in one value of its row, written with whatever
transaction comes next. So a window of samples costs one transaction, and giving back costs none of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.owner_files import OwnerNote
from sqlstream.cache.ledger import damage
from sqlstream.cache.ledger.eviction import choose
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction, run_in
from sqlstream.cache.model.rows import NO_LIMIT
from sqlstream.cache.recovery import emergency, recover
from sqlstream.cache.recovery.free_space import take_first_limit
from sqlstream.config import AS_IT_IS, Limit
from sqlstream.errors import CacheClosedError
from sqlstream.process import fork, locks

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Deferred(Protocol):
    """Work that waits for the next transaction of its process, whatever that is for."""

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits."""

    def write(self, tx: LedgerTransaction, *, is_flush: bool) -> None:
        """Do it, what can be put off only if `is_flush`; it may be rolled back, and is then asked again."""

    def written(self) -> None:
        """It is committed, and no other transaction has begun since."""

    def give_up(self) -> None:
        """The owner is closed: what waits is not written any more."""


class Owner:
    """The pins and the limit of this process on one cache directory.

    What it keeps of its row changes in transactions only, one of which runs at a time; pins and limits are guarded by `state`.

    Args:
        disk: Where the owner file lives.
        ledger: Where the owner is a row, its pins a value in it.
    """

    def __init__(self, disk: Disk, ledger: Ledger) -> None:
        self.id: str | None = None
        """Empty until the first transaction of this process; another one after a fork."""
        self._disk = disk
        self._ledger = ledger
        self._limits: dict[int, int] = {}
        self.limit_bytes: int | None = None
        """The smallest limit that a user in this process gave, `NO_LIMIT` among them; None: none was given."""
        self._policies: dict[int, str] = {}
        """Users in this process that asked for an eviction policy by name: all of them for the same."""
        self.num_expected = 1
        """Processes that will share the limit: the first DataLoader worker must not take what the others come for."""
        self.is_closed = False
        self._fd: int | None = None
        self._deferred: list[Deferred] = []
        self.collect: Callable[[], None] = lambda: None
        """Unpins what was given back; called before pins are written."""
        self.state = locks.StateLock()
        """Guards what this process keeps in memory of the cache: pins, holds, downloads, limits. No I/O while it is held."""
        self._forget()
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Become another owner: the parent keeps its file, its row and its pins."""
        self.id, self._fd = None, None
        self._forget()

    def _forget(self) -> None:
        self._counts: Counter[bytes] = Counter()
        self.num_changes = 0
        """Pins taken and given back."""
        self.num_committed = 0
        """How many of these changes our row knows."""
        self._num_written = 0  # in the current transaction; -1: it may have to be written whatever their number
        self._is_note_short = True
        """Whether our file lacks a key that we pin."""
        self._generation = -1

    def defer(self, work: Deferred) -> None:
        """Have `work` written with the transactions of this owner."""
        self._deferred.append(work)

    def set_limit(self, user: int, limit: Limit) -> None:
        """Note the limit that one user (a dataset or cache object) of this process gives; the smallest of them is ours."""
        with self.state:
            if limit is AS_IT_IS:
                self._limits.pop(user, None)
            else:
                self._limits[user] = NO_LIMIT if limit is None else limit
            self.limit_bytes = min(self._limits.values(), default=None)
        if self.id is not None or self.limit_bytes is not None:
            self.run(self._write_limit)

    def drop_user(self, user: int) -> None:
        """Forget what one user asked for, while others of this process go on; the last limit stays in force."""
        with self.state:
            asked_for = self._limits.pop(user, None), self._policies.pop(user, None)
            self.limit_bytes = min(self._limits.values(), default=None)
        if self.id is not None and asked_for != (None, None):
            self.run(self._register)

    def _write_limit(self, tx: LedgerTransaction) -> None:
        assert self.id is not None
        self._write_note(tx, self._pinned())
        tx.set_limit(self.id, self.limit_bytes)

    def ask_for_policy(self, user: int, name: str) -> None:
        """Put an eviction policy in force, unless a living process, or another user in this one, holds to a different one."""
        with self.state:
            if not self._policies or name in self._policies.values():
                self._policies[user] = name
        current = self.run(self._register)
        if current != name:
            logger.warning(
                "the cache %s evicts by %s, which another user of it asked for: eviction_policy=%r takes effect when it is "
                "opened after that one has ended",
                self._disk.root,
                current,
                name,
            )

    def pin(self, keys: Sequence[bytes]) -> None:
        """Count one more pin on each key; inside a transaction of this owner, and with `state`."""
        self._counts.update(keys)
        self.num_changes += len(keys)
        self._is_note_short = True

    def unpin(self, keys: Sequence[bytes]) -> list[bytes]:
        """Count one pin less on each key; written with the next transaction. Call with `state`.

        Returns:
            The keys that are pinned no more.
        """
        counts = self._counts
        free: list[bytes] = []
        self.num_changes += len(keys)
        for key in keys:
            count = counts.pop(key)
            if count > 1:
                counts[key] = count - 1
            else:
                free.append(key)
        return free

    def _pinned(self) -> list[bytes]:
        with self.state:
            return list(self._counts)

    @property
    def is_registered(self) -> bool:
        """Whether the ledger knows this process, and its limit, as far as we know."""
        return self._generation == self._ledger.database.generation and not self.is_closed

    @contextmanager
    def transaction(self, *, is_flush: bool = False) -> Iterator[LedgerTransaction]:
        """Run the body in the ledger as this owner: registered, what was deferred written first, and its pins last.

        They are written once, or once more before a transaction reads all pins (`LedgerTransaction.pinned`).
        """
        with locks.uninterrupted():
            self._check_open()
            try:
                with self._ledger.database.write_transaction(body_commits=True) as connection:
                    self._check_open()  # again, under the lock: a row that is registered now would have nobody to remove it
                    try:
                        tx = LedgerTransaction(connection, self._write_pins)
                        self._enter(tx, is_flush=is_flush)
                        yield tx
                        self._write_pins(tx)
                    except sqlite3.IntegrityError as error:
                        raise damage.met_by_own_statement(error) from error
                    # Noted before the next transaction, which would write it once more: meanwhile another process may have
                    # evicted what came, whose row would be back without its file, or in the place of one that reserves room.
                    connection.execute("COMMIT")
                    self.num_committed = self._num_written
                    for work in self._deferred:
                        work.written()
            except BaseException:
                self._generation = -1  # rolled back: what we believe of our row may be wrong
                raise

    def _check_open(self) -> None:
        if self.is_closed:
            raise CacheClosedError(
                f"the cache {self._disk.root} was closed, or the dataset that reads through it: open it again"
            )

    def run(self, work: Callable[[LedgerTransaction], T], *, is_flush: bool = False) -> T:
        """Return what `work` returns in a transaction; see `run_in`."""
        return run_in(partial(self.transaction, is_flush=is_flush), work)

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits for a transaction."""
        self.collect()
        return self.num_changes != self.num_committed or any(work.is_waiting for work in self._deferred)

    def flush(self) -> None:
        """Write what changed, if anything did."""
        if not self.is_closed and self.is_waiting:
            self.run(lambda _: None, is_flush=True)

    def hand_over(self, give: Callable[[int], None]) -> None:
        """End, but for the pins: they hold for as long as the process that `give` gives our locked file to has it open.

        In the ledger it is an owner without a process from then on (pid 0), and who finds no room otherwise takes it.
        """
        with locks.uninterrupted():
            if self.is_closed or self.id is None or self._fd is None:
                return
            try:
                self.run(self._end_process, is_flush=True)
                give(self._fd)
            finally:
                self.is_closed = True
                for work in self._deferred:
                    work.give_up()
                if self._fd is not None:  # a directory that was removed: the owner has ended meanwhile
                    locks.close_descriptor(self._fd)
                self.id, self._fd = None, None
                self._forget()

    def _end_process(self, tx: LedgerTransaction) -> None:
        assert self.id is not None
        assert self._fd is not None
        tx.end_process(self.id)
        self._write_pins(tx)
        self._disk.owners.write_note(self._fd, OwnerNote(0, None, self._counts))  # what a rebuild takes up

    def close(self) -> None:
        """Give back everything: pins, row, file; who only looked has nothing."""
        with locks.uninterrupted():
            self.is_closed = True
            if self.id is None:
                return
            try:
                self._ledger.run(self._leave)
            finally:  # without its file locked, the next process reaps what is left of this one
                for work in self._deferred:
                    work.give_up()
                if self._fd is not None:
                    locks.close_descriptor(self._fd)
                self.id, self._fd = None, None
                self._forget()

    def _leave(self, tx: LedgerTransaction) -> None:
        assert self.id is not None
        for work in self._deferred:
            work.write(tx, is_flush=True)
        recover.reap_owners(tx, self._disk)  # else the limit that stays with the last row would be one of the dead
        self._disk.owners.remove(self.id)
        tx.remove_owners([self.id])

    def _enter(self, tx: LedgerTransaction, *, is_flush: bool) -> None:
        """Register where needed, and write what was deferred."""
        self._num_written = self.num_committed
        if self.id is None:
            self.id = uuid.uuid4().hex
        if self._fd is None or os.fstat(self._fd).st_nlink == 0:  # removed with its directory: others think us dead
            if self._fd is not None:
                old, self._fd = self._fd, None  # first: if no other one can be made, its number may soon be another file's
                locks.close_descriptor(old)
            try:
                self._fd = self._disk.owners.create(self.id)
            except OSError as error:
                if not emergency.give_room_after(error, self._disk):
                    raise
                self._fd = self._disk.owners.create(self.id)
            self._generation = -1
        if self._generation != self._ledger.database.generation:
            self._register(tx)
        if self._disk.is_ballast_dropped:  # files have gone without their rows
            recover.settle_removal(tx, self._disk)
        for work in self._deferred:
            work.write(tx, is_flush=is_flush)

    def _register(self, tx: LedgerTransaction) -> str:
        """Have the ledger know us, and what our users ask for; return the eviction policy in force."""
        assert self.id is not None
        with self.state:
            policy = next(iter(self._policies.values()), None)
        self._write_note(tx, self._pinned())  # before the row: the file may say too much, never too little
        recover.reap_owners(tx, self._disk)  # workers of an earlier epoch, say: their pins would count as company
        tx.add_owner(self.id, pid=os.getpid(), host=socket.gethostname(), name=_program(), limit_bytes=self.limit_bytes)
        current = choose(tx, self.id, policy)
        _take_first_limit(tx, self._disk)
        self._generation, self._num_written = self._ledger.database.generation, -1
        return current

    def _write_pins(self, tx: LedgerTransaction) -> None:
        """Have our row name what we pin by now, if it does not."""
        self.collect()
        if self.num_changes == self._num_written:
            return
        assert self.id is not None
        with self.state:
            pinned, num_changes, is_note_short = list(self._counts), self.num_changes, self._is_note_short
            self._is_note_short = False
        if is_note_short:
            self._write_note(tx, pinned)  # before COMMIT: the file may name too many keys, never too few
        tx.set_pins(self.id, pinned)
        self._num_written = num_changes

    def _write_note(self, tx: LedgerTransaction, pinned: Collection[bytes]) -> None:
        assert self._fd is not None
        note = OwnerNote(os.getpid(), self.limit_bytes, pinned)
        try:
            self._disk.owners.write_note(self._fd, note)
        except OSError as error:
            if not emergency.give_room_after(error, self._disk, keep=pinned):
                raise
            tx.is_removal_read = False  # it has written another one
            self._disk.owners.write_note(self._fd, note)


def _program() -> str:
    """Return what a person would call this process."""
    return Path(sys.argv[0]).name if sys.argv and sys.argv[0] not in ("", "-c", "-m") else "python"


def _take_first_limit(tx: LedgerTransaction, disk: Disk) -> None:
    """Give a new directory its limit, if none is given."""
    if (first_bytes := take_first_limit(tx, disk)) is not None:
        logger.info(
            "the cache %s is new and no limit is given: it takes half of the free space, %d bytes; give cache_limit to choose "
            "(None: no limit)",
            disk.root,
            first_bytes,
        )
