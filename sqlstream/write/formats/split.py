"""Writes MosaicML Streaming's split formats, JSONL and XSV (CSV, TSV): rows in one file, where they begin in another."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from sqlstream.errors import ConfigError, EncodeError
from sqlstream.write.base.journal import StoredShard
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.base.output import FinishedShard
from sqlstream.write.base.writer import PartFiles, SampleWriter
from sqlstream.write.formats.mds import (
    DEFAULT_SIZE_LIMIT,
    INDEX_NAME,
    MOST_BYTES,
    MosaicFiles,
    Pieces,
    RowsDraft,
    finished_shard,
    index_of,
    offset_table,
)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise EncodeError("expected str")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, float):  # a float of numpy is one
        raise EncodeError("expected float")
    return float(value)


_VALUES: Mapping[str, Callable[[Any], Any]] = MappingProxyType({"str": _text, "int": operator.index, "float": _number})
"""Encodings of columns, and what checks a value."""


class SplitDraft(RowsDraft):
    """A shard of rows and its table.

    Args:
        mosaic: Sizes, hashes, compression.
        header: What comes before the rows.
        number: Of the shard.
        files: Where it is written.
    """

    def __init__(self, mosaic: MosaicFiles, header: bytes, number: int, files: PartFiles) -> None:
        super().__init__(mosaic, number, files)
        self._header = header

    def takes(self, item: Pieces) -> bool:
        """Return whether there is room for a row; table and header do not count, as in MosaicML Streaming."""
        size = self._buffer.num_bytes + item[1]
        return not self.num_samples or size <= min(self._mosaic.limit_bytes, MOST_BYTES - len(self._header))

    def finish(self) -> FinishedShard:
        """Write rows and table."""
        table = offset_table(self._lengths, len(self._header)) + self._mosaic.config_bytes()
        raw_data, zip_data = self._mosaic.write(self._name, self.chunks(self._header), self._files)
        raw_meta, zip_meta = self._mosaic.write(f"{self._name}.meta", [table], self._files)
        self._buffer.close()
        files = {"raw_data": raw_data, "zip_data": zip_data, "raw_meta": raw_meta, "zip_meta": zip_meta}
        return finished_shard({"samples": self.num_samples, **files, **self._mosaic.config})


class SplitFormat:
    """A split format.

    Args:
        mosaic: Sizes, hashes, compression.
        columns: Encodings by name: `str`, `int`, `float`.
        encode_row: From the checked values to a row.
        header: What comes before the rows.
    """

    index_names = (INDEX_NAME,)

    def __init__(
        self, mosaic: MosaicFiles, columns: Mapping[str, str], encode_row: Callable[[dict[str, Any]], str], header: str
    ) -> None:
        self._mosaic, self._header, self._encode_row = mosaic, header.encode(), encode_row
        self._plan = [(name, _VALUES[columns[name]]) for name in sorted(columns)]
        self.settings: Mapping[str, Any] = mosaic.config
        """What decides the bytes."""

    def encode(self, sample: Mapping[str, Any]) -> Pieces:
        """Encode a sample."""
        name, values = "", {}
        try:
            for name, check in self._plan:
                values[name] = check(sample[name])
        except Exception as error:
            if name not in sample:
                raise EncodeError(f"the sample lacks the column {name!r}; it has {', '.join(map(str, sample))}") from error
            raise EncodeError(f"column {name!r}, a value of type {type(sample[name]).__name__}: {error}") from error
        text = self._encode_row(values)
        try:
            row = text.encode()
        except UnicodeEncodeError as error:
            raise EncodeError(f"a value is no Unicode text ({error}): correct it, or leave the sample out") from error
        return [row], len(row)

    def adopt(self, shards: Sequence[StoredShard]) -> None:
        """Take over nothing: the settings say all."""

    def start(self, number: int, files: PartFiles) -> SplitDraft:
        """Begin a shard."""
        return SplitDraft(self._mosaic, self._header, number, files)

    def index(self, shards: Sequence[StoredShard]) -> dict[str, bytes]:
        """Return `index.json`."""
        return {INDEX_NAME: index_of([shard.record for shard in shards])}


def _check_columns(columns: Mapping[str, str]) -> None:
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigError(f"columns={columns!r}: give names and encodings, such as {{'text': 'str', 'label': 'int'}}")
    for name, encoding in columns.items():
        if not isinstance(name, str) or encoding not in _VALUES:
            raise ConfigError(f"column {name!r}: encoding {encoding!r} is unknown: give one of {', '.join(_VALUES)}")


class JsonWriter(SampleWriter[Pieces]):
    r"""Writes samples as JSON lines with a table beside them, the format `json` of MosaicML Streaming.

    Args:
        out: A directory, a URL, or (directory, URL).
        columns: Encodings by name: `str`, `int`, `float`.
        newline: What ends a row.
        compression: As `MdsWriter` has it.
        hashes: As `MdsWriter` has it.
        size_limit: Most bytes of the rows of a shard before compression; None: 4 GiB.
        options: How it is stored.

    Raises:
        ConfigError: An argument is wrong.
        OutputExistsError: Something is there.
    """

    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        newline: str = "\n",
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        options: WriteOptions | None = None,
    ) -> None:
        _check_columns(columns)
        _check_mark("newline", newline, columns)
        mosaic = MosaicFiles("json", compression, hashes, size_limit)
        mosaic.config |= {"columns": dict(columns), "newline": newline}

        def encode_row(values: dict[str, Any]) -> str:
            return json.dumps(values, sort_keys=True) + newline

        super().__init__(SplitFormat(mosaic, columns, encode_row, ""), out, options or WriteOptions())


def _check_mark(option: str, mark: str, columns: Mapping[str, str]) -> None:
    if not isinstance(mark, str) or not mark:
        raise ConfigError(f"{option}={mark!r}: give a text of one character or more")
    for name in columns:
        if mark in name:
            raise ConfigError(f"the name of column {name!r} holds the {option} {mark!r}: rename it, or give another {option}")


class XsvWriter(SampleWriter[Pieces]):
    r"""Writes samples as rows of separated values with a table beside them, a format of MosaicML Streaming.

    Nothing is quoted: a value that holds the separator or the newline is an error.

    Args:
        out: A directory, a URL, or (directory, URL).
        columns: Encodings by name: `str`, `int`, `float`.
        separator: Between values; `CsvWriter` and `TsvWriter` have their own.
        newline: What ends a row.
        compression: As `MdsWriter` has it.
        hashes: As `MdsWriter` has it.
        size_limit: Most bytes of the rows of a shard before compression; None: 4 GiB.
        options: How it is stored.

    Raises:
        ConfigError: An argument is wrong.
        OutputExistsError: Something is there.
    """

    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        separator: str,
        newline: str = "\n",
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        options: WriteOptions | None = None,
    ) -> None:
        _check_columns(columns)
        _check_mark("newline", newline, columns)
        _check_mark("separator", separator, columns)
        mosaic = MosaicFiles(self._layout, compression, hashes, size_limit)
        names = sorted(columns)
        mosaic.config |= {"column_names": names, "column_encodings": [columns[name] for name in names], "newline": newline}
        if self._layout == "xsv":
            mosaic.config["separator"] = separator

        def encode_row(values: dict[str, Any]) -> str:
            texts = [str(values[name]) for name in names]
            for name, text in zip(names, texts, strict=True):
                if separator in text or newline in text:
                    raise EncodeError(
                        f"column {name!r} holds a separator or a newline, and nothing is quoted: write JSON or MDS"
                    )
            row = separator.join(texts)
            if len(separator) > 1 and row.split(separator) != texts:  # 'a|' before '||' reads 'a' and '|b'
                raise EncodeError(f"a value that ends like the separator {separator!r} would be cut: write JSON or MDS")
            return row + newline

        header = separator.join(names) + newline
        super().__init__(SplitFormat(mosaic, columns, encode_row, header), out, options or WriteOptions())

    _layout = "xsv"


class _FixedSeparator(XsvWriter):
    """Writes rows whose separator is that of the class."""

    _separator: ClassVar[str]

    def __init__(
        self,
        out: Out,
        columns: Mapping[str, str],
        *,
        newline: str = "\n",
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        options: WriteOptions | None = None,
    ) -> None:
        super().__init__(
            out,
            columns,
            separator=self._separator,
            newline=newline,
            compression=compression,
            hashes=hashes,
            size_limit=size_limit,
            options=options,
        )


class CsvWriter(_FixedSeparator):
    """Writes rows whose separator is a comma, see `XsvWriter`."""

    _layout = "csv"
    _separator = ","


class TsvWriter(_FixedSeparator):
    """Writes rows whose separator is a tab, see `XsvWriter`."""

    _layout = "tsv"
    _separator = "\t"
