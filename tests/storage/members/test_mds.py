"""MDS as MosaicML Streaming wrote it: equal samples, and an error for what is damaged."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import random
from dataclasses import replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream.errors import DecodeError, SourceError
from sqlstream.storage.members.mds.decoder import MdsDecoder
from sqlstream.storage.members.mds.shards import (
    MdsColumn,
    MdsShard,
    ShardFile,
    is_mds_index,
    leaves_directory,
    offsets,
    parse_index,
    table_bytes,
)
from sqlstream.storage.members.packed import check_hashes, decompress
from tests.goldens import FIXTURES, as_json, expected

MDS = FIXTURES / "mds"
NAMES = ["plain", "zstd", "gz", "br", "bz2", "snappy", "empty_shard", "fixed_only", "bypass", "pickle", "merged"]


def index_of(name: str) -> tuple[MdsShard, ...]:
    return parse_index((MDS / name / "index.json").read_bytes(), f"{name}/index.json")


def raw_file(name: str, shard: MdsShard) -> bytes:
    """Return the file of a shard's samples, after all checks."""
    stored = (MDS / name / (shard.zip or shard.raw).basename).read_bytes()
    check_hashes(stored, (shard.zip or shard.raw).hashes, name)
    if shard.compression is None:
        return stored
    raw = decompress(stored, shard.compression, shard.raw.bytes, name)
    check_hashes(raw, shard.raw.hashes, name)
    return raw


def samples_of(raw: bytes, shard: MdsShard, decoder: MdsDecoder) -> list[dict[str, Any]]:
    bounds = offsets(raw[: table_bytes(shard)], shard, shard.raw.basename).tolist()
    return [decoder.decode(raw[start:stop]) for start, stop in pairwise(bounds)]


def read(name: str) -> list[dict[str, Any]]:
    return [
        sample
        for shard in index_of(name)
        for sample in samples_of(raw_file(name, shard), shard, MdsDecoder(shard.columns, allow_pickle=name == "pickle"))
    ]


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_equal_to_those_of_mosaicml(name: str) -> None:
    there = expected(f"mds/{name}.expected.json")
    assert [as_json(sample) for sample in read(name)] == there["samples"]
    assert [shard.samples for shard in index_of(name)] == there["samples_per_shard"]
    if there["offsets"]:
        found = [offsets(raw_file(name, shard), shard, name).tolist() for shard in index_of(name)]
        assert found == there["offsets"]


@pytest.mark.parametrize("name", NAMES)
def test_columns_by_their_spans_are_equal_to_those_of_the_whole_sample(name: str) -> None:
    for shard in index_of(name):
        raw = raw_file(name, shard)
        decoder = MdsDecoder(shard.columns, allow_pickle=True)
        bounds = offsets(raw, shard, name).tolist()
        for start, stop in pairwise(bounds):
            data = raw[start:stop]
            spans = decoder.spans(data[: decoder.head_bytes], stop - start)
            assert spans == decoder.spans(memoryview(data))
            parts = {column: decoder.decode_value(column, data[slice(*span)]) for column, span in spans.items()}
            whole = as_json(decoder.decode(data))
            assert as_json(parts) == whole
            assert as_json(decoder.decode(memoryview(raw)[start:stop])) == whole
            wanted = list(reversed(spans))[:3]
            assert list(decoder.decode(data, wanted)) == wanted[::-1]
            assert as_json(decoder.decode(data, wanted)) == {column: whole[column] for column in wanted}


def value_of(written: Any) -> Any:
    """Return the value that a golden file writes, as far as MDS has it."""
    kind = written.get("$") if isinstance(written, dict) else None
    if kind == "ndarray":
        flat = written.get("data") or [1] * int(np.prod(written["shape"]))
        return np.array(flat, written["dtype"]).reshape(written["shape"])
    if kind == "decimal":
        return Decimal(written["text"])
    return {"int": int, "float": float}[kind](written["text"]) if kind in ("int", "float") else written


# What their encoder takes and does not give back as it was: numpy scalars; a big-endian array under the code of a little-endian
# one; what JSON has no type for.
GIVEN_BACK: dict[tuple[str, str], Any] = {
    ("int", "0100000000000000"): 1,
    ("float16", "007c"): np.float16("inf"),
    ("float32", "cdcccc3d"): np.float32(0.1),
    ("ndarray", "11040200010002"): np.array([256, 512], "<i2"),
    ("json", "5b302c20312c20325d"): [0, 1, 2],
}


@pytest.mark.parametrize(
    "case", [case for case in expected("mds/encodings.expected.json")["cases"] if isinstance(case["hex"], str)]
)
def test_bytes_of_their_encoder_decode_to_the_value(case: dict[str, Any]) -> None:
    encoding, data = case["encoding"], bytes.fromhex(case["hex"])
    found = MdsDecoder([MdsColumn("x", encoding, None)]).decode(len(data).to_bytes(4, "little") + data)["x"]
    value = GIVEN_BACK.get((encoding, case["hex"]), value_of(case["value"]))
    there = as_json(value) if not (isinstance(value, dict) and "$" in value) else value
    assert as_json(found) == ({**there, "format": None} if encoding == "pil" else there)
    if isinstance(found, np.ndarray):
        assert not found.flags.writeable


def test_shards_that_are_zipped_differ_only_in_how_they_are_stored() -> None:
    few = [as_json(read(name)) for name in ("zstd", "gz", "br", "bz2", "snappy")]
    assert all(found == few[0] for found in few)
    assert {shard.compression for shard in index_of("zstd")} == {"zstd:7"}


def test_pickles_are_refused_and_the_other_columns_stay_readable() -> None:
    (shard,) = index_of("pickle")
    raw = raw_file("pickle", shard)
    start, stop = offsets(raw, shard, "pickle").tolist()
    careful = MdsDecoder(shard.columns)
    assert careful.refused == ("o",)
    with pytest.raises(DecodeError, match=r"'o'.*allow_pickle"):
        careful.decode(raw[start:stop])
    assert careful.decode(raw[start:stop], ["i"]) == {"i": 1}
    trusting = MdsDecoder(shard.columns, allow_pickle=True)
    assert trusting.refused == ()
    assert trusting.decode(raw[start:stop], ["o"]) == {"o": {"a": (1, 2)}}


def test_an_unknown_encoding_is_an_error_of_its_column_alone() -> None:
    decoder = MdsDecoder([MdsColumn("a", "mine", 1), MdsColumn("b", "ndarray:bool", 1), MdsColumn("c", "str", 1)])
    assert decoder.decode(b"xyz", ["c"]) == {"c": "z"}
    for column, encoding in (("a", "'mine' is not decoded"), ("b", "'ndarray:bool' is not decoded")):
        with pytest.raises(DecodeError, match=encoding):
            decoder.decode(b"xyz", [column])
    with pytest.raises(DecodeError, match="no column 'd'"):
        decoder.decode(b"xyz", ["d"])


def test_a_decoder_goes_to_another_process() -> None:
    (shard, *_) = index_of("plain")
    assert pickle.loads(pickle.dumps(shard)) == shard
    raw = raw_file("plain", shard)
    bounds = offsets(raw, shard, "plain")
    data = raw[bounds[0] : bounds[1]]
    copied = pickle.loads(pickle.dumps(MdsDecoder(shard.columns)))
    assert as_json(copied.decode(data)) == as_json(MdsDecoder(shard.columns).decode(data))


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_shard_that_is_cut_anywhere_is_an_error(name: str) -> None:
    draw = random.Random(name)
    for shard in index_of(name):
        raw = raw_file(name, shard)
        for length in {0, 3, 4, table_bytes(shard) - 1, table_bytes(shard), len(raw) - 1, *draw.sample(range(len(raw)), 20)}:
            cut = raw[:length]
            with pytest.raises(SourceError, match="the shard"):
                check_whole(cut, shard)
            if length < table_bytes(shard):
                with pytest.raises(SourceError, match="cut off"):
                    offsets(cut, shard, "the shard")


def check_whole(raw: bytes, shard: MdsShard) -> None:
    """Check a file as one that was downloaded: its size, then its hashes."""
    if len(raw) != shard.raw.bytes:
        raise SourceError("the shard is of another size")
    check_hashes(raw, shard.raw.hashes, "the shard")


def test_a_table_with_any_bit_flipped_is_an_error_or_gives_samples_of_other_sizes() -> None:
    """A flip that moves a bound to another legal place makes two samples whose columns do not add up."""
    shard = index_of("plain")[0]
    raw, decoder = raw_file("plain", shard), MdsDecoder(shard.columns)
    for bit in range(8 * table_bytes(shard)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises((SourceError, DecodeError)):
            samples_of(bytes(damaged), shard, decoder)


def test_random_damage_of_a_sample_is_a_decode_error_or_a_value_never_another_error() -> None:
    shard = index_of("plain")[0]
    raw, decoder = raw_file("plain", shard), MdsDecoder(shard.columns)
    start, stop, _ = offsets(raw, shard, "plain").tolist()
    draw = random.Random(5)
    found = {False: 0, True: 0}
    for _ in range(600):
        damaged = bytearray(raw[start:stop])
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            decoder.decode(bytes(damaged))
            found[True] += 1
        except DecodeError:
            found[False] += 1
    assert min(found.values()) > 50
    for length in range(stop - start):
        with pytest.raises(DecodeError, match="damaged"):
            decoder.decode(raw[start : start + length])


def small_shard(samples: int, size: int) -> MdsShard:
    return MdsShard(
        format="mds",
        samples=samples,
        columns=(MdsColumn("x", "bytes", None),),
        raw=ShardFile(basename="shard.00000.mds", bytes=size, hashes={}),
        zip=None,
        meta=None,
        zip_meta=None,
        compression=None,
        separator="",
        newline="",
    )


def table(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


def test_offsets_beyond_4_gib_name_the_shard_the_sample_and_the_cause() -> None:
    """Sample 1 has 3 GiB: its end wraps."""
    sizes = np.array([100, 3 * 2**30, 3 * 2**30, 100])
    bounds = np.concatenate([[24], 24 + np.cumsum(sizes)])
    shard = small_shard(4, int(bounds[-1]))
    with pytest.raises(SourceError, match=r"s3://b/shard: sample 2 begins at 3221225596 .* 4 GiB"):
        offsets(table(4, *(bounds % 2**32)), shard, "s3://b/shard")
    one = small_shard(1, 2**32 + 30)
    with pytest.raises(SourceError, match=r"last sample ends at 30.*4 GiB"):
        offsets(table(1, 12, 30), one, "shard")


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ((2, 16, 40, 39), "sample 1 begins at 40 and ends at 39"),
        ((2, 16, 16, 40), "sample 0 begins at 16 and ends at 16"),
        ((3, 16, 20, 40), "3 samples, the index says 2"),
        ((2, 16, 20, 41), "last sample ends at 41, the file at 40"),
        ((2, 15, 20, 40), "within the table"),
        ((2, 16, 20), "cut off"),
    ],
)
def test_a_table_that_does_not_fit_the_index_is_an_error(numbers: tuple[int, ...], why: str) -> None:
    with pytest.raises(SourceError, match=why):
        offsets(table(*numbers), small_shard(2, 40), "shard")


def test_offsets_have_64_bits() -> None:
    found = offsets(table(1, 12, 2**32 - 1), small_shard(1, 2**32 - 1), "shard")
    assert found.dtype == np.int64
    assert found.tolist() == [12, 2**32 - 1]


# -- the index --------------------------------------------------------------------------------------------------------


def test_only_mosaicmls_index_is_one() -> None:
    assert is_mds_index(json.loads((MDS / "plain/index.json").read_bytes()))
    others: list[Any] = [{"chunks": [], "config": {}}, {"wids_version": 1, "shardlist": []}, [], None]
    assert not any(map(is_mds_index, [*others, expected("mds/plain.expected.json")]))


def test_unknown_keys_are_ignored() -> None:
    document = json.loads((MDS / "plain/index.json").read_bytes())
    document["new"] = document["shards"][0]["new"] = document["shards"][0]["raw_data"]["new"] = {"x": 1}
    assert parse_index(json.dumps(document).encode(), "index.json") == index_of("plain")


def test_shards_with_equal_columns_share_them() -> None:
    assert len({id(shard.columns) for shard in index_of("plain")}) == 1


def test_a_merged_index_names_files_one_directory_deeper() -> None:
    assert [shard.raw.basename for shard in index_of("merged")] == ["0/shard.00000.mds", "1/shard.00000.mds"]


WRONG: list[tuple[str, Any, str]] = [
    ("version", 3, "shard 1: version 3"),
    ("version", None, "shard 1: version None"),
    ("format", "parquet", "`format` is 'parquet'"),
    ("samples", -1, "`samples` is -1"),
    ("samples", True, "`samples` is True"),
    ("samples", 10**15, "table is longer"),
    ("column_sizes", [8, 4], "3 names, 3 encodings and 2 sizes"),
    ("column_sizes", [8, 4, "4"], "`column_sizes`"),
    ("column_names", ["a", "a", "c"], "each name once"),
    ("column_names", ["a", "b", "\ud800"], "a list of texts"),
    ("column_encodings", None, "`column_encodings` is None"),
    ("compression", "lz4", "`compression` is 'lz4'"),
    ("compression", "zstd", "do not fit"),
    ("raw_data", None, "`raw_data` is no JSON object"),
    ("raw_data", {"basename": "../x", "bytes": 100, "hashes": {}}, "`basename` is '../x'"),
    ("raw_data", {"basename": "\udc00", "bytes": 100, "hashes": {}}, "`basename`.* a text"),
    ("raw_data", {"basename": "x", "bytes": 1.5, "hashes": {}}, "`bytes` is 1.5"),
    ("raw_data", {"basename": "x", "bytes": 100, "hashes": {"md5": 3}}, "`hashes`"),
]


@pytest.mark.parametrize(("key", "value", "why"), WRONG)
def test_an_index_that_is_wrong_names_the_shard_and_the_key(key: str, value: Any, why: str) -> None:
    document = json.loads((MDS / "fixed_only/index.json").read_bytes())
    document["shards"].append({**copy.deepcopy(document["shards"][0]), key: value})
    with pytest.raises(SourceError, match=why) as caught:
        parse_index(json.dumps(document).encode(), "index.json")
    assert str(caught.value).startswith("index.json: shard 1")


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"version": 2}', b'{"version": 1, "shards": []}', b"[" * 10**5])
def test_what_is_no_index_is_an_error(data: bytes) -> None:
    with pytest.raises(SourceError, match=r"index\.json"):
        parse_index(data, "index.json")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "/etc/passwd",
        "a/../../x",
        "a//x",
        "./x",
        "a/",
        "%2e%2e/x",
        "a/%2E./x",
        "http://h/x",
        "zip::x",
        "a\\..\\x",
        "a\0",
    ],
)
def test_a_name_that_leads_out_of_the_directory_is_refused(name: str) -> None:
    assert leaves_directory(name)


def test_any_cut_or_changed_index_is_a_source_error_or_an_index() -> None:
    data = (MDS / "jsonl_zstd/index.json").read_bytes()
    draw = random.Random(3)
    for _ in range(400):
        damaged = bytearray(data)
        damaged[draw.randrange(len(data))] = draw.randrange(256)
        with contextlib.suppress(SourceError):
            parse_index(bytes(damaged[: draw.choice([len(data), draw.randrange(len(data))])]), "index.json")


# -- whole files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zstd", "gz", "br", "bz2", "snappy"])
def test_a_compressed_shard_is_whole_or_an_error(name: str) -> None:
    shard = index_of(name)[0]
    assert shard.zip is not None
    assert shard.compression is not None
    stored = (MDS / name / shard.zip.basename).read_bytes()
    raw = decompress(memoryview(stored), shard.compression, shard.raw.bytes, name)
    for wrong in (shard.raw.bytes - 1, shard.raw.bytes + 1, shard.raw.bytes + 5000, 0):
        with pytest.raises(SourceError, match=name):
            decompress(stored, shard.compression, wrong, name)
    for length in range(0, len(stored), 7):
        with pytest.raises(SourceError, match=name):
            decompress(stored[:length], shard.compression, shard.raw.bytes, name)
    with pytest.raises(SourceError, match="compression 'lz4'"):
        decompress(stored, "lz4", shard.raw.bytes, name)
    draw = random.Random(name)
    for _ in range(100):
        damaged = bytearray(stored)
        damaged[draw.randrange(len(stored))] ^= draw.randrange(1, 256)
        with pytest.raises(SourceError, match="sha256"):
            check_hashes(bytes(damaged), shard.zip.hashes, name)
        try:
            found = decompress(bytes(damaged), shard.compression, shard.raw.bytes, name)
        except SourceError:
            continue
        assert len(found) == len(raw)


def test_hashes_are_compared_in_chunks_and_those_of_missing_packages_are_named(caplog: pytest.LogCaptureFixture) -> None:
    hashes = {"sha1": "a9993e364706816aba3e25717850c26c9cd0d89d", "md5": "900150983CD24FB0D6963F7D28E17F72"}
    assert check_hashes(b"abc", hashes, "x") == ()
    assert check_hashes([b"a", b"", b"bc"], hashes, "x") == ()
    with pytest.raises(SourceError, match="x: its sha1 is 84983"):
        check_hashes([b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmn", b"lmnomnopnopq"], hashes, "x")
    for _ in range(2):
        assert check_hashes(b"abc", {"whirlpool-9": "00", **hashes}, "x") == ("whirlpool-9",)
        assert check_hashes(b"abc", {"shake_128": "00"}, "x") == ("shake_128",)
        assert check_hashes(b"abc", {"new": "00"}, "x") == ("new",)
    assert sum("'whirlpool-9' are not checked" in record.getMessage() for record in caplog.records) == 1


def test_xxhashes_are_compared_where_the_package_is_there() -> None:
    pytest.importorskip("xxhash")
    shard = index_of("plain")[0]
    raw = raw_file("plain", shard)
    assert check_hashes(raw, shard.raw.hashes, "x") == ()
    with pytest.raises(SourceError, match="x: its xxh64 is"):
        check_hashes(raw[1:], {"xxh64": shard.raw.hashes["xxh64"]}, "x")


def test_a_changed_shard_fails_its_hash() -> None:
    shard = index_of("plain")[0]
    raw = bytearray(raw_file("plain", shard))
    raw[-1] ^= 1
    with pytest.raises(SourceError, match="sha1"):
        check_whole(bytes(raw), shard)
    assert check_hashes(bytes(raw), replace(shard.raw, hashes={}).hashes, "x") == ()


def test_every_fixture_is_read() -> None:
    there = {path.name for path in MDS.iterdir() if path.is_dir()}
    assert there == {*NAMES, "jsonl", "jsonl_zstd", "csv", "tsv", "xsv"}


def test_files_are_those_that_the_index_names() -> None:
    for path in MDS.glob("*/index.json"):
        for shard in parse_index(path.read_bytes(), str(path)):
            stored = [part for part in (shard.zip or shard.raw, shard.zip_meta or shard.meta) if part is not None]
            assert [size(path.parent / part.basename) for part in stored] == [part.bytes for part in stored]


def size(path: Path) -> int:
    return path.stat().st_size
