"""Shards of MosaicML Streaming: MDS, and its split formats, whose table is a file of its own."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.index.sources.base.access import named_errors, stat_file
from sqlstream.index.sources.base.byte_source import LocalBytes, bytes_of
from sqlstream.index.sources.shards.columns import SampleParts
from sqlstream.index.sources.shards.layout import PartsAreValues, ReadPart, Scratch
from sqlstream.index.sources.shards.mds_values import check_columns, mds_values
from sqlstream.index.sources.shards.reading import ShardBytes, opened, other_size, unpacked_content
from sqlstream.index.sources.shards.samples import SAMPLE, ShardSamples
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, Unpack
from sqlstream.storage.members.mds.decoder import MdsDecoder
from sqlstream.storage.members.mds.shards import MdsColumn, MdsShard, ShardFile, offsets, table_bytes
from sqlstream.storage.members.mds.split import RowDecoder
from sqlstream.storage.members.places import SamplePart
from sqlstream.storage.members.unpacked import unpacked

_PLACE = struct.Struct("<2I")
_KINDS: dict[str, pa.DataType] = {
    **dict.fromkeys(("str", "json", "str_int", "str_float", "str_decimal"), pa.string()),
    **dict.fromkeys(("float16", "float32", "float64", "float"), pa.float64()),
    **dict.fromkeys(("int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))), pa.int64()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsLayout(PartsAreValues):
    """A shard that an `index.json` of MosaicML Streaming describes."""

    shard: MdsShard
    directory: str
    """URL of the directory of the index, with its slash."""
    is_decoded: bool = True
    """Samples have values; False: their bytes."""
    allow_pickle: bool = False
    index_members: tuple[str, ...] = ()
    """Columns whose values rows have."""
    _decoder: MdsDecoder | RowDecoder = field(init=False, repr=False, compare=False)
    """Of its samples; shards of the same columns share it."""

    def __post_init__(self) -> None:
        """Check which columns rows are to have."""
        check_columns(self.index_members, self.shard)
        is_split = self.shard.meta is not None
        decoder = RowDecoder(self.shard) if is_split else _decoder(self.shard.columns, self.allow_pickle)
        object.__setattr__(self, "_decoder", decoder)

    @property
    def num_samples(self) -> int | None:
        """Samples, as the index says."""
        return self.shard.samples

    @property
    def is_table_apart(self) -> bool:
        """The table of a split format is a file of its own; one in a compressed shard is found as its content is read."""
        return self.shard.meta is not None or self.shard.zip is not None

    def identity(self) -> object:
        """Return what the index says of it, and whose values rows have."""
        members = {"members": list(self.index_members)} if self.index_members else {}
        return {"mds": asdict(self.shard), **members}

    @property
    def are_values_slices(self) -> bool:
        """Samples of MDS begin with the sizes of their values; those of split formats are lines."""
        return self.shard.meta is None

    @property
    def reading(self) -> object:
        """Return whether values are decoded, by which encodings."""
        return [self.is_decoded, [list(column) for column in self.shard.columns]]

    def samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return the samples of a shard; see `ShardLayout.samples`.

        The table of an MDS shard that is compressed is in what it holds: samples have their numbers, and `locate` finds them.
        """
        shard = self.shard
        if (other := other_size(file, (shard.zip or shard.raw).bytes)) is not None:
            raise DamagedShardError(other)
        unpack = None if shard.zip is None else _unpack(shard.compression, shard.raw, shard.zip)
        left = [column for column in shard.columns if column.name not in self.index_members]
        typed = {column.name: _KINDS.get(column.encoding, pa.binary()) for column in left}
        found = None if unpack is not None and shard.meta is None else self._offsets(file, remote, scratch.here)
        values = self._values(file, unpack, found, remote, scratch) if self.index_members else None
        if found is None:
            parts = SampleParts.single(SAMPLE, np.arange(shard.samples), np.zeros(shard.samples, np.int64))
        else:
            parts = SampleParts.single(SAMPLE, np.array(found[:-1], np.int64), np.diff(np.array(found, np.int64)))
        return ShardSamples(keys=None, parts=parts, typed=typed, beside=values, unpack=unpack)

    def _values(
        self, file: SourceFile, unpack: Unpack | None, found: list[int] | None, remote: RemoteReader, scratch: Scratch
    ) -> pa.Table:
        """Return the values that rows have; of a compressed shard it is downloaded and unpacked for them.

        Args:
            file: The shard.
            unpack: How it is unpacked; None: it is not compressed.
            found: Where its samples begin and end; None: its content says it.
            remote: Reads what is not local.
            scratch: Where its content is written meanwhile.
        """
        name = urls.redact(file.url)
        with contextlib.ExitStack() as stack:
            if unpack is None:
                source: ShardBytes = stack.enter_context(opened(file, remote, here=scratch.here))
            else:
                source = stack.enter_context(unpacked_content(file, unpack, remote, scratch))
            if found is None:
                found = offsets(source.read_at(0, table_bytes(self.shard)), self.shard, name).tolist()
            return mds_values(self.index_members, self.shard, found, source, name)

    def _offsets(self, file: SourceFile, remote: RemoteReader, here: Path | None) -> list[int]:
        """Return where samples begin in the raw file, and where the last one ends."""
        shard, source, size = self.shard, file, table_bytes(self.shard)
        if shard.meta is not None:
            stored = shard.zip_meta or shard.meta
            source, size, here = stat_file(self.directory + stored.basename, remote, file.access), stored.bytes, None
        name = urls.redact(source.url)
        with named_errors(source.url):
            table = (bytes_of(source, remote) if here is None else LocalBytes(here)).read_at(0, size)
        if shard.meta is not None and shard.zip_meta is not None:
            table = b"".join(unpacked([table], _unpack(shard.compression, shard.meta, shard.zip_meta), name))
        found: list[int] = offsets(table, shard, name).tolist()
        return found

    def locate(self, part: SamplePart, read: Callable[[int, int], bytes], name: str) -> SamplePart:
        """Return where a sample is, by the table of its shard."""
        if self.shard.meta is not None:
            return part
        start, stop = _PLACE.unpack(read(4 + 4 * part.offset, _PLACE.size))
        if not table_bytes(self.shard) <= start < stop <= self.shard.raw.bytes:
            raise SourceError(f"{name}: sample {part.offset} begins at {start} and ends at {stop}: its table is damaged")
        return part._replace(offset=start, size=stop - start)

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, Any]:
        """Return the values of a sample."""
        del name
        (part,) = parts
        decoder = self._decoder
        there = [name for name in wanted if name in decoder.names]
        if isinstance(decoder, RowDecoder):
            return decoder.decode(part.whole, there)
        if self.is_decoded:
            return decoder.decode(part.data, there)
        spans = decoder.spans(part.data[: decoder.head_bytes], len(part.data))
        return {name: part.data[slice(*spans[name])] for name in there}


def _unpack(compression: str | None, raw: ShardFile, stored: ShardFile) -> Unpack:
    return Unpack(compression or "", raw.bytes, tuple(stored.hashes.items()), tuple(raw.hashes.items()))


@lru_cache(maxsize=64)  # shards of a dataset have the same columns, as a rule
def _decoder(columns: tuple[MdsColumn, ...], allow_pickle: bool) -> MdsDecoder:
    return MdsDecoder(columns, allow_pickle=allow_pickle)
