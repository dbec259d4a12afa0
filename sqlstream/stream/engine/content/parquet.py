"""Content of samples that stays in Parquet files: a slot wants its row group as an object, and reads it as its sample is made.

So the engine holds, fetches ahead and gives back a row group like any other object, once however many samples share it; a
sample that was stored (`CacheTransform`) wants none. Of local files nothing is wanted: they are read in place. What is decoded
stays in memory up to `MEMORY_BYTES`. Content in the rows themselves, as a lazy index has it, was rejected: a window of samples
would hold all of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from sqlstream.cache.session import AnyHold, ObjectRef
from sqlstream.config import SampleOptions
from sqlstream.errors import MissingFieldError
from sqlstream.index.build.chunks import ChunkPlace
from sqlstream.index.build.content import RowGroupIndex
from sqlstream.stream.engine.content.chunk_objects import ChunkObjects
from sqlstream.transforms.base import Sample

if TYPE_CHECKING:
    from sqlstream.stream.engine.slots import PlannedSample

MEMORY_BYTES = 512 << 20
"""Decoded row groups of a process, the last one apart; those of four blocks of 100 MiB, as `datasets` writes them."""
_KNOWN_CHUNKS = 4096
"""Row groups whose place is kept in memory; arbitrary: a footer is looked at again for others."""


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A row group."""

    number: int
    place: ChunkPlace
    refs: tuple[ObjectRef, ...]
    """Its bytes, as objects of the cache; none of a local file."""
    identity: tuple[object, ...]
    """What tells its bytes from all others."""
    with_paths: tuple[str, ...]
    """Columns in which rows may have a path, which is downloaded, in place of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class RowContent:
    """Where the content of a row is."""

    reader: ContentReader
    chunk: _Chunk
    row: int
    """Which row of the chunk."""

    @property
    def refs(self) -> tuple[ObjectRef, ...]:
        """The objects that it is read from."""
        return self.chunk.refs

    @property
    def is_shared(self) -> bool:
        """A row group is read for all of its rows."""
        return bool(self.chunk.refs)

    @property
    def identities(self) -> dict[str, object]:
        """What names the content of each column, as `CachedChain` names objects."""
        return {name: [*self.chunk.identity, self.row] for name in self.reader.names}

    def note_changed(self) -> None:
        """Nothing: the next opening looks at the versions of all files."""

    def look_up(self) -> None:
        """Nothing: it is read from its row group in any case."""

    def fill(self, sample: Sample, hold: AnyHold | None, first: int) -> AnyHold | None:
        """Put the content into a sample, where the row has none that was copied; see `SampleContent.fill`.

        Raises:
            MissingFieldError: A column that was asked for by name has no content.
            SourceChangedError: The Parquet file is not what was indexed.
        """
        files = () if hold is None else hold.paths[first:]
        self.reader.fill(sample, self.chunk, self.row, [Path(file) for file in files])
        return hold


class ContentReader:
    """The content of the rows of an index, in this process. Threads share it: what it keeps changes in single steps.

    Args:
        index: The index.
        objects: Names chunks for the cache.
        options: Which columns are wanted.
        memory_bytes: Decoded row groups that stay in memory, the last one apart.
    """

    def __init__(
        self, index: RowGroupIndex, objects: ChunkObjects, options: SampleOptions, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        self._index = index
        self._objects = objects
        self._memory_bytes = memory_bytes
        columns = [column.name for column in index.content_columns]
        wanted = options.content_columns
        self.names = tuple(name for name in columns if wanted is None or name in wanted)
        """Columns whose content samples get."""
        self._unwanted = tuple(name for name in columns if name not in self.names)
        self._named = tuple(name for name in self.names if name in options.columns_to_download)
        """Columns of whose structs without bytes the paths are downloaded."""
        self._allows_missing = options.allow_missing_columns
        self._chunks: OrderedDict[int, _Chunk] = OrderedDict()
        self._loaded: OrderedDict[int, pa.RecordBatch] = OrderedDict()

    @property
    def names_versions(self) -> bool:
        """None of its objects: their keys hold their version."""
        return False

    def plan(self, slots: Sequence[PlannedSample], prepared: None) -> None:
        """Note in slots where their content is, and leave out the columns that are not wanted."""
        del prepared
        for slot in slots if self._unwanted else ():
            for name in self._unwanted:
                slot.sample.pop(name, None)
        if not self.names or not slots:
            return
        places = self._index.chunks_of([slot.row_id for slot in slots]).tolist()
        for slot, (chunk, row) in zip(slots, places, strict=True):
            if chunk >= 0 and slot.error is None:
                slot.content = RowContent(self, self._chunk(chunk), row)
                slot.want()

    def read(self, row_ids: Sequence[int]) -> tuple[list[Sample], None]:
        """Return rows, with structs without bytes, but with a path, where that is downloaded: their row groups are read for it.

        Args:
            row_ids: Their ids.
        """
        rows = self._index.rows(row_ids)
        if not self._named:
            return rows, None
        for values, (number, row) in zip(rows, self._index.chunks_of(row_ids).tolist(), strict=True):
            if number < 0 or not (chunk := self._chunk(number)).with_paths:
                continue
            batch = self._load(chunk, None)
            for name in chunk.with_paths:
                found = batch.column(name)[row].as_py()
                if isinstance(found, Mapping) and found["bytes"] is None and found["path"]:
                    values[name] = found
        return rows, None

    def fill(self, sample: Sample, chunk: _Chunk, row: int, files: Sequence[Path]) -> None:
        """Put the content of a row into its sample; see `RowContent.fill`."""
        missing = [name for name in self.names if sample.get(name) is None]
        if not missing:  # a predownload transform has put its own there, or the sample is made again
            return
        batch = self._load(chunk, files)
        for name in missing:
            value = batch.column(name)[row].as_py() if name in batch.schema.names else None
            if name in self._named and (value is None or (isinstance(value, Mapping) and value["bytes"] is None)):
                if not self._allows_missing:
                    which = f"row {sample.get('__row__')} (sample {sample.get('__sample_key__')!r})"
                    raise MissingFieldError(
                        f"{which} has no content in column {name!r}: mend the Parquet file, filter such rows, or "
                        "pass allow_missing_columns=True"
                    )
                value = None
            sample[name] = value

    def _chunk(self, number: int) -> _Chunk:
        if (chunk := self._chunks.get(number)) is not None:
            return chunk
        place = self._index.place_of(number, self.names)
        refs = tuple(self._objects.refs(place))
        file = place.file
        identity = tuple(ref.key.hex() for ref in refs) or (file.url, file.size_bytes, file.etag, number)
        with_paths = tuple(name for name in self._named if self._index.may_lack_bytes(number, name))
        chunk = self._chunks[number] = _Chunk(number, place, refs, identity, with_paths)
        while len(self._chunks) > _KNOWN_CHUNKS:
            self._chunks.popitem(last=False)
        return chunk

    def _load(self, chunk: _Chunk, files: Sequence[Path] | None) -> pa.RecordBatch:
        """Return the content of a row group, in memory.

        Args:
            chunk: The row group.
            files: The files of its objects; None: they are waited for, if it is not in memory.
        """
        number, loaded = chunk.number, self._loaded
        if (batch := loaded.pop(number, None)) is not None:
            loaded[number] = batch  # as the last one used
            return batch
        if files is None:
            with self._objects.fetched(chunk.place, chunk.refs) as own:
                batch = self._index.read(number, own, self.names)
        else:
            if chunk.refs:
                self._objects.check_unchanged(chunk.place, chunk.refs)
            batch = self._index.read(number, files, self.names)
        loaded[number] = batch
        total = sum(some.nbytes for some in list(loaded.values()))
        while total > self._memory_bytes and len(loaded) > 1:
            try:
                total -= loaded.popitem(last=False)[1].nbytes
            except KeyError:  # another thread has dropped it
                break
        return batch
