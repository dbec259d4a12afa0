"""Which batch each step of an epoch is: its bucket, and its number among the batches of that bucket.

    step p of epoch e ─ permutation of the epoch's batches → bucket b, its batch m

Bucket b of n_b rows has m_b(e) = floor((e n_b + phase_b) / G_b) batches before epoch e: as many as its rows fill, the rest is
carried into the next epoch (`order/bucketed.py` has the whole picture). With other leftovers each epoch is a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sqlstream.errors import ConfigError
from sqlstream.order.bucket_rates import BucketWeights, Era, WeightsSince, eras_of
from sqlstream.order.order import StreamPlaces, check_positions
from sqlstream.order.permute import Int64Array, Permutation

_BATCHES = 203
"""What the permutation is for is the first part of its key; `order/bucketed.py` has 204 and 205."""
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: its multiples are spread evenly, however many there are."""
_BLOCK = 256
"""Steps that are looked up together, with as many behind them: a call of numpy takes as long for one. Arbitrary."""
_LOOKED_AT = 1 << 14
"""Epochs that are looked at for one without a batch, where the sizes of batches come round later. Arbitrary."""


class BucketEpoch(NamedTuple):
    """The batches of one epoch, sorted by bucket."""

    stops: Int64Array
    """Batches of this epoch up to and with each bucket: [B]."""
    shifts: Int64Array
    """What turns the number of a batch in the epoch into that of its bucket in the run: [B]."""
    num_steps: int
    """Batches of the epoch."""
    shuffle: Permutation | None
    """From steps to batches; None: as they are."""
    era: Era
    """How often its buckets come."""
    images: dict[int, Int64Array]
    """Batches of the steps of the block that was asked for last, [_BLOCK], by its number: neighbours ask for the same."""


class StepBatches(NamedTuple):
    """Steps that positions belong to, one after the other."""

    bucket: Int64Array
    """Bucket of each: [m]."""
    number: Int64Array
    """Batches of that bucket in the run before it: [m]."""
    which: Int64Array
    """Step of each position: [n]."""
    within: Int64Array
    """Place of each position in its step: [n]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BucketSteps:
    """The batches of all epochs."""

    sizes: Int64Array
    """Rows of each bucket: [B]."""
    batches: Int64Array
    """Samples of a batch of each bucket: [B]."""
    step_size: int
    """Positions of a step: samples of the largest batch."""
    seed: int | None
    """None: an epoch has its batches bucket by bucket."""
    leftovers: str
    """What becomes of rows that fill no batch: `'carry'`, `'repeat'` or `'drop'`."""
    epoch_size: int | None
    """Draws in an epoch, but for leftovers; None: as many as rows."""
    weights: BucketWeights | None
    """How often rows come; None: equally."""
    _phases: Int64Array = field(init=False, repr=False)
    """Draws that each bucket has ahead at the start, below its batch: [B]."""
    _epochs: dict[tuple[int, int], BucketEpoch] = field(default_factory=dict, init=False, repr=False)
    """The batches of the last two epochs that were asked for, by epoch and version of the weights."""
    _eras: dict[int, list[Era]] = field(default_factory=dict, init=False, repr=False)
    """The eras of the run, by the version of the weights."""

    def __post_init__(self) -> None:
        """Spread the phases."""
        spread = [(number + 1) * _GOLDEN % (1 << 64) >> 32 for number in range(len(self.sizes))]
        phases = [batch * turn >> 32 for batch, turn in zip(self.batches.tolist(), spread, strict=True)]
        object.__setattr__(self, "_phases", np.array(phases, dtype=np.int64))

    def epoch(self, epoch: int) -> BucketEpoch:
        """Return the batches of an epoch, by the weights of now."""
        version = self._version
        batches = self._epochs.get((epoch, version))
        if batches is None:
            era = [era for era in self._eras_of(version) if era.first_epoch <= epoch][-1]
            before = self._batches_before(era, epoch)  # [B]
            following = self._batches_before(era, epoch + 1)  # [B]
            stops = np.cumsum(following - before)  # [B]
            if self.leftovers != "carry":  # batches are those of the epoch, whose rows begin anew
                following = following - before  # [B]
            num_steps = int(stops[-1]) if len(stops) else 0
            is_shuffled = self.seed is not None and num_steps > 0
            shuffle = Permutation.keyed(num_steps, _BATCHES, self.seed or 0, epoch) if is_shuffled else None
            batches = BucketEpoch(stops, following - stops, num_steps, shuffle, era, {})
            for old in list(self._epochs)[:-1]:
                self._epochs.pop(old, None)
            self._epochs[epoch, version] = batches
        return batches

    def at(self, epoch: int, positions: Int64Array) -> StepBatches:
        """Return the steps of positions of an epoch: neighbours that share one are looked up together."""
        batches = self.epoch(epoch)
        check_positions(positions, batches.num_steps * self.step_size)
        step, within = np.divmod(positions, self.step_size)  # [n], [n]
        if len(step) > 1:
            is_first = np.empty(len(step), dtype=np.bool_)  # [n]
            is_first[0] = True
            np.not_equal(step[1:], step[:-1], out=is_first[1:])
            step = step[is_first]  # [m]
            which = np.cumsum(is_first) - 1  # [n]
        else:
            which = np.zeros(len(step), dtype=np.int64)  # [n]
        image = self._images_of(batches, step)  # [m]
        bucket = np.searchsorted(batches.stops, image, side="right")  # [m]
        return StepBatches(bucket, batches.shifts[bucket] + image, which, within)

    def places_of_draws(self, draws: Int64Array) -> StreamPlaces:
        """Return where draws are, counted over all epochs: [n]; a mixture draws from a stream without end.

        All batches have one size, and the weights never change: a mixture sees to that.
        """
        step, place = np.divmod(draws, self.step_size)  # [n], [n]
        if not len(step):
            return StreamPlaces(step, place)
        era = self._eras_of(self._version)[0]
        bounds, last = [self._steps_before(era, first := self._epoch_of_step(era, int(step.min())))], int(step.max())
        while bounds[-1] <= last:
            bounds.append(self._steps_before(era, first + len(bounds)))
        within = np.searchsorted(np.array(bounds), step, side="right") - 1  # [n]
        return StreamPlaces(first + within, (step - np.array(bounds)[within]) * self.step_size + place)

    def check_none_is_dropped(self, names: Sequence[object]) -> None:
        """Raise ConfigError if rows of some buckets would never come.

        Args:
            names: What names each bucket.
        """
        if self.leftovers == "drop":
            era = self._eras_of(self._version)[0]
            lost = np.flatnonzero((era.rates < self.batches << era.shift) & (era.rates > 0)).tolist()
            _check_none_is_dropped([repr(names[bucket]) for bucket in lost], len(self.batches))

    def has_step_in_each_epoch(self, num_lanes: int = 1) -> bool:
        """Return whether each epoch has a step; after the least common multiple of the batch sizes they repeat.

        Args:
            num_lanes: Batches that a step takes.
        """
        era = self._eras_of(self._version)[0]
        if self.leftovers == "repeat":
            return bool(era.rates.any())
        if int((era.rates // (self.batches << era.shift)).sum()) >= num_lanes:
            return True
        if self.leftovers == "drop":
            return False
        num_epochs = min((math.lcm(*self.batches.tolist()) << era.shift) * num_lanes, _LOOKED_AT)
        epochs = np.arange(num_epochs + 1)  # [E + 1]
        before = np.zeros(num_epochs + 1, dtype=np.int64)  # [E + 1]
        for rate, phase, batch in zip(era.rates.tolist(), self._phases.tolist(), self.batches.tolist(), strict=True):
            before += (epochs * rate + (phase << era.shift)) // (batch << era.shift)
        return bool((np.diff(before // num_lanes) > 0).all())

    def batches_before(self, epoch: int) -> int:
        """Return the batches of all epochs of the run before one, whatever weights held."""
        eras = [era for era in self._eras_of(self._version) if era.first_epoch <= epoch]
        stops = [*(era.first_epoch for era in eras[1:]), epoch]
        return sum(self._steps_before(era, stop) for era, stop in zip(eras, stops, strict=True))

    @property
    def _version(self) -> int:
        """Version of the weights of now."""
        return 0 if self.weights is None else self.weights.version

    def _steps_before(self, era: Era, epoch: int) -> int:
        """Return the steps of all epochs before one."""
        return int(self._batches_before(era, epoch).sum())  # no bucket has a whole batch ahead

    def _batches_before(self, era: Era, epoch: int) -> Int64Array:
        """Return the batches of each bucket in the epochs of an era before one: [B]."""
        if self.leftovers == "carry":
            return era.batches_before(epoch, self._phases, self.batches)
        whole = self.batches << era.shift  # [B]
        each = era.rates // whole if self.leftovers == "drop" else -(-era.rates // whole)  # [B]
        before: Int64Array = (epoch - era.first_epoch) * each  # [B]
        return before

    def _epoch_of_step(self, era: Era, step: int) -> int:
        """Return the epoch of a step of the run, found by halves: a lookup takes as long as the run has doublings."""
        low, high = 0, 1
        while self._steps_before(era, high) <= step:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._steps_before(era, middle) <= step else (low, middle)
        return low

    def _eras_of(self, version: int) -> list[Era]:
        """Return the eras of the run, by a version of the weights."""
        eras = self._eras.get(version)
        if eras is None:
            changes = [WeightsSince(0, None)] if self.weights is None else self.weights.since()
            eras = eras_of(self.sizes, self._phases, self.batches, self.epoch_size, changes)
            self._eras.clear()
            self._eras[version] = eras
        return eras

    def _images_of(self, batches: BucketEpoch, step: Int64Array) -> Int64Array:
        """Return the batches of steps of an epoch: [m]."""
        if batches.shuffle is None or not len(step):
            return step
        if len(step) == 1:
            return np.array([batches.shuffle.image(int(step[0]))], dtype=np.int64)
        block, first = int(step[0]) // _BLOCK, int(step[0]) // _BLOCK * _BLOCK
        if int(step.min()) < first or int(step.max()) >= first + 2 * _BLOCK:
            return batches.shuffle.forward(step)
        images = batches.images.get(block)
        if images is None:
            known = np.arange(first, min(first + 2 * _BLOCK, batches.num_steps))  # [k]
            images = batches.shuffle.forward(known)  # [k]
            batches.images.clear()
            batches.images[block] = images
        found: Int64Array = images[step - first]  # [m]
        return found


def _check_none_is_dropped(lost: Sequence[str], num_buckets: int) -> None:
    """Raise ConfigError if no row of some buckets would ever come.

    Args:
        lost: Names of the buckets that do not fill a batch in an epoch.
        num_buckets: All buckets.
    """
    if lost:
        shown = ", ".join(lost[:8]) + (", …" if len(lost) > 8 else "")
        raise ConfigError(
            f"leftovers='drop' leaves all rows of {len(lost)} of {num_buckets} buckets out, which fill no batch: {shown}. "
            "Give leftovers='carry', smaller batches, or fewer buckets"
        )
