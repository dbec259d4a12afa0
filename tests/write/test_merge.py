"""Parts that are written side by side, and the one index over them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, OutputExistsError, SourceError, TransientStorageError
from sqlstream.testing.storage import MemoryStore
from sqlstream.write import MdsWriter, TarWriter, WriteOptions, merge
from sqlstream.write.base.options import ReaderWriter
from tests.write.goldens import MDS


def write_mds(
    out: str | Path,
    number: int,
    total: int = 2,
    *,
    exist_ok: bool = False,
    remote: ReaderWriter | None = None,
    source: str = "",
) -> None:
    options = WriteOptions(part=(number, total), exist_ok=exist_ok, remote=remote, source=source)
    with MdsWriter(out, {"x": "int"}, size_limit=180, options=options) as writer:
        for n in range(3):
            writer.write({"x": 10 * number + n})


def write_tar(out: str | Path, number: int, total: int = 2) -> None:
    with TarWriter(out, max_samples=2, name="some", options=WriteOptions(part=(number, total))) as writer:
        for n in range(3):
            writer.write({"__key__": str(10 * number + n), "cls": 10 * number + n})


def test_the_golden_parts_give_the_golden_index(tmp_path: Path) -> None:
    for name in ("0", "1"):
        shutil.copytree(MDS / "merged" / name, tmp_path / name)
    merged = merge(tmp_path)
    assert (tmp_path / "index.json").read_bytes() == (MDS / "merged" / "index.json").read_bytes()
    assert merged == (f"{tmp_path}/index.json", 2, 2, 20)


def test_parts_of_mds_are_read_in_their_order_whenever_each_was_written(tmp_path: Path) -> None:
    for number in (1, 0):
        write_mds(tmp_path / "out", number)
    merged = merge(tmp_path / "out")
    assert (merged.num_parts, merged.num_samples) == (2, 6)
    assert merged.num_shards > 2
    with StreamingDataset(str(tmp_path / "out"), str(tmp_path / "cache")) as dataset:
        assert [row["x"] for row in dataset] == [0, 1, 2, 10, 11, 12]


def test_parts_of_tars_are_read_by_one_index(tmp_path: Path) -> None:
    for number in range(2):
        write_tar(tmp_path / "out", number)
    merge(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["name"] == "some"
    assert [shard["url"] for shard in index["shardlist"]] == [
        f"0000{part}-of-00002/shard-00000{shard}.tar" for part in range(2) for shard in range(2)
    ]
    with StreamingDataset(str(tmp_path / "out" / "index.json"), str(tmp_path / "cache")) as dataset:
        assert [row["cls"] for row in dataset] == [b"0", b"1", b"2", b"10", b"11", b"12"]


def test_an_index_of_wids_may_name_tars_elsewhere(tmp_path: Path) -> None:
    for number in range(2):
        write_tar(tmp_path / "tars", number)
    parts = [tmp_path / "out" / str(number) for number in range(2)]
    for part, tars in zip(parts, sorted((tmp_path / "tars").iterdir()), strict=True):
        part.mkdir(parents=True)
        found = json.loads((tars / "index.json").read_bytes())
        for number, shard in enumerate(found["shardlist"]):
            shard["url"] = f"{'file:' * number}{tars / shard['url']}"
        (part / "index.json").write_text(json.dumps(found))
    assert merge(tmp_path / "out").num_samples == 6
    with StreamingDataset(str(tmp_path / "out/index.json"), str(tmp_path / "cache")) as dataset:
        assert [int(row["cls"]) for row in dataset] == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b'{"version": 2, "shards": [{}]}', b'{"shardlist": [{"url": "a.tar"}]}'])
def test_a_damaged_index_of_a_part_is_named(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0/index.json").write_bytes(text)
    with pytest.raises(SourceError, match="the index of 0 is no index of MDS or wids"):
        merge(tmp_path)


def test_parts_in_a_store_are_merged_there() -> None:
    store = MemoryStore({})
    for number in range(2):
        write_mds("s3://b/out", number, remote=store)
    assert merge("s3://b/out", remote=store).num_samples == 6
    shards = json.loads(store.objects["s3://b/out/index.json"])["shards"]
    assert {f"s3://b/out/{shard['raw_data']['basename']}" for shard in shards} < set(store.objects)


def test_parts_that_are_missing_unfinished_or_of_two_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no parts"):
        merge(tmp_path / "none")
    write_mds(tmp_path, 2, 3)
    write_mds(tmp_path, 0, 3)
    with pytest.raises(ConfigError, match="lacks 1 of 3 parts, first part 1"):
        merge(tmp_path)
    writer = MdsWriter(tmp_path, {"x": "int"}, options=WriteOptions(part=(1, 3)))
    writer.cancel()
    with pytest.raises(ConfigError, match=r"part 00001-of-00003 has no index\.json: it is not finished"):
        merge(tmp_path)
    shutil.rmtree(tmp_path / "00001-of-00003")
    write_tar(tmp_path, 1, 3)
    with pytest.raises(SourceError, match="00000-of-00003 is MDS and 00001-of-00003 is tars"):
        merge(tmp_path)
    (tmp_path / "00001-of-00003" / "index.json").write_text("{}")
    with pytest.raises(SourceError, match="the index of 00001-of-00003 is no index"):
        merge(tmp_path)
    (tmp_path / "00000-of-00004").mkdir()
    with pytest.raises(ConfigError, match=r"has parts of \[3, 4\]"):
        merge(tmp_path)


def test_a_part_that_is_written_again_takes_the_index_over_all_away(tmp_path: Path) -> None:
    store = MemoryStore({})
    for out, remote in ((tmp_path, None), ("s3://b/out", store)):
        for number in range(2):
            write_mds(out, number, remote=remote)
        merge(out, remote=remote)
        with pytest.raises(OutputExistsError):
            write_mds(out, 0, remote=remote)
        write_mds(out, 0, exist_ok=True, remote=remote)
    assert not (tmp_path / "index.json").exists()
    assert json.loads(store.objects["s3://b/out/index.json"])["shards"] == []


def test_parts_of_several_writings_are_refused(tmp_path: Path) -> None:
    store = MemoryStore({})
    for out, remote in ((tmp_path, None), ("s3://b/out", store)):
        for number, source in ((0, '{"seed": 1, "content": {"query": "a"}}'), (1, '{"seed": 1, "content": {"query": "b"}}')):
            write_mds(out, number, remote=remote, source=source)
        with pytest.raises(
            ConfigError,
            match=r"part 00000-of-00002 was written with source\.content\.query='a', part 00001-of-00002 with 'b'",
        ):
            merge(out, remote=remote)
        write_mds(out, 1, exist_ok=True, remote=remote, source="")  # of a source without a name nothing is known
        assert merge(out, remote=remote).num_samples == 6
    shutil.rmtree(tmp_path / "00001-of-00002")
    shutil.copytree(tmp_path / "00000-of-00002", tmp_path / "00001-of-00002")
    with pytest.raises(ConfigError, match="00001-of-00002 holds part 0 of 2, says its journal"):
        merge(tmp_path)
    for name in ("00000-of-00002", "00001-of-00002"):
        (tmp_path / name).rename(tmp_path / name[:5])  # directories of their own may hold anything
    assert merge(tmp_path).num_samples == 6
    options = WriteOptions(part=(1, 2), exist_ok=True, remote=store)
    with MdsWriter("s3://b/out", {"y": "int"}, options=options) as writer:
        writer.write({"y": 1})
    with pytest.raises(ConfigError, match=r"column_names=\['x'\], part 00001-of-00002 with \['y'\]"):
        merge("s3://b/out", remote=store)


def test_a_part_that_is_being_written_over_in_a_store_is_not_merged_as_an_empty_one() -> None:
    num_left = 1 << 20

    def before_upload(url: str) -> None:
        nonlocal num_left
        num_left -= 1
        if num_left < 0:
            raise TransientStorageError(f"{url}: 503")

    store = MemoryStore({}, before_upload)
    for number in range(2):
        write_mds("s3://b/out", number, remote=store)
    before = dict(store.objects)
    for dies_after in range(4):
        store.objects = dict(before)
        num_left = dies_after
        with pytest.raises(TransientStorageError):
            write_mds("s3://b/out", 1, exist_ok=True, remote=store)
        num_left = 1 << 20
        if dies_after:
            with pytest.raises(ConfigError, match="part 00001-of-00002 is not finished, says its journal"):
                merge("s3://b/out", remote=store)
        else:
            assert merge("s3://b/out", remote=store).num_samples == 6


@pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0,), "0/2", (0, 2.0)])
def test_a_part_that_is_none_is_refused(part: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="is no part: give"):
        WriteOptions(part=part)
