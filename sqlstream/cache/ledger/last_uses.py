"""When each object was last used, by the clock: a log in the ledger, made short from time to time. SQL only.

The access times of the files do not tell it: under `noatime` and `relatime` they do not move. Processes write one row for all
objects that they used since their last row, in a transaction that they run anyway. An entry's own row is not written for a use:
at random places of a large table that takes 50 times as long. The last use of an object is the latest of when it came
(`created_at`) and of all that the log says, so a clock that was set back makes no object older than a use known before.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from sqlstream.cache.ledger.ledger import LedgerTransaction, positions
from sqlstream.cache.model.refs import KEY_BYTES, split_keys

LOG_KEYS = 1 << 18
"""Keys that the log may hold before it is made short: 4 MiB; arbitrary. Where there are many entries, twice their number."""
COARSE_SECONDS = 60
"""Uses this close together are one row in a log that was made short; it has the time of the last of them."""
_RECENT = (
    f"SELECT entry.key FROM json_each(?) CROSS JOIN entry ON entry.key = substr(?, value, {KEY_BYTES}) WHERE created_at > ?"
)
_NOTE = (
    f"INSERT INTO used (seq, at, keys) VALUES (coalesce((SELECT seq + length(keys) / {KEY_BYTES} FROM used ORDER BY seq DESC "
    "LIMIT 1), 0), ?, ?) RETURNING seq"
)


def note_last_uses(tx: LedgerTransaction, keys: Collection[bytes], *, max_log_keys: int = LOG_KEYS) -> None:
    """Note that `keys`, at least one, were used up to now; make the log short when it is longer than it may be."""
    ((start,),) = tx.connection.execute(_NOTE, (int(time.time()), b"".join(keys))).fetchall()
    end = start + len(keys)
    if end <= max_log_keys:
        return
    first, num_entries = tx.connection.execute("SELECT (SELECT min(seq) FROM used), entries FROM totals").fetchone()
    most = max(max_log_keys, 2 * num_entries)
    if end - first > most:
        _shorten(tx, end, most, keys)


def _shorten(tx: LedgerTransaction, end: int, most: int, newest: Collection[bytes]) -> None:
    """Keep the last use of each key, in rows behind `end`, so that a reader who goes on from there misses none.

    At least a quarter of `most` goes, so that it is some 3 us for each use: half a second for each 200,000 of them.
    """
    seen: set[bytes] = set()
    kept: dict[int, tuple[int, set[bytes]]] = {}
    for at, body in tx.connection.execute("SELECT at, keys FROM used ORDER BY at DESC").fetchall():
        new = set(split_keys(body)) - seen
        seen |= new
        kept.setdefault(at // COARSE_SECONDS, (at, set()))[1].update(new)
    if len(seen) > most * 3 // 4:  # many of them are here no more
        live = {row[0] for row in tx.connection.execute("SELECT key FROM entry").fetchall()}.union(newest)
        for _, old in kept.values():
            old.intersection_update(live)
    rows = []
    for at, keys in kept.values():
        if keys:
            rows.append((end, at, b"".join(keys)))
            end += len(keys)
    tx.connection.execute("DELETE FROM used")
    tx.connection.executemany("INSERT INTO used (seq, at, keys) VALUES (?, ?, ?)", rows)


class RecentUses:
    """The objects that were used after a moment.

    Args:
        moment: In seconds since 1970.
    """

    def __init__(self, moment: float) -> None:
        self._moment = moment
        self._keys: set[bytes] = set()
        """Those that the log names."""
        self._last_seq = -1
        """The last row of the log that was read."""

    def among(self, tx: LedgerTransaction, keys: Collection[bytes]) -> set[bytes]:
        """Return those of `keys` that were used after the moment, as far as the ledger knows in this transaction."""
        execute = tx.connection.execute
        for seq, at, body in execute("SELECT seq, at, keys FROM used WHERE seq > ?", (self._last_seq,)).fetchall():
            self._last_seq = max(self._last_seq, seq)
            if at > self._moment:
                self._keys.update(split_keys(body))
        rows = execute(_RECENT, (positions(len(keys)), b"".join(keys), self._moment)).fetchall()
        return self._keys.intersection(keys).union(row[0] for row in rows)
