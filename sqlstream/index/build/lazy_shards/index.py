"""The lazy index of shards: its rows, and where their content lies, are in tables that are found shard by shard."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from sqlstream.errors import DamagedShardError, IndexDatabaseError, SchemaError, StorageError
from sqlstream.index.build.lazy import ChunkRows, LazyIndex
from sqlstream.index.build.lazy_shards.chunks import ShardChunks, members_path
from sqlstream.index.build.lazy_shards.table import ShardTable
from sqlstream.index.build.shards import MAX_NAMED, SamplePlace, Shard
from sqlstream.index.file.connection import damaged
from sqlstream.index.file.found import FoundChunks, FoundRows
from sqlstream.index.sources.shards.layout import PartsAreValues
from sqlstream.index.sources.shards.samples import SAMPLE
from sqlstream.index.sql.functions import changes
from sqlstream.index.types.models import Column, fingerprint
from sqlstream.order.permute import Int64Array
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, RemoteReader, Unpack
from sqlstream.storage.members import places
from sqlstream.storage.members.places import SamplePart

logger = logging.getLogger(__name__)


class LazyShardIndex(LazyIndex):
    """The samples of shards, whose tables are read when they are needed; made by `lazy_build.open_lazy_index`."""

    _chunks: ShardChunks

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self.unpacks: dict[int, Unpack] = {}
        """How the shards are unpacked that are compressed as a whole, as far as their rows were asked for."""
        self.member_names: list[str] = []
        """Names of the columns of parts, by the number that a place has of them in this process; it grows."""
        self._numbers: dict[str, int] = {}
        self.has_new_parts = False
        """Who reads it takes parts that are no columns, too."""
        self._left_out: set[str] = set()
        self._naming = threading.Lock()

    def after_fork_in_child(self) -> None:
        """Leave what is the parent's to it."""
        super().after_fork_in_child()
        self._naming = threading.Lock()

    @property
    def content_columns(self) -> tuple[Column, ...]:
        """The columns whose content is in the shards."""
        return tuple(column for column in self.columns if column.is_member or column.is_in_place)

    def shard(self, number: int) -> Shard:
        """Return a shard by its number in the source, in the version whose table was read."""
        return Shard(self._chunks.file(number), self._chunks.shard(number).layout)

    @property
    def is_remote(self) -> bool:
        """Some shards are not on this machine."""
        return any(urls.is_remote(self._chunks.file(number).url) for number in range(len(self._chunks)))

    @cached_property
    def has_commands(self) -> bool:
        """Some shards are what commands print."""
        return any(urls.is_command(self._chunks.file(number).url) for number in range(len(self._chunks)))

    @property
    def holds_values(self) -> bool:
        """No shard has parts that are files."""
        return all(isinstance(self._chunks.shard(number).layout, PartsAreValues) for number in range(len(self._chunks)))

    def shard_sizes(self) -> list[int]:
        """Return the bytes of each shard; of those of which only the names are known, as many as the first one has."""
        first = self._chunks.first_known(self)
        size = None if first is None else first.version[0]
        sizes = [self._chunks.shard(number).source.size_bytes for number in range(len(self._chunks))]
        return [size or 0 if known is None else known for known in sizes]

    def wanted_share(self, columns: Collection[str]) -> float:
        """Return the share of the bytes of the first shard that some columns have, in [0, 1]: of the others it is not known."""
        table = self._chunks.first_known(self)
        if table is None:
            return 1.0 if columns else 0.0
        wanted = sum(size for name, size in table.sizes.items() if name in columns or (name == SAMPLE and columns))
        return wanted / max(1, sum(table.sizes.values()))

    def keep_tables(self, num_tables: int) -> None:
        """Keep so many tables in memory."""
        self._chunks.keep_tables(num_tables)

    def places_of(self, row_ids: Sequence[int]) -> list[SamplePlace]:
        """Return where the content of rows is, in the order asked.

        Raises:
            IndexDatabaseError: The tables that were found are damaged.
        """
        known: dict[int, tuple[ShardTable, int, list[int]]] = {}
        found = list[SamplePlace]()
        numbers: list[int] = (self.bounds.searchsorted(row_ids, side="right") - 1).tolist()
        for row_id, number in zip(row_ids, numbers, strict=True):
            if number not in known:
                table = self._chunks.table(number, self)
                if table.unpack is not None:
                    self.unpacks[number] = table.unpack
                known[number] = table, int(self.bounds[number]), [*map(self._number_of, table.names)]
            table, first_row, columns = known[number]
            try:
                entries, parts = places.unpack(table.places[row_id - first_row].as_py())
                parts = tuple([SamplePart(columns[column], offset, size, facts) for column, offset, size, facts in parts])
            except (ValueError, LookupError) as error:
                raise self._damaged(error) from error
            found.append(SamplePlace(number, places.Place(entries, parts)))
        return found

    def read(self, number: int, files: Sequence[Path]) -> ChunkRows:
        """Return the rows of a shard that the filter keeps; see `LazyIndex.read`."""
        self._check_columns(number, self._chunks.table(number, self, files))  # before the filter notes what it keeps
        if number in self._chunks.left_out:  # the filter would note that it keeps nothing of it
            rows = self._chunks.read(number, files, self)
            return ChunkRows(self.columns, rows, np.empty(0, np.int64), urls.redact(self._chunks.file(number).url))
        return super().read(number, files)

    # -- shards that are left out -------------------------------------------------------------------------------------

    def leave_out(self, number: int, error: StorageError) -> bool:
        """Take a shard that does not come for one without samples, if it may be; see `ShardChunks.leave_out`."""
        return self._chunks.leave_out(number, error, self)

    def take_said(self) -> list[StorageError | DamagedShardError]:
        """Return why shards are left out, or samples of them, as far as it was not returned before."""
        said, self._chunks.said = self._chunks.said, []
        return said

    def at_epoch(self, epoch: int) -> None:
        """Take the epoch that is asked for next: shards that another one is without are asked for again."""
        self._chunks.epoch = epoch

    def _known_counts(self) -> Int64Array:
        counts = super()._known_counts()
        if left_out := self._chunks.left_out:
            counts = counts.copy()  # [num_shards]
            counts[left_out] = 0
        return counts

    @property
    def known_length(self) -> int | None:
        """Rows that the filter keeps; None until it has been run on all shards, and while an epoch is without one of them."""
        return None if self._chunks.left_out else super().known_length

    def look_for_missing(self, remote: RemoteReader) -> None:
        """Have all tables found anew if a shard is there now that was not; else say which ones are left out."""
        if not (missing := self._chunks.missing(self)):
            return
        with ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="shard") as pool:
            is_one_there = any(pool.map(partial(self._chunks.is_there, remote=remote), missing))
        if is_one_there:  # who has the file open goes on with it
            self.note_changed()
            self._chunks.forget()
            return
        if self._chunks.said:  # the first opening has found it
            return
        named = [urls.redact(self._chunks.shard(number).source.url) for number in missing[:MAX_NAMED]]
        more = f" and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
        logger.warning(
            "%d of %d shards are not there, and left out: %s%s", len(missing), len(self._chunks), ", ".join(named), more
        )

    # -- what is noted beside the index -------------------------------------------------------------------------------

    @cached_property
    def kept(self) -> FoundRows:
        """What the filter keeps, as far as it has been run."""
        return FoundRows(self.kept_path, len(self.bounds) - 1)

    @property
    def kept_path(self) -> Path:
        """Where that is: named so that it goes with the tables."""
        parts: dict[str, object] = {"condition": self.condition, **changes(self.condition or "", "sqlite", self.columns)}
        return self.path.with_suffix(f".{fingerprint(parts)}.kept")

    def own_files(self) -> dict[Path, int]:
        """Return the files of the tables that were found, and of what the filter keeps."""
        size = FoundChunks.size_bytes(len(self._chunks))
        files = {members_path(self.path): size}
        return files if self.condition is None else {**files, self.kept_path: size}

    def made_anew(self, path: Path) -> None:
        """See `LazyIndex.made_anew`: with the tables goes what the filters keep of them."""
        if path == members_path(self.path):
            drop_kept(self.path)

    def note_changed(self) -> None:
        """Have the next opening find all tables anew: a shard is another one than its table says.

        Processes that have the files open go on with them.
        """
        drop_kept(self.path)
        with contextlib.suppress(OSError):
            members_path(self.path).unlink(missing_ok=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _number_of(self, name: str) -> int:
        if (number := self._numbers.get(name)) is None:
            with self._naming:
                if (number := self._numbers.get(name)) is None:
                    self.member_names.append(name)
                    number = self._numbers[name] = len(self.member_names) - 1
        return number

    def _check_columns(self, number: int, table: ShardTable) -> None:
        """Say once of each part that it is no column, since the shards that were looked at first have it not.

        Raises:
            SchemaError: Values stay in this shard that are values of rows in the first one: they would be lost.
        """
        here = next((column.name for column in self.columns if column.name in table.typed and not column.is_in_place), None)
        if here is not None:
            raise SchemaError(
                f"{urls.redact(self._chunks.file(number).url)} has values in column {here!r} that stay in it, and the first "
                f"shard of {self.src} has others: leave lazy_index_chunk_size out"
            )
        others = (
            {name for name in (*table.names, *table.rows.schema.names) if name != SAMPLE}
            - {column.name for column in self.columns}
            - self._left_out
        )
        if others and self._says_all_columns and not self.has_new_parts:
            self._left_out |= others
            logger.warning(
                "%s has parts %s, which the first shard of %s has not: samples come without them. Leave "
                "lazy_index_chunk_size out, or put a shard first that has all parts",
                *(urls.redact(self._chunks.file(number).url), ", ".join(map(repr, sorted(others))), self.src),
            )

    @cached_property
    def _says_all_columns(self) -> bool:
        """No columns were left out as the index was opened."""
        return bool(self.meta.get("has_all_columns"))

    def _damaged(self, error: Exception) -> IndexDatabaseError:
        return damaged(members_path(self.path), f"it does not say where the content of a row is: {error!r}")


def drop_kept(index: Path) -> None:
    """Remove what filters keep of the shards of an index, before its tables are found anew: it goes by them, row by row."""
    for path in index.parent.glob(f"{index.stem}.*.kept"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
