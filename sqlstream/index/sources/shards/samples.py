"""The samples of a shard, by its own table: which there are, and where their parts lie."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pyarrow as pa

from sqlstream.errors import DamagedShardError
from sqlstream.index.sources.base.base import BATCH_ROWS
from sqlstream.index.sources.shards.columns import SampleParts, Texts
from sqlstream.index.types import arrays
from sqlstream.index.types.models import ENCODING, MEMBER, SHARD_URL
from sqlstream.storage.base.protocols import Unpack
from sqlstream.storage.members.entries import Span, are_in_order, cut, cut_in_order

KEY, SHARD, URL = "__key__", "__shard__", "__url__"
SAMPLE = ""
"""The part that a sample of typed columns is."""


@dataclass(frozen=True, kw_only=True)
class ShardSamples:
    """What the table of a shard says, in its order."""

    keys: Texts | None
    """What the shard calls its samples; None: it has no names for them."""
    parts: SampleParts
    """The parts of each sample."""
    typed: dict[str, pa.DataType] = field(default_factory=dict)
    """Columns whose values are in the samples' only part, with their types: no query sees them."""
    beside: pa.Table | None = None
    """What the shard says of each sample beside its parts; None: nothing."""
    parsed: frozenset[str] = frozenset()
    """Columns of parts whose values are in `beside`: samples have these in place of the content."""
    size_fact: int | None = None
    """Which fact of a part is the size of its content; None: that is the size of the part."""
    unpack: Unpack | None = None
    """How its content is made of the shard, which is compressed as a whole; None: places are those of the shard itself."""
    damage: DamagedShardError | None = None
    """What is wrong behind the samples, which are good; None: nothing, they are all."""
    position: int = 0
    """Position of the shard among the files of the index: that is what `__url__` holds."""
    number: int = 0
    """Number of the shard in its source."""

    @classmethod
    def none(cls, damage: DamagedShardError) -> ShardSamples:
        """Return what is used of a damaged shard of which nothing is."""
        return cls(keys=Texts.of(()), parts=SampleParts.of(()), damage=damage)

    def at(self, number: int, position: int) -> ShardSamples:
        """Return them as those of a shard of this number, at this position."""
        return replace(self, number=number, position=position)

    @cached_property
    def member_columns(self) -> list[str]:
        """Columns of parts, in the order of their first appearance."""
        return [name for name in self.parts.names if name != SAMPLE and name not in self.parsed]

    @property
    def taken_columns(self) -> list[str]:
        """Columns of its own that are named as what each row of a shard gets."""
        added = {field.name for field in self._added}
        beside = [] if self.beside is None else self.beside.column_names
        return [name for name in (*self.member_columns, *beside, *self.typed) if name in added]

    def part_names(self, columns: Collection[str]) -> list[str]:
        """Return the parts that hold some columns."""
        return [SAMPLE] if self.typed else [name for name in self.member_columns if name in columns]

    def part_bytes(self) -> dict[str, int]:
        """Return the bytes of all parts, by their names; of columns whose parts are not kept, too."""
        return self.parts.column_bytes()  # the size of an unpacked sample is not known: all have the same weight

    def schema(self) -> pa.Schema:
        """Return the columns of its rows: key, shard, and the size of each part."""
        fields = [*self._added]
        fields += [pa.field(name, pa.int64(), metadata={ENCODING: MEMBER}) for name in self.member_columns]
        fields += (
            [] if self.beside is None else [field for field in self.beside.schema if field.name not in self.member_columns]
        )
        return pa.schema([*fields, *(pa.field(name, kind) for name, kind in self.typed.items())])

    @property
    def _added(self) -> list[pa.Field[Any]]:
        fields: list[pa.Field[Any]] = [] if self.keys is None else [pa.field(KEY, pa.string())]
        return [*fields, pa.field(SHARD, pa.int64()), pa.field(URL, pa.int64(), metadata={ENCODING: SHARD_URL})]

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        schema = self.schema()
        for start in range(0, len(self.parts), BATCH_ROWS):
            stop = min(start + BATCH_ROWS, len(self.parts))
            columns = [self._column(name, schema.field(name).type, start, stop) for name in names]
            yield pa.RecordBatch.from_arrays(columns, names=list(names))

    def entries(self) -> Iterator[list[Span]]:
        """Yield the objects of the cache that hold each sample; none of a shard that is unpacked: it is one."""
        if self.unpack is not None:
            return ([] for _ in range(len(self.parts)))
        spans = self.parts.spans
        is_in_order = self.parts.are_in_order() or are_in_order(spans())
        return cut_in_order(spans()) if is_in_order else iter(cut([*spans()]))

    def _column(self, name: str, kind: Any, start: int, stop: int) -> Any:
        num_rows = stop - start
        if name == KEY and self.keys is not None:
            return self.keys.column(start, num_rows)
        if name in (SHARD, URL):
            return arrays.repeated(self.number if name == SHARD else self.position, num_rows)
        if name in self.typed:
            return pa.nulls(num_rows, kind)
        if name not in self.member_columns and self.beside is not None:
            return self.beside[name].slice(start, num_rows).combine_chunks()
        return self.parts.sizes(name, self.size_fact, start, stop)
