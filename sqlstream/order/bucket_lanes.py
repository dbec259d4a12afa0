"""Steps of several batches, each of a bucket of its own: a lane is one rank's batch, or one of a rank that has several.

    step k ─ lanes k L … k L + L - 1 of the run ─ lane q ─ epoch e with M(e) <= q < M(e + 1), its batch q - M(e) → `Bucketed`

M(e) counts the batches of all epochs before e. Batches at an epoch's end that fill no step of L lanes are the first lanes of
the next epoch. So each batch comes exactly once, and no lane is ever empty.
With other leftovers each epoch is a round: its last step takes batches of it twice (`'repeat'`), or is left out (`'drop'`).

L belongs to the order: the lanes of a step are the same on any number of ranks that divides L. On R ranks a rank takes L / R of
them, one after the other, lane a R + r in round a: a step then is as many batches of a loader, which a trainer accumulates.

Rejected: lanes of one step from as many buckets as there are (rows of a large bucket would have to wait), and lanes that are
dealt to ranks by what they cost: a budget of tokens makes them alike, and ranks would have to agree on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sqlstream.errors import ConfigError
from sqlstream.order.bucketed import Bucketed
from sqlstream.order.order import Draws, check_positions, one_each
from sqlstream.order.permute import Int64Array


class _LaneEpoch(NamedTuple):
    """The steps of one epoch."""

    num_carried: int
    """Batches of the epoch before, with which it begins."""
    num_steps: int
    num_batches: int
    """Batches of its own, of which the next epoch may take some."""


class _Sources(NamedTuple):
    """Batches that lanes are."""

    epoch: Int64Array
    """Epoch of each: [n]."""
    number: Int64Array
    """Number of the batch in that epoch: [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLanes:
    """An order of batches of one bucket each, several in a step; each lane has as many positions as the largest batch."""

    batches: Bucketed
    """The batches, one a lane."""
    num_lanes: int
    """Lanes of a step, L."""
    _epochs: dict[tuple[int, int], _LaneEpoch] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The epochs that were asked for last, by number and version of the weights."""

    def __post_init__(self) -> None:
        """Check that each epoch has a step.

        Raises:
            ConfigError: There is an epoch whose batches, with those carried, fill no lanes of a step.
        """
        if not self.batches.has_step_in_each_epoch(self.num_lanes):
            raise ConfigError(
                f"sync='lane' leaves epochs without a step: a step takes {self.num_lanes} batches, and epoch 0 has "
                f"{self.batches.num_batches(0)}: give a smaller global_batch_tokens, a smaller rank_multiple, fewer ranks at "
                "the first start, or sync='step'"
            )

    @property
    def fingerprint(self) -> str:
        """A text for the batches and the lanes."""
        return f"{self.num_lanes} lanes of {self.batches.fingerprint}"

    @property
    def text_of_sizes(self) -> str:
        """A text for the sizes of batches, which is part of a run's state."""
        return f"{self.num_lanes} lanes, {self.batches.text_of_sizes}"

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Samples of a lane of each bucket."""
        return self.batches.batch_sizes

    @property
    def step_size(self) -> int:
        """Positions of a step: the samples of so many of the largest lanes."""
        return self.num_lanes * self.batches.step_size

    @property
    def is_even(self) -> bool:
        """All lanes have one size."""
        return self.batches.is_even

    @property
    def has_equal_epochs(self) -> bool:
        """All epochs have as many steps: no lanes are carried into the next one."""
        return self.batches.has_equal_epochs

    def name_of(self, bucket: int) -> str:
        """Return what names a bucket."""
        return self.batches.name_of(bucket)

    def num_positions(self, epoch: int) -> int:
        """Return the positions of an epoch: whole steps."""
        return self._epoch(epoch).num_steps * self.step_size

    def num_samples(self, epoch: int) -> int:
        """Return the samples of an epoch."""
        own, all_batches = self._epoch(epoch), self.batches.num_samples(epoch)
        num_lanes = own.num_steps * self.num_lanes
        if self.batches.leftovers != "carry":
            first, last = sorted((own.num_batches, num_lanes))
            surplus = int(self.sizes_at(epoch, np.arange(first, last)).sum())
            return all_batches + (surplus if num_lanes == last else -surplus)
        behind = np.arange(num_lanes, own.num_carried + own.num_batches)  # [lanes of the next epoch]
        return (
            all_batches + int(self.sizes_at(epoch, np.arange(own.num_carried)).sum()) - int(self.sizes_at(epoch, behind).sum())
        )

    def sizes_at(self, epoch: int, lanes: Int64Array) -> Int64Array:
        """Return the samples of lanes, counted from the start of an epoch: [n]."""
        sources, sizes = self._sources(epoch, lanes), np.empty(len(lanes), dtype=np.int64)  # [n]
        for source, here in _by_epoch(sources.epoch):
            sizes[here] = self.batches.sizes_at(source, sources.number[here])
        return sizes

    def weight_at(self, epoch: int, position: int) -> float:
        """Return what the mean of a position's lane weighs in the mean of its step: its samples, by those of a mean lane."""
        step, lane = divmod(position // self.batches.step_size, self.num_lanes)
        sizes = self.sizes_at(epoch, step * self.num_lanes + np.arange(self.num_lanes))  # [L]
        return int(sizes[lane]) * self.num_lanes / int(sizes.sum())

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`, with the generators that their batches give them."""
        check_positions(positions, self.num_positions(epoch))
        lanes, within = np.divmod(positions, self.batches.step_size)  # [n], [n]
        sources, num = self._sources(epoch, lanes), len(positions)
        own = sources.number * self.batches.step_size + within  # [n]
        parts = list(_by_epoch(sources.epoch))
        if len(parts) == 1:
            return self.batches.rows_at(parts[0][0], own)
        epochs, places, rows = (np.empty(num, dtype=np.int64) for _ in range(3))  # [n] each
        for source, here in parts:
            draws = self.batches.rows_at(source, own[here])
            epochs[here], places[here], rows[here] = draws.epoch, draws.position, draws.row
        one = one_each(num)
        return Draws(starts=one.starts, stream=one.stream, epoch=epochs, position=places, row=rows)

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - the same for all
        """Return None: a row may come twice in an epoch, or not at all."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - the same for all
        """Return None: each round of each bucket has its own."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield other rows of the same bucket."""
        lane, within = divmod(position, self.batches.step_size)
        sources = self._sources(epoch, np.array([lane], dtype=np.int64))
        own = int(sources.number[0]) * self.batches.step_size + within
        yield from self.batches.replacements(int(sources.epoch[0]), own, draw)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:  # noqa: ARG002 - all is known
        """Return no chunks."""
        return {}

    def _sources(self, epoch: int, lanes: Int64Array) -> _Sources:
        """Return the batches of lanes, counted from the start of an epoch: [n]."""
        own = self._epoch(epoch)
        if self.batches.leftovers != "carry":
            return _Sources(np.full(len(lanes), epoch), lanes % max(1, own.num_batches))
        epochs, number, before = np.full(len(lanes), epoch), lanes - own.num_carried, epoch  # [n], [n]
        while before and (is_before := number < 0).any():
            before -= 1
            epochs[is_before] = before
            number = np.where(is_before, number + self.batches.num_batches(before), number)  # [n]
        return _Sources(epochs, number)

    def _epoch(self, epoch: int) -> _LaneEpoch:
        """Return the steps of an epoch, by the weights of now."""
        key = epoch, self.batches.version
        known = self._epochs.get(key)
        if known is None:
            num_batches = self.batches.num_batches(epoch)
            if self.batches.leftovers == "carry":
                num_carried = self.batches.batches_before(epoch) % self.num_lanes
                num_steps = (num_carried + num_batches) // self.num_lanes
            else:
                num_carried, is_filled = 0, self.batches.leftovers == "repeat"
                num_steps = (num_batches + (self.num_lanes - 1) * is_filled) // self.num_lanes
            known = _LaneEpoch(num_carried, num_steps, num_batches)
            for old in list(self._epochs)[:-3]:  # a step asks for two epochs; a forecast, and the next epoch, for others
                self._epochs.pop(old, None)
            self._epochs[key] = known
        return known


def _by_epoch(epochs: Int64Array) -> Iterator[tuple[int, NDArray[np.bool_] | slice]]:
    """Yield each epoch with where it is among `epochs`: mostly there is one."""
    if not len(epochs) or epochs[0] == epochs[-1] == epochs.min() == epochs.max():
        yield (int(epochs[0]) if len(epochs) else 0), slice(None)
        return
    for epoch in np.unique(epochs).tolist():
        yield epoch, epochs == epoch
