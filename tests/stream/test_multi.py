"""MultiStreamDataLoader: whose step it is, what each rank and worker gives of it, and what its batches say."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from sqlstream import Batch, MultiStreamDataLoader, ScheduleType, StreamOptions, World
from sqlstream.errors import ConfigError, StateError, UnknownLengthError
from sqlstream.sample_types import DataSampleType
from sqlstream.stream.pipeline import Pipeline
from tests.processes import ROOT
from tests.stream.multi_jobs import SIZES, Job, names_of, opened, rows_of, samples_of, streams_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
GOLDEN = json.loads((ROOT / "tests/fixtures/mixing/sds.json").read_text())["consecutive schedules, first 40"]
RIGHT = [key for key in GOLDEN if key.startswith("0.7,0.2,0.1")]
"""Those whose counts sds has right: 7, 2, 1."""


def loader_of(folder: Path, ratios: dict[str, float], **options: Any) -> MultiStreamDataLoader:
    own = [
        StreamOptions(name=name, ratio=ratio, mixing_group_id=index, batch_gpu=1)
        for index, (name, ratio) in enumerate(ratios.items())
    ]
    datasets = [opened(folder, SIZES[name]) for name in ratios]
    return MultiStreamDataLoader(datasets, own, **{"collate_fn": rows_of, **options})


@pytest.mark.parametrize("key", RIGHT)
def test_consecutive_schedules_are_the_sequences_of_sds_where_its_counts_are_right(key: str, tmp_path: Path) -> None:
    _, schedule, seed = key.split(" | ")
    own = {"schedule": schedule, "shuffle_seed": int(seed.removeprefix("seed "))}
    with loader_of(tmp_path, {"a": 0.7, "b": 0.2, "c": 0.1}, **own) as loader:
        assert names_of(loader, 40).translate(str.maketrans("abc", "012")) == GOLDEN[key]


@pytest.mark.parametrize("schedule", [kind for kind in ScheduleType if kind is not ScheduleType.RANDOM])
def test_proportions_are_exact_in_every_schedule_that_is_not_random(schedule: ScheduleType, tmp_path: Path) -> None:
    with loader_of(tmp_path, {"a": 0.5, "b": 0.3, "c": 0.2}, schedule=schedule) as loader:
        for _ in range(3):
            assert Counter(names_of(loader, 10)) == {"a": 5, "b": 3, "c": 2}


@pytest.mark.parametrize("schedule", list(ScheduleType))
def test_the_plan_and_the_counts_are_what_comes(schedule: ScheduleType, tmp_path: Path) -> None:
    with Job(tmp_path, streams_of(a=0.5, b=0.3, c=0.2), 2, loader_options={"schedule": schedule}) as job:
        loader, given = job.loaders[0], Counter[str]()
        for planned, step in zip(loader.plan(0, 30), job.steps(30), strict=True):
            assert loader.counts(planned.step) == {name: given[name] for name in SIZES}
            came = Counter(name for name, _, _ in step.samples)
            assert (planned.step, planned.num_samples) == (step.number, dict(came))
            given += came
        with pytest.raises(ConfigError, match="stop=2 is out of range: give 5 or more"):
            [*loader.plan(5, 2)]


@pytest.mark.parametrize("groups", [(0, 1, 2), (0, 0, 0), (5, 7, 5)], ids=["no_mixing", "mix_all", "custom"])
def test_global_steps_are_equal_on_any_ranks_and_workers(groups: tuple[int, ...], tmp_path: Path) -> None:
    micro, lanes = 1 if len(set(groups)) < 3 else None, 4 if len(set(groups)) < 3 else None
    own = [
        StreamOptions(name=one.name, ratio=one.ratio, mixing_group_id=group, batch_size=12, batch_gpu=micro or one.batch_gpu)
        for one, group in zip(streams_of(a=0.5, b=0.3, c=0.2), groups, strict=True)
    ]
    own = own if micro else [StreamOptions(one.name, one.ratio, one.mixing_group_id, {}, False, 12, 1) for one in own]
    with Job(tmp_path, own, 1, 0, {"lanes": lanes}) as alone:
        expected = samples_of(alone.steps(25))
    streams = {name for _, samples in expected for name, _, _ in samples}
    assert streams == {"a", "b", "c"}
    for num_ranks, num_workers in [(1, 3), (2, 0), (2, 2), (4, 1)]:
        with Job(tmp_path, own, num_ranks, num_workers, {"lanes": lanes}) as job:
            steps = list(job.steps(25))
        assert samples_of(iter(steps)) == expected, (num_ranks, num_workers)
        assert {step.num_rounds for step in steps} == {12 // num_ranks}


def test_mixed_streams_meet_in_a_step_on_different_ranks(tmp_path: Path) -> None:
    own = [StreamOptions(name=name, ratio=1, mixing_group_id=0, batch_size=4, batch_gpu=1) for name in SIZES]
    with Job(tmp_path, own, 4) as job:
        of_ranks = [[batch.stream_name for batch in job.round()] for _ in range(30)]
    assert any(len(set(names)) > 1 for names in of_ranks)
    for rank in range(4):
        assert {names[rank] for names in of_ranks} == set(SIZES), "no rank lacks a stream"
    assert Counter(name for names in of_ranks for name in names) == dict.fromkeys(SIZES, 40)


def test_each_stream_gives_what_it_gives_alone_and_goes_on_over_its_epochs(tmp_path: Path) -> None:
    with Job(tmp_path, streams_of(a=0.5, b=0.3, c=0.2)) as job:
        given = [
            sample for _ in range(60) for batch in job.round() for sample in [(batch.stream_name, row) for row in batch["rows"]]
        ]
    for name, size in SIZES.items():
        own = [row for of, row in given if of == name]
        alone: list[Any] = []
        with opened(tmp_path, size) as dataset:
            while len(alone) < len(own):
                alone += rows_of(list(dataset))["rows"]
        assert own == alone[: len(own)]


def test_rounds_count_down_and_weights_make_the_mean_over_ranks_the_mean_over_samples(tmp_path: Path) -> None:
    own = [
        StreamOptions(name="a", ratio=1, mixing_group_id=0, batch_size=4, batch_gpu=1),
        StreamOptions(name="b", ratio=1, mixing_group_id=0, batch_size=12, batch_gpu=3),
    ]
    with Job(tmp_path, own, 2) as job:
        seen = set()
        for _ in range(40):
            batches = job.round()
            num = [len(batch["rows"]) for batch in batches]
            assert [batch.weight for batch in batches] == [2 * one / sum(num) for one in num]
            assert [batch.num_accum_rounds_left for batch in batches] == [1 - _ % 2] * 2
            seen.add(tuple(num))
    assert seen == {(1, 3), (3, 1)}, "of two lanes of equal weights each has one"


def test_iterating_again_goes_on_and_makes_nothing_twice(tmp_path: Path) -> None:
    with Job(tmp_path, streams_of(a=1, b=1), num_workers=2) as job:
        whole = [(batch.step, batch["rows"]) for batch in islice(job.loaders[0], 30)]
    with Job(tmp_path, streams_of(a=1, b=1), num_workers=2) as job:
        pieces = [[(batch.step, batch["rows"]) for batch in islice(job.loaders[0], num)] for num in (1, 7, 22)]
    assert [*chain.from_iterable(pieces)] == whole


@pytest.mark.parametrize("num_workers", [0, 2])
def test_with_epoch_size_an_iteration_ends_and_the_next_one_goes_on(num_workers: int, tmp_path: Path) -> None:
    with Job(tmp_path, streams_of(a=1, b=1), num_workers=num_workers) as job:
        expected = [(batch.step, batch["rows"]) for batch in islice(job.loaders[0], 120)]
    with Job(tmp_path, streams_of(a=1, b=1), 1, num_workers, {"epoch_size": 3}) as job:
        loader, got = job.loaders[0], []
        for epoch in range(3):
            num_left = len(loader)
            batches = [(batch.step, batch["rows"]) for batch in loader]
            assert len(batches) == num_left
            assert {step for step, _ in batches} == set(range(3 * epoch, 3 * epoch + 3))
            got += batches
    assert got == expected[: len(got)]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_loop_that_counts_the_batches_of_an_iteration_is_followed_by_the_next_one(
    num_workers: int, tmp_path: Path, *, persistent_workers: bool
) -> None:
    """Such a loop does not ask whether a batch follows the last one."""
    options: dict[str, Any] = {"epoch_size": 3, "persistent_workers": persistent_workers}
    with Job(tmp_path, streams_of(a=1, b=1), 1, num_workers, options) as job:
        loader = job.loaders[0]
        steps = [[batch.step for batch in islice(loader, len(loader))] for _ in range(3)]
    assert [set(some) for some in steps] == [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}]


def test_a_loader_without_end_has_no_length(tmp_path: Path) -> None:
    with Job(tmp_path, streams_of(a=1)) as job, pytest.raises(UnknownLengthError, match="give epoch_size="):
        len(job.loaders[0])


def test_ranks_that_share_their_samples_take_the_same_batches(tmp_path: Path) -> None:
    def batches(rank: int, world_size: int, replication: int) -> list[Any]:
        world = World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
        own = streams_of(a=1, b=1)
        with MultiStreamDataLoader(
            [opened(tmp_path, SIZES[one.name]) for one in own], own, world=world, replication=replication, collate_fn=rows_of
        ) as loader:
            return [(batch.stream_name, batch["rows"]) for batch in islice(loader, 12)]

    expected = [batches(rank, 2, 1) for rank in range(2)]
    assert expected[0] != expected[1]
    assert [batches(rank, 4, 2) for rank in range(4)] == [expected[0], expected[0], expected[1], expected[1]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_collated_by_torch_or_as_their_stream_says_and_arrive_as_batches(num_workers: int, tmp_path: Path) -> None:
    datasets = [opened(tmp_path, 22, data_type="image"), opened(tmp_path, 7)]
    own = [
        StreamOptions(name="a", ratio=1, mixing_group_id=0, batch_gpu=4),
        StreamOptions(
            name="b", ratio=1, mixing_group_id=1, batch_gpu=2, dataloader_kwargs={"collate_fn": rows_of, "batch_size": 2}
        ),
    ]
    workers: dict[str, Any] = {"num_workers": num_workers, "multiprocessing_context": "fork"} if num_workers else {}
    with MultiStreamDataLoader(datasets, own, schedule="consecutive", **workers) as loader:
        first, second = islice(loader, 2)
    assert type(first) is type(second) is Batch
    assert isinstance(first["score"], torch.Tensor)
    assert first["score"].shape == (4,)
    assert (first.data_type, second.data_type) == (DataSampleType.IMAGE, None)
    assert "__stream__" not in first, "the batch itself says it"
    assert list(second) == ["rows"]
    assert len(second["rows"]) == 2
    assert (second.stream_name, second.step, second.num_samples_in_step, second.weight) == ("b", 1, 2, 1.0)


def test_the_main_stream_has_dataset_options_and_a_loader_of_its_own(tmp_path: Path) -> None:
    with loader_of(tmp_path, {"a": 0.3, "b": 0.7}) as loader:
        main = loader.main_stream
        assert (main.opts.name, main.opts.batch_size, len(main.dataset)) == ("b", 1, 7)
        next(iter(loader))
        state = loader.state_dict()
        assert len(list(main.dataloader)) == 7
        assert loader.state_dict() == state, "a look at a stream moves nothing"


def test_a_stream_that_pauses_goes_on_where_it_was(tmp_path: Path) -> None:
    with loader_of(tmp_path, {"a": 1, "b": 1}, schedule="consecutive", prefetch=1) as loader:
        before = [(batch.stream_name, batch["rows"][0]) for batch in islice(loader, 6)]
        with pytest.raises(StateError, match="the first possible step is") as refused:
            loader.reweight({"a": 1, "b": 0}, at_step=6)
        first = int(str(refused.value).split("first possible step is ")[1].split(",")[0])
        loader.reweight({"a": 1, "b": 0}, at_step=first)
        loader.reweight({"a": 1, "b": 1}, at_step=first + 50)
        after = [(batch.stream_name, batch["rows"][0]) for batch in islice(loader, first + 60 - 6)]
        state = loader.state_dict()
    names = "".join(str(name) for name, _ in before + after)
    assert names[first : first + 50] == "a" * 50
    assert names[first + 50 :] == "ab" * 5
    rows = [row for name, row in before + after if name == "b"]
    with opened(tmp_path, 7) as alone:
        expected = [row for _ in range(1 + len(rows) // 7) for row in rows_of(list(alone))["rows"]]
    assert rows == expected[: len(rows)]
    changes: Any = state["changes"]
    assert [change["step"] for change in changes] == [0, first, first + 50]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_weights_that_change_meanwhile_give_what_weights_up_front_give(num_workers: int, tmp_path: Path) -> None:
    own = [StreamOptions(name, 1, index, {}, False, size, size) for index, (name, size) in enumerate({"a": 2, "b": 4}.items())]
    with Job(tmp_path, own, 1, num_workers, {"prefetch": 4}) as job:
        got = [(step.number, step.samples) for step in job.steps(5)]
        job.loaders[0].reweight({"a": 1, "b": 5})
        at = job.state()["changes"][-1]["step"]
        got += [(step.number, step.samples) for step in job.steps(at + 30)]
    weights = [(0, {"a": 1, "b": 1}), (at, {"a": 1, "b": 5})]
    with Job(tmp_path, own, 1, 0, {"weights": weights}) as job:
        assert samples_of(job.steps(at + 35)) == got


def test_a_rare_stream_opens_late_and_one_that_pauses_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader_of(tmp_path, {"a": 1, "b": 0}, prefetch=1) as loader:
        made: list[str] = []
        monkeypatch.setattr(Pipeline, "rows", _noted(Pipeline.rows, made))
        assert names_of(loader, 8) == "a" * 8
    assert made == ["rows-22"]


def _noted(of: Any, made: list[str]) -> Any:
    def rows(pipeline: Any) -> Any:
        made.append(Path(pipeline.index.src).stem)
        return of(pipeline)

    return rows


def test_several_datasets_of_one_directory_have_one_cache(tmp_path: Path) -> None:
    with loader_of(tmp_path, {"a": 1, "b": 1, "c": 1}) as loader:
        assert len(loader._pipeline.engines.caches) == 1


def test_workers_are_those_of_all_streams(tmp_path: Path) -> None:
    with loader_of(tmp_path, {"a": 0.98, "b": 0.01, "c": 0.01}, num_workers=[2, 0, 1]) as loader:
        assert loader.num_workers == 3


def test_a_row_that_gives_several_samples_is_refused(tmp_path: Path) -> None:
    for parts in (0, 2):
        dataset = opened(tmp_path, 7, transforms=[_Several(parts)])
        own = [StreamOptions(name="b", ratio=1, mixing_group_id=0, batch_gpu=2)]
        with (
            MultiStreamDataLoader([dataset], own) as loader,
            pytest.raises(ConfigError, match="stream 'b' gives no sample, or several"),
        ):
            next(iter(loader))


class _Several:
    """Makes as many samples of a row."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __call__(self, sample: dict[str, Any]) -> list[dict[str, Any]]:
        return [dict(sample) for _ in range(self._num)]
