"""Mixtures: exact proportions, the same global steps on any layout, samples that are those of each stream alone, resumption."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from sqlstream import MixedDataset, Stream, StreamingDataLoader, StreamingDataset, weight_ramp
from sqlstream.errors import ConfigError, DecodeError, StateError, UnknownLengthError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.presets import CacheTransform
from sqlstream.world import World
from tests.stream.kit import Refuse
from tests.stream.mixtures import EPOCH_SIZE, SIZES, WEIGHTS, MixedJob, draw, seen, streams_of
from tests.stream.tables import make_table

G = 12
LAYOUTS = [(1, 0), (2, 0), (4, 0), (3, 2), (1, 3)]


class CountRuns:
    """A transform that leaves a mark for each run.

    Args:
        log: A file.
    """

    def __init__(self, log: Path) -> None:
        self.log = log

    def __call__(self, sample: Sample) -> Sample:
        with self.log.open("a") as file:
            file.write("x")
        return sample


def mixed(folder: Path, sizes: dict[str, int] | None = None, **options: Any) -> MixedDataset:
    given: dict[str, Any] = {"weights": WEIGHTS, "epoch_size": EPOCH_SIZE} if sizes is None else {}
    return MixedDataset(streams_of(folder, sizes or SIZES), **(given | options))


def names_of(dataset: MixedDataset, num_samples: int | None = None) -> list[str]:
    names = (sample["__stream__"] for sample in dataset)
    return list(names) if num_samples is None else [name for name, _ in zip(names, range(num_samples), strict=False)]


# -- proportions and ends ----


def test_streams_come_in_exact_proportions_spread_evenly(tmp_path: Path) -> None:
    with mixed(tmp_path) as dataset:
        assert dataset.weights == {"web": 6, "code": 3, "av": 1}
        assert (len(dataset), dataset.epoch_size) == (72, EPOCH_SIZE)
        names = names_of(dataset)
        for stop in range(0, EPOCH_SIZE + 1, 10):
            assert Counter(names[:stop]) == Counter({"web": 6 * stop // 10, "code": 3 * stop // 10, "av": stop // 10})


def test_without_weights_each_row_comes_once_in_an_epoch(tmp_path: Path) -> None:
    with mixed(tmp_path, SIZES) as dataset:
        for epoch in range(2):
            found = seen(list(dataset))
            assert {one[1] for one in found} == {epoch}
            assert len({one[:3] for one in found}) == len(found) == sum(SIZES.values())


@pytest.mark.parametrize(
    ("options", "size", "counts"),
    [
        ({"stop": "first_exhausted", "weights": [7, 2, 1]}, 55, None),  # the 56th draw would be the sixth of "av"
        ({"stop": "all_exhausted", "weights": [7, 2, 1]}, 82, None),
        ({"stop": "each_once"}, 72, SIZES),
        ({"epoch_size": 101, "weights": [1, 0, 1]}, 101, {"web": 51, "av": 50}),
        ({"epoch_size": 100, "temperature": 1}, 100, {"web": 69, "code": 24, "av": 7}),
    ],
)
def test_an_epoch_ends_where_the_user_says(tmp_path: Path, options: Any, size: int, counts: dict[str, int] | None) -> None:
    with mixed(tmp_path, SIZES, **options) as dataset:
        found = Counter(names_of(dataset))
        assert found.total() == dataset.epoch_size == size
        if counts is not None:
            assert found == Counter(counts)
        if options.get("stop") == "first_exhausted":
            assert all(found[name] <= SIZES[name] for name in SIZES)
        if options.get("stop") == "all_exhausted":
            assert all(found[name] >= SIZES[name] for name in SIZES)


def test_proportion_repeat_and_choose_are_exact(tmp_path: Path) -> None:
    def stream(size: int, **share: Any) -> Stream:
        return Stream(make_table(tmp_path, size), tmp_path / "cache", transforms=[draw], show_progress=False, **share)

    cases: list[tuple[list[dict[str, Any]], dict[str, int]]] = [
        ([{"proportion": 1}, {"proportion": 0}, {"proportion": 1}], {"a": 51, "c": 50}),
        ([{"weight": 0.7}, {"weight": 0.2}, {"weight": 0.1}], {"a": 71, "b": 20, "c": 10}),
    ]
    for shares, counts in cases:
        streams = {name: stream(size, **share) for name, size, share in zip("abc", (50, 17, 5), shares, strict=True)}
        with MixedDataset(streams, epoch_size=101) as dataset:
            assert Counter(names_of(dataset)) == Counter(counts)
    with MixedDataset({"a": stream(100, repeat=0.29), "b": stream(17, choose=40), "c": stream(5)}) as dataset:
        assert Counter(names_of(dataset)) == Counter({"a": 29, "b": 40, "c": 5})
        rows = [sample["__row__"] for sample in dataset if sample["__stream__"] == "a"]
        assert len(set(rows)) == 29, "the next epoch goes on where this one has ended"


def test_weights_by_tokens_give_shares_of_tokens(tmp_path: Path) -> None:
    for name, tokens in (("short", 10), ("long", 30)):
        pq.write_table(pa.table({"tokens": [tokens] * 90}), tmp_path / f"{name}.parquet")
    streams = {name: Stream(tmp_path / f"{name}.parquet", tmp_path / "cache") for name in ("short", "long")}
    with MixedDataset(streams, {"short": 0.5, "long": 0.5}, tokens="tokens", epoch_size=120) as dataset:
        given: Counter[str] = Counter()
        for sample in dataset:
            given[sample["__stream__"]] += sample["tokens"]
        assert given["short"] == given["long"] == 900
        assert dataset.weights == {"short": 3, "long": 1}
    streams["short"] = Stream(tmp_path / "short.parquet", tmp_path / "cache", weights="tokens + 1")
    with pytest.raises(ConfigError, match="stream 'short' has weights, which tokens='tokens' would have to weigh"):
        MixedDataset(streams, {"short": 0.5, "long": 0.5}, tokens="tokens", epoch_size=120)


def test_an_endless_mixture_has_no_length(tmp_path: Path) -> None:
    with mixed(tmp_path, SIZES, stop="never", weights=WEIGHTS) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=G, collate_fn=seen)
        with pytest.raises(UnknownLengthError, match="give epoch_size="):
            len(loader)
        with pytest.raises(UnknownLengthError, match="give epoch_size="):
            dataset.num_steps(G)
        found = [one for _, batch in zip(range(20), loader, strict=False) for one in batch]
        assert Counter(name for name, *_ in found) == Counter({"web": 144, "code": 72, "av": 24})
        assert max(epoch for name, epoch, *_ in found if name == "av") == 4
        state = loader.state_dict()
        rest = [batch for _, batch in zip(range(3), loader, strict=False)]
    with mixed(tmp_path, SIZES, stop="never", weights=WEIGHTS) as again:
        other = StreamingDataLoader(again, batch_size=G, collate_fn=seen)
        other.load_state_dict(state)
        assert next(iter(other)) == rest[0]


def test_a_turn_may_be_a_global_batch_or_the_batch_of_a_rank(tmp_path: Path) -> None:
    with MixedJob(tmp_path, 2, 0, 8, unit="batch", epoch_size=80) as job:
        batches = job.epoch()
        assert [len({name for name, *_ in batch}) for batch in batches] == [1] * 10
        assert Counter(batch[0][0] for batch in batches) == Counter({"web": 6, "code": 3, "av": 1})
    with MixedJob(tmp_path, 2, 0, 8, unit="rank", epoch_size=80) as job:
        batches, state = job.epoch(), job.loaders[0].state_dict()
        assert {len({name for name, *_ in batch[half : half + 4]}) for batch in batches for half in (0, 4)} == {1}
        assert any(len({name for name, *_ in batch}) == 2 for batch in batches)
        assert state["mixture"]["lanes"] == 2
    with MixedJob(tmp_path, 1, 0, 8, unit="rank", epoch_size=80) as alone:
        alone.load({**state, "epoch": 0, "sample_in_epoch": 0})
        assert alone.epoch() == batches, "lanes are those of the first start"


def test_random_orders_keep_the_proportions_of_their_blocks(tmp_path: Path) -> None:
    even = names_of(mixed(tmp_path))
    for schedule in ("random_order", "fixed_random_order", "consecutive", "consecutive_interleaved"):
        with mixed(tmp_path, schedule=schedule, block=20, shuffle_seed=3) as dataset:
            names = names_of(dataset)
        assert names != even
        for start in range(0, EPOCH_SIZE, 20):
            assert Counter(names[start : start + 20]) == Counter({"web": 12, "code": 6, "av": 2})


# -- what is the same ----


@pytest.mark.parametrize("options", [{}, {"unit": "batch"}, {"schedule": "random_order", "block": 16, "shuffle_seed": 4}])
def test_m5_global_steps_are_equal_on_any_ranks_and_workers(tmp_path: Path, options: dict[str, Any]) -> None:
    with MixedJob(tmp_path, 1, 0, G, **options) as job:
        wanted = [[sorted(batch) for batch in job.epoch()] for _ in range(2)]
        steps = [step.num_samples for step in job.mixed.plan(0, 10)]
        assert not [*job.mixed.plan(5, 5)]
        with pytest.raises(ConfigError, match="stop=2 is out of range: give 5 or more"):
            [*job.mixed.plan(5, 2)]
    assert [dict(Counter(name for name, *_ in batch)) for epoch in wanted for batch in epoch] == steps
    for num_ranks, num_workers in LAYOUTS[1:]:
        with MixedJob(tmp_path, num_ranks, num_workers, G, **options) as job:
            assert [[sorted(batch) for batch in job.epoch()] for _ in range(2)] == wanted


@pytest.mark.parametrize("options", [{}, {"unit": "batch"}])
def test_m6_going_on_at_any_step_on_any_layout_is_as_if_nothing_had_stopped(tmp_path: Path, options: dict[str, Any]) -> None:
    with MixedJob(tmp_path, 2, 0, G, **options) as job:
        job.epoch()
        steps = job.states(EPOCH_SIZE // G)
        following = [sorted(batch) for batch in job.epoch()]
    for at, (_, state) in enumerate(steps):
        num_ranks, num_workers = LAYOUTS[at % len(LAYOUTS)]
        with MixedJob(tmp_path, num_ranks, num_workers, G, **options) as again:
            again.load(json.loads(json.dumps(state)))
            rest = [sorted(batch) for batch in again.epoch()]
            wanted = [sorted(batch) for batch, _ in steps[at + 1 :]] or following
            assert rest == wanted
            if at == 1:
                assert [sorted(batch) for batch in again.epoch()] == following


def test_m7_samples_are_those_of_each_stream_alone(tmp_path: Path) -> None:
    with mixed(tmp_path) as dataset:
        found = [sample for _ in range(4) for sample in dataset]
        for name, stream in dataset.streams.items():
            own = [sample for sample in found if sample["__stream__"] == name]
            alone = [{**sample, "__stream__": name} for _ in range(30) for sample in stream]
            assert own == alone[: len(own)]
            assert len({sample["__epoch__"] for sample in own}) > 2


def test_m7_stored_samples_of_a_stream_are_found_in_a_mixture(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stored = CacheTransform("counted", [CountRuns(log)])
    options: dict[str, Any] = {"transforms": [stored, draw], "show_progress": False, "shuffle_seed": 1}
    src = make_table(tmp_path, 20)
    with StreamingDataset(src, tmp_path / "cache", **options) as alone:
        wanted = list(alone)
    num_runs = len(log.read_text())
    with MixedDataset({"one": Stream(src, tmp_path / "cache", **options), "av": streams_of(tmp_path)["av"]}) as dataset:
        found = [sample for sample in dataset if sample.pop("__stream__") == "one"]
    assert found == wanted
    assert len(log.read_text()) == num_runs == 20, "the name of a stream is no part of what samples are stored by"


def test_m6_a_process_within_a_step_goes_on_there(tmp_path: Path) -> None:
    with mixed(tmp_path, batch_size=G) as dataset:
        samples = iter(dataset)
        first = [next(samples) for _ in range(19)]
        state = dataset.state_dict()
        rest = seen(list(samples))
    with mixed(tmp_path, batch_size=G) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
        assert seen(list(again)) == rest
        assert len(first) + len(rest) == EPOCH_SIZE
        with pytest.raises(StateError, match="taken within a step, so streams cannot come or go"):
            again.load_state_dict(state, streams={"web": "restart"})


def test_streams_of_one_directory_and_settings_have_one_cache(tmp_path: Path) -> None:
    def caches_of(*options: dict[str, Any]) -> int:
        streams = [
            Stream(make_table(tmp_path, 17), **({"dst": tmp_path / "cache"} | one), name=f"s{number}")
            for number, one in enumerate(options)
        ]
        with MixedDataset(streams) as dataset:
            return len(dataset._pipeline.engines.caches)

    assert caches_of({}, {}, {"cache_limit": "1gb"}) == 1, "a limit belongs to the directory"
    assert caches_of({}, {"storage_options": {"anon": True}}, {"storage_options": {"anon": True}}) == 2
    assert caches_of({}, {"dst": tmp_path / "other"}) == 2
    assert caches_of({}, {"cache_namespace": "me"}) == 2


# -- rows ----


def test_rows_are_counted_over_the_streams_or_asked_for_by_name(tmp_path: Path) -> None:
    with mixed(tmp_path) as dataset:
        assert [dataset[0]["__stream__"], dataset[50]["__stream__"], dataset[-1]["__stream__"]] == ["web", "code", "av"]
        assert (dataset[53]["__row__"], dataset["av", -1]["__row__"], dataset[-1]["__row__"]) == (3, 4, 4)
        assert [sample["__stream__"] for sample in dataset["code", 2:4]] == ["code", "code"]
        for index, error, text in (
            (72, IndexError, "index 72 is out of range: the streams have 72 rows"),
            (-73, IndexError, "index -73 is out of range"),
            (("wob", 0), KeyError, "the streams are web, code, av"),
            (("av", 5), IndexError, "the dataset has 5 samples"),
            ("web", TypeError, "mixed\\['name', 5\\]"),
        ):
            with pytest.raises(error, match=text):
                dataset[index]


def test_a_failed_sample_is_replaced_within_its_stream_by_its_own_rules(tmp_path: Path) -> None:
    streams = streams_of(tmp_path)
    streams["code"] = Stream(
        make_table(tmp_path, 17),
        tmp_path / "cache",
        transforms=[Refuse(3, 5), draw],
        max_failure_ratio=0.5,
        show_progress=False,
    )
    with MixedDataset(streams, WEIGHTS, epoch_size=EPOCH_SIZE) as dataset:
        found = list(dataset)
        assert Counter(sample["__stream__"] for sample in found) == Counter({"web": 36, "code": 18, "av": 6})
        assert not {3, 5} & {sample["__row__"] for sample in found if sample["__stream__"] == "code"}
    streams["code"] = Stream(
        make_table(tmp_path, 17), tmp_path / "cache", transforms=[Refuse(3)], on_error="raise", show_progress=False
    )
    with MixedDataset(streams, WEIGHTS, epoch_size=EPOCH_SIZE) as dataset, pytest.raises(DecodeError, match="row 3"):
        list(dataset)


# -- options of streams, and kinds of them ----


def test_streams_are_filtered_weighted_in_blocks_and_lazy_as_alone(tmp_path: Path) -> None:
    table = pa.table({"index": [f"row-{i}" for i in range(60)], "score": [i / 60 for i in range(60)]})
    pq.write_table(table, tmp_path / "groups.parquet", row_group_size=6)
    common: dict[str, Any] = {"transforms": [draw], "show_progress": False}
    src, cache = make_table(tmp_path, 50), tmp_path / "cache"
    filtered: dict[str, Any] = {**common, "where": "score < 0.5", "lazy_index_chunk_size": 6}

    def make() -> dict[str, Stream]:
        return {
            "filtered": Stream(src, cache, where="score >= 0.5", shuffle_seed=1, **common),
            "weighted": Stream(src, cache, weights="1 + 9 * (score > 0.8)", epoch_size=30, shuffle_seed=2, **common),
            "blocks": Stream(src, cache, shuffle_block_size=5, shuffle_window=2, shuffle_seed=3, **common),
            "lazy": Stream(tmp_path / "groups.parquet", cache, shuffle_seed=4, **filtered),
        }

    given: dict[str, Any] = {"weights": {"filtered": 2, "weighted": 1, "blocks": 1, "lazy": 2}, "epoch_size": 120}
    with MixedDataset(make(), **given) as dataset:
        found = [sample for _ in range(2) for sample in dataset]
        for name, stream in dataset.streams.items():
            own = [sample for sample in found if sample["__stream__"] == name]
            alone = [{**sample, "__stream__": name} for _ in range(5) for sample in stream]
            assert own == alone[: len(own)], name
    with MixedJob(tmp_path, 1, 0, G, make, **given) as job:
        steps = job.states(10)
        following = [sorted(batch) for batch in job.epoch()]
    for at in (2, 6, 9):
        with MixedJob(tmp_path, 2, 1, G, make, **given) as job:
            job.load(steps[at][1])
            assert [sorted(batch) for batch in job.epoch()] == ([sorted(batch) for batch, _ in steps[at + 1 :]] or following)


def test_a_lazy_stream_whose_size_a_filter_hides_needs_an_end(tmp_path: Path) -> None:
    table = pa.table({"score": [i / 60 for i in range(60)]})
    pq.write_table(table, tmp_path / "groups.parquet", row_group_size=6)
    lazy: dict[str, Any] = {"where": "score < 0.5", "lazy_index_chunk_size": 6, "show_progress": False}

    def streams(cache: str) -> dict[str, Stream]:
        return {"lazy": Stream(tmp_path / "groups.parquet", tmp_path / cache, **lazy), "av": streams_of(tmp_path)["av"]}

    with pytest.raises(ConfigError, match="the filter of 'lazy' keeps is not known, so they are no weights"):
        MixedDataset(streams("one"))
    with pytest.raises(ConfigError, match="filter of 'lazy' keeps is not known, so an epoch of the mixture has no end"):
        MixedDataset(streams("two"), [1, 1])
    with pytest.raises(ConfigError, match="stop='all_exhausted' needs to know how many rows the filter of 'lazy' keeps"):
        MixedDataset(streams("three"), [1, 1], stop="all_exhausted")
    with MixedDataset(streams("four"), [1, 1], epoch_size=100) as dataset:
        assert Counter(names_of(dataset)) == Counter({"lazy": 50, "av": 50})


def test_a_mixture_within_a_mixture_is_flattened(tmp_path: Path) -> None:
    streams = streams_of(tmp_path)
    inner = MixedDataset({"code": streams["code"], "av": streams["av"]}, {"code": 0.75, "av": 0.25})
    with MixedDataset({"web": streams["web"], "small": inner}, {"web": 0.6, "small": 0.4}, epoch_size=100) as dataset:
        assert dataset.weights == {"web": 6, "small/code": 3, "small/av": 1}
        names = names_of(dataset)
        for stop in range(0, 101, 10):
            assert Counter(names[:stop])["small/code"] == 3 * stop // 10
        dataset.reweight({"web": 0, "small": 1})
        assert Counter(names_of(dataset)) == Counter({"small/code": 75, "small/av": 25})
    with pytest.raises(ConfigError, match="a mixture within a mixture has no size: give weights="):
        MixedDataset({"web": streams["web"], "small": inner})


def test_canonical_nodes_keep_rows_on_their_nodes(tmp_path: Path) -> None:
    def make() -> dict[str, Stream]:
        return streams_of(tmp_path, num_canonical_nodes=2)

    with MixedJob(tmp_path, 1, 0, G, make) as job:
        wanted = [[sorted(batch) for batch in job.epoch()] for _ in range(4)]
    of_node: list[set[tuple[str, int]]] = []
    for node in range(2):
        world = World(rank=node, world_size=2, node=node, num_nodes=2)
        with MixedDataset(make(), WEIGHTS, epoch_size=EPOCH_SIZE, world=world, batch_size=G // 2) as dataset:
            epochs = [seen(list(dataset)) for _ in range(4)]
        of_node.append({one[0:1] + one[2:3] for epoch in epochs for one in epoch})
        for epoch, whole in zip(epochs, wanted, strict=True):
            assert set(epoch) <= {one for batch in whole for one in batch}
    assert not of_node[0] & of_node[1], "a row has been on both nodes"


def test_replicated_ranks_take_the_same_steps(tmp_path: Path) -> None:
    found = []
    for rank in range(4):
        world = World(rank=rank, world_size=4)
        with mixed(tmp_path, world=world, replication=2, batch_size=3) as dataset:
            found.append(seen(list(dataset)))
    assert found[0] == found[1] != found[2] == found[3]
    assert len(found[0]) + len(found[2]) == EPOCH_SIZE


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_plain_loader_takes_a_mixture(tmp_path: Path, context: str) -> None:
    with mixed(tmp_path, batch_size=4) as dataset:
        loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=context, collate_fn=seen)
        batches = list(loader)
        dataset.set_epoch(0)
        assert [one for batch in batches for one in batch] == seen(list(dataset))
        dataset.set_epoch(0)
        ours = StreamingDataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=context, collate_fn=seen)
        assert list(ours) == batches


@pytest.mark.parametrize("options", [{}, {"infinite_iteration": True}, {"schedule": "consecutive"}])
def test_a_plan_takes_of_an_epochs_last_step_what_its_batch_has(tmp_path: Path, options: dict[str, Any]) -> None:
    with mixed(tmp_path, epoch_size=46, **options) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=10, drop_last=True, collate_fn=list)
        batches = islice(chain(loader, loader), 8)  # two epochs
        given = [Counter(sample["__stream__"] for sample in batch) for batch in batches]
        assert [dict(step.num_samples) for step in loader.plan(0, 8)] == given
        assert [sum(loader.counts(step).values()) for step in (3, 4)] == [30, 46]  # six are left out


# -- weights that change ----


def test_weights_change_at_a_step_and_counts_go_on(tmp_path: Path) -> None:
    weights = [(0, {"web": 1, "code": 0, "av": 0}), (3, {"web": 1, "code": 1, "av": 0}), (7, {"web": 0, "code": 1, "av": 1})]
    with MixedJob(tmp_path, 1, 0, 10, weights=weights, epoch_size=50) as job:
        batches = [batch for _ in range(2) for batch in job.epoch()]
        given = [Counter(name for name, *_ in batch) for batch in batches]
        assert given == [{"web": 10}] * 3 + [{"web": 5, "code": 5}] * 4 + [{"code": 5, "av": 5}] * 3
        assert job.loaders[0].counts(10) == {"web": 50, "code": 35, "av": 15}
        assert [dict(step.num_samples) for step in job.loaders[0].plan(0, 10)] == given
        code = [one for batch in batches for one in batch if one[0] == "code"]
        assert [one[1] for one in code] == [0] * 17 + [1] * 17 + [2]
    for num_ranks, num_workers in ((2, 0), (1, 2)):
        with MixedJob(tmp_path, num_ranks, num_workers, 10, weights=weights, epoch_size=50) as job:
            assert [sorted(batch) for _ in range(2) for batch in job.epoch()] == [sorted(batch) for batch in batches]


def test_a_ramp_goes_from_one_proportion_to_another(tmp_path: Path) -> None:
    ramp = weight_ramp(0, 10, {"web": 1, "code": 0, "av": 0}, {"web": 0, "code": 1, "av": 0})
    assert (len(ramp), ramp[-1]) == (11, (10, {"web": 0, "code": 1, "av": 0}))
    with MixedJob(tmp_path, 1, 0, 20, weights=ramp, epoch_size=240) as job:
        given = [Counter(name for name, *_ in batch)["code"] for batch in job.epoch()]
    assert given == sorted(given)
    assert (given[0], given[10], given[11]) == (0, 20, 20)


def test_reweight_holds_from_a_step_on_and_is_in_the_state(tmp_path: Path) -> None:
    options: dict[str, Any] = {"prefetch": 10, "epoch_size": 600}
    with MixedJob(tmp_path, 1, 0, G, **options) as job:
        iterator = iter(job.loaders[0])
        first = [next(iterator) for _ in range(2)]
        with pytest.raises(StateError, match="the first possible one is"):
            job.mixed.reweight({"web": 0, "code": 1, "av": 1}, at_step=2)
        job.mixed.reweight({"web": 0, "code": 1, "av": 1}, at_step=30)
        state = job.loaders[0].state_dict()
        rest = list(iterator)
        assert Counter(name for batch in rest[28:] for name, *_ in batch) == Counter({"code": 120, "av": 120})
        assert len(first) + len(rest) == 50
    with MixedJob(tmp_path, 1, 2, G, **options) as again:
        again.load(state)
        assert again.epoch() == rest
    with MixedJob(tmp_path, 1, 2, G, **options) as job:  # workers that run already hear of it
        iterator = iter(job.loaders[0])
        first = [next(iterator) for _ in range(2)]
        job.mixed.reweight({"web": 0, "code": 1, "av": 1}, at_step=44)
        found = [*first, *iterator]
        assert Counter(name for batch in found[44:] for name, *_ in batch) == Counter({"code": 36, "av": 36})


def test_streams_come_and_go_by_name(tmp_path: Path) -> None:
    sizes = {"web": 50, "code": 17}
    with MixedJob(tmp_path, 1, 0, G, lambda: streams_of(tmp_path, sizes), weights={"web": 2, "code": 1}) as job:
        (_, state), *_ = job.states(4)[-1:]
        assert {name: part["drawn"] for name, part in state["streams"].items()} == {"web": 32, "code": 16}

    def make() -> dict[str, Stream]:
        return {
            name: stream
            for seed, own in ((1, {"code": 17}), (2, {"av": 5}))
            for name, stream in streams_of(tmp_path, own, seed=seed).items()
        }

    with MixedJob(tmp_path, 2, 1, G, make, weights={"code": 1, "av": 1}) as job:
        with pytest.raises(StateError, match=r"streams \['code', 'web'\], this run \['av', 'code'\].*streams='continue'"):
            job.load(state)
        job.load(state, streams="continue")
        batches = job.states(1)
        found = [one for batch, _ in batches for one in batch]
        assert Counter(name for name, *_ in found) == Counter({"code": 6, "av": 6})
        assert [one[1] for one in sorted(found) if one[0] == "code"] == [0] + [1] * 5, "its counter has gone on after 16 of 17"
        assert {one[1] for one in found if one[0] == "av"} <= {0, 1}
        later = batches[-1][1]
        assert later["streams"]["web"]["drawn"] == 32
        assert later["mixture"]["away"] == ["web"]
    with MixedJob(tmp_path, 1, 0, G, make, weights={"code": 1, "av": 1}) as again:
        again.load(later)  # the same streams: without `streams=`
        assert again.states(1)[0][1]["streams"]["web"]["drawn"] == 32
    with MixedJob(tmp_path, 1, 0, G, lambda: streams_of(tmp_path, sizes), weights={"web": 2, "code": 1}) as back:
        back.load(later, streams="continue")
        (batch, last) = back.states(1)[0]
        assert last["streams"]["web"]["drawn"] == 32 + Counter(name for name, *_ in batch)["web"]
        with pytest.raises(ConfigError, match="give 'continue'"):
            back.load(later, streams="restart")
    with MixedJob(tmp_path, 1, 0, G, lambda: streams_of(tmp_path, sizes), weights={"web": 2, "code": 1}) as anew:
        anew.load(state, streams={"code": "restart"})
        batch, last = anew.states(1)[0]
        assert {one[1] for one in batch if one[0] == "code"} == {0}
        assert last["streams"]["code"]["drawn"] == 4


def test_a_stream_of_a_mixture_keeps_the_weights_of_its_rows(tmp_path: Path) -> None:
    with mixed(tmp_path) as dataset, pytest.raises(ConfigError, match="give weights= to the stream"):
        dataset.streams["web"].reweight("score")


# -- bad input ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weights": {"web": 1, "code": 1}}, "name each of them, with 0 for one that pauses"),
        ({"weights": {"web": 1, "code": 1, "av": 1, "more": 1}}, "weights for 'web', 'code', 'av', 'more'"),
        ({"weights": [1, 2]}, "are 2 for 3 streams"),
        ({"weights": [0, 0, 0]}, "all 0"),
        ({"weights": [1, -1, 1]}, "-1"),
        ({"weights": [1, float("nan"), 1]}, "nan"),
        ({"weights": [(1, {"web": 1, "code": 1, "av": 1})]}, "the first must be at 0"),
        ({"weights": [1, 1, 1], "temperature": 2}, "temperature= makes the weights"),
        ({"weights": [1, 1, 1], "stop": "each_once"}, "stop='each_once' makes the weights"),
        ({"stop": "sometimes"}, "stop='sometimes' is unknown"),
        ({"unit": "row"}, "unit='row' is unknown"),
        ({"schedule": "greedy"}, "schedule='greedy' is unknown"),
        ({"schedule": "random", "shuffle_seed": 1}, "use 'random_order' for samples"),
        ({"schedule": "random_order"}, "needs a seed"),
        ({"epoch_size": 0}, "epoch_size=0"),
        ({"epoch_size": 61, "unit": "batch", "batch_size": 4}, "epoch_size=61 is no multiple of 4"),
        ({"stop": "never", "infinite_iteration": True}, "say the same"),
        ({"stop": "first_exhausted", "unit": "batch", "batch_size": 64}, "ends before the first turn"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        mixed(tmp_path, SIZES, **options)


@pytest.mark.parametrize(
    ("streams", "text"),
    [
        ([], "give at least one"),
        ([3], "give a StreamingDataset, a Stream or a MixedDataset of sqlstream itself"),
        ([{"name": "a"}, {"name": "a"}], "streams named twice: 'a'"),
        ([{"name": "a", "proportion": 1}, {"name": "b"}], "'a' have a proportion, 'b' have none"),
        ([{"name": "a", "proportion": 1}, {"name": "b", "repeat": 2}], "'a' have a proportion, 'b' repeat or choose"),
        ([{"name": "a", "choose": 1, "repeat": 2}], "'a' have repeat and choose"),
        (
            [{"name": "a", "where": "score > 9", "choose": 3}, {"name": "b"}],
            "stream 'a' is empty: .*score > 9.* keeps no row.* leave the stream out",
        ),
        ([{"name": "a", "batch_size": 3}], "stream 'a' has batch_size, which concerns the whole run"),
        ([{"name": "a", "replication": 2}], "stream 'a' has replication"),
        ([{"name": "a", "unaligned_worker_index": True, "shuffle_seed": 1}], "has unaligned_worker_index"),
        ([{"name": "a", "refresh": "epoch"}], "has refresh"),
        ([{"name": "a", "num_canonical_nodes": 2}, {"name": "b"}], "num_canonical_nodes of the streams differ"),
        ([{"name": "a", "proportion": 1, "weight": 1}], "are the same"),
    ],
)
def test_streams_that_contradict_each_other_are_refused(tmp_path: Path, streams: list[Any], text: str) -> None:
    src = make_table(tmp_path, 17)
    with pytest.raises(ConfigError, match=text):
        MixedDataset(
            [Stream(src, tmp_path / "cache", show_progress=False, **one) if isinstance(one, dict) else one for one in streams]
        )


def test_states_of_other_runs_are_refused_by_what_differs(tmp_path: Path) -> None:
    with MixedJob(tmp_path, 1, 0, G) as job:
        state = job.states(1)[0][1]
    with StreamingDataset(make_table(tmp_path, 17), tmp_path / "cache", show_progress=False) as single:
        alone = single.state_dict()
        with pytest.raises(StateError, match="this run has a single dataset"):
            single.load_state_dict(state)
        with pytest.raises(ConfigError, match="load_state_dict\\(streams=\\) is of mixtures"):
            StreamingDataLoader(single).load_state_dict(state, streams="continue")
        with pytest.raises(ConfigError, match="counts is of mixtures"):
            StreamingDataLoader(single).counts(0)
    for options, text in (
        ({"unit": "batch"}, "the state has unit='sample'"),
        ({"schedule": "consecutive"}, "the state has schedule='proportional'"),
        ({"block": 7}, "the state has block=None"),
        ({"epoch_size": 120}, "the state has epoch_size=60"),
        ({"shuffle_seed": 3}, "the state has shuffle_seed=None"),
    ):
        with MixedJob(tmp_path, 1, 0, G, **options) as job, pytest.raises(StateError, match=text):
            job.load(state)
    with MixedJob(tmp_path, 1, 0, 6) as job, pytest.raises(StateError, match="the state has global_batch_size=12"):
        job.load(state)
    with MixedJob(tmp_path, 1, 0, G) as job:
        with pytest.raises(StateError, match="of a single dataset, this run has streams"):
            job.load(alone)
        other = {**state, "streams": {**state["streams"], "code": {**state["streams"]["code"], "shuffle_seed": 9}}}
        with pytest.raises(StateError, match="shuffle_seed=9 of stream 'code'"):
            job.load(other)
        for broken in ({"schedule": "x"}, {**state["mixture"], "changes": []}, {**state["mixture"], "away": 3}):
            with pytest.raises(StateError, match=r"(in the state)|(of its mixture)"):
                job.load({**state, "mixture": broken})
