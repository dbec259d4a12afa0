"""Lazy indexes of all kinds of shards: compressed, ZIP, those that an index file counts, files of maps."""

from __future__ import annotations

import gzip
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import msgpack
import pytest

from sqlstream.errors import (
    ConfigError,
    SchemaError,
    SourceError,
)
from sqlstream.index.build.lazy_shards.index import LazyShardIndex
from sqlstream.testing.servers import FaultyHttpServer
from tests.processes import ROOT
from tests.stream.lazy_shards import NAMED, NUM_ROWS, NUM_SAMPLES, NUM_SHARDS, WINDOW, asked, lazily, written
from tests.stream.shards import content, opened, samples, serve, tar_of


@pytest.fixture
def expected(server: FaultyHttpServer) -> list[dict[str, bytes]]:
    return serve(server, NUM_SHARDS, NUM_SAMPLES, num_bytes=700)


@pytest.fixture
def src(server: FaultyHttpServer, expected: list[dict[str, bytes]]) -> str:
    assert len(expected) == NUM_ROWS
    return f"{server.url}/data/{NAMED}"


@pytest.fixture
def local(tmp_path: Path) -> str:
    return written(tmp_path / "shards")


@pytest.mark.parametrize("suffix", [".tar.gz", ".tgz"])
@pytest.mark.parametrize("kind", ["remote", "local"])
def test_compressed_shards_come_once(kind: str, suffix: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = []
    for shard in range(3):
        made = samples(shard, 10)
        data = gzip.compress(tar_of(made))
        server.objects[f"/data/c-{shard}{suffix}"] = data
        (tmp_path / f"c-{shard}{suffix}").write_bytes(data)
        expected += [{"__key__": key.encode(), **parts} for key, parts in made]
    base = f"{server.url}/data" if kind == "remote" else str(tmp_path)
    with lazily(f"{base}/c-{{0..2}}{suffix}", tmp_path) as dataset:
        assert [content(sample) for sample in dataset] == expected
    whole = [request for request in server.requests() if request.method == "GET" and request.range in (None, "None")]
    assert len(whole) == (3 if kind == "remote" else 0)


def test_a_compressed_shard_under_the_name_of_a_plain_one_is_told_by_its_bytes(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    made = samples(0, 10)
    server.objects["/data/plain.tar"] = gzip.compress(tar_of(made))
    server.objects["/data/packed.tar.gz"] = tar_of(made)
    for name in ("plain.tar", "packed.tar.gz"):
        with lazily(f"{server.url}/data/{name}", tmp_path / name) as dataset:
            assert [content(sample) for sample in dataset] == [{"__key__": key.encode(), **parts} for key, parts in made]


@pytest.mark.parametrize("kind", ["remote", "local"])
def test_zip_shards_are_chunks_too(kind: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = []
    for shard in range(3):
        path = tmp_path / f"z-{shard}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for number in range(8):
                data = b"%d of %d " % (number, shard) * 50
                archive.writestr(f"{shard}-{number}.txt", data, zipfile.ZIP_DEFLATED)
                expected.append(data)
        server.objects[f"/data/{path.name}"] = path.read_bytes()
    base = f"{server.url}/data" if kind == "remote" else str(tmp_path)
    with lazily(f"{base}/z-{{0..2}}.zip", tmp_path) as dataset:
        assert [sample["txt"] for sample in dataset] == expected
        assert len(dataset) == len(expected)
    with lazily(f"{base}/z-{{0..2}}.zip", tmp_path / "shuffled", shuffle_seed=1) as dataset:
        assert sorted(sample["txt"] for sample in dataset) == sorted(expected)


# -- shards that an index file counts ---------------------------------------------------------------------------------


def wids_index(folder: Path, count: int = NUM_SAMPLES) -> Path:
    shards = [{"url": f"s-{shard:03}.tar", "nsamples": count} for shard in range(NUM_SHARDS)]
    path = folder / "wids.json"
    path.write_text(json.dumps({"wids_version": 1, "shardlist": shards}))
    return path


@pytest.mark.parametrize("seed", [None, 5])
def test_shards_that_wids_counts_have_a_length_and_the_order_of_a_built_index(
    seed: int | None, server: FaultyHttpServer, src: str, tmp_path: Path
) -> None:
    server.objects["/data/wids.json"] = wids_index(tmp_path).read_bytes()
    index = f"{server.url}/data/wids.json"
    with lazily(index, tmp_path, shuffle_seed=seed) as lazy:
        assert isinstance(lazy.index, LazyShardIndex)
        assert len(lazy) == NUM_ROWS
        assert asked(server) == ["/data/wids.json", "/data/s-000.tar"] or asked(server)[-1] == "/data/s-000.tar"
        got = list(lazy)
    with opened(index, tmp_path / "built", shuffle_seed=seed, shuffle_window=WINDOW) as built:
        assert list(built) == got


def test_shards_of_wids_may_be_compressed_and_have_a_size(server: FaultyHttpServer, tmp_path: Path) -> None:
    made = [samples(shard, 10) for shard in range(3)]
    named = []
    for shard, some in enumerate(made):
        data = server.objects[f"/data/w-{shard}.tar.gz"] = gzip.compress(tar_of(some))
        named.append({"url": f"w-{shard}.tar.gz", "nsamples": 10, "filesize": len(data)})
    server.objects["/data/w.json"] = json.dumps({"wids_version": 1, "shardlist": named}).encode()
    with lazily(f"{server.url}/data/w.json", tmp_path) as dataset:
        wanted = [{"__key__": key.encode(), **parts} for some in made for key, parts in some]
        assert [content(sample) for sample in dataset] == wanted
    server.objects["/data/w-1.tar.gz"] = gzip.compress(tar_of(samples(5, 11)))
    with lazily(f"{server.url}/data/w.json", tmp_path / "other") as dataset, pytest.raises(SourceError, match="w-1"):
        list(dataset)


def test_a_count_of_wids_that_is_wrong_is_an_error(local: str, tmp_path: Path) -> None:
    index = wids_index(Path(local).parent)
    (Path(local).parent / "s-002.tar").write_bytes(tar_of(samples(2, NUM_SAMPLES - 1, 700)))
    with lazily(index, tmp_path) as dataset, pytest.raises(SourceError, match="has 19 samples"):
        list(dataset)


MDS = ROOT / "tests/fixtures/mds"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in MDS.glob("*/index.json")))
@pytest.mark.parametrize("kind", ["remote", "local"])
def test_mds_has_its_length_at_once_and_the_samples_of_a_built_index(
    name: str, kind: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    for path in (MDS / name).rglob("*"):
        if path.is_file():
            server.objects[f"/mds/{path.relative_to(MDS / name)}"] = path.read_bytes()
    where = f"{server.url}/mds/" if kind == "remote" else str(MDS / name)
    options: dict[str, Any] = {"source_options": {"allow_pickle": True, "decode": False}}
    for seed in (None, 3):
        with lazily(where, tmp_path, shuffle_seed=seed, **options) as lazy:
            assert len(lazy) > 0
            got = list(lazy)
        with opened(where, tmp_path / "built", shuffle_seed=seed, shuffle_window=WINDOW, **options) as built:
            assert list(built) == got


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("kind", ["remote", "local"])
def test_files_of_maps_are_chunks_too(kind: str, seed: int | None, server: FaultyHttpServer, tmp_path: Path) -> None:
    for shard in range(4):
        data = b"".join(msgpack.packb({"id": 10 * shard + number, "raw": bytes([shard, number])}) for number in range(10))
        server.objects[f"/data/r-{shard}.msgpack"] = data
        (tmp_path / f"r-{shard}.msgpack").write_bytes(data)
    base = f"{server.url}/data" if kind == "remote" else str(tmp_path)
    with lazily(f"{base}/r-{{0..3}}.msgpack", tmp_path, where="id % 2 = 1", shuffle_seed=seed) as dataset:
        got = [(sample["id"], sample["raw"]) for sample in dataset]
        assert sorted(got) == [(number, bytes(divmod(number, 10))) for number in range(1, 40, 2)]


def test_a_file_of_maps_whose_values_cannot_be_rows_as_those_of_the_first_is_an_error(tmp_path: Path) -> None:
    for shard, value in enumerate(["text", b"bytes"]):
        (tmp_path / f"r-{shard}.msgpack").write_bytes(msgpack.packb({"id": shard, "raw": value}))
    with lazily(f"{tmp_path}/r-{{0..1}}.msgpack", tmp_path) as dataset, pytest.raises(SchemaError, match="r-1"):
        list(dataset)


def maps(folder: Path, *values: object) -> str:
    """Files of two maps each, whose column `a` has one value."""
    for shard, value in enumerate(values):
        (folder / f"r-{shard}.msgpack").write_bytes(b"".join(msgpack.packb({"k": number, "a": value}) for number in range(2)))
    return f"{folder}/r-{{0..{len(values) - 1}}}.msgpack"


@pytest.mark.parametrize(
    "values",
    [(True, "q"), (True, 2.5), ("q", [1]), (b"q", {"x": 1}), (3, "q"), (3, 2.5), (3, 2**63), ([1], 3), (None, 3)],
    ids=repr,
)
def test_values_of_another_type_than_the_first_shard_has_are_an_error(values: tuple[object, object], tmp_path: Path) -> None:
    src = maps(tmp_path, *values)
    for where in (None, "k >= 0"):
        with lazily(src, tmp_path, where=where) as dataset, pytest.raises(SchemaError, match=r"'a'.*r-1\.msgpack.*lazy_index"):
            list(dataset)


@pytest.mark.parametrize("values", [(2.5, 3), (3, None), (2**63, 3), ([1], {"x": 2})], ids=repr)
def test_values_that_a_column_of_the_first_shard_can_hold_are_what_a_built_index_gives(
    values: tuple[object, object], tmp_path: Path
) -> None:
    src = maps(tmp_path, *values)
    for where in (None, "k >= 0"):
        lazy, built = (opened(src, tmp_path, where=where, lazy_index_chunk_size=chunk) for chunk in (1, None))
        assert [repr(sample["a"]) for sample in lazy] == [repr(sample["a"]) for sample in built]


def test_a_filter_never_leaves_out_rows_whose_values_it_cannot_see(tmp_path: Path) -> None:
    src = maps(tmp_path, "text", b"bytes")
    for _ in range(2):  # nor the next run, which finds what the filter has kept
        with (
            lazily(src, tmp_path, where="a IS NOT NULL") as dataset,
            pytest.raises(SchemaError, match=r"r-1\.msgpack has values"),
        ):
            list(dataset)


def test_kinds_of_rows_stay_apart(local: str, tmp_path: Path) -> None:
    with tarfile.open(local.replace(NAMED, "s-000.tar")) as archive:
        assert archive.getnames()
    table = tmp_path / "rows.csv"
    table.write_text("a\n1\n")
    with pytest.raises(ConfigError, match="needs Parquet files"):
        lazily(table, tmp_path)
