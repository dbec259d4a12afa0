"""What holds a dataset: plain DataLoaders on several ranks, stand-ins of Accelerate (the real one: tests/frameworks)."""

from __future__ import annotations

import types
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from sqlstream import MixedDataset, StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.world import World
from tests.stream.tables import make_table, rows_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Length of IterableDataset"),
]

ACCELERATE = """
class IterableDatasetShard(IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        yield from self.dataset


class DataLoaderDispatcher:
    def __init__(self, loader):
        self.base_dataloader = loader

    def __iter__(self):
        yield from self.base_dataloader


class Accelerator:
    num_processes, split_batches, device_placement, device, non_blocking = 2, False, True, "cpu", False

    def prepare_data_loader(self, loader, device_placement=None):
        if not getattr(loader, "_is_accelerate_prepared", False):
            return DataLoaderDispatcher(loader)
        loader._is_accelerate_prepared = True
        return loader
"""


@pytest.fixture
def accelerate() -> Any:
    module = types.ModuleType("accelerate.data_loader")
    module.__dict__["IterableDataset"] = IterableDataset
    exec(ACCELERATE, module.__dict__)
    return module


def rank(folder: Path, number: int, num: int = 100, world_size: int = 2, **options: Any) -> StreamingDataset:
    world = World(rank=number, world_size=world_size, local_rank=number, local_world_size=world_size)
    return StreamingDataset(make_table(folder, num), folder / "cache", world=world, show_progress=False, **options)


@pytest.mark.parametrize("start", [None, "fork"], ids=["no-worker", "fork"])
@pytest.mark.parametrize("wrapper", ["IterableDatasetShard", "DataLoaderDispatcher"])
def test_a_dataset_that_accelerate_deals_out_again_says_so(
    accelerate: Any, tmp_path: Path, wrapper: str, start: str | None
) -> None:
    options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": start} if start else {}
    with rank(tmp_path, 0) as dataset:
        if wrapper == "IterableDatasetShard":
            loader: Any = DataLoader(accelerate.IterableDatasetShard(dataset), **options)
        else:
            loader = accelerate.DataLoaderDispatcher(DataLoader(dataset, **options))
        with pytest.raises(ConfigError, match=rf"{wrapper} .*2 ranks.*accelerator\.prepare"):
            next(iter(loader))


def test_what_one_rank_reads_whole_may_be_dealt_out(accelerate: Any, tmp_path: Path) -> None:
    with rank(tmp_path, 0, world_size=1) as dataset:
        assert len(list(accelerate.DataLoaderDispatcher(DataLoader(dataset)))) == 100


def test_a_streaming_loader_is_prepared_unless_accelerate_would_change_its_batches(accelerate: Any, tmp_path: Path) -> None:
    with rank(tmp_path, 0) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4)
        assert not getattr(loader, "_is_accelerate_prepared", False)
        assert accelerate.Accelerator().prepare_data_loader(loader) is loader
        assert loader._is_accelerate_prepared
        accelerator = accelerate.Accelerator()
        accelerator.split_batches = True
        with pytest.raises(ConfigError, match="split_batches"):
            accelerator.prepare_data_loader(StreamingDataLoader(dataset, batch_size=4))
        accelerator.split_batches, accelerator.num_processes = False, 4
        with pytest.raises(ConfigError, match=r"4 processes.*world_size=2"):
            accelerator.prepare_data_loader(StreamingDataLoader(dataset, batch_size=4))


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("given", [None, 8], ids=["batch-size-unknown", "batch-size-told"])
def test_num_steps_is_what_a_plain_loader_gives(tmp_path: Path, num_workers: int, given: int | None) -> None:
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
    for world_size, drop_last in ((1, False), (2, False), (3, True)):
        with rank(tmp_path, world_size - 1, 101, world_size, batch_size=given) as dataset:
            loader = DataLoader(
                dataset, batch_size=8, num_workers=num_workers, drop_last=drop_last, collate_fn=rows_of, **options
            )
            assert sum(1 for _ in loader) == dataset.num_steps(8, num_workers, drop_last=drop_last)


def test_num_steps_is_what_a_streaming_loader_gives(tmp_path: Path) -> None:
    for world_size in (1, 2, 3):
        for size in (1, 7, 101, 300):
            with rank(tmp_path, 0, 101, world_size) as dataset:
                num_steps = dataset.num_steps(size)
                loader = StreamingDataLoader(dataset, batch_size=size, collate_fn=rows_of)
                assert num_steps == len(loader) == sum(1 for _ in loader) == dataset.num_steps(size)


def test_a_plain_loader_on_several_ranks_is_told_once_what_its_length_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rank(tmp_path, 0) as dataset, rank(tmp_path, 1) as other:
        assert len(dataset) == 100
        list(dataset)
        list(StreamingDataLoader(dataset, batch_size=4, collate_fn=rows_of))
        assert not caplog.messages
        loader = DataLoader(other, batch_size=4, collate_fn=rows_of)
        assert len(loader) == 25
        assert not caplog.messages, "one rank says it"
        dataset_of_loader = rank(tmp_path, 0)
        loader = DataLoader(dataset_of_loader, batch_size=4, collate_fn=rows_of)
        assert len(loader) == 25
        list(loader)
        dataset_of_loader.close()
    assert len(caplog.messages) == 1
    assert "dataset.num_steps(batch_size)" in caplog.messages[0]
    assert "StreamingDataLoader" in caplog.messages[0]


@pytest.mark.parametrize(
    ("epoch_size", "effect"), [(100, "leaves rows out"), (20, "resumes at another place"), (50, None), (None, None)]
)
@pytest.mark.parametrize("kind", ["single", "mixture"])
def test_a_plain_loader_over_epochs_of_another_size_than_its_rows_is_told_once(
    kind: str, epoch_size: int | None, effect: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Trainer that makes its own loader stops each epoch after `len()`, and counts by it when it goes on."""
    options: dict[str, Any] = {"batch_size": 4, "epoch_size": epoch_size}
    if kind == "single":
        dataset: Any = StreamingDataset(make_table(tmp_path, 50), tmp_path / "cache", show_progress=False, **options)
    else:
        parts = [StreamingDataset(make_table(tmp_path, size), tmp_path / "cache", show_progress=False) for size in (30, 20)]
        dataset = MixedDataset(parts, **options)
    with dataset:
        loader = DataLoader(dataset, 4, num_workers=2, collate_fn=rows_of)
        assert len(loader) == len(loader) == 13
    assert len(caplog.messages) == (effect is not None)
    assert all(str(effect) in message and "give the dataset batch_size" not in message for message in caplog.messages)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_what_a_trainer_counts_goes_on_over_the_epochs_of_an_endless_iteration(
    tmp_path: Path, num_workers: int, drop_last: bool
) -> None:
    def opened() -> tuple[StreamingDataset, DataLoader[Any]]:
        options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
        dataset = rank(tmp_path, 0, 21, 1, shuffle_seed=3, batch_size=4, infinite_iteration=True, drop_last=drop_last)
        return dataset, DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=rows_of, **options)

    whole = list(islice(opened()[1], 20))
    for num_steps in (3, 6, 7, 14):
        dataset, loader = opened()
        batches = iter(loader)
        assert list(islice(batches, num_steps)) == whole[:num_steps]
        state = dataset.state_dict(num_samples=num_steps * 4)
        other, loader = opened()
        other.load_state_dict(state)
        assert list(islice(loader, 20 - num_steps)) == whole[num_steps:]


def test_counting_in_an_endless_iteration_without_a_step_is_an_error(tmp_path: Path) -> None:
    with (
        rank(tmp_path, 0, 3, 1, batch_size=4, infinite_iteration=True, drop_last=True) as dataset,
        pytest.raises(ConfigError, match="an epoch of 3 samples has no step"),
    ):
        dataset.state_dict(num_samples=8)
