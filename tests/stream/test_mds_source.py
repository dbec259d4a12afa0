"""Shards of MosaicML Streaming as a source: by their index, or the directory that holds it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, DecodeError, SchemaError, SourceError
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from sqlstream.transforms.base import Sample
from sqlstream.transforms.presets import CacheTransform
from sqlstream.write import MdsWriter
from tests.goldens import FIXTURES, as_json, expected
from tests.stream.shards import tar_of

MDS = FIXTURES / "mds"
NAMES = ["plain", "empty_shard", "fixed_only", "bypass", "merged", "jsonl", "csv", "tsv", "xsv"]
PACKED = ["zstd", "gz", "br", "bz2", "snappy", "jsonl_zstd"]


def opened(src: str | Path, folder: Path, **options: Any) -> StreamingDataset:
    given: dict[str, Any] = {"show_progress": False, "cache_limit": "10mb"} | options
    return StreamingDataset(src, folder / "cache", **given)


def values(sample: Sample) -> Any:
    return as_json({name: value for name, value in sample.items() if not (name.startswith("__") and name.endswith("__"))})


def unchanged(sample: Sample) -> Sample:
    return sample


def document(name: str) -> Any:
    return json.loads((MDS / name / "index.json").read_text())


def serve(server: FaultyHttpServer, name: str) -> str:
    files = [path for path in (MDS / name).rglob("*") if path.is_file()]
    server.objects |= {f"/{name}/{path.relative_to(MDS / name)}": path.read_bytes() for path in files}
    return f"{server.url}/{name}/"


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_a_directory_are_those_of_mosaicml(name: str, tmp_path: Path) -> None:
    assert [values(sample) for sample in opened(MDS / name, tmp_path)] == expected(f"mds/{name}.expected.json")["samples"]


def test_compressed_shards_are_unpacked_once_into_the_cache(tmp_path: Path) -> None:
    for name in PACKED:
        dataset = opened(MDS / name, tmp_path, on_error="raise", shuffle_seed=1)
        found = sorted((sample["__row__"], json.dumps(values(sample))) for sample in dataset)
        assert [json.loads(text) for _, text in found] == expected(f"mds/{name}.expected.json")["samples"]
    raw = [shard["raw_data"]["bytes"] for name in PACKED for shard in document(name)["shards"]]
    assert sorted(path.stat().st_size for path in (tmp_path / "cache/data").rglob("*") if path.is_file()) == sorted(raw)


def test_a_compressed_shard_that_is_damaged_or_another_one_is_an_error(server: FaultyHttpServer, tmp_path: Path) -> None:
    src = serve(server, "zstd")
    name = document("zstd")["shards"][0]["zip_data"]["basename"]
    good = server.objects[f"/zstd/{name}"]
    for number, damage in enumerate((good[:-40] + bytes(40), good[:40] + b"x" + good[41:])):
        server.objects[f"/zstd/{name}"] = damage
        with pytest.raises(SourceError, match=name.replace(".", r"\.")):
            opened(src, tmp_path / str(number), on_error="raise")[0]


@pytest.mark.parametrize("unit", ["members", "whole"])
@pytest.mark.parametrize("name", ["plain", "jsonl"])
def test_s1_samples_over_http_are_equal_in_both_units(name: str, unit: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    src = serve(server, name)
    dataset = opened(src, tmp_path, shards=unit)
    there = expected(f"mds/{name}.expected.json")["samples"]
    assert [values(sample) for sample in dataset] == there
    assert [values(dataset[number]) for number in (len(there) - 1, 0)] == [there[-1], there[0]]


def test_samples_shuffled_in_workers_are_the_same(tmp_path: Path) -> None:
    loader = StreamingDataLoader(opened(MDS / "plain", tmp_path, shuffle_seed=4), batch_size=3, num_workers=2, collate_fn=list)
    found = sorted((sample["__row__"], json.dumps(values(sample))) for batch in loader for sample in batch)
    assert [text for _, text in found] == [json.dumps(some) for some in expected("mds/plain.expected.json")["samples"]]


def test_some_columns_and_bytes_in_place_of_values(tmp_path: Path) -> None:
    assert set(values(opened(MDS / "plain", tmp_path, columns_to_download=["i32", "bytes"])[0])) == {"i32", "bytes"}
    raw = opened(MDS / "csv", tmp_path, source_options={"decode": False})[0]
    assert raw["n"] == expected("mds/csv.expected.json")["samples"][0]["n"], "rows of text have no bytes of their own"
    assert opened(MDS / "plain", tmp_path, source_options={"decode": False})[0]["B"] == b"upper case sorts first"


@pytest.mark.parametrize("chunk", [None, 1], ids=["built", "lazy"])
@pytest.mark.parametrize("name", ["plain", "jsonl", "zstd"])
def test_texts_of_shards_are_values_and_no_paths_also_where_they_are_asked_for_by_name(
    name: str, chunk: int | None, tmp_path: Path
) -> None:
    there = expected(f"mds/{name}.expected.json")["samples"]
    texts = [column for column, value in there[0].items() if isinstance(value, str)]
    assert texts
    dataset = opened(MDS / name, tmp_path, columns_to_download=texts, lazy_index_chunk_size=chunk, on_error="raise")
    assert [values(sample) for sample in dataset] == [{column: sample[column] for column in texts} for sample in there]


@pytest.mark.parametrize("chunk", [None, 1], ids=["built", "lazy"])
def test_none_to_empty_str_leaves_the_texts_of_shards_as_they_are(chunk: int | None, tmp_path: Path) -> None:
    dataset = opened(MDS / "plain", tmp_path, none_to_empty_str=True, lazy_index_chunk_size=chunk)
    assert [values(sample) for sample in dataset] == expected("mds/plain.expected.json")["samples"]


def test_head_of_a_lazy_index_leaves_out_what_stays_in_the_shards(tmp_path: Path) -> None:
    lazy, built = (opened(MDS / "plain", tmp_path, lazy_index_chunk_size=chunk) for chunk in (1, None))
    assert lazy.head(4).drop(["__url__"]) == built.head(4).drop(["__url__"])
    assert lazy.head(4).num_rows == 4


def test_stored_samples_of_other_columns_and_of_bytes_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    found = []
    for decode in (True, False, True):
        options = {"source_options": {"decode": decode}, "columns_to_download": ["a"]}
        dataset = opened(MDS / "fixed_only", tmp_path, transforms=[CacheTransform("v1", [unchanged])], **options)
        found.append(dataset[4]["a"])
    assert found == [4, (4).to_bytes(8, "little"), 4]
    before = opened(MDS / "gz", tmp_path / "none", columns_to_download=[])
    assert values(before[0]) == {}
    assert not [path for path in (tmp_path / "none/cache/data").rglob("*") if path.is_file()], "nothing of it was wanted"


def test_pickles_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match="allow_pickle"):
        opened(MDS / "pickle", tmp_path)[0]
    allowed = opened(MDS / "pickle", tmp_path, source_options={"allow_pickle": True})
    assert [values(sample) for sample in allowed] == expected("mds/pickle.expected.json")["samples"]
    with pytest.raises(ConfigError, match="allow_pickle='yes'"):
        opened(MDS / "pickle", tmp_path, source_options={"allow_pickle": "yes"})


def test_a_shard_of_another_size_than_the_index_says_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(MDS / "plain", tmp_path / "plain")
    with open(tmp_path / "plain/shard.00002.mds", "ab") as file:
        file.write(b"x")
    with pytest.raises(SourceError, match=r"shard\.00002\.mds has .* bytes, and its index says"):
        opened(tmp_path / "plain", tmp_path)


def test_json_tables_are_still_tables(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('[{"a": 1}, {"a": 2}]')
    assert [sample["a"] for sample in opened(tmp_path / "index.json", tmp_path)] == [1, 2]


def test_a_small_index_file_comes_with_one_request(server: FaultyHttpServer, tmp_path: Path) -> None:
    src = serve(server, "plain")
    assert len(server.objects["/plain/index.json"]) > 4096
    with opened(src, tmp_path) as dataset:
        assert len(dataset) == len(expected("mds/plain.expected.json")["samples"])
    assert [request.method for request in server.requests("/plain/index.json")] == ["HEAD", "GET"]


@pytest.mark.parametrize("place", ["", "index.json"])
def test_an_index_file_whose_length_the_server_does_not_say_is_no_table(
    place: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    src = serve(server, "plain")
    server.script("/plain/index.json", always=FaultyAnswer(fault=Fault.NO_LENGTH))
    with opened(src + place, tmp_path) as dataset:
        assert list(map(values, dataset)) == expected("mds/plain.expected.json")["samples"]


@pytest.mark.parametrize("options", [{}, {"lazy_index_chunk_size": 1}], ids=["built", "lazy"])
@pytest.mark.parametrize("shards", ["members", "whole"])
def test_a_shard_whose_length_only_the_index_says_is_read(
    options: dict[str, Any], shards: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    src = serve(server, "plain")
    for path in [path for path in server.objects if path.endswith(".mds")]:
        server.script(path, always=FaultyAnswer(fault=Fault.NO_LENGTH))
    with opened(src, tmp_path, shards=shards, **options) as dataset:
        assert list(map(values, dataset)) == expected("mds/plain.expected.json")["samples"]


def test_a_json_table_of_a_server_that_says_no_length_is_still_a_table(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/rows.json"] = b'[{"a": 1}, {"a": 2}]'
    server.script("/rows.json", always=FaultyAnswer(fault=Fault.NO_LENGTH))
    assert [sample["a"] for sample in opened(f"{server.url}/rows.json", tmp_path)] == [1, 2]


@pytest.mark.parametrize("options", [{}, {"lazy_index_chunk_size": 1}])
@pytest.mark.parametrize("name", ["__url__", "__shard__"])
def test_a_column_named_as_a_field_of_all_samples_of_shards_is_refused(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with MdsWriter(tmp_path / "mds", {name: "str"}) as writer:
        writer.write({name: "a"})
    (tmp_path / "s.tar").write_bytes(tar_of([("a", {"txt": b"1", name: b"2"})]))
    sources = [tmp_path / "mds"] if name == "__url__" else [tmp_path / "mds", tmp_path / "s.tar"]
    for src in sources:
        with pytest.raises(SchemaError, match=f"has a column '{name}', a field that every sample of a shard gets"):
            opened(src, tmp_path, **options)
