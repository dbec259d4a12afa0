"""The files that an export writes, by their extension: `.parquet`, `.arrow`, `.csv`, `.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, Self

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.errors import ConfigError


class TableWriter(Protocol):
    """Takes tables of one schema; the file is whole when it is left."""

    def write(self, table: pa.Table) -> None:
        """Take rows."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def writer(path: Path, schema: pa.Schema, row_group_rows: int) -> TableWriter:
    """Return what writes a file of the kind that its extension names.

    Raises:
        ConfigError: The extension is none of these, or a column has a type that the kind cannot hold.
    """
    check_extension(path.name)
    return _WRITERS[path.suffix](path, schema, row_group_rows)


def check_extension(name: str) -> None:
    """Raise ConfigError unless an export can write a file of this name."""
    if Path(name).suffix not in _WRITERS:
        raise ConfigError(f"{name} has no extension that an export writes: give one of {', '.join(_WRITERS)}")


class _Parquet:
    """A Parquet file whose row groups have the size wanted."""

    def __init__(self, path: Path, schema: pa.Schema, num_rows: int) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")
        self._num_rows, self._held, self._num_held = num_rows, list[pa.Table](), 0

    def write(self, table: pa.Table) -> None:
        """Take rows; whole groups are written."""
        self._held.append(table)
        self._num_held += table.num_rows
        if self._num_held >= self._num_rows:
            held = pa.concat_tables(self._held)
            whole = held.num_rows - held.num_rows % self._num_rows
            self._writer.write_table(held.slice(0, whole), row_group_size=self._num_rows)
            self._held, self._num_held = [held.slice(whole)], held.num_rows - whole

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Write the rest."""
        if self._num_held and exception[0] is None:
            self._writer.write_table(pa.concat_tables(self._held))
        self._writer.close()


class _Arrow:
    """An Arrow IPC file, which readers map; a batch holds the rows of a row group."""

    def __init__(self, path: Path, schema: pa.Schema, num_rows: int) -> None:
        self._writer = pa.ipc.new_file(str(path), schema)
        self._num_rows = num_rows

    def write(self, table: pa.Table) -> None:
        """Write rows."""
        self._writer.write_table(table, max_chunksize=self._num_rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()


class _Text:
    """Lines of text: numbers and text as they are, lists and structs as JSON, times and decimals as Python writes them."""

    def __init__(self, path: Path, schema: pa.Schema, _: int) -> None:
        for field in schema:
            if _holds_bytes(field.type):
                raise ConfigError(f"column {field.name!r} holds bytes, which {path.suffix} cannot: write .parquet or .arrow")
        self._file = path.open("w", encoding="utf-8", newline="")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _Csv(_Text):
    """Not by `csv`, which tells '' and NULL apart from Python 3.12 on, and quotes a carriage return from 3.13 on."""

    def __init__(self, path: Path, schema: pa.Schema, num_rows: int) -> None:
        super().__init__(path, schema, num_rows)
        self._write(schema.names)

    def write(self, table: pa.Table) -> None:
        """Write rows; NULL is an empty cell, and '' a quoted one."""
        for row in table.to_pylist():
            self._write(_json(value) if isinstance(value, list | dict) else value for value in row.values())

    def _write(self, values: Iterable[object]) -> None:
        self._file.write((",".join("" if value is None else _cell(str(value)) for value in values) or '""') + "\n")


def _cell(text: str) -> str:
    quoted = text.replace('"', '""')
    return text if text and quoted == text and not any(mark in text for mark in ",\r\n") else f'"{quoted}"'


class _JsonLines(_Text):
    def write(self, table: pa.Table) -> None:
        """Write a line for each row."""
        self._file.writelines(f"{_json(row)}\n" for row in table.to_pylist())


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _holds_bytes(kind: pa.DataType) -> bool:
    inner = (kind.field(at).type for at in range(kind.num_fields))
    return (
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or any(map(_holds_bytes, inner))
    )


_WRITERS: Mapping[str, Callable[[Path, pa.Schema, int], TableWriter]] = {
    ".parquet": _Parquet,
    ".arrow": _Arrow,
    ".csv": _Csv,
    ".jsonl": _JsonLines,
}
