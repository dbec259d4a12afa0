"""Writes the file of a lazy index of shards: its columns are those of the first shard that has samples."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa

from sqlstream.config import IndexOptions
from sqlstream.index.build.build import begin_source, finish
from sqlstream.index.build.lazy_shards.chunks import FirstShard, ShardChunks
from sqlstream.index.build.target import Target
from sqlstream.index.file.writer import IndexWriter
from sqlstream.index.sources.plan.source_plan import SourcePlan
from sqlstream.index.sources.shards.layout import KeepsShards, Scratch
from sqlstream.index.types.models import ENCODING, MEMBER
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader


class _Columns:
    """The columns of a shard, as a table that has no rows here."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def schema(self) -> pa.Schema:
        """Return them."""
        return self._schema

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - they stay in their shards
        """Yield no rows."""
        return iter(())


def first_shards(chunks: ShardChunks, keep: KeepsShards, remote: RemoteReader, scratch: Scratch) -> list[FirstShard]:
    """Return the first shards, up to one that has samples."""
    found: list[FirstShard] = []
    while len(found) < len(chunks) and not (found and found[-1].table.rows.num_rows):
        found.append(chunks.open_first(len(found), keep, remote, scratch))
    return found


def write_shards(
    writer: IndexWriter,
    plan: SourcePlan,
    options: IndexOptions,
    target: Target,
    chunks: ShardChunks,
    first: Sequence[FirstShard],
) -> None:
    """Write the columns of shards, and what is known of them.

    Args:
        writer: Of the file.
        plan: The source.
        options: What is kept of it.
        target: Names the index.
        chunks: The shards.
        first: What was found of the first of them.

    Raises:
        SourceError: None of them has samples.
    """
    last = first[-1]
    columns = _Columns(_with_missing(last.schema, options))
    base = urls.redact(plan.base_url)
    for number, part in enumerate(plan.parts):
        file = chunks.file(number)
        begin_source(file, columns, writer, options, (plan.key_column, target.digests[number]))
        known = first[number] if number < len(first) else None
        count = chunks.known_counts[number]
        # As far as it is the same wherever the shards lie, and whether they were listed or named.
        size = None if known is None else file.size_bytes
        writer.add_content(json.dumps([urls.redact(part.source.url).removeprefix(base), size, count]).encode())
        writer.leave_in_place(last.typed, b"")
        writer.count_elsewhere(count if count is not None else 0 if known is None else known.table.rows.num_rows)
    num_uncounted = sum(count is None for count in chunks.known_counts[len(first) :])
    keeps_all = options.columns_to_keep is None
    finish(
        writer,
        plan,
        options,
        target,
        is_lazy=1,
        chunk_rows=1,
        has_all_columns=int(keeps_all),
        num_uncounted=num_uncounted,
    )


def _with_missing(schema: pa.Schema, options: IndexOptions) -> pa.Schema:
    """Return the columns with those parts that may be missing: later shards may have them."""
    if not options.allow_missing_columns:
        return schema
    missing = [name for name in options.columns_to_download if name not in schema.names]
    return pa.schema([*schema, *(pa.field(name, pa.int64(), metadata={ENCODING: MEMBER}) for name in missing)])
