"""Which columns a table has when its files differ. Pure: Arrow schemas in, one schema out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from pyarrow import types

from sqlstream.errors import SchemaError
from sqlstream.index.types.models import ALL_MISSING, BOOL8, ENCODING, OPAQUE, UUID
from sqlstream.index.types.values import encoding

_MAX_COLUMNS = 1990  # SQLite allows 2000 in a table


class TableSchema:
    """The columns agreed on so far, in the order of first appearance.

    A column that a file lacks reads as None there. Integers and floats widen; any other difference is an error.

    Args:
        otherwise: What helps with a column of several types beside writing it with one, for errors.
    """

    def __init__(self, otherwise: str = "leave it out with index_cols_to_keep") -> None:
        self._otherwise = otherwise
        self.fields: dict[str, pa.Field[Any]] = {}
        self._origins: dict[str, str] = {}
        self._missing: dict[str, str | None] = {}
        """Of columns of text: the first file with words such as 'NA' alone; None: another one has other texts."""

    def merge(self, schema: pa.Schema, file: str) -> None:
        """Take the columns of one more file in.

        Args:
            schema: The file's columns.
            file: Its name, for errors.

        Raises:
            SchemaError: A type that no index can hold, a name that comes twice, or a type that conflicts with another file's.
        """
        if len(set(schema.names)) < len(schema.names):
            twice = next(name for name in schema.names if schema.names.count(name) > 1)
            raise SchemaError(f"{file} has the column {twice!r} more than once: rename one of them")
        for field in schema:
            word = (field.metadata or {}).get(ALL_MISSING)
            if word is not None:
                self._missing.setdefault(field.name, f"all of its values in {file} are texts such as {word.decode()!r}")
            elif types.is_string(field.type):
                self._missing[field.name] = None
            self._merge_field(normalise(field if word is None else field.remove_metadata(), file), file)
        if len(self.fields) > _MAX_COLUMNS:
            raise SchemaError(
                f"{file} brings the table to {len(self.fields)} columns, more than {_MAX_COLUMNS}: "
                "choose some with index_cols_to_keep"
            )

    def take(self, field: pa.Field[Any], origin: str) -> None:
        """Take in one column of a normal type; `origin` says in errors where it comes from."""
        self.fields[field.name] = field
        self._origins[field.name] = origin

    def _merge_field(self, field: pa.Field[Any], file: str) -> None:
        known = self.fields.get(field.name)
        if known is None or (types.is_null(known.type) and not types.is_null(field.type)):
            self.take(field, file)
            return
        kind = widen(known.type, field.type)
        if kind is None or (encoding(known) != encoding(field) and not types.is_null(field.type)):
            missing = self._missing.get(field.name)
            cure = "write it with one type" if missing is None else f"{missing}, so leave those fields empty"
            raise SchemaError(
                f"column {field.name!r} is {_readable(known)} in {self._origins[field.name]} and {_readable(field)} in {file}: "
                f"{cure}, or {self._otherwise}"
            )
        self.fields[field.name] = known.with_type(kind)


def normalise(field: pa.Field[Any], file: str) -> pa.Field[Any]:
    """Return the field with the plain form of its type (no dictionaries, extensions or 64-bit offsets).

    Raises:
        SchemaError: An index cannot hold this type.
    """
    kind = normal_type(field.type)
    if kind is None:
        raise SchemaError(
            f"{file}: column {field.name!r} has the type {field.type}, which an index cannot hold: "
            "leave it out with index_cols_to_keep, or write it as another type"
        )
    if _is_uuid(field.type):
        return pa.field(field.name, kind, metadata={ENCODING: UUID})
    return field.with_type(kind)


def widen(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the type that holds the values of both (normal types), or None if they conflict."""
    if one.equals(other) or types.is_null(other):
        return one
    if types.is_null(one):
        return other
    if types.is_integer(one) and types.is_integer(other):
        return (
            pa.uint64() if pa.uint64() in (one, other) else pa.int64()
        )  # the stored form of uint64 holds negative numbers, too
    if _is_number(one) and _is_number(other):
        return pa.float64()
    return _widen_parametric(one, other)


def _widen_parametric(one: Any, other: Any) -> pa.DataType | None:
    if types.is_timestamp(one) and types.is_timestamp(other) and one.tz == other.tz:
        units = ("s", "ms", "us", "ns")
        return pa.timestamp(max(one.unit, other.unit, key=units.index), one.tz)
    if types.is_decimal(one) and types.is_decimal(other):
        scale = max(one.scale, other.scale)
        whole = max(one.precision - one.scale, other.precision - other.scale)
        return pa.decimal256(min(whole + scale, 76), scale)
    if types.is_list(one) and types.is_list(other):
        value = widen(one.value_type, other.value_type)
        return None if value is None else pa.list_(value)
    return None


def _is_number(kind: pa.DataType) -> bool:
    return types.is_integer(kind) or types.is_floating(kind)


def _readable(field: pa.Field[Any]) -> str:
    return (encoding(field).decode() or str(field.type)).replace("json", "JSON")


def normal_type(kind: Any) -> Any:
    """Return the plain form of a type, None where an index cannot hold it."""
    if isinstance(kind, pa.BaseExtensionType):
        is_unsaid = kind.extension_name == OPAQUE and types.is_binary(kind.storage_type)
        return pa.bool_() if kind.extension_name == BOOL8 else None if is_unsaid else normal_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return normal_type(kind.value_type)
    if types.is_nested(kind):
        return _normal_nested(kind)
    for is_one, normal in _NORMAL:
        if is_one(kind):
            return normal
    is_plain = types.is_primitive(kind) or types.is_decimal(kind) or types.is_null(kind)
    return kind if is_plain and not types.is_interval(kind) else None


def _normal_nested(kind: Any) -> Any:
    if types.is_map(kind):
        key, item = _normal_part(kind.key_type), _normal_part(kind.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    if types.is_struct(kind):
        fields = [(field.name, _normal_part(field.type)) for field in kind]
        return None if any(child is None for _, child in fields) else pa.struct(fields)
    if types.is_union(kind):
        return None
    value = _normal_part(kind.value_type)  # every kind of list
    return None if value is None else pa.list_(value)


def _normal_part(kind: Any) -> Any:
    """Return the plain form of a type within another one; UUIDs there have no form in JSON."""
    return None if _is_uuid(kind) else normal_type(kind)


def _is_uuid(kind: Any) -> bool:
    return getattr(kind, "extension_name", None) == "arrow.uuid"


_NORMAL: tuple[tuple[Callable[[Any], bool], Any], ...] = (
    (types.is_string, pa.string()),
    (types.is_large_string, pa.string()),
    (types.is_string_view, pa.string()),
    (types.is_binary, pa.binary()),
    (types.is_large_binary, pa.binary()),
    (types.is_binary_view, pa.binary()),
    (types.is_fixed_size_binary, pa.binary()),
    (types.is_date, pa.date32()),
)
