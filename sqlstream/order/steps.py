"""How the positions of an order are dealt out: in steps of one size, to ranks and workers."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.order import Order
from sqlstream.order.partition import Partition, Tail
from sqlstream.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """An order, and the steps in which a job takes its positions."""

    order: Order
    batch_size: int | None
    """Samples of a rank's batch; None: unknown (a plain DataLoader over a dataset without `batch_size=`)."""
    tail: Tail = Tail.SHORT
    """What becomes of an incomplete last step (`order/partition.py` has the reasons)."""
    num_canonical_nodes: int = 1
    """Parts of the dataset that stay on their nodes."""
    global_batch_size: int | None = None
    """Samples of a global batch of an order that is made of such batches; None: steps of any size can be taken of it."""

    def __post_init__(self) -> None:
        """Check the batch size."""
        if self.batch_size is not None:
            check_at_least("batch_size", self.batch_size, 1)

    def batch_size_on(self, world: World) -> int | None:
        """Return the samples of a rank's batch; None: unknown.

        Raises:
            ConfigError: The order has batches that the ranks do not divide, or that `batch_size` does not give.
        """
        whole, num_ranks = self.global_batch_size, world.world_size
        if whole is None:
            return self.batch_size
        if whole % num_ranks:
            nearest = max(1, whole // num_ranks) * num_ranks
            ranks = max(ranks for ranks in range(1, num_ranks) if whole % ranks == 0)
            raise ConfigError(
                f"global_batch_size={whole} of batches= is not divided by {num_ranks} ranks: use {ranks} ranks, or begin a new "
                f"run with global_batch_size={nearest}"
            )
        own = whole // num_ranks
        if self.batch_size not in (None, own):
            raise ConfigError(
                f"batch_size={self.batch_size} on {num_ranks} ranks contradicts global_batch_size={whole} of batches=: give "
                f"batch_size={own}, leave it out, or begin a new run with global_batch_size={self.batch_size * num_ranks}"
            )
        return own

    def partition(self, epoch: int, world: World, consumed: int = 0, first_worker: int = 0) -> Partition:
        """Return the share of `world`'s worker in what an epoch has left after `consumed` positions of the whole job.

        It is exact where the order is counted, else a bound.

        Args:
            epoch: The epoch.
            world: Rank and worker.
            consumed: A multiple of batch size x world size; at or beyond the epoch's end nothing is left.
            first_worker: The worker that is asked first: 0, unless one iteration of a DataLoader runs on over epochs
                (`Partition.next_worker`).

        Raises:
            StateError: `consumed` is in the middle of a step.
            ConfigError: The order has batches that these ranks do not give.
        """
        return Partition(
            num_positions=self.order.num_positions(epoch),
            batch_size=self.batch_size_on(world),
            tail=self.tail,
            num_canonical_nodes=self.num_canonical_nodes,
            world=world,
            consumed=consumed,
            first_worker=first_worker,
        )
