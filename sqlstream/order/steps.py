"""How the positions of an order are dealt out: in steps of one size, to ranks and workers."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.config import check_at_least
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

    def __post_init__(self) -> None:
        """Check the batch size."""
        if self.batch_size is not None:
            check_at_least("batch_size", self.batch_size, 1)

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
        """
        return Partition(
            num_positions=self.order.num_positions(epoch),
            batch_size=self.batch_size,
            tail=self.tail,
            num_canonical_nodes=self.num_canonical_nodes,
            world=world,
            consumed=consumed,
            first_worker=first_worker,
        )
