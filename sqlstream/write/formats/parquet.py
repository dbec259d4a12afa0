"""Writes Parquet with content inside, as Hugging Face's `datasets` does: its bytes are in their row group as they are.

Columns of bytes are neither compressed nor put into a dictionary, so a reader that knows the pages takes one value with one
request; other columns are. Row groups are bounded by their bytes, since a reader of content fetches one.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.config import parse_bytes
from sqlstream.errors import ConfigError, EncodeError
from sqlstream.python_values import arrow_array, mixed_kinds, owned
from sqlstream.write.base.journal import StoredShard
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.base.output import FinishedShard
from sqlstream.write.base.writer import PartFiles, SampleWriter
from sqlstream.write.formats.limits import ShardLimits, checked_pattern

Row = tuple[dict[str, Any], int]
"""The values of a row, and what they take, about."""
_FEATURES = ("Image", "Audio", "Video")
_FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_PNG_MODES = frozenset(("1", "L", "LA", "P", "RGB", "RGBA", "I;16"))
_GROUP_ROWS = 1 << 16
"""Most rows of a group: their values are in memory as Python objects."""
_MOST_SIGNED = (1 << 63) - 1
_VALUE_BYTES = 8
"""What a value counts that is no text and no bytes."""


class ParquetFormat:
    """Parquet files.

    Args:
        pattern: Names of shards.
        limits: When one is full.
        group_bytes: Most bytes of a row group.
        schema: Of the rows; None: as the first row group has it.
        media: Columns that hold files: `Image`, `Audio` or `Video`, by name.
        types: Of columns that are known without a schema, by name.
    """

    index_names: tuple[str, ...] = ()

    def __init__(
        self,
        pattern: str,
        limits: ShardLimits,
        group_bytes: int,
        schema: pa.Schema | None,
        media: Mapping[str, str],
        types: Mapping[str, pa.DataType],
    ) -> None:
        self._pattern, self.limits, self.group_bytes = pattern, limits, group_bytes
        self._media, self._types = media, types
        self.schema = None if schema is None else self._with_media(schema)
        """Of the rows; None: not known yet."""
        self.settings: Mapping[str, Any] = {
            "format": "parquet",
            "pattern": pattern,
            "row_group_bytes": group_bytes,
            "media": dict(media),
            "schema": None if self.schema is None else _as_text(self.schema),
            **({"types": {name: str(kind) for name, kind in types.items()}} if types else {}),
            **limits.settings,
        }
        """What decides the bytes."""

    def adopt(self, shards: Sequence[StoredShard]) -> None:
        """Take over the schema."""
        if self.schema is None and shards:
            self.schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(shards[0].record["schema"])))

    def encode(self, sample: Mapping[str, Any]) -> Row:
        """Return a row."""
        if self.schema is not None and sample.keys() - set(self.schema.names):
            more = sorted(sample.keys() - set(self.schema.names))
            raise EncodeError(f"the sample has {more[0]!r}, which is no column: the columns are {', '.join(self.schema.names)}")
        if not sample:
            raise EncodeError("the sample has no column: a row of nothing would be lost")
        row = {name: self._value(name, value) for name, value in sample.items()}
        return row, sum(map(_size, row.values()))

    def _value(self, name: str, value: Any) -> Any:
        if name in self._media:
            return _file(name, self._media[name], value)
        if (
            isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "Mm"
        ):  # of those, tolist gives counts of a unit
            return value.tolist()
        return owned(value)  # rows wait for their row group, and the caller may fill a list or a dict again

    def table(self, rows: Sequence[dict[str, Any]]) -> pa.Table:
        """Return rows as a table.

        Raises:
            EncodeError: A value does not fit its column.
        """
        columns = {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
        if self.schema is None:
            self.schema = self._with_media(pa.schema([self._field(name, values) for name, values in columns.items()]))
            empty = [field.name for field in self.schema if pa.types.is_null(field.type)]
            if empty := [name for name in empty if name not in self._types]:
                raise EncodeError(f"column {empty[0]!r} has no value in the first {len(rows)} rows: give a schema")
        arrays = [self._array(field, columns.get(field.name) or [None] * len(rows)) for field in self.schema]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def _field(self, name: str, values: Sequence[Any]) -> pa.Field[Any]:
        if not isinstance(name, str):
            raise EncodeError(f"a column is called {name!r}, which is no text: rename it")
        if name in self._types:
            return pa.field(name, self._types[name])
        if wrong := mixed_kinds([values]):
            raise EncodeError(f"column {name!r} {wrong}")
        if set(map(type, values)) <= {int, type(None)} and max(filter(None, values), default=0) > _MOST_SIGNED:
            return pa.field(name, pa.uint64())  # which Arrow does not infer
        with _named(name, "values of no one type"):
            return pa.field(name, arrow_array(values).type)

    def _array(self, field: pa.Field[Any], values: Sequence[Any]) -> Any:
        with _named(field.name, f"values that are none of {field.type}"):
            array = arrow_array(values, field.type)
            wrong = _difference(values, field.type)
        if array.null_count and not field.nullable:
            raise EncodeError(f"column {field.name!r} has no value in a row, and its field is not nullable")
        if wrong:
            raise EncodeError(f"column {field.name!r} {wrong}")
        return array

    def _with_media(self, schema: pa.Schema) -> pa.Schema:
        for name in self._media:
            if name in schema.names:
                schema = schema.set(schema.get_field_index(name), pa.field(name, _FILE))
        features = {name: {"_type": kind} for name, kind in self._media.items()}
        return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})}) if features else schema

    def start(self, number: int, files: PartFiles) -> ParquetDraft:
        """Begin a shard."""
        return ParquetDraft(self._pattern % number, self, files)

    def index(self, shards: Sequence[StoredShard]) -> dict[str, bytes]:  # noqa: ARG002
        """Return no file: each file has its footer."""
        return {}


class ParquetDraft:
    """A file that is being written.

    Args:
        name: Of the shard.
        parquet: Its format.
        files: Where it is written.
    """

    def __init__(self, name: str, parquet: ParquetFormat, files: PartFiles) -> None:
        self._name, self._parquet = name, parquet
        self._path = files.part_path(name)
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[dict[str, Any]] = []
        self._held_bytes = self._num_bytes = 0
        self.num_samples = 0
        """Samples in it."""

    def takes(self, item: Row) -> bool:
        """Return whether there is room for a row."""
        return self._parquet.limits.takes(self.num_samples + 1, self._num_bytes + item[1])

    def add(self, item: Row) -> None:
        """Add a row; a full row group is written."""
        row, num_bytes = item
        if self._rows and self._held_bytes + num_bytes > self._parquet.group_bytes:
            self._flush()
        self._rows.append(row)
        self._held_bytes += num_bytes
        self._num_bytes += num_bytes
        self.num_samples += 1
        if len(self._rows) == _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        table = self._parquet.table(self._rows)
        if self._writer is None:
            try:
                self._writer = _open(self._path, table.schema)
            except pa.ArrowNotImplementedError as error:  # a dict without fields, for instance
                raise EncodeError(f"no Parquet file holds the schema of the first rows ({error}): give a schema") from error
        self._writer.write_table(table, row_group_size=len(self._rows))
        self._rows, self._held_bytes = [], 0

    def finish(self) -> FinishedShard:
        """Write the rest and the footer."""
        if self._rows:
            self._flush()
        assert self._writer is not None
        self._writer.close()
        assert self._parquet.schema is not None
        return FinishedShard(
            num_samples=self.num_samples,
            files={self._name: self._path.stat().st_size},
            record={"schema": _as_text(self._parquet.schema)},
        )

    def discard(self) -> None:
        """Give it up."""
        if self._writer is not None:
            self._writer.close()


def _open(path: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Return the writer of a file, in which bytes are as they are."""
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    others = [name for name, kind in leaves if not _is_bytes(kind)]
    return pq.ParquetWriter(
        path,
        schema,
        compression={name: "none" if _is_bytes(kind) else "zstd" for name, kind in leaves},
        use_dictionary=others,  # type: ignore[arg-type]  # names are taken, too
        write_statistics=others,
        write_page_index=True,
    )


def _leaves(path: str, kind: Any) -> list[tuple[str, Any]]:
    if pa.types.is_struct(kind):
        return [leaf for field in kind for leaf in _leaves(f"{path}.{field.name}", field.type)]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _leaves(f"{path}.list.element", kind.value_type)
    return [(path, kind)]


@contextlib.contextmanager
def _named(name: str, problem: str) -> Iterator[None]:
    """Raise an EncodeError that names the column where Arrow does not take its values."""
    try:
        yield
    except (pa.ArrowException, UnicodeError, OverflowError) as error:
        raise EncodeError(f"column {name!r} has {problem} ({error}): give a schema") from error


def _difference(values: Sequence[Any], kind: Any) -> str | None:
    """Return in which way values that Arrow takes for those of `kind` are others, to stand behind a column's name, or None.

    They are compared leaf by leaf: Arrow infers no type for maps and for the largest integers, and so none for what holds them.

    Raises:
        pyarrow.ArrowInvalid: Numbers or moments have more digits than `kind` holds.
    """
    present = [value for value in values if value is not None]
    if wrong := mixed_kinds([present], at_any_depth=False):
        return wrong
    if pa.types.is_struct(kind):
        if others := [value for value in present if not isinstance(value, Mapping)]:
            return f"has a value of type {type(others[0]).__name__} for {kind}: give a dict"
        fields = {field.name: field.type for field in kind}
        if more := dict.fromkeys(chain.from_iterable(present)).keys() - fields.keys():
            return f"has a dict with {min(map(str, more))!r}, which is no field in {kind}: give a schema"
        parts = [([value.get(name) for value in present], field) for name, field in fields.items()]
    elif pa.types.is_map(kind):
        pairs = [pair for value in present for pair in (value.items() if isinstance(value, Mapping) else value)]
        parts = [([pair[0] for pair in pairs], kind.key_type), ([pair[1] for pair in pairs], kind.item_type)]
    elif kind.num_fields:  # lists
        parts = [(list(chain.from_iterable(present)), kind.field(0).type)]
    else:
        return _leaf_difference(present, kind)
    return next((found for part, field in parts if (found := _difference(part, field))), None)


def _leaf_difference(values: Sequence[Any], kind: Any) -> str | None:
    types = set(map(type, values))
    if _is_bytes(kind) if str in types else _is_text(kind) and bytes in types:
        return f"is of {kind}, and has {'text' if str in types else 'bytes'}: give it one type"
    if pa.types.is_temporal(kind) or pa.types.is_integer(kind):
        if kind == pa.uint64():  # Arrow does not infer it
            values = [value for value in values if isinstance(value, float | np.floating)]
        found = arrow_array(values)
        if values and pa.types.is_temporal(kind) and _temporal(found.type) != _temporal(kind):
            return f"has values of {found.type}, which are none of {kind}: give a schema"
        found.cast(kind)
    return None


def _temporal(kind: Any) -> tuple[bool, ...]:
    """Return which kind of moments or times a type has, and whether they have a zone."""
    kinds = (pa.types.is_timestamp, pa.types.is_date, pa.types.is_time, pa.types.is_duration)
    return (*(is_one(kind) for is_one in kinds), getattr(kind, "tz", None) is not None)


def _is_bytes(kind: Any) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_text(kind: Any) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _file(name: str, feature: str, value: Any) -> dict[str, Any] | None:
    """Return a file as `datasets` has it."""
    if value is None:
        return None
    if isinstance(value, bytes | bytearray | memoryview):
        return {"bytes": bytes(value), "path": None}
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"}:
        return dict(value)
    if feature == "Image" and hasattr(value, "save"):
        try:
            return {"bytes": _encoded(value), "path": None}
        except OSError as error:
            raise EncodeError(f"column {name!r}, {feature}: {error}: give bytes, or image.convert('RGB')") from error
    raise EncodeError(f"column {name!r}, {feature}: a value of type {type(value).__name__}: give bytes, or bytes and path")


def _encoded(image: Any) -> bytes:
    """Return an image of Pillow as a file that has its pixels, in the format that `datasets` chooses, and what turns it."""
    file, exif = io.BytesIO(), image.getexif()
    image.save(file, format="PNG" if image.mode in _PNG_MODES else "TIFF", **({"exif": exif} if exif else {}))
    return file.getvalue()


def _size(value: Any) -> int:
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list) else _VALUE_BYTES


def _as_text(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


class ParquetWriter(SampleWriter[Row]):
    """Writes samples as Parquet files with content inside, which this package and Hugging Face's `datasets` read in place.

    Values are compared with the types of their columns as a row group is full: an EncodeError of `write` then ends the writing.

    Args:
        out: A directory, a URL, or (directory, URL).
        schema: Of the rows; None: as the first row group has it.
        media: Columns that hold files: `Image`, `Audio` or `Video`, by name. Their values are bytes, `{"bytes", "path"}`, or an
            image of Pillow.
        pattern: Names of shards, with one number.
        size_limit: Most bytes of the values of a shard; None: no limit.
        row_group_bytes: Most bytes of the values of a row group: what a reader of content fetches at once.
        types: Of columns that are known without a schema, by name; others have those of the first row group.
        options: How it is stored.

    Raises:
        ConfigError: An argument is wrong.
        OutputExistsError: Something is there.

    Example:
        >>> import tempfile
        >>> with ParquetWriter(tempfile.mkdtemp(), media={"image": "Image"}) as writer:
        ...     writer.write({"image": b"...", "caption": "a cat"})
    """

    def __init__(
        self,
        out: Out,
        *,
        schema: pa.Schema | None = None,
        media: Mapping[str, str] | None = None,
        pattern: str = "shard-%06d.parquet",
        size_limit: int | str | None = "512mb",
        row_group_bytes: int | str = "16mb",
        types: Mapping[str, pa.DataType] | None = None,
        options: WriteOptions | None = None,
    ) -> None:
        if schema is not None and not isinstance(schema, pa.Schema):
            raise ConfigError(f"schema={schema!r} is none of Arrow: give pyarrow.schema({{'id': pyarrow.int64(), …}})")
        for option, given in (("media", media), ("types", types)):
            if given is not None and not isinstance(given, Mapping):
                raise ConfigError(f"{option}={given!r} is no dict: give names of columns, and what each one is")
        for name, kind in (media or {}).items():
            if kind not in _FEATURES:
                raise ConfigError(f"media: column {name!r} is {kind!r}: give one of {', '.join(_FEATURES)}")
        group_bytes = parse_bytes(row_group_bytes, "row_group_bytes")
        if not group_bytes:
            raise ConfigError(f"row_group_bytes={row_group_bytes!r}: a row group has bytes: give a size such as '16mb'")
        limits = ShardLimits(size_limit, None)
        if schema is not None and types:
            raise ConfigError("schema and types both say which types columns have: give one of them")
        parquet = ParquetFormat(checked_pattern(pattern, ".parquet"), limits, group_bytes, schema, media or {}, types or {})
        super().__init__(parquet, out, options or WriteOptions())
