"""States of the drop-in: in the middle of an epoch, on other layouts, and those of MosaicML Streaming itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sqlstream.compat.streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, StateError

THEIRS = {"epoch": 1, "sample_in_epoch": 16, "num_canonical_nodes": 2, "shuffle_seed": 9176, "initial_physical_nodes": 2}
"""A state as MosaicML Streaming 0.13.0 writes it."""


@pytest.fixture
def local(tmp_path: Path) -> str:
    with MDSWriter(out=str(tmp_path / "mds"), columns={"n": "int"}, size_limit=120) as writer:
        for number in range(48):
            writer.write({"n": number})
    return str(tmp_path / "mds")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this process a rank of a job of nodes with one rank each."""

    def become(rank: int, num_nodes: int) -> None:
        variables = {"RANK": rank, "WORLD_SIZE": num_nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        for name, value in (variables | {"GROUP_WORLD_SIZE": num_nodes}).items():
            monkeypatch.setenv(name, str(value))

    return become


def opened(local: str, **options: Any) -> StreamingDataset:
    return StreamingDataset(**{"local": local, "batch_size": 4, "shuffle": True, **options})


def batches(loader: Any) -> list[list[int]]:
    return [batch["n"].tolist() for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_in_the_middle_of_an_epoch(workers: int, local: str) -> None:
    loader = StreamingDataLoader(opened(local), batch_size=4, num_workers=workers)
    under_way = iter(loader)
    for _ in range(3):
        next(under_way)
    state = json.loads(json.dumps(loader.state_dict()))
    rest, following = batches(under_way), batches(loader)
    assert (state["epoch"], state["sample_in_epoch"], state["num_canonical_nodes"], state["shuffle_seed"]) == (0, 12, 1, 9176)
    other = StreamingDataLoader(opened(local), batch_size=4, num_workers=2 - workers)
    other.load_state_dict(state)
    assert [batches(other), batches(other)] == [rest, following]


def test_a_plain_loader_counts_samples_from_the_epochs_start_or_from_where_it_went_on(local: str) -> None:
    dataset = opened(local)
    first = batches(DataLoader(dataset, batch_size=4, num_workers=2))
    state = dataset.state_dict(8, from_beginning=False)
    assert (state["epoch"], state["sample_in_epoch"]) == (0, 8)
    again = opened(local)
    again.load_state_dict(state)
    under_way = iter(DataLoader(again, batch_size=4, num_workers=1))
    next(under_way)
    assert again.state_dict(4, from_beginning=False)["sample_in_epoch"] == 12
    assert again.state_dict(12, from_beginning=True)["sample_in_epoch"] == 12
    last = opened(local)
    last.load_state_dict(again.state_dict(4, False))
    assert batches(DataLoader(last, batch_size=4)) == first[3:]


@pytest.mark.parametrize("num_streams", [1, 2])
def test_canonical_nodes_are_those_of_the_first_start_wherever_the_run_goes_on(
    num_streams: int, local: str, job: Callable[[int, int], None]
) -> None:
    def opened(batch_size: int) -> StreamingDataset:
        place: dict[str, Any] = {"local": local}
        if num_streams > 1:
            place = {"streams": [Stream(local=local), Stream(local=local, repeat=0.5)]}
        return StreamingDataset(**place, batch_size=batch_size, shuffle=True)

    parts, states = [], []
    for rank in range(2):
        job(rank, 2)
        loader = StreamingDataLoader(opened(4), batch_size=4)
        under_way = iter(loader)
        next(under_way)
        states.append(loader.state_dict())
        parts.append(batches(under_way))
    assert states[0] == states[1]
    assert (states[0]["num_canonical_nodes"], states[0]["initial_physical_nodes"]) == (2, 2)
    job(0, 1)
    alone = opened(8)
    assert alone.num_canonical_nodes == 1
    loader = StreamingDataLoader(alone, batch_size=8)
    loader.load_state_dict(states[0])
    assert alone.num_canonical_nodes == 2
    assert [sorted(batch) for batch in batches(loader)] == [sorted([*a, *b]) for a, b in zip(*parts, strict=True)]
    assert loader.state_dict()["initial_physical_nodes"] == 2


def test_the_seed_of_a_state_holds(local: str) -> None:
    dataset = opened(local, shuffle_seed=5)
    under_way = iter(dataset)
    first = [next(under_way)["n"] for _ in range(4)]
    state = dataset.state_dict(4, True)
    rest = [sample["n"] for sample in under_way]
    other = opened(local)
    other.load_state_dict(state)
    assert [sample["n"] for sample in other] == rest
    assert other.shuffle_seed == 5
    assert sorted(first + rest) == list(range(48))


def test_their_states_load_epoch_and_samples_and_say_that_the_order_differs(
    local: str, caplog: pytest.LogCaptureFixture
) -> None:
    for state in (THEIRS, {key: THEIRS[key] for key in THEIRS if key != "initial_physical_nodes"}):
        dataset = opened(local)
        with caplog.at_level(logging.WARNING):
            dataset.load_state_dict(state)
        assert "in another order, so some samples of that epoch come twice" in caplog.text
        assert len(list(dataset)) == 48 - 16
        assert dataset.epoch == 2
        assert sorted(sample["n"] for sample in dataset) == list(range(48))
        caplog.clear()


@pytest.mark.parametrize("num_samples", [0, 8])
def test_their_state_of_a_run_that_has_not_begun_is_its_start(
    num_samples: int, local: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = StreamingDataLoader(opened(local), batch_size=4)
    loader = StreamingDataLoader(opened(local), batch_size=4)
    loader.dataset.load_state_dict({**THEIRS, "epoch": -1, "sample_in_epoch": num_samples})
    assert [batches(loader) for _ in range(2)] == [batches(whole) for _ in range(2)]
    assert "come twice" not in caplog.text


def test_states_of_other_shards_or_batches_are_refused(local: str, tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path / "other"), columns={"n": "int"}) as writer:
        writer.write({"n": 1})
    state: Mapping[str, Any] = opened(local).state_dict(8, True)
    with pytest.raises(StateError, match="other rows"):
        opened(str(tmp_path / "other")).load_state_dict(state)
    with pytest.raises(StateError, match="global_batch_size"):
        opened(local, batch_size=3).load_state_dict(state)
    with pytest.raises(StateError, match="shuffle_seed"):
        opened(local, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize(
    "wrong", [{"shuffle_seed": 5, "permutation_version": 99}, {"shuffle_seed": "x"}, {"num_canonical_nodes": 0}]
)
def test_a_state_that_is_refused_leaves_seed_and_run_as_they_were(wrong: dict[str, Any], local: str) -> None:
    dataset = opened(local)
    state = dataset.state_dict(8, True)
    want, seed = [sample["n"] for sample in opened(local)], dataset.shuffle_seed
    with pytest.raises((StateError, ConfigError)):
        dataset.load_state_dict({**state, **wrong})
    assert (dataset.shuffle_seed, dataset.num_canonical_nodes) == (seed, 1)
    assert [sample["n"] for sample in dataset] == want


def test_persistent_workers_take_over_the_seed_of_a_state(local: str) -> None:
    dataset = opened(local, shuffle_seed=5)
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True)
    batches(loader)
    state, want = loader.state_dict(), batches(loader)
    other = StreamingDataLoader(opened(local), batch_size=4, num_workers=1, persistent_workers=True)
    assert batches(other) != want
    other.load_state_dict(state)
    assert batches(other) == want
