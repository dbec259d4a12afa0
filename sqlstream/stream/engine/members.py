"""Content of samples that lies in shards: a slot wants the objects that hold its parts, and reads them as its sample is made.

An object is some bytes of a shard (`storage/members/entries.py`), or the whole shard. Of local shards nothing is wanted: they
are read in place, through a small table of open files. Mapping them into memory was rejected: an error of the disk would kill a
worker.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from sqlstream.cache.session import ObjectRef
from sqlstream.config import SampleOptions, ShardUnit
from sqlstream.errors import DamagedMemberError, MissingFieldError, SourceChangedError, SourceError
from sqlstream.index.build.shards import SamplePlace, Shard, ShardIndex
from sqlstream.index.sources.base.access import local_file
from sqlstream.index.sources.shards.layout import ReadPart
from sqlstream.index.sources.shards.samples import SAMPLE
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.protocols import Unpack
from sqlstream.storage.members.entries import Span
from sqlstream.storage.members.places import SamplePart
from sqlstream.transforms.base import Sample

if TYPE_CHECKING:
    from sqlstream.stream.engine.slots import PlannedSample

_MAX_OPEN = 64
"""Local shards that stay open: those of a default `shuffle_window`."""


class OpenShard:
    """A file that is open as long as it is used.

    Args:
        path: The file.
    """

    def __init__(self, path: str | Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes of it, fewer at its end only."""
        data = os.pread(self._descriptor, size, offset)
        if len(data) < size:  # a system call reads 2 GiB at most
            pieces = [data]
            while data and sum(map(len, pieces)) < size:
                data = os.pread(self._descriptor, size - sum(map(len, pieces)), offset + sum(map(len, pieces)))
                pieces.append(data)
            data = b"".join(pieces)
        return data

    def __del__(self) -> None:
        if (descriptor := getattr(self, "_descriptor", None)) is not None:
            os.close(descriptor)


class _Facts(TypedDict):
    """What all objects of a shard have."""

    etag: str | None
    version: str
    dataset: int | None
    identity: Identity | None
    access: Access


class ColumnPart(NamedTuple):
    """A part of a sample, in one of its objects."""

    name: str
    """Its column."""
    entry: int
    """Which of the sample's objects it is in."""
    offset: int
    """Its first byte there; of a local shard, in the shard."""
    part: SamplePart


@dataclass(frozen=True, slots=True, eq=False)
class MemberContent:
    """Where the content of a row is."""

    reader: MemberReader
    shard: int
    parts: tuple[ColumnPart, ...]
    refs: tuple[ObjectRef, ...]
    """The objects that it is read from."""

    @property
    def identities(self) -> dict[str, object]:
        """What names the content of each column, as `CachedChain` names objects."""
        shard = self.reader.shard(self.shard)
        version = (urls.redact(shard.file.url), shard.file.size_bytes, shard.file.etag or shard.file.content)
        reading = shard.layout.reading
        return {found.name: [*version, reading, found.part.offset, found.part.size] for found in self.parts}

    def fill(self, sample: Sample, files: Sequence[str]) -> None:
        """Put the content into a sample.

        Args:
            sample: The sample.
            files: The files of its objects.

        Raises:
            SourceChangedError: The shard is not what was indexed.
        """
        self.reader.fill(sample, self, files)


class MemberReader:
    """The content of rows whose samples lie in shards, in this process. Threads share it.

    Args:
        index: The index.
        dataset: Id of the dataset in the ledger.
        identity: What identifies objects beside their URL; None: nothing.
        options: Which columns are wanted.
        unit: In what unit remote shards are fetched (`units.choose_unit`).
    """

    def __init__(
        self, index: ShardIndex, dataset: int | None, identity: Identity | None, options: SampleOptions, unit: ShardUnit
    ) -> None:
        self._index, self._dataset, self._identity = index, dataset, identity
        columns = [column.name for column in index.content_columns]
        wanted = options.content_columns
        self._columns = tuple(name for name in columns if wanted is None or name in wanted)
        self._unwanted = tuple(name for name in columns if name not in self._columns)
        must_be = [column.name for column in index.content_columns if column.is_member and not options.allow_missing_columns]
        self._named = tuple(name for name in must_be if name in options.columns_to_download)
        self._names = [name if name in self._columns or name == SAMPLE else None for name in index.member_names]
        self._is_whole = unit is ShardUnit.WHOLE
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._unchanged: set[str] = set()
        """Local shards that are unpacked into the cache, and were compared with the index."""

    def shard(self, number: int) -> Shard:
        """Return a shard by its number in the source."""
        shard = self._index.shards[number]
        assert shard is not None, "rows of this part lie in no shard"
        return shard

    def prepare(self, rows: Sequence[Sample], row_ids: Sequence[int]) -> Sequence[SamplePlace]:
        """Return where the content of rows is.

        Args:
            rows: The rows, before their objects are looked for.
            row_ids: Their ids.
        """
        del rows
        return self._index.places_of(row_ids)

    def plan(self, slots: Sequence[PlannedSample], prepared: Sequence[SamplePlace]) -> None:
        """Note in slots where their content is, and leave out the columns that are not wanted.

        Args:
            slots: The slots.
            prepared: What `prepare` has returned for their rows.
        """
        for slot in slots:
            for name in self._unwanted:
                slot.sample.pop(name, None)
            if slot.error is not None:
                continue
            for name in self._named:
                if slot.sample.get(name) is None:
                    which = f"row {slot.row_id} (sample {slot.sample.get('__sample_key__')!r})"
                    slot.error = MissingFieldError(
                        f"{which} has no part {name!r} in its shard: filter such rows ({name} IS NOT NULL), or "
                        "pass allow_missing_columns=True"
                    )
            if slot.error is None:
                slot.content = self._content(slot.sample, prepared[slot.place])
                slot.want()

    def _content(self, sample: Sample, place: SamplePlace) -> MemberContent:
        """Return where the content of a sample is, of the columns that it still has."""
        names, shard = self._names, self.shard(place.shard)
        entries, parts = place.place
        is_remote, unpack = urls.is_remote(shard.file.url), self._index.unpacks.get(place.shard)
        found: list[ColumnPart] = []
        spans: list[Span] = []
        for part in parts:
            name = names[part.column]
            if name is None or not (name in sample or (name == SAMPLE and self._lacking(sample))):
                continue
            if not part.size or not is_remote or self._is_whole or unpack is not None:  # no object holds an empty part
                found.append(ColumnPart(name, 0, part.offset, part))
                continue
            span = next(span for span in entries if span[0] <= part.offset and part.offset + part.size <= span[1])
            if span not in spans:
                spans.append(span)
            found.append(ColumnPart(name, spans.index(span), part.offset - span[0], part))
        has_refs = found and (unpack is not None or (is_remote and any(some.part.size for some in found)))
        return MemberContent(self, place.shard, tuple(found), self._refs(shard, spans, unpack) if has_refs else ())

    def _lacking(self, sample: Sample) -> list[str]:
        """Return the columns that a sample has no value for yet."""
        return [name for name in self._columns if sample.get(name, SAMPLE) is None]

    def _refs(self, shard: Shard, spans: Sequence[Span], unpack: Unpack | None) -> tuple[ObjectRef, ...]:
        """Return the objects of some bytes of a shard, or of all that it holds."""
        file = shard.file
        assert file.size_bytes is not None
        is_remote = urls.is_remote(file.url)
        facts: _Facts = {
            "etag": file.etag if is_remote else None,  # of a local file it is its time of change, which the key has
            "version": file.etag or file.content,
            "dataset": self._dataset,
            "identity": self._identity,
            "access": file.access,
        }
        if unpack is not None:
            if not is_remote and file.url not in self._unchanged:
                _check_unchanged(file)
                self._unchanged.add(file.url)
            return (ObjectRef.unpacked(file.url, unpack, file.size_bytes, **facts),)
        return tuple(ObjectRef.part_of(file.url, span, file.size_bytes, **facts) for span in spans or [(0, file.size_bytes)])

    def fill(self, sample: Sample, content: MemberContent, files: Sequence[str]) -> None:
        """Put the content of a row into its sample; see `MemberContent.fill`."""
        file, layout = self.shard(content.shard)
        opened = list(map(OpenShard, files))
        if not opened and any(found.part.size for found in content.parts):
            opened = [self._local(content.shard)]
        try:
            read = [self._read(found, opened, content.shard) for found in content.parts]
            if read:
                sample.update(layout.values(read, self._lacking(sample), urls.redact(file.url)))
        except SourceChangedError:
            raise
        except SourceError as error:
            which = f"row {sample.get('__row__')}, sample {sample.get('__sample_key__')!r}"
            raise DamagedMemberError(f"{error} ({which})", url=urls.redact(file.url)) from error

    def _read(self, found: ColumnPart, opened: Sequence[OpenShard], number: int) -> ReadPart:
        """Return a part with its bytes.

        Raises:
            SourceChangedError: The shard ends before them.
            SourceError: Its table does not say where they are.
        """
        name, entry, offset, part = found
        is_packed = number in self._index.unpacks
        if not part.size and not is_packed:
            return ReadPart(name, b"", part)
        file, layout = self.shard(number)
        if is_packed:
            part = layout.locate(part, opened[entry].read, urls.redact(file.url))
            offset = part.offset
        data = opened[entry].read(offset, part.size)
        if len(data) < part.size:
            raise SourceChangedError(
                f"{urls.redact(file.url)} ends before byte {part.offset + part.size}, where {name!r} of a row was when it was "
                "indexed: open the dataset again"
            )
        return ReadPart(name, data, part)

    def _local(self, number: int) -> OpenShard:
        """Return a local shard, open; the last ones used stay so.

        Raises:
            SourceChangedError: It is not what was indexed.
        """
        opened = self._open
        found = opened.pop(number, None)
        if found is None:
            file = self.shard(number).file
            found = OpenShard(file.url)
            _check_unchanged(file)
        opened[number] = found
        while len(opened) > _MAX_OPEN:
            try:
                opened.popitem(last=False)
            except KeyError:  # another thread has removed it
                break
        return found


def _check_unchanged(file: SourceFile) -> None:
    """Raise SourceChangedError if a local shard is not what was indexed."""
    if local_file(Path(file.url)) != file:
        raise SourceChangedError(f"{file.url} changed since it was indexed: open the dataset again")
