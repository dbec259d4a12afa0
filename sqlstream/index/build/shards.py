"""Rows whose content lies in shards: where, in the file of their index.

The index file has the sizes of a sample's parts among its rows, for SQL, and in a table beside them which bytes of which shard
each part is (`storage/members/places.py`). Another table than `rows`, since no query and no export has anything to do with it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.build.content_index import ContentIndex
from sqlstream.index.build.join import JoinedTables
from sqlstream.index.file.connection import damaged
from sqlstream.index.file.index import Index
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.base.ahead import ReadsAhead
from sqlstream.index.sources.plan.parts import ShardPart, SourcePart, innermost
from sqlstream.index.sources.shards.layout import PartsAreValues, Scratch, ShardLayout
from sqlstream.index.sources.shards.samples import SAMPLE, ShardSamples
from sqlstream.index.sources.shards.tar_shard import TarShard
from sqlstream.index.types.models import Column, SourceFile
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, RemoteReader, Unpack
from sqlstream.storage.members import places
from sqlstream.storage.members.places import Place
from sqlstream.storage.members.tar import END_BYTES

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS member_columns (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, num_bytes INTEGER NOT NULL)
    STRICT;
CREATE TABLE IF NOT EXISTS shards (shard INTEGER PRIMARY KEY, num_samples INTEGER NOT NULL, unpack TEXT, damage TEXT)
    STRICT;
CREATE TABLE IF NOT EXISTS members (row INTEGER PRIMARY KEY, shard INTEGER NOT NULL, place BLOB NOT NULL) STRICT;
"""
_PLACES = "SELECT row, shard, place FROM members WHERE row IN (SELECT value FROM json_each(?))"
MAX_NAMED = 10
"""Damaged shards that one message names. Arbitrary."""
_MOST_WAITING = 1 << 16
"""Samples of shards that were read and are not written yet, at most, with those of one shard: some 60 MB."""
_SHARDS = "SELECT shard, num_samples, unpack, damage FROM shards"
_NAMES = "SELECT name FROM member_columns ORDER BY number"


class Shard(NamedTuple):
    """A shard of an index."""

    file: SourceFile
    layout: ShardLayout


class Shards:
    """The shards of an index, as its source names them: their URLs may hold credentials, which its file does not.

    Args:
        shards: In the order of the index; None: another part of the source.
        num_joined: Files of joined tables, which the index file has before them.
    """

    def __init__(self, shards: Sequence[Shard | None], num_joined: int) -> None:
        self.shards = tuple(shards)
        self.num_joined = num_joined

    def __reduce__(self) -> tuple[type[Shards], tuple[Sequence[Shard | None], int]]:
        return (Shards, (self.shards, self.num_joined))

    @classmethod
    def of(cls, parts: Sequence[SourcePart], num_joined: int) -> Shards:
        """Return the shards among the parts of a source."""
        shards = [Shard(part.source, part.layout) if isinstance(part, ShardPart) else None for part in map(innermost, parts)]
        return cls(shards, num_joined)

    @property
    def are_remote(self) -> bool:
        """Some are not on this machine."""
        return any(shard is not None and urls.is_remote(shard.file.url) for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """Size of all."""
        return sum(shard.file.size_bytes or 0 for shard in self.shards if shard is not None)


def shards_ahead(parts: Sequence[SourcePart], scratch: Scratch, remote: RemoteReader) -> ReadsAhead[ShardPart, ShardSamples]:
    """Return what reads the tables of the shards among some parts side by side, in their order.

    Args:
        parts: The parts of a source.
        scratch: Where what is needed meanwhile is written.
        remote: Reads what is not local.
    """

    def read(shard: ShardPart, remote: RemoteReader) -> ShardSamples:
        return shard.samples(remote, scratch)

    return ReadsAhead(
        read,
        [shard for shard in map(innermost, parts) if isinstance(shard, ShardPart)],
        remote,
        most_at_a_time=lambda shard: CALLS_AT_A_TIME if urls.is_remote(shard.source.url) else 1,  # which takes the interpreter
        size_of=lambda samples: len(samples.parts),
        most_waiting=_MOST_WAITING,
    )


class SamplePlace(NamedTuple):
    """Where the content of a row is."""

    shard: int
    """Number of its shard in the source."""
    place: Place


class ShardIndex(ContentIndex):
    """An index of samples that lie in shards."""

    _SELECT = "SELECT r.*, m.shard, m.place, m.row FROM ({rows}) AS r JOIN members AS m ON m.row = r.row WHERE m.row IN"
    _files: Shards

    def shard(self, number: int) -> Shard:
        """Return a shard by its number in the source."""
        shard = self._files.shards[number]
        assert shard is not None, "rows of this part lie in no shard"
        return shard

    def note_changed(self) -> None:
        """Nothing: the next opening looks at the versions of all shards."""

    def shard_sizes(self) -> list[int]:
        """Return the bytes of each shard."""
        return [shard.file.size_bytes or 0 for shard in self._files.shards if shard is not None]

    @cached_property
    def has_commands(self) -> bool:
        """Some shards are what commands print."""
        return any(shard is not None and urls.is_command(shard.file.url) for shard in self._files.shards)

    @property
    def holds_values(self) -> bool:
        """No shard has parts that are files."""
        return all(isinstance(shard.layout, PartsAreValues) for shard in self._files.shards if shard is not None)

    @property
    def content_columns(self) -> tuple[Column, ...]:
        """The columns whose content is in the shards."""
        return tuple(column for column in self.columns if column.is_content)

    @cached_property
    def member_names(self) -> tuple[str, ...]:
        """Names of the columns of parts, by the number that a place has of them."""
        return tuple(name for (name,) in self.stored(_NAMES))

    @cached_property
    def unpacks(self) -> dict[int, Unpack]:
        """How the shards are unpacked that are compressed as a whole."""
        return {shard: unpack_of(text) for shard, _, text, _ in self.stored(_SHARDS) if text is not None}

    def warn_of_damage(self) -> None:
        """Log which shards were damaged when they were indexed, and which were not there, if some were."""
        found = [(shard, num) for shard, num, _, damage in self.stored(_SHARDS) if damage is not None]
        missing = [shard for shard, _ in found if (given := self._files.shards[shard]) is not None and given.file.is_missing]
        damaged = [f"{self._name_of(shard)} ({num:,} samples kept)" for shard, num in found if shard not in missing]
        for names, what, where in (
            (damaged, "damaged", "; `sqlstream index info` says where"),
            ([self._name_of(shard) for shard in missing], "not there, and left out", ""),
        ):
            if names:
                more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
                shown = ", ".join(names[:MAX_NAMED]) + more + where
                logger.warning("%s: %d of %d shards are %s: %s", self.src, len(names), len(self._files.shards), what, shown)

    def warn_of_missing_versions(self) -> None:
        """Log of which shards on servers nothing tells versions apart: what is read of them later is not compared."""
        remote = [shard.file for shard in self._files.shards if shard is not None and urls.is_remote(shard.file.url)]
        files = [file for file in remote if not urls.is_command(file.url)]  # the output of a command is compared by its hash
        if found := [urls.redact(file.url) for file in files if file.content]:
            logger.warning(
                "%s: the server names neither ETag nor Last-Modified of %d of %d shards, such as %s: one that is replaced at "
                "its size while the dataset is open is not noticed, but for members of ZIP; serve them with ETags",
                *(self.src, len(found), len(files), found[0]),
            )

    def _name_of(self, number: int) -> str:
        shard = self._files.shards[number]
        return f"shard {number}" if shard is None else urls.redact(shard.file.url)

    def wanted_share(self, columns: Collection[str]) -> float:
        """Return the share of the bytes of all samples that some columns of the selected rows have, in [0, 1].

        Columns of which one part holds several, and rows of other sizes than the mean, are not told apart. What lies beside the
        parts in a TAR, but for its end, are their headers, which come with them.
        """
        sizes: dict[str, int] = dict(self.stored("SELECT name, num_bytes FROM member_columns"))
        num_samples: int = sum(num for _, num, _, _ in self.stored(_SHARDS))
        wanted: float = sum(size for name, size in sizes.items() if name in columns or name == SAMPLE)
        total, num_bytes = sum(sizes.values()), 0 if self.unpacks else self.num_bytes
        if num_bytes and all(isinstance(shard.layout, TarShard) for shard in self._files.shards if shard is not None):
            wanted *= max(1.0, (num_bytes - END_BYTES * len(self._files.shards)) / max(1, total))
        whole = max(total, num_bytes, 1)
        return min(1.0, len(self) / max(1, num_samples)) * wanted / whole

    def rows_with_places(self, row_ids: Sequence[int]) -> tuple[list[dict[str, object]], list[SamplePlace]]:
        """Return rows, and where their content is, in the order asked.

        Raises:
            IndexError: No row has one of these ids.
            IndexDatabaseError: The file does not say where its content is.
        """
        ids = list(map(int, row_ids))
        opened, records = self._records(ids)
        rows = self._rows(ids, opened, records)
        try:
            return rows, [SamplePlace(record[-3], places.unpack(record[-2])) for record in map(records.__getitem__, ids)]
        except ValueError as error:
            raise self._damaged(error) from error

    def chunks_of(self, row_ids: Sequence[int]) -> Int64Array:
        """Return for each row the number of its shard, and its place there: [n, 2]."""
        wanted = np.asarray(row_ids, np.int64)  # [n]
        first_rows, numbers = self._runs
        at = np.searchsorted(first_rows, wanted, side="right") - 1  # [n]
        return np.stack([numbers[at], wanted - first_rows[at]], axis=1)

    @cached_property
    def _runs(self) -> tuple[Int64Array, Int64Array]:
        """The first row of each run of rows of one shard, and the number of that shard: [num_runs] each."""
        found = self.stored("SELECT first_row FROM sources ORDER BY position LIMIT -1 OFFSET ?", (self._files.num_joined,))
        if found:
            return np.array(found, np.int64)[:, 0], np.arange(len(found), dtype=np.int64)
        numbers = np.array(self.stored("SELECT shard FROM members ORDER BY row"), np.int64).reshape(-1)  # [num_rows]
        starts = np.flatnonzero(np.diff(numbers, prepend=-1)).astype(
            np.int64
        )  # [num_runs]; what a query gives has its own order
        return starts, numbers[starts]

    def _damaged(self, error: Exception) -> IndexDatabaseError:
        return damaged(self.path, f"it does not say where the content of a row is: {error!r}")


def unpack_of(text: str) -> Unpack:
    """Return how a shard is unpacked, of its JSON."""
    compression, raw_bytes, *hashes = json.loads(text)
    stored, raw = (tuple((algorithm, digest) for algorithm, digest in some) for some in hashes)
    return Unpack(compression, raw_bytes, stored, raw)


def packed_places(samples: ShardSamples, numbers: Mapping[str, int]) -> Iterator[bytes]:
    """Return the places of samples, as an index file has them, one by one.

    Args:
        samples: The samples of a shard.
        numbers: The parts that are kept, with the numbers of their columns.
    """
    return samples.parts.packed(samples.entries(), numbers)


class PlacesOfShard:
    """Where the content of a shard's samples is, to be written beside their rows.

    Args:
        samples: What the shard has.
    """

    def __init__(self, samples: ShardSamples) -> None:
        self._samples = samples
        self.names = tuple(samples.typed)
        """Columns that no query sees."""
        self.digest = b""
        """What stands for their values."""

    def write(self, writer: IndexWriter, number: int, first_row: int, joins: JoinedTables | None) -> None:
        """Note where the content of rows is that have been written; see `ContentInPlace.write`."""
        samples = self._samples
        tables = MemberTables(writer)
        numbers = {name: tables.number_of(name) for name in samples.part_names(writer.columns)}
        tables.count(samples.part_bytes())
        packed = packed_places(samples, numbers)
        unpack = None if samples.unpack is None else json.dumps(samples.unpack)
        tables.note_shard(number, len(samples.parts), unpack, None if samples.damage is None else str(samples.damage))
        kept = packed if joins is None or not joins.leaves_out else joins.kept(packed)
        rows = zip(range(first_row, writer.num_rows), kept, strict=False)
        tables.write((row, number, place) for row, place in rows)


class MemberTables:
    """The tables of an index file that say where content lies in shards, while the file is written.

    Args:
        writer: Of the file, which may have the tables already: then they go on.
    """

    def __init__(self, writer: IndexWriter) -> None:
        self._connection = writer.connection
        for statement in filter(str.strip, _SCHEMA.split(";")):
            self._connection.execute(statement)
        self._numbers = {name: number for number, (name,) in enumerate(self._connection.execute(_NAMES))}

    def number_of(self, name: str) -> int:
        """Return the number of a column of parts, a new one if it has none."""
        if (number := self._numbers.get(name)) is None:
            number = self._numbers[name] = len(self._numbers)
            self._connection.execute("INSERT INTO member_columns VALUES (?, ?, 0)", (number, name))
        return number

    def count(self, sizes: Mapping[str, int]) -> None:
        """Count the bytes of parts, by their columns."""
        counts = [(size, name) for name, size in sizes.items() if name in self._numbers]
        self._connection.executemany("UPDATE member_columns SET num_bytes = num_bytes + ? WHERE name = ?", counts)

    def note_shard(self, shard: int, num_samples: int, unpack: str | None, damage: str | None) -> None:
        """Note how many samples of a shard are used, how it is unpacked, and what is wrong with it."""
        self._connection.execute("INSERT INTO shards VALUES (?, ?, ?, ?)", (shard, num_samples, unpack, damage))

    def write(self, found: Iterable[tuple[int, int, bytes]]) -> None:
        """Note (row, shard, place) of rows."""
        self._connection.executemany("INSERT INTO members VALUES (?, ?, ?)", found)


def has_members(index: Index) -> bool:
    """Return whether the rows of an index lie in shards."""
    return bool(index.stored("SELECT 1 FROM sqlite_master WHERE name = 'members'"))


class PlacesOfResult:
    """Where the content is of the rows that a query gives, while the index file of its result is written.

    Args:
        base: The index that is queried.
        writer: Of the result, whose own columns are there already.
    """

    def __init__(self, base: Index, writer: IndexWriter) -> None:
        self._base, self._writer = base, writer
        columns = [column for column in base.columns if column.is_in_place and column.name not in writer.columns]
        self.names = tuple(column.name for column in columns)
        """Columns that no query sees."""
        for column in columns:
            writer.add_column(column.field, column.declared)
        self._tables = MemberTables(writer)
        for name, num_bytes in base.stored("SELECT name, num_bytes FROM member_columns ORDER BY number"):
            self._tables.number_of(name)
            self._tables.count({name: num_bytes})
        for shard in base.stored(_SHARDS):
            self._tables.note_shard(*shard)

    def add(self, row_ids: Sequence[int]) -> None:
        """Note which rows of the base are written next."""
        found = {row: rest for row, *rest in self._base.stored(_PLACES, (json.dumps(row_ids),))}
        self._tables.write((at, *found[row]) for at, row in enumerate(row_ids, self._writer.num_rows))

    def finish(self) -> None:
        """Note what stays in its files, once there are rows."""
        self._writer.leave_in_place(self.names, b"")
