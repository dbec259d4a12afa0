"""A chain is one dataset of ours: its order, ranks, epochs and state; stages that cannot be part of it run as they are."""

from __future__ import annotations

import itertools
import logging
import math
import os
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import sqlstream.compat.webdataset as wds
from sqlstream import StreamingDataset
from sqlstream.compat.webdataset.stages.each_sample import Map
from sqlstream.compat.webdataset.stages.in_engine import SampleStages
from sqlstream.compat.webdataset.tariterators import FromRow
from sqlstream.errors import CacheClosedError, ConfigError, StateError
from sqlstream.transforms.base import Chain
from sqlstream.world import World
from tests.compat.webdataset.kit import KEYS, NUM_ROWS, classes, number_of, numbered, opened

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def doubled(number: int) -> int:
    return 2 * number


def twice(samples: Iterable[int]) -> Iterator[int]:
    for sample in samples:
        yield sample
        yield sample


def outcomes(pipeline: wds.DataPipeline) -> list[str]:
    """Whether each stage is part of one dataset."""
    return ["→" if "→" in line else "·" for line in pipeline.explain().splitlines()]


def test_all_chains_of_one_dataset_are_opened_once_and_closed_together(tmp_path: Path) -> None:
    dataset = opened(numbered(tmp_path / "s"), tmp_path)
    chain = dataset.shuffle(4).decode().map(number_of)
    loaded = wds.WebLoader(chain.batched(4), batch_size=None)
    assert len({id(some.streaming.index) for some in (dataset, chain, loaded) if some.streaming is not None}) == 1
    loaded.close()
    for some in (dataset, chain):
        with pytest.raises(CacheClosedError):
            list(some)


def test_a_chain_is_one_dataset_and_what_cannot_be_part_of_it_runs_as_it_is(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        assert isinstance(dataset.streaming, StreamingDataset)
        assert list(dataset) == list(range(NUM_ROWS))
        chain = dataset.shuffle(9).map(doubled).compose(twice).slice(6).map(doubled)
        first = list(chain)
        assert first[::2] == first[1::2] == [4 * number for number in list(dataset.shuffle(9))[:3]]
        assert outcomes(chain) == ["→"] * 9 + ["·"] * 3
        assert "twice" in chain.explain().splitlines()[-3]
        assert len(outcomes(dataset)) == 7, "a chain that is composed of another one leaves that as it is"


def test_stages_that_are_put_into_the_list_itself_run_too(tmp_path: Path) -> None:
    with opened(numbered(tmp_path / "s"), tmp_path) as dataset:
        dataset.pipeline.append(wds.map(number_of))
        assert list(dataset) == list(range(NUM_ROWS))
        dataset.pipeline += [wds.map(doubled), wds.batched(8, collation_fn=None)]
        assert [len(batch) for batch in dataset] == [8] * 4
        assert set(outcomes(dataset)) == {"→"}
        loader = wds.WebLoader(dataset, batch_size=None)
        loader.pipeline.append(wds.slice(2))
        assert len(list(loader)) == 2


def beside(samples: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Keys of samples, compared with those that another reader of their shard has at the same place."""
    url = ""
    others: Iterator[Any] = iter(())
    for sample in samples:
        if sample["__url__"] != url:
            url = sample["__url__"]
            others = iter(wds.tarfile_samples([{"url": url}]))
        assert next(others)["__key__"] == sample["__key__"]
        yield sample["__key__"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stage_of_the_user_behind_the_reader_has_the_samples_of_a_shard_one_behind_the_other(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLSTREAM_CACHE", str(tmp_path / "cache"))
    with opened(numbered(tmp_path / "s"), tmp_path, shardshuffle=4) as dataset:
        chain = dataset.compose(beside)
        keys = [*itertools.chain(*DataLoader(chain, batch_size=8, num_workers=num_workers, collate_fn=list))]
        assert sorted(keys) == KEYS
        assert set(outcomes(chain)) == {"·"}
        assert "beside  " in chain.explain().splitlines()[-1]
        with pytest.raises(StateError, match="one behind the other"):
            chain.state_dict()


def test_a_pipeline_of_functions_is_the_same_dataset_as_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    stages = [
        wds.SimpleShardList(numbered(tmp_path / "s")),
        wds.shuffle(10),
        wds.split_by_node,
        [wds.split_by_worker],
        wds.tarfile_to_samples(),
        None,
        wds.decode(),
        wds.map(number_of),
    ]
    with wds.DataPipeline(*stages) as pipeline, classes(tmp_path / "s", tmp_path, shardshuffle=4) as chain:
        assert set(outcomes(pipeline)) == {"→"}
        assert list(pipeline) == list(chain)
        assert sorted(chain) == list(range(NUM_ROWS))


def test_what_does_not_begin_with_shards_runs_as_it_is() -> None:
    pipeline = wds.DataPipeline(wds.MockDataset({"a": 1}, 5), wds.map(dict), wds.batched(2))
    assert [len(batch["a"]) for batch in pipeline] == [2, 2, 1]
    assert outcomes(pipeline) == ["·"] * 3
    with pytest.raises(StateError, match="does not begin with shards"):
        pipeline.state_dict()
    assert list(wds.FluidWrapper([1, 2, 3]).select(lambda number: number > 1)) == [2, 3]
    with pytest.raises(ValueError, match="no stage of a pipeline"):
        list(wds.DataPipeline(range(1), 5))


def test_without_a_shuffle_samples_are_in_the_order_of_the_shards_and_with_one_each_epoch_has_another(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        assert [list(dataset), list(dataset)] == [list(range(NUM_ROWS))] * 2
        shuffled = dataset.shuffle(100)
        first, second = list(shuffled), list(shuffled)
        assert sorted(first) == sorted(second) == list(range(NUM_ROWS))
        assert len({*map(tuple, (first, second, range(NUM_ROWS)))}) == 3
        assert list(dataset.shuffle(100)) == first, "without a seed it is 0"
    with classes(tmp_path / "s", tmp_path, shardshuffle=True, seed=5) as other:
        assert list(other) != first


@pytest.mark.parametrize("idle", [wds.shuffle(0), wds.shuffle(1), wds.detshuffle(0)], ids=repr)
def test_a_shuffle_whose_buffer_has_one_sample_mixes_nothing(idle: Any, tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        shards = wds.SimpleShardList(list(dataset.pipeline[0].urls))
        pipeline = wds.DataPipeline(shards, idle, wds.tarfile_to_samples(), idle, wds.map(number_of))
        assert list(pipeline) == list(range(NUM_ROWS))
        assert outcomes(pipeline) == ["→"] * 5
        ordered = wds.DataPipeline(shards, wds.tarfile_to_samples(), idle, twice)
        assert "one behind the other" in ordered.explain()


def test_the_seed_of_the_environment_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with classes(tmp_path / "s", tmp_path, shardshuffle=2, seed=7) as dataset:
        expected = list(dataset)
    monkeypatch.setenv("WDS_SEED", "7")
    with classes(tmp_path / "s", tmp_path, shardshuffle=2) as dataset:
        assert list(dataset) == expected
    monkeypatch.setenv("WDS_SEED", "seven")
    with pytest.raises(ConfigError, match=r"^environment variable WDS_SEED='seven' is not a whole number"):
        classes(tmp_path / "s", tmp_path)
    for name, value in (("cache_size", "10gb"), ("cache_size", math.inf), ("cache_size", None), ("seed", "seven")):
        with pytest.raises(ConfigError, match=f"^{name}={value!r} is not a whole number"):
            classes(tmp_path / "s", tmp_path, **{name: value})


def test_cache_directory_and_size_are_those_of_the_arguments_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    src = numbered(tmp_path / "s")
    with opened(src, tmp_path, cache_size=1 << 20) as dataset:
        assert dataset.streaming is not None
        assert (dataset.streaming.cache.path, dataset.streaming.cache.limit_bytes) == (tmp_path / "cache", 1 << 20)
    assert capsys.readouterr().err == ""
    for name, value in {"WDS_CACHE": str(tmp_path / "b"), "GOPEN_VERBOSE": "1", "WDS_VERBOSE_CACHE": "1"}.items():
        monkeypatch.setenv(name, value)
    with opened(src, tmp_path) as dataset:
        assert dataset.streaming is not None
        assert dataset.streaming.cache.path == tmp_path / "b"
        list(dataset)
    printed = capsys.readouterr().err
    assert printed.count("GOPEN ") == 4
    assert "# cache" in printed


@pytest.mark.parametrize("taken", [1, 9, 31])
def test_a_run_goes_on_from_a_state_in_the_middle(taken: int, tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path, shardshuffle=4, seed=3) as dataset:
        list(dataset)
        epoch = iter(dataset)
        before = list(itertools.islice(epoch, taken))
        state = dataset.state_dict()
        rest = list(epoch)
    with classes(tmp_path / "s", tmp_path, shardshuffle=4, seed=3) as again:
        again.load_state_dict(state)
        assert list(again) == rest
        assert sorted(before + rest) == list(range(NUM_ROWS))
        third = list(again)
    with classes(tmp_path / "s", tmp_path, shardshuffle=4, seed=3) as again:
        again.set_epoch(2)
        assert list(again) == third


def shares(src: str, tmp_path: Path, *, batched: bool) -> list[int]:
    """What two ranks with two workers each take of an epoch."""
    taken: list[int] = []
    for rank in range(2):
        with opened(src, tmp_path, shardshuffle=4, nodesplitter=wds.split_by_node) as dataset:
            chain = dataset.shuffle(10).decode().map(number_of)
            chain = chain.batched(4, collation_fn=None) if batched else chain
            chain = chain.for_world(World(rank=rank, world_size=2))
            taken += itertools.chain(*DataLoader(chain, batch_size=None if batched else 4, num_workers=2, collate_fn=list))
    return taken


@pytest.mark.parametrize("batched", [False, True])
def test_each_sample_comes_once_with_two_workers_on_each_of_two_ranks(batched: bool, tmp_path: Path) -> None:
    taken = shares(numbered(tmp_path / "s"), tmp_path, batched=batched)
    assert sorted(taken) == list(range(NUM_ROWS))


def test_ranks_are_those_of_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src, taken = numbered(tmp_path / "s"), list[int]()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with opened(src, tmp_path, shardshuffle=4) as dataset:
            taken += dataset.decode().map(number_of)
        with opened(src, tmp_path, shardshuffle=4, nodesplitter=None) as dataset:
            assert sorted(dataset.decode().map(number_of)) == list(range(NUM_ROWS)), "each rank takes all"
    assert sorted(taken) == list(range(NUM_ROWS))


def test_a_splitter_of_the_user_runs_once_on_the_list_of_shards(tmp_path: Path) -> None:
    def last_shard(shards: Iterable[Any]) -> list[Any]:
        return list(shards)[-1:]

    with opened(numbered(tmp_path / "s"), tmp_path, nodesplitter=last_shard) as dataset:
        assert [sample["__key__"] for sample in dataset] == KEYS[24:]
        assert "1 are left" in dataset.explain()
    with pytest.raises(ConfigError, match="workersplitter=last_shard"):
        opened(numbered(tmp_path / "s"), tmp_path, workersplitter=last_shard)


def of_rank(shards: Iterable[Any]) -> Iterator[Any]:
    """As users write it: the shards of a rank."""
    return itertools.islice(shards, int(os.environ["RANK"]), None, int(os.environ["WORLD_SIZE"]))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_that_a_function_of_the_user_gives_a_rank_are_not_dealt_to_ranks_again(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, taken = numbered(tmp_path / "s"), list[int]()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with opened(src, tmp_path, nodesplitter=of_rank) as dataset:
            taken += DataLoader(dataset.decode().map(number_of), batch_size=None, num_workers=num_workers)
    assert sorted(taken) == list(range(NUM_ROWS))


def test_workers_that_are_places_of_their_own_share_the_shards_that_a_function_gives_their_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, taken = numbered(tmp_path / "s"), list[int]()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for place in range(4):
        monkeypatch.setenv("RANK", str(place // 2))
        with opened(src, tmp_path, nodesplitter=of_rank) as dataset:
            taken += dataset.decode().map(number_of).for_world(World(rank=place, world_size=4), num_workers=2)
    assert sorted(taken) == list(range(NUM_ROWS))


def of_worker(shards: Iterable[Any]) -> Iterator[Any]:
    info = get_worker_info()
    return itertools.islice(shards, 0 if info is None else info.id, None, 1 if info is None else info.num_workers)


class MadeInWorkers(IterableDataset[Any]):
    """Each worker makes a pipeline of the shards that it has chosen itself.

    Args:
        src: All shards.
        how: By a stage, as timm has it, or before there is a pipeline; `"engine"`: the pipeline's own splitter chooses.
    """

    def __init__(self, src: str, how: str) -> None:
        self._src, self._how = src, how

    def __iter__(self) -> Iterator[int]:
        if self._how == "list":
            urls = [*of_worker(wds.shardlists.expand_urls(self._src))]
            return iter(wds.WebDataset(urls, nodesplitter=None, workersplitter=None, shardshuffle=9).shuffle(9).map(number_of))
        splitter = of_worker if self._how == "stage" else wds.split_by_worker
        return iter(wds.DataPipeline(wds.SimpleShardList(self._src), splitter, wds.tarfile_to_samples(), wds.map(number_of)))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["stage", "list", "engine"])
def test_shards_that_a_worker_has_chosen_are_not_dealt_to_workers_again(
    how: str, num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQLSTREAM_CACHE", str(tmp_path / "cache"))
    loader = DataLoader(MadeInWorkers(numbered(tmp_path / "s"), how), batch_size=None, num_workers=num_workers)
    assert sorted(loader) == list(range(NUM_ROWS))


@pytest.mark.parametrize(("function", "message"), [(itertools.cycle, "has no end"), (lambda _shards: [], "leaves none of 4")])
def test_a_function_that_leaves_no_list_of_shards_is_refused(
    function: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(numbered(tmp_path / "s"), tmp_path, nodesplitter=function)


def test_an_epoch_of_a_given_size_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        dataset.with_epoch(20)
        assert [list(dataset) for _ in range(3)] == [
            list(range(20)),
            [*range(20, 32), *range(8)],
            list(range(8, 28)),
        ]
        assert list(dataset.repeat(2)) == [*range(28, 32), *range(32)]
    with classes(tmp_path / "s", tmp_path, resampled=True) as endless:
        endless.with_epoch(80)
        counts = list(endless)
        assert all(2 <= counts.count(number) <= 3 for number in range(NUM_ROWS)), "each as often as the others"
        assert len(counts) == 80


def test_a_length_is_what_it_is_set_to(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        with pytest.raises(TypeError, match="with_length"):
            len(dataset)
        with pytest.warns(UserWarning, match="len"):
            assert len(dataset.with_length(7)) == 7
        assert bool(dataset.map(doubled))
        assert len(list(dataset)) == NUM_ROWS


def test_the_handler_of_a_stage_says_what_becomes_of_its_samples(tmp_path: Path) -> None:
    def refuse(number: int) -> int | None:
        if number == 3:
            raise KeyError(number)
        return None if number == 5 else number

    with classes(tmp_path / "s", tmp_path) as dataset:
        with pytest.raises(KeyError) as caught:
            list(dataset.map(refuse))
        assert "failed on sample '003'" in caught.value.__notes__[0]
        left = [number for number in range(NUM_ROWS) if number not in (3, 5)]
        assert list(dataset.map(refuse, handler=wds.ignore_and_continue)) == left
        assert list(dataset.map(refuse, handler=wds.ignore_and_stop)) == [0, 1, 2]
        with pytest.warns(UserWarning, match="KeyError"):
            assert len(list(dataset.map(refuse, handler=wds.warn_and_continue))) == NUM_ROWS - 2
        lenient = opened(numbered(tmp_path / "s"), tmp_path, handler=wds.ignore_and_continue)
        with lenient, pytest.raises(KeyError):
            list(lenient.decode().map(number_of).map(refuse))
        assert list(dataset.select(lambda number: number > 29)) == [30, 31]


def test_random_numbers_of_stages_depend_on_seed_epoch_and_position(tmp_path: Path) -> None:
    def drawn(number: int) -> float:
        return random.random()

    with classes(tmp_path / "s", tmp_path) as dataset:
        chain = dataset.map(drawn)
        first, second = list(chain), list(chain)
        assert list(dataset.map(drawn)) == first != second
        kept = list(dataset.rsample(0.5))
        assert 0 < len(kept) < NUM_ROWS
        assert list(dataset.rsample(0.5)) == kept


def read_key(data: bytes) -> dict[str, int]:
    return {"length": len(data)}


def draws(value: Any) -> float:
    return random.random()


def drops(error: Exception) -> bool:
    return random.random() < 2


class EqualToAll:
    """Not by its looks, but by what it is, a function is one of ours."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1

    def __call__(self, *args: Any) -> bool:
        return random.random() < 2


class Noisy(Map):
    def take(self, sample: Any) -> Any:
        return {**super().take(sample), "noise": random.random()}


@pytest.mark.parametrize(
    ("stages", "is_seeded"),
    [
        ([wds.decode("pil"), wds.rename(image="jpg"), wds.to_tuple("image", "cls"), wds.map_tuple(None, int)], False),
        (
            [wds.decode(wds.handle_extension("key", read_key)), wds.map_dict(cls=abs), wds.select(len), wds.associate(dict)],
            False,
        ),
        ([wds.map(doubled, handler=wds.warn_and_continue)], False),
        ([wds.decode(wds.handle_extension("key", draws))], True),
        ([wds.map_tuple(None, draws)], True),
        ([wds.map(doubled), wds.rsample(0.5)], True),
        ([wds.associate({"key": {"a": random.Random(1)}})], True),
        ([wds.map(doubled, handler=drops)], True),
        ([Noisy(doubled)], True),
        ([wds.map(doubled, handler=EqualToAll())], True),
        ([wds.decode(EqualToAll())], True),
    ],
)
def test_samples_are_seeded_where_a_function_of_a_stage_may_draw(stages: list[Any], is_seeded: bool) -> None:
    chain = Chain([SampleStages([FromRow(), *stages])], seed=1, stage=1)
    assert chain.cannot_draw() is not is_seeded


def test_a_loader_of_torch_has_another_epoch_each_time_and_takes_a_pickled_pipeline(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path, shardshuffle=4) as dataset:
        loader = DataLoader(dataset.batched(4, collation_fn=None), batch_size=None, num_workers=2, collate_fn=list)
        epochs = [[*itertools.chain(*loader)] for _ in range(2)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 2
        assert epochs[0] != epochs[1]
        copied = pickle.loads(pickle.dumps(dataset))
        assert sorted(copied) == list(range(NUM_ROWS))


def test_mixtures_of_pipelines_run_as_they_are(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        other = dataset.map(doubled).slice(2)
        assert list(wds.RoundRobin([dataset.slice(3), other])) == [0, 0, 1, 2, 2]
        assert list(wds.RoundRobin([dataset.slice(3), other], longest=True)) == [0, 0, 1, 2, 2]
        assert len(list(wds.RandomMix([dataset.slice(3), dataset.slice(2)], [1, 0], longest=True))) == 5
        mixed = list(wds.RandomMix([dataset.slice(3), other], [1, 2], longest=True))
        assert sorted(mixed) == [0, 0, 1, 2, 2]
        assert list(wds.DataPipeline(wds.RandomMix([dataset], longest=True), wds.batched(16, None))) == [
            list(range(16)),
            list(range(16, 32)),
        ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": "a.yaml"}, "YAML"),
        ({"urls": {"datasets": []}}, "YAML"),
        ({"urls": "index.json"}, "compat.wids"),
        ({"urls": "shards/"}, "name its shards"),
        ({"urls": "a.tar", "mode": "unlink"}, "mode='unlink'"),
        ({"urls": "a{b.tar"}, "a{b.tar"),
    ],
)
def test_what_has_no_equal_is_refused_with_a_cure(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(options.pop("urls"), tmp_path, **options)
    with pytest.raises(AttributeError, match="providers"):
        wds.gopen_schemes  # noqa: B018


def test_a_reader_that_draws_a_number_of_shards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = numbered(tmp_path / "s")
    monkeypatch.setenv("WDS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"give with_epoch\(\) instead"):
        wds.DataPipeline(wds.ResampledShards(src, 10), wds.tarfile_to_samples())
    assert len(list(wds.ResampledShards(src, 10))) == 10


def test_shards_are_read_one_by_one_where_the_stage_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SQLSTREAM_CACHE", str(tmp_path / "cache"))
    src = numbered(tmp_path / "s")
    with caplog.at_level(logging.WARNING):
        found = list(wds.tarfile_samples(iter(wds.SimpleShardList(src))))
    assert [sample["__key__"] for sample in found] == KEYS
    assert caplog.text == ""
