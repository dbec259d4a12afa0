"""`WebLoader`: the same batches on any number of workers, epochs of a given size, and a state after each batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sqlstream.compat.webdataset as wds
from sqlstream import StreamingDataLoader
from sqlstream.errors import ConfigError, StateError
from tests.compat.webdataset.kit import NUM_ROWS, classes

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def tupled(number: int) -> tuple[int, np.ndarray[Any, Any]]:
    return number, np.full(2, number)


def loader_of(tmp_path: Path, batch_size: int = 4, num_workers: int = 0, **options: Any) -> wds.WebLoader:
    dataset = classes(tmp_path / "s", tmp_path, **({"shardshuffle": 4} | options))
    return wds.WebLoader(dataset.map(tupled).batched(batch_size), batch_size=None, num_workers=num_workers)


def numbers(batches: Any) -> list[list[int]]:
    return [[int(number) for number in batch[0]] for batch in batches]


def test_batches_are_the_same_on_any_number_of_workers_and_are_tensors(tmp_path: Path) -> None:
    with loader_of(tmp_path) as alone, loader_of(tmp_path, num_workers=2) as together:
        batches = list(alone)
        assert numbers(together) == numbers(batches)
        assert [type(value) for value in batches[0]] == [torch.Tensor, torch.Tensor]
        assert batches[0][1].shape == (4, 2)
        assert isinstance(alone.loader, StreamingDataLoader)
        assert "·" not in together.explain()


def test_stages_behind_batches_make_them_in_the_workers_and_may_drop_them(tmp_path: Path) -> None:
    def dropped(batch: list[int]) -> list[int] | None:
        return None if 0 in batch else [number + 100 for number in batch]

    with classes(tmp_path / "s", tmp_path) as dataset:
        chain = dataset.batched(8, collation_fn=None).map(dropped)
        wanted = [[number + 100 for number in range(start, start + 8)] for start in (8, 16, 24)]
        assert list(chain) == wanted
        for num_workers in (0, 2):
            loader = wds.WebLoader(chain, batch_size=None, num_workers=num_workers)
            assert [torch.as_tensor(batch).tolist() for batch in loader] == wanted


def test_stages_behind_batches_take_what_batches_are_made_of_and_the_loader_makes_tensors_of_what_they_return(
    tmp_path: Path,
) -> None:
    def halved(batch: list[Any]) -> tuple[Any, ...]:
        assert {type(value) for value in batch} == {np.ndarray}
        return batch[0].astype(np.float32) / 2, len(batch[1])

    with classes(tmp_path / "s", tmp_path) as dataset:
        chain = dataset.map(tupled).batched(8).map(halved)
        for num_workers in (0, 2):
            (numbers, size), *_ = wds.WebLoader(chain, batch_size=None, num_workers=num_workers)
            assert numbers.tolist() == [number / 2 for number in range(8)]
            assert (type(numbers), size) == (torch.Tensor, 8)
            made = wds.WebLoader(chain, batch_size=None, num_workers=num_workers, collate_fn=type)
            assert set(made) == {tuple}


def test_batches_of_the_loader_itself_are_those_of_torch(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        loader = wds.WebLoader(dataset.map(tupled), batch_size=12, num_workers=2)
        assert numbers(loader) == [list(range(12)), list(range(12, 24)), list(range(24, 32))]
        assert numbers(wds.WebLoader(dataset.map(tupled), batch_size=12, drop_last=True)) == [
            list(range(12)),
            list(range(12, 24)),
        ]
        assert list(wds.WebLoader(dataset, batch_size=None)) == list(range(NUM_ROWS))
        assert list(wds.WebLoader(dataset, 16, collate_fn=sum)) == [sum(range(16)), sum(range(16, 32))]
        with pytest.raises(ConfigError, match="shuffle="):
            list(wds.WebLoader(dataset, batch_size=4, shuffle=True))


def test_a_loader_that_mixes_batches_again_makes_other_batches_of_the_same_order(tmp_path: Path) -> None:
    with loader_of(tmp_path, num_workers=2) as loader:
        again = loader.unbatched().shuffle(1000).batched(6)
        assert "·" not in again.explain()
        assert [*itertools.chain(*numbers(again))] == [*itertools.chain(*numbers(loader))]
        assert [len(batch) for batch in numbers(again)] == [6, 6, 6, 6, 6, 2]
        made = (next(iter(some)) for some in (loader, again))
        assert [type(batch) for batch in made] == [list, tuple]  # torch makes a list of it, and theirs behind it a tuple
    with loader_of(tmp_path, shardshuffle=False) as loader:
        again = loader.unbatched().shuffle(1000).batched(6)
        assert sorted(itertools.chain(*numbers(again))) == list(range(NUM_ROWS))
        assert numbers(again)[0] != list(range(6)), "the dataset has no shuffle, and the loader asks for one"
        kept = loader.unbatched().map(lambda sample: sample).batched(3)
        assert numbers(kept) == [list(range(start, min(start + 3, 32))) for start in range(0, 32, 3)]
        assert kept.explain().count("as it is, in the trainer") == 3


@pytest.mark.parametrize("taken", [1, 5])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_from_its_state_with_another_number_of_workers(taken: int, num_workers: int, tmp_path: Path) -> None:
    with loader_of(tmp_path, num_workers=num_workers) as loader, loader_of(tmp_path, num_workers=2 - num_workers) as again:
        list(loader)
        batches = iter(loader)
        before = numbers(itertools.islice(batches, taken))
        state = loader.state_dict()
        again.load_state_dict(state)
        rest = numbers(again)
        assert rest == numbers(batches)
        assert sorted(itertools.chain(*before, *rest)) == list(range(NUM_ROWS))


def test_an_epoch_of_a_given_size_goes_on_where_the_one_before_ended_and_from_a_state_in_it(tmp_path: Path) -> None:
    with loader_of(tmp_path, shardshuffle=False) as loader, loader_of(tmp_path, shardshuffle=False) as again:
        epochs = loader.with_epoch(3)
        assert [len(numbers(epochs)) for _ in range(2)] == [3, 3]
        third = iter(epochs)
        assert numbers(itertools.islice(third, 1)) == [list(range(24, 28))]
        state = epochs.state_dict()
        assert numbers(third) == [list(range(28, 32)), [0, 1, 2, 3]]
        other = again.with_epoch(3)
        other.load_state_dict(state)
        assert numbers(other) == [list(range(28, 32)), [0, 1, 2, 3]]
        assert numbers(other) == [list(range(start, start + 4)) for start in (4, 8, 12)]


@pytest.mark.parametrize("is_endless", [False, True])
def test_a_state_of_the_last_batch_of_an_epoch_is_the_start_of_the_next_one(is_endless: bool, tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path, resampled=is_endless) as dataset:
        loader = wds.WebLoader(dataset.map(tupled).batched(4).with_epoch(3), batch_size=None)
        states, epoch = list[dict[str, Any]](), list[Any]()
        for batch in loader:
            epoch += numbers([batch])
            states.append(loader.state_dict())
        following = numbers(loader)
        assert (len(epoch), len(following)) == (3, 3)
        for taken, state in enumerate(states, start=1):
            again = wds.WebLoader(dataset.map(tupled).batched(4).with_epoch(3), batch_size=None)
            again.load_state_dict(state)
            rest = numbers(itertools.islice(again, 4))
            assert rest == (epoch[taken:] or following), f"after {taken} batches"


def test_an_epoch_of_the_dataset_is_that_of_each_worker(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path, resampled=True) as dataset:
        chain = dataset.map(tupled).batched(4).with_epoch(5)
        loader = wds.WebLoader(chain, batch_size=None, num_workers=2)
        assert [len(numbers(loader)) for _ in range(2)] == [10, 10]
        samples = wds.WebLoader(dataset.map(tupled).with_epoch(10), batch_size=4, num_workers=2)
        assert len(numbers(samples)) == 6, "three for each worker: 4, 4, 2 of theirs"
    with loader_of(tmp_path) as loader:
        assert len(numbers(loader.repeat(2))) == 16


def test_a_pipeline_with_stages_that_run_as_they_are_is_loaded_by_torch_without_a_state(tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        loader = wds.WebLoader(dataset.slice(10), batch_size=5)
        assert [batch.tolist() for batch in loader] == [list(range(5)), list(range(5, 10))]
        with pytest.raises(StateError, match=r"a stage runs as it is:\n[^·]*· as it is"):
            loader.state_dict()
        assert loader.streaming is None
    assert list(wds.WebLoader([1, 2, 3], batch_size=None)) == [1, 2, 3]


def test_an_error_of_a_stage_in_a_worker_names_stage_and_sample(tmp_path: Path) -> None:
    def fail(number: int) -> int:
        if number == 6:
            raise ValueError("six")
        return number

    with classes(tmp_path / "s", tmp_path) as dataset:
        with pytest.raises(ValueError, match="six"):
            list(wds.WebLoader(dataset.map(fail), batch_size=4))
        with pytest.raises(Exception, match=r"failed on sample '006'.*ValueError: six"):
            list(wds.WebLoader(dataset.map(fail), batch_size=4, num_workers=1))
        stopped = wds.WebLoader(dataset.map(fail, handler=wds.ignore_and_stop), batch_size=3, num_workers=1)
        assert [batch.tolist() for batch in stopped] == [[0, 1, 2], [3, 4, 5]]


def is_early(number: int) -> bool:
    return number < 12


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_begins_with_the_next_rows_where_the_rest_of_those_before_is_dropped(num_workers: int, tmp_path: Path) -> None:
    with classes(tmp_path / "s", tmp_path) as dataset:
        kept = dataset.select(is_early)
        assert [list(kept.with_epoch(12)) for _ in range(3)] == [list(range(12))] * 3
        chain = dataset.select(is_early).map(tupled).batched(4, partial=False).with_epoch(3)
        loader = wds.WebLoader(chain, batch_size=None, num_workers=num_workers)
        wanted = [list(range(start, start + 4)) for start in (0, 4, 8)]
        assert [numbers(loader) for _ in range(3)] == [wanted] * 3
        nothing = dataset.select(is_late)
        assert list(nothing.with_epoch(3)) == list(wds.WebLoader(nothing.batched(2).with_epoch(2), batch_size=None)) == []


def is_late(number: int) -> bool:
    return number > NUM_ROWS
