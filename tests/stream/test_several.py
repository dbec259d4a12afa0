"""Rows that give no sample, or several: real loaders go on from every state to the sample."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from sqlstream import MixedDataset, StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, SampleError, StateError
from sqlstream.world import World
from tests.stream.tables import make_table

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own
]

NUM_ROWS = 22


def some(sample: dict[str, Any]) -> Iterator[dict[str, Any]] | dict[str, Any] | list[dict[str, Any]]:
    """No sample, one, two or five, by row."""
    kind = sample["__row__"] % 4
    if kind == 1:
        return sample | {"part": 0}
    if kind == 2:
        return [sample | {"part": 0}, sample | {"part": 1}]
    return (sample | {"part": part} for part in range(0 if kind == 0 else 5))


def before(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The same before the download: two rows of one, or none."""
    return [row | {"copy": copy} for copy in range(row["__row__"] % 3)]


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__row__"] % 5 == 3:
        raise SampleError(f"row {sample['__row__']} is ill")
    return sample


def names(samples: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """A collate function: what tells samples apart."""
    return [(s["__epoch__"], s["__row__"], s.get("copy"), s.get("part")) for s in samples]


KINDS: dict[str, dict[str, Any]] = {
    "transforms": {"transforms": [some]},
    "predownload": {"predownload_transforms": [before], "transforms": [some]},
    "skip": {"transforms": [fail], "on_error": "skip", "max_failure_ratio": 1.0},
}
OpenLoader = Callable[..., StreamingDataLoader]


@pytest.fixture
def loader(tmp_path: Path) -> Iterator[OpenLoader]:
    opened: list[StreamingDataset] = []

    def open_loader(num_workers: int, **options: Any) -> StreamingDataLoader:
        opened.append(open_dataset(tmp_path, **options))
        return StreamingDataLoader(opened[-1], batch_size=6, num_workers=num_workers, collate_fn=names)

    yield open_loader
    for dataset in opened:
        dataset.close()


def open_dataset(tmp_path: Path, **options: Any) -> StreamingDataset:
    options = {"shuffle_seed": 5, "show_progress": False} | options
    return StreamingDataset(make_table(tmp_path, NUM_ROWS), tmp_path / "cache", **options)


def deliver(loader: StreamingDataLoader, num_batches: int = 99) -> tuple[list[Any], list[dict[str, Any]]]:
    """Batches of one iteration, with the state before each and after the last."""
    batches, states = [], [json.loads(json.dumps(loader.state_dict()))]
    for batch in itertools.islice(loader, num_batches):
        batches.append(batch)
        states.append(json.loads(json.dumps(loader.state_dict())))
    return batches, states


def samples_of(*batches: list[Any]) -> list[Any]:
    return sorted((sample for some_batches in batches for batch in some_batches for sample in batch), key=repr)


@pytest.mark.parametrize("kind", ["transforms", "skip"])
def test_any_number_of_workers_goes_on_after_every_batch_to_the_sample(loader: OpenLoader, kind: str) -> None:
    """As many workers give the same batches; others give the same samples."""
    loaders = {num_workers: loader(num_workers, **KINDS[kind]) for num_workers in (0, 2, 3)}
    epochs = {num_workers: deliver(one) for num_workers, one in loaders.items()}
    whole = samples_of(epochs[0][0])
    assert len(set(whole)) == len(whole) > 10
    for number, (first, second) in enumerate([(0, 2), (2, 3), (3, 0), (2, 2), (3, 3)]):
        batches, states = epochs[first]
        assert samples_of(batches) == whole
        for stop in range(number % 2, len(batches), 2):  # every batch, in one pair of loaders or the next
            loaders[second].load_state_dict(states[stop])
            assert loaders[second].state_dict() == states[stop]
            rest, later = deliver(loaders[second], 2)
            if first == second:
                assert rest == batches[stop : stop + 2]
            loaders[first].load_state_dict(later[-1])  # and again
            last, _ = deliver(loaders[first])
            if later[-1]["epoch"] == 0:
                assert samples_of(batches[:stop], rest, last) == whole, (first, second, stop)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_endless_iteration_goes_on_over_the_ends_of_epochs(loader: OpenLoader, num_workers: int) -> None:
    endless = loader(num_workers, transforms=[some], infinite_iteration=True)
    batches, states = deliver(endless, 20)
    assert states[-1]["epoch"] >= 1
    for stop in (1, 5, 8, 9, 15):
        endless.load_state_dict(states[stop])
        assert deliver(endless, 20 - stop)[0] == batches[stop:], stop


def test_persistent_workers_go_on_from_a_loaded_state(tmp_path: Path) -> None:
    with open_dataset(tmp_path, transforms=[some]) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True, collate_fn=names)
        batches, states = deliver(loader)
        following, _ = deliver(loader)
        for stop in (3, 2):
            loader.load_state_dict(states[stop])
            assert deliver(loader)[0] == batches[stop:]
            assert deliver(loader)[0] == following
        loader.set_epoch(0)
        assert deliver(loader)[0] == batches, "what was delivered before another state counts no more"


def test_a_plain_loader_goes_on_with_new_workers(tmp_path: Path) -> None:
    with open_dataset(tmp_path, transforms=[some], batch_size=4) as dataset:
        batches, states = deliver(StreamingDataLoader(dataset, batch_size=4, collate_fn=names))
        dataset.load_state_dict(states[2])
        rest = list(DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=names))
        assert samples_of(batches[:2], rest) == samples_of(batches)


@pytest.mark.parametrize("kind", KINDS)
def test_iterating_the_dataset_itself_goes_on_after_every_sample(tmp_path: Path, kind: str) -> None:
    with open_dataset(tmp_path, batch_size=4, **KINDS[kind]) as dataset:
        whole = names(list(dataset))
        for stop in range(len(whole)):
            dataset.set_epoch(0)
            samples = iter(dataset)
            begun = [next(samples) for _ in range(stop)]
            state = json.loads(json.dumps(dataset.state_dict()))
            del samples
            dataset.load_state_dict(state)
            assert names(begun + list(dataset)) == whole, stop


def test_a_position_whose_samples_were_delivered_gives_none_when_it_gives_fewer_than_before(tmp_path: Path) -> None:
    """The state says how many were delivered; that there are no more is known only from the next position on."""
    with open_dataset(tmp_path, transforms=[lambda sample: [sample | {"part": 0}, sample | {"part": 1}]]) as dataset:
        samples = iter(dataset)
        first, again = next(samples), next(samples)
        assert first["__row__"] == again["__row__"]
        state = dataset.state_dict()
    with open_dataset(tmp_path) as dataset:
        dataset.load_state_dict(state)
        rest = [sample["__row__"] for sample in dataset]
        assert sorted([first["__row__"], *rest]) == list(range(NUM_ROWS))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchdatas_loader_goes_on_after_every_batch(tmp_path: Path, num_workers: int) -> None:
    datasets = [open_dataset(tmp_path, transforms=[some], batch_size=4) for _ in range(2)]

    def open_loader(dataset: StreamingDataset) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=names)

    first = open_loader(datasets[0])
    batches, states = [], []
    for batch in first:
        batches.append(batch)
        states.append(first.state_dict())
    for stop, state in enumerate(states[:-1], start=1):
        second = open_loader(datasets[1])
        second.load_state_dict(state)
        assert list(second) == batches[stop:], stop
    for dataset in datasets:
        dataset.close()


def test_the_state_of_another_rank_is_refused_unless_one_insists(loader: OpenLoader) -> None:
    world = World(world_size=2, local_world_size=2)
    _, states = deliver(loader(0, transforms=[some], world=world), 2)
    assert states[2]["beyond"] is not None
    other = loader(0, transforms=[some], world=World(rank=1, world_size=2, local_rank=1, local_world_size=2))
    other.load_state_dict(states[2])
    with pytest.raises(StateError, match="rank 0 of 2, this is rank 1 of 2"):
        next(iter(other))
    other.load_state_dict(states[2], strict=False)
    assert other.state_dict()["sample_in_epoch"] == states[2]["sample_in_epoch"]
    next(iter(other))


def none_at_all(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return []


def only_row_3(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [sample] if sample["__row__"] == 3 else []


@pytest.mark.parametrize(
    ("num_workers", "options"),
    [
        (0, {"transforms": [none_at_all]}),
        (2, {"transforms": [none_at_all]}),
        (0, {"predownload_transforms": [none_at_all]}),
        (0, {"transforms": [only_row_3], "shuffle_seed": None, "world": World(rank=1, world_size=2)}),  # rank 0 takes row 3
    ],
)
def test_an_endless_iteration_without_a_sample_is_an_error(
    loader: OpenLoader, num_workers: int, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="positions one after the other have given no sample to rank"):
        next(iter(loader(num_workers, infinite_iteration=True, **options)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_endless_iteration_goes_on_where_few_rows_give_a_sample(loader: OpenLoader, num_workers: int) -> None:
    batches = loader(num_workers, transforms=[only_row_3], infinite_iteration=True)
    assert [{row for _, row, *_ in batch} for batch in itertools.islice(batches, 4)] == [{3}] * 4


def test_a_mixture_without_end_and_without_a_sample_is_an_error(tmp_path: Path) -> None:
    streams = {name: open_dataset(tmp_path, transforms=[none_at_all]) for name in ("web", "code")}
    with (
        MixedDataset(streams, stop="never") as mixed,
        pytest.raises(ConfigError, match=f"there are {2 * NUM_ROWS} rows"),
    ):
        next(iter(mixed))
    with MixedDataset({"web": open_dataset(tmp_path, transforms=[none_at_all])}, epoch_size=20000) as mixed:
        assert list(mixed) == []
