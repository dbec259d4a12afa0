"""Whole epochs: which rows come when to whom, and what their transforms draw.

Most of it is arithmetic (`plans`, `shares`, `weighted`, `replacements`); `datasets` are in this process, a few with workers.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.order import BlockLayout, Plan, Tail
from sqlstream.order.weights import WeightedRows
from sqlstream.transforms import rng
from sqlstream.transforms.presets import CacheTransform, IdentityTransform
from sqlstream.world import World

NUM_ROWS, GLOBAL_BATCH, NUM_EPOCHS = 50, 8, 2
SEEDS = (None, 0, 5, (1 << 63) + 1)
LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2), (4, 1))
"""(nodes, ranks of each)."""
WEIGHTS = "CASE WHEN score >= 0.5 THEN 3 ELSE 1 END"

DATASETS: dict[str, tuple[dict[str, Any], tuple[tuple[int, int], ...]]] = {
    "as written": ({"shuffle_seed": None}, LAYOUTS[:2]),
    "shuffled": ({}, LAYOUTS),
    "seed 0": ({"shuffle_seed": 0}, LAYOUTS[:1]),
    "largest seed": ({"shuffle_seed": (1 << 64) - 1}, LAYOUTS[:1]),
    "last step left out": ({"drop_last": True}, LAYOUTS[:2]),
    "2 canonical nodes": ({"num_canonical_nodes": 2}, LAYOUTS[2:4]),
    "4 canonical nodes": ({"num_canonical_nodes": 4}, ((2, 2), (4, 1))),
    "blocks": ({"shuffle_block_size": 4, "shuffle_window": 3}, LAYOUTS[:2]),
    "blocks and canonical nodes": ({"shuffle_block_size": 4, "shuffle_window": 3, "num_canonical_nodes": 2}, LAYOUTS[2:4]),
    "weights": ({"weights": WEIGHTS}, LAYOUTS[:2]),
    "weights of a list": ({"weights": [1.5, 0] * (NUM_ROWS // 2), "epoch_size": 20}, LAYOUTS[:1]),
    "weights and blocks": ({"weights": WEIGHTS, "shuffle_block_size": 4, "shuffle_window": 3}, LAYOUTS[:1]),
    "longer epochs": ({"epoch_size": 70}, LAYOUTS[:2]),
    "filtered": ({"where": "score > 0.3"}, LAYOUTS[:2]),
    "replicated": ({"replication": 2}, ((1, 2),)),
    "lazy": ({"lazy_index_chunk_size": 10}, LAYOUTS[:2]),
    "lazy and filtered": ({"lazy_index_chunk_size": 10, "where": "score > 0.3"}, LAYOUTS[:1]),
    "unaligned": ({"unaligned_worker_index": True}, LAYOUTS[:1]),
}
"""Options and the layouts that they are run on."""
WITH_WORKERS = {"shuffled": 3, "weights": 2, "blocks": 2, "unaligned": 2}


def digest_of(values: Iterable[object]) -> str:
    """Return 16 hex digits of a sequence of numbers, or of what has a stable text."""
    return hashlib.blake2b(repr(list(values)).encode(), digest_size=8).hexdigest()


def plans() -> Iterator[tuple[str, str]]:
    """Yield the rows of an epoch, for many orders."""
    for seed, blocks, parts, epoch in itertools.product(SEEDS, (None, (7, 3)), (1, 2, 4), (0, 1, 10**6)):
        layout = None if blocks is None else BlockLayout.of_size(blocks[0], num_rows=1003, window=blocks[1])
        plan = Plan(num_samples=1003, seed=seed, batch_size=2, num_canonical_nodes=parts, blocks=layout)
        rows = plan.rows(epoch, 0, 1003).tolist()
        assert sorted(rows) == list(range(1003))
        yield f"seed={seed} blocks={blocks} canonical={parts} epoch={epoch}", digest_of(rows)


def shares() -> Iterator[tuple[str, str]]:
    """Yield the positions that each worker of each rank takes, for many layouts."""
    for tail, (nodes, ranks), parts in itertools.product(Tail, LAYOUTS, (1, 2, 4)):
        if parts > 1 and (parts % nodes or nodes * ranks < parts):
            continue
        plan = Plan(num_samples=203, seed=None, batch_size=2, tail=tail, num_canonical_nodes=parts)
        for num_workers, num_steps in ((1, 0), (3, 0), (3, 5)):
            taken = [
                positions.tolist()
                for rank, worker in itertools.product(range(nodes * ranks), range(num_workers))
                for positions in plan.partition(
                    world_of(rank, nodes, ranks).with_worker(worker, num_workers), consumed=num_steps * 2 * nodes * ranks
                ).blocks()
            ]
            yield f"tail={tail} {nodes} x {ranks} canonical={parts} workers={num_workers} after={num_steps}", digest_of(taken)


def weighted() -> Iterator[tuple[str, str]]:
    """Yield the rows of slots under weights."""
    sums = np.cumsum(np.arange(100) % 7)
    for seed, num_positions, epoch in itertools.product(SEEDS, (50, 100, 333), (0, 1, 10**6)):
        for name, cumulative in (("sums", sums), ("equal", None)):
            rows = WeightedRows(num_rows=100, num_positions=num_positions, cumulative=cumulative)
            found = rows.rows_at(seed=seed, epoch=epoch, slots=np.arange(num_positions)).tolist()
            yield f"seed={seed} positions={num_positions} epoch={epoch} weights={name}", digest_of(found)


def replacements() -> Iterator[tuple[str, str]]:
    """Yield which rows stand in for one that fails."""
    for seed, parts, blocks in itertools.product(SEEDS, (1, 2), (None, (7, 3))):
        layout = None if blocks is None else BlockLayout.of_size(blocks[0], num_rows=100, window=blocks[1])
        plan = Plan(num_samples=100, seed=seed, batch_size=2, num_canonical_nodes=parts, blocks=layout)
        found = [list(plan.replacements(epoch, position)) for epoch in (0, 3) for position in (0, 17, 99)]
        yield f"seed={seed} canonical={parts} blocks={blocks}", digest_of(found)


def world_of(rank: int, nodes: int, ranks: int) -> World:
    """Return the place of a rank in a job of `nodes` x `ranks`."""
    return World(
        rank=rank,
        world_size=nodes * ranks,
        local_rank=rank % ranks,
        local_world_size=ranks,
        node=rank // ranks,
        num_nodes=nodes,
    )


def draw(sample: dict[str, Any]) -> dict[str, Any]:
    """Draw from the sample's own generator and from the three of the process."""
    sample["draws"] = [
        *sample.get("draws", ()),
        int(rng(sample).integers(1 << 30)),
        random.getrandbits(30),
        int(np.random.randint(1 << 30)),
        int(torch.randint(1 << 30, ())),
    ]
    return sample


def twice(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Make two samples of every fifth row, none of every seventh."""
    for piece in range(0 if sample["__row__"] % 7 == 6 else 2 if sample["__row__"] % 5 == 0 else 1):
        yield {**sample, "piece": piece}


def as_list(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Collate to what was given."""
    return samples


def make_table(directory: Path) -> Path:
    """Write the rows of all datasets, in row groups of ten."""
    path = directory / "rows.parquet"
    if not path.exists():
        table = pa.table({"index": [f"row-{i}" for i in range(NUM_ROWS)], "score": [i / NUM_ROWS for i in range(NUM_ROWS)]})
        pq.write_table(table, path, row_group_size=10)
    return path


def epochs(
    directory: Path, options: dict[str, Any], layout: tuple[int, int], num_workers: int = 0
) -> tuple[list[list[list[int]]], list[object]]:
    """Return the rows of each rank's batches over two epochs, and all that was drawn for them."""
    rows: list[list[list[int]]] = []
    draws: list[object] = []
    nodes, ranks = layout
    for rank in range(nodes * ranks):
        own: dict[str, Any] = {
            "shuffle_seed": 5,
            "transforms": [draw, draw],
            "show_progress": False,
            "cache_limit": None,
        } | options
        with StreamingDataset(make_table(directory), directory / "cache", world=world_of(rank, nodes, ranks), **own) as dataset:
            loader = StreamingDataLoader(
                dataset,
                batch_size=max(1, GLOBAL_BATCH // (nodes * ranks)),
                collate_fn=as_list,
                num_workers=num_workers,
                multiprocessing_context="fork" if num_workers else None,
            )
            batches = [batch for _ in range(NUM_EPOCHS) for batch in loader]
            rows.append([[sample["__row__"] for sample in batch] for batch in batches])
            draws += [[sample["draws"], sample.get("piece")] for batch in batches for sample in batch]
    return rows, draws


def described(found: tuple[list[list[list[int]]], list[object]]) -> dict[str, Any]:
    """Return digests, and the first batches for people."""
    rows, draws = found
    return {"rows": digest_of(rows), "draws": digest_of(draws), "num_samples": len(draws), "first": [own[:2] for own in rows]}


def datasets(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield epochs of datasets, those with workers at the end."""
    for name, (options, layouts) in DATASETS.items():
        for layout in layouts:
            yield f"{name}, {layout[0]} x {layout[1]}", described(epochs(directory, options, layout))
    several = {"transforms": [draw, twice, draw]}
    yield "several of a row, or none", described(epochs(directory, several, (1, 1)))
    stored = {"transforms": [CacheTransform("stored", [IdentityTransform("index")]), draw]}
    yield "after a stored sample", described(epochs(directory, stored, (1, 1)))
    unseeded = {"shuffle_seed": None, "transforms": [draw]}
    yield "without a seed", described(epochs(directory, unseeded, (1, 1)))
    for name, num_workers in WITH_WORKERS.items():
        yield f"{name}, {num_workers} workers", described(epochs(directory, DATASETS[name][0], (1, 1), num_workers))


def random_access(directory: Path) -> list[object]:
    """Return what `dataset[i]` draws, by row, in the first epoch and in a later one."""
    with StreamingDataset(
        make_table(directory), directory / "cache", shuffle_seed=5, transforms=[draw], show_progress=False, cache_limit=None
    ) as dataset:
        first = [dataset[row]["draws"] for row in (0, 1, 49, -1)]
        dataset.set_epoch(3)
        return [*first, *(sample["draws"] for sample in dataset.__getitems__([7, 7, 0]))]


def compute(directory: Path) -> dict[str, Any]:
    """Return all of it."""
    return {
        "plans": dict(plans()),
        "shares": dict(shares()),
        "weighted": dict(weighted()),
        "replacements": dict(replacements()),
        "datasets": dict(datasets(directory)),
        "random access": random_access(directory),
    }
