"""Which processes share epoch and weights of a dataset: a trainer and its workers, and no other, whatever it was made from."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sqlstream import MixedDataset, Stream, StreamingDataLoader, StreamingDataset
from sqlstream.stream.run.epoch_counter import EpochCounter
from sqlstream.stream.run.positions import JobPosition
from sqlstream.stream.run.shared.text import SharedText
from tests.stream.tables import make_table


def dataset_of(directory: Path) -> StreamingDataset:
    rows = [{"n": number} for number in range(6)]
    return StreamingDataset(rows, directory, columns_to_download=[], shuffle_seed=1, batch_size=2)


def epochs_of(samples: Any) -> set[int]:
    return {sample["__epoch__"] for sample in samples}


def unpickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [unpickled, copy.deepcopy])
@pytest.mark.parametrize(("loader_type", "persistent"), [(DataLoader, False), (StreamingDataLoader, True)])
def test_workers_of_a_copied_dataset_make_one_epoch_after_another(
    copied: Callable[[Any], Any], loader_type: Any, persistent: bool, tmp_path: Path
) -> None:
    with dataset_of(tmp_path) as dataset, copied(dataset) as other:
        loader = loader_type(other, batch_size=2, num_workers=1, collate_fn=list, persistent_workers=persistent)
        assert [epochs_of(sample for batch in loader for sample in batch) for _ in range(2)] == [{0}, {1}]
        assert epochs_of(dataset) == {0}


def test_what_a_copy_writes_is_in_memory_that_its_spawned_workers_have() -> None:
    counter, text = unpickled(EpochCounter()), unpickled(SharedText(10))
    assert (counter.next, text.read().text) == (JobPosition(0, 0), b"")  # arrays of the memory are made
    as_worker_has, text_as_worker_has = (pickle.loads(ForkingPickler.dumps(value)) for value in (counter, text))
    counter.set_next(JobPosition(3, 4))
    text.write(b"new")
    assert (as_worker_has.next, text_as_worker_has.read().text) == (JobPosition(3, 4), b"new")


def test_a_copied_text_is_what_it_was() -> None:
    text = SharedText(10)
    for written in (b"one", b"three"):
        text.write(written)
        assert copy.deepcopy(text).read() == unpickled(text).read() == text.read()
    other = unpickled(text)
    other.write(b"other")
    assert (text.read().text, other.read().text) == (b"three", b"other")


def iterate_when_asked(dataset: StreamingDataset, pipe: Connection, method: str | None) -> None:
    """What a rank does that is started with a dataset of its parent; its own workers, if any, start by `method`."""
    batches: Any = dataset
    if method is not None:
        batches = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=method)
    while pipe.recv():
        pipe.send(epochs_of(batches))


@pytest.mark.parametrize(
    ("method", "num_ranks", "own_method"),
    [("fork", 2, None), ("spawn", 1, None), ("fork", 2, "fork"), ("fork", 1, "spawn")],  # who is spawned imports torch anew
)
def test_a_process_that_is_no_worker_has_epochs_of_its_own(
    method: str, num_ranks: int, own_method: str | None, tmp_path: Path
) -> None:
    context: Any = multiprocessing.get_context(method)
    with dataset_of(tmp_path) as dataset:
        assert epochs_of(dataset) == {0}
        ours, theirs = zip(*(context.Pipe() for _ in range(num_ranks)), strict=True)
        ranks = [context.Process(target=iterate_when_asked, args=(dataset, pipe, own_method)) for pipe in theirs]
        for rank in ranks:
            rank.start()
        assert epochs_of(dataset) == {1}  # after they were made, and before they begin
        for epoch in (1, 2):
            for pipe in ours:
                pipe.send(True)
                assert pipe.recv() == {epoch}
        assert epochs_of(dataset) == {2}
        for pipe, rank in zip(ours, ranks, strict=True):
            pipe.send(False)
            rank.join()
            assert rank.exitcode == 0


def load_another(dataset: StreamingDataset | MixedDataset, state: dict[str, Any]) -> None:
    """What a process does that is started with a dataset of its parent, to evaluate another state."""
    dataset.load_state_dict(state)
    assert dataset.state_dict() == state


@pytest.mark.parametrize("kind", ["rows", "streams"])
def test_the_weights_of_a_process_that_is_no_worker_are_its_own(kind: str, tmp_path: Path) -> None:
    def opened() -> StreamingDataset | MixedDataset:
        if kind == "rows":
            return StreamingDataset(make_table(tmp_path, 6), tmp_path / "cache", shuffle_seed=1)
        streams = {name: Stream(make_table(tmp_path, 6), tmp_path / "cache", shuffle_seed=1) for name in "ab"}
        return MixedDataset(streams, weights={"a": 1, "b": 1}, epoch_size=6)

    with opened() as dataset, opened() as other:
        other.reweight("score" if kind == "rows" else {"a": 1, "b": 5})  # type: ignore[arg-type]  # as its kind has them
        before, loaded = dataset.state_dict(), other.state_dict()
        process = multiprocessing.get_context("fork").Process(target=load_another, args=(dataset, loaded))
        process.start()
        process.join()
        assert process.exitcode == 0
        assert dataset.state_dict() == before != loaded
