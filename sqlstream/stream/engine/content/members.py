"""Content of samples that lies in shards: a slot wants the objects that hold its parts, and reads them as its sample is made.

An object is some bytes of a shard (`storage/members/entries.py`), or the whole shard. Of local shards nothing is wanted: they
are read in place, through a small table of open files. Mapping them into memory was rejected: an error of the disk would kill a
worker.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sqlstream.cache.session import AnyHold, CacheSession, ObjectParts, ObjectRef
from sqlstream.config import MemberForm, SampleOptions, ShardUnit
from sqlstream.errors import DamagedMemberError, DecodeError, MissingFieldError, SourceChangedError, SourceError, StorageError
from sqlstream.index.build.shards import SamplePlace, Shard
from sqlstream.index.sources.base.access import indexed_status, lost_file
from sqlstream.index.sources.shards.layout import CURE_OF_COPY
from sqlstream.index.sources.shards.samples import SAMPLE
from sqlstream.index.types.models import Column
from sqlstream.storage.base import urls
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.protocols import Unpack
from sqlstream.storage.members.entries import Span
from sqlstream.storage.members.places import SamplePart
from sqlstream.stream.engine.content.part_copies import PartCopies, look_up
from sqlstream.stream.engine.content.shard_files import parts_of
from sqlstream.stream.engine.content.shard_reads import (
    WHOLE,
    Located,
    OpenShard,
    ReadableShard,
    check_unchanged,
    lost_copy,
    read_part,
)
from sqlstream.transforms.base import Sample

if TYPE_CHECKING:
    from sqlstream.stream.engine.slots import PlannedSample

_MAX_KNOWN = 4096
"""Shards whose names for the cache are kept; arbitrary."""
_MAX_OPEN = 64
"""Local shards that stay open: those of a default `shuffle_window`."""
_SHARE_OPEN = 8
"""They take at most one in so many of the descriptors that a process may have; of 64, a worker wants some 40 for the rest."""


@dataclass(slots=True, eq=False)
class MemberContent:
    """Where the content of a row is; not frozen, since a window makes many, and that takes three times as long."""

    reader: MemberReader
    shard: ReadableShard
    parts: Sequence[SamplePart]
    refs: tuple[ObjectRef, ...]
    """The objects that it is read from."""

    @property
    def is_shared(self) -> bool:
        """The shard is fetched whole."""
        return bool(self.refs) and (self.shard.unpack is not None or self.refs[0].shard_key is None)

    @property
    def identities(self) -> dict[str, object]:
        """What names the content of each column, as `CachedChain` names objects."""
        file, layout = self.shard.file, self.shard.layout
        version = (self.shard.name, file.size_bytes, file.etag or file.content)
        if self.shard.unpack is not None and self.shard.unpack.printed is not None:
            version = (*version[:2], self.shard.unpack.printed)
        names = self.reader.names
        return {str(names[part.column]): [*version, layout.reading, part.offset, part.size] for part in self.parts}

    def note_changed(self) -> None:
        """Have the next opening look at the shards anew."""
        self.reader.note_changed()

    def look_up(self) -> None:
        """Nothing: `cache/acquire` knows in what unit the shard is here."""

    def fill(self, sample: Sample, hold: AnyHold | None, first: int) -> AnyHold | None:
        """Put the content into a sample; see `SampleContent.fill`.

        Raises:
            SourceChangedError: The shard is not what was indexed.
            DamagedMemberError: Its bytes are damaged.
        """
        self.reader.fill(sample, self, hold, first)
        return hold


class MemberIndex(Protocol):
    """An index of samples that lie in shards."""

    @property
    def content_columns(self) -> Sequence[Column]:
        """The columns whose content is in the shards."""
        ...

    @property
    def member_names(self) -> Sequence[str]:
        """Names of the columns of parts, by the number that a place has of them."""
        ...

    @property
    def unpacks(self) -> Mapping[int, Unpack]:
        """How the shards are unpacked that are compressed as a whole, of rows whose places were asked for."""
        ...

    @property
    def has_commands(self) -> bool:
        """Some shards are what commands print."""
        ...

    def shard(self, number: int) -> Shard:
        """Return a shard by its number in the source."""
        ...

    def note_changed(self) -> None:
        """Note that a shard is another version than was indexed."""
        ...


class MemberReader:
    """The content of rows whose samples lie in shards, in this process. Threads share it.

    Args:
        index: The index.
        read: Returns rows of it by id, and where the content of each is.
        dataset: Id of the dataset in the ledger.
        identity: What identifies objects beside their URL; None: nothing.
        options: Which columns are wanted.
        unit: Returns in what unit remote shards are fetched in an epoch (`units.choose_unit`).
        session: Has the copies of parts that no request brings alone (`PartCopies`).
    """

    def __init__(
        self,
        index: MemberIndex,
        read: Callable[[Sequence[int]], tuple[list[Sample], list[SamplePlace]]],
        dataset: int | None,
        identity: Identity | None,
        options: SampleOptions,
        unit: Callable[[int], ShardUnit],
        session: CacheSession,
    ) -> None:
        self._index, self._dataset, self._identity, self._session = index, dataset, identity, session
        self.read = read
        """See `ContentSource.read`."""
        columns = [column.name for column in index.content_columns]
        wanted = options.content_columns
        self._columns = tuple(name for name in columns if wanted is None or name in wanted)
        self._unwanted = tuple(name for name in columns if name not in self._columns)
        must_be = [column.name for column in index.content_columns if column.is_member and not options.allow_missing_columns]
        self._named = tuple(name for name in must_be if name in options.columns_to_download)
        self._names: list[str | None] = []
        """See `names`."""
        self._takes_new = options.takes_new_parts
        self._gives_paths = options.members is MemberForm.PATH
        self._choose_unit = unit
        self._unit: tuple[int, ShardUnit] | None = None
        """The last epoch, and the unit that is wished in it."""
        self._shards: dict[int, ReadableShard] = {}
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._most_open = max(1, min(_MAX_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE_OPEN))

    def note_changed(self) -> None:
        """See `MemberContent.note_changed`."""
        self._index.note_changed()

    @property
    def names_versions(self) -> bool:
        """Some shards are what commands print."""
        return self._index.has_commands

    def plan(self, slots: Sequence[PlannedSample], prepared: Sequence[SamplePlace]) -> None:
        """Note in slots where their content is, and leave out the columns that are not wanted.

        Args:
            slots: The slots.
            prepared: Where the content of the rows is that `read` has returned.
        """
        names = self.names
        for slot in slots:
            for name in self._unwanted:
                slot.sample.pop(name, None)
            for name in self._named:
                if slot.error is None and slot.sample.get(name) is None:
                    which = f"row {slot.row_id} (sample {slot.sample.get('__sample_key__')!r})"
                    slot.error = MissingFieldError(
                        f"{which} has no part {name!r} in its shard: filter such rows ({name} IS NOT NULL), or "
                        "pass allow_missing_columns=True"
                    )
            if slot.error is None:
                number, place = prepared[slot.place]
                parts = self._wanted(slot.sample, place.parts, names)
                try:
                    self._locate(slot, self._shards.get(number) or self._shard(number), place.entries, parts)
                except StorageError as error:  # of a local shard: `on_error` says what becomes of the sample
                    slot.error = error
        copies = [slot.content for slot in slots if isinstance(slot.content, PartCopies)] if self._gives_paths else []
        if copies:
            look_up(copies, self._session)
        for slot in slots:
            if slot.error is None:
                slot.want()

    def _locate(self, slot: PlannedSample, shard: ReadableShard, entries: Sequence[Span], parts: Sequence[SamplePart]) -> None:
        """Note in a slot where its content is, of those parts that are wanted."""
        if not self._gives_paths:
            slot.content = self._content(shard, entries, parts, slot.epoch)
            return
        files = self._files(slot.sample, shard, parts)
        if shard.unpack is None:
            slot.refs.update(files)
        else:
            slot.content = PartCopies(self._content(shard, entries, parts, slot.epoch), files, self._session)

    def _content(self, shard: ReadableShard, entries: Sequence[Span], parts: Sequence[SamplePart], epoch: int) -> MemberContent:
        """Return where the content of a sample is."""
        refs: tuple[ObjectRef, ...] = shard.packed if parts else ()
        if shard.parts is not None and shard.unpack is None:
            spans = tuple(dict.fromkeys(_entry_of(part, entries) for part in parts if part.size))  # none holds an empty part
            if not spans:
                refs = ()
            elif (shard.unit or self._wished(epoch)) is ShardUnit.WHOLE:
                refs = (shard.parts.whole(spans),)
            else:
                refs = tuple(map(shard.parts.member, spans))
        return MemberContent(self, shard, parts, refs)

    def _wanted(self, sample: Sample, parts: Sequence[SamplePart], names: Sequence[str | None]) -> list[SamplePart]:
        """Return the parts of a sample that are wanted, of the columns that it still has."""
        return [
            part
            for part in parts
            if (name := names[part[0]]) is not None  # its column
            and (name in sample or (name == SAMPLE and self._lacking(sample)) or self._is_new(name))
        ]

    def _is_new(self, name: str) -> bool:
        """Return whether a part is wanted that is no column: the first shard of a lazy index has it not."""
        return self._takes_new and name != SAMPLE and name not in self._columns

    def _files(self, sample: Sample, shard: ReadableShard, parts: Sequence[SamplePart]) -> dict[str, ObjectRef]:
        """Return the parts of a sample as files, by column: entries of their own, also where the shard is local.

        Raises:
            ConfigError: They are no files.
        """
        files: dict[str, ObjectRef] = {}
        assert shard.parts is not None, "it is named where paths are given"
        for part in parts:
            name = str(self.names[part.column])
            file, span = shard.layout.file_of(part, name, sample), (part.offset, part.offset + part.size)
            if shard.unpack is None:
                files[name] = shard.parts.file(span, file.ext, file.record)
            else:
                files[name] = shard.parts.copy(span, file.ext, shard.unpack)
        return files

    @property
    def names(self) -> Sequence[str | None]:
        """For each number that places have of the column of a part its name; None: it is not wanted."""
        names, known = self._names, self._index.member_names
        if len(names) < len(known):  # of a lazy index they become known shard by shard
            names = self._names = [
                name if self._takes_new or name in self._columns or name == SAMPLE else None for name in list(known)
            ]
        return names

    def _wished(self, epoch: int) -> ShardUnit:
        """Return in what unit remote shards are fetched in an epoch."""
        known = self._unit
        if known is None or known[0] != epoch:
            for shard in [*self._shards.values()]:
                shard.unit = None
            known = self._unit = (epoch, self._choose_unit(epoch))
        return known[1]

    def _lacking(self, sample: Sample) -> list[str]:
        """Return the columns that a sample has no value for yet."""
        return [name for name in self._columns if sample.get(name, SAMPLE) is None]

    def _shard(self, number: int) -> ReadableShard:
        """Return what is known of a shard.

        Raises:
            SourceChangedError: It is local, and not what was indexed.
            StorageError: It is local, and cannot be read.
        """
        if (known := self._shards.get(number)) is not None:
            return known
        shard, unpack = self._index.shard(number), self._index.unpacks.get(number)
        file, is_remote = shard.file, urls.is_remote(shard.file.url)
        parts: ObjectParts | None = None
        if is_remote or unpack is not None or self._gives_paths:
            if not is_remote:
                check_unchanged(file, indexed_status(file.url))
            parts = parts_of(file, self._dataset, self._identity)
        if len(self._shards) >= _MAX_KNOWN:
            self._shards.clear()
        known = self._shards[number] = ReadableShard(number, shard, unpack, parts)
        return known

    def fill(self, sample: Sample, content: MemberContent, hold: AnyHold | None, first: int) -> None:
        """Put the content of a row into its sample; see `MemberContent.fill`."""
        shard, wanted = content.shard, self._lacking(sample)
        try:
            if content.refs and hold is not None:
                values = self._values_held(content, hold, first, wanted)
            elif any(part.size for part in content.parts):
                opened = self._local(shard)
                values = self._values(content, (Located(WHOLE, opened.descriptor),), wanted)
                check_unchanged(shard.file, os.fstat(opened.descriptor))  # after reading: it may be written to meanwhile
            else:
                values = self._values(content, (), wanted)
            sample.update(values)
        except SourceChangedError:
            raise
        except (SourceError, DecodeError) as error:
            self._check_local(content)
            which = f"row {sample.get('__row__')}, sample {sample.get('__sample_key__')!r}"
            if content.refs:
                which += CURE_OF_COPY
            if isinstance(error, DecodeError):
                raise DecodeError(f"{shard.name}: {error} ({which})", **error.context) from error
            raise DamagedMemberError(f"{error} ({which})", url=shard.name) from error
        except OSError as error:
            if content.refs or isinstance(error, StorageError):  # of the cache, or named already
                raise
            self._check_local(content)
            raise lost_file(shard.name, error) from error

    def _values(self, content: MemberContent, objects: Sequence[Located], wanted: Sequence[str]) -> dict[str, Any]:
        """Return the values of a sample by column, from the files that have its bytes."""
        shard, names = content.shard, self.names
        if not content.parts:
            return {}
        read = [read_part(str(names[part.column]), part, objects, shard) for part in content.parts]
        return shard.layout.values(read, wanted, shard.name)

    def _check_local(self, content: MemberContent) -> None:
        """Raise SourceChangedError if what could not be read is a local shard that is not what was indexed."""
        shard = content.shard
        if not content.refs and (found := self._open.get(shard.number)) is not None:
            check_unchanged(shard.file, os.fstat(found.descriptor))

    def _values_held(self, content: MemberContent, hold: AnyHold, first: int, wanted: Sequence[str]) -> dict[str, Any]:
        """Return the values of a sample by column, from the objects that a hold has."""
        shard, refs = content.shard, hold.refs[first:]
        if refs[0].key != content.refs[0].key:  # the cache has the other unit: that is asked for from now on
            is_whole = shard.parts is not None and refs[0].key == shard.parts.key
            shard.unit = ShardUnit.WHOLE if is_whole else ShardUnit.MEMBERS
        opened: list[OpenShard] = []
        objects: list[Located] = []
        for ref, path in zip(refs, hold.paths[first:], strict=True):
            if (lock := hold.open_files.get(path)) is not None and lock.owners:
                objects.append(Located(ref.span or WHOLE, lock.owners[0].fileno()))
                continue
            try:
                opened.append(OpenShard(path))
            except FileNotFoundError as error:
                raise lost_copy(path, shard.name, "removed") from error
            objects.append(Located(ref.span or WHOLE, opened[-1].descriptor))
        try:
            return self._values(content, objects, wanted)
        except SourceChangedError as error:
            for ref, path, found in zip(refs, hold.paths[first:], objects, strict=True):
                if ref.size_bytes is not None and os.fstat(found.descriptor).st_size < ref.size_bytes:
                    raise lost_copy(path, shard.name, "cut") from error
            raise

    def _local(self, shard: ReadableShard) -> OpenShard:
        """Return a local shard, open; the last ones used stay so."""
        opened = self._open
        found = opened.pop(shard.number, None)
        if found is None:
            found = OpenShard(shard.file.url)
        opened[shard.number] = found
        while len(opened) > self._most_open:
            try:
                opened.popitem(last=False)
            except KeyError:  # another thread has removed it
                break
        return found


def _entry_of(part: SamplePart, entries: Sequence[Span]) -> Span:
    """Return the object that holds a part."""
    if len(entries) == 1:  # most samples are one
        return entries[0]
    return next(span for span in entries if span[0] <= part.offset and part.offset + part.size <= span[1])
