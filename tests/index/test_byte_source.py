"""Bytes by range: the same of a local file, a remote one, and pieces; every binary format reads any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.index.sources.base.access import local_file
from sqlstream.index.sources.base.base import PLAIN, TableFile
from sqlstream.index.sources.base.byte_source import ByteFile, ByteSource, LocalBytes, Pieces, RemoteBytes, bytes_of
from sqlstream.index.sources.formats.by_extension import FORMATS, open_table
from tests.index.sources import FolderReader, NoReader

DATA = bytes(range(256)) * 10
TABLE = pa.table({"n": list(range(1000)), "text": [f"text {i}" for i in range(1000)]})


def local(path: Path) -> ByteSource:
    return bytes_of(local_file(path), NoReader())


def remote(path: Path) -> ByteSource:
    return bytes_of(replace(local_file(path), url=f"s3://bucket/{path.name}"), FolderReader(path.parent))


def pieces(path: Path) -> ByteSource:
    """One piece that is all of it, cut in none: what lies between pieces cannot be read."""
    size = path.stat().st_size
    return Pieces([(0, size)], [path], size)


SOURCES: dict[str, Callable[[Path], ByteSource]] = {"local": local, "remote": remote, "pieces": pieces}


@pytest.fixture(params=SOURCES)
def open_source(request: pytest.FixtureRequest) -> Callable[[Path], ByteSource]:
    return SOURCES[request.param]


def test_ranges_are_those_of_the_file_and_end_with_it(open_source: Callable[[Path], ByteSource], tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(DATA)
    source = open_source(path)
    assert source.size_bytes == len(DATA)
    for offset, num_bytes in ((0, 10), (100, 1000), (len(DATA) - 5, 5), (len(DATA) - 5, 50), (len(DATA), 5)):
        assert source.read_at(offset, num_bytes) == DATA[offset : offset + num_bytes]


def test_a_file_of_them_is_read_by_python_and_arrow(open_source: Callable[[Path], ByteSource], tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(DATA)
    file = ByteFile(open_source(path))
    assert (file.seek(-6, 2), file.read(3), file.tell()) == (len(DATA) - 6, DATA[-6:-3], len(DATA) - 3)
    assert (file.seek(5), file.seek(5, 1), file.read(2)) == (5, 10, DATA[10:12])
    file.seek(0)
    assert file.read() == DATA
    for is_mapped in (False, True):
        with open_source(path).open(is_mapped=is_mapped) as opened:
            assert opened.size() == len(DATA)
            assert opened.read() == DATA


def test_kinds_of_places_have_kinds_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    assert (type(local(tmp_path / "x")), type(remote(tmp_path / "x"))) == (LocalBytes, RemoteBytes)


def write_arrow(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, TABLE.schema) as writer:
        writer.write_table(TABLE)


WRITE: dict[str, Callable[[Path], object]] = {
    ".parquet": lambda path: pq.write_table(TABLE, path, row_group_size=100),
    ".arrow": write_arrow,
    ".csv": lambda path: path.write_text("n,text\n" + "".join(f"{i},text {i}\n" for i in range(1000))),
    ".tsv": lambda path: path.write_text("n\ttext\n" + "".join(f"{i}\ttext {i}\n" for i in range(1000))),
    ".jsonl": lambda path: path.write_text("".join(f'{{"n": {i}, "text": "text {i}"}}\n' for i in range(1000))),
    ".json": lambda path: path.write_text("[" + ",".join(f'{{"n": {i}, "text": "text {i}"}}' for i in range(1000)) + "]"),
}


def rows_in(table: TableFile) -> list[dict[str, object]]:
    names = table.schema().names
    return [row for batch in table.batches(names) for row in batch.to_pylist()]


@pytest.mark.parametrize("extension", WRITE)
def test_every_format_reads_bytes_by_range(open_source: Callable[[Path], ByteSource], tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"t{extension}"
    WRITE[extension](path)
    table = open_table(open_source(path), str(path), PLAIN)
    assert rows_in(table) == TABLE.to_pylist()


def test_the_formats_above_are_all() -> None:
    same = {".ndjson": ".jsonl", ".feather": ".arrow", ".ipc": ".arrow"}
    assert {same.get(extension, extension) for extension in FORMATS} == WRITE.keys()


def test_a_remote_parquet_file_is_not_read_whole_for_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"blob": [bytes([i]) * 100_000 for i in range(20)]}), path, use_dictionary=False, compression="none"
    )
    reader = FolderReader(tmp_path)
    source = bytes_of(replace(local_file(path), url="s3://bucket/t.parquet"), reader)
    assert open_table(source, "s3://bucket/t.parquet", PLAIN).schema().names == ["blob"]
    assert reader.num_bytes < 200_000 < path.stat().st_size
