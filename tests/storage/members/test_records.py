"""Files of MessagePack or CBOR maps: the place of each, its values, and an error for what is damaged."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import cbor2
import msgpack
import pytest

from sqlstream.errors import DecodeError, MissingDependencyError, SourceError
from sqlstream.storage.members.records import EXTENSIONS, RecordDecoder, RecordFormat, record_places

ROWS: list[dict[str, Any]] = [
    {
        "__key__": f"n° {i}",
        "jpg": bytes(range(i)),
        "cls": i - 3,
        "json": {"a": [i, None, 1.5], "b": {"c": True}},
        "t": "x" * i * 20,
    }
    for i in range(40)
] + [{}]
BOTH = pytest.mark.parametrize("layout", list(RecordFormat))


def written(layout: RecordFormat, row: object) -> bytes:
    data: bytes = msgpack.packb(row) if layout is RecordFormat.MSGPACK else cbor2.dumps(row)
    return data


def file_of(layout: RecordFormat) -> tuple[bytes, list[tuple[int, int]]]:
    parts = [written(layout, row) for row in ROWS]
    places = [(sum(map(len, parts[:number])), len(part)) for number, part in enumerate(parts)]
    return b"".join(parts), places


@BOTH
def test_records_are_found_and_decoded(layout: RecordFormat) -> None:
    data, places = file_of(layout)
    found = list(record_places(data, layout, "x"))
    assert found == places
    decoder = RecordDecoder(layout)
    assert [decoder.decode(data[at : at + length]) for at, length in found] == ROWS
    assert decoder.decode(memoryview(data)[slice(0, places[0][1])], ["json", "cls"]) == {"json": ROWS[0]["json"], "cls": -3}
    with pytest.raises(DecodeError, match="no value 'x'"):
        decoder.decode(data[: places[0][1]], ["x"])


@BOTH
def test_chunks_of_any_size_give_the_same_places(layout: RecordFormat) -> None:
    data, places = file_of(layout)
    for size in (1, 2, 7, 100, 1000, len(data)):
        chunks = (data[start : start + size] for start in range(0, len(data), size))
        assert list(record_places(chunks, layout, "x")) == places


@BOTH
def test_records_larger_than_what_is_looked_through_at_a_time_are_found(layout: RecordFormat) -> None:
    parts = [written(layout, {"b": bytes(size)}) for size in (3 << 20, 10, 5 << 19, 1)]
    found = list(record_places(b"".join(parts), layout, "x"))
    assert [place.length for place in found] == [len(part) for part in parts]


@BOTH
def test_a_file_that_is_cut_anywhere_names_the_record_and_its_offset(layout: RecordFormat) -> None:
    data, places = file_of(layout)
    ends = {0, *(at + length for at, length in places)}
    for length in range(0, len(data), 7):
        found: list[tuple[int, int]] = []
        if length in ends:
            continue
        number = sum(end <= length for end in ends) - 1
        with pytest.raises(SourceError, match=f"x: record {number} at byte {places[number][0]} is cut off: .* byte {length}"):
            found.extend(record_places(data[:length], layout, "x"))
        assert found == places[:number]


@BOTH
def test_an_empty_file_has_no_records(layout: RecordFormat) -> None:
    assert list(record_places(b"", layout, "x")) == []
    assert list(record_places([b"", b""], layout, "x")) == []


@BOTH
def test_what_is_no_map_is_an_error(layout: RecordFormat) -> None:
    good = written(layout, {"a": 1})
    for other in (3, [1], "text", None, b"bytes"):
        with pytest.raises(SourceError, match=f"record 1 at byte {len(good)} is no map"):
            list(record_places(good + written(layout, other), layout, "x"))
        with pytest.raises(DecodeError, match="no map"):
            RecordDecoder(layout).decode(written(layout, other))
    with pytest.raises(DecodeError, match="no map of names"):
        RecordDecoder(layout).decode(written(layout, {1: 2}))
    with pytest.raises(SourceError, match=r"record 1 .* is no map"):
        list(record_places(good + bytes(512), layout, "x"))


@BOTH
def test_random_damage_is_a_source_error_or_other_places_that_are_the_whole_file(layout: RecordFormat) -> None:
    data, _ = file_of(layout)
    draw, failed = random.Random(2), 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] = draw.randrange(256)
        try:
            found = list(record_places(bytes(damaged), layout, "x"))
        except SourceError:
            failed += 1
            continue
        assert sum(place.length for place in found) == len(data)
        for at, length in found[:3]:
            try:
                RecordDecoder(layout).decode(bytes(damaged[at : at + length]))
            except DecodeError:
                failed += 1
    assert failed > 5


@BOTH
def test_a_deep_nest_is_an_error(layout: RecordFormat) -> None:
    deep = written(layout, {"a": [1]})[:3] + (b"\x91" if layout is RecordFormat.MSGPACK else b"\x81") * 10**5 + b"\x01"
    with pytest.raises(SourceError, match="record 0 at byte 0 is damaged"):
        list(record_places(deep, layout, "x"))
    with pytest.raises(DecodeError):
        RecordDecoder(layout).decode(deep)


@BOTH
def test_a_length_that_promises_too_much_does_not_fill_the_memory(layout: RecordFormat) -> None:
    head = written(layout, {"a": 1})[:3] + (
        b"\xc6\xff\xff\xff\xff" if layout is RecordFormat.MSGPACK else b"\x5b" + b"\x7f" * 8
    )
    given = 0

    def endless() -> Iterator[bytes]:
        nonlocal given
        yield head
        while given < 100:
            given += 1
            yield bytes(1 << 20)

    with pytest.raises(SourceError, match="record 0 at byte 0 is damaged, or larger"):
        list(record_places(endless(), layout, "x", max_record_bytes=4 << 20))
    assert given < 10


@BOTH
def test_a_missing_package_is_named(layout: RecordFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("msgpack", "cbor2"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"sqlstream-data\[shards\]"):
        record_places(b"", layout, "x")
    with pytest.raises(MissingDependencyError, match=r"sqlstream-data\[shards\]"):
        RecordDecoder(layout).decode(b"")


def test_extensions_name_formats() -> None:
    assert {EXTENSIONS[".mp"], EXTENSIONS[".cbor"]} == set(RecordFormat)
