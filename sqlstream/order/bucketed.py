"""Batches of rows that belong together: every global batch is of one bucket (an aspect ratio, a range of lengths).

    step p of epoch e ─ permutation of the epoch's batches → bucket b, its batch m ─ draws [m G, (m + 1) G) of b
    draw d of b ─ round d // n_b, place d mod n_b ─ permutation of (b, round) → member → row

Bucket b of n_b rows has m_b(e) = floor((e n_b + phase_b) / G) batches before epoch e: as many as its rows fill, the rest is
carried into the next epoch. So each draw comes exactly once, each row once in a round of its bucket, and rows of small buckets
as often as those of large ones: a bucket of 5 rows has a batch of 16 in 5 of 16 epochs. Epochs differ by some batches; none of
this is state. The phases are spread, so that small buckets do not all wait for the same epoch.

Rejected: dropping or repeating what does not fill a batch (rows of small buckets then come never, or too often), and buffers
that wait for a bucket to fill (their content would be state, and differ with the number of workers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.order import Draws, check_positions, check_seed, check_size, some_others
from sqlstream.order.permute import Int64Array, Permutation, forward_each

# What a permutation is for is the first part of its key; 1 to 3 and 201 are taken by other orders.
_BATCHES, _MEMBERS, _REPLACEMENTS = 203, 204, 205
_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 / golden ratio: its multiples are spread evenly, however many there are."""


class BucketRows(Protocol):
    """The rows of all buckets, sorted by bucket."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each bucket, at least 1."""

    @property
    def digest(self) -> str:
        """A text for what decides the bucket of each row."""

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the rows at places of the table: [n]."""


class _Epoch(NamedTuple):
    """The batches of one epoch, sorted by bucket."""

    following: Int64Array
    """Batches of each bucket up to its end: [B]."""
    stops: Int64Array
    """Batches of this epoch up to and with each bucket: [B]."""


class _Places(NamedTuple):
    """Draws of buckets."""

    bucket: Int64Array
    """Bucket of each: [n]."""
    round: Int64Array
    """Round of the bucket's rows: [n]."""
    place: Int64Array
    """Place in that round, below the bucket's rows: [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed:
    """Rows in global batches of one bucket each; position p is place p mod G of step p // G.

    Without a seed an epoch has its batches bucket by bucket, and their rows as written.
    """

    rows: BucketRows
    batch_size: int
    """Samples of a global batch, G."""
    seed: int | None
    _sizes: Int64Array = field(init=False, repr=False, compare=False)
    """Rows of each bucket: [B]."""
    _starts: Int64Array = field(init=False, repr=False, compare=False)
    """First place of each bucket in the table: [B]."""
    _phases: Int64Array = field(init=False, repr=False, compare=False)
    """Draws that each bucket has ahead at the start, below G: [B]."""
    _epochs: dict[int, _Epoch] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The batches of the last two epochs that were asked for."""

    def __post_init__(self) -> None:
        """Check that each epoch has a batch.

        Raises:
            ConfigError: There is an epoch in which no bucket fills one.
        """
        check_at_least("global_batch_size", self.batch_size, 1)
        check_seed(self.seed)
        sizes = np.array(self.rows.sizes, dtype=np.int64)  # [B]
        check_size("rows in buckets", int(sizes.sum()))
        spread = [(number + 1) * _GOLDEN % (1 << 64) >> 32 for number in range(len(sizes))]
        phases = np.array([self.batch_size * turn >> 32 for turn in spread], dtype=np.int64)  # [B]
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "_starts", np.cumsum(sizes) - sizes)
        object.__setattr__(self, "_phases", phases)
        largest = max(self.rows.sizes, default=0)
        if largest < self.batch_size and not self._has_batch_in_each_epoch():
            raise ConfigError(
                f"global_batch_size={self.batch_size} leaves epochs without a batch: the {len(sizes)} buckets have "
                f"{int(sizes.sum())} rows, the largest {largest}; give {largest} or fewer, or make fewer buckets"
            )

    @property
    def fingerprint(self) -> str:
        """A text for buckets, batch size and seed."""
        return f"{int(self._sizes.sum())} rows in buckets {self.rows.digest}, batches of {self.batch_size}, seed {self.seed}"

    def num_positions(self, epoch: int) -> int:
        """Return the positions of an epoch: whole batches, some more or fewer than in others."""
        return int(self._epoch(epoch).stops[-1]) * self.batch_size

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`.

        Epoch and position that seed a sample's generators are the round of its bucket's rows and the place in it, counted over
        all buckets: they differ for any two draws, and do not depend on the batch size.
        """
        draws = self._draws_at(epoch, positions)
        starts = np.arange(len(positions) + 1)  # [n + 1]
        return Draws(
            starts=starts,
            stream=np.zeros(len(positions), dtype=np.int64),
            epoch=draws.round,
            position=self._starts[draws.bucket] + draws.place,
            row=self.rows.rows_at(self._starts[draws.bucket] + self._members(draws)),
        )

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - the same for all
        """Return None: a row may come twice in an epoch, or not at all."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - the same for all
        """Return None: each round of each bucket has its own."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:  # noqa: ARG002 - a position has one
        """Yield other rows of the same bucket."""
        draws = self._draws_at(epoch, np.array([position], dtype=np.int64))
        bucket, member = int(draws.bucket[0]), int(self._members(draws)[0])
        among = range(int(self._sizes[bucket]))
        others = some_others(among, member, _REPLACEMENTS, self.seed or 0, epoch, position)  # [m]
        yield from self.rows.rows_at(self._starts[bucket] + others).tolist()

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:  # noqa: ARG002 - all is known
        """Return no chunks."""
        return {}

    def _before(self, epoch: int) -> Int64Array:
        """Return the batches of each bucket in earlier epochs: [B]."""
        before: Int64Array = (epoch * self._sizes + self._phases) // self.batch_size  # [B]
        return before

    def _epoch(self, epoch: int) -> _Epoch:
        """Return the batches of an epoch."""
        batches = self._epochs.get(epoch)
        if batches is None:
            following = self._before(epoch + 1)  # [B]
            batches = _Epoch(following, np.cumsum(following - self._before(epoch)))
            for old in list(self._epochs)[:-1]:
                self._epochs.pop(old, None)
            self._epochs[epoch] = batches
        return batches

    def _draws_at(self, epoch: int, positions: Int64Array) -> _Places:
        """Return bucket, round and place of positions of an epoch."""
        batches = self._epoch(epoch)
        num_steps = int(batches.stops[-1])
        check_positions(positions, num_steps * self.batch_size)
        step, within = np.divmod(positions, self.batch_size)  # [n], [n]
        image = step  # [n]
        if self.seed is not None and num_steps:
            steps, which = np.unique(step, return_inverse=True)  # [m], [n]
            image = Permutation.keyed(num_steps, _BATCHES, self.seed, epoch).forward(steps)[which]  # [n]
        bucket = np.searchsorted(batches.stops, image, side="right")  # [n]
        number = batches.following[bucket] - (
            batches.stops[bucket] - image
        )  # [n]; batches of the bucket in the whole run before it
        draw = number * self.batch_size + within  # [n]
        return _Places(bucket, *np.divmod(draw, self._sizes[bucket]))

    def _members(self, draws: _Places) -> Int64Array:
        """Return which row of its bucket each draw is: [n]."""
        if self.seed is None or not len(draws.bucket):
            return draws.place
        keys, which = np.unique(draws.round * len(self._sizes) + draws.bucket, return_inverse=True)  # [p], [n]
        permutations = [
            Permutation.keyed(int(self._sizes[bucket]), _MEMBERS, self.seed, round_number, bucket)
            for round_number, bucket in (divmod(key, len(self._sizes)) for key in keys.tolist())
        ]
        return forward_each(permutations, which, draws.place)

    def _has_batch_in_each_epoch(self) -> bool:
        """Return whether each epoch has a batch; after G epochs they repeat."""
        epochs = np.arange(self.batch_size + 1)  # [G + 1]
        before = np.zeros(self.batch_size + 1, dtype=np.int64)  # [G + 1]
        for size, phase in zip(self._sizes.tolist(), self._phases.tolist(), strict=True):
            before += (epochs * size + phase) // self.batch_size
        return bool((np.diff(before) > 0).all())
