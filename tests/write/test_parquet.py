"""Parquet with content inside: read back by pyarrow, and by our reader in place."""

from __future__ import annotations

import datetime as dt
import io
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, EncodeError
from sqlstream.write import ParquetWriter, WriteOptions
from tests.write.goldens import files_of


def samples(number: int = 10) -> list[dict[str, Any]]:
    return [{"image": bytes([n]) * 1000, "raw": bytes([n, n]), "label": n, "words": ["a", str(n)]} for n in range(number)]


def write(out: Path, **settings: Any) -> None:
    options = settings.pop("options", WriteOptions())
    with ParquetWriter(out, media={"image": "Image"}, options=options, **settings) as writer:
        for sample in islice(samples(), writer.num_samples, None):
            writer.write(sample)


def test_rows_are_what_pyarrow_reads_and_content_is_neither_compressed_nor_in_a_dictionary(tmp_path: Path) -> None:
    write(tmp_path, row_group_bytes=2500, size_limit=6000)
    table = pq.read_table(tmp_path)
    assert table.to_pylist() == [{**row, "image": {"bytes": row["image"], "path": None}} for row in samples()]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-000000.parquet", "shard-000001.parquet"]
    metadata = pq.read_metadata(tmp_path / "shard-000000.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [2, 2, 1]
    columns = {metadata.row_group(0).column(n).path_in_schema: metadata.row_group(0).column(n) for n in range(5)}
    for name in ("image.bytes", "raw"):
        assert columns[name].compression == "UNCOMPRESSED"
        assert set(columns[name].encodings) == {"PLAIN", "RLE"}
        assert columns[name].has_offset_index
    assert columns["label"].compression == "ZSTD"


def test_our_reader_reads_content_in_place(tmp_path: Path) -> None:
    write(tmp_path / "out", row_group_bytes=2500)
    with StreamingDataset(str(tmp_path / "out" / "*.parquet"), str(tmp_path / "cache")) as dataset:
        rows = list(dataset)
        assert [(row["image"]["bytes"], row["label"]) for row in rows] == [(row["image"], row["label"]) for row in samples()]
        assert dataset[3]["image"] == {"bytes": b"\3" * 1000, "path": None}


def test_a_resumed_writing_has_the_schema_of_the_first_and_gives_the_same_files(tmp_path: Path) -> None:
    write(tmp_path / "expected", size_limit=3000)
    writer = ParquetWriter(tmp_path / "out", media={"image": "Image"}, size_limit=3000)
    for sample in samples(7):
        writer.write(sample)
    writer.cancel()
    write(tmp_path / "out", size_limit=3000, options=WriteOptions(resume=True))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")


def test_values_of_numpy_and_pillow_are_written_and_others_are_refused(tmp_path: Path) -> None:
    picture = Image.new("RGB", (2, 2))
    with ParquetWriter(tmp_path, media={"image": "Image"}) as writer:
        writer.write({"image": picture, "n": np.int32(3), "v": np.arange(2.0), "b": bytearray(b"x")})
        writer.write({"image": {"bytes": b"x", "path": "x.png"}, "n": None})
        writer.write({"image": None})
        with pytest.raises(EncodeError, match="column 'image', Image: a value of type int"):
            writer.write({"image": 1})
    first, second, third = pq.read_table(tmp_path).to_pylist()
    assert (first["n"], first["v"], first["b"], first["image"]["bytes"][:4]) == (3, [0.0, 1.0], b"x", b"\x89PNG")
    assert (second["image"], third["image"], third["n"]) == ({"bytes": b"x", "path": "x.png"}, None, None)


@pytest.mark.parametrize("mode", "1 L LA P PA RGB RGBA CMYK YCbCr LAB I I;16 F".split())
def test_images_of_every_mode_are_written_with_their_pixels(mode: str, tmp_path: Path) -> None:
    whole = Image.linear_gradient("L").resize((7, 5)).convert("RGB")
    through = {"PA": whole.quantize(8), "P": whole.quantize(8), "I;16": whole.convert("L")}
    image = through.get(mode, whole).convert(mode)
    with ParquetWriter(tmp_path, media={"image": "Image"}) as writer:
        writer.write({"image": image})
    [row] = pq.read_table(tmp_path).to_pylist()
    back = Image.open(io.BytesIO(row["image"]["bytes"]))
    assert (back.mode, back.convert("RGB").tobytes()) == (mode, image.convert("RGB").tobytes())


def test_an_image_keeps_what_turns_it_and_one_that_no_file_holds_is_named(tmp_path: Path) -> None:
    turned, exif = io.BytesIO(), Image.Exif()
    exif[274] = 6
    Image.new("RGB", (7, 5)).save(turned, "JPEG", exif=exif)
    with ParquetWriter(tmp_path, media={"image": "Image"}) as writer:
        writer.write({"image": Image.open(turned)})
        with pytest.raises(EncodeError, match="column 'image', Image: cannot write mode HSV"):
            writer.write({"image": Image.new("HSV", (2, 2))})
    [row] = pq.read_table(tmp_path).to_pylist()
    assert Image.open(io.BytesIO(row["image"]["bytes"])).getexif()[274] == 6


def test_a_schema_decides_what_fits(tmp_path: Path) -> None:
    schema: pa.Schema = pa.table({"n": pa.array([], pa.int8()), "s": pa.array([], pa.string())}).schema
    with ParquetWriter(tmp_path / "out", schema=schema) as writer:
        writer.write({"n": 1})
        with pytest.raises(EncodeError, match="the sample has 'm', which is no column: the columns are n, s"):
            writer.write({"m": 1})
    assert pq.read_table(tmp_path / "out").schema.equals(schema)
    with (
        pytest.raises(EncodeError, match="values that are none of int8"),
        ParquetWriter(tmp_path / "wrong", schema=schema) as writer,
    ):
        writer.write({"n": 1000})
    with pytest.raises(EncodeError, match="column 'n' has no value in the first 1 rows: give a schema"):  # noqa: SIM117
        with ParquetWriter(tmp_path / "none") as writer:
            writer.write({"n": None})
    for option, given, cure in (
        ("schema", {"x": "int64"}, r"give pyarrow\.schema"),
        ("media", ["x"], "give names of columns"),
        ("types", 5, "give names"),
    ):
        with pytest.raises(ConfigError, match=rf"{option}=.* is no.*: {cure}"):
            ParquetWriter(tmp_path / "wrong", **{option: given})  # type: ignore[arg-type]  # refused
    with pytest.raises(ConfigError, match="give one of Image, Audio, Video"):
        ParquetWriter(tmp_path / "x", media={"a": "Picture"})
    with pytest.raises(ConfigError, match="row_group_bytes=0"):
        ParquetWriter(tmp_path / "x", row_group_bytes=0)


NAIVE, AWARE = dt.datetime(2020, 1, 1, 5), dt.datetime(2020, 1, 1, 5, tzinfo=dt.UTC)
DAY, HALF = dt.date(2020, 1, 1), dt.timedelta(microseconds=1)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (1, 2.5),
        ([1], [2.5]),
        (NAIVE, AWARE),
        (AWARE, NAIVE),
        (NAIVE, 5),
        ([DAY], [NAIVE]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([{"a": {"b": 1}}], [{"a": {"c": 2}}]),
        ("a", b"b"),
        (b"b", "a"),
        (np.datetime64("2020-01-01", "us"), np.datetime64("2020-01-01T00:00:00.123456789")),
    ],
)
def test_a_later_row_group_is_never_cut_to_the_types_of_the_first(first: object, then: object, tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path, row_group_bytes=1)
    writer.write({"x": first})
    writer.write({"x": then})
    with pytest.raises(EncodeError, match="give"):
        writer.finish()
    assert not list(tmp_path.glob("*.parquet"))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), NAIVE),
        (pa.timestamp("s"), NAIVE + HALF),
        (pa.timestamp("us", "UTC"), NAIVE),
        (pa.duration("s"), HALF),
        (pa.time32("s"), dt.time(1, 1, 1, 5)),
        (pa.struct([("a", pa.int64())]), {"a": 1, "b": 2}),
        (pa.int8(), 0.5),
        (pa.uint64(), 0.5),
        (pa.float64(), 2**53 + 1),
        (pa.string(), b"a"),
        (pa.list_(pa.string()), [b"a"]),
        (pa.struct([("a", pa.binary())]), {"a": "a"}),
        (pa.map_(pa.string(), pa.int64()), [("a", 0.5)]),
        (pa.map_(pa.string(), pa.date32()), [("a", NAIVE)]),
        (pa.list_(pa.uint64()), [np.float32(0.5)]),
        (pa.list_(pa.list_(pa.float64())), [np.ma.array([1.0, 2.0], mask=[False, True])]),
        (pa.string(), "\ud800"),
        (pa.int64(), 2**64),
    ],
)
def test_a_value_that_a_schema_would_cut_is_refused(kind: pa.DataType, value: object, tmp_path: Path) -> None:
    with pytest.raises(EncodeError), ParquetWriter(tmp_path, schema=pa.schema([("x", kind)])) as writer:
        writer.write({"x": value})


def test_values_that_a_schema_holds_are_written_as_they_are(tmp_path: Path) -> None:
    fields = {"n": pa.uint64(), "at": pa.timestamp("s", "UTC"), "some": pa.struct([("a", pa.date32()), ("b", pa.int8())])}
    row = {"n": 2**64 - 1, "at": AWARE, "some": {"a": DAY, "b": None}, "pairs": [("a", 1)], "far": np.datetime64(1, "ns")}
    schema = pa.schema([*fields.items(), ("pairs", pa.map_(pa.string(), pa.int64())), ("far", pa.timestamp("ns"))])
    with ParquetWriter(tmp_path, schema=schema) as writer:
        writer.write(row)
        writer.write({"n": None})
    found = pq.read_table(tmp_path)
    assert found["far"].cast(pa.int64()).to_pylist() == [1, None]
    assert found.drop_columns(["far"]).to_pylist()[0] == {name: value for name, value in row.items() if name != "far"}
    with pytest.raises(EncodeError, match="no column"), ParquetWriter(tmp_path / "none") as writer:
        writer.write({})
    with pytest.raises(EncodeError, match="no child field"), ParquetWriter(tmp_path / "empty") as writer:
        writer.write({"x": {}})
    strict = pa.schema([pa.field("x", pa.int64(), nullable=False)])
    with pytest.raises(EncodeError, match="not nullable"), ParquetWriter(tmp_path / "strict", schema=strict) as writer:
        writer.write({"x": None})


def test_large_integers_and_maps_may_be_within_anything(tmp_path: Path) -> None:
    large, pairs = pa.struct([("n", pa.uint64()), ("day", pa.date32())]), pa.map_(pa.string(), pa.binary())
    row = {"large": {"n": 2**64 - 1, "day": DAY}, "pairs": [("a", b"b")], "both": [{"pairs": [("a", b"b")]}]}
    schema = pa.schema([("large", large), ("pairs", pairs), ("both", pa.list_(pa.struct([("pairs", pairs)])))])
    with ParquetWriter(tmp_path / "schema", schema=schema) as writer:
        writer.write(row)
    with ParquetWriter(tmp_path / "types", types={field.name: field.type for field in schema}) as writer:
        writer.write(row)
    assert [pq.read_table(tmp_path / place).to_pylist() for place in ("schema", "types")] == [[row], [row]]


@pytest.mark.parametrize("has_schema", [True, False])
def test_nanoseconds_of_samples_are_written(tmp_path: Path, *, has_schema: bool) -> None:
    counts = [1577847845000000123, None, 1577847845000000000, -1]
    kinds = {"here": pa.timestamp("ns", "Europe/Berlin"), "there": pa.timestamp("ns"), "long": pa.duration("ns")}
    table = pa.table({name: pa.array(counts, kind) for name, kind in kinds.items()})
    pq.write_table(table, tmp_path / "t.parquet")
    with StreamingDataset(str(tmp_path / "t.parquet"), str(tmp_path / "cache")) as dataset:
        schema = dataset.schema if has_schema else None
        with ParquetWriter(tmp_path / "out", schema=schema) as writer:
            for sample in dataset:
                writer.write({name: sample[name] for name in kinds})
    assert pq.read_table(tmp_path / "out").equals(table)


def test_what_is_filled_again_for_each_sample_is_written_as_it_was(tmp_path: Path) -> None:
    row: dict[str, Any] = {"words": [0], "some": {"n": 0}, "array": np.zeros(1)}
    with ParquetWriter(tmp_path) as writer:
        for number in range(3):
            row["words"][0] = row["some"]["n"] = row["array"][0] = number  # []
            writer.write(row)
    rows = pq.read_table(tmp_path).to_pylist()
    assert rows == [{"words": [n], "some": {"n": n}, "array": [float(n)]} for n in range(3)]
