"""ZIP archives: read back by `zipfile` and by our reader."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import EncodeError
from sqlstream.write import TarWriter, WriteOptions, ZipWriter
from tests.write.goldens import files_of


def samples() -> list[dict[str, Any]]:
    return [{"__key__": f"é/{n}", "jpg": bytes([n]) * 99, "txt": "text " * 50, "json": {"n": n}} for n in range(5)]


def write(out: Path, **settings: Any) -> None:
    with ZipWriter(out, **settings) as writer:
        for sample in samples():
            writer.write(sample)


def test_members_are_what_zipfile_reads_with_media_stored_and_text_deflated(tmp_path: Path) -> None:
    write(tmp_path / "a", max_samples=2)
    write(tmp_path / "b", max_samples=2)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    found: dict[str, bytes] = {}
    for path in sorted((tmp_path / "a").iterdir()):
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            for info in archive.infolist():
                found[info.filename] = archive.read(info)
                assert (info.compress_size < info.file_size) == info.filename.endswith("txt")
                assert not info.flag_bits & 8  # no descriptor
    assert len(found) == 15
    assert (found["é/3.jpg"], found["é/3.json"]) == (b"\3" * 99, b'{"n": 3}')
    assert len(list((tmp_path / "a").iterdir())) == 3


def test_our_reader_gives_the_samples_of_zips_back(tmp_path: Path) -> None:
    write(tmp_path / "out", size_limit=1000)
    with StreamingDataset(str(tmp_path / "out" / "*.zip"), str(tmp_path / "cache")) as dataset:
        assert [(row["jpg"], json.loads(row["json"])) for row in dataset] == [
            (sample["jpg"], sample["json"]) for sample in samples()
        ]


def test_a_key_that_comes_again_in_an_archive_is_refused_and_may_come_in_the_next(tmp_path: Path) -> None:
    with ZipWriter(tmp_path, max_samples=2, options=WriteOptions()) as writer:
        writer.write({"__key__": "a", "txt": "1"})
        with pytest.raises(EncodeError, match="the key 'a' comes twice in one archive"):
            writer.write({"__key__": "a", "txt": "2"})
        writer.write({"__key__": "b", "txt": "3"})
        writer.write({"__key__": "c", "txt": "4"})
        writer.write({"__key__": "a", "txt": "5"})
    assert len(list(tmp_path.glob("*.zip"))) == 2


@pytest.mark.parametrize("writer_of", [ZipWriter, TarWriter])
@pytest.mark.parametrize(
    "wrong", [{"__key__": "b\0x", "txt": "2"}, {"__key__": "é\udc80", "txt": "2"}, {"__key__": "b", 1: b"2"}]
)
def test_a_name_that_no_archive_holds_is_refused_and_the_next_sample_is_written(
    writer_of: Any, wrong: dict[Any, Any], tmp_path: Path
) -> None:
    with writer_of(tmp_path / "out") as writer:
        writer.write({"__key__": "a", "txt": "1"})
        with pytest.raises(EncodeError, match="name it"):
            writer.write(wrong)
        writer.write({"__key__": "c", "txt": "3"})
        assert writer.num_samples == 2
    (shard,) = [path for path in (tmp_path / "out").iterdir() if path.suffix in (".zip", ".tar")]
    with StreamingDataset(str(shard), str(tmp_path / "cache")) as dataset:
        assert [row["txt"] for row in dataset] == [b"1", b"3"]


@pytest.mark.parametrize("key", ["__MACOSX/a", "d/"])
def test_a_key_that_readers_of_zip_pass_over_is_refused(key: str, tmp_path: Path) -> None:
    with ZipWriter(tmp_path) as writer, pytest.raises(EncodeError, match=f"sample {key!r}: readers of ZIP pass over"):
        writer.write({"__key__": key, "txt": "1"})


def test_a_name_that_is_too_long_for_a_zip_is_refused_and_the_next_sample_is_written(tmp_path: Path) -> None:
    with ZipWriter(tmp_path) as writer:
        with pytest.raises(EncodeError, match="a name of 65536 bytes, and ZIP has 65535"):
            writer.write({"__key__": "é" * 32766, "txt": "1"})
        writer.write({"__key__": "c", "txt": "3"})
    (shard,) = tmp_path.iterdir()
    with zipfile.ZipFile(shard) as archive:
        assert archive.namelist() == ["c.txt"]
