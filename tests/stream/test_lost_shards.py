"""Shards that go, or become something else, after they were indexed: an error names them; for local ones `on_error` applies."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sqlstream.errors import CacheError, ObjectNotFoundError, SourceChangedError, SqlStreamError, StorageError
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.write import ParquetWriter, ZipWriter
from tests.stream.shards import content, opened, samples, serve, tar_of

GONE = r"is gone since it was indexed: put it back \(is its disk mounted\?\)"


def of_tars(folder: Path) -> str:
    for shard in range(2):
        (folder / f"s-{shard}.tar").write_bytes(tar_of(samples(shard, 2)))
    return str(folder / "s-*.tar")


def of_packed_tars(folder: Path) -> str:
    for shard in range(2):
        (folder / f"s-{shard}.tar.gz").write_bytes(gzip.compress(tar_of(samples(shard, 2))))
    return str(folder / "s-*.tar.gz")


def of_parquet(folder: Path) -> str:
    with ParquetWriter(folder, media={"x": "Image"}, pattern="s-%d.parquet", size_limit=110_000) as writer:
        for n in range(4):
            writer.write({"x": bytes([n]) * 50_000})
    return str(folder / "s-*.parquet")


def of_named_members(folder: Path) -> str:
    with ZipWriter(folder, max_samples=2, pattern="s-%d.zip") as writer:
        for n in range(4):
            writer.write({"__key__": str(n), "bin": b"x"})
    rows = "".join(f"zip://{n}.bin::{folder}/s-{n // 2}.zip\n" for n in range(4))
    (folder / "t.csv").write_text(f"u\n{rows}")
    return str(folder / "t.csv")


@pytest.mark.parametrize("make", [of_tars, of_packed_tars, of_parquet, of_named_members])
def test_a_shard_that_is_gone_is_named_and_on_error_says_what_becomes_of_its_samples(
    make: Callable[[Path], str], tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    src = make(tmp_path / "d")
    columns = ["u"] if src.endswith(".csv") else None
    (path,) = (path for path in (tmp_path / "d").iterdir() if path.name.startswith("s-1."))
    for on_error in ("raise", "skip"):
        with opened(src, tmp_path, on_error=on_error, max_failure_ratio=1.0, columns_to_download=columns) as dataset:
            content = path.read_bytes()
            status = path.stat()
            path.unlink()
            with pytest.raises(ObjectNotFoundError, match=rf"{path.name} {GONE}"):
                dataset[2]
            if on_error == "raise":
                with pytest.raises(ObjectNotFoundError, match=GONE):
                    list(dataset)
            else:
                assert [sample["__row__"] for sample in dataset] == [0, 1]
            path.write_bytes(content)  # it is put back, as the cure says
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            assert len(list(dataset)) == 4


@pytest.mark.parametrize(
    ("become", "error"),
    [
        (Path.mkdir, SourceChangedError),
        (os.mkfifo, SourceChangedError),
        (lambda path: path.symlink_to(path.name), StorageError),
    ],
    ids=["directory", "pipe", "loop"],
)
def test_what_is_no_file_any_more_is_an_error_and_never_waited_for(
    become: Callable[[Path], None], error: type[SqlStreamError], tmp_path: Path
) -> None:
    src = of_tars(tmp_path)
    path = tmp_path / "s-1.tar"
    with opened(src, tmp_path, on_error="raise") as dataset:
        path.unlink()
        become(path)
        with pytest.raises(error, match=r"s-1\.tar (changed|cannot be read) since it was indexed"):
            dataset[2]
    with pytest.raises(StorageError, match=r"the source .*s-1\.tar cannot be read"):
        opened(str(path), tmp_path)


def cut(path: Path) -> None:
    os.truncate(path, 600)


@pytest.mark.parametrize(("harm", "how"), [(Path.unlink, "removed"), (cut, "cut")])
def test_a_cached_shard_that_another_program_harms_while_it_is_in_use_is_an_error_that_blames_it(
    harm: Callable[[Path], None], how: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    """Not the source, which is as it was; and the next dataset fetches it anew."""
    expected = serve(server, 1, 8, num_bytes=300_000)
    with opened(f"{server.url}/data/s-000.tar", tmp_path, shards="whole") as dataset:
        streamed = iter(dataset)
        next(streamed)
        for path in (tmp_path / "cache/data").glob("*/*"):
            harm(path)
        with pytest.raises(CacheError, match=rf"cache/data/.*, which holds .*s-000\.tar or a part of it, was {how} by another"):
            list(streamed)
    with opened(f"{server.url}/data/s-000.tar", tmp_path, shards="whole") as dataset:
        assert [content(sample) for sample in dataset] == expected
