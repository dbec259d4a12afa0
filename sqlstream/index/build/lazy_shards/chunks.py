"""Shards as the chunks of a lazy index: the table of each is found when it is first needed, and kept for all processes."""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sqlstream.config import DamagedShards
from sqlstream.errors import DamagedShardError, ObjectNotFoundError, SourceChangedError, SourceError, StorageError
from sqlstream.index.build.chunks import ChunkPlace, ChunkStore, drop_oldest
from sqlstream.index.build.lazy_shards.table import ShardTable, decoded, encoded, rows_as, schema_of, table_of
from sqlstream.index.file.connection import damaged
from sqlstream.index.file.found import Found, FoundChunks
from sqlstream.index.file.room import IndexRoom, RoomyReader
from sqlstream.index.file.workplace import Workplace, workplace
from sqlstream.index.sources.base.access import indexed_file, leaves_out, named_errors, stat_file
from sqlstream.index.sources.base.byte_source import RemoteBytes, known_size
from sqlstream.index.sources.plan.parts import ShardPart, SourcePart, innermost, missing_shard, over
from sqlstream.index.sources.shards.by_name import says_compressed
from sqlstream.index.sources.shards.layout import KeepsShards, Scratch
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.types.models import SourceFile, fingerprint
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, NO_REQUESTS, RemoteReader, Unpack
from sqlstream.storage.members.unpack import MAGIC_BYTES, compression_of

logger = logging.getLogger(__name__)

ROOM_ROWS = 1 << 24
"""Numbers that a shard has whose samples are not counted: with 2^24 shards they are below the 2^48 that orders take."""
_KEPT_TABLES = 128
"""Tables that a process keeps in memory whatever their size: those of two default windows; of wider windows `keep_tables`."""


class FirstShard(NamedTuple):
    """What an index is made of whose other shards are not looked at."""

    table: ShardTable
    schema: pa.Schema
    """The columns of its rows."""
    typed: tuple[str, ...]
    """Those whose values stay in the shards."""
    error: StorageError | None = None
    """Why it is left out; None: it is not."""


class ShardChunks:
    """Shards as chunks.

    Args:
        parts: The shards, in the order of the index.
        room: Is asked for room for what is noted.
    """

    def __init__(self, parts: Sequence[SourcePart], room: IndexRoom) -> None:
        self._parts, self._room = tuple(parts), room
        self._shards = [_shard_of(part) for part in self._parts]
        self._versions: dict[int, SourceFile] = {}
        """Shards that were looked at, with their versions."""
        self._packings: dict[int, Unpack | None] = {}
        """How those shards are compressed whose names say that they are."""
        self._tables: OrderedDict[int, ShardTable] = OrderedDict()
        self._num_kept = _KEPT_TABLES
        self._found: FoundChunks | None = None
        self.epoch = 0
        """The epoch that is asked for."""
        self._left_out: dict[tuple[int, int], ShardTable] = {}
        """Epoch and number of shards that are there, and that it is without in this process: tables without samples."""
        self.said: list[StorageError | DamagedShardError] = []
        """Why shards are left out, or samples of them, until that is taken from here."""

    def __reduce__(self) -> tuple[type[ShardChunks], tuple[Sequence[SourcePart], IndexRoom]]:
        return (ShardChunks, (self._parts, self._room))

    def __len__(self) -> int:
        return len(self._parts)

    def shard(self, number: int) -> ShardPart:
        """Return a shard as the source names it."""
        return self._shards[number]

    def keep_tables(self, num_tables: int) -> None:
        """Keep so many tables in memory, whatever their size."""
        self._num_kept = max(_KEPT_TABLES, num_tables)

    # -- as chunks ----------------------------------------------------------------------------------------------------

    @cached_property
    def known_counts(self) -> list[int | None]:
        """Samples of each shard, as far as an index file says it, and none of them may be left out."""
        return [
            None if shard.damaged is not DamagedShards.RAISE or shard.missing.leaves_out else shard.layout.num_samples
            for shard in self._shards
        ]

    @cached_property
    def _are_counted(self) -> bool:
        return None not in self.known_counts

    def bounds(self, store: ChunkStore) -> Int64Array:
        """Return the first row of each shard, and the end; where they are not counted, each has `ROOM_ROWS` numbers."""
        del store
        sizes = [count or 0 if self._are_counted else ROOM_ROWS for count in self.known_counts]
        return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)

    def counts(self, store: ChunkStore) -> Int64Array | None:
        """Return how many samples each shard has, -1 where it was not read yet: [num_shards]; None: index files say it."""
        return None if self._are_counted else self.found(store).counts()

    def look_up(self, numbers: Sequence[int], store: ChunkStore, remote: RemoteReader, *, in_ranges: bool) -> None:
        """Ask for the versions of shards; see `ChunkSource.look_up`.

        Args:
            numbers: Of the shards.
            store: The file of the index.
            remote: Asks for them.
            in_ranges: Read their tables, too: nobody brings these shards as a whole.
        """
        unknown = [number for number in numbers if not self._has_table(number, store)]
        if not in_ranges:
            unknown = [number for number in unknown if self._has_more_to_say(number)]
        look = partial(self._look_at, store=store, remote=remote, in_ranges=in_ranges)
        if len(unknown) < 2:
            for number in unknown:
                look(number)
            return
        with ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="shard") as pool:
            for _ in pool.map(look, unknown):
                pass

    def place_of(self, number: int, store: ChunkStore) -> ChunkPlace:
        """Return what of a shard must be fetched: all of it, unless its table is known, or it is of this machine."""
        file = self.file(number)
        if not urls.is_remote(file.url) or self._has_table(number, store):
            return ChunkPlace(file=file, spans=())
        return self._whole(number)

    def _whole(self, number: int) -> ChunkPlace:
        """Return the place of all of a remote shard that was looked at."""
        file = self.file(number)
        if urls.is_command(file.url):
            return ChunkPlace(file=file, spans=(), version=file.content, is_shard=True, unpack=Unpack(""))
        num_bytes = known_size(file)
        unpack = self._packings.get(number)
        spans = () if unpack is not None else ((0, num_bytes),)
        return ChunkPlace(file=file, spans=spans, version=file.etag or file.content, is_shard=True, unpack=unpack)

    def read(self, number: int, files: Sequence[Path], store: ChunkStore) -> pa.RecordBatch:
        """Return the samples of a shard; its table is kept for all processes."""
        return rows_as(self.table(number, store, files), store.columns, urls.redact(self.file(number).url))

    # -- tables -------------------------------------------------------------------------------------------------------

    def found(self, store: ChunkStore) -> FoundChunks:
        """Return the file of the tables that were found."""
        if self._found is None:
            self._found = FoundChunks(members_path(store.path), len(self._parts))
        return self._found

    def table(self, number: int, store: ChunkStore, files: Sequence[Path] = ()) -> ShardTable:
        """Return the table of a shard, which is read of its bytes where no process has found it.

        Args:
            number: Of the shard.
            store: The file of the index.
            files: What of it was fetched (`place_of`).
        """
        if (table := self._left_out.get((self.epoch, number))) is not None:
            return table
        if (table := self._tables.get(number)) is not None:
            with contextlib.suppress(KeyError):  # another thread has dropped it
                self._tables.move_to_end(number)
            return table
        if (table := self._known(number, store)) is None:
            table = self._read_once(number, store, NO_REQUESTS, self._path(number, store, files))
        self._keep(number, table)
        return table

    def _has_table(self, number: int, store: ChunkStore) -> bool:
        """Return whether the table of a shard is known; then it is in memory."""
        if number not in self._tables and (self.epoch, number) not in self._left_out:
            if not self.found(store).is_found(number) or (table := self._known(number, store)) is None:
                return False
            self._keep(number, table)
        return True

    def _path(self, number: int, store: ChunkStore, files: Sequence[Path]) -> Path:
        """Return where the bytes of a shard are."""
        file = self.file(number)
        if files:
            return files[0]
        if urls.is_remote(file.url):  # it was not fetched, since its table was there
            raise damaged(self.found(store).path, f"the table of shard {number} is gone")
        if indexed_file(file.url) != file:
            raise SourceChangedError(f"{file.url} changed since it was found: open the dataset again")
        return Path(file.url)

    def _keep(self, number: int, table: ShardTable) -> None:
        self._tables[number] = table
        drop_oldest(self._tables, num_least=self._num_kept)

    def _known(self, number: int, store: ChunkStore) -> ShardTable | None:
        tables = self.found(store)
        found = tables.find(number)
        if found is None:
            if tables.is_found(number):
                logger.warning("the table of shard %d in %s is damaged: reading the shard again", number, tables.path)
                tables.forget(number)
            return None
        table = decoded(found.data)
        self._versions[number] = table.file_of(self._shards[number].source)
        return table

    def _read_once(self, number: int, store: ChunkStore, remote: RemoteReader, here: Path | None = None) -> ShardTable:
        """Read the table of a shard, and note it; one process at a time."""
        with self._alone(number, store) as place:
            if (table := self._known(number, store)) is not None:  # another process has done it while we waited
                return table
            samples = self._samples(number, remote, Scratch(place.temporary, self._room.on_growth, here=here))
            table = table_of(samples, over(self._parts[number], samples), self.file(number))
            self.note(number, table, store)
        return table

    def _alone(self, number: int, store: ChunkStore) -> AbstractContextManager[Workplace]:
        """Give the place where a shard is looked at by one process at a time."""
        return workplace(store.path.parent, fingerprint({"shard": number, "of": store.path.stem}), is_brief=True)

    def note(self, number: int, table: ShardTable, store: ChunkStore) -> None:
        """Keep the table of a shard for all processes.

        Raises:
            CacheFullError: There is no room for it.
        """
        data = encoded(table)
        self._room.need(len(data))
        self.found(store).write(number, Found(table.rows.num_rows, data))

    def first_known(self, store: ChunkStore) -> ShardTable | None:
        """Return the table of the first shard that was read, and of these of one with samples; None: none was."""
        counts = self.found(store).counts()  # [num_shards]
        known = np.flatnonzero(counts >= (1 if (counts > 0).any() else 0))  # [num_known]
        return self.table(int(known[0]), store) if known.size else None

    def open_first(self, number: int, keep: KeepsShards, remote: RemoteReader, scratch: Scratch) -> FirstShard:
        """Return what a shard has, of which no process has found the table; nothing, if it is left out.

        Args:
            number: Of the shard.
            keep: Brings it whole, if that is worth it: else its table is read in ranges.
            remote: Reads it.
            scratch: Where what is needed meanwhile is written.

        Raises:
            SourceError: It is damaged.
        """
        try:
            return self._opened(number, keep, remote, scratch)
        except StorageError as error:
            if not leaves_out(error, self._shards[number].missing):
                raise
            table = self._without(number, error)
            if not table.is_missing:
                self._leave_out_now(number, table)
            return FirstShard(table, table.rows.schema, (), error)

    def _opened(self, number: int, keep: KeepsShards, remote: RemoteReader, scratch: Scratch) -> FirstShard:
        self._learn(number, remote)
        part, file = self._parts[number], self.file(number)
        is_whole = urls.is_remote(file.url) and not self._shards[number].layout.is_table_apart
        files = keep(urls.redact(file.url), [file] * len(self)) if is_whole else None
        with contextlib.ExitStack() as stack:
            if files is not None:
                with named_errors(file.url):
                    scratch = scratch._replace(here=stack.enter_context(files.held(file, self._whole(number).unpack)))
            samples = self._samples(number, RoomyReader(remote, self._room), scratch)
        whole = over(part, samples)
        return FirstShard(table_of(samples, whole, file), schema_of(whole), tuple(samples.typed))

    def _samples(self, number: int, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return the samples of a shard, as its bytes say."""
        shard, file = self._shards[number], self.file(number)
        samples = replace(shard, source=file).samples(remote, scratch)
        if scratch.here is not None and samples.unpack is None:  # what is here is its content
            samples = replace(samples, unpack=self._packings.get(number))
        if samples.damage is not None:
            logger.warning("%s is damaged, %d samples are kept: %s", urls.redact(file.url), len(samples.parts), samples.damage)
            self.said.append(DamagedShardError(str(samples.damage), url=file.url))
        if len(samples.parts) > ROOM_ROWS and not self._are_counted:
            raise SourceError(
                f"{urls.redact(file.url)} has {len(samples.parts)} samples, and a lazy index takes {ROOM_ROWS} of a shard: "
                "leave lazy_index_chunk_size out"
            )
        return samples.at(number, number)

    # -- shards that are left out -------------------------------------------------------------------------------------

    def leave_out(self, number: int, error: StorageError, store: ChunkStore) -> bool:
        """Take a shard for one without samples, if it may be: one that is not there for all runs, another one for this epoch.

        How many samples a shard has decides what each process takes. So all of a node go by the note of the first one that
        finds it missing; one that is there may come in another process, or the next time, and is noted nowhere.

        Args:
            number: Of the shard.
            error: Why it does not come.
            store: The file of the index.

        Returns:
            Whether it may.
        """
        if not leaves_out(error, self._shards[number].missing):
            return False
        if not isinstance(error, ObjectNotFoundError):
            self._leave_out_now(number, self._without(number, error))
            return True
        with self._alone(number, store):
            if self._known(number, store) is None:
                self.note(number, self._without(number, error), store)
        return True

    def _leave_out_now(self, number: int, table: ShardTable) -> None:
        for known in (self._versions, self._packings):  # the next epoch asks for them again
            known.pop(number, None)
        for epoch, other in list(self._left_out):
            if epoch < self.epoch - 1:
                self._left_out.pop((epoch, other), None)
        self._left_out[self.epoch, number] = table

    def _without(self, number: int, error: StorageError) -> ShardTable:
        """Return the table of a shard that is left out, and say so."""
        file = replace(self._shards[number].source, is_missing=isinstance(error, ObjectNotFoundError))
        logger.warning("%s is left out: %s", urls.redact(file.url), error)
        self.said.append(type(error)(str(error), **{**error.context, "url": file.url}))
        none = ShardSamples.none(missing_shard(file.url))
        return table_of(none, over(self._parts[number], none), file)

    @property
    def left_out(self) -> list[int]:
        """Shards that are there, and that this epoch is without in this process."""
        return [number for epoch, number in list(self._left_out) if epoch == self.epoch]

    def missing(self, store: ChunkStore) -> list[int]:
        """Return the shards that were not there as they were looked for."""
        if not any(shard.missing.leaves_out for shard in self._shards) or not members_path(store.path).exists():
            return []
        empty = np.flatnonzero(self.found(store).counts() == 0)  # [num_empty]
        return [number for number in empty.tolist() if (table := self._known(number, store)) is not None and table.is_missing]

    def is_there(self, number: int, remote: RemoteReader) -> bool:
        """Return whether a shard is there now."""
        source = self._shards[number].source
        try:
            stat_file(source.url, remote, source.access)
        except StorageError:
            return False
        return True

    def forget(self) -> None:
        """Know nothing of any shard: the file of tables is another one."""
        self._found = None
        self._versions.clear()
        self._tables.clear()

    # -- versions -----------------------------------------------------------------------------------------------------

    def file(self, number: int) -> SourceFile:
        """Return the file of a shard, in the version that is known."""
        return self._versions.get(number) or self._shards[number].source

    def _has_more_to_say(self, number: int) -> bool:
        is_apart = self._shards[number].layout.is_table_apart
        return is_apart or not self._is_looked_at(number) or self._may_be_packed(number)

    def _is_looked_at(self, number: int) -> bool:
        file = self.file(number)
        return file.etag is not None or bool(file.content)

    def _may_be_packed(self, number: int) -> bool:
        file = self._shards[number].source
        return number not in self._packings and urls.is_remote(file.url) and says_compressed(file.url)

    def _look_at(self, number: int, *, store: ChunkStore, remote: RemoteReader, in_ranges: bool) -> None:
        try:
            self._learn(number, remote)
            if in_ranges or self._shards[number].layout.is_table_apart:
                self._read_once(number, store, RoomyReader(remote, self._room))
        except StorageError as error:
            if not self.leave_out(number, error, store):
                raise

    def _learn(self, number: int, remote: RemoteReader) -> None:
        """Ask for the version of a shard, and how it is compressed.

        Raises:
            SourceError: It has another size than its index file says.
        """
        file = named = self.file(number)
        if not self._is_looked_at(number):
            file = stat_file(named.url, remote, named.access)
            if None not in (named.size_bytes, file.size_bytes) and named.size_bytes != file.size_bytes:
                raise SourceError(
                    f"{urls.redact(file.url)} has {file.size_bytes} bytes, and the index of its source says "
                    f"{named.size_bytes}: one of them is of another version"
                )
            if file.size_bytes is None:  # a server that does not say it is compared with the index as bytes come
                file = replace(file, size_bytes=named.size_bytes)
            self._versions[number] = file
        if self._may_be_packed(number) and file.size_bytes is not None:
            with named_errors(file.url):
                compression = compression_of(RemoteBytes(file, remote).read_at(0, MAGIC_BYTES))
            self._packings[number] = None if compression is None else Unpack(compression)


def _shard_of(part: SourcePart) -> ShardPart:
    shard = innermost(part)
    assert isinstance(shard, ShardPart), "shards are given alone"
    return shard


def members_path(index: Path) -> Path:
    """Return where the tables are kept that were found of the shards of an index."""
    return index.with_suffix(".members")
