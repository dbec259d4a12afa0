"""Datasets without objects, for tests of order: rows of a local table, ranks of a job in one process, loaders over them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.world import World


def make_table(folder: Path, num: int) -> Path:
    path = folder / f"rows-{num}.parquet"
    if path.exists():
        return path  # a file written again is another source
    pq.write_table(pa.table({"index": [f"row-{i}" for i in range(num)], "score": [i / num for i in range(num)]}), path)
    return path


def rows_of(samples: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """A collate function: (epoch, row) of each sample."""
    return [(sample["__epoch__"], sample["__row__"]) for sample in samples]


Rows = frozenset[Any]
"""The samples of a global batch, in any order."""


@dataclass
class Job:
    """All ranks of a job, in this process, taking their batches in turn."""

    src: Path
    cache: Path
    num_ranks: int
    num_workers: int
    global_batch_size: int
    dataset_options: Mapping[str, Any] = field(default_factory=dict)
    loader_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = {"shuffle_seed": 5, "show_progress": False} | dict(self.dataset_options)
        loader_options = {"collate_fn": rows_of} | dict(self.loader_options)
        self.loaders = [
            StreamingDataLoader(
                StreamingDataset(self.src, self.cache, world=self.world(rank), **options),
                batch_size=self.global_batch_size // self.num_ranks,
                num_workers=self.num_workers,
                multiprocessing_context="fork" if self.num_workers else None,
                **loader_options,
            )
            for rank in range(self.num_ranks)
        ]
        self._running: list[Iterator[Any]] = [iter(()) for _ in self.loaders]

    def world(self, rank: int) -> World:
        return World(rank=rank, world_size=self.num_ranks, local_rank=rank, local_world_size=self.num_ranks)

    def load(self, state: Mapping[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)
        self._running = [iter(()) for _ in self.loaders]

    def steps(self, num_steps: int) -> Iterator[Rows]:
        """The samples of each of the next global batches, over the ends of epochs."""
        for _ in range(num_steps):
            batches = [batch for rank in range(self.num_ranks) for batch in self._next(rank)]
            yield frozenset(batches)

    def _next(self, rank: int) -> list[Any]:
        for batch in self._running[rank]:
            return list(batch)
        self._running[rank] = iter(self.loaders[rank])
        return list(next(self._running[rank]))

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states), "ranks disagree on where they are"
        return states[0]

    def close(self) -> None:
        self._running = []
        for loader in self.loaders:
            loader.dataset.close()


def others(layouts: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Each layout with the next one."""
    return itertools.pairwise([*layouts, layouts[0]])
