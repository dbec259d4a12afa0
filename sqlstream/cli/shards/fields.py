"""Which columns of a sample are written, under which names and in which form."""

from __future__ import annotations

import datetime as dt
import io
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sqlstream.errors import ConfigError, EncodeError
from sqlstream.index.file.index import Index
from sqlstream.index.sources.places.python_rows import refuse_conflicts
from sqlstream.index.types import values
from sqlstream.index.types.models import Column
from sqlstream.python_values import arrow_array
from sqlstream.storage.base import urls

_FIELD = re.compile(r"(?P<column>[^=:]+)(?:=(?P<name>[^=:]+))?(?::(?P<encoding>.+))?")
_MAGIC = ((b"\xff\xd8\xff", "jpg"), (b"\x89PNG\r\n", "png"), (b"GIF8", "gif"), (b"fLaC", "flac"), (b"OggS", "ogg"))
_TIMES = (dt.date, dt.time, dt.timedelta, np.datetime64, np.timedelta64, uuid.UUID)
"""What MDS and JSON have as text, which is that of `sqlstream index export`."""
_ROWS = 8192
"""Rows whose values are in memory as their types are told: as of rows of a program."""
_OF_JSON = frozenset((str, int, float, bool, type(None)))
_ENCODINGS: tuple[tuple[type, str], ...] = (
    (bool, "uint8"),
    (int, "int"),
    (float, "float64"),
    (str, "str"),
    (bytes, "bytes"),
    (np.ndarray, "ndarray"),
    (Decimal, "str_decimal"),
    (dict, "json"),
    (list, "json"),
    *((kind, "str") for kind in _TIMES),
)


class Field(NamedTuple):
    """A column that is written."""

    column: str
    name: str | None
    """What it is called where it is written; None: as the format has it."""
    encoding: str | None
    """How it is encoded; None: by its first value."""


def parse_fields(words: Sequence[str]) -> tuple[Field, ...]:
    """Return what `--columns` was given: COLUMN, COLUMN=NAME, COLUMN:ENCODING, COLUMN=NAME:ENCODING.

    Raises:
        ConfigError: A word is none of these, or two columns have one name.

    Example:
        >>> parse_fields(["image:jpeg", "caption=txt"])
        (Field(column='image', name=None, encoding='jpeg'), Field(column='caption', name='txt', encoding=None))
    """
    matches = [(word, _FIELD.fullmatch(word)) for word in words]
    if wrong := [word for word, match in matches if match is None]:
        raise ConfigError(f"--columns {wrong[0]!r}: write COLUMN, COLUMN=NAME, COLUMN:ENCODING or COLUMN=NAME:ENCODING")
    fields = tuple(Field(match["column"], match["name"], match["encoding"]) for _, match in matches if match is not None)
    names = [field.name or field.column for field in fields]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--columns has {twice[0]!r} twice: give each column a name of its own, COLUMN=NAME")
    return fields


class FileContent(NamedTuple):
    """The bytes of a file."""

    data: bytes
    extension: str
    """Without the dot; empty: not known."""


def content_of(value: Any, is_path: bool) -> FileContent | None:
    """Return the bytes of a file: of a path, of bytes, of a struct of bytes and path, of an image as it was read; else None."""
    if is_path and isinstance(value, str | Path):
        return FileContent(Path(value).read_bytes(), urls.extension(str(value)).removeprefix("."))
    if isinstance(value, bytes):
        return FileContent(value, _kind(value))
    if isinstance(value, Mapping) and value.keys() == {"bytes", "path"} and isinstance(value["bytes"], bytes):
        return FileContent(value["bytes"], urls.extension(value["path"] or "").removeprefix(".") or _kind(value["bytes"]))
    file = getattr(value, "fp", None)
    if isinstance(file, io.BytesIO):  # an image of Pillow whose pixels are not decoded yet: it is not encoded again
        return FileContent(file.getvalue(), _kind(file.getvalue()))
    return None


def _kind(data: bytes) -> str:
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), "")


class Rows:
    """Makes rows for MDS and Parquet: values by column.

    Args:
        fields: What is written; none: all columns.
        paths: Columns whose values are paths of files.
        has_times: The format has values of time; else they are text.
    """

    def __init__(self, fields: Sequence[Field], paths: Collection[str], *, has_times: bool) -> None:
        self._fields, self._paths, self._has_times = fields, frozenset(paths), has_times

    def __call__(self, position: int, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a sample."""
        del position
        chosen = chosen_of(sample, self._fields)
        row = {}
        for field in chosen:
            value = sample[field.column]
            content = content_of(value, field.column in self._paths)
            own = value if self._has_times or isinstance(value, Decimal) else _texts(value)
            row[field.name or field.column] = own if content is None else content.data
        return row

    def encodings(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the encodings of MDS for rows like this one.

        Raises:
            ConfigError: One cannot be told.
        """
        given = {field.name or field.column: field.encoding for field in self._fields}
        return {name: given.get(name) or _encoding(name, value) for name, value in row.items()}

    def types(self, index: Index) -> dict[str, pa.DataType]:
        """Return the types that Parquet has for columns of an index; those whose values have no one type are left out."""
        fields = self._fields or [Field(column.name, None, None) for column in index.columns]
        wanted = {field.column for field in fields}
        columns = [column for column in index.columns if column.name in wanted]
        found = {column.name: self._type(column, index.columns) for column in columns}
        untold = [column for column in columns if found[column.name] is None and not column.is_in_place]
        found |= _types_of_values(index, untold)
        types = {field.name or field.column: found.get(field.column) for field in fields}
        return {name: kind for name, kind in types.items() if kind is not None}

    def _type(self, column: Column, columns: Sequence[Column]) -> pa.DataType | None:
        """Return the type of what a row has of a column; None: its values tell it."""
        kind = column.field.type
        if column.name in self._paths or column.is_member:
            return pa.binary()
        if column.is_in_place:
            are_shards = any(other.name == "__shard__" for other in columns)  # whose values have types of their own
            is_content = pa.types.is_binary(kind) or pa.types.is_struct(kind)
            return None if are_shards else pa.binary() if is_content else kind
        return None if values.encoding(column.field) else kind


def _types_of_values(index: Index, columns: Sequence[Column]) -> dict[str, pa.DataType]:
    """Return the types that hold the values of columns in all selected rows, so that each part of a writing has them."""
    schema = pa.schema([pa.field(column.name, pa.null()) for column in columns])
    for start in range(0, len(index) if columns else 0, _ROWS):
        rows = index.rows(index.row_ids(np.arange(start, min(start + _ROWS, len(index)))).tolist())
        for name in schema.names:
            try:
                some = pa.schema([pa.field(name, arrow_array([row[name] for row in rows]).type)])
                refuse_conflicts(schema, some)
                schema = pa.unify_schemas([schema, some], promote_options="permissive")
            except (pa.ArrowException, UnicodeError, OverflowError):  # the writer says which values are of which types
                schema = schema.remove(schema.get_field_index(name))
    return {field.name: field.type for field in schema}


def _encoding(name: str, value: Any) -> str:
    if isinstance(value, np.generic) and value.dtype.kind in "iuf":
        return value.dtype.name
    for kind, encoding in _ENCODINGS:
        if isinstance(value, kind):
            return encoding
    if hasattr(value, "save"):
        return "png"
    raise ConfigError(
        f"column {name!r} is {type(value).__name__} in the first sample, which tells no encoding: say it, --columns {name}:str"
    )


def chosen_of(sample: Mapping[str, Any], fields: Sequence[Field]) -> Sequence[Field]:
    """Return the fields of a sample: those that are wanted, or all whose names do not begin with `__`.

    Raises:
        EncodeError: One is missing.
    """
    if not fields:
        return [Field(name, None, None) for name in sample if not name.startswith("__")]
    for field in fields:
        if field.column not in sample:
            raise EncodeError(f"there is no column {field.column!r}: the sample has {', '.join(sample)}", column=field.column)
    return fields


class Files:
    """Makes samples for tar and ZIP: files by extension, and what is no file in one `json`.

    Args:
        fields: What is written; none: all columns.
        paths: Columns whose values are paths of files.
        key: Column whose values are keys; None: the position in the epoch, with nine digits.
        are_extensions: Columns of bytes are called by their extensions, since the source is an archive.
    """

    def __init__(self, fields: Sequence[Field], paths: Collection[str], key: str | None, *, are_extensions: bool) -> None:
        self._fields, self._paths, self._key, self._are_extensions = fields, frozenset(paths), key, are_extensions

    def __call__(self, position: int, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return the files of a sample, and its key."""
        found: dict[str, Any] = {"__key__": self._key_of(position, sample)}
        unnamed: list[tuple[str, FileContent]] = []
        facts: dict[str, Any] = {}
        for field in chosen_of(sample, self._fields):
            value = sample[field.column]
            if value is None or field.column == self._key:
                continue
            content = content_of(value, field.column in self._paths)
            if field.name is not None:
                _add(found, field.name, _texts(value) if content is None else content.data, field.column)
            elif content is None:
                facts[field.column] = value
            elif self._are_extensions and field.column not in self._paths:
                _add(found, field.column, content.data, field.column)
            else:
                unnamed.append((field.column, content))
        for column, content in unnamed:
            extension = content.extension or "bin"
            _add(found, extension if len(unnamed) == 1 else f"{column}.{extension}", content.data, column)
        for name in [name for name, value in facts.items() if isinstance(value, np.ndarray)]:
            _add(found, f"{name}.npy", facts.pop(name), name)
        if facts:
            document = {name: _plain(value) for name, value in facts.items()}
            _add(found, "meta.json" if "json" in found else "json", document, next(iter(facts)))
        return found

    def _key_of(self, position: int, sample: Mapping[str, Any]) -> str:
        if self._key is None:
            return f"{position:09}"
        if self._key not in sample:
            raise EncodeError(f"there is no column {self._key!r} for the keys: the sample has {', '.join(sample)}")
        if sample[self._key] is None:
            raise EncodeError(
                f"column {self._key!r} has no value, of which the key would be made: leave such rows out (--where)"
            )
        return str(sample[self._key])


def _add(found: dict[str, Any], name: str, value: Any, column: str) -> None:
    """Add a file of a sample.

    Raises:
        EncodeError: There is one of its name.
    """
    if name in found:
        raise EncodeError(
            f"column {column!r} would be a second file {name!r} of its sample: give it a name, --columns {column}=NAME",
            column=column,
        )
    found[name] = value


def _texts(value: Any) -> Any:
    """Return a value with text for what JSON has no values of, at any depth."""
    if isinstance(value, (Decimal, *_TIMES)):
        return str(value).replace("T", " ") if isinstance(value, np.datetime64) else str(value)
    if isinstance(value, dict):
        return {name: _texts(inner) for name, inner in value.items()}
    if isinstance(value, list) and not _OF_JSON.issuperset(map(type, value)):
        return [_texts(inner) for inner in value]
    return value


def _plain(value: Any) -> Any:
    found = _texts(value)
    return found.item() if isinstance(found, np.generic) else found
