"""The ledger's tables as SQLAlchemy models: the one description of the schema.

The migrations create the tables (a test compares them with these models), reports read through them (`queries`), and hot
statements are SQL in `ledger.py`.
"""

from __future__ import annotations

from sqlalchemy import Index, Integer, LargeBinary, Text, column, table, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """Registry of the ledger's tables."""

    type_annotation_map = {int: Integer, str: Text, bytes: LargeBinary}  # noqa: RUF012 (SQLAlchemy's own idiom)


class EntryModel(Base):
    """One object in the cache: on its way (`filling`) or whole (`ready`)."""

    __tablename__ = "entry"
    __table_args__ = (
        Index("entry_by_rank", "rank", "tick", sqlite_where=text("state = 'ready'")),
        Index("entry_filling", "part", sqlite_where=text("state = 'filling'")),
        Index("entry_by_shard", "shard", sqlite_where=text("shard IS NOT NULL")),
        {"sqlite_with_rowid": False, "sqlite_strict": True},
    )
    key: Mapped[bytes] = mapped_column(primary_key=True)
    """16 bytes: a hash of the object's identity, and the name of its file."""
    url: Mapped[str]
    """Without credentials."""
    size: Mapped[int | None]
    """Bytes of the object; None while it is not known."""
    charged_bytes: Mapped[int]
    """What counts against the limit: the reservation while filling, then the size rounded up to a block."""
    state: Mapped[str]
    tick: Mapped[int]
    """Logical time of the last use; of equal ranks, the lowest goes first."""
    part: Mapped[str | None]
    """Name of the file in part/ while filling."""
    ext: Mapped[str]
    dataset: Mapped[int | None]
    etag: Mapped[str | None]
    created_at: Mapped[int]
    rank: Mapped[int | None]
    """What the policy makes of its uses (`model.policies`); the lowest goes first, and None before all others."""
    crc32: Mapped[int | None]
    """CRC-32 of the file's bytes, where a user asked for it (`verify_reads`)."""
    shard: Mapped[bytes | None]
    """Key of the shard that it is a member of."""


class OwnerModel(Base):
    """One process that uses the cache; alive as long as its file in owners/ is locked."""

    __tablename__ = "owner"
    __table_args__ = ({"sqlite_strict": True},)
    id: Mapped[str] = mapped_column(primary_key=True)
    pid: Mapped[int]
    host: Mapped[str]
    started_at: Mapped[int]
    name: Mapped[str]
    limit_bytes: Mapped[int | None]
    """The limit that it gave; the largest number is no limit; None: it gave none, and takes what is in force."""
    waiting_tick: Mapped[int | None]
    """Since when it waits for room; the oldest waiter goes first."""
    waiting_bytes: Mapped[int | None]
    policy: Mapped[str | None]
    """The eviction policy that it asked for by name."""
    pins: Mapped[bytes] = mapped_column(server_default=text("x''"))
    """The keys of the entries that it keeps from being evicted, 16 bytes each; the view `pin` shows them as rows."""


class TouchModel(Base):
    """Keys used together, 16 bytes each; drained into `entry` by the process that needs room."""

    __tablename__ = "touch"
    __table_args__ = ({"sqlite_strict": True},)
    seq: Mapped[int] = mapped_column(primary_key=True)
    keys: Mapped[bytes]
    hints: Mapped[bytes | None]
    """When each key is used next, 8 bytes each; only where the policy asks for it."""


class UsedModel(Base):
    """Keys that one process has used since its last row, 16 bytes each; older uses of a key go when the log is long."""

    __tablename__ = "used"
    __table_args__ = ({"sqlite_strict": True},)
    seq: Mapped[int] = mapped_column(primary_key=True)
    """Keys noted before this row."""
    at: Mapped[int]
    """When they were noted, in seconds since 1970."""
    keys: Mapped[bytes]


class TotalsModel(Base):
    """Sums over `entry`, kept by triggers in the same transaction."""

    __tablename__ = "totals"
    __table_args__ = ({"sqlite_strict": True},)
    one: Mapped[int] = mapped_column(primary_key=True)
    entries: Mapped[int]
    ready_bytes: Mapped[int]
    filling_bytes: Mapped[int]


class StatModel(Base):
    """A counter."""

    __tablename__ = "stat"
    __table_args__ = ({"sqlite_with_rowid": False, "sqlite_strict": True},)
    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int]


class HostModel(Base):
    """What one host of remote storage was asked for."""

    __tablename__ = "host"
    __table_args__ = ({"sqlite_with_rowid": False, "sqlite_strict": True},)
    host: Mapped[str] = mapped_column(primary_key=True)
    """`scheme://authority`, without credentials."""
    requests: Mapped[int]
    downloaded_bytes: Mapped[int]
    retries: Mapped[int]
    wait_microseconds: Mapped[int]
    """Waited between tries, added up over all downloads."""


class FailureModel(Base):
    """A URL that could not be downloaded, or a row that gave no sample, and how often."""

    __tablename__ = "failure"
    __table_args__ = ({"sqlite_with_rowid": False, "sqlite_strict": True},)
    url: Mapped[str] = mapped_column(primary_key=True)
    error: Mapped[str] = mapped_column(primary_key=True)
    count: Mapped[int]
    last_at: Mapped[int]
    row: Mapped[int | None]
    """Of the index, the last time; None: not known."""
    step: Mapped[int | None]
    """Global step of the last time."""


class DatasetModel(Base):
    """A dataset that put entries here."""

    __tablename__ = "dataset"
    __table_args__ = ({"sqlite_strict": True},)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    src: Mapped[str]
    fingerprint: Mapped[str]
    last_used: Mapped[int]


class ShardUnitModel(Base):
    """In what unit a dataset fetches shards in an epoch, as the first process that opened it has chosen."""

    __tablename__ = "shard_unit"
    __table_args__ = ({"sqlite_with_rowid": False, "sqlite_strict": True},)
    dataset: Mapped[int] = mapped_column(primary_key=True)
    wish: Mapped[str] = mapped_column(primary_key=True)
    """What it was asked for, and takes of its shards: datasets of one name may differ in that."""
    epoch: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[str]
    """Who has chosen; the choice holds as long as that process lives."""
    unit: Mapped[str]
    reason: Mapped[str]


class MetaModel(Base):
    """The one row of facts about this cache."""

    __tablename__ = "meta"
    __table_args__ = ({"sqlite_strict": True},)
    one: Mapped[int] = mapped_column(primary_key=True)
    uuid: Mapped[str]
    limit_bytes: Mapped[int | None]
    """The limit in force: the smallest that living owners gave, else the last one; the largest number is no limit; None: no
    user has needed one yet."""
    tick: Mapped[int]
    """The logical clock."""
    boot_id: Mapped[str]
    """Boot of the machine that last wrote here."""
    policy: Mapped[str]
    """The eviction policy in force."""
    uses: Mapped[int]
    """Objects asked for so far: the clock of `belady`, which stands still under the other policies."""
    unit_bytes: Mapped[int] = mapped_column(server_default=text("0"))
    """What a file of one byte takes on this file system, at least 4096; 0: not looked at yet."""
    filesystem: Mapped[str] = mapped_column(server_default=text("''"))
    """The file system on which that was seen."""


PIN_VIEW = table("pin", column("key", LargeBinary), column("owner", Text))
"""The view that shows `owner.pins` as rows."""
