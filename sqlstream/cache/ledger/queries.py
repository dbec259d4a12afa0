"""What reports ask the ledger, in SQLAlchemy Core over the models of `tables`.

Import it where a report is made: SQLAlchemy takes a quarter of a second and 20 MB, which DataLoader workers have no use for.
SQLAlchemy writes the SQL and knows the types; the statements run on the ledger's own connection, inside its transaction.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from sqlalchemy import ColumnElement, Integer, Label, Select, func, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.orm import InstrumentedAttribute

from sqlstream.cache.ledger import damage
from sqlstream.cache.ledger.tables import (
    PIN_VIEW,
    DatasetModel,
    EntryModel,
    FailureModel,
    HostModel,
    MetaModel,
    OwnerModel,
    ShardUnitModel,
    StatModel,
    TotalsModel,
)
from sqlstream.cache.model.refs import STORED_SAMPLE_EXTENSION
from sqlstream.cache.model.rows import FILLING, NO_LIMIT, READY

if TYPE_CHECKING:  # SQLAlchemy 2.0 takes one type there
    Statement: TypeAlias = Select[*tuple[Any, ...]]
Row: TypeAlias = dict[str, Any]
"""Values by the names of their columns."""

_NUM_ENTRIES = func.count(EntryModel.key).label("entries")
_NUM_BYTES = func.coalesce(func.sum(EntryModel.charged_bytes), 0).label("bytes")
_IS_PINNED = EntryModel.key.in_(select(PIN_VIEW.c.key))


class Connection(Protocol):
    """A connection to SQLite, or what stands for one in a transaction."""

    def execute(self, sql: str, parameters: Any = ..., /) -> Any:
        """Run one statement; return its cursor."""


def read(connection: Connection, statement: Statement) -> list[Row]:
    """Return the rows of a statement.

    Raises:
        sqlite3.DatabaseError: A value has another type than its column: a page is damaged.
    """
    compiled = statement.compile(dialect=sqlite.dialect())
    columns = statement.selected_columns
    found = connection.execute(str(compiled), [compiled.params[name] for name in compiled.positiontup or ()]).fetchall()
    typed = damage.typed(found, *(_python_type(column) for column in columns))
    return [dict(zip(columns.keys(), row, strict=True)) for row in typed]


def read_one(connection: Connection, statement: Statement) -> Row:
    """Return the one row of a statement.

    Raises:
        sqlite3.DatabaseError: There is none, or there are several.
    """
    rows = read(connection, statement)
    if len(rows) != 1:
        raise damage.damaged(f"{len(rows)} rows where there is one")
    return rows[0]


def meta(connection: Connection) -> Row:
    """Return `limit_bytes` (None: no limit) and `policy`."""
    return read_one(connection, select(_limit_of(MetaModel.limit_bytes), MetaModel.policy))


def totals(connection: Connection) -> Row:
    """Return `entries`, `ready_bytes`, `filling_bytes`."""
    return read_one(connection, select(TotalsModel.entries, TotalsModel.ready_bytes, TotalsModel.filling_bytes))


def counters(connection: Connection) -> Counter[str]:
    """Return all counters by name."""
    return Counter({row["name"]: row["value"] for row in read(connection, select(StatModel.name, StatModel.value))})


def pinned(connection: Connection) -> Row:
    """Return `entries` and `bytes` of the entries that are pinned, each once."""
    return read_one(connection, select(_NUM_ENTRIES, _NUM_BYTES).where(_IS_PINNED))


def ready_and_pinned(connection: Connection, dataset: int | None) -> Row:
    """Return `entries` and `bytes` of the objects that are here and pinned, each once; of one dataset or of all."""
    return read_one(connection, _of(dataset, select(_NUM_ENTRIES, _NUM_BYTES).where(_IS_PINNED, EntryModel.state == READY)))


def num_filling(connection: Connection, dataset: int | None) -> int:
    """Return how many objects are on their way; of one dataset or of all."""
    return int(read_one(connection, _of(dataset, select(_NUM_ENTRIES).where(EntryModel.state == FILLING)))["entries"])


def stored_samples(connection: Connection) -> Row:
    """Return `entries` and `bytes` of the samples that a `CacheTransform` stored."""
    return read_one(connection, select(_NUM_ENTRIES, _NUM_BYTES).where(EntryModel.ext == STORED_SAMPLE_EXTENSION))


def fillings(connection: Connection) -> list[Row]:
    """Return `url`, `part`, `reserved_bytes` of the objects on their way, by URL."""
    columns = EntryModel.url, EntryModel.part, EntryModel.charged_bytes.label("reserved_bytes")
    return read(connection, select(*columns).where(EntryModel.state == FILLING).order_by(EntryModel.url, EntryModel.key))


def datasets(connection: Connection) -> list[Row]:
    """Return what each dataset has here, by name."""
    columns = DatasetModel.name, DatasetModel.src, _NUM_ENTRIES, _NUM_BYTES, DatasetModel.last_used
    has_entry = EntryModel.dataset == DatasetModel.id
    return read(connection, select(*columns).outerjoin(EntryModel, has_entry).group_by(DatasetModel.id).order_by("name"))


def shard_units(connection: Connection) -> list[Row]:
    """Return in what unit each dataset fetches shards in its last epoch (`dataset`, `epoch`, `unit`, `reason`), by name."""
    of = ShardUnitModel
    columns = DatasetModel.name.label("dataset"), of.epoch, of.unit, of.reason
    return read(
        connection, select(*columns).join(of, of.dataset == DatasetModel.id).order_by(DatasetModel.name, of.wish, of.epoch)
    )


def dataset_ids(connection: Connection) -> dict[str, int]:
    """Return the id of each dataset by its name."""
    return {row["name"]: row["id"] for row in read(connection, select(DatasetModel.name, DatasetModel.id))}


def owners(connection: Connection) -> list[Row]:
    """Return the processes that are registered and what each pins, the oldest first."""
    statement = (
        select(
            OwnerModel.id,
            OwnerModel.pid,
            OwnerModel.host,
            OwnerModel.name,
            OwnerModel.started_at,
            _limit_of(OwnerModel.limit_bytes),
            OwnerModel.waiting_bytes,
            _NUM_ENTRIES.label("pinned_entries"),
            _NUM_BYTES.label("pinned_bytes"),
        )
        .outerjoin(PIN_VIEW, PIN_VIEW.c.owner == OwnerModel.id)
        .outerjoin(EntryModel, EntryModel.key == PIN_VIEW.c.key)
        .group_by(OwnerModel.id)
        .order_by(OwnerModel.started_at, OwnerModel.id)
    )
    return read(connection, statement)


def hosts(connection: Connection) -> list[Row]:
    """Return the counters of each host, the one that sent most first."""
    columns = HostModel.host, HostModel.requests, HostModel.downloaded_bytes, HostModel.retries, HostModel.wait_microseconds
    return read(connection, select(*columns).order_by(HostModel.downloaded_bytes.desc(), HostModel.host))


def failures(connection: Connection) -> list[Row]:
    """Return what failed since the cache was made, the most frequent first."""
    of = FailureModel
    columns = of.url, of.error, of.row, of.step, of.count, of.last_at
    order = of.count.desc(), of.last_at.desc(), of.url, of.error
    return read(connection, select(*columns).where(of.count > 0).order_by(*order))


def _of(dataset: int | None, statement: Statement) -> Statement:
    return statement if dataset is None else statement.where(EntryModel.dataset == dataset)


def _limit_of(stored: InstrumentedAttribute[int | None]) -> Label[Any]:
    return func.nullif(stored, NO_LIMIT, type_=Integer).label("limit_bytes")


def _python_type(column: ColumnElement[Any]) -> Any:
    plain = column.type.python_type
    return plain if getattr(column, "nullable", True) is False else plain | None
