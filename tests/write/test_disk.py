"""A full disk, as a limit on the size of files has it: an error names it and the cure, and the writing goes on then."""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cli.main import main
from sqlstream.errors import StorageError
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.testing.storage import MemoryStore
from sqlstream.write import MdsWriter, ParquetWriter, TarWriter, WriteOptions, ZipWriter, merge
from sqlstream.write.base.writer import SampleWriter
from tests.write.goldens import files_of


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Have no file of this process grow beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def write(kind: str, out: Path | str, options: WriteOptions, num_samples: int = 30) -> None:
    writer: SampleWriter[object]
    if kind == "zip":
        writer = ZipWriter(out, max_samples=20, options=options)  # type: ignore[assignment]
    elif kind == "parquet":
        writer = ParquetWriter(out, size_limit=20_000, row_group_bytes=5000, options=options)  # type: ignore[assignment]
    elif kind == "energon":
        writer = TarWriter(out, max_samples=1, extras=("energon",), options=options)  # type: ignore[assignment]
    else:
        writer = MdsWriter(out, {"bin": "bytes"}, size_limit=20_000, options=options)  # type: ignore[assignment]
    with writer:
        for n in range(writer.num_samples, num_samples):
            key = {"__key__": str(n)} if kind in ("zip", "energon") else {}
            writer.write({**key, "bin": bytes([n]) * 1000})


@pytest.mark.parametrize("kind", ["zip", "parquet", "mds"])
def test_a_full_disk_within_a_shard_is_named_and_the_writing_goes_on_when_there_is_room(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path / "expected", WriteOptions())
    with largest_file(12_000), pytest.raises(StorageError, match=r"out cannot be written .*: free space there, .* and resume"):
        write(kind, tmp_path / "out", WriteOptions())
    assert not [name for name in os.listdir(tmp_path / "out") if name.endswith(".part")]
    write(kind, tmp_path / "out", WriteOptions(resume=True))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")


def test_a_full_disk_below_nv_meta_is_named_and_it_is_made_when_there_is_room(tmp_path: Path) -> None:
    write("energon", tmp_path / "expected", WriteOptions(), 3)
    with largest_file(10_240), pytest.raises(StorageError, match=r"out cannot be written \(.*SQLite: .* and resume"):
        write("energon", tmp_path / "out", WriteOptions(), 3)
    write("energon", tmp_path / "out", WriteOptions(resume=True), 3)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")


def test_a_full_disk_below_a_merged_index_leaves_the_one_that_was_there(tmp_path: Path) -> None:
    for number in range(2):
        write("mds", tmp_path, WriteOptions(part=(number, 2)))
    merge(tmp_path)
    before = files_of(tmp_path)
    with largest_file(100), pytest.raises(StorageError, match=r"index\.json cannot be written .*: free space there"):
        merge(tmp_path)
    assert files_of(tmp_path) == before


def test_a_temporary_directory_that_takes_nothing_is_named_where_shards_wait_for_their_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = WriteOptions(remote=MemoryStore({}))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    message = rf"{tmp_path} cannot be written .*wait there for their upload: .* TMPDIR name a directory"
    with largest_file(12_000), pytest.raises(StorageError, match=message):
        write("mds", "s3://b/out", options)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"gone cannot be written .* TMPDIR name a directory"):
        write("mds", "s3://b/other", options)


def test_a_temporary_directory_that_takes_nothing_is_no_damage_of_the_shard_that_is_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with FaultyHttpServer({"/s.tar": bytes(20_480)}) as server:
        assert main(["shards", "verify", f"{server.url}/s.tar"]) == 2
    assert "gone cannot be written" in capsys.readouterr().err
