"""JSONL, CSV, TSV and XSV as MosaicML Streaming wrote them: equal samples, and an error for what is damaged."""

from __future__ import annotations

import pickle
import random
from itertools import pairwise
from typing import Any

import pytest

from sqlstream.errors import DecodeError, SourceError
from sqlstream.storage.members.mds.shards import MdsShard, ShardFile, offsets, parse_index, table_bytes
from sqlstream.storage.members.mds.split import RowDecoder
from sqlstream.storage.members.packed import check_hashes, decompress
from tests.goldens import FIXTURES, as_json, expected

MDS = FIXTURES / "mds"
NAMES = ["jsonl", "jsonl_zstd", "csv", "tsv", "xsv"]


def index_of(name: str) -> tuple[MdsShard, ...]:
    return parse_index((MDS / name / "index.json").read_bytes(), f"{name}/index.json")


def whole(name: str, raw: ShardFile, stored: ShardFile | None, compression: str | None) -> bytes:
    data = (MDS / name / (stored or raw).basename).read_bytes()
    check_hashes(data, (stored or raw).hashes, name)
    if compression is not None:
        data = decompress(data, compression, raw.bytes, name)
    check_hashes(data, raw.hashes, name)
    return data


def files_of(name: str, shard: MdsShard) -> tuple[bytes, bytes]:
    """Return data and table."""
    assert shard.meta is not None
    data = whole(name, shard.raw, shard.zip, shard.compression)
    return data, whole(name, shard.meta, shard.zip_meta, shard.compression)


def rows_of(data: bytes, table: bytes, shard: MdsShard) -> list[dict[str, Any]]:
    bounds = offsets(table, shard, "shard").tolist()
    decoder = RowDecoder(shard)
    return [decoder.decode(data[start:stop]) for start, stop in pairwise(bounds)]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_equal_to_those_of_mosaicml(name: str) -> None:
    there = expected(f"mds/{name}.expected.json")
    found = [row for shard in index_of(name) for row in rows_of(*files_of(name, shard), shard)]
    assert [as_json(row) for row in found] == there["samples"]
    assert [shard.samples for shard in index_of(name)] == there["samples_per_shard"]
    if there["offsets"]:
        tables = [offsets(files_of(name, shard)[1], shard, name).tolist() for shard in index_of(name)]
        assert tables == there["offsets"]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_gives_the_columns_that_are_wanted(name: str) -> None:
    shard = index_of(name)[0]
    data, table = files_of(name, shard)
    start, stop, *_ = offsets(table, shard, name).tolist()
    decoder = pickle.loads(pickle.dumps(RowDecoder(shard)))
    row = decoder.decode(data[start:stop])
    assert list(decoder.decode(memoryview(data)[start:stop], ["s", "n"]).items()) == [("s", row["s"]), ("n", row["n"])]
    with pytest.raises(DecodeError, match="no column 'x'"):
        decoder.decode(data[start:stop], ["x"])


@pytest.mark.parametrize("name", NAMES)
def test_a_table_with_any_bit_flipped_is_an_error(name: str) -> None:
    shard = index_of(name)[0]
    data, table = files_of(name, shard)
    for bit in range(8 * table_bytes(shard)):
        damaged = bytearray(table)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((SourceError, DecodeError)):
            rows_of(data, bytes(damaged), shard)


@pytest.mark.parametrize("name", NAMES)
def test_random_damage_of_a_row_is_a_decode_error_or_a_row(name: str) -> None:
    shard = index_of(name)[0]
    data, table = files_of(name, shard)
    start, stop, *_ = offsets(table, shard, name).tolist()
    decoder, draw, failed = RowDecoder(shard), random.Random(1), 0
    for _ in range(300):
        damaged = bytearray(data[start:stop])
        damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decoder.decode(bytes(damaged))
        except DecodeError:
            failed += 1
    assert failed > 30
    for length in range(stop - start):
        with pytest.raises(DecodeError):
            decoder.decode(data[start : start + length])


def test_an_encoding_that_rows_do_not_have_is_an_error_of_its_column_alone() -> None:
    shard = index_of("csv")[0]
    columns = tuple(column._replace(encoding="jpeg") if column.name == "f" else column for column in shard.columns)
    decoder = RowDecoder(MdsShard(**{name: getattr(shard, name) for name in shard.__slots__} | {"columns": columns}))
    assert decoder.decode(b"0.5,3,x\n", ["n", "s"]) == {"n": 3, "s": "x"}
    with pytest.raises(DecodeError, match="'f': encoding 'jpeg'"):
        decoder.decode(b"0.5,3,x\n")


def test_an_index_without_the_marks_of_its_rows_is_an_error() -> None:
    data = (MDS / "xsv/index.json").read_bytes()
    for key, wrong in ((b'"<sep>"', b'""'), (b'"\\r\\n"', b"null")):
        with pytest.raises(SourceError, match="shard 0"):
            parse_index(data.replace(key, wrong), "index.json")
