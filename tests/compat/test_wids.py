"""wids: samples, samplers and indexes as its own package has them."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from sqlstream.compat import wids
from sqlstream.compat.wids.description import written
from sqlstream.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, SourceError, StorageError
from sqlstream.testing.servers import FaultyHttpServer
from tests.compat.webdataset.kit import NUM_ROWS, NUM_SAMPLES, numbered
from tests.goldens import FIXTURES, as_json, expected
from tests.stream.shards import serve, tar_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
GOLDEN = str(FIXTURES / "wds/index.json")
THEIRS = expected("wds/wids.expected.json")
PICKLED = {".pkl", ".pickle", ".pyd", ".pth", ".pt"}


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


def opened(shards: Any, tmp_path: Path, **options: Any) -> wids.ShardListDataset:
    return wids.ShardListDataset(shards, cache_dir=str(tmp_path / "cache"), **options)


def listed(tmp_path: Path) -> list[dict[str, Any]]:
    numbered(tmp_path / "s")
    return [{"url": str(tmp_path / f"s/s-{shard}.tar"), "nsamples": NUM_SAMPLES, "dataset": f"d{shard}"} for shard in range(4)]


def class_of(sample: dict[str, Any]) -> int:
    return int(sample[".cls"].read())


def without_pickles(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name not in PICKLED and not name.endswith(".html")}


def compared(sample: Any) -> Any:
    made = as_json(sample)
    made["__shard__"] = Path(made["__shard__"]).name
    if isinstance(made["__shardindex__"], dict):  # theirs is a number of numpy
        made["__shardindex__"] = made["__shardindex__"]["value"]
    return made


@pytest.mark.parametrize("form", ["raw", "PIL", "numpy"])
def test_samples_are_those_of_wids(form: str, tmp_path: Path) -> None:
    named: Any = {"raw": [], "PIL": [without_pickles, "PIL"], "numpy": [without_pickles, "numpy"]}[form]
    dataset = opened(GOLDEN, tmp_path, transformations=named)
    assert len(dataset) == THEIRS["len"] == dataset.total_length
    assert dataset.dataset_name == "golden"
    for number, theirs in enumerate(THEIRS[form]):
        wanted = without_pickles(theirs) if form != "raw" else theirs
        found = without_pickles(dataset[number]) if form != "raw" else dataset[number]
        assert compared(found) == {**wanted, "__shard__": Path(theirs["__shard__"]).name, "__shardindex__": number % 4}
    dataset.close()


def test_a_negative_number_counts_from_the_end_and_there_is_nothing_beyond(tmp_path: Path) -> None:
    dataset = opened(listed(tmp_path), tmp_path, transformations=class_of)
    assert dataset[-1] == NUM_ROWS - 1, "theirs gives the last sample of the first shard"
    for number in (NUM_ROWS, -NUM_ROWS - 1):
        with pytest.raises(IndexError, match=str(number)):
            dataset[number]
    dataset.close()


def test_a_list_of_shards_is_an_index_and_transformations_can_be_added(tmp_path: Path) -> None:
    dataset = opened(listed(tmp_path), tmp_path, transformations=[], dataset_name="mine")
    sample = dataset[9]
    assert (sample["__dataset__"], sample["__index__"], sample["__shardindex__"], sample["__key__"]) == ("d1", 9, 1, "009")
    assert isinstance(sample[".cls"], io.BytesIO)
    assert dataset.dataset_name == "mine"
    assert dataset.add_transform(class_of).add_transform(str)[9] == "9"
    assert dataset.__getitems__([3, 31]) == ["3", "31"]
    again = opened(listed(tmp_path), tmp_path, transformations=class_of)
    assert again[5] == 5
    for some in (dataset, again):
        some.close()


def test_members_whose_names_begin_with_two_underscores_are_parts(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar_of([("a", {"txt": b"1", "__source__": b"web", "__note__": b"2"})]))
    dataset = opened([{"url": str(tmp_path / "s.tar"), "nsamples": 1}], tmp_path, transformations=[])
    found = {name: value.read() for name, value in dataset[0].items() if isinstance(value, io.BytesIO)}
    assert found == {".txt": b"1", ".__source__": b"web", ".__note__": b"2"}
    dataset.close()


def test_an_index_may_name_a_base_and_options_replace_what_it_says(tmp_path: Path) -> None:
    numbered(tmp_path / "s")
    shards = [{"url": f"s-{shard}.tar", "nsamples": NUM_SAMPLES} for shard in range(4)]
    path = tmp_path / "elsewhere.json"
    path.write_text(json.dumps({"wids_version": 1, "shardlist": shards, "name": "all"}))
    with pytest.raises(ObjectNotFoundError, match=r"s-0\.tar"):
        opened(str(path), tmp_path)
    based = opened(str(path), tmp_path, transformations=class_of, base=f"{tmp_path}/s")
    assert [based[number] for number in (0, 31)] == [0, 31]
    fewer = opened(str(path), tmp_path, transformations=class_of, base=f"{tmp_path}/s", options={"shardlist": shards[:2]})
    assert len(fewer) == 2 * NUM_SAMPLES
    for some in (based, fewer):
        some.close()


@pytest.mark.parametrize("form", ["list", "index", "options", "base"])
def test_relative_paths_start_where_theirs_do(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(tmp_path / "s")
    shards = [{"url": f"s/s-{shard}.tar", "nsamples": NUM_SAMPLES} for shard in range(4)]
    document = {"wids_version": 1, "shardlist": shards, "base": "/not/read/at/the/top"}
    (tmp_path / "some.json").write_text(json.dumps(document))
    monkeypatch.chdir(tmp_path)
    options_of: dict[str, dict[str, Any]] = {"options": {"options": {"shardlist": shards}}, "base": {"base": "."}}
    options = options_of.get(form, {})
    dataset = opened(shards if form == "list" else "some.json", tmp_path / "other", transformations=[], **options)
    assert [int(dataset[number][".cls"].read()) for number in (0, 31)] == [0, 31]
    assert Path(dataset[0]["__shard__"]) == Path("s/s-0.tar")
    dataset.close()


@pytest.mark.parametrize("options", [{}, {"options": {"name": "mine"}}, {"base": "/data"}])
def test_a_remote_index_names_no_file_of_this_machine(
    options: dict[str, Any], server: FaultyHttpServer, tmp_path: Path
) -> None:
    shards = listed(tmp_path)
    server.objects["/data/index.json"] = json.dumps({"wids_version": 1, "shardlist": shards}).encode()
    with pytest.raises((AccessDeniedError, ObjectNotFoundError), match=r"s-0\.tar"):
        opened(f"{server.url}/data/index.json", tmp_path, transformations=[], **options)


@pytest.mark.parametrize("form", ["list", "index"])
def test_a_file_url_without_slashes_is_a_path(form: str, tmp_path: Path) -> None:
    numbered(tmp_path / "s")
    shards = [{"url": f"file:{tmp_path}/s/s-{shard}.tar", "nsamples": NUM_SAMPLES} for shard in range(4)]
    (tmp_path / "some.json").write_text(json.dumps({"wids_version": 1, "shardlist": shards}))
    named = shards if form == "list" else str(tmp_path / "some.json")
    dataset = opened(named, tmp_path, transformations=class_of)
    assert [dataset[number] for number in (0, 31)] == [0, 31]
    dataset.close()


def test_remote_shards_come_once(server: FaultyHttpServer, tmp_path: Path) -> None:
    serve(server, 3, 8)
    shards = [{"url": f"s-{shard:03}.tar", "nsamples": 8} for shard in range(3)]
    server.objects["/data/index.json"] = json.dumps({"wids_version": 1, "shardlist": shards}).encode()
    dataset = opened(f"{server.url}/data/index.json", tmp_path, transformations=[])
    assert [dataset[number]["__index__"] for number in (0, 23, 9, 23)] == [0, 23, 9, 23]
    assert dataset[9]["__shard__"] == f"{server.url}/data/s-001.tar"
    uses, misses = dataset.get_stats()
    assert uses >= misses > 0
    dataset.close()


def test_a_loader_with_workers_takes_each_number_of_the_sampler(tmp_path: Path) -> None:
    dataset = opened(listed(tmp_path), tmp_path, transformations=class_of)
    sampler = wids.ShardListSampler(dataset, shufflefirst=True)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
    epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]  # [2, n]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 2
    assert epochs[0] != epochs[1]
    assert pickle.loads(pickle.dumps(dataset))[7] == 7
    dataset.close()


def test_samplers_give_the_numbers_of_wids(tmp_path: Path) -> None:
    dataset = opened(GOLDEN, tmp_path, transformations=[])
    for name, sampler in {
        "ShardListSampler(seed=0), 3 epochs": wids.ShardedSampler(dataset),
        "ShardListSampler(seed=7, shufflefirst=True)": wids.ShardListSampler(dataset, seed=7, shufflefirst=True),
        "ChunkedSampler(chunksize=4)": wids.ChunkedSampler(dataset, chunksize=4),
        "ChunkedSampler(chunksize=4, shuffle=False)": wids.ChunkedSampler(dataset, chunksize=4, shuffle=False),
    }.items():
        assert [list(sampler) for _ in range(3)] == THEIRS[name], name
    dataset.close()


def test_ranks_have_parts_of_the_numbers_that_stay() -> None:
    parts = [wids.DistributedChunkedSampler(range(10), num_replicas=3, rank=rank, chunksize=2) for rank in range(3)]
    assert [len(part) for part in parts] == [4, 4, 4]
    assert [sorted(part) for part in parts] == [sorted(part) for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.warns(UserWarning, match="a single process is assumed"):
        assert sorted(wids.DistributedChunkedSampler(range(5))) == list(range(5))
    with pytest.warns(UserWarning, match="drop_last"), pytest.raises(ConfigError, match="rank=3"):
        wids.DistributedChunkedSampler(range(5), num_replicas=3, rank=3, drop_last=True)
    assert len(wids.ChunkedSampler(range(10), num_samples=(2, 7), dslength_per_replica=9)) == 9


@pytest.mark.parametrize(
    ("shards", "options", "message"),
    [
        ([{"url": "a.tar", "nsamples": 1}], {"localname": str}, "give cache_dir="),
        ([{"url": "a.tar", "nsamples": 1}], {"transformations": "jpeg"}, "'PIL', 'numpy'"),
        ([{"url": "a.tar"}], {}, "nsamples"),
        ([], {}, "no index of wids"),
    ],
)
def test_what_has_no_equal_is_refused(shards: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(shards, tmp_path, **options)


def test_indexes_of_indexes_and_shards_by_number_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"wids_version": 1, "datasets": [{"source_url": "other.json"}]}))
    with pytest.raises(ConfigError, match="ConcatDataset"):
        opened(str(path), tmp_path)
    dataset = opened(listed(tmp_path), tmp_path)
    dataset.check_cache_misses()
    with pytest.raises(ConfigError, match=r"dataset\[3\] is the sample"):
        dataset.get_shard(3)
    dataset.close()


def test_an_index_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    with pytest.raises(ObjectNotFoundError, match=r"the index .*index.json is not there"):
        opened(str(index), tmp_path)
    index.write_text("{")
    with pytest.raises(SourceError, match=r"index.json is no index of wids, since it is no JSON"):
        opened(str(index), tmp_path)
    with pytest.raises(StorageError, match=r"the index .* cannot be read"):
        opened(str(tmp_path), tmp_path)


def test_the_working_directory_may_be_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = listed(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    dataset = wids.ShardListDataset(shards, cache_dir=".")
    assert len(dataset) == NUM_ROWS
    dataset.close()
    assert [path.suffix for path in (tmp_path / "here-wids").iterdir()] == [".json"]


def test_threads_may_open_one_list_of_shards_at_a_time(tmp_path: Path) -> None:
    shards = [{**shard, "more": "x" * 200_000} for shard in listed(tmp_path)]

    def write(number: int) -> Path:
        return written({"shardlist": shards, "number": number // 8}, str(tmp_path / "cache"))

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(write, range(160)))
    assert len(set(made)) == 20
    assert sorted((tmp_path / "cache-wids").iterdir()) == sorted(set(made))
