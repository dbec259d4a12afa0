"""Rows in packs: a table whose tokens say whose they are, and the ranks of a job that take their packs in turn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream import Packs, StreamingDataLoader, StreamingDataset
from sqlstream.transforms import rng
from sqlstream.world import World

NUM_ROWS, CAPACITY, GLOBAL_BATCH = 60, 32, 4
LENGTHS = [int(length) for length in np.random.RandomState(7).randint(1, 20, NUM_ROWS)]
PACKS = Packs("n", CAPACITY)
Step = frozenset[tuple[Any, ...]]


def tokens_of(row: int, length: int) -> list[int]:
    """Tokens that say whose they are, and where."""
    return [row * 1000 + place for place in range(length)]


def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
    sample["input_ids"] = np.array(tokens_of(sample["row"], sample["n"]))  # [n]
    sample["drawn"] = int(rng(sample).integers(1 << 40))
    return sample


def seen(packs: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What a batch is: each pack with its rows, tokens and what was drawn for each row, and for it."""
    return [(pack["__epoch__"], *pack["__rows__"], *pack["drawn"], *pack["input_ids"].tolist()) for pack in packs]


def hashes_of(pack: dict[str, Any]) -> dict[str, Any]:
    """The hash of each file of a pack, which are there together, and the paths."""
    found = [hashlib.sha256(Path(part["image"]).read_bytes()).hexdigest() for part in pack["parts"]]
    return {"right": found == [part["sha256"] for part in pack["parts"]], "paths": [part["image"] for part in pack["parts"]]}


def rows_in(pack: tuple[Any, ...]) -> tuple[int, ...]:
    """The rows of a pack as `seen` has it: an epoch, rows, as many numbers that were drawn, tokens."""
    return pack[1 : 1 + (len(pack) - 1 - CAPACITY) // 2]


def write_table(path: Path) -> Path:
    """Write the rows: how long each is, and its number."""
    pq.write_table(pa.table({"n": LENGTHS, "row": list(range(NUM_ROWS))}), path)
    return path


def failing(*rows: int) -> Any:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["row"] in rows:
            raise ValueError(f"broken row {sample['row']}")
        return tokenize(sample)

    return fail


class Run:
    """All ranks of a job in this process, taking their batches in turn."""

    def __init__(self, table: Path, num_ranks: int = 1, num_workers: int = 0, **options: Any) -> None:
        worlds = [World(rank=r, world_size=num_ranks, local_rank=r, local_world_size=num_ranks) for r in range(num_ranks)]
        given: dict[str, Any] = {
            "shuffle_seed": 5,
            "show_progress": False,
            "batches": PACKS,
            "transforms": [tokenize],
        } | options
        self.datasets = [StreamingDataset(table, table.parent / "cache", world=world, **given) for world in worlds]
        self.loaders = [
            StreamingDataLoader(
                dataset,
                batch_size=GLOBAL_BATCH // num_ranks,
                num_workers=num_workers,
                collate_fn=seen,
                multiprocessing_context="fork" if num_workers else None,
            )
            for dataset in self.datasets
        ]
        self._running: list[Iterator[Any]] = [iter(()) for _ in self.loaders]

    def step(self) -> Step:
        """The packs of the next global batch, over the ends of epochs."""
        return frozenset(pack for rank in range(len(self.loaders)) for pack in self._next(rank))

    def _next(self, rank: int) -> list[Any]:
        batch = next(self._running[rank], None)
        if batch is None:
            self._running[rank] = iter(self.loaders[rank])
            batch = next(self._running[rank])
        return list(batch)

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states), "ranks disagree on where they are"
        state: dict[str, Any] = json.loads(json.dumps(states[0]))
        return state

    def load(self, state: dict[str, Any]) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state)
        self._running = [iter(()) for _ in self.loaders]

    def close(self) -> None:
        self._running = []
        for dataset in self.datasets:
            dataset.close()
