"""Rows in packs: each position of an epoch takes several rows, whose lengths add up to a capacity at most.

    position q of epoch e ─ permutation of the epoch's packs → pack i of pattern t (`pack_plan`)
    entry of the pattern (a length, some rows of it) ─ draws base + i rows, … ─ permutation of (length, e) → units → rows

Which lengths share a pack is the plan's, the same in every epoch; which rows of these lengths meet is another draw in each.
Each row comes once an epoch, or as often as it weighs. Nothing of this is state, and no row has a plan of its own.

With C canonical nodes, unit u belongs to part u mod C. Since units are sorted by length, the parts have nearly the same
lengths, and plans of nearly as many packs; where one has fewer, some of its packs are divided. Position q takes a pack of part
q mod C.

What is drawn are *units*: rows that fit a pack, and parts of those that do not (`OnLong`). The units of a length are numbered
by part, so the whole rows among them come first; they are those that may stand in for a failed one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from sqlstream.config import OnLong, check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.order import MAX_REPLACEMENTS, Draws, StreamPlaces, check_positions, check_seed, check_size
from sqlstream.order.packs.pack_plan import PACK_PLAN_VERSION, PackPlan, divided, plan_packs
from sqlstream.order.packs.units import Units, ranges, sums_before, units_of, units_of_part
from sqlstream.order.permute import Int64Array, Permutation, forward_each
from sqlstream.order.weights import WeightedRows

# What a permutation is for is the first part of its key; 1 to 3, 201 and 203 to 205 are taken by other orders.
_PACKS, _MEMBERS, _WITHIN, _REPLACEMENTS = 211, 212, 213, 214
MAX_LOOKED_AT = 64
"""Lengths in which a row is looked for that stands in for a failed one. Arbitrary."""


class LengthRows(Protocol):
    """All rows, sorted by length."""

    @property
    def lengths(self) -> Int64Array:
        """The distinct lengths, rising, at least 1: [L]."""

    @property
    def counts(self) -> Int64Array:
        """Rows of each length, at least 1: [L]."""

    @property
    def digest(self) -> str:
        """A text for what decides the length of each row."""

    def rows_at(self, places: Int64Array) -> Int64Array:
        """Return the rows at places of the table: [n]."""


class WeightedLengths(NamedTuple):
    """Weights of the rows of a table by length."""

    rows: WeightedRows
    """The place in the table of each slot."""
    sums: Int64Array
    """Sums of the scaled weights up to and with the rows of each length: [L]."""


class LengthWeights(Protocol):
    """The weights of a run. They may change while it goes on, from an epoch on that was not asked for before."""

    @property
    def fingerprint(self) -> str:
        """A text for all changes of the run."""

    def of_epoch(self, epoch: int) -> WeightedLengths | None:
        """Return the weights of an epoch; None: each row comes once."""


class _PackedEpoch(NamedTuple):
    """What an epoch packs, and how."""

    units: Units
    plans: tuple[PackPlan, ...]
    """The packs of each part: [C]."""
    weights: WeightedLengths | None
    """How often rows come; None: once."""

    @property
    def num_packs(self) -> int:
        """Packs of all parts."""
        return sum(plan.num_packs for plan in self.plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Rows in packs, each row once an epoch; a position is a pack.

    Without a seed packs come pattern by pattern, and rows of a length as written. With weights an epoch has as many slots as
    rows, each length as many of them as its rows weigh; it has a plan of its own, and some packs more or fewer than others.
    """

    rows: LengthRows
    capacity: int
    """Values of a pack at most."""
    max_rows: int | None = None
    """Rows of a pack at most; None: as many as fit."""
    on_long: OnLong = OnLong.RAISE
    """What becomes of rows that are longer than a pack."""
    seed: int | None
    num_parts: int = 1
    """Canonical nodes."""
    weights: LengthWeights | None = None
    """How often rows come; None: once an epoch."""
    _every: _PackedEpoch = field(init=False, repr=False, compare=False)
    """The packs of epochs without weights."""
    _weighted: dict[int, _PackedEpoch] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The packs of the last two epochs with weights that were asked for."""
    _packs_before: dict[str, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """By fingerprint of the weights of now: packs of all epochs before each of the first ones."""

    def __post_init__(self) -> None:
        """Plan the packs.

        Raises:
            ConfigError: No row fits a pack, or one that does not is an error.
        """
        check_at_least("capacity", self.capacity, 1)
        check_seed(self.seed)
        check_size("rows in packs", int(self.rows.counts.sum()))
        if self.on_long is OnLong.RAISE:
            self._check_none_is_long()
        if self.num_parts > 1 and self.weights is not None and self.weights.of_epoch(0) is not None:
            raise ConfigError(
                f"num_canonical_nodes={self.num_parts} with weights= and Packs cannot be had: rows that come several times are "
                "not divided into parts; leave one of them out"
            )
        units = units_of(self.rows.lengths, self.rows.counts, self.capacity, self.on_long)
        object.__setattr__(self, "_every", _PackedEpoch(units, self._plans_of(units), None))

    @property
    def plans(self) -> tuple[PackPlan, ...]:
        """The packs of an epoch without weights, by part: [C]."""
        return self._every.plans

    @property
    def fill(self) -> float:
        """Share of the capacity of all packs that rows take, in an epoch without weights."""
        num_values = sum(int(plan.lengths @ plan.counts) for plan in self.plans)
        return num_values / max(1, self._every.num_packs * self.capacity)

    @property
    def num_rows(self) -> int:
        """Rows that come in an epoch: all but those that are left out since they are too long."""
        return int(self._every.units.segment_sizes[self._every.units.segment_parts == 0].sum())

    @property
    def fingerprint(self) -> str:
        """A text for rows, packs and seed."""
        weights = "" if self.weights is None else f", weights {self.weights.fingerprint}"
        return f"{self.packing}, seed {self.seed}{weights}"

    @property
    def packing(self) -> str:
        """A text for rows and packs: what a state says of the order, beside the seed."""
        parts = "" if self.num_parts == 1 else f", {self.num_parts} parts"
        return f"{text_of_packs(self.capacity, self.max_rows, self.on_long)}{parts}, {self.rows.digest}"

    @property
    def has_equal_epochs(self) -> bool:
        """All epochs have as many packs: each row comes once in each."""
        return self.weights is None or self.weights.of_epoch(0) is None

    def num_positions(self, epoch: int) -> int:
        """Return the packs of an epoch."""
        return self._epoch(epoch).num_packs

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows of the packs at `positions`.

        The number of the row, with the epoch, seeds a sample's generators: all parts of a row are made alike, and `dataset[i]`
        gives what a pack takes. With weights a row may come several times in an epoch, so it is the number of its slot.
        """
        unit, starts = self._units_at(epoch, positions)
        packs = self._epoch(epoch)
        segment = np.searchsorted(packs.units.segment_stops, unit, side="right")  # [m]
        slot = self._slots_of(packs.units, segment, unit)  # [m]
        row = self._rows_in(packs, epoch, slot)  # [m]
        zeros = np.zeros(len(row), dtype=np.int64)  # [m]
        part = packs.units.segment_parts[segment] if self.on_long is OnLong.SPLIT else None  # [m]
        key = row if packs.weights is None else slot  # [m]
        return Draws(starts=starts, stream=zeros, epoch=zeros + epoch, position=key, row=row, part=part)

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - the same for all
        """Return None: a row shares its position with others."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - the same for all
        """Return None: the rows of each length have their own."""
        return

    def places_of_draws(self, draws: Int64Array) -> StreamPlaces:
        """Return where draws are, counted over all epochs: [n]; a mixture draws from a stream without end.

        With weights epochs have some packs more or fewer, so those of all earlier ones are planned once, to be counted.
        """
        weights = "" if self.weights is None else self.weights.fingerprint
        if self.weights is None or self.weights.of_epoch(0) is None:
            return StreamPlaces(*np.divmod(draws, self._every.num_packs))
        before = self._packs_before.get(weights)
        if before is None:
            self._packs_before.clear()
            before = self._packs_before[weights] = [0]
        last = int(draws.max(initial=-1))
        while before[-1] <= last:
            before.append(before[-1] + self.num_positions(len(before) - 1))
        ends = np.array(before, dtype=np.int64)  # [epochs + 1]
        epoch = np.searchsorted(ends, draws, side="right") - 1  # [n]
        return StreamPlaces(epoch, draws - ends[epoch])

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield other rows of the length of a failed one, then of the next shorter ones, each once."""
        unit, _ = self._units_at(epoch, np.array([position], dtype=np.int64))  # [m]
        return self._others(epoch, int(unit[draw]), position, draw)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:  # noqa: ARG002 - all is known
        """Return no chunks."""
        return {}

    def _check_none_is_long(self) -> None:
        """Raise ConfigError if a row is longer than a pack."""
        lengths, counts = self.rows.lengths, self.rows.counts
        num_short = int(np.searchsorted(lengths, self.capacity, side="right"))
        if num_short == len(lengths):
            return
        place, longest = np.array([int(counts[:-1].sum())]), int(lengths[-1])  # [1]
        raise ConfigError(
            f"{int(counts[num_short:].sum())} rows are longer than a pack of {self.capacity}: row "
            f"{int(self.rows.rows_at(place)[0])} has {longest}. Give Packs on_long='drop', 'truncate' or 'split', or "
            f"capacity={longest}"
        )

    def _epoch(self, epoch: int) -> _PackedEpoch:
        """Return what an epoch packs."""
        weights = None if self.weights is None else self.weights.of_epoch(epoch)
        if weights is None:
            return self._every
        packs = self._weighted.get(epoch)
        if packs is None or packs.weights is not weights:
            stops = weights.rows.slots_before(self.seed, epoch, weights.sums)  # [L]
            counts = np.diff(stops, prepend=0)  # [L]
            some = np.flatnonzero(counts)  # [l]
            units = units_of(self.rows.lengths[some], counts[some], self.capacity, self.on_long)
            packs = _PackedEpoch(units, self._plans_of(units), weights)
            for old in [known for known in self._weighted if known != epoch][:-1]:
                self._weighted.pop(old, None)
            self._weighted[epoch] = packs
        return packs

    def _plans_of(self, units: Units) -> tuple[PackPlan, ...]:
        """Return the packs of each part, as many in each as it has positions."""
        if self.num_parts == 1:
            return (plan_packs(units.lengths, units.counts, self.capacity, self.max_rows),)
        plans = [
            plan_packs(units.lengths, of_part.counts, self.capacity, self.max_rows)
            for of_part in (units_of_part(units, part, self.num_parts) for part in range(self.num_parts))
        ]
        # With so many positions each part has as many as packs, or more, and never more than units.
        num_positions = max((plan.num_packs - 1) * self.num_parts + part + 1 for part, plan in enumerate(plans))
        return tuple(divided(plan, -(-(num_positions - part) // self.num_parts)) for part, plan in enumerate(plans))

    def _units_at(self, epoch: int, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the units of the packs at positions, and the number of the first one of each pack: [m], [n + 1]."""
        packs = self._epoch(epoch)
        check_positions(positions, packs.num_packs)
        if self.num_parts == 1:
            return self._units_in_part(packs, epoch, positions, 0)
        index, part = np.divmod(positions, self.num_parts)
        sizes = np.zeros(len(positions), dtype=np.int64)  # [n]
        found: list[tuple[Int64Array, Int64Array]] = []
        for one in np.unique(part).tolist():
            here = np.flatnonzero(part == one)  # [k]
            unit, starts = self._units_in_part(packs, epoch, index[here], one)
            sizes[here] = np.diff(starts)
            found.append((here, unit))
        starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes)))  # [n + 1]
        units = np.empty(int(starts[-1]), dtype=np.int64)  # [m]
        for here, unit in found:
            units[ranges(starts[here], sizes[here])] = unit
        return units, starts

    def _units_in_part(
        self, packs: _PackedEpoch, epoch: int, positions: Int64Array, part: int
    ) -> tuple[Int64Array, Int64Array]:
        """Return the units of the packs at positions of a part, and the number of the first one of each pack: [m], [n + 1]."""
        units, plan, parts = packs.units, packs.plans[part], self.num_parts
        key = () if parts == 1 else (part,)
        pack = positions  # [n]
        if self.seed is not None and len(positions):
            pack = Permutation.keyed(plan.num_packs, _PACKS, self.seed, epoch, *key).forward(positions)  # [n]
        pattern = np.searchsorted(plan.stops, pack, side="right")  # [n]
        number: Int64Array = pack - sums_before(plan.stops)[pattern]  # [n]; of the pack among those of its pattern
        num_entries = plan.entry_starts[pattern + 1] - plan.entry_starts[pattern]  # [n]
        entry = ranges(plan.entry_starts[pattern], num_entries)  # [e]
        rows = plan.entry_rows[entry]  # [e]
        first_draw = plan.entry_base[entry] + np.repeat(number, num_entries) * rows  # [e]
        draw = ranges(first_draw, rows)  # [m]
        length = np.repeat(plan.entry_length[entry], rows)  # [m]
        which: Int64Array = np.repeat(np.repeat(np.arange(len(positions)), num_entries), rows)  # [m]
        starts = np.searchsorted(which, np.arange(len(positions) + 1))  # [n + 1]
        own = units_of_part(units, part, parts)
        first = own.firsts[length]  # [m]
        if self.seed is None or not len(draw):
            return first + draw * parts, starts
        unit = first + self._members(epoch, units.lengths, own.counts, length, draw, key) * parts  # [m]
        # Else the long rows would come first in each pack. A permutation gives numbers that differ, and serves as a hash.
        turn = Permutation.keyed(int(units.counts.sum()), _WITHIN, self.seed, epoch).forward(first + draw * parts)  # [m]
        return unit[np.lexsort((turn, which))], starts

    def _members(
        self, epoch: int, lengths: Int64Array, counts: Int64Array, length: Int64Array, draw: Int64Array, key: tuple[int, ...]
    ) -> Int64Array:
        """Return which unit of its length each draw is: [m].

        Args:
            epoch: The epoch.
            lengths: The distinct lengths: [U].
            counts: Units of each: [U].
            length: Number of the length of each draw: [m].
            draw: Number of the draw among those of its length: [m].
            key: What a part adds to the keys of its permutations.
        """
        assert self.seed is not None, "there is no shuffle without one"
        sizes = counts[length]  # [m]
        member = np.zeros_like(draw)  # [m]
        several = np.flatnonzero(sizes > 1)  # [s]; a permutation of one unit is none
        if not len(several):
            return member
        distinct, which = np.unique(length[several], return_inverse=True)  # [p], [s]
        permutations = [
            Permutation.keyed(int(counts[one]), _MEMBERS, self.seed, epoch, int(lengths[one]), *key)
            for one in distinct.tolist()
        ]
        member[several] = forward_each(permutations, which, draw[several])
        return member

    def _slots_of(self, units: Units, segment: Int64Array, unit: Int64Array) -> Int64Array:
        """Return the slots of units: [m]."""
        slot: Int64Array = units.segment_slots[segment] + unit - sums_before(units.segment_stops)[segment]  # [m]
        return slot

    def _rows_in(self, packs: _PackedEpoch, epoch: int, slot: Int64Array) -> Int64Array:
        """Return the rows of slots: [m]."""
        return self.rows.rows_at(slot if packs.weights is None else packs.weights.rows.rows_at(self.seed, epoch, slot))

    def _others(self, epoch: int, failed: int, position: int, draw: int) -> Iterator[int]:
        """Yield rows that stand in for a failed unit: those of its length, then of shorter ones."""
        packs = self._epoch(epoch)
        units = packs.units
        own = int(np.searchsorted(units.starts, failed, side="right")) - 1
        whole = units_of_part(units._replace(counts=units.whole), failed % self.num_parts, self.num_parts)
        left, seen = MAX_REPLACEMENTS, {*self._rows_of_units(packs, epoch, np.array([failed], dtype=np.int64))}
        for length in range(own, max(-1, own - MAX_LOOKED_AT), -1):
            num_whole, first = int(whole.counts[length]), int(whole.firsts[length])
            shuffle = Permutation.keyed(num_whole, _REPLACEMENTS, self.seed or 0, epoch, position, draw)
            some = shuffle.forward(np.arange(min(left + 1, num_whole), dtype=np.int64))  # [k]
            for row in self._rows_of_units(packs, epoch, first + some * self.num_parts):
                if row not in seen and left:
                    seen.add(row)
                    left -= 1
                    yield row
            if not left:
                return

    def _rows_of_units(self, packs: _PackedEpoch, epoch: int, unit: Int64Array) -> list[int]:
        """Return the rows of units."""
        segment = np.searchsorted(packs.units.segment_stops, unit, side="right")  # [k]
        rows: list[int] = self._rows_in(packs, epoch, self._slots_of(packs.units, segment, unit)).tolist()
        return rows


def text_of_packs(capacity: int, max_rows: int | None, on_long: OnLong) -> str:
    """Return a text for what decides which lengths share a pack."""
    most = "" if max_rows is None else f", at most {max_rows} rows"
    return f"packs {PACK_PLAN_VERSION} of {capacity}{most}, long rows {on_long.value}"
