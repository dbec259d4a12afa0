"""Options that are whole numbers of numpy, as `len` of a frame times a share gives them: they are those of Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream import (
    Buckets,
    MixedDataset,
    MultiStreamDataLoader,
    StreamingDataLoader,
    StreamingDataset,
    StreamOptions,
    World,
)
from sqlstream.errors import ConfigError
from tests.stream.mixtures import seen, streams_of
from tests.stream.tables import make_table

Number = Callable[[int], Any]


def table(folder: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(make_table(folder, 40), folder / "cache", show_progress=False, **options)


def rows(folder: Path, number: Number) -> dict[str, Any]:
    options = {name: number(value) for name, value in (("shuffle_seed", 1), ("epoch_size", 30), ("max_size", 20))}
    with table(folder, world=World(rank=number(1), world_size=number(2)), **options) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=number(4), collate_fn=list)
        next(iter(loader))
        dataset.reweight("row + 1", at_epoch=number(2))
        loader.set_epoch(number(3))
        return loader.state_dict() | dataset.state_dict(num_samples=number(8))


def lazy(folder: Path, number: Number) -> dict[str, Any]:
    with table(folder, lazy_index_chunk_size=number(8), max_size=number(20), batch_size=number(2)) as dataset:
        return dataset.state_dict(num_samples=number(8))


def buckets(folder: Path, number: Number) -> dict[str, Any]:
    batches = Buckets(
        "row % 3", global_batch_tokens=number(8), tokens=lambda bucket: number(bucket + 1), rank_multiple=number(2)
    )
    with table(folder, shuffle_seed=number(1), batches=batches) as dataset:
        return dataset.state_dict()


def mixture(folder: Path, number: Number) -> dict[str, Any]:
    weights: Any = [(number(0), {"web": 1, "code": 1, "av": 1}), (number(4), {"web": 1, "code": 1, "av": 0})]
    options: dict[str, Any] = {"schedule": "random_order", "block": number(10), "prefetch": 4}
    dataset = MixedDataset(streams_of(folder), weights, epoch_size=number(6000), shuffle_seed=number(1), **options)
    with dataset:
        loader = StreamingDataLoader(dataset, batch_size=number(4), collate_fn=seen)
        next(iter(loader))
        dataset.reweight({"web": 1, "code": 2, "av": 3}, at_step=number(400))
        return loader.state_dict()


def chosen(folder: Path, number: Number) -> dict[str, Any]:
    streams = streams_of(folder)
    for stream in streams.values():
        stream.choose = number(5)
    with MixedDataset(streams, batch_size=number(4)) as dataset:
        return dataset.state_dict()


def steps(folder: Path, number: Number) -> dict[str, Any]:
    asked = StreamOptions.init_group([{"name": "table", "ratio": 1, "batch_size": number(4)}])
    with MultiStreamDataLoader([table(folder)], asked, number(0), number(1), epoch_size=number(5)) as loader:
        loader.reweight({"table": 2}, at_step=number(400))
        return loader.state_dict()


@pytest.mark.parametrize("run", [rows, lazy, buckets, mixture, chosen, steps], ids=lambda run: run.__name__)
def test_a_run_of_such_options_has_the_state_of_pythons_numbers(run: Callable[[Path, Number], Any], tmp_path: Path) -> None:
    assert json.dumps(run(tmp_path, np.int32)) == json.dumps(run(tmp_path, int))


@pytest.mark.parametrize("number", [-1, 2.5, "4"])
def test_what_is_no_number_of_samples_is_refused(number: Any, tmp_path: Path) -> None:
    with table(tmp_path, batch_size=2) as dataset, pytest.raises(ConfigError, match=r"num_samples=.* give 0 or more"):
        dataset.state_dict(num_samples=number)


@pytest.mark.parametrize("wrong", [5, np.array(5), np.ones(3), torch.ones(3), None, "web"])
def test_what_is_no_list_of_streams_and_no_weights_by_name_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^streams?.* is (no list|\S+): give "):
        MixedDataset(wrong)
    with MixedDataset(streams_of(tmp_path), batch_size=4) as dataset:
        with pytest.raises(ConfigError, match=r"^weights=.* are no dict: give a weight for each stream by its name"):
            dataset.reweight(wrong)
        if wrong is not None:
            with pytest.raises(ConfigError, match=r"^streams=.* is unknown: give 'continue', or a dict"):
                dataset.load_state_dict(dataset.state_dict(), streams=wrong)
    with pytest.raises(ConfigError, match=r"^stream configs=.* no list.*: give "):
        StreamOptions.init_group(wrong)
    with pytest.raises(ConfigError, match=r"^stream_opts.* is no (list|StreamOptions): give "):
        MultiStreamDataLoader([], wrong)


@pytest.mark.parametrize(
    ("option", "value"),
    [("name", 5), ("mixing_group_id", "0"), ("mixing_group_id", 1.5), ("is_main", "no"), ("dataloader_kwargs", 3)],
)
def test_what_a_config_of_a_stream_cannot_mean_is_refused(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{value!r}") + ".* is no|are no"):
        StreamOptions.init_group(
            [{"batch_gpu": 2, option: value}], mixing_strategy="custom" if "group" in option else "no_mixing"
        )


def test_weights_may_be_tensors_and_workers_numbers_of_numpy(tmp_path: Path) -> None:
    weights: Any = torch.tensor([0.7, 0.2, 0.1])
    with MixedDataset(streams_of(tmp_path), weights, epoch_size=10) as dataset:
        assert list(dataset.weights.values()) == [7, 2, 1]
        assert StreamingDataLoader(dataset, num_workers=np.int64(2)).num_workers == 2  # type: ignore[arg-type]  # the point of the test
        for option in ("num_workers", "collate_fn", "persistent_workers", "shuffle"):
            with pytest.raises(ConfigError, match=rf"^{option}="):
                StreamingDataLoader(dataset, **{option: "2"})  # type: ignore[arg-type]  # the point of the test


def test_a_function_may_name_buckets_by_numbers_of_numpy(tmp_path: Path) -> None:
    names = set()
    into: Any
    for into in (np.int64, int):
        with table(tmp_path, batches=Buckets("row % 3", into=into, global_batch_size=2)) as dataset:
            names.add(json.dumps([sample["__bucket__"] for sample in dataset]))
    assert len(names) == 1


@pytest.mark.parametrize("option", ["drop_last", "persistent_workers", "pin_memory"])
def test_texts_are_no_flags_of_a_loader(option: str, tmp_path: Path) -> None:
    """A text 'false', as configuration files give it, was True."""
    options: dict[str, Any] = {option: "false"}
    with table(tmp_path) as dataset, pytest.raises(ConfigError, match=rf"{option}='false' is no bool: give True or False"):
        StreamingDataLoader(dataset, batch_size=2, **options)
