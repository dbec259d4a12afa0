"""Which lengths share a pack: best fit decreasing, on the histogram of lengths and not row by row.

Rows of one length are alike, so packs are alike, too: a *pattern* is a multiset of lengths, and a plan has some packs of each
pattern. Rows of a length are put together into as many packs with the least sufficient room as there are, so the cost grows
with the number of lengths, not with that of rows, and the number of packs is that of best fit decreasing row by row (equal
rooms: the oldest pack first).

Rejected: windows over the order of an epoch (a plan for each row, made anew every epoch, and less full: 99.8 % where this has
99.99 %), and first fit in the order of a sampler (about 97 %).
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sqlstream.order.permute import Int64Array

PACK_PLAN_VERSION = 1
"""Changes whenever any plan would change; it is part of what a state says of packs."""


class _Filling(NamedTuple):
    """A pattern that is being filled: what it had before, and the last lengths that were put into it."""

    before: _Filling | None
    length: int
    """Number of the length."""
    rows: int
    """Rows of it."""
    num_rows: int
    """Rows of the pattern."""


class _Group(NamedTuple):
    """Packs that are filled alike."""

    filling: _Filling
    packs: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPlan:
    """The packs of an epoch, pattern by pattern.

    A pattern has *entries*, one for each of its lengths. The draws of a length are numbered through all packs: those of pack i
    of a pattern are `entry_base + i * entry_rows` and the following ones.
    """

    capacity: int
    """Values of a pack at most."""
    lengths: Int64Array
    """The lengths, rising: [L]."""
    counts: Int64Array
    """Rows of each length: [L]."""
    stops: Int64Array
    """Packs of all patterns up to and with each: [T]."""
    entry_starts: Int64Array
    """First entry of each pattern, and the end: [T + 1]."""
    entry_length: Int64Array
    """Number of the length of each entry: [E]."""
    entry_rows: Int64Array
    """Rows of that length in each pack of the pattern: [E]."""
    entry_base: Int64Array
    """Rows of that length in all earlier patterns: [E]."""

    @property
    def num_packs(self) -> int:
        """Packs of all patterns."""
        return int(self.stops[-1]) if len(self.stops) else 0

    @property
    def fill(self) -> float:
        """Share of all packs' capacity that rows take."""
        return int(self.lengths @ self.counts) / max(1, self.num_packs * self.capacity)

    @property
    def most_rows(self) -> int:
        """Rows of the pack that has most of them."""
        if not len(self.entry_rows):
            return 0
        return int(np.add.reduceat(self.entry_rows, self.entry_starts[:-1]).max())


def plan_packs(lengths: Int64Array, counts: Int64Array, capacity: int, max_rows: int | None = None) -> PackPlan:
    """Return the packs of so many rows of each length.

    Args:
        lengths: Distinct lengths, rising, from 1 to `capacity`: [L].
        counts: Rows of each: [L].
        capacity: Values of a pack at most.
        max_rows: Rows of a pack at most; None: as many as fit.

    Example:
        >>> plan = plan_packs(np.array([2, 3, 5]), np.array([2, 1, 2]), 8)
        >>> plan.num_packs, round(plan.fill, 3)
        (3, 0.708)
    """
    if len(lengths) and not 1 <= lengths[0] <= lengths[-1] <= capacity:
        raise ValueError(f"lengths from {lengths[0]} to {lengths[-1]} are not within 1 to {capacity}")
    groups = list(_filled(lengths.tolist(), counts.tolist(), capacity, max_rows or capacity))
    patterns = [(list(_entries(group.filling)), group.packs) for group in groups]
    return _plan_of(patterns, lengths, counts, capacity)


def divided(plan: PackPlan, num_packs: int) -> PackPlan:
    """Return a plan of more packs for the same rows: some packs, the emptiest ones first, are divided into two.

    Args:
        plan: The plan.
        num_packs: How many packs it shall have: at least as many as it has, and at most one for each row.

    Example:
        >>> plan = plan_packs(np.array([2, 3, 5]), np.array([2, 1, 2]), 8)
        >>> more = divided(plan, 5)
        >>> more.num_packs, more.most_rows
        (5, 1)
    """
    missing = num_packs - plan.num_packs
    if not missing:
        return plan
    bounds = zip(plan.entry_starts[:-1].tolist(), plan.entry_starts[1:].tolist(), strict=True)
    packs, length, rows = np.diff(plan.stops, prepend=0).tolist(), plan.entry_length.tolist(), plan.entry_rows.tolist()
    patterns = [
        (list(zip(length[start:stop], rows[start:stop], strict=True)), number)
        for (start, stop), number in zip(bounds, packs, strict=True)
    ]
    at = len(patterns) - 1
    while missing:
        entries, number = patterns[at]
        if sum(rows_of for _, rows_of in entries) == 1:
            at -= 1
            continue
        some = min(number, missing)
        (first, rows_of_first), *others = entries
        rest = [(first, rows_of_first - 1), *others] if rows_of_first > 1 else others
        patterns[at : at + 1] = [(entries, number - some)] * (number > some) + [([(first, 1)], some), (rest, some)]
        missing -= some
        at = len(patterns) - 1
    return _plan_of(patterns, plan.lengths, plan.counts, plan.capacity)


def _plan_of(
    patterns: Sequence[tuple[Sequence[tuple[int, int]], int]], lengths: Int64Array, counts: Int64Array, capacity: int
) -> PackPlan:
    """Return the plan of patterns: for each its entries (a length, rows of it), and how many packs it has."""
    entries = [of_pattern for of_pattern, _ in patterns]
    flat = np.array([entry for of_pattern in entries for entry in of_pattern], dtype=np.int64).reshape(-1, 2)  # [E, 2]
    packs = np.array([number for _, number in patterns], dtype=np.int64)  # [T]
    sizes = np.array(list(map(len, entries)), dtype=np.int64)  # [T]
    entry_length, entry_rows = flat[:, 0], flat[:, 1]  # [E], [E]
    return PackPlan(
        capacity=capacity,
        lengths=lengths,
        counts=counts,
        stops=np.cumsum(packs),
        entry_starts=np.concatenate(([0], np.cumsum(sizes))),
        entry_length=entry_length,
        entry_rows=entry_rows,
        entry_base=_sums_before(entry_length, entry_rows * np.repeat(packs, sizes)),
    )


def _filled(lengths: list[int], counts: list[int], capacity: int, max_rows: int) -> Iterator[_Group]:
    """Yield the packs, those that are full first."""
    by_room: dict[int, deque[_Group]] = {}
    rooms: list[int] = []  # those with packs, rising

    def put(before: _Filling | None, number: int, rows: int, packs: int, room: int) -> Iterator[_Group]:
        """Put rows of a length into each of some packs, which then have `room` left; yield them if they are full."""
        filling = _Filling(before, number, rows, rows + (before.num_rows if before is not None else 0))
        if room == 0 or filling.num_rows >= max_rows:
            yield _Group(filling, packs)
            return
        if room not in by_room:
            by_room[room] = deque()
            bisect.insort(rooms, room)
        by_room[room].append(_Group(filling, packs))

    for number in range(len(lengths) - 1, -1, -1):
        length, left = lengths[number], counts[number]
        while left:
            at = bisect.bisect_left(rooms, length)
            if at == len(rooms):  # no pack has room: begin new ones
                fit = min(capacity // length, max_rows)
                whole, rest = divmod(left, fit)
                if whole:
                    yield from put(None, number, fit, whole, capacity - fit * length)
                if rest:
                    yield from put(None, number, rest, 1, capacity - rest * length)
                break
            room = rooms[at]
            filling, packs = by_room[room].popleft()
            fit = min(room // length, max_rows - filling.num_rows)
            whole = min(packs, left // fit)
            rest = left - whole * fit if whole < packs else 0  # fewer than a pack takes
            if (untouched := packs - whole - (rest > 0)) > 0:
                by_room[room].appendleft(_Group(filling, untouched))
            elif not by_room[room]:
                del by_room[room]
                rooms.pop(at)
            if whole:
                yield from put(filling, number, fit, whole, room - fit * length)
            if rest:
                yield from put(filling, number, rest, 1, room - rest * length)
            left -= whole * fit + rest
    for room in rooms:
        yield from by_room[room]


def _entries(filling: _Filling) -> Iterator[tuple[int, int]]:
    """Yield the lengths of a pattern, with how many rows it has of each."""
    one: _Filling | None = filling
    while one is not None:
        yield one.length, one.rows
        one = one.before


def _sums_before(keys: Int64Array, values: Int64Array) -> Int64Array:
    """Return for each entry the sum of the values of earlier entries with the same key: [E]."""
    in_turn = np.argsort(keys, kind="stable")  # [E]
    sums = np.cumsum(values[in_turn]) - values[in_turn]  # [E]
    sorted_keys = keys[in_turn]  # [E]
    firsts = np.searchsorted(sorted_keys, sorted_keys)  # [E]
    found = np.empty_like(values)  # [E]
    found[in_turn] = sums - sums[firsts]
    return found
