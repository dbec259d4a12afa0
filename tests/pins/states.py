"""States of every feature, as a run wrote them, and the batches that came next."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.world import World
from tests.pins.orders import WEIGHTS, as_list, draw, twice, world_of
from tests.pins.served import CSV, NUM_ROWS, PARQUET, served

NUM_NEXT = 3


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run up to the batch after which its state was saved."""

    num_batches: int
    src: str = CSV
    options: Mapping[str, Any] = field(default_factory=dict)
    world: World = field(default_factory=World)
    num_workers: int = 0
    reweighting: tuple[str | None, int | None] | None = None
    """Weights, and the step from which they hold, given after the first batch."""
    batch_size: int = 4
    sds: bool = False
    """Only the two keys that states of sds have are loaded."""

    @contextlib.contextmanager
    def opened(self, directory: Path) -> Iterator[StreamingDataLoader]:
        """Open the dataset and its loader."""
        own: dict[str, Any] = {
            "shuffle_seed": 5,
            "transforms": [draw],
            "show_progress": False,
            "cache_limit": None,
            "prefetch": 4,
        }
        with StreamingDataset(self.src, directory / "cache", world=self.world, **(own | dict(self.options))) as dataset:
            yield StreamingDataLoader(
                dataset,
                batch_size=self.batch_size,
                collate_fn=as_list,
                num_workers=self.num_workers,
                multiprocessing_context="fork" if self.num_workers else None,
            )

    def batches(self, loader: StreamingDataLoader) -> Iterator[list[object]]:
        """Yield what comes next, over the ends of epochs."""
        while True:
            for batch in loader:
                yield [[sample["__epoch__"], sample["__row__"], *sample["draws"]] for sample in batch]


LONG = {"epoch_size": 200}
"""Within a process's plan nothing can change any more, and that is some twenty batches."""
RUNS = {
    "plain": Run(num_batches=5),
    "at the start": Run(num_batches=0),
    "at the end of an epoch": Run(num_batches=13),
    "in the second epoch": Run(num_batches=20),
    "with workers": Run(num_batches=6, num_workers=2),
    "as written": Run(num_batches=5, options={"shuffle_seed": None}),
    "filtered": Run(num_batches=5, options={"where": "score > 0.3"}),
    "queried": Run(num_batches=5, options={"sql_query": "SELECT * FROM dataframe WHERE score < 0.7 ORDER BY score DESC"}),
    "last step left out": Run(num_batches=11, options={"drop_last": True}),
    "second of two ranks": Run(num_batches=3, world=world_of(1, 1, 2)),
    "canonical nodes": Run(num_batches=3, world=world_of(1, 2, 1), options={"num_canonical_nodes": 2}),
    "blocks": Run(num_batches=5, options={"shuffle_block_size": 4, "shuffle_window": 3}),
    "weights": Run(num_batches=5, options={"weights": WEIGHTS}),
    "weights of a list": Run(num_batches=5, options={"weights": [1.5, 0] * (NUM_ROWS // 2), "epoch_size": 36}),
    "longer epochs": Run(num_batches=5, options={"epoch_size": 70}),
    "other weights from the next epoch on": Run(num_batches=12, reweighting=(WEIGHTS, None)),
    "other weights from a step on": Run(num_batches=29, options=LONG, reweighting=(WEIGHTS, 30)),
    "no weights from a step on": Run(num_batches=9, options={"weights": WEIGHTS, **LONG}, reweighting=(None, 30)),
    "after a step with other weights": Run(num_batches=33, options=LONG, reweighting=(WEIGHTS, 30)),
    "delivered beyond": Run(num_batches=5, options={"transforms": [twice, draw]}),
    "delivered beyond by workers": Run(num_batches=7, options={"transforms": [twice, draw]}, num_workers=2),
    "endless": Run(num_batches=15, options={"infinite_iteration": True}),
    "lazy": Run(num_batches=5, src=PARQUET, options={"lazy_index_chunk_size": 10}),
    "lazy and filtered": Run(num_batches=5, src=PARQUET, options={"lazy_index_chunk_size": 10, "where": "score > 0.3"}),
    "lazy, filtered, in the second epoch": Run(
        num_batches=11, src=PARQUET, options={"lazy_index_chunk_size": 10, "where": "score > 0.3"}
    ),
    "keys of sds": Run(num_batches=5, sds=True),
}


def saved(run: Run, directory: Path) -> dict[str, Any]:
    """Return the state of a run, and what came after it."""
    with run.opened(directory) as loader:
        batches = run.batches(loader)
        for number in range(run.num_batches):
            next(batches)
            if number == 0 and run.reweighting is not None:
                loader.dataset.reweight(run.reweighting[0], at_step=run.reweighting[1])
        state = json.loads(json.dumps(loader.state_dict()))
        if run.sds:
            state = {name: state[name] for name in ("epoch", "sample_in_epoch")}
        return {"state": state, "next": [next(batches) for _ in range(NUM_NEXT)]}


def resumed(run: Run, directory: Path, state: Mapping[str, Any]) -> list[list[object]]:
    """Return the batches that come after a state."""
    with run.opened(directory) as loader:
        loader.load_state_dict(state)
        batches = run.batches(loader)
        return [next(batches) for _ in range(NUM_NEXT)]


def compute(directory: Path) -> dict[str, Any]:
    """Return all states."""
    with served():
        return {"states": {name: saved(run, directory) for name, run in RUNS.items()}}
