"""How the positions of an order are dealt out: in steps of one size, to ranks and workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, StateError
from sqlstream.order.order import Order, UnevenEpochs
from sqlstream.order.partition import Partition, Tail, UnevenSteps
from sqlstream.order.permute import Int64Array
from sqlstream.world import World


class OwnBatches(Protocol):
    """The global batches that an order is made of."""

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of a batch of each bucket."""

    @property
    def step_size(self) -> int:
        """Positions of a step: samples of the largest batch."""

    @property
    def num_lanes(self) -> int | None:
        """Batches of a step, of which a rank takes whole ones; None: a step is one batch, and each rank takes a share of it."""

    @property
    def is_even(self) -> bool:
        """All batches have one size."""

    @property
    def has_equal_epochs(self) -> bool:
        """All epochs have as many steps, as long as no weights change."""

    def name_of(self, bucket: int) -> str:
        """Return what names a bucket."""

    def sizes_at(self, epoch: int, batches: Int64Array) -> Int64Array:
        """Return the samples of batches of an epoch, counted from its start: [n]."""

    def num_samples(self, epoch: int) -> int:
        """Return the samples of an epoch."""

    def weight_at(self, epoch: int, position: int) -> float:
        """Return what the mean of a position's batch weighs in the mean of its step."""


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
    batches: OwnBatches | None = None
    """The batches that the order is made of; None: steps of any size can be taken of it."""
    gives_several: bool = False
    """A position gives several samples, how many is not known: then a step is a position of each rank, whatever a batch is."""

    def __post_init__(self) -> None:
        """Check the batch size."""
        if self.batch_size is not None:
            check_at_least("batch_size", self.batch_size, 1)

    @property
    def global_batch_size(self) -> int | None:
        """Positions of a step of an order that is made of batches: samples of the largest one; None: it is not."""
        return None if self.batches is None else self.batches.step_size

    @property
    def has_equal_epochs(self) -> bool:
        """All epochs have as many steps, as long as no weights change."""
        if self.batches is not None:
            return self.batches.has_equal_epochs
        return not isinstance(self.order, UnevenEpochs) or self.order.has_equal_epochs

    def num_samples(self, epoch: int) -> int:
        """Return the samples of an epoch, as far as each position gives one."""
        return self.order.num_positions(epoch) if self.batches is None else self.batches.num_samples(epoch)

    def batch_size_on(self, world: World) -> int | None:
        """Return the samples of a rank's batch, where batches differ of the largest one; None: unknown.

        Raises:
            ConfigError: The order has batches that the ranks do not divide, or that `batch_size` does not give.
        """
        if self.gives_several:
            return 1
        if self.batches is None:
            return self.batch_size
        whole, num_ranks, what = self.batches.step_size, world.world_size, "global batches"
        if self.batches.num_lanes is None:
            self._check_ranks(self.batches, num_ranks)
            own = whole // num_ranks
        else:
            _check_lanes(self.batches.num_lanes, num_ranks)
            own, what = whole // self.batches.num_lanes, "lanes"
        if self.batch_size in (None, own):
            return own
        if not self.batches.is_even or self.batches.num_lanes is not None:
            raise ConfigError(
                f"batch_size={self.batch_size} contradicts batches=, whose {what} have "
                f"{min(self.batches.batch_sizes)} to {max(self.batches.batch_sizes)} samples by bucket: leave it out"
            )
        assert self.batch_size is not None, "checked above"
        raise ConfigError(
            f"batch_size={self.batch_size} on {num_ranks} ranks contradicts global_batch_size={whole} of batches=: give "
            f"batch_size={own}, leave it out, or begin a new run with global_batch_size={self.batch_size * num_ranks}"
        )

    def least_batch_on(self, world: World) -> int:
        """Return the samples of a rank's smallest batch: of such a process plans most steps ahead."""
        if self.batches is None:
            return self.batch_size or 1
        least = min(self.batches.batch_sizes)
        return least if self.batches.num_lanes is not None else max(1, least // world.world_size)

    def _check_ranks(self, batches: OwnBatches, num_ranks: int) -> None:
        """Raise ConfigError if the ranks do not divide a batch."""
        size = next((size for size in sorted(set(batches.batch_sizes)) if size % num_ranks), None)
        if size is None:
            return
        nearest = max(1, size // num_ranks) * num_ranks
        if batches.is_even:
            ranks = max(ranks for ranks in range(1, num_ranks) if size % ranks == 0)
            raise ConfigError(
                f"global_batch_size={size} of batches= is not divided by {num_ranks} ranks: use {ranks} ranks, or begin a new "
                f"run with global_batch_size={nearest}"
            )
        common = math.gcd(*batches.batch_sizes)
        ranks = max(ranks for ranks in range(1, num_ranks) if common % ranks == 0)
        raise ConfigError(
            f"the global batch of bucket {batches.name_of(batches.batch_sizes.index(size))} has {size} samples, which "
            f"{num_ranks} ranks do not divide: use {ranks} ranks, or begin a new run with {nearest} samples of it, or with "
            f"rank_multiple={num_ranks}"
        )

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
        num_positions, batch_size = self.order.num_positions(epoch), self.batch_size_on(world)
        uneven = None
        if self.batches is not None and batch_size is not None:
            if self.batches.num_lanes is not None and consumed < num_positions:
                _check_round(self.batches.num_lanes, consumed // batch_size, world.world_size)
            if not self.batches.is_even:
                uneven = UnevenSteps(self.batches.sizes_at, epoch, has_lanes=self.batches.num_lanes is not None)
        return Partition(
            num_positions=num_positions,
            batch_size=batch_size,
            tail=self.tail,
            num_canonical_nodes=self.num_canonical_nodes,
            world=world,
            consumed=consumed,
            first_worker=first_worker,
            uneven=uneven,
        )


def _check_lanes(num_lanes: int, num_ranks: int) -> None:
    """Raise ConfigError if the ranks do not divide the lanes of a step."""
    if num_lanes % num_ranks:
        ranks = max(ranks for ranks in range(1, num_ranks) if num_lanes % ranks == 0)
        raise ConfigError(
            f"a step of batches= with sync='lane' has {num_lanes} lanes, which {num_ranks} ranks do not divide: use {ranks} "
            f"ranks, or begin a new run with rank_multiple={num_ranks}"
        )


def _check_round(num_lanes: int, num_taken: int, num_ranks: int) -> None:
    """Raise StateError if lanes that were taken end within what these ranks take together.

    Args:
        num_lanes: Lanes of a step.
        num_taken: Lanes of the epoch that were taken.
        num_ranks: The ranks, each of which takes one.
    """
    within = num_taken % num_lanes
    if within % num_ranks:
        fitting = [ranks for ranks in range(1, num_lanes) if num_lanes % ranks == 0 and within % ranks == 0]
        raise StateError(
            f"cannot go on on {num_ranks} ranks within a step, after {within} of its {num_lanes} lanes: use "
            f"{' or '.join(map(str, fitting))} ranks, a state of a step's end, or strict=False, which repeats these lanes"
        )
