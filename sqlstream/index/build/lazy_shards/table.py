"""The table of one shard, as it is kept beside a lazy index: the rows of its samples, and where their parts lie."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa

from sqlstream.errors import SchemaError
from sqlstream.index.build.shards import packed_places, unpack_of
from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.sources.base.unfold import together
from sqlstream.index.sources.shards.samples import URL, ShardSamples
from sqlstream.index.types import arrays
from sqlstream.index.types.models import Column, SourceFile
from sqlstream.index.types.schema import normal_type, widen
from sqlstream.index.types.values import encoding
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import Unpack

_PLACE = "place"
_ABOUT = b"sqlstream.shard"
_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")


class ShardTable(NamedTuple):
    """What is known of a shard that was read."""

    rows: pa.RecordBatch
    """Its samples: key, shard, URL, the size of each part; columns whose values stay in the shard are left out."""
    places: pa.Array[Any]
    """Where each one lies, as `places.pack` gives it; the columns of parts are numbers in `names`."""
    names: tuple[str, ...]
    """The columns of its parts."""
    typed: tuple[str, ...]
    """Columns whose values stay in the shard."""
    sizes: Mapping[str, int]
    """Bytes of all parts, by their column."""
    unpack: Unpack | None
    """How its content is unpacked; None: it is not compressed as a whole."""
    encodings: tuple[str, ...] | None
    """The encoding of each column of `rows`, whose Arrow type does not say it; None: an earlier version wrote the table."""
    version: tuple[int | None, str | None, str]
    """Size, ETag and digest of the file that was read."""
    is_missing: bool
    """The shard was not there."""
    nbytes: int
    """Bytes of it in memory."""

    def file_of(self, named: SourceFile) -> SourceFile:
        """Return a file, as the source names it, in the version that was read."""
        size_bytes, etag, content = self.version
        return replace(named, size_bytes=size_bytes, etag=etag, content=content, is_missing=self.is_missing)


def table_of(samples: ShardSamples, whole: TableFile, file: SourceFile) -> ShardTable:
    """Return the table of a shard.

    Args:
        samples: What it has.
        whole: The same, with what its source adds to it.
        file: The shard, with its version.
    """
    names = tuple(samples.part_names(samples.member_columns))
    own = [name for name in whole.schema().names if name not in samples.typed]
    empty = pa.RecordBatch.from_arrays([pa.nulls(0, whole.schema().field(name).type) for name in own], names=own)
    rows = together(whole.batches(own), urls.redact(file.url)) if samples.parts else empty
    places = arrays.blobs(packed_places(samples, {name: number for number, name in enumerate(names)}))
    rows = _with_url(rows, file)
    return ShardTable(
        rows=rows,
        places=places,
        names=names,
        typed=tuple(samples.typed),
        sizes=samples.part_bytes(),
        unpack=samples.unpack,
        encodings=tuple(encoding(field).decode() for field in map(schema_of(whole).field, own)),
        version=(file.size_bytes, file.etag, file.content),
        is_missing=file.is_missing,
        nbytes=rows.nbytes + places.nbytes,
    )


def schema_of(whole: TableFile) -> pa.Schema:
    """Return the columns of a shard's rows, whose URL is text: rows of a lazy index are not beside its list of files."""
    return pa.schema([pa.field(URL, pa.string()) if field.name == URL else field for field in whole.schema()])


def _with_url(rows: pa.RecordBatch, file: SourceFile) -> pa.RecordBatch:
    if (at := rows.schema.get_field_index(URL)) < 0:
        return rows
    shown = arrays.texts([urls.redact(file.url)] * rows.num_rows)
    columns = [shown if number == at else column for number, column in enumerate(rows.columns)]
    return pa.RecordBatch.from_arrays(columns, names=rows.schema.names)


def rows_as(table: ShardTable, columns: Sequence[Column], shown: str) -> pa.RecordBatch:
    """Return the rows of a shard, with those columns that an index has.

    Args:
        table: Of the shard.
        columns: Of the index.
        shown: The shard, for messages.

    Raises:
        SchemaError: Values of a column have a type that the index cannot hold: those of the first shard have another one.
    """
    rows, names = table.rows, list[str]()
    for column in columns:
        if (at := rows.schema.get_field_index(column.name)) < 0:
            continue
        kind, known = normal_type(rows.schema.types[at]), encoding(column.field).decode()
        own = known if table.encodings is None or kind == pa.null() else table.encodings[at]
        if kind is None or own != known or widen(column.field.type, kind) != column.field.type:
            raise SchemaError(
                f"column {column.name!r} holds {own or kind} in {shown}, and {known or column.type} in the first shard, whose "
                "types a lazy index has: write it with one type, put a shard first that has values of each column, or leave "
                "lazy_index_chunk_size out"
            )
        names.append(column.name)
    return rows.select(names)


def encoded(table: ShardTable) -> bytes:
    """Return the bytes of a table."""
    about = {
        "names": table.names,
        "typed": table.typed,
        "sizes": table.sizes,
        "unpack": None if table.unpack is None else json.dumps(table.unpack),
        "encodings": table.encodings,
        "version": table.version,
        "is_missing": table.is_missing,
    }
    arrays: Sequence[pa.Array[Any]] = [*table.rows.columns, table.places]
    fields = [pa.field(str(number), array.type) for number, array in enumerate(arrays)]
    shown: dict[bytes | str, bytes | str] = {_ABOUT: json.dumps({**about, "columns": table.rows.schema.names}).encode()}
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields, metadata=shown))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def decoded(data: bytes) -> ShardTable:
    """Return the table of bytes that `encoded` gave."""
    with pa.ipc.open_stream(data) as reader:
        batch = reader.read_next_batch()
    about = json.loads(batch.schema.metadata[_ABOUT])
    *rows, found = batch.columns
    return ShardTable(
        rows=pa.RecordBatch.from_arrays(rows, names=about["columns"]),
        places=found,
        names=tuple(about["names"]),
        typed=tuple(about["typed"]),
        sizes=about["sizes"],
        unpack=None if about["unpack"] is None else unpack_of(about["unpack"]),
        encodings=None if about.get("encodings") is None else tuple(about["encodings"]),
        version=tuple(about["version"]),
        is_missing=bool(about.get("is_missing")),
        nbytes=batch.nbytes,
    )
