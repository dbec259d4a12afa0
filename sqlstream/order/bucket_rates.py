"""How often the buckets of an order come, and the row of each slot of a round: by the rows of a bucket, or by weights.

    era      epochs in which the same weights hold: a bucket has rate_b draws in each of them, in fractions of 2**shift
    round    slots_b draws of a bucket: its rows, or, with weights, rows as often as they weigh, by `WeightedRows`

A change of weights begins an era: buckets begin new rounds, which are numbered behind all rounds before, so that no two draws
of a run have the generators of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from sqlstream.config import INT64_MAX
from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array
from sqlstream.order.weights import WeightedRows

_RATE_BITS = 40
"""Rates are integers below 2 to this: so 2**22 epochs of them stay within int64."""


class BucketSums(Protocol):
    """Sums of the weights of the rows of all buckets, in the order of their table."""

    def total(self, start: int, stop: int) -> int:
        """Return the weight of the rows `[start, stop)` of the table."""

    def places(self, start: int, points: Int64Array) -> Int64Array:
        """Return the places of the rows, counted from `start`, at points of a line that begins there: [n]."""


class WeightsSince(NamedTuple):
    """Weights that hold from an epoch on."""

    epoch: int
    sums: BucketSums | None
    """None: all rows weigh the same."""


class BucketWeights(Protocol):
    """The weights of a run by bucket. They may change while it goes on, for epochs that were not asked for before."""

    @property
    def version(self) -> int:
        """Grows with every change."""

    @property
    def fingerprint(self) -> str:
        """A text for all changes of the run."""

    def since(self) -> Sequence[WeightsSince]:
        """Return all weights of the run, in the order of their epochs; the first ones hold from epoch 0 on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Era:
    """Epochs in which the same weights hold."""

    first_epoch: int
    """First epoch."""
    first_round: int
    """Number of the first round of each bucket."""
    rates: Int64Array
    """Draws of each bucket in an epoch, times 2**shift: [B]."""
    shift: int
    """Bits of fractions."""
    slots: Int64Array
    """Draws of each bucket in a round: [B]."""
    starts: Int64Array
    """Slots of the buckets before each: [B]."""
    sums: BucketSums | None
    """Weights of the rows; None: a slot is a row."""

    def batches_before(self, epoch: int, phases: Int64Array, batches: Int64Array) -> Int64Array:
        """Return the batches of each bucket in the epochs of this era before `epoch`: [B].

        Args:
            epoch: The epoch.
            phases: Draws that each bucket has ahead: [B].
            batches: Samples of a batch of each: [B].

        Raises:
            ConfigError: The draws of a bucket before that epoch are more than 64 bits count.
        """
        num_epochs = INT64_MAX // int(self.rates.max(initial=1)) - 1
        if epoch - self.first_epoch > num_epochs:
            raise ConfigError(
                f"epoch={epoch} of batches by bucket is out of range: the draws before it are more than 64 bits count; give an "
                f"epoch below {self.first_epoch + num_epochs}"
            )
        drawn = (epoch - self.first_epoch) * self.rates + (phases << self.shift)  # [B]
        before: Int64Array = drawn // (batches << self.shift)  # [B]
        return before


def eras_of(
    sizes: Int64Array,
    phases: Int64Array,
    batches: Int64Array,
    epoch_size: int | None,
    changes: Sequence[WeightsSince],
) -> list[Era]:
    """Return the eras of a run.

    Args:
        sizes: Rows of each bucket: [B].
        phases: Draws that each bucket has ahead: [B].
        batches: Samples of a batch of each: [B].
        epoch_size: Draws of all buckets in an epoch; None: as many as rows.
        changes: The weights of the run.
    """
    eras: list[Era] = []
    for change, following in zip(changes, [*changes[1:], None], strict=True):
        first_round = 0
        if eras:
            last = eras[-1]
            drawn = last.batches_before(change.epoch, phases, batches) * batches  # [B]
            first_round = last.first_round + int((-(-drawn // last.slots)).max(initial=0))
        if following is None or following.epoch > change.epoch:
            eras.append(_era(sizes, epoch_size, change, first_round))
    return eras


def _era(sizes: Int64Array, epoch_size: int | None, since: WeightsSince, first_round: int) -> Era:
    num_rows = int(sizes.sum())
    shares, whole = sizes.tolist(), num_rows
    if since.sums is not None:
        stops = np.cumsum(sizes).tolist()
        shares = [since.sums.total(stop - size, stop) for size, stop in zip(shares, stops, strict=True)]
        whole = sum(shares)
    wanted = num_rows if epoch_size is None else epoch_size
    if since.sums is None and wanted == num_rows:
        return _made(since, first_round, shares, 0, shares)
    shift = max(0, _RATE_BITS - wanted.bit_length())
    rates = [max(share > 0, ((share * wanted << shift) + whole // 2) // whole) for share in shares]
    slots = sizes.tolist() if since.sums is None else [max(1, rate + (1 << shift >> 1) >> shift) for rate in rates]
    return _made(since, first_round, rates, shift, slots)


def _made(since: WeightsSince, first_round: int, rates: list[int], shift: int, slots: list[int]) -> Era:
    of_round = np.array(slots, dtype=np.int64)  # [B]
    return Era(
        first_epoch=since.epoch,
        first_round=first_round,
        rates=np.array(rates, dtype=np.int64),
        shift=shift,
        slots=of_round,
        starts=np.cumsum(of_round) - of_round,
        sums=since.sums,
    )


class _Slice:
    """The sums of one bucket, as `WeightedRows` reads them."""

    def __init__(self, sums: BucketSums, start: int, stop: int) -> None:
        self._sums = sums
        self._start = start
        self._num_rows = stop - start
        self._total = sums.total(start, stop)

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: Any, /) -> Any:
        assert index == -1, "only the total is asked for"
        return self._total

    def searchsorted(self, v: Any, /, side: Any) -> Any:
        """Return the row at each point of the bucket's line."""
        assert side == "right", "a row begins where the one before ends"
        return self._sums.places(self._start, v)


def weighted_members(
    era: Era, first_rows: Int64Array, sizes: Int64Array, seed: int | None, bucket: int, round_number: int, slots: Int64Array
) -> Int64Array:
    """Return which row of its bucket each slot of a round is: [n].

    Args:
        era: The era, with weights.
        first_rows: First place of each bucket in the table: [B].
        sizes: Rows of each bucket: [B].
        seed: Seed of the order.
        bucket: The bucket.
        round_number: The round.
        slots: The slots: [n].
    """
    assert era.sums is not None, "else a slot is a row"
    start, size = int(first_rows[bucket]), int(sizes[bucket])
    own = _Slice(era.sums, start, start + size)
    rows = WeightedRows(num_rows=size, num_positions=int(era.slots[bucket]), cumulative=own)
    return rows.rows_at((seed or 0) + (bucket + 1 << 64), round_number, slots)
