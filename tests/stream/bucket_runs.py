"""Runs of batches by bucket: all ranks of a job in one process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream import Buckets, Lengths, StreamingDataLoader, StreamingDataset
from sqlstream.transforms import rng
from sqlstream.world import World

NUM_ROWS, GLOBAL_BATCH = 43, 8
BUCKETS = Buckets("length", Lengths((10, 20, 30)), global_batch_size=GLOBAL_BATCH)
BUDGET = Buckets("length", Lengths((10, 20, 30)), global_batch_tokens=160, rank_multiple=4)
"""Batches of 16, 8 and 4 samples."""
NUM_LANES = 4
LANES = replace(BUDGET, sync="lane", rank_multiple=NUM_LANES)
"""4 lanes a step, of 4, 2 or 1 samples."""


def drawn(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "drawn": int(rng(sample).integers(1 << 40))}


def seen(samples: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(sample["__epoch__"], sample["__row__"], sample["__bucket__"], sample["drawn"]) for sample in samples]


def write_lengths(folder: Path) -> Path:
    """Rows of 23, 15 and 5 lengths in three buckets: the last one does not fill a batch in each epoch."""
    lengths = [10] * 23 + [20] * 15 + [30] * 5
    path = folder / "rows.parquet"
    rows = {"length": [lengths[row * 7 % NUM_ROWS] for row in range(NUM_ROWS)], "row": list(range(NUM_ROWS))}
    pq.write_table(pa.table(rows), path)
    return path


class Run:
    """All ranks of a job in this process, taking their batches in turn."""

    def __init__(self, table: Path, num_ranks: int, num_workers: int = 0, **options: Any) -> None:
        worlds = [World(rank=r, world_size=num_ranks, local_rank=r, local_world_size=num_ranks) for r in range(num_ranks)]
        given: dict[str, Any] = {"shuffle_seed": 5, "show_progress": False, "batches": BUCKETS, "transforms": [drawn]}
        given |= {"prefetch": 4} | options
        self._num_rounds = NUM_LANES // num_ranks if given["batches"] == LANES else 1
        self.datasets = [StreamingDataset(table, table.parent / "cache", world=world, **given) for world in worlds]
        context = "fork" if num_workers else None
        self.loaders = [
            StreamingDataLoader(dataset, num_workers=num_workers, collate_fn=seen, multiprocessing_context=context)
            for dataset in self.datasets
        ]
        self._running: list[Iterator[Any]] = [iter(()) for _ in self.loaders]

    def step(self) -> frozenset[tuple[Any, ...]]:
        """The samples of the next global batch, over the ends of epochs."""
        return frozenset(sample for batch in self.lanes() for sample in batch)

    def lanes(self) -> list[list[Any]]:
        """The batches of all ranks in the next step; with lanes a rank has several where there are fewer ranks."""
        return [self._next(rank) for _ in range(self._num_rounds) for rank in range(len(self.loaders))]

    def _next(self, rank: int) -> list[Any]:
        batch = next(self._running[rank], None)
        if batch is None:
            self._running[rank] = iter(self.loaders[rank])
            batch = next(self._running[rank])
        return list(batch)

    def load(self, state: dict[str, Any]) -> None:
        """Go on where a state says."""
        for loader in self.loaders:
            loader.load_state_dict(state)
        self._running = [iter(()) for _ in self.loaders]

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states), "ranks disagree on where they are"
        state: dict[str, Any] = json.loads(json.dumps(states[0]))
        return state

    def close(self) -> None:
        self._running = []
        for dataset in self.datasets:
            dataset.close()


@contextlib.contextmanager
def some_runs(table: Path) -> Iterator[Any]:
    """What makes runs, which are closed at the end."""
    made: list[Run] = []

    def make(num_ranks: int = 1, num_workers: int = 0, **options: Any) -> Run:
        made.append(Run(table, num_ranks, num_workers, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()
