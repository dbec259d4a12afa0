"""Shards that are damaged: an error, left out, or used up to the damage."""

from __future__ import annotations

import gzip
import json
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, DamagedMemberError, DamagedShardError, ObjectNotFoundError, SourceError
from sqlstream.testing.servers import FaultyHttpServer
from tests.cli.commands import run, run_json
from tests.goldens import FIXTURES
from tests.stream.shards import opened, samples, tar_of

MODES = ("skip", "until_damage")
TARS = {
    "bad_checksum.tar": [],  # its only good member may have neighbours behind the damage, and so below
    "truncated_data.tar": ["a"],
    "truncated_header.tar": [],
    "concatenated.tar": ["a"],
    "zero_bytes.tar": [],
}
"""Damaged archives, and the keys of the samples before the damage."""
ZIPS = ("overlap.zip", "truncated.zip")
"""Archives whose directory is damaged or not there: nothing of them can be used."""


def with_mode(src: Any, folder: Path, mode: str, **options: Any) -> StreamingDataset:
    return opened(src, folder, source_options={"damaged_shards": mode}, **options)


def keys(dataset: StreamingDataset) -> list[str]:
    return [sample["__key__"] for sample in dataset]


@pytest.fixture
def good(tmp_path: Path) -> Path:
    """A shard of four samples."""
    (tmp_path / "good.tar").write_bytes(tar_of(samples(0, 4)))
    return tmp_path / "good.tar"


GOOD = [key for key, _ in samples(0, 4)]


@pytest.mark.parametrize("name", [*(f"tar/{name}" for name in TARS), *(f"zip/{name}" for name in ZIPS)])
def test_a_damaged_golden_is_an_error_or_left_out_or_used_up_to_the_damage(name: str, good: Path, tmp_path: Path) -> None:
    src = [str(FIXTURES / name), str(good)]
    for options in ({}, {"source_options": {"damaged_shards": "raise"}}):
        with pytest.raises(DamagedShardError, match=name.partition("/")[2].replace(".", r"\.")):
            opened(src, tmp_path, **options)
    assert keys(with_mode(src, tmp_path, "skip")) == GOOD
    kept = with_mode(src, tmp_path, "until_damage")
    before = TARS.get(name.partition("/")[2], [])
    assert keys(kept) == [*before, *GOOD]
    assert [sample["__shard__"] for sample in kept] == [*(0 for _ in before), 1, 1, 1, 1]
    assert all(isinstance(sample["txt"] or sample["cls"], bytes) for sample in kept)
    assert keys(with_mode(src[::-1], tmp_path, "until_damage")) == [*GOOD, *before]


@pytest.mark.parametrize("name", ["tar/sparse_gnu.tar", "zip/encrypted.zip", "zip/symlink.zip", "zip/split.zip"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_sound_and_not_read_is_an_error_in_every_mode(mode: str, name: str, good: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=name.partition("/")[2].replace(".", r"\.")):
        with_mode([str(good), str(FIXTURES / name)], tmp_path, mode)


def test_a_member_of_a_zip_that_is_damaged_fails_alone_in_every_mode(tmp_path: Path) -> None:
    for mode in ("raise", *MODES):
        dataset = with_mode(FIXTURES / "zip/bad_crc.zip", tmp_path / mode, mode, on_error="skip")
        found = keys(dataset)
        assert len(found) + len(dataset.failures()) == len(dataset)
        assert dataset.failures()


@pytest.mark.parametrize("remote", [False, True])
def test_samples_before_the_damage_have_their_content(remote: bool, server: FaultyHttpServer, tmp_path: Path) -> None:
    data = tar_of(samples(0, 5))
    for cut, num_before in ((0, 0), (700, 0), (5_000, 0), (6_000, 0), (9_000, 1), (10_500, 1), (11_000, 2)):
        server.objects[f"/{cut}.tar"] = data[:cut]  # sample 0 ends at 5632, sample 1 at 10240, where a header of 512 follows
        (tmp_path / f"{cut}.tar").write_bytes(data[:cut])
        server.objects["/b.tar"] = tar_of(samples(1, 2))
        (tmp_path / "b.tar").write_bytes(server.objects["/b.tar"])
        base = server.url if remote else str(tmp_path)
        dataset = with_mode([f"{base}/{cut}.tar", f"{base}/b.tar"], tmp_path, "until_damage", on_error="raise")
        there = dict(samples(0, 5) + samples(1, 2))
        found = {sample["__key__"]: {name: sample[name] for name in ("jpg", "cls")} for sample in dataset}
        assert found == {key: {name: there[key][name] for name in ("jpg", "cls")} for key in found}
        assert len(found) == 2 + num_before


@pytest.mark.parametrize("mode", MODES)
def test_a_compressed_archive_that_ends_early_is_left_out_and_one_that_holds_a_damaged_one_is_not(
    mode: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    data = tar_of(samples(0, 4))
    server.objects |= {"/early.tar.gz": gzip.compress(data)[:-300], "/inner.tar.gz": gzip.compress(data[:9_000])}
    server.objects["/good.tar"] = tar_of(samples(1, 2))
    src = [f"{server.url}/{name}" for name in ("early.tar.gz", "inner.tar.gz", "good.tar")]
    dataset = with_mode(src, tmp_path, mode, on_error="raise")
    shards = Counter(sample["__shard__"] for sample in dataset)
    assert shards == ({2: 2} if mode == "skip" else {1: 1, 2: 2})
    assert [len(sample["jpg"]) for sample in dataset if sample["__shard__"] == 1] == ([] if mode == "skip" else [3000])


def test_damage_is_counted_and_listed_and_told_by_each_opening(
    good: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    src = [str(FIXTURES / "tar/concatenated.tar"), str(good), str(FIXTURES / "zip/truncated.zip")]
    for _ in range(2):
        caplog.clear()
        with_mode(src, tmp_path, "until_damage").close()
        (warning,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
        assert "2 of 3 shards are damaged" in warning
        assert "concatenated.tar (1 samples kept)" in warning
        assert "truncated.zip (0 samples kept)" in warning
    query = "SELECT *, upper(__key__) AS loud FROM dataframe ORDER BY __key__ DESC"
    caplog.clear()
    with_mode(src, tmp_path, "until_damage", sql_query=query).close()
    assert "2 of 3 shards are damaged" in caplog.text
    for info in run_json("index", "info", tmp_path / "cache")["indexes"]:
        assert [(found["shard"], found["num_samples"]) for found in info["damaged"]] == [(0, 1), (2, 0)]
        assert "byte 2048: another archive follows the end blocks" in info["damaged"][0]["damage"]
    assert "it has no end record" in run("index", "info", tmp_path / "cache").stdout


@pytest.mark.parametrize("place", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_damage_that_a_lazy_index_finds_is_counted_and_listed_once(
    mode: str, is_remote: bool, place: int, server: FaultyHttpServer, good: Path, tmp_path: Path
) -> None:
    damaged = FIXTURES / "tar/concatenated.tar"
    server.objects |= {"/good.tar": good.read_bytes(), "/concatenated.tar": damaged.read_bytes()}
    src = [f"{server.url}/{path.name}" if is_remote else str(path) for path in (good, damaged)][:: 1 if place else -1]
    for _ in range(2):
        with with_mode(src, tmp_path, mode, lazy_index_chunk_size=1, columns_to_download=[]) as dataset:
            loader = StreamingDataLoader(dataset, batch_size=2, num_workers=2, collate_fn=list)
            assert len([sample for batch in loader for sample in batch]) == (4 if mode == "skip" else 5)
            (failure,) = dataset.failures()
            assert (Path(failure.url).name, failure.count) == ("concatenated.tar", 1)
            assert "byte 2048: another archive follows the end blocks" in failure.error


def test_index_build_takes_what_a_dataset_takes(good: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.tar").write_bytes(good.read_bytes()[:9_000])
    failed = run("index", "build", tmp_path / "*.tar", tmp_path / "cache")
    assert failed.returncode == 2
    assert "cut.tar is damaged at byte 5632" in failed.stderr
    words = ("--damaged-shards", "until_damage", "--index-members", "cls", "txt")
    built = run_json("index", "build", tmp_path / "*.tar", tmp_path / "cache", *words)
    assert (built["num_rows"], [found["shard"] for found in built["damaged"]]) == (5, [0])
    options = {"damaged_shards": "until_damage", "index_members": ["txt", "cls"]}
    dataset = opened(str(tmp_path / "*.tar"), tmp_path, source_options=options, where="cls = 0")
    assert [sample["txt"] for sample in dataset] == ["sample 0 of 0"] * 2
    assert {info["path"] for info in run_json("index", "info", tmp_path / "cache")["indexes"]} == {built["path"]}


def test_each_mode_has_an_index_of_its_own_and_no_mode_is_a_change_of_the_source(good: Path, tmp_path: Path) -> None:
    src = [str(FIXTURES / "tar/concatenated.tar"), str(good)]
    strict = {"on_source_change": "raise"}
    lengths = [
        len(opened(src, tmp_path, source_options={"damaged_shards": mode, **strict}))
        for mode in ("skip", "until_damage", "skip")
    ]
    assert lengths == [4, 5, 4]
    with pytest.raises(
        DamagedShardError, match=r"concatenated\.tar is damaged at byte 2048: .* the last good member is 'a.cls'"
    ):
        opened(src, tmp_path, source_options=strict)


def test_a_source_grows_behind_a_damaged_shard(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "a.tar").write_bytes(tar_of(samples(0, 4))[:9_000])
    shutil.copy(good, folder / "b.tar")
    assert len(with_mode(str(folder / "*.tar"), tmp_path, "until_damage")) == 5
    (folder / "c.tar").write_bytes(b"no archive")
    (folder / "d.tar").write_bytes(tar_of(samples(3, 2)))
    grown = with_mode(str(folder / "*.tar"), tmp_path, "until_damage", shuffle_seed=1)
    assert Counter(sample["__shard__"] for sample in grown) == {0: 1, 1: 4, 3: 2}
    (info, _) = sorted(run_json("index", "info", tmp_path / "cache")["indexes"], key=lambda info: -len(info["damaged"]))
    assert [found["shard"] for found in info["damaged"]] == [0, 2]


def test_a_source_of_damaged_shards_alone_has_no_rows_and_says_why(tmp_path: Path) -> None:
    src = [str(FIXTURES / "tar" / name) for name in ("zero_bytes.tar", "truncated_header.tar")]
    for mode in MODES:
        with pytest.raises(SourceError, match=r"all of its 2 shards are damaged.*zero_bytes\.tar.* it has no bytes"):
            with_mode(src, tmp_path, mode, columns_to_download=["jpg"])


def test_other_errors_are_no_damage(good: Path, server: FaultyHttpServer, tmp_path: Path) -> None:
    for mode in MODES:
        with pytest.raises(ObjectNotFoundError):
            with_mode([str(good), str(tmp_path / "none.tar")], tmp_path, mode)
        with pytest.raises(ObjectNotFoundError):
            with_mode([str(good), f"{server.url}/none.tar"], tmp_path, mode)
    for wrong in ("ignore", None, ["skip"]):
        with pytest.raises(ConfigError, match="damaged_shards="):
            opened(str(good), tmp_path, source_options={"damaged_shards": wrong})


def test_a_sample_with_one_extension_twice_is_damage(good: Path, tmp_path: Path) -> None:
    twice = tmp_path / "twice.tar"
    twice.write_bytes(tar_of([("first", {"txt": b"0"}), ("a", {"txt": b"1"}), ("a", {"txt": b"2"}), ("last", {"txt": b"3"})]))
    with pytest.raises(DamagedShardError, match="one part of each extension"):
        opened([str(good), str(twice)], tmp_path)
    whole = keys(opened(str(good), tmp_path))
    assert keys(with_mode([str(good), str(twice)], tmp_path, "skip")) == whole
    assert keys(with_mode([str(good), str(twice)], tmp_path, "until_damage")) == [*whole, "first"]


def test_shards_of_mosaicml_are_left_out_whose_size_or_table_is_damaged(tmp_path: Path, server: FaultyHttpServer) -> None:
    shutil.copytree(FIXTURES / "mds/plain", tmp_path / "plain")
    names = [shard["raw_data"]["basename"] for shard in json.loads((tmp_path / "plain/index.json").read_text())["shards"]]
    there = [sample["__shard__"] for sample in opened(str(tmp_path / "plain"), tmp_path)]
    assert len(names) > 2
    cut, table = (tmp_path / "plain" / names[number] for number in (0, 1))
    cut.write_bytes(cut.read_bytes()[:-1])
    table.write_bytes(table.read_bytes()[:4] + b"\xff" * 4 + table.read_bytes()[8:])
    for path in (tmp_path / "plain").iterdir():
        server.objects[f"/plain/{path.name}"] = path.read_bytes()
    for src in (str(tmp_path / "plain"), f"{server.url}/plain/"):
        with pytest.raises(DamagedShardError, match=names[0].replace(".", r"\.") + " has .* bytes"):
            opened(src, tmp_path)
        for mode in MODES:
            dataset = with_mode(src, tmp_path, mode, on_error="raise", shuffle_seed=1)
            assert Counter(sample["__shard__"] for sample in dataset) == Counter(n for n in there if n > 1)


def test_archives_of_wids_may_have_fewer_samples_than_their_index_says_where_they_are_damaged(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "wds", tmp_path / "wds")
    first = tmp_path / "wds/shard-000000.tar"
    document = json.loads((tmp_path / "wds/index.json").read_text())
    nums = [shard["nsamples"] for shard in document["shardlist"]]
    first.write_bytes(first.read_bytes()[: first.stat().st_size // 2])
    index = str(tmp_path / "wds/index.json")
    with pytest.raises(DamagedShardError, match=r"shard-000000\.tar is damaged at byte"):
        opened(index, tmp_path)
    kept = Counter(sample["__shard__"] for sample in with_mode(index, tmp_path, "until_damage"))
    assert [kept[1], kept[2]] == nums[1:]
    assert 0 < kept[0] < nums[0]
    assert Counter(sample["__shard__"] for sample in with_mode(index, tmp_path, "skip")) == {1: nums[1], 2: nums[2]}
    document["shardlist"][1]["nsamples"] += 1
    (tmp_path / "wds/index.json").write_text(json.dumps(document))
    with pytest.raises(SourceError, match=r"shard-000001\.tar has .* samples"):
        with_mode(index, tmp_path / "other", "until_damage")


def test_a_damaged_copy_in_the_cache_is_named_beside_its_cure(server: FaultyHttpServer, tmp_path: Path) -> None:
    """The archive on the server is as it was: to write it again would help nothing."""
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        archive.writestr("a.bin", bytes(30_000))
    server.objects["/d/s.zip"] = (tmp_path / "s.zip").read_bytes()
    with opened(f"{server.url}/d/s.zip", tmp_path, on_error="raise") as dataset:
        assert dataset[0]["bin"] == bytes(30_000)
    for path in (tmp_path / "cache/data").glob("*/*"):
        data = path.read_bytes()
        path.write_bytes(data.replace(bytes(100), bytes(99) + b"x", 1))
    with opened(f"{server.url}/d/s.zip", tmp_path, on_error="raise") as dataset:
        with pytest.raises(DamagedMemberError, match=r"CRC-32.*its copy is not: `sqlstream cache clear` has it fetched again"):
            dataset[0]
        dataset.cache.clear()
        assert dataset[0]["bin"] == bytes(30_000)


@pytest.mark.parametrize(
    ("at", "why"), [(24, "stored as it is, with two sizes"), (8, "encrypted"), (10, "a method that is not")]
)
def test_a_member_that_a_damaged_copy_says_is_not_read_is_named_beside_the_cure_of_the_copy(
    at: int, why: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        archive.writestr("a.bin", bytes(3000))
    server.objects["/d/s.zip"] = (tmp_path / "s.zip").read_bytes()
    options: dict[str, Any] = {"lazy_index_chunk_size": 1, "shards": "whole", "on_error": "raise"}
    with opened(f"{server.url}/d/s.zip", tmp_path, **options) as dataset:
        assert len(list(dataset)) == 1
    (copy,) = (tmp_path / "cache/data").glob("*/*")
    data = bytearray(copy.read_bytes())
    data[data.index(b"PK\1\2") + at] ^= 1
    copy.write_bytes(data)
    shutil.rmtree(tmp_path / "cache/index")
    with pytest.raises(SourceError, match=rf"{why}.*its copy is not: `sqlstream cache clear` has it fetched again"):
        opened(f"{server.url}/d/s.zip", tmp_path, **options)
