"""Tars: read back by `tarfile` and by our reader; what lies beside them agrees with their headers."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, EncodeError, OutputExistsError, SourceError
from sqlstream.testing.storage import MemoryStore
from sqlstream.write import TarWriter, WriteOptions
from sqlstream.write.energon import write_energon
from sqlstream.write.formats.tar_stream import TarStream
from tests.write.goldens import files_of

PICTURE = Image.new("RGB", (4, 3), (10, 20, 30))


def written(directory: Path, samples: list[dict[str, Any]], **settings: Any) -> dict[str, dict[str, bytes]]:
    """Write samples, and return what Python's tarfile reads: members of each shard."""
    with TarWriter(directory, **settings) as writer:
        for sample in samples:
            writer.write(sample)
    return {path.name: members(path) for path in sorted(directory.glob("*.tar"))}


def members(path: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(path) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    return found


def some(number: int) -> dict[str, Any]:
    return {"__key__": f"d.x/{number:04}", "jpg": bytes([number]) * (100 * number), "cls": number, "JSON": {"n": number}}


def test_members_are_what_tarfile_reads_with_small_texts_first(tmp_path: Path) -> None:
    found = written(tmp_path, [some(n) for n in range(5)], max_samples=2)
    assert [list(names) for names in found.values()] == [
        [f"d.x/{n:04}.{ext}" for n in group for ext in ("JSON", "cls", "jpg")] for group in ((0, 1), (2, 3), (4,))
    ]
    assert found["shard-000001.tar"]["d.x/0003.jpg"] == b"\x03" * 300
    assert found["shard-000001.tar"]["d.x/0003.JSON"] == b'{"n": 3}'
    with tarfile.open(tmp_path / "shard-000000.tar") as archive:
        member = archive.getmembers()[0]
        assert (member.mtime, member.mode, member.uname, member.gname) == (0, 0o444, "bigdata", "bigdata")
    assert all(path.stat().st_size % 10240 == 0 for path in tmp_path.glob("*.tar"))


def test_the_same_samples_give_the_same_bytes(tmp_path: Path) -> None:
    samples = [{**some(n), "meta.json.gz": {"n": n}, "npz": {"a": np.arange(3)}, "png": PICTURE} for n in range(3)]
    for name in ("a", "b"):
        written(tmp_path / name, samples)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_our_reader_gives_the_samples_back(tmp_path: Path) -> None:
    written(tmp_path / "out", [some(n) for n in range(5)], max_samples=2)
    for src in (str(tmp_path / "out"), str(tmp_path / "out" / "index.json"), str(tmp_path / "out" / "*.tar")):
        dataset = StreamingDataset(src, str(tmp_path / "cache"))
        try:
            assert [(row["jpg"], json.loads(row["json"])) for row in dataset] == [
                (bytes([n]) * (100 * n), {"n": n}) for n in range(5)
            ]
        finally:
            dataset.close()


def test_offsets_and_index_beside_the_tars_agree_with_their_headers(tmp_path: Path) -> None:
    written(tmp_path, [some(n) for n in range(5)], max_samples=3, extras=["md5"], name="some")
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["__kind__"], index["wids_version"], index["name"]) == ("wids-shard-index-v1", 1, "some")
    assert [(shard["url"], shard["nsamples"]) for shard in index["shardlist"]] == [
        ("shard-000000.tar", 3),
        ("shard-000001.tar", 2),
    ]
    import hashlib

    for shard in index["shardlist"]:
        path = tmp_path / shard["url"]
        assert shard["filesize"] == path.stat().st_size
        assert shard["md5sum"] == hashlib.md5(path.read_bytes()).hexdigest()
        offsets = np.frombuffer((tmp_path / f"{path.name}.idx").read_bytes(), "<u8").tolist()
        with tarfile.open(path) as archive:
            firsts = [member.offset for member in archive if member.name.endswith("JSON")]
            assert offsets == [*firsts, archive.offset]  # `archive.offset`: where it found the end


@pytest.mark.parametrize(
    "name",
    [
        "a" * 96 + ".txt",
        "a" * 97 + ".txt",
        "p" * 100 + "/0.txt",
        "p" * 155 + "/" + "q" * 96 + ".txt",
        "p" * 156 + "/" + "q" * 96 + ".txt",
        "p" * 100 + "/" + "q" * 100 + ".txt",
        "é" * 60 + ".txt",
        "日本/é.txt",
        "x" * 1000 + ".txt",
    ],
)
def test_any_name_is_what_tarfile_reads(name: str, tmp_path: Path) -> None:
    written(tmp_path, [{"__key__": name.removesuffix(".txt"), "txt": "here"}, {"__key__": "b", "txt": "there"}])
    assert members(tmp_path / "shard-000000.tar") == {name: b"here", "b.txt": b"there"}
    with tarfile.open(tmp_path / "shard-000000.tar") as archive:
        starts = [archive.getmembers()[0].offset, archive.getmembers()[1].offset]
    assert np.frombuffer((tmp_path / "shard-000000.tar.idx").read_bytes(), "<u8").tolist()[:2] == starts


def test_a_size_of_8_gib_is_what_tarfile_reads() -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return 8 << 30

    class Counted:
        def __init__(self) -> None:
            self.headers = b""

        def write(self, data: bytes) -> None:
            if not isinstance(data, Large):
                self.headers += data

    file = Counted()
    placed = TarStream(file).add("a.bin", Large())
    assert placed == (0, 1536, 8 << 30)
    with tarfile.open(fileobj=io.BytesIO(file.headers)) as archive:
        first = archive.next()
        assert first is not None
        assert (first.name, first.size, first.offset_data) == ("a.bin", 8 << 30, 1536)


def test_values_are_encoded_by_their_extension(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    sample = {
        "__key__": "a",
        "__url__": "left out",
        "npy": array,
        "npz": {"x": array},
        "png": PICTURE,
        "jpg": np.zeros((2, 3, 3), np.float32),
        "txt": "é",
        "cls": np.int64(3),
        "json.gz": [1],
        "raw.gz": b"as it is",
        "msgpack": {"a": 1},
        "cbor": [1, None],
    }
    found = written(tmp_path, [sample])["shard-000000.tar"]
    assert np.array_equal(np.load(io.BytesIO(found["a.npy"])), array)
    assert np.array_equal(np.load(io.BytesIO(found["a.npz"]))["x"], array)
    assert Image.open(io.BytesIO(found["a.png"])).tobytes() == PICTURE.tobytes()
    assert Image.open(io.BytesIO(found["a.jpg"])).size == (3, 2)
    assert (found["a.txt"], found["a.cls"], found["a.raw.gz"]) == ("é".encode(), b"3", b"as it is")
    assert gzip.decompress(found["a.json.gz"]) == b"[1]"
    assert (found["a.msgpack"], found["a.cbor"]) == (b"\x81\xa1a\x01", b"\x82\x01\xf6")
    assert len(found) == 10


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"txt": "a"}, "has the __key__ None"),
        ({"__key__": "a", "__url__": "x"}, "'a' has no part"),
        ({"__key__": "a.b", "txt": "a"}, "readers split names at the first dot"),
        ({"__key__": ".a", "txt": "a"}, "readers split names at the first dot"),
        ({"__key__": "__meta__/a", "txt": "a"}, "pass over those that begin with a dot or '__'"),
        ({"__key__": "a", "x/txt": "a"}, "readers split names"),
        ({"__key__": "a", "txt": "a", "": b"b"}, "a part without a name"),
        ({"__key__": "a", "txt": "a", "TXT": "b"}, "in two spellings"),
        ({"__key__": "a", "bin": 1}, "values of 'bin' have no encoder: give bytes"),
        ({"__key__": "a", "pkl": 1}, "pickles run any code where they are read"),
        ({"__key__": "a", "cls": None}, "'cls', a value of type NoneType: there is no value"),
        ({"__key__": "a", "json": {1, 2}}, "'json', a value of type set: TypeError"),
        ({"__key__": "a", "jpg": np.full((2, 2), 7.0)}, "values from 7.0 to 7.0"),
    ],
)
def test_a_sample_that_no_reader_would_find_again_is_refused(sample: dict[str, Any], message: str, tmp_path: Path) -> None:
    with TarWriter(tmp_path) as writer:
        with pytest.raises(EncodeError, match=message):
            writer.write(sample)
        writer.write({"__key__": "b", "txt": ""})
    assert members(tmp_path / "shard-000000.tar") == {"b.txt": b""}


def test_a_key_that_follows_itself_is_refused_and_pickles_are_written_where_they_are_allowed(tmp_path: Path) -> None:
    with TarWriter(tmp_path, allow_pickle=True) as writer:
        writer.write({"__key__": "a", "pkl": 1})
        with pytest.raises(EncodeError, match="two samples that follow each other have the key 'a'"):
            writer.write({"__key__": "a", "pkl": 2})
    assert list(members(tmp_path / "shard-000000.tar")) == ["a.pkl"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "shard.tar"}, "give a name with one number"),
        ({"pattern": "a/%d.tar"}, "give a name with one number"),
        ({"pattern": "%d.tgz"}, "give a name with one number"),
        ({"extras": "md5"}, "extras='md5': give some of 'md5', 'energon', as a tuple"),
        ({"allow_pickle": "no"}, "allow_pickle='no' is no bool"),
        ({"extras": 5}, "extras=5 is no list"),
        ({"extras": ("sha1",)}, "give some of 'md5', 'energon'"),
        ({"max_samples": 0}, "max_samples=0 is out of range"),
        ({"size_limit": "x"}, "size_limit='x' is not a size"),
    ],
)
def test_wrong_arguments_of_tars_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TarWriter(tmp_path / "out", **settings, options=WriteOptions())


def test_what_energon_reads_is_written_beside_the_tars(tmp_path: Path) -> None:
    """The same as `sqlstream shards index --energon` makes of them; and our reader takes it."""
    store = MemoryStore({})
    options = WriteOptions(remote=store, keep_local=True)
    samples = [some(n) for n in range(5)]
    written(tmp_path / "out", samples, max_samples=2, extras=("energon",))
    with TarWriter((tmp_path / "both", "s3://b/out"), max_samples=2, extras=("energon",), options=options) as writer:
        for sample in samples:
            writer.write(sample)
    (tmp_path / "again").mkdir()
    tars = sorted((tmp_path / "out").glob("*.tar"))
    assert write_energon([(path.name, path) for path in tars], tmp_path / "again") == 5
    made = {path.name: path.read_bytes() for path in (tmp_path / "out/.nv-meta").iterdir()}
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert {name: store.objects[f"s3://b/out/.nv-meta/{name}"] for name in made} == made
    assert sorted(path.name for path in tmp_path.joinpath("out").iterdir() if path.is_dir()) == [".nv-meta"]
    with StreamingDataset(tmp_path / "out", tmp_path / "cache", show_progress=False) as dataset:
        assert [row["cls"] for row in dataset] == [b"%d" % n for n in range(5)]


def test_tars_that_are_written_over_leave_no_places_of_those_before(tmp_path: Path) -> None:
    store = MemoryStore({"s3://b/out/.nv-meta/index.sqlite": b"places", "s3://b/out/index.json": b"index"})
    written(tmp_path, [some(n) for n in range(3)], extras=("energon",))
    written(tmp_path, [some(5)], options=WriteOptions(exist_ok=True))
    assert not (tmp_path / ".nv-meta/index.sqlite").exists()
    with pytest.raises(OutputExistsError, match=r"index\.sqlite would name what was there before: remove it"):
        TarWriter("s3://b/out", options=WriteOptions(remote=store, exist_ok=True))
    assert store.objects["s3://b/out/index.json"] == b"index", "nothing is taken away before"


def test_energon_needs_the_tars_here_and_each_key_once(tmp_path: Path) -> None:
    for out, options in ((tmp_path, WriteOptions(part=(0, 2))), ("s3://b/out", None), ((tmp_path, "s3://b/out"), None)):
        with pytest.raises(ConfigError, match="shards index --energon"):
            TarWriter(out, extras=("energon",), options=options)
    writer = TarWriter(tmp_path, max_samples=1, extras=("energon",))
    for key in ("a", "b", "a"):
        writer.write({"__key__": key, "txt": key})
    with pytest.raises(SourceError, match="a key of it comes twice"):
        writer.finish()
    assert (tmp_path / "index.json").exists(), "the tars are whole"
    assert not (tmp_path / ".nv-meta").exists()


def test_shards_are_cut_at_their_size(tmp_path: Path) -> None:
    samples = [{"__key__": str(n), "bin": bytes(5000)} for n in range(4)]
    found = written(tmp_path, samples, size_limit=12_000)
    assert [len(names) for names in found.values()] == [2, 2]
    assert [len(names) for names in written(tmp_path / "one", samples, size_limit=10).values()] == [1, 1, 1, 1]
