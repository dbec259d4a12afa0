"""Batches of rows that belong together: every global batch is of one bucket (an aspect ratio, a range of lengths).

    step p of epoch e ─ permutation of the epoch's batches → bucket b, its batch m ─ draws [m G_b, (m + 1) G_b) of b
    draw d of b ─ round d // n_b, place d mod n_b ─ permutation of (b, round) → member → row

Bucket b of n_b rows has m_b(e) = floor((e n_b + phase_b) / G_b) batches before epoch e: as many as its rows fill, the rest is
carried into the next epoch. So each draw comes exactly once, each row once in a round of its bucket, and rows of small buckets
as often as those of large ones: a bucket of 5 rows has a batch of 16 in 5 of 16 epochs. Epochs differ by some batches; none of
this is state. The phases are spread, so that small buckets do not all wait for the same epoch.

A step has as many positions as the largest batch; those beyond the batch of its bucket are no positions of any share. So where
a step begins is known without the steps before it.

With C canonical nodes, place p of a batch takes the next draw of part p mod C of its bucket: the members c, c + C, c + 2 C …
are part c, which goes round by itself. A bucket of fewer rows has one part.

Rejected: dropping or repeating what does not fill a batch (rows of small buckets then come never, or too often), and buffers
that wait for a bucket to fill (their content would be state, and differ with the number of workers).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.bucket_rates import BucketWeights, Era, weighted_members
from sqlstream.order.bucket_steps import BucketSteps
from sqlstream.order.order import Draws, StreamPlaces, check_seed, check_size, one_each, some_others
from sqlstream.order.permute import Int64Array, Permutation, forward_each

# What a permutation is for is the first part of its key; 1 to 3, 201 and 203 are taken by others.
_MEMBERS, _REPLACEMENTS = 204, 205


class BucketRows(Protocol):
    """The rows of all buckets, sorted by bucket."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each bucket, at least 1."""

    @property
    def values(self) -> tuple[object, ...]:
        """What names each bucket."""

    @property
    def digest(self) -> str:
        """A text for what decides the bucket of each row."""

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the rows at places of the table: [n]."""


class _Places(NamedTuple):
    """Draws of buckets."""

    bucket: Int64Array
    """Bucket of each: [n]."""
    part: Int64Array | None
    """Part of the bucket: [n]; None: there is one."""
    round: Int64Array
    """Round of the rows of that part: [n]."""
    place: Int64Array
    """Place in that round, below the rows of the part: [n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed:
    """Rows in global batches of one bucket each; position p is place p mod G of step p // G, with G the largest batch.

    Without a seed an epoch has its batches bucket by bucket, and their rows as written.
    """

    rows: BucketRows
    batch_size: int | tuple[int, ...]
    """Samples of a global batch, G, or of those of each bucket."""
    seed: int | None
    num_parts: int = 1
    """Canonical nodes."""
    leftovers: str = "carry"
    """What becomes of rows that fill no batch: `'carry'`, `'repeat'` or `'drop'`; with the last two each epoch is a round."""
    epoch_size: int | None = None
    """Draws in an epoch, but for leftovers; None: as many as rows."""
    weights: BucketWeights | None = None
    """How often rows come; None: equally."""
    batch_sizes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Samples of a global batch of each bucket."""
    step_size: int = field(init=False, repr=False, compare=False)
    """Positions of a step: samples of the largest batch."""
    is_even: bool = field(init=False, repr=False, compare=False)
    """All batches have one size."""
    _text: str = field(init=False, repr=False, compare=False)
    """Fingerprint without weights: it is compared for each span of samples."""
    _batches: Int64Array = field(init=False, repr=False, compare=False)
    """Samples of a batch of each bucket: [B]."""
    _sizes: Int64Array = field(init=False, repr=False, compare=False)
    """Rows of each bucket: [B]."""
    _starts: Int64Array = field(init=False, repr=False, compare=False)
    """First place of each bucket in the table: [B]."""
    _steps: BucketSteps = field(init=False, repr=False, compare=False)
    """Which batch each step is."""

    def __post_init__(self) -> None:
        """Check that each epoch has a batch.

        Raises:
            ConfigError: There is an epoch in which no bucket fills one.
        """
        check_seed(self.seed)
        sizes = np.array(self.rows.sizes, dtype=np.int64)  # [B]
        check_size("rows in buckets", int(sizes.sum()))
        given = (self.batch_size,) * len(sizes) if isinstance(self.batch_size, int) else self.batch_size
        for size in set(given):
            check_at_least("global_batch_size", size, 1)
        for name, value in (
            ("batch_sizes", given),
            ("step_size", max(given, default=1)),
            ("is_even", len(set(given)) <= 1),
            ("_batches", np.array(given, dtype=np.int64)),
            ("_sizes", sizes),
            ("_starts", np.cumsum(sizes) - sizes),
        ):
            object.__setattr__(self, name, value)
        steps = BucketSteps(
            sizes=sizes,
            batches=self._batches,
            step_size=self.step_size,
            seed=self.seed,
            leftovers=self.leftovers,
            epoch_size=self.epoch_size,
            weights=self.weights,
        )
        object.__setattr__(self, "_steps", steps)
        check_size("positions of an epoch", int(-(-sizes // self._batches).sum()) * self.step_size)
        self._check_parts()
        if self.num_parts > 1 and self.weights is not None and any(since.sums for since in self.weights.since()):
            raise ConfigError(
                f"num_canonical_nodes={self.num_parts} with weights= and batches= cannot be had: a bucket's weights are not "
                "divided into parts; leave one of them out"
            )
        further = "" if self.num_parts == 1 else f", {self.num_parts} parts"
        further += "" if self.epoch_size is None else f", epochs of {self.epoch_size}"
        text = f"{int(sizes.sum())} rows in buckets {self.rows.digest}, {self.text_of_sizes}{further}, seed {self.seed}"
        object.__setattr__(self, "_text", text)
        self._steps.check_none_is_dropped(self.rows.values)
        if not self._steps.has_step_in_each_epoch():
            largest = int(sizes.max(initial=0))
            raise ConfigError(
                f"global_batch_size={min(given, default=0)} leaves epochs without a batch: the {len(sizes)} buckets have "
                f"{int(sizes.sum())} rows, the largest {largest}; give {largest} or fewer, or make fewer buckets"
            )

    @property
    def fingerprint(self) -> str:
        """A text for buckets, batch sizes, parts, seed and weights."""
        if self.weights is None or not self.weights.version:
            return self._text
        return f"{self._text}, weights {self.weights.fingerprint}"

    @property
    def text_of_sizes(self) -> str:
        """A text for the sizes of batches, which is part of a run's state."""
        sizes = self.step_size if self.is_even else blake2b(self._batches.tobytes(), digest_size=8).hexdigest()
        return f"batches of {sizes}{'' if self.leftovers == 'carry' else f', leftovers {self.leftovers}'}"

    @property
    def has_equal_epochs(self) -> bool:
        """All epochs have as many steps: no rows are carried into the next one."""
        return self.leftovers != "carry"

    def num_positions(self, epoch: int) -> int:
        """Return the positions of an epoch: whole steps, some more or fewer than in others."""
        return self._steps.epoch(epoch).num_steps * self.step_size

    def num_batches(self, epoch: int) -> int:
        """Return the batches of an epoch."""
        return self._steps.epoch(epoch).num_steps

    def batches_before(self, epoch: int) -> int:
        """Return the batches of all epochs of the run before one."""
        return self._steps.batches_before(epoch)

    def has_step_in_each_epoch(self, num_lanes: int) -> bool:
        """Return whether each epoch has a step of so many batches."""
        return self._steps.has_step_in_each_epoch(num_lanes)

    @property
    def version(self) -> int:
        """Grows with every change of the weights."""
        return 0 if self.weights is None else self.weights.version

    @property
    def num_lanes(self) -> None:
        """None: all ranks of a step take of one batch."""
        return

    def num_samples(self, epoch: int) -> int:
        """Return the samples of an epoch."""
        stops = self._steps.epoch(epoch).stops  # [B]
        return int((np.diff(stops, prepend=0) * self._batches).sum())

    def name_of(self, bucket: int) -> str:
        """Return what names a bucket."""
        return repr(self.rows.values[bucket])

    def sizes_at(self, epoch: int, batches: Int64Array) -> Int64Array:
        """Return the samples of batches of an epoch, one a step: [n]."""
        found = self._steps.at(epoch, batches * self.step_size)
        sizes: Int64Array = self._batches[found.bucket][found.which]  # [n]
        return sizes

    def buckets_at(self, epoch: int, steps: Int64Array) -> Int64Array:
        """Return the buckets of steps of an epoch: [n]."""
        found = self._steps.at(epoch, steps * self.step_size)
        buckets: Int64Array = found.bucket[found.which]  # [n]
        return buckets

    def weight_at(self, epoch: int, position: int) -> float:  # noqa: ARG002 - the same for all
        """Return 1: a step is one batch."""
        return 1.0

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`.

        Epoch and position that seed a sample's generators are the round of its bucket's rows and the place in it, counted over
        all buckets: they differ for any two draws, and do not depend on the batch size.
        """
        found = self._rows_of_step(epoch, positions)
        if found is not None:
            return found
        draws = self._draws_at(epoch, positions)
        era = self._steps.epoch(epoch).era
        member, place = self._members(era, draws), draws.place  # [n], [n]
        if draws.part is not None:
            place = place * self._parts_of(draws.bucket) + draws.part  # [n]
        own = one_each(len(positions))
        return Draws(
            starts=own.starts,
            stream=own.stream,
            epoch=draws.round,
            position=era.starts[draws.bucket] + place,
            row=self.rows.rows_at(self._starts[draws.bucket] + member),
        )

    def _rows_of_step(self, epoch: int, positions: Int64Array) -> Draws | None:
        """Return the rows at positions of a single step, in half of the time: what is the same for all is looked up once.

        Returns:
            None where that is no single step, round or part.
        """
        batches = self._steps.epoch(epoch)
        era, num = batches.era, len(positions)
        if not num or self.num_parts > 1 or era.sums is not None or self.leftovers != "carry":
            return None
        first, last = int(positions.min()), int(positions.max())
        step, start = first // self.step_size, first % self.step_size
        if not 0 <= step < batches.num_steps or last // self.step_size != step:
            return None
        image = step if batches.shuffle is None else batches.shuffle.image(step)
        bucket = int(batches.stops.searchsorted(image, "right"))
        batch, slots = self.batch_sizes[bucket], int(era.slots[bucket])
        draw = (int(batches.shifts[bucket]) + image) * batch + start
        stop = start + last - first
        if stop >= batch or draw // slots != (draw + last - first) // slots:
            return None
        number, place = divmod(draw, slots)
        places = positions + (place - first)  # [n]
        member = places  # [n]
        if self.seed is not None:
            member = Permutation.keyed(slots, _MEMBERS, self.seed, number + era.first_round, bucket).forward(places)  # [n]
        own = one_each(num)
        return Draws(
            starts=own.starts,
            stream=own.stream,
            epoch=own.stream + (number + era.first_round),
            position=places + era.starts[bucket],
            row=self.rows.rows_at(member + self._starts[bucket]),
        )

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - the same for all
        """Return None: a row may come twice in an epoch, or not at all."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - the same for all
        """Return None: each round of each bucket has its own."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:  # noqa: ARG002 - a position has one
        """Yield other rows of the same bucket."""
        draws, era = self._draws_at(epoch, np.array([position], dtype=np.int64)), self._steps.epoch(epoch).era
        bucket, failed = int(draws.bucket[0]), int(self._members(era, draws)[0])
        if era.sums is None:
            among = range(int(self._sizes[bucket]))
            others = some_others(among, failed, _REPLACEMENTS, self.seed or 0, epoch, position)  # [m]
        else:
            among = range(int(era.slots[bucket]))
            slots = some_others(among, int(draws.place[0]), _REPLACEMENTS, self.seed or 0, epoch, position)  # [m]
            others = self._weighted(era, bucket, int(draws.round[0]), slots)  # [m]
            others = np.array([other for other in dict.fromkeys(others.tolist()) if other != failed], dtype=np.int64)  # [k]
        yield from self.rows.rows_at(self._starts[bucket] + others).tolist()

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:  # noqa: ARG002 - all is known
        """Return no chunks."""
        return {}

    def places_of_draws(self, draws: Int64Array) -> StreamPlaces:
        """Return where draws are, counted over all epochs: [n]; a mixture draws from a stream without end."""
        return self._steps.places_of_draws(draws)

    def _draws_at(self, epoch: int, positions: Int64Array) -> _Places:
        """Return bucket, part, round and place of positions of an epoch.

        Raises:
            IndexError: The batch of a step does not reach to one of them.
        """
        steps = self._steps.at(epoch, positions)
        batch = self._batches[steps.bucket]  # [m]
        if not self.is_even and (steps.within >= batch[steps.which]).any():
            raise IndexError("a position is beyond the batch of its step")
        if self.num_parts == 1:
            draw = (steps.number * batch)[steps.which] + steps.within  # [n]
            era = self._steps.epoch(epoch).era
            number, place = np.divmod(draw, era.slots[steps.bucket][steps.which])  # [n], [n]
            number = number + era.first_round if self.leftovers == "carry" else np.full_like(number, epoch)  # [n]
            return _Places(steps.bucket[steps.which], None, number, place)
        parts = self._parts_of(steps.bucket)  # [m]
        index, part = np.divmod(steps.within, parts[steps.which])  # [n], [n]
        draw = (steps.number * (batch // parts))[steps.which] + index  # [n]
        sizes = (self._sizes[steps.bucket][steps.which] - part - 1) // parts[steps.which] + 1  # [n]
        number, place = np.divmod(draw, sizes)  # [n], [n]
        if self.leftovers != "carry":
            number = np.full_like(number, epoch)  # [n]
        return _Places(steps.bucket[steps.which], part, number, place)

    def _parts_of(self, bucket: Int64Array) -> Int64Array:
        """Return the parts of buckets: [n]."""
        return np.where(self._sizes[bucket] < self.num_parts, 1, self.num_parts)

    def _members(self, era: Era, draws: _Places) -> Int64Array:
        """Return which row of its bucket each draw is: [n]."""
        member = draws.place  # [n]
        if not len(member) or (self.seed is None and era.sums is None):
            return self._with_parts(draws, member)
        keys = draws.round * len(self._sizes) + draws.bucket  # [n]
        if draws.part is not None:
            keys = keys * self.num_parts + draws.part  # [n]
        is_first = np.empty(len(keys), dtype=np.bool_)  # [n]
        is_first[0] = True
        np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
        some, which = np.unique(keys[is_first], return_inverse=True)  # [p], [q]; of the few that differ from their neighbour
        which = which[np.cumsum(is_first) - 1]  # [n]
        if self.seed is not None:
            shuffles = [self._shuffle_of(era, key) for key in some.tolist()]
            member = shuffles[0].forward(member) if len(some) == 1 else forward_each(shuffles, which, member)  # [n]
        if era.sums is not None:
            slots, member = member, np.empty_like(member)  # [n], [n]
            for number, key in enumerate(some.tolist()):
                here = which == number  # [n]
                round_number, bucket = divmod(key, len(self._sizes))
                member[here] = self._weighted(era, bucket, round_number, slots[here])
        return self._with_parts(draws, member)

    def _with_parts(self, draws: _Places, member: Int64Array) -> Int64Array:
        """Return which rows of their bucket are rows of its parts: [n]."""
        return member if draws.part is None else member * self._parts_of(draws.bucket) + draws.part

    def _weighted(self, era: Era, bucket: int, round_number: int, slots: Int64Array) -> Int64Array:
        """Return which row of its bucket each slot of a round is: [n]."""
        return weighted_members(era, self._starts, self._sizes, self.seed, bucket, round_number, slots)

    def _shuffle_of(self, era: Era, key: int) -> Permutation:
        """Return the permutation of a round of a bucket, or of a part of it."""
        key, part = divmod(key, self.num_parts)
        round_number, bucket = divmod(key, len(self._sizes))
        size, seed = int(era.slots[bucket]), self.seed or 0
        if self.num_parts == 1 or size < self.num_parts:
            return Permutation.keyed(size, _MEMBERS, seed, round_number, bucket)
        return Permutation.keyed((size - part - 1) // self.num_parts + 1, _MEMBERS, seed, round_number, bucket, part)

    def _check_parts(self) -> None:
        """Raise ConfigError if a batch cannot have as many samples of each part."""
        for bucket, size in enumerate(self.batch_sizes):
            if size % self.num_parts:
                raise ConfigError(
                    f"num_canonical_nodes={self.num_parts} does not divide the batch of {size} samples of bucket "
                    f"{self.name_of(bucket)}: give sizes, or rank_multiple=, that it divides"
                )
