"""Shards of MosaicML Streaming: MDS, and its split formats, whose table is a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import pyarrow as pa

from sqlstream.index.sources.base.access import named_errors, stat_file
from sqlstream.index.sources.base.byte_source import bytes_of
from sqlstream.index.sources.shards.layout import ReadPart
from sqlstream.index.sources.shards.samples import SAMPLE, ShardSamples
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members.mds import MdsColumn, MdsShard, offsets, table_bytes
from sqlstream.storage.members.mds_decoder import MdsDecoder
from sqlstream.storage.members.places import SamplePart
from sqlstream.storage.members.split import RowDecoder

_KINDS: dict[str, pa.DataType] = {
    **dict.fromkeys(("str", "json", "str_int", "str_float", "str_decimal"), pa.string()),
    **dict.fromkeys(("float16", "float32", "float64", "float"), pa.float64()),
    **dict.fromkeys(("int", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))), pa.int64()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsLayout:
    """A shard that an `index.json` of MosaicML Streaming describes."""

    shard: MdsShard
    directory: str
    """URL of the directory of the index, with its slash."""
    is_decoded: bool = True
    """Samples have values; False: their bytes."""
    allow_pickle: bool = False

    def identity(self) -> object:
        """Return what the index says of it."""
        return {"mds": asdict(self.shard)}

    def samples(self, file: SourceFile, remote: RemoteReader) -> ShardSamples:
        """Return the samples of a shard; see `ShardLayout.samples`."""
        shard, source = self.shard, file
        if shard.meta is not None:
            source = stat_file(self.directory + shard.meta.basename, remote, file.access)
        with named_errors(source.url):
            table = bytes_of(source, remote).read_at(0, table_bytes(shard))
        found = offsets(table, shard, urls.redact(source.url)).tolist()
        parts = [{SAMPLE: SamplePart(0, start, stop - start)} for start, stop in pairwise(found)]
        typed = {column.name: _KINDS.get(column.encoding, pa.binary()) for column in shard.columns}
        return ShardSamples(keys=None, parts=parts, typed=typed)

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, Any]:
        """Return the values of a sample."""
        del name
        (part,) = parts
        own = [column.name for column in self.shard.columns]
        there = [name for name in wanted if name in own]
        if self.shard.meta is not None:
            return RowDecoder(self.shard).decode(part.data, there)
        decoder = _decoder(self.shard.columns, self.allow_pickle)
        if self.is_decoded:
            return decoder.decode(part.data, there)
        spans = decoder.spans(part.data)
        return {name: part.data[slice(*spans[name])] for name in there}


@lru_cache(maxsize=64)  # shards of a dataset have the same columns, as a rule
def _decoder(columns: tuple[MdsColumn, ...], allow_pickle: bool) -> MdsDecoder:
    return MdsDecoder(columns, allow_pickle=allow_pickle)
