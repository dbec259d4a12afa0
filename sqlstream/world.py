"""Where in a training job this process stands; a value that says nothing about how it was found out."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from sqlstream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One place in the grid of nodes, ranks and DataLoader workers; the default is a single process."""

    rank: int = 0
    """This trainer process among all of the job, `[0, world_size)`."""
    world_size: int = 1
    """Trainer processes of the job."""
    local_rank: int = 0
    """This trainer process among those of its node, `[0, local_world_size)`."""
    local_world_size: int = 1
    """Trainer processes of this node."""
    node: int = 0
    """This machine among all of the job, `[0, num_nodes)`."""
    num_nodes: int = 1
    """Machines of the job."""
    worker: int = 0
    """This DataLoader worker among those of its rank, `[0, num_workers)`."""
    num_workers: int = 1
    """Processes that iterate for this rank; 1 also where the trainer process itself does (`num_workers=0` in torch)."""
    num_replicas: int = 1
    """Trainer processes that have this place, and so the same samples: those that differ in other dimensions of a mesh."""

    def __post_init__(self) -> None:
        """Check that each place lies within its count, and that no node or part of one is larger than the job."""
        for place, count in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node", "num_nodes"),
            ("worker", "num_workers"),
        ):
            for name in (place, count):  # numpy's go into no state
                object.__setattr__(self, name, _whole(name, getattr(self, name)))
            if not 0 <= getattr(self, place) < getattr(self, count):
                raise ConfigError(
                    f"{place}={getattr(self, place)} does not fit {count}={getattr(self, count)}: "
                    f"{count} is at least 1 and {place} counts from 0 to {count} - 1"
                )
        object.__setattr__(self, "num_replicas", _whole("num_replicas", self.num_replicas))
        if self.num_replicas < 1:
            raise ConfigError(f"num_replicas={self.num_replicas} is out of range: give 1 or more")
        for count in ("local_world_size", "num_nodes"):
            if getattr(self, count) > self.world_size:
                raise ConfigError(
                    f"{count}={getattr(self, count)} is more than world_size={self.world_size}: correct one of them"
                )

    @property
    def is_even(self) -> bool:
        """Every node has as many ranks as this one (as far as this node can tell)."""
        return self.local_world_size * self.num_nodes == self.world_size

    @property
    def num_processes(self) -> int:
        """Trainer processes of the job, those that share a place counted one by one."""
        return self.world_size * self.num_replicas

    def with_worker(self, worker: int, num_workers: int) -> World:
        """Return the place of one DataLoader worker of this rank, as `torch.utils.data.get_worker_info()` names it."""
        return replace(self, worker=worker, num_workers=num_workers)

    def replicated(self, replication: int) -> World:
        """Return the place of this rank where every `replication` consecutive ranks take the same samples, and so count as one.

        Raises:
            ConfigError: The ranks of the job, or those of the nodes, cannot be grouped so.
        """
        if replication == 1:
            return self
        if replication < 1 or self.world_size % replication:
            raise ConfigError(
                f"replication={replication} does not divide world_size={self.world_size}: "
                "give the number of consecutive ranks that take the same samples"
            )
        local, num_nodes = self.local_world_size, self.num_nodes
        node, local_rank = divmod(self.rank, local)  # as if ranks filled nodes: those of a group agree, wherever they run
        if self.is_even and local % replication == 0:
            groups, place = local // replication, local_rank // replication
        elif self.is_even and replication % local == 0:  # a group spans nodes
            groups, place = 1, 0
            node, num_nodes = node * local // replication, num_nodes * local // replication
        elif num_nodes == 1:
            node, groups, place = 0, self.world_size // replication, self.rank // replication
        else:
            raise ConfigError(
                f"replication={replication} does not fit nodes of {local} ranks (world_size={self.world_size}, "
                f"num_nodes={num_nodes}): groups must fill whole nodes, or nodes whole groups"
            )
        return replace(
            self,
            rank=self.rank // replication,
            world_size=self.world_size // replication,
            local_rank=place,
            local_world_size=groups,
            node=node,
            num_nodes=num_nodes,
        )


def _whole(name: str, value: object) -> int:
    """Return a whole number, which may be a text, as environment variables are."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number: int = int(value)  # type: ignore[call-overload]  # what it takes is what is asked
        if isinstance(value, str) or number == value:
            return number
    raise ConfigError(f"{name}={value!r} is no whole number: give the place of this process, or leave it out")
