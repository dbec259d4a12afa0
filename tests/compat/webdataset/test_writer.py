"""`TarWriter` and `ShardWriter`: what they write is read back, by `tarfile` and by the drop-in."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sqlstream.compat.webdataset as wds
from sqlstream.errors import ConfigError, EncodeError
from tests.compat.webdataset.kit import UNPICKLE, opened

THEIRS = "1faa79df6abf56cea81ce1c30b75c7c739e3b0ba90b0dc79ff98f68b4170bcf8"
"""SHA-256 of what `tenbin.encode_buffer` of webdataset 1.0.2 makes of two arrays."""

SAMPLE: dict[str, Any] = {
    "__key__": "a/1",
    "cls": 7,
    "txt": "ünïcode",
    "json": {"box": [1, None]},
    "npy": np.arange(3),
    "bin": b"\0\1",
    "pyd": {"any": "object"},
    "pth": torch.ones(2),  # [2]
    "txt.gz": "packed",
}


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with wds.TarWriter(str(path)) as writer:
        assert writer.write(SAMPLE) > 0
        assert not path.exists(), "it has its name once it is whole"
    with opened(str(path), tmp_path) as dataset:
        (found,) = dataset.decode(*UNPICKLE)
    wanted = {name: value for name, value in SAMPLE.items() if name not in ("npy", "pth")}
    assert {name: found[name] for name in wanted} == wanted
    assert np.array_equal(found["npy"], SAMPLE["npy"])
    assert torch.equal(found["pth"], SAMPLE["pth"])
    with wds.TarWriter(str(tmp_path / "b.tar")) as again:
        again.write({name: value for name, value in SAMPLE.items() if name != "pth"})
    with wds.TarWriter(str(tmp_path / "c.tar")) as again:
        again.write({name: value for name, value in SAMPLE.items() if name != "pth"})
    assert (tmp_path / "b.tar").read_bytes() == (tmp_path / "c.tar").read_bytes()


@pytest.mark.parametrize(("name", "compress"), [("a.tar.gz", None), ("a.tar", "bz2"), ("a.tar", True), ("a.tar.xz", None)])
def test_archives_are_compressed_as_a_whole(name: str, compress: Any, tmp_path: Path) -> None:
    with wds.TarWriter(str(tmp_path / name), compress=compress) as writer:
        writer.write({"__key__": "a", "txt": "b"})
    with tarfile.open(tmp_path / name) as archive:
        (member,) = archive
        assert (member.name, member.mode, member.uname, member.mtime) == ("a.txt", 0o444, "bigdata", 0)
    assert wds.TarWriter.tarmode(name, compress).startswith("w|")


def test_an_open_file_own_encoders_and_fields_of_metadata_are_taken(tmp_path: Path) -> None:
    file = io.BytesIO()
    with wds.TarWriter(file, encoder={"up": str.upper}, keep_meta=True, mtime=5, mode=0o600, user="me") as writer:
        writer.write({"__key__": "a", "x": b"1", "_note": "kept"})
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as archive:
        assert [(member.name, member.mtime, member.mode, member.uname) for member in archive] == [
            ("a.x", 5, 0o600, "me"),
            ("a._note", 5, 0o600, "me"),
        ]
    own = io.BytesIO()
    with wds.TarWriter(own, encoder=lambda sample: {**sample, "x": b"2"}) as writer:
        writer.write({"__key__": "a", "x": 1})
    assert b"2" in own.getvalue()
    assert np.array_equal(np.load(io.BytesIO(wds.numpy_dumps(np.arange(2)))), np.arange(2))


def test_arrays_are_written_as_theirs_writes_them_and_come_back(tmp_path: Path) -> None:
    arrays = [np.arange(3.0), np.arange(6, dtype=np.uint8).reshape(2, 3)]
    with wds.TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "a", "ten": arrays, "one.tb": np.arange(2)})
        with pytest.raises(EncodeError, match=r"'ten', .*an array of type complex128: tenbin has integers, and floats"):
            writer.write({"__key__": "b", "ten": np.ones(1, complex)})
    (raw,) = opened(str(tmp_path / "a.tar"), tmp_path)
    assert hashlib.sha256(raw["ten"]).hexdigest() == THEIRS
    (sample,) = opened(str(tmp_path / "a.tar"), tmp_path).decode()
    assert [array.tolist() for array in sample["ten"]] == [array.tolist() for array in arrays]
    assert [array.tolist() for array in sample["one.tb"]] == [[0, 1]]


def test_values_are_bytes_where_nothing_encodes_them(tmp_path: Path) -> None:
    with wds.TarWriter(f"file://{tmp_path}/a.tar", encoder=False) as writer:
        assert writer.write({"__key__": "a", "x": bytearray(b"1"), "y": memoryview(b"23")}) == 3
        with pytest.raises(EncodeError, match="'cls' is of the type int, and encoder=False takes bytes alone"):
            writer.write({"__key__": "b", "cls": 1})
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert archive.getnames() == ["a.x", "a.y"]


def test_metadata_that_is_no_text_and_a_compression_that_is_not_known_are_refused(tmp_path: Path) -> None:
    with wds.TarWriter(tmp_path / "a.tar", keep_meta=True) as writer:
        with pytest.raises(EncodeError, match="'__index__' is of the type int, and keep_meta=True takes text and bytes"):
            writer.write({"__key__": "a", "x": b"1", "__index__": 3})
        writer.write({"__key__": "b", "x": b"1", "__note__": "kept"})
    with tarfile.open(tmp_path / "a.tar") as archive:
        assert archive.getnames() == ["b.x", "b.__note__"]
    with pytest.raises(ConfigError, match="compress='zst' is unknown: give one of 'gz', 'bz2', 'xz', True or False"):
        wds.TarWriter(tmp_path / "b.tar", compress="zst")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize("pattern", ["s.tar", "s-%d-%d.tar", "s-%y.tar", len])
def test_a_pattern_without_a_place_for_one_number_is_refused(pattern: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="has no place for one number"):
        wds.ShardWriter(pattern, verbose=0)
    assert not list(tmp_path.iterdir())


def test_a_function_behind_each_archive_may_move_it_away(tmp_path: Path) -> None:
    """As scripts do that upload archives as they become whole."""
    (tmp_path / "sent").mkdir()

    def send(name: str) -> None:
        Path(name).rename(tmp_path / "sent" / Path(name).name)

    opened_names: list[str] = []

    def open_it(name: str) -> Any:
        opened_names.append(name)
        return open(name, "wb")

    with wds.ShardWriter(f"{tmp_path}/s-%d.tar", maxcount=2, post=send, opener=open_it, verbose=0, mtime=7) as writer:
        for number in range(5):
            writer.write({"__key__": f"{number}", "cls": number})
    assert sorted(path.name for path in (tmp_path / "sent").iterdir()) == ["s-0.tar", "s-1.tar", "s-2.tar"]
    assert [Path(name).name for name in opened_names] == ["s-0.tar", "s-1.tar", "s-2.tar"]
    with tarfile.open(tmp_path / "sent/s-2.tar") as archive:
        assert [(member.name, member.mtime) for member in archive] == [("4.cls", 7)]


def write_to_shards(folder: Path, *keys: str, **options: Any) -> None:
    with wds.ShardWriter(f"{folder}/s-%d.tar", maxcount=1, verbose=0, **options) as shards:
        for key in keys:
            shards.write({"__key__": key, "txt": "b"})


def test_an_exception_leaves_no_archive_that_looks_whole(tmp_path: Path) -> None:
    with pytest.raises(EncodeError, match="__key__"), wds.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"txt": "b"})
    with pytest.raises(EncodeError):
        write_to_shards(tmp_path, "a", "c", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-0.tar", "s-1.tar"]
    with pytest.raises(ConfigError, match=r"sqlstream\.write\.TarWriter"):
        wds.TarWriter("s3://bucket/a.tar")


@pytest.mark.parametrize("compress", [None, "gz"])
def test_what_an_opener_opened_is_closed_behind_an_exception(compress: str | None, tmp_path: Path) -> None:
    opened_files: list[Any] = []

    def open_it(name: str) -> Any:
        opened_files.append(open(name, "wb"))  # noqa: SIM115 - the writer closes it
        return opened_files[-1]

    with pytest.raises(EncodeError, match="__key__"):
        write_to_shards(tmp_path, "a", "b", "", opener=open_it, compress=compress)
    assert [file.closed for file in opened_files] == [True, True, True]


def test_a_full_archive_is_followed_by_another_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    with wds.ShardWriter(f"{tmp_path}/s-%03d.tar", maxcount=3, maxsize=10, post=done.append, start_shard=5) as writer:
        for number in range(7):
            writer.write({"__key__": f"{number}", "bin": bytes(10 if number == 4 else 1)})
    assert [Path(name).name for name in done] == ["s-005.tar", "s-006.tar", "s-007.tar"]
    assert capsys.readouterr().out.count("# writing") == 3
    with opened(f"{tmp_path}/s-{{005..007}}.tar", tmp_path) as dataset:
        assert [(sample["__key__"], Path(sample["__url__"]).stem) for sample in dataset] == [
            *((str(number), "s-005") for number in range(3)),
            *((str(number), "s-006") for number in (3, 4)),
            *((str(number), "s-007") for number in (5, 6)),
        ]
