"""MDS and the split formats: equal to what MosaicML Streaming's own writers wrote, byte for byte."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, EncodeError, OutputExistsError
from sqlstream.write import CsvWriter, JsonWriter, MdsWriter, TsvWriter, WriteOptions, XsvWriter
from sqlstream.write.formats.mds_encoder import MdsEncoder, encoder_of
from sqlstream.write.formats.parts import PartEncoder
from sqlstream.write.formats.whole_files import SampleBuffer
from tests.goldens import as_json, expected
from tests.write.goldens import MDS, content_of, files_of, mds_samples, shards_of

LINES = [{"s": f"é{i} \"q\" 'x'", "n": -i, "f": i / 3} for i in range(7)]
TEXTS = [{**line, "s": f"é{i} \"q\" \\ 'x'"} for i, line in enumerate(LINES)]
COLUMNS = {"s": "str", "n": "int", "f": "float"}
SMALL = {"x": "bytes"}


def columns_of(directory: Path) -> dict[str, str]:
    return {column.name: column.encoding for column in shards_of(directory)[0].columns}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("plain", {"hashes": ["sha1", "xxh64"], "size_limit": 12_000}),
        ("fixed_only", {}),
        ("bypass", {}),
        ("pickle", {"allow_pickle": True}),
        ("merged/0", {"size_limit": 300}),
    ],
)
def test_mds_is_equal_to_the_golden_files(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    with MdsWriter(tmp_path / "out", columns_of(MDS / name), **settings) as writer:
        for sample in mds_samples(MDS / name):
            writer.write(sample)
    assert files_of(tmp_path / "out") == files_of(MDS / name)


@pytest.mark.parametrize("compression", ["zstd:7", "gz:1", "br:5", "bz2", "snappy"])
def test_compressed_mds_has_the_content_and_the_index_of_the_golden_files(compression: str, tmp_path: Path) -> None:
    golden = MDS / compression.partition(":")[0]
    with MdsWriter(tmp_path, columns_of(golden), compression=compression, hashes=["sha256"], size_limit=1500) as writer:
        for sample in mds_samples(golden):
            writer.write(sample)
    ours, theirs = shards_of(tmp_path), shards_of(golden)
    assert [content_of(tmp_path, shard) for shard in ours] == [content_of(golden, shard) for shard in theirs]
    assert [(shard.raw, shard.samples, shard.compression) for shard in ours] == [
        (shard.raw, shard.samples, shard.compression) for shard in theirs
    ]
    assert set(files_of(tmp_path)) == set(files_of(golden))


@pytest.mark.parametrize(
    ("name", "make", "rows", "settings"),
    [
        ("jsonl", JsonWriter, TEXTS, {}),
        ("csv", CsvWriter, LINES, {}),
        ("tsv", TsvWriter, LINES, {}),
        ("xsv", XsvWriter, LINES, {"separator": "<sep>", "newline": "\r\n"}),
    ],
)
def test_split_formats_are_equal_to_the_golden_files(
    name: str, make: Any, rows: list[dict[str, Any]], settings: dict[str, Any], tmp_path: Path
) -> None:
    with make(tmp_path, COLUMNS, size_limit=150, hashes=["md5"], **settings) as writer:
        for row in rows:
            writer.write(row)
    assert files_of(tmp_path) == files_of(MDS / name)


def test_compressed_json_has_the_content_of_the_golden_files(tmp_path: Path) -> None:
    with JsonWriter(tmp_path, COLUMNS, size_limit=150, hashes=["md5"], compression="zstd") as writer:
        for row in TEXTS:
            writer.write(row)
    golden = MDS / "jsonl_zstd"
    assert [content_of(tmp_path, shard) for shard in shards_of(tmp_path)] == [
        content_of(golden, shard) for shard in shards_of(golden)
    ]
    assert [shard.meta for shard in shards_of(tmp_path)] == [shard.meta for shard in shards_of(golden)]
    assert set(files_of(tmp_path)) == set(files_of(golden))


def test_a_first_sample_above_the_limit_makes_no_empty_shard(tmp_path: Path) -> None:
    with MdsWriter(tmp_path, SMALL, size_limit=300) as writer:
        for size in (1000, 3, 5, 2000):
            writer.write({"x": bytes(size)})
    golden = MDS / "empty_shard"
    assert [shard.samples for shard in shards_of(golden)] == [0, 1, 2, 1]
    assert [shard.samples for shard in shards_of(tmp_path)] == [1, 2, 1]
    for number in range(3):
        ours, theirs = tmp_path / f"shard.{number:05}.mds", golden / f"shard.{number + 1:05}.mds"
        assert ours.read_bytes() == theirs.read_bytes()


def cases() -> dict[str, tuple[str, Any, Any]]:
    """The goldens of the encoder: our values, since a fixture holds them as JSON."""
    grid = np.arange(6, dtype=np.int16).reshape(2, 3)
    picture = Image.frombytes("RGB", (2, 1), bytes.fromhex("000000070809"))
    values = [
        -2, "hé", grid, grid, grid, np.zeros((256,), np.uint8)[:1], np.ones((256, 1), np.uint8), np.array(3), np.zeros((0, 2)),
        np.array([True]), np.zeros(2, np.int32), np.array([1, 2], ">i2"),
        np.asfortranarray(np.arange(6, dtype=np.uint8).reshape(2, 3)), 256, -1, 2**63, True, 1e9, 0.1, -(10**30), math.nan,
        Decimal("1E+5"), {"a": [1, None]}, np.arange(3), math.nan, picture, [], [],
    ]  # fmt: skip
    found = expected("mds/encodings.expected.json")["cases"]
    assert len(found) == len(values)
    return {
        f"{i}-{case['encoding']}": (case["encoding"], value, case)
        for i, (case, value) in enumerate(zip(found, values, strict=True))
    }


@pytest.mark.parametrize("name", cases())
def test_values_are_encoded_as_the_peer_encodes_them(name: str) -> None:
    encoding, value, case = cases()[name]
    if case["encoding"] != "pil":
        assert as_json(value) == case["value"]
    encode, _ = encoder_of("x", encoding)
    if name == "11-ndarray":
        assert case["hex"] == "110402" + "0001" + "0002"  # big endian under a little-endian code: 256, 512
        assert encode(value).hex() == "110402" + "0100" + "0200"
    elif isinstance(case["hex"], dict):
        with pytest.raises(EncodeError, match="column 'x' of encoding"):
            MdsEncoder({"x": encoding}).encode({"x": value})
    else:
        assert encode(value).hex() == case["hex"]


def test_images_are_encoded_and_a_jpeg_from_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    picture = Image.new("RGB", (4, 3), (10, 20, 30))
    picture.save(tmp_path / "a.jpg", quality=30)
    columns = {"jpeg": "jpeg", "png": "png", "all": "list[png]"}
    with Image.open(tmp_path / "a.jpg") as opened:
        with MdsWriter(tmp_path / "out", columns) as writer:
            writer.write({"jpeg": opened, "png": picture, "all": [picture, picture]})
        with MdsWriter(tmp_path / "made", columns) as writer:
            writer.write({"jpeg": picture, "png": picture, "all": ()})
    (sample,) = mds_samples(tmp_path / "out")
    assert sample["jpeg"] == (tmp_path / "a.jpg").read_bytes()
    for data in (sample["png"], *sample["all"]):
        assert Image.open(io.BytesIO(data)).tobytes() == picture.tobytes()
    (made,) = mds_samples(tmp_path / "made")
    assert Image.open(io.BytesIO(made["jpeg"])).size == (4, 3)
    assert made["all"] == []


def other_file(image: Any) -> None:
    image.load()
    Image.new("RGB", (16, 16), (200, 0, 0)).save(image.filename)


def no_file(image: Any) -> None:
    image.load()
    Path(image.filename).unlink()


@pytest.mark.parametrize(
    ("change", "takes_file"),
    [
        (lambda image: image, True),
        (lambda image: image.load(), True),
        (lambda image: image.thumbnail((4, 4)), False),
        (lambda image: image.draft("L", (2, 2)), False),
        (lambda image: image.putpixel((0, 0), (255, 0, 0)), False),
        (other_file, False),
        (no_file, False),
    ],
    ids=["unread", "read", "smaller", "draft", "pixel", "other file", "no file"],
)
def test_a_jpeg_that_is_not_what_its_file_holds_is_encoded(
    change: Callable[[Any], object], takes_file: bool, tmp_path: Path
) -> None:
    Image.new("RGB", (16, 16), (10, 20, 30)).save(tmp_path / "a.jpg", quality=30)
    file = (tmp_path / "a.jpg").read_bytes()
    with Image.open(tmp_path / "a.jpg") as opened:
        change(opened)
        pieces, _ = MdsEncoder({"x": "jpeg"}).encode({"x": opened})
        written = Image.open(io.BytesIO(b"".join(pieces)[4:]))
        assert (b"".join(pieces)[4:] == file) == takes_file
        assert (written.mode, written.size) == (opened.mode, opened.size)
        assert max(abs(a - b) for a, b in zip(written.tobytes()[-3:], opened.tobytes()[-3:], strict=True)) < 40


@pytest.mark.parametrize(
    ("value", "number"), [(3.0, 3), (np.float32(3), 3), (np.bool_(True), 1), (np.array([3]), 3), (np.array([[3.0]]), 3)]
)
def test_what_the_peer_casts_to_a_whole_number_is_taken_where_it_is_one(value: Any, number: int) -> None:
    for encoding in ("int8", "uint16", "int64"):
        assert encoder_of("x", encoding)[0](value) == np.dtype(encoding).type(number).tobytes()


@pytest.mark.parametrize("value", [3.5, np.array([3, 4]), np.array([3.5]), "3", math.inf, np.ma.masked_array([1], mask=[True])])
def test_what_is_no_whole_number_is_refused_where_the_peer_cuts_it(value: Any) -> None:
    with pytest.raises(EncodeError, match="column 'x' of encoding 'int32'"):
        MdsEncoder({"x": "int32"}).encode({"x": value})


def test_what_an_encoding_has_no_place_for_is_refused() -> None:
    coloured = Image.new("P", (2, 2))
    coloured.putpalette([9, 8, 7] * 256)
    grey = Image.new("P", (2, 2), 7)
    with pytest.raises(EncodeError, match="9223372036854775808 is beyond 64 bits with a sign: give the column 'uint64'"):
        MdsEncoder({"x": "int"}).encode({"x": 1 << 63})
    with pytest.raises(EncodeError, match=r"palette: give image.convert\('RGB'\)"):
        MdsEncoder({"x": "pil"}).encode({"x": coloured})
    pieces, _ = MdsEncoder({"x": "pil"}).encode({"x": grey})
    assert b"".join(pieces).endswith(grey.tobytes())
    masked = np.ma.masked_array([1, 2], mask=[False, True])  # [2]
    for encoding in ("ndarray", "ndarray:int64", "ndarray:int64:2"):
        with pytest.raises(EncodeError, match="mask"):
            MdsEncoder({"x": encoding}).encode({"x": masked})
    for name, value in (("npy", masked), ("npz", {"a": masked})):
        with pytest.raises(EncodeError, match="mask"):
            PartEncoder().encode({"__key__": "a", name: value})


def test_a_sample_that_does_not_fit_is_left_out_and_the_next_one_is_written(tmp_path: Path) -> None:
    with MdsWriter(tmp_path, {"a": "int", "b": "str", "c": "uint8"}) as writer:
        writer.write({"a": np.int64(1), "b": "x", "c": np.uint8(3), "more": object()})
        with pytest.raises(EncodeError, match="lacks the column 'b'; it has a, c"):
            writer.write({"a": 1, "c": 1})
        with pytest.raises(EncodeError, match="column 'a' of encoding 'int', a value of type str"):
            writer.write({"a": "1", "b": "x", "c": 1})
        with pytest.raises(EncodeError, match="it has 2 bytes, and all values of the column have 8"):
            writer.write({"a": b"12", "b": "x", "c": 1})
        with pytest.raises(EncodeError, match="column 'c' of encoding 'uint8'"):
            writer.write({"a": 1, "b": "x", "c": 256})
        writer.write({"a": 2, "b": "y", "c": 4})
    assert [sample["a"] for sample in mds_samples(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("columns", "settings", "message"),
    [
        ({}, {}, "give names and encodings"),
        ({"x": "str32"}, {}, "column 'x': encoding 'str32' is unknown"),
        ({"x": "ndarray:int16:0"}, {}, "encoding 'ndarray:int16:0' is unknown"),
        ({"x": "pkl"}, {}, "runs any code where it is read"),
        (SMALL, {"compression": "lz4"}, "compression='lz4' is unknown"),
        (SMALL, {"compression": "zstd:40"}, "levels of zstd are 1 to 22"),
        (SMALL, {"compression": "snappy:1"}, "snappy has no levels"),
        (SMALL, {"hashes": ["sha256", "md5"]}, "give a sorted list"),
        (SMALL, {"hashes": ["crc99"]}, "'crc99', which is unknown"),
        (SMALL, {"compression": ["zstd"]}, r"compression=\['zstd'\] is unknown"),
        (SMALL, {"hashes": "sha1"}, r"hashes='sha1': give a sorted list of names, each once, such as \['sha1'\]"),
        (SMALL, {"hashes": 5}, "hashes=5 is no list"),
        (SMALL, {"allow_pickle": "false"}, "allow_pickle='false' is no bool: give True or False"),
        (SMALL, {"options": {"exist_ok": True}}, r"options={'exist_ok': True} are no WriteOptions"),
        (SMALL, {"size_limit": 2**32}, "offsets have 32 bits"),
        (SMALL, {"size_limit": "much"}, "size_limit='much' is not a size"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(
    columns: dict[str, str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        MdsWriter(tmp_path / "out", columns, **settings)
    assert not (tmp_path / "out").exists()


def test_values_that_hold_a_separator_are_refused(tmp_path: Path) -> None:
    with CsvWriter(tmp_path / "out", COLUMNS) as writer:
        with pytest.raises(EncodeError, match=r"^column 's' holds a separator or a newline, and nothing is quoted"):
            writer.write({"s": "a,b", "n": 1, "f": 1.0})
        with pytest.raises(EncodeError, match=r"^a value is no Unicode text"):
            writer.write({"s": "\udc80", "n": 1, "f": 1.0})
        with pytest.raises(EncodeError, match="column 'f', a value of type int: expected float"):
            writer.write({"s": "a", "n": 1, "f": 1})
        writer.write({"s": "a", "n": 1, "f": 1.0})
    with pytest.raises(ConfigError, match="the name of column 'a,b' holds the separator"):
        CsvWriter(tmp_path / "other", {"a,b": "str"})
    with pytest.raises(OutputExistsError):
        CsvWriter(tmp_path / "out", COLUMNS, options=WriteOptions())


def test_a_value_that_makes_another_separator_with_the_one_behind_it_is_refused(tmp_path: Path) -> None:
    with XsvWriter(tmp_path / "out", {"a": "str", "b": "str"}, separator="||") as writer:
        with pytest.raises(EncodeError, match="ends like the separator"):
            writer.write({"a": "x|", "b": "y"})
        writer.write({"a": "x", "b": "|y|"})
    with StreamingDataset(str(tmp_path / "out"), str(tmp_path / "cache")) as dataset:
        assert [(row["a"], row["b"]) for row in dataset] == [("x", "|y|")]


def test_samples_beyond_memory_go_through_a_file_and_give_the_same_shard(tmp_path: Path) -> None:
    buffer = SampleBuffer(tmp_path / "spilled", memory_bytes=10)
    parts = [bytes([n]) * n for n in range(12)]
    for part in parts:
        buffer.add([part], len(part))
    assert (tmp_path / "spilled").exists()
    assert b"".join(buffer.chunks()) == b"".join(buffer.chunks()) == b"".join(parts)
    buffer.add([b"end"], 3)
    assert b"".join(buffer.chunks()) == b"".join(parts) + b"end"
    buffer.close()
    assert not (tmp_path / "spilled").exists()
