"""What the dead left behind, and whether ledger and disk agree: reap, verify.

Reaping costs O(in flight): owners, pins and objects on their way, never the number of entries.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from sqlstream.cache.files.disk import DataFile, Disk
from sqlstream.cache.ledger import damage
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction, batched
from sqlstream.cache.model.rows import EntryRow, Publication
from sqlstream.errors import CacheDamagedError, CacheError

logger = logging.getLogger(__name__)

VERIFY_BATCH = 512
"""Entries compared in one step; between steps others use the write lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing on which ledger and disk disagree."""

    kind: str
    """`missing file`, `wrong size`, `wrong content`, `unknown file` or `wrong totals`."""
    key: str
    """Hex of the entry's key."""
    url: str
    bytes: int
    """Bytes charged for it, or found on disk where nothing is charged."""
    explanation: str
    """What is so, what it comes from, and what a repair does about it."""
    repaired: bool = False


def reap(tx: LedgerTransaction, disk: Disk) -> int:
    """Give back what dead processes held; return how many owners and downloads that were."""
    num_settled = settle_fillings(tx, disk)
    return reap_owners(tx, disk) + num_settled + settle_removal(tx, disk)


def remove(
    tx: LedgerTransaction,
    disk: Disk,
    rows: Sequence[EntryRow],
    *,
    num_bytes: int | None = None,
    num_files: int = 0,
    at_most: int | None = None,
) -> list[EntryRow]:
    """Remove files, then their rows, and return those that are gone; in a transaction that saw that no owner pins them.

    Args:
        tx: That transaction.
        disk: Where the files are.
        rows: What may go, in this order; what a process reads under a lock is left.
        num_bytes: Stop when so many charged bytes are gone, and `num_files`; None: remove all.
        num_files: The same, of files.
        at_most: Stop after so many files.
    """
    if not tx.is_removal_read:  # the note that is replaced may be of a transaction that came to no COMMIT, or of an emergency
        ghosts = _ghosts(tx, disk, disk.read_removal())
        tx.unlinked |= {row.key for row in ghosts}
        _uncount(tx, ghosts)
        tx.is_removal_read = True
    disk.announce_removal([*tx.unlinked, *(row.key for row in rows)])
    gone: list[EntryRow] = []
    freed = 0
    for row in rows:
        if (num_bytes is not None and freed >= num_bytes and len(gone) >= num_files) or len(gone) == at_most:
            break
        if disk.remove_data(row.key, row.ext):
            gone.append(row)
            freed += row.charged_bytes
    tx.remove([row.key for row in gone])
    tx.unlinked |= {row.key for row in gone}
    return gone


def quarantine(tx: LedgerTransaction, disk: Disk, key: bytes, owner: str | None) -> None:
    """Remove a ready file that is not what its row says, and its row, so that it is fetched again.

    Raises:
        CacheError: Others than `owner` pin it, or a process reads it under a lock.
    """
    row = tx.find([key]).get(key)
    size_bytes = disk.data_size(key, row.ext) if row is not None else None
    if row is None or not row.is_ready or size_bytes == row.size_bytes:
        return
    if size_bytes is not None and (tx.pinned_by_others(key, owner) or disk.is_read(key, row.ext)):
        raise CacheError(
            f"the cached file of {row.url} has {size_bytes} bytes instead of {row.size_bytes}, and another process reads it: "
            f"find out what writes into {disk.root}/data"
        )
    is_evicted = size_bytes is None and key in disk.read_removal()  # by a process that died before its COMMIT
    remove(tx, disk, [row])
    if not is_evicted:
        logger.warning("the cached file of %s was changed or removed by another program: fetching it again", row.url)
        tx.count({"quarantined": 1})


def settle_removal(tx: LedgerTransaction, disk: Disk) -> int:
    """Uncount files that a process unlinked before it died, or for room in an emergency; return how many.

    The note then names no others: it has room for so many keys, and on a full disk it cannot grow.
    """
    noted = disk.read_removal()
    ghosts = _ghosts(tx, disk, noted)
    num_uncounted = _uncount(tx, ghosts)
    if not tx.is_removal_read:
        tx.unlinked |= {row.key for row in ghosts}
        tx.is_removal_read = True
        if len(noted) > len(tx.unlinked):
            disk.announce_removal([*tx.unlinked])
    return num_uncounted


def _ghosts(tx: LedgerTransaction, disk: Disk, noted: Sequence[bytes]) -> list[EntryRow]:
    """Return the rows of files that were unlinked by a transaction without a COMMIT."""
    rows = tx.find(noted).values()
    return [row for row in rows if row.is_ready and disk.data_size(row.key, row.ext) is None]


def _uncount(tx: LedgerTransaction, ghosts: Sequence[EntryRow]) -> int:
    """Remove those of the rows that no process pins; return how many."""
    pinned = tx.pinned() if ghosts else set()
    free = [row.key for row in ghosts if row.key not in pinned]
    tx.remove(free)
    return len(free)


def reap_owners(tx: LedgerTransaction, disk: Disk) -> int:
    """Forget dead owners with their pins, and files of processes that died before their row; return how many owners."""
    registered = tx.owners()
    dead = [owner for owner in registered if not disk.owners.is_live(owner)]
    for owner in dead:
        disk.owners.remove(owner)
    if dead:
        tx.remove_owners(dead)  # together: the limit of one is not raised to that of another one that is dead as well
    for owner in set(disk.owners.scan()) - set(registered):
        disk.owners.remove_dead(owner)  # created, and dead before its row
    for part in set(disk.scan_parts()) - {row.part for row in tx.fillings()}:
        disk.remove_dead_part(part)  # likewise
    if dead:
        settle_fillings(tx, disk)  # what they led
    return len(dead)


def take_from_ended(tx: LedgerTransaction, disk: Disk) -> int:
    """Take their pins from owners whose process has ended: paths of batches under way; return how many owners."""
    ended = tx.owners_without_process()
    for owner in ended:
        disk.owners.remove(owner)
    if ended:
        tx.remove_owners(ended)
    return len(ended)


def settle_fillings(tx: LedgerTransaction, disk: Disk) -> int:
    """Settle all downloads whose leaders are gone; return how many."""
    return sum(settle_filling(tx, disk, row) for row in tx.fillings())


def settle_filling(tx: LedgerTransaction, disk: Disk, row: EntryRow) -> bool:
    """Settle a download whose leader is gone: ready if its file was renamed already, else given back.

    Returns:
        False when the leader or its helper still works on it, or its part cannot be removed.
    """
    if row.part is None:
        raise damage.damaged(f"the row of {row.url} is neither ready nor on its way")
    if disk.part_is_live(row.part):
        return False
    size_bytes = disk.data_size(row.key, row.ext)
    if size_bytes is not None:
        charge = disk.unit.charge(size_bytes)
        tx.publish([Publication(key=row.key, url=row.url, ext=row.ext, size_bytes=size_bytes, charged_bytes=charge)])
    elif disk.remove_part(row.part):
        tx.remove_filling(row.key, row.part)
    else:
        return False
    return True


def verify(ledger: Ledger, disk: Disk, *, repair: bool) -> list[Finding]:
    """Return what differs between ledger and disk, mended when `repair`; live readers and downloads go on meanwhile."""
    findings: list[Finding] = []
    _check_pages(ledger)
    ledger.run(lambda tx: reap(tx, disk))  # the dead are ordinary, and no finding
    last = b""
    while rows := ledger.ready_after(last, VERIFY_BATCH):
        last = rows[-1].key
        findings += _verify_entries(ledger, disk, rows, repair=repair)
    for files in batched(disk.scan_data(), VERIFY_BATCH):
        findings += _verify_files(ledger, disk, files, repair=repair)
    return findings + ledger.run(lambda tx: _verify_totals(tx, repair=repair))


def _check_pages(ledger: Ledger) -> None:
    """Have a ledger whose tables and indexes SQLite finds damaged rebuilt by the next use, as other damage is."""
    flaw = ledger.database.read("PRAGMA integrity_check(1)")[0][0]
    if flaw != "ok":
        with contextlib.suppress(CacheDamagedError), ledger.transaction():
            raise damage.damaged(flaw)


def _verify_entries(ledger: Ledger, disk: Disk, rows: Sequence[EntryRow], *, repair: bool) -> list[Finding]:
    """Compare ready rows with their files: first without the write lock, then those that differ once more under it."""
    suspects = [row.key for row in rows if disk.data_size(row.key, row.ext) != row.size_bytes]
    return ledger.run(lambda tx: _compare_entries(tx, disk, suspects, repair=repair)) if suspects else []


def _compare_entries(tx: LedgerTransaction, disk: Disk, keys: Sequence[bytes], *, repair: bool) -> list[Finding]:
    findings = []
    pinned = tx.pinned()
    for row in tx.find(keys).values():
        size_bytes = disk.data_size(row.key, row.ext)
        if row.is_ready and size_bytes != row.size_bytes:
            is_free = size_bytes is None or not (row.key in pinned or disk.is_read(row.key, row.ext))
            repaired = repair and is_free and bool(remove(tx, disk, [row]))
            finding = Finding(
                kind="missing file" if size_bytes is None else "wrong size",
                key=row.key.hex(),
                url=row.url,
                bytes=row.charged_bytes,
                explanation=_explanation(row, size_bytes, is_free=is_free),
                repaired=repaired,
            )
            findings.append(finding)
    return findings


def _explanation(row: EntryRow, size_bytes: int | None, *, is_free: bool) -> str:
    cure = "a repair forgets it, and it is fetched again when it is wanted"
    if size_bytes is None:
        return f"the ledger has {row.size_bytes} bytes, but no file is there: another program deleted it; {cure}"
    if not is_free:
        cure = "a running process reads it: repair again when that has ended"
    return f"the file has {size_bytes} bytes instead of {row.size_bytes}: another program changed it; {cure}"


def _verify_files(ledger: Ledger, disk: Disk, files: Sequence[DataFile], *, repair: bool) -> list[Finding]:
    """Look for files in data/ that no row counts."""
    known = ledger.find([file.key for file in files])
    strangers = [file for file in files if file.key not in known or known[file.key].ext != file.ext]
    return ledger.run(lambda tx: _compare_files(tx, disk, strangers, repair=repair)) if strangers else []


def _compare_files(tx: LedgerTransaction, disk: Disk, files: Sequence[DataFile], *, repair: bool) -> list[Finding]:
    findings = []
    known = tx.find([file.key for file in files])
    for file in files:
        size_bytes = disk.data_size(file.key, file.ext)
        if size_bytes is None or (file.key in known and known[file.key].ext == file.ext):
            continue
        finding = Finding(
            kind="unknown file",
            key=file.key.hex(),
            url="",
            bytes=disk.unit.charge(size_bytes),
            explanation="the file is named as ours, but the ledger does not count it: another program put it there, or put "
            "an old ledger back; a repair deletes it",
            repaired=repair and disk.remove_data(file.key, file.ext),
        )
        findings.append(finding)
    return findings


def _verify_totals(tx: LedgerTransaction, *, repair: bool) -> list[Finding]:
    account, sums = tx.account(), tx.sums()
    stored = (account.entries, account.ready_bytes, account.filling_bytes)
    if stored == sums:
        return []
    if repair:
        tx.set_totals(*sums)
    explanation = (
        f"the sums say {stored[0]} entries, {stored[1]} bytes ready and {stored[2]} filling, the rows {sums[0]}, {sums[1]} and "
        f"{sums[2]}: another program wrote into the ledger; a repair adds up anew"
    )
    num_bytes = abs(sum(stored[1:]) - sum(sums[1:]))
    return [Finding(kind="wrong totals", key="totals", url="", bytes=num_bytes, explanation=explanation, repaired=repair)]
