"""The positions of an epoch that one DataLoader worker of one rank takes, in their order: arithmetic only.

    positions   0 … G-1 | G … 2G-1 | 2G … | last step, m < G positions        G = batch size x world size
    step              0 |        1 |    2 | …
    rank r        its slice of every step                                     same size on every rank
    worker w      every W-th step, as a DataLoader asks its W workers in turn

**The last step.** When G does not divide the number of positions, m of them are left over. One process takes them as a short
batch, as torch's DataLoader does, so it sees each row exactly once. Several ranks take ceil(m / world size) each: what is
missing to that is filled by *repeating positions of the same step*. Rejected: filling from the epoch's start. The global
batch would then hold other rows on 8 ranks than on 1, with another mean gradient; as it is, the last global batch has the
same rows on every layout with the same G, also where the whole epoch is smaller than G or than the number of ranks.
`Tail.FILL` repeats up to a whole G (every batch full, also on one process), `Tail.DROP` leaves the m positions out.

**Canonical nodes.** Position p belongs to part p mod C of the dataset. With C > 1 the positions of a step are dealt to nodes
in turn (node n takes p = n mod number of nodes), so for any number of nodes that divides C a node only ever sees its own
parts. Repeats keep to the part where the last step has one to repeat (m >= C).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sqlstream.errors import ConfigError, StateError
from sqlstream.order.permute import Int64Array
from sqlstream.world import World


class Tail(StrEnum):
    """What becomes of the positions after the last whole global batch."""

    SHORT = "short"
    """A short last step, equal on all ranks."""
    FILL = "fill"
    """A whole last step: repeats fill it up."""
    DROP = "drop"
    """No last step."""


class UnevenSteps(NamedTuple):
    """How many samples the batches of an epoch have, where that is not the same for all."""

    sizes_at: Callable[[int, Int64Array], Int64Array]
    """From an epoch and its batches, [n], to their samples, [n]."""
    epoch: int
    """The epoch."""
    has_lanes: bool = False
    """A step has a batch for each rank, at places of its own; else all ranks take as much of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One worker's share of the rest of one epoch."""

    num_positions: int
    """Positions of the epoch."""
    batch_size: int | None
    """Samples of a rank's batch; None: unknown, then a step is one sample on each rank."""
    tail: Tail = Tail.SHORT
    """What becomes of an incomplete last step."""
    num_canonical_nodes: int = 1
    """Parts of the dataset that stay on their nodes."""
    world: World
    """The worker."""
    consumed: int = 0
    """Positions that the whole job has taken: a multiple of G, or the epoch's end and more."""
    first_worker: int = 0
    """The worker that takes the first step: 0, as a DataLoader that starts always asks worker 0 first."""
    uneven: UnevenSteps | None = None
    """The samples of each step where they differ: G and the batch size are then those of the largest, and a smaller step leaves
    the last places of each rank empty. They have numbers, so that where a step begins is known without the steps before it."""

    def __post_init__(self) -> None:
        """Check that the share is defined."""
        world, consumed = self.world, self.consumed
        if self.num_canonical_nodes > 1 and not world.is_even:
            raise ConfigError(
                f"num_canonical_nodes={self.num_canonical_nodes} needs as many ranks on each node, but "
                f"world_size={world.world_size}, num_nodes={world.num_nodes} and "
                f"local_world_size={world.local_world_size}: give World the nodes and the ranks of each, if it is given by "
                "hand, or use num_canonical_nodes=1"
            )
        if consumed < 0 or (consumed < self.num_positions and consumed % self.step_size):
            raise StateError(
                f"cannot go on after {consumed} samples: a step takes {self.step_size} (batch size {self.batch_size or 1} x "
                f"{world.world_size} ranks), which does not divide it; resume with the global batch size of the state"
            )
        if 0 < consumed < self.num_positions and self.batch_size is None and world.num_workers > 1:
            raise StateError(
                f"cannot go on after {consumed} samples on {world.num_workers} workers: without the batch size it is "
                f"unknown which worker delivered them; give the dataset batch_size=, or use StreamingDataLoader"
            )

    @property
    def step_size(self) -> int:
        """Positions of a whole global batch, G."""
        return (self.batch_size or 1) * self.world.world_size

    @property
    def num_whole_steps(self) -> int:
        """Steps of G positions in the epoch."""
        return self.num_positions // self.step_size

    @property
    def last_width(self) -> int:
        """Samples of each rank in the incomplete last step, 0 if there is none."""
        rest = self.num_positions % self.step_size
        if rest == 0 or self.tail is Tail.DROP:
            return 0
        return (self.batch_size or 1) if self.tail is Tail.FILL else -(-rest // self.world.world_size)

    @property
    def num_steps(self) -> int:
        """Steps of every rank in the whole epoch."""
        return self.num_whole_steps + (self.last_width > 0)

    @property
    def first_step(self) -> int:
        """The step after `consumed`."""
        return self.num_steps if self.consumed >= self.num_positions else self.consumed // self.step_size

    @property
    def next_worker(self) -> int:
        """The worker that a DataLoader asks after this epoch's last step, if its iteration goes on into the next epoch."""
        return (self.first_worker + max(0, self.num_steps - self.first_step)) % self.world.num_workers

    @property
    def num_samples(self) -> int:
        """Samples that this worker yields."""
        return self._num_whole * (self.batch_size or 1) + (self.last_width if self._takes_last else 0)

    def positions(self, start: int, stop: int) -> Int64Array:
        """Return the positions of this worker's samples `[start, stop)`, counted from 0 after `consumed`; O(stop - start).

        A place that an uneven step leaves empty has -1.
        """
        batch_size = self.batch_size or 1
        steps, within = np.divmod(self.numbers(start, stop), batch_size)
        if self.uneven is not None:
            widths = self._widths(steps)  # [n]
            places = self._places(within, batch_size if self.uneven.has_lanes else widths)  # [n]
            return np.where(within < widths, steps * self.step_size + places, -1)
        if stop <= self._num_whole * batch_size:
            return steps * self.step_size + self._places(within, batch_size)
        whole = int(np.searchsorted(steps, self.num_whole_steps))
        first = steps[:whole] * self.step_size + self._places(within[:whole], batch_size)
        last = self.num_whole_steps * self.step_size + self._folded(self._places(within[whole:], self.last_width))
        return np.concatenate((first, last))

    def numbers(self, start: int, stop: int) -> Int64Array:
        """Return the numbers of this worker's samples `[start, stop)` in its rank's order of the epoch, step by step.

        They are the same for any number of workers.
        """
        batch_size = self.batch_size or 1
        border = self._num_whole * batch_size
        index = np.arange(start, max(start, min(stop, self.num_samples)), dtype=np.int64)
        nth, within = np.divmod(index, batch_size)
        numbers = (self._own_first_step + nth * self.world.num_workers) * batch_size + within
        if stop > border:
            late = index >= border
            numbers[late] = self.num_whole_steps * batch_size + index[late] - border
        return numbers

    def num_before(self, step: int) -> int:
        """Return how many of this worker's samples belong to earlier steps than `step`."""
        nth = -(-(step - self._own_first_step) // self.world.num_workers)
        return min(max(0, nth) * (self.batch_size or 1), self.num_samples)

    def end_of_batch(self, place: int) -> int:
        """Return the end of the samples of the batch that a place of this worker is in: what its step leaves empty follows."""
        batch_size = self.batch_size or 1
        start = place - place % batch_size
        if self.uneven is None:
            return min(start + batch_size, self.num_samples)
        return start + int(self._widths(self.numbers(start, start + 1) // batch_size)[0])

    def next_place(self, taken: int) -> int:
        """Return the place after `taken` samples, behind what their step leaves empty."""
        batch_size = self.batch_size or 1
        if self.uneven is None or taken % batch_size == 0 or taken < self.end_of_batch(taken):
            return taken
        return taken - taken % batch_size + batch_size

    def is_on_node(self, positions: Int64Array) -> NDArray[np.bool_]:
        """Return which positions of the epoch a rank of this node takes: [n]; steps have one size."""
        assert self.uneven is None, "rows whose batches differ in size come at no known position"
        taken = self._are_places_on_node(positions % self.step_size, self.batch_size or 1)  # [n]
        is_late = positions >= (border := self.num_whole_steps * self.step_size)  # [n]
        if is_late.any():
            places = np.arange(self.last_width * self.world.world_size)  # [p]
            own = border + self._folded(places[self._are_places_on_node(places, self.last_width)])  # [q]
            taken[is_late] = np.isin(positions[is_late], own)
        return taken

    def worker_of(self, step: int) -> int:
        """Return the worker that takes `step`, which is not before `first_step`."""
        return (self.first_worker + step - self.first_step) % self.world.num_workers

    def blocks(self, block: int = 256) -> Iterator[Int64Array]:
        """Yield this worker's positions in order, lazily, in arrays of at most `block`.

        Args:
            block: Longest array; with 256 a call of numpy costs little beside the samples.
        """
        for start in range(0, self.num_samples, block):
            yield self.positions(start, start + block)

    @property
    def _own_first_step(self) -> int:
        """This worker's first step from now."""
        return self.first_step + (self.world.worker - self.first_worker) % self.world.num_workers

    @property
    def _num_whole(self) -> int:
        """Whole steps that this worker takes."""
        return max(0, -(-(self.num_whole_steps - self._own_first_step) // self.world.num_workers))

    @property
    def _takes_last(self) -> bool:
        """The incomplete last step is this worker's."""
        ahead = self.num_whole_steps - self._own_first_step
        return self.last_width > 0 and ahead >= 0 and ahead % self.world.num_workers == 0

    def _widths(self, steps: Int64Array) -> Int64Array:
        """Return this rank's samples of uneven steps: [n]."""
        assert self.uneven is not None, "the caller has asked"
        num_ranks = self.world.world_size
        if self.uneven.has_lanes:
            return self.uneven.sizes_at(self.uneven.epoch, steps * num_ranks + self.world.rank)
        return self.uneven.sizes_at(self.uneven.epoch, steps) // num_ranks

    def _places(self, within: Int64Array, width: int | Int64Array) -> Int64Array:
        """Return the places within a step of this rank's samples, each rank having `width` of them."""
        world = self.world
        if self.num_canonical_nodes == 1:
            return world.rank * width + within
        return world.node + (world.local_rank * width + within) * world.num_nodes

    def _are_places_on_node(self, places: Int64Array, width: int) -> NDArray[np.bool_]:
        """Return which places within a step are those of this node's ranks, each rank having `width` of them: [n]."""
        world, first = self.world, (self.world.rank - self.world.local_rank) * width
        own: NDArray[np.bool_] = (first <= places) & (places < first + world.local_world_size * width)  # [n]
        if self.num_canonical_nodes > 1:
            own = places % world.num_nodes == world.node  # [n]
        return own

    def _folded(self, places: Int64Array) -> Int64Array:
        """Return places of the last step with those beyond its end replaced by earlier ones of it."""
        rest = self.num_positions % self.step_size
        parts = self.num_canonical_nodes
        period = rest - rest % parts if rest >= parts else rest
        return np.where(places < rest, places, places % period)
