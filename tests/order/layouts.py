"""What a DataLoader on every rank of a layout would deliver, from a plan alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from sqlstream.order import Int64Array, Plan
from sqlstream.world import World


@dataclass(frozen=True)
class Layout:
    """Ranks, spread evenly over nodes, with as many workers each."""

    num_ranks: int
    num_workers: int
    num_nodes: int = 1

    def worlds(self, rank: int) -> list[World]:
        """The workers of one rank; none means that the trainer process iterates itself."""
        on_node = self.num_ranks // self.num_nodes
        world = World(
            rank=rank,
            world_size=self.num_ranks,
            local_rank=rank % on_node,
            local_world_size=on_node,
            node=rank // on_node,
            num_nodes=self.num_nodes,
        )
        return [world.with_worker(worker, max(1, self.num_workers)) for worker in range(max(1, self.num_workers))]


@functools.lru_cache(maxsize=1024)  # the positions are those of each epoch, and of each run that goes on at this sample
def rank_batches(plan: Plan, layout: Layout, rank: int, consumed: int = 0) -> tuple[Int64Array, ...]:
    """The positions of one rank's batches: workers are asked in turn, one that has ended is left out."""
    assert plan.batch_size is not None
    workers, batches = [], []
    for world in layout.worlds(rank):
        own = [np.empty(0, dtype=np.int64), *plan.partition(world, consumed).blocks(block=7)]
        positions = np.concatenate(own)
        assert len(positions) == plan.partition(world, consumed).num_samples
        workers.append(iter([positions[i : i + plan.batch_size] for i in range(0, len(positions), plan.batch_size)]))
    while workers:
        for worker in list(workers):
            batch = next(worker, None)
            if batch is None:
                workers.remove(worker)
            else:
                batches.append(batch)
    return tuple(batches)


def global_batches(plan: Plan, layout: Layout, epoch: int, consumed: int = 0) -> list[list[Int64Array]]:
    """The rows of every step after `consumed`, rank by rank; fails if ranks differ in steps or in samples a step."""
    ranks = [rank_batches(plan, layout, rank, consumed) for rank in range(layout.num_ranks)]
    assert len({tuple(len(batch) for batch in batches) for batches in ranks}) == 1, "ranks are out of step"
    return [[plan.order.rows_at(epoch, batch).row for batch in step] for step in zip(*ranks, strict=True)]


def row_sets(steps: list[list[Int64Array]]) -> list[set[int]]:
    """The set of rows of each global batch."""
    return [set(np.concatenate(step).tolist()) for step in steps]
