"""Mixtures of tables without objects, for tests of their order: streams of several sizes, ranks of a job in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlstream import MixedDataset, Stream, StreamingDataLoader
from sqlstream.transforms import rng
from sqlstream.transforms.base import Sample
from sqlstream.world import World
from tests.stream.tables import make_table

SIZES = {"web": 50, "code": 17, "av": 5}
WEIGHTS = {"web": 0.6, "code": 0.3, "av": 0.1}
EPOCH_SIZE = 60
Seen = tuple[str, int, int, int]


def draw(sample: Sample) -> Sample:
    """Draws from the sample's own generator."""
    sample["drawn"] = int(rng(sample).integers(1 << 60))
    return sample


def seen(samples: list[Sample]) -> list[Seen]:
    """A collate function: stream, epoch and row of each sample, and what it has drawn."""
    return [(sample["__stream__"], sample["__epoch__"], sample["__row__"], sample["drawn"]) for sample in samples]


def streams_of(folder: Path, sizes: Mapping[str, int] = SIZES, *, seed: int = 0, **options: Any) -> dict[str, Stream]:
    """Return a stream of each size, with a seed of its own, the first one `seed`."""
    common: dict[str, Any] = {"transforms": [draw], "show_progress": False} | options
    return {
        name: Stream(make_table(folder, size), folder / "cache", shuffle_seed=own, **common)
        for own, (name, size) in enumerate(sizes.items(), start=seed)
    }


class MixedJob:
    """All ranks of a job over one mixture, in this process, taking their batches in turn.

    Args:
        folder: Where tables and cache are.
        num_ranks: Ranks.
        num_workers: Workers of each.
        global_batch_size: Samples of a step.
        make: Makes the streams; None: three tables.
        options: Of the mixture.
    """

    def __init__(
        self,
        folder: Path,
        num_ranks: int,
        num_workers: int,
        global_batch_size: int,
        make: Callable[[], Any] | None = None,
        **options: Any,
    ) -> None:
        self._stack = ExitStack()
        given: dict[str, Any] = {"weights": WEIGHTS, "epoch_size": EPOCH_SIZE} | options
        self.loaders = [
            StreamingDataLoader(
                self._stack.enter_context(
                    MixedDataset(
                        streams_of(folder) if make is None else make(), world=World(rank=rank, world_size=num_ranks), **given
                    )
                ),
                batch_size=global_batch_size // num_ranks,
                num_workers=num_workers,
                collate_fn=seen,
                multiprocessing_context="fork" if num_workers else None,
            )
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> MixedJob:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def mixed(self) -> MixedDataset:
        """The mixture of rank 0."""
        (dataset,) = [self.loaders[0].dataset]
        assert isinstance(dataset, MixedDataset)
        return dataset

    def load(self, state: Mapping[str, Any], streams: Any = None) -> None:
        """Have all ranks go on where a state says."""
        for loader in self.loaders:
            loader.load_state_dict(state, streams=streams)

    def epoch(self) -> list[list[Seen]]:
        """Return the global batches of the next epoch, or of what is left of it."""
        return [[one for batch in batches for one in batch] for batches in zip(*self.loaders, strict=True)]

    def states(self, num_steps: int) -> list[tuple[list[Seen], dict[str, Any]]]:
        """Return some global batches of the next epoch, each with the state after it, which all ranks have."""
        found = []
        iterators = [iter(loader) for loader in self.loaders]
        for _ in range(num_steps):
            batch = [one for iterator in iterators for one in next(iterator)]
            states = [loader.state_dict() for loader in self.loaders]
            assert all(state == states[0] for state in states)
            found.append((batch, states[0]))
        return found
