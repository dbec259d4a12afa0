"""Options and batches of multi-stream loading: the names of sds, without its defects."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from sqlstream.errors import ConfigError
from sqlstream.order import whole_weights
from sqlstream.sample_types import DataSampleType
from sqlstream.stream.multi.options import (
    Batch,
    StreamOptions,
    group_indices,
    main_stream_index,
)

ZERO_FIRST = [
    {"name": "z", "ratio": 0.0, "batch_gpu": 1},
    {"name": "a", "ratio": 0.7, "batch_gpu": 1},
    {"name": "b", "ratio": 0.3, "batch_gpu": 1},
]


def options(*ratios: float, groups: tuple[int, ...] | None = None) -> list[StreamOptions]:
    """Return options as a user writes them, without init_group."""
    return [
        StreamOptions(name=f"s{index}", ratio=ratio, mixing_group_id=groups[index] if groups else index, batch_gpu=1)
        for index, ratio in enumerate(ratios)
    ]


def test_parameters_and_defaults_are_those_of_sds() -> None:
    of_options = inspect.signature(StreamOptions).parameters
    assert list(of_options) == [
        "name",
        "ratio",
        "mixing_group_id",
        "dataloader_kwargs",
        "is_main",
        "batch_size",
        "batch_gpu",
        "num_accum_rounds",
        "is_batch_size_inferred",  # ours, and so the last
    ]
    assert StreamOptions("av", 0.5, 0) == StreamOptions("av", 0.5, 0, {}, False, None, None, 1)
    assert str(inspect.signature(StreamOptions.init_group)).startswith(
        "(raw_stream_configs: 'Sequence[Mapping[str, Any]]', drop_unused: 'bool' = False, mixing_strategy: 'str' = 'no_mixing')"
    )
    assert list(inspect.signature(StreamOptions.infer_batch_info).parameters)[:3] == [
        "batch_size",
        "batch_gpu",
        "num_accum_rounds",
    ]
    assert list(inspect.signature(Batch).parameters)[:4] == [
        "raw_batch",
        "stream_name",
        "num_accum_rounds_left",
        "data_type",
    ]


@pytest.mark.parametrize(
    ("given", "world_size", "info"),
    [
        ({"batch_gpu": 4}, 8, (32, 4, 1)),
        ({"batch_gpu": 4, "num_accum_rounds": 3}, 2, (24, 4, 3)),
        ({"batch_size": 24}, 2, (24, 12, 1)),
        ({"batch_size": 24, "batch_gpu": 3}, 2, (24, 3, 4)),
        ({"batch_size": 24, "batch_gpu": 3, "num_accum_rounds": 9}, 2, (24, 3, 4)),
        ({"batch_size": 0}, 2, (0, 0, 0)),
        ({"batch_size": 0, "batch_gpu": 4}, 2, (0, 4, 0)),
        ({"batch_gpu": 0}, 2, (0, 0, 1)),
    ],
)
def test_batch_sizes_are_inferred_as_by_sds(given: dict[str, int], world_size: int, info: tuple[int, int, int]) -> None:
    assert StreamOptions.infer_batch_info(**given, world_size=world_size) == info


def test_the_world_size_is_read_where_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert StreamOptions.infer_batch_info(batch_gpu=2) == (2, 2, 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert StreamOptions.infer_batch_info(batch_gpu=2) == (8, 2, 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"batch_size": 10}, "batch_size=10 is not divisible by world_size=4: give batch_size=8 or 12"),
        (
            {"batch_size": 32, "batch_gpu": 3},
            "batch_size=32 is not divisible by world_size=4 x batch_gpu=3: give batch_size=24 or 36",
        ),
        ({"batch_size": 3}, "batch_size=3 is not divisible by world_size=4: give batch_size=4"),
        ({"batch_size": 8, "batch_gpu": 0}, "batch_size=8 with batch_gpu=0: give batch_gpu=1 or more, or batch_size=0"),
        ({}, "a stream has no batch size: give it batch_size= (of all ranks) or batch_gpu= (of one)"),
        ({"batch_gpu": -1}, "batch_gpu=-1 is out of range: give 0 or more"),
        ({"batch_gpu": 1.5}, "batch_gpu=1.5 is no whole number: give 0 or more"),
    ],
)
def test_batch_sizes_that_do_not_divide_name_the_nearest_that_work(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        StreamOptions.infer_batch_info(**given, world_size=4)
    assert str(refused.value) == text
    with pytest.raises(ConfigError) as named:
        StreamOptions(name="av", ratio=1, mixing_group_id=0, **given).inferred(4)
    assert str(named.value) == f"stream 'av': {text}"


def test_a_stream_with_batch_size_only_has_batches_of_a_rank() -> None:
    inferred = StreamOptions(name="av", ratio=0.33, mixing_group_id=0, batch_size=4).inferred(2)
    assert (inferred.batch_size, inferred.batch_gpu, inferred.num_accum_rounds) == (4, 2, 1)


def test_a_batch_size_in_dataloader_kwargs_must_be_that_of_a_rank() -> None:
    agreeing = StreamOptions("av", 1, 0, {"batch_size": 2}, batch_gpu=2)
    assert agreeing.inferred(4).batch_size == 8
    with pytest.raises(ConfigError, match="stream 'av': dataloader_kwargs has batch_size=3, but batch_gpu=2: leave it out"):
        StreamOptions("av", 1, 0, {"batch_size": 3}, batch_gpu=2).inferred(4)


def test_init_group_fills_in_names_ratios_groups_and_batches() -> None:
    made = StreamOptions.init_group(
        [{"name": "av", "ratio": 3, "batch_gpu": 2, "num_accum_rounds": 4, "is_main": True}, {"ratio": 1, "batch_size": 32}]
    )
    assert made == [
        StreamOptions("av", 0.75, 0, {}, True, 8, 2, 4),
        StreamOptions("stream_001", 0.25, 1, {}, False, 32, 32, 1),
    ]
    equal = StreamOptions.init_group([{"batch_gpu": 1}] * 4, mixing_strategy="mix_all")
    assert [stream.ratio for stream in equal] == [0.25] * 4
    assert [stream.mixing_group_id for stream in equal] == [0] * 4
    custom = [{"batch_gpu": 1, "mixing_group_id": group} for group in (5, 5, 7)]
    assert [stream.mixing_group_id for stream in StreamOptions.init_group(custom, False, "custom")] == [5, 5, 7]


@pytest.mark.parametrize(
    ("configs", "strategy", "text"),
    [
        ([], "no_mixing", "stream configs are empty"),
        ([{"ratio": 1}, {}], "no_mixing", r"ratio=\[1, None\]: give every stream a ratio, or none of them"),
        ([{"ratio": 0}, {"ratio": 0}], "no_mixing", r"^ratio=\[0, 0\]: weights=\[0, 0\] are all 0"),
        ([{"ratio": -1}], "no_mixing", r"^ratio=\[-1\]: weights\[0\]=-1 is out of range"),
        ([{"name": "a"}, {"name": "a"}], "no_mixing", r"stream names \['a'\] occur twice"),
        ([{}], "custom", r"mixing_group_id=\[None\] with mixing_strategy='custom': give one to every stream"),
        ([{"mixing_group_id": 1}] * 2, "no_mixing", r"mixing_group_id=\[1, 1\] contradicts mixing_strategy='no_mixing'"),
        ([{"mixing_group_id": 1}, {}], "mix_all", r"mixing_group_id=\[1, None\] contradicts mixing_strategy='mix_all'"),
        ([{}], "some", "mixing_strategy='some' is unknown: give one of no_mixing, mix_all, custom"),
        ([{"name": "a", "batch_gpu": None}], "no_mixing", "stream 'a': a stream has no batch size"),
    ],
)
def test_groups_that_contradict_themselves_are_refused(configs: list[Mapping[str, Any]], strategy: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        StreamOptions.init_group([{"batch_gpu": 1, **config} for config in configs], mixing_strategy=strategy)


def weights_of(streams: Sequence[StreamOptions]) -> tuple[int, ...]:
    return whole_weights([stream.ratio for stream in streams])


def test_defect_1_of_sds_ratios_keep_their_proportion() -> None:
    made = StreamOptions.init_group([{"ratio": 0.6, "batch_gpu": 2}, {"ratio": 0.4, "batch_gpu": 32}])
    assert weights_of(made) == (3, 2)  # sds: 1 and 1
    for ratios, whole in (((2, 3, 4), (2, 3, 4)), ((0.7, 0.2, 0.1), (7, 2, 1)), ((0.33, 0.33, 0.34), (33, 33, 34))):
        group = StreamOptions.init_group([{"ratio": ratio, "batch_gpu": 1} for ratio in ratios])
        assert weights_of(group) == whole


def test_defect_4_of_sds_ratios_need_not_add_up_and_group_numbers_need_not_count_from_0() -> None:
    assert weights_of(options(1.0, 2.0)) == (1, 2)
    assert group_indices(options(0.5, 0.5, groups=(5, 7))) == (0, 1)
    assert group_indices(options(1, 1, 1, 1, groups=(9, 2, 9, 2))) == (0, 1, 0, 1)


def test_defect_5_of_sds_streams_that_are_dropped_take_their_own_ratio_with_them() -> None:
    made = StreamOptions.init_group(ZERO_FIRST, drop_unused=True)
    assert [(stream.name, stream.ratio) for stream in made] == [("a", 0.7), ("b", 0.3)]  # sds: a 0.0, b 0.7
    unnamed = [{"ratio": ratio, "batch_gpu": 1} for ratio in (0, 1, 1)]
    kept = StreamOptions.init_group(unnamed, drop_unused=True)
    assert [stream.name for stream in kept] == [stream.name for stream in StreamOptions.init_group(unnamed)[1:]]


def test_defect_5_of_sds_a_stream_of_ratio_0_does_not_shift_the_main_stream() -> None:
    assert main_stream_index(StreamOptions.init_group(ZERO_FIRST)) == 1  # sds: b
    assert main_stream_index(options(0.2, 0.4, 0.4)) == 1
    marked = [*options(0.6), StreamOptions("m", 0.4, 1, is_main=True)]
    assert main_stream_index(marked) == 1
    assert main_stream_index([StreamOptions("off", 0, 0, is_main=True), *options(0.6)]) == 1


def test_a_batch_is_a_dict_that_keeps_what_it_says_of_itself_when_it_travels() -> None:
    batch = Batch(
        {"image": [1, 2], "__row__": [3, 4]}, "av", 2, DataSampleType.VIDEO, step=7, weight=0.5, num_samples_in_step=64
    )
    assert batch == {"image": [1, 2], "__row__": [3, 4]}
    for other in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert type(other) is Batch
        assert other == batch
        assert vars(other) == vars(batch)
        said = (other.stream_name, other.num_accum_rounds_left, other.step, other.weight, other.num_samples_in_step)
        assert said == ("av", 2, 7, 0.5, 64)
        assert other.data_type is DataSampleType.VIDEO
    plain = Batch({})
    assert (plain.stream_name, plain.num_accum_rounds_left, plain.data_type, plain.weight) == (None, 0, None, 1.0)


def test_a_batch_that_is_no_dict_names_its_stream() -> None:
    with pytest.raises(ConfigError, match="a batch of stream 'av' is a list: give a collate_fn that returns a dict"):
        Batch([1], "av")  # type: ignore[arg-type]  # what a collate_fn may return


def test_options_need_no_torch() -> None:
    program = "import sys, sqlstream.stream.multi.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
