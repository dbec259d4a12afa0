"""The account made anew from the files: after damage, and after a crash of the machine.

Both run under the write lock, before anybody reserves. Names are keys; what only the ledger knew (URLs, counters, datasets) is
lost or comes back with use. What cannot be judged is counted, never assumed away.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from pathlib import Path

from sqlstream.cache.files.disk import DataFile, Disk
from sqlstream.cache.ledger.last_uses import note_last_uses
from sqlstream.cache.ledger.ledger import Ledger, LedgerTransaction, batched
from sqlstream.cache.ledger.write_lock import write_durably
from sqlstream.cache.model.refs import BLOCK_BYTES
from sqlstream.cache.model.rows import Publication, Reservation
from sqlstream.cache.recovery import recover
from sqlstream.cache.recovery.free_space import take_first_limit
from sqlstream.cache.recovery.recover import VERIFY_BATCH

logger = logging.getLogger(__name__)

REBUILD_BATCH = 10_000
"""Files entered in one transaction; the marker makes an interrupted rebuild start again."""
SUSPECT_SECONDS = 120
"""Files that came in so shortly before a crash of the machine may not have reached the disk: Linux writes after 35 s."""
_EARLIER = "an earlier start of the machine"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def refill(connection: sqlite3.Connection, disk: Disk) -> None:
    """Fill an empty ledger from data/, from locked parts, and from what living owners wrote down."""
    tx = LedgerTransaction(connection)
    unit_bytes = disk.unit.measure()
    live = {name.partition(".")[0]: name for name in disk.scan_parts() if disk.part_is_live(name)}
    now = time.time()
    for files in batched(disk.scan_data(), REBUILD_BATCH):
        connection.execute("BEGIN IMMEDIATE")
        # Ticks below zero, by age: whatever is used from now on is younger.
        found = [file for file in files if file.key.hex() not in live]
        tx.enter_files({_publication(disk, file): int(min(file.used_at - now, 0)) for file in found})
        if found:
            note_last_uses(tx, [file.key for file in found])  # when they were used was in the ledger that is lost
        connection.execute("COMMIT")
    connection.execute("BEGIN IMMEDIATE")
    tx.reserve(_reservation(disk, key, name) for key, name in live.items())
    for owner in disk.owners.scan():
        note = disk.owners.read_note(owner)
        if note is not None and disk.owners.is_live(owner):
            tx.add_owner(owner, pid=note.pid, host="", name="", limit_bytes=note.limit_bytes)
            tx.set_pins(owner, note.pinned)
    recover.reap(tx, disk)
    if tx.account().entries and (limit_bytes := take_first_limit(tx, disk)) is not None:
        logger.warning(
            "the cache ledger in %s was made anew and its limit is lost: it is what is here and half of the free space, %d "
            "bytes, until one is given",
            disk.root,
            limit_bytes,
        )
    tx.set_unit(unit_bytes, disk.unit.filesystem_id())
    current, noted = boot_id(), (disk.root / "lock").read_text(errors="replace")
    tx.set_boot_id(current if noted in ("", current) else _EARLIER)  # then `reconcile` looks at what may be torn
    if not noted:
        _note_boot(disk, current)
    connection.execute("COMMIT")


def learn_unit(ledger: Ledger, disk: Disk) -> None:
    """Count in the allocation unit that the ledger knows; on another file system than it was seen on, look, and count anew."""
    unit_bytes, filesystem = ledger.unit()
    if unit_bytes and filesystem == disk.unit.filesystem_id():
        disk.unit.num_bytes = unit_bytes
        return
    measured = disk.unit.measure()
    with ledger.transaction() as tx:
        if measured != (unit_bytes or BLOCK_BYTES):
            logger.warning("files in %s take whole units of %d bytes: counting them anew", disk.root, measured)
            tx.count_anew(measured)
        tx.set_unit(measured, disk.unit.filesystem_id())


def reconcile(ledger: Ledger, disk: Disk) -> None:
    """After a crash of the machine, drop rows and files that disagree, and what may never have reached the disk."""
    current = boot_id()
    with ledger.transaction() as tx:
        recorded, newest = tx.boot_id(), tx.newest()
        if recorded == current or not current:
            return
        for row in tx.fillings():  # no process of that boot lives; a renamed file may be torn
            if not disk.part_is_live(row.part or ""):
                disk.remove_data(row.key, row.ext)
                recover.settle_filling(tx, disk, row)
    if recorded:
        logger.warning("the machine was restarted: comparing the cache %s with its files", disk.root)
        _drop_rows(ledger, disk, newest - SUSPECT_SECONDS, current)
        _drop_strangers(ledger, disk, current)
    with ledger.transaction() as tx:
        _note_boot(disk, current)
        tx.set_boot_id(current)  # last: an interrupted comparison starts again


def _note_boot(disk: Disk, current: str) -> None:
    """Have `lock` say, for a ledger that is lost, in which start of the machine files and rows were compared last."""
    with contextlib.suppress(OSError):  # a full disk: then nothing is noted
        write_durably(disk.root / "lock", current.encode())


def boot_id() -> str:
    """Return an id of this start of the machine, '' where the system does not tell."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _drop_rows(ledger: Ledger, disk: Disk, suspect_since: int, current: str) -> None:
    last = b""
    while rows := ledger.ready_after(last, VERIFY_BATCH):
        last = rows[-1].key
        with ledger.transaction() as tx:
            if tx.boot_id() == current:  # another process was faster: what has come since is no suspect, and may be pinned
                return
            young = tx.created_since([row.key for row in rows], suspect_since)
            wrong = [row for row in rows if row.key in young or disk.data_size(row.key, row.ext) != row.size_bytes]
            recover.remove(tx, disk, wrong)


def _drop_strangers(ledger: Ledger, disk: Disk, current: str) -> None:
    """Remove files without a row: the row's commit was lost, and with it perhaps bytes."""
    for files in batched(disk.scan_data(), VERIFY_BATCH):
        with ledger.transaction() as tx:
            if tx.boot_id() == current:
                return
            known = tx.find([file.key for file in files])
            for file in files:
                if file.key not in known or known[file.key].ext != file.ext:
                    disk.remove_data(file.key, file.ext)


def _publication(disk: Disk, file: DataFile) -> Publication:
    charge = max(disk.unit.charge(file.size_bytes), disk.unit.charge(file.allocated_bytes))
    return Publication(
        key=file.key, url="", ext=file.ext, size_bytes=file.size_bytes, charged_bytes=charge, came_at=int(file.came_at)
    )


def _reservation(disk: Disk, key: str, name: str) -> Reservation:
    charge = disk.unit.charge(disk.part_bytes(name)) + sum(
        disk.unit.charge(file.allocated_bytes) for file in disk.scan_data(key[:2]) if file.key.hex() == key
    )
    return Reservation(key=bytes.fromhex(key), url="", ext="", charged_bytes=charge, part=name)
