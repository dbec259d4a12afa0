"""Values of columns of MDS, read as a shard is indexed: columns that SQL sees (`index_members`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from sqlstream.errors import ConfigError, DecodeError, SourceError
from sqlstream.index.sources.shards.reading import ShardBytes
from sqlstream.index.sources.shards.values import check_bytes
from sqlstream.index.types.models import ENCODING, JSON
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.storage.members.mds.decoder import MdsDecoder
from sqlstream.storage.members.mds.shards import MdsShard
from sqlstream.storage.members.mds.split import RowDecoder

_JSON = "json"
_TYPES: dict[str, pa.DataType] = {
    **dict.fromkeys(("str", _JSON), pa.string()),
    **dict.fromkeys(("int", "str_int", "int64"), pa.int64()),
    **dict.fromkeys(("float", "str_float", "float64"), pa.float64()),
    **dict.fromkeys(("float16", "float32"), pa.float32()),
    **{f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32)},
    "uint64": pa.uint64(),
}
"""Types of the encodings whose values SQL can hold."""


def check_columns(names: Sequence[str], shard: MdsShard) -> None:
    """Raise ConfigError if a shard has no column of a name, or SQL cannot have its values."""
    encodings = {column.name: column.encoding for column in shard.columns}
    can = [name for name, encoding in encodings.items() if encoding in _TYPES]
    for name in names:
        if name not in can:
            what = "no column of the shards" if name not in encodings else f"of the encoding {encodings[name]!r}"
            there = ", ".join(map(repr, can)) or "none"
            raise ConfigError(f"index_members names {name!r}, which is {what}: those with texts and numbers are {there}")


def mds_values(names: Sequence[str], shard: MdsShard, offsets: Sequence[int], source: ShardBytes, shown: str) -> pa.Table:
    """Return the values of some columns.

    Args:
        names: The columns.
        shard: What the index says of the shard.
        offsets: Where each sample begins, and where the last one ends.
        source: The shard, not compressed.
        shown: Its name for messages.

    Raises:
        SourceError: A value does not decode.
    """
    read = (_Samples if shard.meta is None else _Rows)(names, shard, source, shown)
    values: dict[str, list[Any]] = {name: [] for name in names}
    for number, (start, stop) in enumerate(pairwise(offsets)):
        try:
            found = read.read(start, stop)
        except DecodeError as error:
            raise SourceError(
                f"{shown}: the sample {number} at byte {start}: {error}; mend it, or leave the column out of index_members"
            ) from error
        for name, value in found.items():
            values[name].append(value.item() if isinstance(value, np.generic) else value)
    columns = [column for column in shard.columns if column.name in names]
    fields = [_field(column.name, column.encoding) for column in columns]
    arrays = [_array(field, values[field.name], shown) for field in fields]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


class _Samples:
    """Reads columns of the samples of an MDS shard: sizes at the head of each, then what is wanted.

    Args:
        names: The columns.
        shard: The shard.
        source: Its bytes.
        shown: Its name for messages.
    """

    def __init__(self, names: Sequence[str], shard: MdsShard, source: ShardBytes, shown: str) -> None:
        self._names = [column.name for column in shard.columns if column.name in names]
        self._decoder, self._source, self._shown = MdsDecoder(shard.columns), source, shown

    def read(self, start: int, stop: int) -> dict[str, Any]:
        """Return the values of the sample between two bytes."""
        spans = self._decoder.spans(self._source.read_at(start, self._decoder.head_bytes), stop - start)
        found = {}
        for name in self._names:
            first, last = spans[name]
            check_bytes(last - first, f"{self._shown}: {name!r} of the sample at byte {start}", name)
            found[name] = self._decoder.decode_value(name, self._source.read_beside(start + first, last - first))
        return found


class _Rows:
    """Reads columns of the rows of a shard of text; see `_Samples`."""

    def __init__(self, names: Sequence[str], shard: MdsShard, source: ShardBytes, shown: str) -> None:
        self._names, self._decoder, self._source, self._shown = names, RowDecoder(shard), source, shown

    def read(self, start: int, stop: int) -> dict[str, Any]:
        """Return the values of the row between two bytes."""
        check_bytes(stop - start, f"{self._shown}: the row at byte {start}", self._names[0])
        return self._decoder.decode(self._source.read_at(start, stop - start), self._names)


def _field(name: str, encoding: str) -> pa.Field[Any]:
    if encoding == _JSON:
        return pa.field(name, pa.string(), metadata={ENCODING: JSON})
    return pa.field(name, _TYPES[encoding])


def _array(field: pa.Field[Any], values: Sequence[Any], shown: str) -> Any:
    load_pandas()
    try:
        texts = [json.dumps(value) for value in values] if field.metadata else values
        return pa.array(texts, field.type)
    except (pa.ArrowInvalid, OverflowError, TypeError, ValueError) as error:
        raise SourceError(
            f"{shown}: the values of {field.name!r} are not of the type {field.type}: {error}; leave it out of index_members"
        ) from error
