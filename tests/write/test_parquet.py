"""Parquet with content inside: read back by pyarrow, and by our reader in place."""

from __future__ import annotations

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


def test_a_schema_decides_what_fits(tmp_path: Path) -> None:
    schema: pa.Schema = pa.table({"n": pa.array([], pa.int8()), "s": pa.array([], pa.string())}).schema
    with ParquetWriter(tmp_path / "out", schema=schema) as writer:
        writer.write({"n": 1})
        with pytest.raises(EncodeError, match="the sample has 'm', which is no column: the columns are n, s"):
            writer.write({"m": 1})
    assert pq.read_table(tmp_path / "out").schema.equals(schema)
    with pytest.raises(EncodeError, match="do not fit the schema"), ParquetWriter(tmp_path / "wrong", schema=schema) as writer:
        writer.write({"n": 1000})
    with pytest.raises(EncodeError, match="column 'n' has no value in the first 1 rows: give a schema"):  # noqa: SIM117
        with ParquetWriter(tmp_path / "none") as writer:
            writer.write({"n": None})
    with pytest.raises(ConfigError, match="give one of Image, Audio, Video"):
        ParquetWriter(tmp_path / "x", media={"a": "Picture"})
    with pytest.raises(ConfigError, match="row_group_bytes=0"):
        ParquetWriter(tmp_path / "x", row_group_bytes=0)
