"""The defects of sds's loader of several streams, each by its cause, and what bad input is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sqlstream import Buckets, MultiStreamDataLoader, StreamingDataset, StreamOptions
from sqlstream.errors import ConfigError, TransformError
from tests.stream.multi_jobs import SIZES, Job, names_of, opened, rows_of, samples_of

NAMES = "abcd"


def loader_of(folder: Path, ratios: tuple[float, ...], groups: tuple[int, ...] = (), **options: Any) -> MultiStreamDataLoader:
    own = [
        StreamOptions(name, ratio, groups[index] if groups else index, batch_gpu=1)
        for index, (name, ratio) in enumerate(zip(NAMES, ratios, strict=False))
    ]
    return MultiStreamDataLoader([opened(folder, 22) for _ in own], own, **{"collate_fn": rows_of, **options})


@pytest.mark.parametrize(
    ("ratios", "counts"),
    [((0.6, 0.4), (3, 2)), ((0.45, 0.55), (9, 11)), ((0.5, 0.3, 0.2), (5, 3, 2)), ((2 / 9, 3 / 9, 4 / 9), (2, 3, 4))],
)
def test_defect_1_proportions_are_those_that_were_asked_for(
    ratios: tuple[float, ...], counts: tuple[int, ...], tmp_path: Path
) -> None:
    with loader_of(tmp_path, ratios) as loader:
        assert Counter(names_of(loader, 2 * sum(counts))) == {
            name: 2 * count for name, count in zip(NAMES, counts, strict=False)
        }


def test_defect_2_a_state_goes_on_with_the_schedule_and_not_at_its_start(tmp_path: Path) -> None:
    with loader_of(tmp_path, (0.7, 0.2, 0.1)) as loader:
        before, state = names_of(loader, 7), loader.state_dict()
        after = names_of(loader, 13)
    with loader_of(tmp_path, (0.7, 0.2, 0.1)) as loader:
        loader.load_state_dict(state)
        assert names_of(loader, 13) == after
    assert after[3:] == (before + after)[:10], "the fixed order comes round after 10 steps"


def test_defect_3_every_stream_of_a_group_comes_on_every_rank(tmp_path: Path) -> None:
    own = [StreamOptions(name, 1, index // 2, batch_size=2, batch_gpu=1) for index, name in enumerate(NAMES)]
    sizes = dict.fromkeys(NAMES, 22)
    with Job(tmp_path, own, 2, 0, {"schedule": "random"}, sizes) as job:
        of_ranks = [[str(batch.stream_name) for batch in job.round()] for _ in range(60)]
    for rank in range(2):
        assert set(NAMES) == {names[rank] for names in of_ranks}


def test_defect_4_defaults_group_numbers_and_ratios_of_any_sum_work(tmp_path: Path) -> None:
    with loader_of(tmp_path, (1, 2), groups=(5, 7), schedule="random") as loader:  # and no workers, which persist by default
        assert set(names_of(loader, 30)) == {"a", "b"}
    with loader_of(tmp_path, (1, 2), schedule="consecutive", shuffle_seed=None) as loader:
        assert names_of(loader, 6) == "abbabb"
    with pytest.raises(ConfigError, match="shuffle_seed=None with schedule='fixed_random_order', which need a seed"):
        loader_of(tmp_path, (1, 2), shuffle_seed=None)
    with pytest.raises(ConfigError, match="shuffle_seed=None with streams that are mixed in a step"):
        loader_of(tmp_path, (1, 2), groups=(0, 0), schedule="consecutive", shuffle_seed=None)


def test_defect_5_a_stream_of_ratio_0_takes_no_ratio_and_is_not_the_main_one(tmp_path: Path) -> None:
    configs = [{"name": name, "ratio": ratio, "batch_gpu": 1} for name, ratio in (("a", 0), ("b", 0.7), ("c", 0.3))]
    for drop_unused in (False, True):
        own = StreamOptions.init_group(configs, drop_unused=drop_unused)
        with MultiStreamDataLoader([opened(tmp_path, SIZES[one.name]) for one in own], own, collate_fn=rows_of) as loader:
            assert loader.main_stream.opts.name == "b"
            assert Counter(names_of(loader, 10)) == {"b": 7, "c": 3}


def test_defect_6_a_seed_is_no_shift_of_another_and_rounds_of_a_step_come_once(tmp_path: Path) -> None:
    with loader_of(tmp_path, (1, 1), schedule="random", shuffle_seed=1) as first:
        with loader_of(tmp_path, (1, 1), schedule="random", shuffle_seed=0) as second:
            shifted = [next(iter(step.num_samples)) for step in second.plan(1007, 1067)]
        assert [next(iter(step.num_samples)) for step in first.plan(0, 60)] != shifted
    own = [StreamOptions("a", 1, 0, batch_gpu=2, num_accum_rounds=4)]
    with Job(tmp_path, own) as job:
        whole = [batch["rows"] for _ in range(8) for batch in job.round()]
    with Job(tmp_path, own) as job:
        before = [batch["rows"] for _ in range(2) for batch in job.round()]
        state = job.state()
    with Job(tmp_path, own) as job:
        job.load(state)
        assert before + [batch["rows"] for _ in range(6) for batch in job.round()] == whole


def test_defect_7_rounds_that_differ_in_a_group_are_refused_and_ranks_give_the_same_mixture(tmp_path: Path) -> None:
    own = [StreamOptions("a", 1, 0, batch_size=8, batch_gpu=1), StreamOptions("b", 1, 0, batch_size=8, batch_gpu=2)]
    with pytest.raises(ConfigError, match=r"mixing group 0 take different numbers of rounds in a lane \('a' 8, 'b' 4\)"):
        Job(tmp_path, own)
    own = [replace(one, batch_gpu=1) for one in own]
    of_layouts = []
    for num_ranks in (1, 2, 4):
        with Job(tmp_path, own, num_ranks, 0, {"lanes": 4}) as job:
            of_layouts.append(samples_of(job.steps(6)))
    assert of_layouts[0] == of_layouts[1] == of_layouts[2]


def test_defect_8_one_pool_of_workers_serves_more_streams_than_it_has(tmp_path: Path) -> None:
    with loader_of(tmp_path, (0.98, 0.01, 0.01), num_workers=1, multiprocessing_context="fork") as loader:
        assert Counter(names_of(loader, 100)) == {"a": 98, "b": 1, "c": 1}


def of_two(**changes: Any) -> list[StreamOptions]:
    return [replace(StreamOptions(name, 1, index, batch_gpu=1), **changes) for index, name in enumerate("ab")]


@pytest.mark.parametrize(
    ("own", "options", "message"),
    [
        (of_two(ratio=0), {}, "weights of the streams 'a', 'b'"),
        (of_two(ratio=-1), {}, "weights of the streams 'a', 'b'"),
        (of_two(name="x"), {}, r"stream names \['x'\] occur twice"),
        ([], {}, "stream_opts is empty"),
        (of_two(batch_size=7, batch_gpu=2), {}, "stream 'a': batch_size=7 is not divisible by .* give batch_size=6 or 8"),
        (of_two(batch_gpu=None), {}, "stream 'a': a stream has no batch size"),
        (of_two(), {"weights": {"a": 1}}, "'b'"),
        (of_two(), {"lanes": 0}, "lanes"),
        (of_two(), {"epoch_size": 0}, "epoch_size"),
        (of_two(), {"num_workers": [2, -1]}, "num_workers"),
        (of_two(), {"persistent_workers": "no"}, "persistent_workers='no' is no bool"),
        (of_two(), {"schedule": "often"}, "schedule"),
        (of_two(), {"batch_size": 3}, "does not take batch_size: batches are those of stream_opts"),
        (of_two(), {"shuffle": True}, "does not take shuffle"),
        (of_two(dataloader_kwargs={"batch_size": 9}), {}, "dataloader_kwargs has batch_size=9, but batch_gpu=1"),
        (of_two(dataloader_kwargs={"num_workers": 9}), {}, "does not take num_workers"),
    ],
)
def test_options_that_contradict_each_other_name_what_and_the_cure(
    own: list[StreamOptions], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        MultiStreamDataLoader([opened(tmp_path, 7) for _ in own], own, **options)


def test_arguments_of_workers_that_differ_between_streams_are_refused(tmp_path: Path) -> None:
    own = of_two()
    own[0] = replace(own[0], dataloader_kwargs={"timeout": 9})
    with pytest.raises(ConfigError, match=r"dataloader_kwargs of the streams differ in timeout: \{'a': 9, 'b': None\}"):
        MultiStreamDataLoader([opened(tmp_path, 7) for _ in own], own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "skip"}, "stream 'a' has on_error='skip', .* give 'replace' or 'raise'"),
        ({"batch_size": 2}, "stream 'a' has batch_size, .* give it to its StreamOptions"),
        ({"replication": 2}, "stream 'a' has replication, .* give it to the loader"),
        ({"num_canonical_nodes": 2}, "stream 'a' has num_canonical_nodes"),
        ({"batches": Buckets("score > 0.5", global_batch_size={0: 1, 1: 2})}, "stream 'a' has batches= of several sizes"),
        ({"batches": Buckets("score > 0.5", global_batch_size=3)}, "stream 'a' has batches= of 3 samples, and takes"),
    ],
)
def test_a_dataset_that_says_what_concerns_the_run_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    datasets = [opened(tmp_path, 7, **options), opened(tmp_path, 7)]
    with pytest.raises(ConfigError, match=message):
        MultiStreamDataLoader(datasets, of_two())


def test_workers_of_a_stream_share_one_order_also_where_sds_would_give_each_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def first(num_workers: int, **options: Any) -> list[Any]:
        datasets = [opened(tmp_path, 22, **options), opened(tmp_path, 22)]
        with MultiStreamDataLoader(datasets, of_two(), num_workers, collate_fn=rows_of) as loader:
            return [(batch.stream_name, batch["rows"]) for batch in islice(loader, 40)]

    assert first(2, unaligned_worker_index=True) == first(0)
    assert "stream 'a' has unaligned_worker_index, which has no effect here" in caplog.text


def test_a_stream_keeps_the_weights_of_its_rows(tmp_path: Path) -> None:
    datasets = [opened(tmp_path, 7), opened(tmp_path, 7)]
    with MultiStreamDataLoader(datasets, of_two()), pytest.raises(ConfigError, match="give weights= to the stream"):
        datasets[0].reweight("score")


def test_datasets_that_are_none_or_too_few_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 datasets and 2 stream_opts: give one each"):
        MultiStreamDataLoader([opened(tmp_path, 7)], of_two())
    some: Any = ["a", "b"]
    with pytest.raises(ConfigError, match="stream 'a' is 'a': give a StreamingDataset of sqlstream itself"):
        MultiStreamDataLoader(some, of_two())


def test_a_failed_row_is_replaced_by_one_of_its_stream(tmp_path: Path) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] == 3:
            raise ValueError("row 3 is ill")
        return sample

    datasets: list[StreamingDataset] = [opened(tmp_path, 13, transforms=[fail], max_failure_ratio=1.0), opened(tmp_path, 7)]
    with MultiStreamDataLoader(datasets, of_two(), collate_fn=rows_of, schedule="consecutive") as loader:
        rows = [
            row for batch, _ in zip(loader, range(26), strict=False) if batch.stream_name == "a" for _, row in batch["rows"]
        ]
    assert len(rows) == 13
    assert 3 not in rows


def test_the_same_dataset_may_be_two_streams(tmp_path: Path) -> None:
    dataset = opened(tmp_path, 7)
    with MultiStreamDataLoader([dataset, dataset], of_two(), collate_fn=rows_of) as loader:
        assert Counter(names_of(loader, 10)) == {"a": 5, "b": 5}


def test_a_collate_fn_that_raises_stop_iteration_ends_no_iteration(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"first": next(sample for sample in samples if "none has it" in sample)}

    with (
        loader_of(tmp_path, (1,), epoch_size=3, collate_fn=collate) as loader,
        pytest.raises(TransformError, match=r"collate_fn=collate raised StopIteration.*next\(iterator, None\)"),
    ):
        list(loader)
