"""Decodes rows of MosaicML Streaming's split formats: JSONL, and CSV, TSV, XSV. Index and table are those of MDS, see `shards`.

    shard.csv         header line │ row 0 │ row 1 │ …     each ends with the newline of the index; JSONL has no header
    shard.csv.meta    the table of an MDS shard: where rows begin in the other file

They are not the CSV of others: nothing is quoted. Their writer refuses values that hold a separator, and a `"` is data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sqlstream.errors import DecodeError
from sqlstream.storage.members.mds.shards import MdsShard

_DECODERS: Mapping[str, Callable[[str], Any]] = MappingProxyType({"str": str, "int": int, "float": float})


class RowDecoder:
    """Decodes rows of shards that have the same format and columns.

    Args:
        shard: One of them.
    """

    def __init__(self, shard: MdsShard) -> None:
        self.columns = shard.columns
        """Columns in stored order."""
        self.names = frozenset(column.name for column in shard.columns)
        self._is_json = shard.format == "json"
        self._separator = shard.separator
        self._newline = shard.newline

    def decode(self, data: bytes | memoryview, wanted: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the values of a row by column.

        Args:
            data: The row, with the newline at its end.
            wanted: Columns to decode, in this order; None: all that the row has.

        Raises:
            DecodeError: The row is damaged, or a column is not there.
        """
        try:
            text = str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise DecodeError(f"a row is not UTF-8: {error}") from error
        if not text.endswith(self._newline):
            raise DecodeError(
                f"a row of {len(data)} bytes does not end with {self._newline!r}: the shard, or its table, is damaged"
            )
        row = text[: -len(self._newline)]
        return _decode_json(row, wanted) if self._is_json else self._decode_values(row, wanted)

    def _decode_values(self, row: str, wanted: Sequence[str] | None) -> dict[str, Any]:
        values = row.split(self._separator)
        if len(values) != len(self.columns):
            raise DecodeError(f"a row has {len(values)} values, the shard {len(self.columns)} columns: it is damaged")
        texts = {column.name: (column.encoding, value) for column, value in zip(self.columns, values, strict=True)}
        return {name: _decode_value(name, *texts[_there(name, texts)]) for name in (texts if wanted is None else wanted)}


def _decode_json(row: str, wanted: Sequence[str] | None) -> dict[str, Any]:
    """Return an object of JSON: what it holds counts, the encodings of the columns are what its writer was promised."""
    try:
        values = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"a row is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DecodeError(f"a row is no JSON object but {type(values).__name__}")
    return values if wanted is None else {name: values[_there(name, values)] for name in wanted}


def _decode_value(name: str, encoding: str, value: str) -> Any:
    decode = _DECODERS.get(encoding)
    if decode is None:
        raise DecodeError(f"column {name!r}: encoding {encoding!r} is not decoded: leave the column out", column=name)
    try:
        return decode(value)
    except ValueError as error:
        raise DecodeError(f"column {name!r} of encoding {encoding!r}: {error}", column=name) from error


def _there(name: str, values: Mapping[str, Any]) -> str:
    if name not in values:
        raise DecodeError(f"there is no column {name!r}: the row has {', '.join(values)}")
    return name
