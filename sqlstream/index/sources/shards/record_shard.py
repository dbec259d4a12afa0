"""Files of maps, MessagePack or CBOR, one behind another: each is a sample.

A column whose values JSON can say (text, numbers, lists, maps of them) is one of the index, as those of JSONL are. One that has
bytes, or what else JSON has not, stays in the file: its values are decoded when the sample is made. Which one it is, the values
of a file decide, since nothing in it says types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from sqlstream.errors import DamagedShardError, DecodeError, SourceChangedError
from sqlstream.index.sources.formats.json_values import JsonRecords, Record
from sqlstream.index.sources.shards.columns import SampleParts, Texts
from sqlstream.index.sources.shards.layout import MembersAreBytes, PartsAreValues, ReadPart, Scratch
from sqlstream.index.sources.shards.reading import BLOCK_BYTES, opened
from sqlstream.index.sources.shards.samples import KEY, SAMPLE, SHARD, URL, ShardSamples
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members.damage import before_damage
from sqlstream.storage.members.places import SamplePart
from sqlstream.storage.members.records import RecordDecoder, RecordFormat, RecordPlace, record_places
from sqlstream.storage.members.source import ByteRange

_LEAST, _MOST = -(1 << 63), 1 << 64
"""Integers that a column of an index holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordShard(PartsAreValues, MembersAreBytes):
    """A file of maps."""

    layout: RecordFormat

    @property
    def num_samples(self) -> int | None:
        """Nothing says it."""
        return None

    def identity(self) -> object:
        """Return its format."""
        return ["records", self.layout]

    @property
    def reading(self) -> object:
        """Return its format."""
        return str(self.layout)

    def samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return the samples of a shard, all of which is read once; see `ShardLayout.samples`."""
        name = urls.redact(file.url)
        with opened(file, remote, here=scratch.here) as source:
            found, damage = before_damage(_records(source, self.layout, name))
        keys = [record.values.get(KEY) for record in found]
        has_keys = all(isinstance(key, str) for key in keys)
        content = {column for record in found for column in record.content}
        rows = _RecordRows(name, [_without(record.values, {*content, KEY, SHARD, URL}) for record in found])
        schema = rows.schema()
        typed: dict[str, pa.DataType] = dict.fromkeys(_in_order(content, found), pa.binary())
        parts = [{SAMPLE: SamplePart(0, *record.place)} if typed else {} for record in found]
        return ShardSamples(
            keys=Texts.of(map(str, keys)) if has_keys else None,
            parts=SampleParts.of(parts),
            typed=typed,
            beside=pa.Table.from_batches(rows.batches(schema.names), schema) if schema.names else None,
            damage=damage,
        )

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, Any]:
        """Return the values of a sample."""
        del name
        (part,) = parts
        record = RecordDecoder(self.layout).decode(part.whole)
        return {column: record[column] for column in wanted if column in record}


class _FoundRecord(NamedTuple):
    """A record."""

    place: RecordPlace
    values: dict[str, Any]
    """Those that JSON can say; None in place of others."""
    content: tuple[str, ...]
    """Names of the others."""


class _RecordRows(JsonRecords):
    """Records as those of a JSON file.

    Args:
        name: The file, for messages.
        rows: Their values.
    """

    def __init__(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        super().__init__(name)
        self._rows = rows

    def records(self) -> Iterator[Record]:
        """Yield them."""
        return (Record(f"record {number}", row) for number, row in enumerate(self._rows))


def _records(source: ByteRange, layout: RecordFormat, name: str) -> Iterator[_FoundRecord]:
    """Yield the records of a file, without content.

    Raises:
        DamagedShardError: One is damaged.
    """
    window, decoder = _ReadOn(source, name), RecordDecoder(layout)
    for number, place in enumerate(record_places(window.chunks(), layout, name)):
        try:
            record = decoder.decode(window.take(place))
        except DecodeError as error:
            raise DamagedShardError(f"{name}: record {number} at byte {place.offset}: {error}") from error
        content = tuple(column for column, value in record.items() if not _is_json(value))
        yield _FoundRecord(place, record | dict.fromkeys(content), content)


class _ReadOn:
    """A file that is looked through by a generator of places, and whose records are taken as they are found.

    Args:
        source: The file.
        name: It, for messages.
    """

    def __init__(self, source: ByteRange, name: str) -> None:
        self._source, self._name = source, name
        self._start, self._held = 0, bytearray()

    def chunks(self) -> Iterator[bytes]:
        """Yield its bytes in order.

        Raises:
            SourceChangedError: It ends before its size.
        """
        at, size = 0, self._source.size_bytes
        while at < size:
            chunk = self._source.read_at(at, min(BLOCK_BYTES, size - at))
            if not chunk:
                raise SourceChangedError(f"{self._name} ends at byte {at}, and had {size}: wait until its writer is done")
            self._held += chunk
            yield chunk
            at += len(chunk)

    def take(self, place: RecordPlace) -> bytes:
        """Return the bytes of a record that was found, and drop what is before its end, now and then."""
        at = place.offset - self._start
        data = bytes(memoryview(self._held)[at : at + place.length])
        if at > BLOCK_BYTES:
            del self._held[:at]
            self._start = place.offset
        return data


def _is_json(value: object) -> bool:
    """Return whether an index has a value as JSON files give it."""
    kind = type(value)
    if value is None or kind in (bool, float):
        return True
    if kind is str:
        return _is_text(value)
    if kind is int:
        return _LEAST <= value < _MOST  # type: ignore[operator]  # an int
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, dict) and all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))


def _is_text(value: object) -> bool:
    try:
        str(value).encode()
    except UnicodeEncodeError:  # CBOR may have half of a surrogate pair
        return False
    return True


def _without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _in_order(names: set[str], records: Sequence[_FoundRecord]) -> list[str]:
    """Return names in the order of their first appearance."""
    return [name for name in dict.fromkeys(name for record in records for name in record.values) if name in names]
