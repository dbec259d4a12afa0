"""Values of small members, parsed as their shard is indexed: columns that SQL sees (`index_members`).

A member of text or a number is a column of its own name, whose value samples have, too. An object of JSON is a column for each
of its keys (`json_width`), beside that of the member, whose content stays in the shard. Types are those of JSON Lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from sqlstream.errors import ConfigError, SchemaError, SourceError
from sqlstream.index.sources.formats.json_values import JsonRecords, Record
from sqlstream.index.sources.shards.samples import KEY, SHARD, URL, ShardSamples
from sqlstream.storage.members.places import SamplePart

TEXTS = frozenset("txt text transcript".split())
NUMBERS = frozenset("cls cls2 index inx id".split())
OBJECTS = frozenset("json jsn".split())
"""Extensions of the members that are parsed: those of `DecodeByExtension`, a test compares them."""
MAX_VALUE_BYTES = 1 << 20
"""Most bytes of a member or a value that is parsed: what SQL compares is far smaller, and all of a shard are in memory."""


def check_members(names: Sequence[str]) -> None:
    """Raise ConfigError if SQL can have no values of members with one of these extensions."""
    for name in names:
        if _extension(name) not in TEXTS | NUMBERS | OBJECTS:
            known = ", ".join(sorted(TEXTS | NUMBERS | OBJECTS))
            raise ConfigError(
                f"index_members names {name!r}, and members of TAR and ZIP shards are parsed that end with one of {known}: "
                "name these alone; SQL sees the size of the others"
            )


def check_bytes(num_bytes: int, what: str, name: str) -> None:
    """Raise SourceError if what is to be parsed is too large.

    Args:
        num_bytes: Its size.
        what: The member and its place, for messages.
        name: The column.
    """
    if num_bytes > MAX_VALUE_BYTES:
        raise SourceError(
            f"{what} has {num_bytes} bytes, and index_members takes values of {MAX_VALUE_BYTES} at most: leave {name!r} out of "
            "index_members"
        )


class MemberValues(JsonRecords):
    """The values of the members of one shard, as rows.

    Args:
        names: The columns of the members.
        keys: The samples.
        parts: Their parts.
        contents: The bytes of the parts that are named, by the place of each.
        shard: The shard, for messages.

    Raises:
        SourceError: A member is not what its name says.
    """

    def __init__(
        self,
        names: Sequence[str],
        keys: Sequence[str],
        parts: Sequence[Mapping[str, SamplePart]],
        contents: Mapping[int, bytes],
        shard: str,
    ) -> None:
        super().__init__(shard)
        self._rows = [
            self._row(key, {name: found[name] for name in names if name in found}, contents)
            for key, found in zip(keys, parts, strict=True)
        ]

    def records(self) -> Iterator[Record]:
        """Yield the rows in order."""
        return iter(self._rows)

    def table(self) -> pa.Table:
        """Return the rows."""
        schema = self.schema()
        return pa.Table.from_batches(self.batches(schema.names), schema).combine_chunks()

    def _row(self, key: str, parts: Mapping[str, SamplePart], contents: Mapping[int, bytes]) -> Record:
        values: dict[str, Any] = {}
        for name, part in parts.items():
            try:
                found = self._parsed(name, contents[part.offset])
            except (ValueError, TypeError, RecursionError) as error:  # those of JSON and of Unicode are ValueErrors
                raise SourceError(
                    f"{self._name}: {name!r} of the sample {key!r}, at byte {part.offset}, does not parse: {error}; mend it, "
                    f"or leave {name!r} out of index_members"
                ) from error
            if twice := values.keys() & found.keys():
                raise SchemaError(f"{self._name}: the sample {key!r} has two values for the column {twice.pop()!r}: rename one")
            values |= found
        huge = tuple(self.huge)
        self.huge.clear()
        return Record(f"sample {key!r}", values, huge)

    def _parsed(self, name: str, data: bytes) -> dict[str, Any]:
        """Return the values of a member, by column."""
        extension = _extension(name)
        if extension in NUMBERS:
            return {name: int(data)}
        if extension in TEXTS:
            return {name: data.decode()}
        value = self.parse(data.decode(json.detect_encoding(data), "surrogatepass"))
        if not isinstance(value, dict):
            raise TypeError(f"it is a JSON {type(value).__name__}, and objects alone have keys that can be columns")
        "".join(value).encode()  # raises of half a surrogate pair, which no name of a column may have
        return {f"{name}_{key}": item for key, item in value.items()}


def with_values(samples: ShardSamples, names: Sequence[str], contents: Mapping[int, bytes], shard: str) -> ShardSamples:
    """Return samples with the values of some of their members.

    Args:
        samples: The samples, with keys.
        names: The columns of the members.
        contents: The bytes of the parts that are named, by the place of each.
        shard: The shard, for messages.

    Raises:
        SourceError: A member is not what its name says; SchemaError: a value has the name of another column.
    """
    assert samples.keys is not None
    values = MemberValues(names, samples.keys, samples.parts, contents, shard).table()
    found = replace(samples, parsed=frozenset(name for name in names if _extension(name) not in OBJECTS))
    others = found.beside
    taken = {KEY, SHARD, URL, *found.member_columns, *([] if others is None else others.schema.names)}
    if twice := [name for name in values.schema.names if name in taken]:
        raise SchemaError(
            f"{shard}: index_members gives a column {twice[0]!r}, and the shard has one of that name: rename one of them, or "
            "leave the member out of index_members"
        )
    for field, column in zip(values.schema, values.columns, strict=True):
        others = pa.table([column], schema=pa.schema([field])) if others is None else others.append_column(field, column)
    return replace(found, beside=others)


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()
