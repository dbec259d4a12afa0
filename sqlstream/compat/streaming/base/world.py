"""What users import from `streaming.base.world`: the place of this process among nodes, ranks and workers."""

from __future__ import annotations

from typing import Any

from torch.utils.data import get_worker_info

from sqlstream.distributed import read_world
from sqlstream.errors import ConfigError

__all__ = ["World"]


class World:
    """The place of this process; numbers of workers count those of all ranks, but for `…_of_rank` and `…_per_rank`.

    Args:
        num_nodes: Nodes.
        ranks_per_node: Ranks on each of them.
        workers_per_rank: DataLoader workers of each rank; 1 also where the rank itself makes the samples.
        worker: Number of this one among all workers.
    """

    def __init__(self, num_nodes: int, ranks_per_node: int, workers_per_rank: int, worker: int) -> None:
        self.num_nodes, self.ranks_per_node, self.workers_per_rank = num_nodes, ranks_per_node, workers_per_rank
        self.workers_per_node = ranks_per_node * workers_per_rank
        self.num_ranks, self.num_workers = num_nodes * ranks_per_node, num_nodes * self.workers_per_node
        self.worker = worker
        self.node, self.worker_of_node = divmod(worker, self.workers_per_node)
        self.rank, self.worker_of_rank = divmod(worker, workers_per_rank)
        self.rank_of_node = self.rank % ranks_per_node
        self.is_multinode = num_nodes > 1
        self.is_leader, self.is_local_leader = worker == 0, self.worker_of_node == 0

    @classmethod
    def detect(cls) -> World:
        """Return the place of this process: that of torch.distributed, or of the launcher's variables."""
        world = read_world()
        num_nodes = world.world_size // world.local_world_size
        return cls(num_nodes, world.local_world_size, 1, world.rank).detect_workers()

    def detect_workers(self) -> World:
        """Return a copy with the DataLoader worker that this process is."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return World(self.num_nodes, self.ranks_per_node, num_workers, self.rank * num_workers + worker)

    def copy(self) -> World:
        """Return a copy."""
        return World(self.num_nodes, self.ranks_per_node, self.workers_per_rank, self.worker)

    def replicate(self, replication: int) -> World:
        """Return a copy in which every `replication` consecutive ranks count as one.

        Raises:
            ConfigError: It does not divide the ranks.
        """
        if replication < 1 or self.num_ranks % replication:
            raise ConfigError(f"replication={replication} does not divide {self.num_ranks} ranks: give a number that does")
        num_ranks = self.num_ranks // replication
        num_nodes = num_ranks // self.ranks_per_node if num_ranks % self.ranks_per_node == 0 else 1
        worker = self.rank // replication * self.workers_per_rank + self.worker_of_rank
        return World(num_nodes, num_ranks // num_nodes, self.workers_per_rank, worker)

    def to_json(self) -> dict[str, Any]:
        """Return all numbers by name."""
        return dict(self.__dict__)
