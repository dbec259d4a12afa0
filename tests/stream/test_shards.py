"""Samples that lie in TAR shards: rows, content, order and requests, by members and by whole shards."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, World
from sqlstream.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    MissingFieldError,
    ObjectNotFoundError,
    SchemaError,
    SourceChangedError,
    SourceError,
)
from sqlstream.index.build.shards import ShardIndex
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from sqlstream.transforms.base import Sample
from tests.processes import ROOT
from tests.stream.shards import content, opened, ranges, samples, serve, tar_of

WDS = ROOT / "tests/fixtures/wds"
UNITS = ("members", "whole")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three local shards of eight samples."""
    for shard in range(3):
        (tmp_path / f"s-{shard:03}.tar").write_bytes(tar_of(samples(shard, 8)))
    return tmp_path


def all_samples(num_shards: int, num_samples: int) -> list[dict[str, bytes]]:
    return [{"__key__": key.encode(), **parts} for shard in range(num_shards) for key, parts in samples(shard, num_samples)]


def test_samples_of_webdataset_shards_are_those_that_webdataset_reads(tmp_path: Path) -> None:
    expected = json.loads((WDS / "raw.expected.json").read_text())
    dataset = opened(str(WDS / "shard-*.tar"), tmp_path)
    assert len(dataset) == len(expected["samples"] if isinstance(expected, dict) else expected)
    theirs = expected["samples"] if isinstance(expected, dict) else expected
    for ours, sample in zip((dataset[number] for number in range(len(dataset))), theirs, strict=True):
        parts = {
            name: value["sha256"] for name, value in sample.items() if isinstance(value, dict) and value.get("$") == "bytes"
        }
        assert {name: hashlib.sha256(ours[name]).hexdigest() for name in parts} == parts
        assert {name for name, value in ours.items() if isinstance(value, bytes)} == set(parts)
        assert ours["__key__"] == sample["__key__"]


@pytest.mark.parametrize("unit", UNITS)
def test_s1_a_sample_is_equal_by_members_from_a_whole_shard_and_from_a_local_one(
    unit: str, server: FaultyHttpServer, folder: Path
) -> None:
    expected = serve(server, 3, 8)
    urls = [f"{server.url}/data/s-{shard:03}.tar" for shard in range(3)]
    streamed = opened(urls, folder / "remote", shards=unit)
    local = opened(str(folder / "s-*.tar"), folder / "local")
    assert [content(sample) for sample in streamed] == expected == [content(sample) for sample in local]
    assert [content(streamed[number]) for number in (23, 0, 11)] == [expected[number] for number in (23, 0, 11)]


def test_sql_sees_keys_shards_urls_and_the_size_of_each_part(folder: Path) -> None:
    everything = opened(str(folder / "s-*.tar"), folder)
    expected = all_samples(3, 8)
    selected = {
        "__shard__ = 1 AND txt IS NOT NULL": [sample for sample in expected[8:16] if "txt" in sample],
        "__url__ LIKE '%/s-002.tar' AND jpg > 3004": [sample for sample in expected[16:] if len(sample["jpg"]) > 3004],
        "__key__ LIKE 'dir0/%'": expected[:8],
    }
    for where, wanted in selected.items():
        assert [content(sample) for sample in everything.select(where)] == wanted
    assert everything[0]["__url__"] == str(folder / "s-000.tar")
    assert everything[0]["txt"] == b"sample 0 of 0"
    assert everything[1]["txt"] is None
    assert everything[5]["__sample_key__"] == "dir0/00005"


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_a_query_with_columns_of_its_own_keeps_content_and_order(engine: str, folder: Path) -> None:
    query = "SELECT *, upper(__key__) AS loud FROM dataframe WHERE cls = 1 ORDER BY __key__ DESC"
    dataset = opened(str(folder / "s-*.tar"), folder, sql_query=query, source_options={"sql_engine": engine})
    assert isinstance(dataset.index, ShardIndex)
    assert [content(sample) for sample in dataset] == all_samples(3, 8)[::-1]
    assert dataset[0]["loud"] == "DIR2/00007"
    assert dataset[0]["__url__"] == str(folder / "s-002.tar")
    with pytest.raises(SchemaError, match=r"'jpg'.*SELECT \*"):
        opened(str(folder / "s-*.tar"), folder, sql_query="SELECT jpg, cls + 1 AS more FROM dataframe")
    bare = opened(str(folder / "s-*.tar"), folder, sql_query="SELECT __key__, length(__key__) AS size FROM dataframe")
    assert {name for name in bare[0] if not name.startswith("__")} == {"size"}


def test_rows_and_where_their_content_is_are_read_with_one_statement(folder: Path) -> None:
    dataset = opened(str(folder / "s-*.tar"), folder)
    first = dataset[3]
    found: list[str] = []

    def note(frame: FrameType, event: str, called: Any) -> None:
        name = frame.f_code.co_qualname
        if (event == "c_call" and called.__name__ == "execute") or (event == "call" and name == "Index._fetched"):
            found.append(name)  # the latter has SQLite called by C, which no profile sees

    sys.setprofile(note)
    try:
        again, *_ = dataset[[3, 20, 9]]
    finally:
        sys.setprofile(None)
    assert len(found) == 1, found
    assert content(again) == content(first)


def test_only_wanted_columns_are_in_samples_and_missing_ones_fail_by_name(folder: Path) -> None:
    src = str(folder / "s-*.tar")
    assert {name for name in opened(src, folder, columns_to_download=["cls"])[0] if not name.startswith("__")} == {"cls"}
    assert {name for name in opened(src, folder, columns_to_download=[])[0] if not name.startswith("__")} == set()
    dataset = opened(src, folder, columns_to_download=["txt"])
    assert dataset[3]["txt"] == b"sample 3 of 0"
    with pytest.raises(MissingFieldError, match=r"row 1 .*'txt'.*IS NOT NULL"):
        dataset[1]
    assert opened(src, folder, columns_to_download=["txt"], allow_missing_columns=True)[1]["txt"] is None
    with pytest.raises(SchemaError, match="'png'"):
        opened(src, folder, columns_to_download=["png"])


def test_s2_members_ask_for_the_bytes_of_the_plan_alone(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 1, 6, num_bytes=70_000)
    dataset = opened(f"{server.url}/data/s-000.tar", tmp_path, shards="members", shuffle_seed=3)
    before = len(ranges(server, 0))
    assert sorted(map(str, map(content, dataset))) == sorted(map(str, expected))
    sizes = ranges(server, 0)[before:]
    assert len(sizes) == len(expected)
    assert sum(sizes) <= sum(len(part) for sample in expected for part in sample.values()) + 6 * 4 * 512


@pytest.mark.parametrize("unit", ["members", "whole", "local"])
def test_empty_parts_and_samples_without_a_wanted_part_need_no_bytes(
    unit: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    data = tar_of(
        [("a", {"txt": b"", "jpg": b""}), ("b", {"jpg": b"x"}), ("c", {"txt": b""}), ("d", {"txt": b"y", "jpg": b""})]
    )
    server.objects["/data/s-000.tar"] = data
    (tmp_path / "s.tar").write_bytes(data)
    src, options = (str(tmp_path / "s.tar"), {}) if unit == "local" else (f"{server.url}/data/s-000.tar", {"shards": unit})
    expected = [(b"", b""), (None, b"x"), (b"", None), (b"y", b"")]
    dataset = opened(src, tmp_path, on_error="raise", **options)
    assert [(sample["txt"], sample["jpg"]) for sample in dataset] == expected
    texts = opened(src, tmp_path, on_error="raise", columns_to_download=["txt"], allow_missing_columns=True, **options)
    assert [sample["txt"] for sample in texts] == [text for text, _ in expected]
    assert texts[1]["txt"] is None


def test_whole_shards_are_fetched_once_each(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 3, 8)
    urls = [f"{server.url}/data/s-{shard:03}.tar" for shard in range(3)]
    dataset = opened(urls, tmp_path, shards="whole", shuffle_seed=3)
    for _ in range(2):
        assert sorted(map(str, map(content, dataset))) == sorted(map(str, expected))
    assert [len(ranges(server, shard)) for shard in range(3)] == [1, 1, 1], "for the index, where the epochs find them"


def test_shards_are_shuffled_and_the_rows_of_a_window_of_them_mixed(folder: Path) -> None:
    dataset = opened(str(folder / "s-*.tar"), folder, shuffle_seed=5, shuffle_window=1)
    order = [sample["__shard__"] for sample in dataset]
    assert [len(set(order[start : start + 8])) for start in (0, 8, 16)] == [1, 1, 1]
    mixed = [sample["__row__"] for sample in opened(str(folder / "s-*.tar"), folder, shuffle_seed=5)]
    whole = [sample["__row__"] for sample in opened(str(folder / "s-*.tar"), folder, shuffle_seed=5, shuffle_block_size=None)]
    assert sorted(mixed) == sorted(whole) == list(range(24))


def test_two_nodes_with_other_limits_and_units_take_the_same_rows(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 4, 6)
    urls = [f"{server.url}/data/s-{shard:03}.tar" for shard in range(4)]
    options: dict[str, Any] = {"shuffle_seed": 9, "shuffle_window": 2, "batch_size": 3}
    found = Counter[str]()
    for rank, (limit, unit) in enumerate([("1mb", "whole"), ("60kb", "members")]):
        world = World(rank=rank, world_size=2)
        node = opened(urls, tmp_path / str(rank), cache_limit=limit, shards=unit, world=world, **options)
        found.update(str(content(sample)) for sample in node)
    assert found == Counter(map(str, expected))


@pytest.mark.parametrize("unit", UNITS)
def test_a_state_of_every_step_goes_on_under_another_limit(unit: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    serve(server, 3, 4)
    urls = [f"{server.url}/data/s-{shard:03}.tar" for shard in range(3)]

    def loader(limit: str, unit: str) -> StreamingDataLoader:
        dataset = opened(urls, tmp_path / limit, cache_limit=limit, shards=unit, shuffle_seed=2, shuffle_window=2)
        return StreamingDataLoader(dataset, batch_size=3, collate_fn=list)

    def rows(batches: Iterable[list[Sample]]) -> list[list[int]]:
        return [[sample["__row__"] for sample in batch] for batch in batches]

    whole = loader("1mb", unit)
    states, seen = [], []
    for batch in whole:
        seen += rows([batch])
        states.append(whole.state_dict())
    for number, state in enumerate(states[:-1], start=1):
        other = loader("50kb", UNITS[unit == "members"])
        other.load_state_dict(state)
        assert rows(other) == seen[number:]


def test_workers_read_local_shards_and_survive_a_fork(folder: Path) -> None:
    dataset = opened(str(folder / "s-*.tar"), folder, shuffle_seed=1)
    assert dataset[0]["cls"] == b"0"  # opens a shard before the fork
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, collate_fn=list)
    assert sorted(str(content(sample)) for batch in loader for sample in batch) == sorted(map(str, all_samples(3, 8)))


def test_a_local_shard_that_changed_is_an_error(folder: Path) -> None:
    dataset = opened(str(folder / "s-000.tar"), folder, on_error="raise")
    (folder / "s-000.tar").write_bytes(tar_of(samples(7, 8)))
    with pytest.raises(SourceChangedError, match=r"s-000\.tar changed since it was indexed"):
        dataset[0]


def other_version(path: Path) -> None:
    """Write other content of equal sizes into a shard, as the same file."""
    made = [(key, {name: bytes(byte ^ 1 for byte in part) for name, part in parts.items()}) for key, parts in samples(0, 8)]
    data = tar_of(made)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("chunk", [None, 1], ids=["built", "lazy"])
@pytest.mark.parametrize("name", ["s-000.tar", "packed.tar.gz"])
def test_a_local_shard_that_changes_after_it_was_read_gives_nothing_of_the_other_version(
    name: str, chunk: int | None, folder: Path
) -> None:
    path = folder / name
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(tar_of(samples(0, 8))))
    with opened(str(path), folder, on_error="raise", lazy_index_chunk_size=chunk) as dataset:
        assert content(dataset[1]) == all_samples(1, 8)[1]
        other_version(path)
        dataset.cache.clear()
        for number in (2, 1):
            with pytest.raises(SourceChangedError, match=rf"{name} changed since it was indexed: open the dataset again"):
                dataset[number]
    with opened(str(path), folder, on_error="raise", lazy_index_chunk_size=chunk) as dataset:
        assert dataset[1]["jpg"] == bytes(byte ^ 1 for byte in all_samples(1, 8)[1]["jpg"])


@pytest.mark.parametrize("unit", UNITS)
def test_a_remote_shard_that_changed_is_an_error_and_nothing_is_mixed(
    unit: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    serve(server, 1, 8)
    dataset = opened(f"{server.url}/data/s-000.tar", tmp_path, on_error="raise", shards=unit)
    dataset.cache.clear()
    server.objects["/data/s-000.tar"] = tar_of(samples(7, 8))
    with pytest.raises(SourceChangedError, match=r"s-000\.tar changed since it was indexed"):
        list(dataset)


def test_shards_without_versions_are_named_once_since_another_one_would_not_be_noticed(
    server: FaultyHttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serve(server, num_shards=2, num_samples=3)
    url = server.url + "/data/s-{000..001}.tar"
    server.names_versions, server.last_modified = False, None
    with opened(url, tmp_path):
        pass
    warnings = [record.message for record in caplog.records if "Last-Modified" in record.message]
    assert len(warnings) == 1
    assert "of 2 of 2 shards, such as" in warnings[0]
    caplog.clear()
    server.last_modified = "Mon, 01 Jan 2024 00:00:00 GMT"
    with opened(url, tmp_path):
        assert "neither ETag" not in caplog.text


def test_s4_an_archive_that_ends_early_is_never_taken_for_a_short_one(folder: Path) -> None:
    (folder / "cut.tar").write_bytes(tar_of(samples(0, 8))[:9000])
    with pytest.raises(SourceError, match=r"cut\.tar"):
        opened(str(folder / "cut.tar"), folder)


COMPRESS: dict[str, Any] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}


def test_compressed_archives_are_told_by_their_bytes_and_fetched_once(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected: list[dict[str, bytes]] = []
    for shard, (name, compress) in enumerate([*COMPRESS.items(), ("lying", gzip.compress)]):
        made = samples(shard, 4)
        server.objects[f"/data/{name}.tar" + ("" if name == "lying" else f".{name}")] = compress(tar_of(made))
        expected += [{"__key__": key.encode(), **parts} for key, parts in made]
    paths = [*(f"/data/{name}.tar.{name}" for name in COMPRESS), "/data/lying.tar"]
    dataset = opened([server.url + path for path in paths], tmp_path, shuffle_seed=1, on_error="raise")
    for _ in range(2):
        assert sorted(map(str, map(content, dataset))) == sorted(map(str, expected))
    whole = [r.path for r in server.requests() if r.method == "GET" and str(r.range) in ("None", "bytes=0-")]
    assert sorted(path for path in whole if "lying" not in path) == sorted(paths[:3])


def test_a_local_compressed_archive_is_unpacked_once_and_a_changed_one_is_an_error(folder: Path) -> None:
    path = folder / "s.tar.gz"
    path.write_bytes(gzip.compress(tar_of(samples(0, 8))))
    assert [content(sample) for sample in opened(str(path), folder)] == all_samples(1, 8)
    dataset = opened(str(path), folder, on_error="raise")
    path.write_bytes(gzip.compress(tar_of(samples(9, 8))))
    with pytest.raises(SourceChangedError, match=r"s\.tar\.gz changed since it was indexed"):
        dataset[0]
    cut = folder / "cut.tar.gz"
    cut.write_bytes(gzip.compress(tar_of(samples(0, 8)))[:-20])
    with pytest.raises(SourceError, match=r"cut\.tar\.gz"):
        opened(str(cut), folder)


def test_shards_are_named_by_braces_double_colons_wildcards_and_commands_that_print_one(
    server: FaultyHttpServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = serve(server, 3, 8)
    monkeypatch.setenv("WDS_WHERE", server.url)
    for src in (
        f"{folder}/s-{{000..002}}.tar",
        f"{folder}/s-000.tar::{folder}/s-00{{1,2}}.tar",
        f"{server.url}/data/s-{{000..002}}.tar",
        f"pipe:curl -s -L {server.url}/data/s-000.tar::pipe:cat {folder}/s-001.tar::${{WHERE}}/data/s-002.tar",
        [f"{folder}/s-00[01].tar", Path(folder / "s-002.tar")],
    ):
        assert [sample["__key__"].encode() for sample in opened(src, folder)] == [sample["__key__"] for sample in expected]
    for wrong in ("pipe:ssh host cat a.tar", f"{folder}/s-{{000..002.tar", f"{folder}/s-000.tar::{folder}/table.csv::b.tar"):
        with pytest.raises(ConfigError):
            opened(wrong, folder)


def test_an_archive_that_unfolds_to_more_than_the_index_may_have_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(tar_of([("a", {"bin": bytes(40 << 20)})])))
    with pytest.raises(CacheFullError, match="index_limit"):
        opened(str(tmp_path / "bomb.tar.gz"), tmp_path, index_limit="4mb")
    left = sum(path.stat().st_size for path in (tmp_path / "cache/index").iterdir() if path.is_file())
    assert left < 4 << 20, "what was unpacked is removed"


def test_an_index_of_wids_names_its_archives(server: FaultyHttpServer, tmp_path: Path) -> None:
    document = json.loads((WDS / "index.json").read_text())
    server.objects |= {f"/w/{path.name}": path.read_bytes() for path in WDS.glob("shard-*.tar")}
    server.objects["/w/index.json"] = json.dumps(document).encode()
    rows = [sample["__key__"] for sample in opened(f"{server.url}/w/index.json", tmp_path / "remote")]
    assert rows == [sample["__key__"] for sample in opened(WDS / "index.json", tmp_path)]
    assert len(rows) == sum(shard["nsamples"] for shard in document["shardlist"])
    for key, wrong in (("nsamples", 1), ("filesize", 7)):
        other = json.loads(json.dumps(document))
        other["shardlist"][1][key] = wrong
        server.objects["/w/index.json"] = json.dumps(other).encode()
        with pytest.raises(SourceError, match=r"shard-000001\.tar has"):
            opened(f"{server.url}/w/index.json", tmp_path / key)


def test_a_remote_index_names_no_local_file_and_no_private_host(server: FaultyHttpServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret.tar"
    secret.write_bytes(tar_of(samples(0, 1)))
    for number, url in enumerate((f"file://{secret}", "http://169.254.169.254/a.tar", "../../../../etc/a.tar")):
        document = {"wids_version": 1, "shardlist": [{"url": url, "nsamples": 1}]}
        server.objects["/w/index.json"] = json.dumps(document).encode()
        with pytest.raises((AccessDeniedError, ObjectNotFoundError)):
            opened(f"{server.url}/w/index.json", tmp_path / str(number))


def test_an_index_of_litdata_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {}}')
    with pytest.raises(ConfigError, match="LitData"):
        opened(tmp_path / "index.json", tmp_path)


def test_wildcards_over_json_tables_are_tables(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.json").write_text('[{"x": 1}]')
    assert [sample["x"] for sample in opened(str(tmp_path / "*.json"), tmp_path)] == [1, 1]


def test_new_shards_at_the_end_are_added_to_the_index(folder: Path) -> None:
    src = str(folder / "s-*.tar")
    assert len(opened(src, folder)) == 24
    more = [("dir9/a", {"jpg": b"x" * 5000, "json": b"{}"})]
    (folder / "s-003.tar").write_bytes(tar_of(more))
    grown = opened(src, folder)
    assert [content(sample) for sample in grown] == [*all_samples(3, 8), {"__key__": b"dir9/a", **more[0][1]}]


def test_shards_beside_tables_are_refused(folder: Path) -> None:
    (folder / "t.csv").write_text("a\n1\n")
    with pytest.raises(ConfigError, match=r"shards .*s-000\.tar.* beside .*t\.csv"):
        opened([str(folder / "s-000.tar"), str(folder / "t.csv")], folder)


def test_a_predownload_transform_sees_sizes_and_may_leave_parts_out(server: FaultyHttpServer, tmp_path: Path) -> None:
    serve(server, 1, 4, num_bytes=300_000)
    seen: list[Any] = []

    def without_pictures(sample: Sample) -> Sample:
        seen.append(sample.pop("jpg"))
        return sample

    dataset = opened(f"{server.url}/data/s-000.tar", tmp_path, shards="members", predownload_transforms=[without_pictures])
    before = len(ranges(server, 0))
    assert [sample["cls"] for sample in dataset] == [b"0", b"1", b"2", b"3"]
    assert seen == [300_000, 300_001, 300_002, 300_003]
    assert max(ranges(server, 0)[before:]) < 300_000


@pytest.mark.parametrize("options", [{}, {"lazy_index_chunk_size": 1}], ids=["built", "lazy"])
@pytest.mark.parametrize("shards", UNITS)
def test_a_shard_whose_length_the_server_does_not_say_is_an_error_with_the_cure(
    options: dict[str, Any], shards: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    serve(server, 2, 4)
    server.script("/data/s-000.tar", always=FaultyAnswer(fault=Fault.NO_LENGTH))
    with pytest.raises(SourceError, match=r"s-000\.tar: the server does not say its length.*Content-Length.*, or read a copy$"):
        opened(f"{server.url}/data/s-{{000..001}}.tar", tmp_path, shards=shards, **options)
