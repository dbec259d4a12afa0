"""The SQL of the ledger, and nothing but SQL: no file is touched here.

`LedgerTransaction` is what one write transaction may do; its methods are short so that the protocol (`cache.acquire`,
`cache.recovery`) reads as steps. Hot statements go straight to the DBAPI connection: SQLAlchemy Core costs 2.4 times that, its
ORM 12 times. INSERT OR REPLACE on `entry` is forbidden: it fires no delete trigger, and the totals would drift.
"""

from __future__ import annotations

import sqlite3
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from itertools import islice
from typing import TypeVar

from sqlstream.cache.ledger import damage
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.model.refs import KEY_BYTES, split_keys
from sqlstream.cache.model.rows import NO_LIMIT, Account, EntryRow, LedgerSummary, Publication, ReadyRow, Reservation
from sqlstream.errors import CacheDamagedError, CacheDiskError

T = TypeVar("T")
ENTRY_COLUMNS = "entry.key, state, size, charged_bytes, part, ext, url"
# Many keys are one BLOB, cut by SQLite: one statement for any number, at half the cost of a mark for each. One key is a mark.
_FIND = f"SELECT {ENTRY_COLUMNS} FROM json_each(?) CROSS JOIN entry ON entry.key = substr(?, value, {KEY_BYTES})"
_FIND_READY = f"{_FIND.replace(ENTRY_COLUMNS, 'entry.key, size, charged_bytes, ext')} WHERE state = 'ready'"
_FIND_ONE_READY = "SELECT key, size, charged_bytes, ext FROM entry WHERE key = ? AND state = 'ready'"
_LIMIT = f"nullif(meta.limit_bytes, {NO_LIMIT})"
_FULLNESS = f"SELECT ready_bytes + filling_bytes, {_LIMIT}, policy FROM totals, meta"
_ACCOUNT = f"SELECT entries, ready_bytes, filling_bytes, {_LIMIT} FROM totals, meta"
_NOTE_LIMIT = (
    "UPDATE meta SET limit_bytes = (SELECT min(limit_bytes) FROM owner) WHERE limit_bytes IS NOT (SELECT min(limit_bytes) "
    "FROM owner) AND EXISTS (SELECT 1 FROM owner WHERE limit_bytes IS NOT NULL)"
)
_OUTLOOK = (
    f"SELECT entries, ready_bytes, filling_bytes, {_LIMIT}, "
    "(SELECT count(*) FROM owner WHERE length(pins) > 0 AND pid > 0), policy, uses FROM totals, meta"
)


class LedgerTransaction:
    """One write transaction on the ledger.

    Args:
        connection: It has begun.
        before_pins_are_read: Writes the pins of whose transaction it is, as they are by then.
    """

    def __init__(
        self, connection: sqlite3.Connection, before_pins_are_read: Callable[[LedgerTransaction], None] | None = None
    ) -> None:
        self.connection = connection
        self._execute = connection.execute
        self._before_pins_are_read = before_pins_are_read
        self.unlinked: set[bytes] = set()
        """Keys whose files went before its COMMIT, or that of one which came to none (`recover.remove`)."""
        self.is_removal_read = False
        """The note of files that go holds nothing that is not in `unlinked`, or uncounted."""

    # -- the account --------------------------------------------------------------------------------------------------

    def account(self) -> Account:
        """Return the sums and the limit in force."""
        entries, ready, filling, limit = self._execute(_ACCOUNT).fetchone()
        return Account(entries=entries, ready_bytes=ready, filling_bytes=filling, limit_bytes=limit)

    def outlook(self) -> LedgerSummary:
        """Return all that does not depend on keys, in one statement."""
        entries, ready, filling, limit, num_owners, policy, num_uses = self._execute(_OUTLOOK).fetchone()
        account = Account(entries=entries, ready_bytes=ready, filling_bytes=filling, limit_bytes=limit)
        return LedgerSummary(account=account, num_pinning_owners=num_owners, policy=policy, num_uses=num_uses)

    def boot_id(self) -> str:
        """Return the start of the machine during which this ledger was last compared with the disk."""
        return str(self._execute("SELECT boot_id FROM meta").fetchone()[0])

    def set_boot_id(self, boot_id: str) -> None:
        """Note that ledger and disk agree in this start of the machine."""
        self._execute("UPDATE meta SET boot_id = ?", (boot_id,))

    def set_unit(self, unit_bytes: int, filesystem: str) -> None:
        """Note the allocation unit, and where it was seen."""
        self._execute("UPDATE meta SET unit_bytes = ?, filesystem = ?", (unit_bytes, filesystem))

    def count_anew(self, unit_bytes: int) -> None:
        """Charge all entries in another unit: by their sizes, those on their way by what was reserved. A scan."""
        self._execute(
            "UPDATE entry SET charged_bytes = (iif(state = 'ready', size, charged_bytes) + ? - 1) / ? * ?", (unit_bytes,) * 3
        )

    def next_tick(self, num_ticks: int = 1) -> int:
        """Advance the logical clock and return it."""
        return int(self._execute("UPDATE meta SET tick = tick + ? RETURNING tick", (num_ticks,)).fetchall()[0][0])

    def count(self, counters: Mapping[str, int]) -> None:
        """Add to the statistics."""
        changed = [(name, value) for name, value in counters.items() if value]
        if changed:
            self.connection.executemany(
                "INSERT INTO stat VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value", changed
            )

    # -- entries ------------------------------------------------------------------------------------------------------

    def find(self, keys: Collection[bytes]) -> dict[bytes, EntryRow]:
        """Return the rows of those `keys` that have one."""
        rows = self._execute(_FIND, (positions(len(keys)), b"".join(keys))).fetchall()
        return {row[0]: EntryRow._make(row) for row in rows}

    def find_ready(self, keys: Collection[bytes]) -> dict[bytes, ReadyRow]:
        """Return what pinning must know of those `keys` whose objects are whole."""
        if len(keys) == 1:
            rows = self._execute(_FIND_ONE_READY, (*keys,)).fetchall()
        else:
            rows = self._execute(_FIND_READY, (positions(len(keys)), b"".join(keys))).fetchall()
        return _by_key(keys, rows)

    def reserve(self, reservations: Iterable[Reservation]) -> None:
        """Count room before any byte is written."""
        now = int(time.time())
        self.connection.executemany(
            "INSERT INTO entry (key, url, size, charged_bytes, state, tick, part, ext, dataset, etag, created_at, rank, shard) "
            "VALUES (?, ?, NULL, ?, 'filling', 0, ?, ?, ?, NULL, ?, ?, ?)",
            [(r.key, r.url, r.charged_bytes, r.part, r.ext, r.dataset, now, r.rank, r.shard) for r in reservations],
        )

    def extend(self, key: bytes, part: str, charged_bytes: int) -> bool:
        """Set the charge of an object on its way; False when it has no row."""
        sql = "UPDATE entry SET charged_bytes = ? WHERE key = ? AND part = ?"
        return self._execute(sql, (charged_bytes, key, part)).rowcount == 1

    def publish(self, publications: Iterable[Publication]) -> None:
        """Make entries ready with their real charge; a row that a rebuild has lost is written anew."""
        tick, now = self.next_tick(), int(time.time())
        self.connection.executemany(
            "INSERT INTO entry "
            "(key, url, size, charged_bytes, state, tick, part, ext, dataset, etag, created_at, crc32, shard) "
            "VALUES (?, ?, ?, ?, 'ready', ?, NULL, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET size = excluded.size, "
            "charged_bytes = excluded.charged_bytes, state = 'ready', tick = excluded.tick, part = NULL, etag = excluded.etag, "
            "url = excluded.url, ext = excluded.ext, created_at = excluded.created_at, crc32 = excluded.crc32",
            [
                (p.key, p.url, p.size_bytes, p.charged_bytes, tick, p.ext, p.dataset, p.etag, now, p.crc32, p.shard)
                for p in publications
            ],
        )

    def remove(self, keys: Iterable[bytes]) -> None:
        """Uncount entries; their files are gone already."""
        self.connection.executemany("DELETE FROM entry WHERE key = ?", [(key,) for key in keys])

    def remove_filling(self, key: bytes, part: str) -> None:
        """Uncount an object on its way, unless another process leads it by now."""
        self._execute("DELETE FROM entry WHERE key = ? AND part = ?", (key, part))

    def enter_files(self, found: Mapping[Publication, int]) -> None:
        """Count files that a rebuild found, each with its tick."""
        self.connection.executemany(
            "INSERT INTO entry (key, url, size, charged_bytes, state, tick, part, ext, dataset, etag, created_at) "
            "VALUES (?, ?, ?, ?, 'ready', ?, NULL, ?, NULL, NULL, ?) ON CONFLICT (key) DO NOTHING",
            [(p.key, p.url, p.size_bytes, p.charged_bytes, tick, p.ext, p.came_at) for p, tick in found.items()],
        )

    def newest(self) -> int:
        """Return when the last entry came, in seconds since 1970; a scan."""
        return int(self._execute("SELECT coalesce(max(created_at), 0) FROM entry").fetchone()[0])

    def created_since(self, keys: Sequence[bytes], since: int, until: int = sys.maxsize) -> set[bytes]:
        """Return those of `keys` whose entries came between `since` and `until`, in seconds since 1970."""
        between = f"{_FIND} WHERE created_at BETWEEN ? AND ?"
        rows = self._execute(between, (positions(len(keys)), b"".join(keys), since, until))
        return {row[0] for row in rows.fetchall()}

    def fillings(self) -> list[EntryRow]:
        """Return all objects on their way: few, whatever the number of entries."""
        return _entries(self._execute(f"SELECT {ENTRY_COLUMNS} FROM entry INDEXED BY entry_filling WHERE state = 'filling'"))

    # -- touches ------------------------------------------------------------------------------------------------------

    def touch(self, keys: Sequence[bytes], hints: bytes | None = None) -> None:
        """Note that `keys` were used now, in this order, for `eviction` to drain: one row for a whole window."""
        tick = self.next_tick(len(keys))
        self._execute("INSERT INTO touch (seq, keys, hints) VALUES (?, ?, ?)", (tick, b"".join(keys), hints))

    # -- owners and pins ----------------------------------------------------------------------------------------------

    def add_owner(self, owner: str, *, pid: int, host: str, name: str, limit_bytes: int | None) -> None:
        """Register a process whose owner file is locked already, and note the limit in force."""
        self._execute(
            "INSERT INTO owner (id, pid, host, started_at, name, limit_bytes) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE "
            "SET pid = excluded.pid, host = excluded.host, name = excluded.name, limit_bytes = excluded.limit_bytes",
            (owner, pid, as_utf8(host), int(time.time()), as_utf8(name), limit_bytes),
        )
        self._execute(_NOTE_LIMIT)

    def set_limit(self, owner: str, limit_bytes: int | None) -> None:
        """Change the limit that an owner gave; None: it gives none any more, and what is in force stays."""
        self._execute("UPDATE owner SET limit_bytes = ? WHERE id = ?", (limit_bytes, owner))
        self._execute(_NOTE_LIMIT)

    def has_limit(self) -> bool:
        """Return whether any limit was ever in force, no limit being one that was given."""
        return self._execute("SELECT limit_bytes FROM meta").fetchone()[0] is not None

    def take_first_limit(self, limit_bytes: int) -> None:
        """Put a limit in force that no user gave."""
        self._execute("UPDATE meta SET limit_bytes = ? WHERE limit_bytes IS NULL", (limit_bytes,))

    def owners(self) -> list[str]:
        """Return the ids of all registered owners."""
        return [row[0] for row in self._execute("SELECT id FROM owner").fetchall()]

    def owners_at_limit(self) -> set[str]:
        """Return the owners whose limit is the one in force."""
        rows = self._execute("SELECT id FROM owner WHERE limit_bytes = (SELECT min(limit_bytes) FROM owner)").fetchall()
        return {row[0] for row in rows}

    def remove_owners(self, owners: Iterable[str]) -> None:
        """Forget owners and their pins. With the last one that gave a limit, what is in force stays."""
        self.connection.executemany("DELETE FROM owner WHERE id = ?", [(owner,) for owner in owners])
        self._execute(_NOTE_LIMIT)

    def end_process(self, owner: str) -> None:
        """Note that an owner's process has ended, while another one keeps its pins; the limit that it gave ends with it."""
        self._execute(
            "UPDATE owner SET pid = 0, name = name || ' (ended)', waiting_tick = NULL, limit_bytes = NULL WHERE id = ?",
            (owner,),
        )
        self._execute(_NOTE_LIMIT)

    def owners_without_process(self) -> list[str]:
        """Return the owners whose process has ended, while another one keeps their pins."""
        return [row[0] for row in self._execute("SELECT id FROM owner WHERE pid = 0").fetchall()]

    def set_pins(self, owner: str, keys: Iterable[bytes]) -> None:
        """Have an owner pin these keys, and no others."""
        self._execute("UPDATE owner SET pins = ? WHERE id = ?", (b"".join(keys), owner))

    def pinned(self, *, besides: str | None = None) -> set[bytes]:
        """Return the keys that anybody pins, or anybody but one owner; at half the time of the view `pin`."""
        if self._before_pins_are_read is not None:
            self._before_pins_are_read(self)
        rows = self._execute("SELECT pins FROM owner WHERE length(pins) > 0 AND id IS NOT ?", (besides,)).fetchall()
        return set().union(*(split_keys(row[0]) for row in rows))

    def pinned_by_others(self, key: bytes, owner: str | None) -> bool:
        """Return whether any other owner pins `key`."""
        return key in self.pinned(besides=owner)

    # -- waiting for room ---------------------------------------------------------------------------------------------

    def wait_in_line(self, owner: str, need_bytes: int) -> None:
        """Queue an owner for room; its place is that of its first call."""
        self._execute(
            "UPDATE owner SET waiting_tick = coalesce(waiting_tick, ?), waiting_bytes = ? WHERE id = ?",
            (self.next_tick(), need_bytes, owner),
        )

    def leave_line(self, owner: str) -> None:
        """Take an owner out of the queue."""
        self._execute("UPDATE owner SET waiting_tick = NULL, waiting_bytes = NULL WHERE id = ?", (owner,))

    def waits_before(self, owner: str) -> dict[str, int]:
        """Return owners, with the bytes they need, that have waited for room longer than `owner` (if it waits at all)."""
        rows = self._execute(
            "SELECT id, waiting_bytes FROM owner WHERE waiting_tick IS NOT NULL AND id <> ? AND waiting_tick < "
            "coalesce((SELECT waiting_tick FROM owner WHERE id = ?), 9223372036854775807)",
            (owner, owner),
        ).fetchall()
        return dict(rows)

    # -- datasets -----------------------------------------------------------------------------------------------------

    def add_dataset(self, name: str, src: str, fingerprint: str) -> int:
        """Register a dataset by its name and return its id."""
        row = self._execute(
            "INSERT INTO dataset (name, src, fingerprint, last_used) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
            "SET src = excluded.src, fingerprint = excluded.fingerprint, last_used = excluded.last_used RETURNING id",
            (name, src, fingerprint, int(time.time())),
        ).fetchall()
        return int(row[0][0])

    # -- verification -------------------------------------------------------------------------------------------------

    def sums(self) -> tuple[int, int, int]:
        """Return entries, ready bytes and filling bytes, added up over all rows: for verification only."""
        row = self._execute(
            "SELECT count(*), coalesce(sum(charged_bytes) FILTER (WHERE state = 'ready'), 0), "
            "coalesce(sum(charged_bytes) FILTER (WHERE state = 'filling'), 0) FROM entry"
        ).fetchone()
        return (row[0], row[1], row[2])

    def set_totals(self, entries: int, ready_bytes: int, filling_bytes: int) -> None:
        """Overwrite the sums that the triggers keep."""
        sums = entries, ready_bytes, filling_bytes
        self._execute("UPDATE totals SET entries = ?, ready_bytes = ?, filling_bytes = ?", sums)


def as_utf8(text: str) -> str:
    """Return a text that SQLite takes: names of files that are no UTF-8 hold halves of surrogate pairs."""
    return text.encode(errors="backslashreplace").decode()


def run_in(transaction: Callable[[], AbstractContextManager[LedgerTransaction]], work: Callable[[LedgerTransaction], T]) -> T:
    """Return what `work` returns in a transaction; if the ledger fails, once more: by then it may have been mended."""
    try:
        with transaction() as tx:
            return work(tx)
    except (CacheDamagedError, CacheDiskError):
        with transaction() as tx:
            return work(tx)


class Ledger:
    """The ledger database of one cache directory, as this process sees it."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @contextmanager
    def transaction(self) -> Iterator[LedgerTransaction]:
        """Run the body as one write transaction."""
        with self.database.write_transaction() as connection:
            try:
                yield LedgerTransaction(connection)
            except sqlite3.IntegrityError as error:
                raise damage.met_by_own_statement(error) from error

    def run(self, work: Callable[[LedgerTransaction], T]) -> T:
        """Return what `work` returns in a transaction; see `run_in`."""
        return run_in(self.transaction, work)

    def find(self, keys: Collection[bytes]) -> dict[bytes, EntryRow]:
        """Return rows of the last committed state, without the write lock: a hint, to be checked again under it."""
        rows = self.database.read(_FIND, (positions(len(keys)), b"".join(keys)))
        return {row[0]: EntryRow._make(row) for row in rows}

    def find_ready(self, keys: Collection[bytes]) -> dict[bytes, ReadyRow]:
        """Return the same for whole objects, as far as pinning must know it."""
        if len(keys) == 1:
            rows = self.database.read(_FIND_ONE_READY, tuple(keys))
        else:
            rows = self.database.read(_FIND_READY, (positions(len(keys)), b"".join(keys)))
        return _by_key(keys, rows)

    def unit(self) -> tuple[int, str]:
        """Return the allocation unit in bytes, 0 if it is not known, and the file system on which it was seen."""
        return self.database.read("SELECT unit_bytes, filesystem FROM meta")[0]

    def fullness(self) -> tuple[int, int | None, str]:
        """Return the bytes charged, the limit and the name of the policy in force."""
        return self.database.read(_FULLNESS)[0]

    def ready_after(self, key: bytes, limit: int, dataset: int | None = None) -> list[EntryRow]:
        """Return up to `limit` ready entries beyond `key`, of one dataset or of all, in the order of their keys."""
        rows = self.database.read(
            f"SELECT {ENTRY_COLUMNS} FROM entry WHERE key > ? AND state = 'ready' AND (? IS NULL OR dataset = ?) "
            "ORDER BY key LIMIT ?",
            (key, dataset, dataset, limit),
        )
        return [EntryRow._make(row) for row in rows]

    def account(self) -> Account:
        """Return the sums and the limit, of the last committed state."""
        row = self.database.read(_ACCOUNT)[0]
        return Account(entries=row[0], ready_bytes=row[1], filling_bytes=row[2], limit_bytes=row[3])

    def share_bytes(self, num_expected: int) -> int | None:
        """Return one owner's part of the limit, among all that hold pins and at least `num_expected`."""
        limit, num_owners = self.database.read(
            f"SELECT {_LIMIT}, (SELECT count(*) FROM owner WHERE length(pins) > 0 AND pid > 0) FROM meta"
        )[0]
        return None if limit is None else int(limit) // max(num_expected, num_owners)

    def owner_names(self) -> dict[str, str]:
        """Return program and process of every registered owner, by its id."""
        return {row[0]: f"{row[1]} (pid {row[2]})" for row in self.database.read("SELECT id, name, pid FROM owner")}

    def waiting_owners(self) -> list[str]:
        """Return the owners that wait for room."""
        return [row[0] for row in self.database.read("SELECT id FROM owner WHERE waiting_tick IS NOT NULL")]

    def pinned_bytes_by_owner(self) -> list[tuple[str, int, int]]:
        """Return program, pid and pinned bytes of every owner that pins, most first."""
        return self.database.read(
            "SELECT o.name, o.pid, sum(e.charged_bytes) FROM pin p JOIN owner o ON o.id = p.owner "
            "JOIN entry e ON e.key = p.key GROUP BY o.id ORDER BY 3 DESC"
        )

    def policy(self) -> str:
        """Return the name of the eviction policy in force."""
        return str(self.database.read("SELECT policy FROM meta")[0][0])

    def changes(self) -> int:
        """Return a number that moves when another process has committed; far cheaper than asking what."""
        return int(self.database.read("PRAGMA data_version")[0][0])


@lru_cache(maxsize=256)
def positions(num_keys: int) -> str:
    """Return, as JSON, where each of `num_keys` joined keys begins, counted from 1 as SQL does."""
    return f"[{','.join(map(str, range(1, KEY_BYTES * num_keys + 1, KEY_BYTES)))}]"


def _by_key(keys: Collection[bytes], rows: list[ReadyRow]) -> dict[bytes, ReadyRow]:
    """Return `rows` by their keys.

    SQLite promises no order without ORDER BY. Where the rows do come in the order of `keys`, the dict is made of `keys`, whose
    hashes are known already.
    """
    if [row[0] for row in rows] == list(keys):
        return dict(zip(keys, rows, strict=True))
    return {row[0]: row for row in rows}


def _entries(cursor: sqlite3.Cursor) -> list[EntryRow]:
    return [EntryRow._make(row) for row in cursor.fetchall()]


def batched(items: Iterable[T], size: int) -> Iterator[tuple[T, ...]]:
    """Yield tuples of up to `size` items (`itertools.batched` comes with Python 3.12)."""
    rest = iter(items)
    while batch := tuple(islice(rest, size)):
        yield batch
