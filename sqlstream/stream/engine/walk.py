"""The walk along shares: which rows come next, in spans of neighbouring positions, and what is needed behind them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from sqlstream.errors import SourceError
from sqlstream.order import Draws, Int64Array, Order, Partition, is_counted
from sqlstream.stream.engine.recipes import MOST_WITHOUT, Recipes
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.stream.run.shares import MOST_TOGETHER, PLANNED_TOGETHER, EpochShare, planned_together
from sqlstream.world import World

SHUFFLED_TOGETHER = 1024
"""Positions that are asked of a counted order together: its hundred calls of numpy take as long for 1024 as for 64."""


class PlannedSpan(NamedTuple):
    """Neighbouring positions of a share, and their rows."""

    share: EpochShare
    """The share, with the end of its epoch if that has become known."""
    places: Int64Array
    """Places of the positions, counted from the share's start: [n]."""
    positions: Int64Array
    """Positions of the epoch: [n]."""
    draws: Draws


def planned_slots(shares: Iterable[EpochShare], recipes: Recipes, *, has_end: bool = True) -> Iterator[PlannedSample]:
    """Yield the slots of shares, in the order of their positions; what is needed behind them is announced.

    Args:
        shares: The shares.
        recipes: How the samples of each stream are made.
        has_end: There is a last share, and it has an end.

    Raises:
        ConfigError: There is no end, and predownload transforms leave out all rows.
    """
    num_without = 0
    for share in shares:
        place, is_first = share.taken, True
        try:
            for span in walk(share, recipes):
                try:
                    planned = _slots_of(span, recipes)
                except SourceError:
                    for slot in chain.from_iterable(_slots_of(one, recipes) for one in _one_by_one(span)):
                        yield slot
                        place = slot.place + 1
                    continue
                num_without = 0 if planned else num_without + len(span.places)
                if num_without > MOST_WITHOUT and not has_end:
                    recipes.check_given(num_without, share.partition.world)
                if is_first:  # the first samples do not wait for what is asked for ahead of others
                    yield from planned
                if span.places.size:
                    place = int(span.places[-1]) + 1
                    announce(span.share, int(span.places[0]), recipes)
                if not is_first:
                    yield from planned
                is_first = False
        except SourceError as error:  # of a chunk that is read now: the samples before come, then the error
            failed = PlannedSample(share.epoch, -1, -1, {}, {}, recipes[0], error=error, place=place)
            failed.share = share
            yield failed
            return


def _one_by_one(span: PlannedSpan) -> Iterator[PlannedSpan]:
    """Yield the positions of a span one by one."""
    for at in range(len(span.places)):
        some = slice(at, at + 1)
        yield PlannedSpan(span.share, span.places[some], span.positions[some], span.draws.of_positions(at, at + 1))


def _slots_of(span: PlannedSpan, recipes: Recipes) -> list[PlannedSample]:
    """Return the slots of a span, in the order of its positions and of the draws of each."""
    draws, share = span.draws, span.share
    if len(recipes) == 1:
        recipe = recipes[0]
        planned = recipe.slots(recipe.rows.ids_of(draws.row), draws.position.tolist(), draws.epoch.tolist())
    else:
        planned = _of_streams(draws, recipes)
    if draws.part is not None:
        parts = draws.part.tolist()
        for slot in planned:
            slot.part = parts[slot.place]
    places, positions, starts = span.places.tolist(), span.positions.tolist(), draws.starts.tolist()
    if draws.is_one_each:
        for slot in planned:
            slot.share, slot.share_position, slot.place = share, positions[slot.place], places[slot.place]
        return planned
    for slot in planned:
        number = bisect_right(starts, slot.place) - 1
        slot.draw = slot.place - starts[number]
        slot.share, slot.share_position, slot.place = share, positions[number], places[number]
    for slot, following in pairwise(planned):
        slot.is_last = slot.place != following.place
    return planned


def _of_streams(draws: Draws, recipes: Recipes) -> list[PlannedSample]:
    """Return the slots of draws of several streams, in the order of the draws; `place` is the number of the draw."""
    planned: list[PlannedSample] = []
    in_turn = np.argsort(draws.stream, kind="stable")  # [m]
    bounds = np.flatnonzero(np.diff(draws.stream[in_turn], prepend=-1, append=-1)).tolist()
    for start, stop in pairwise(bounds):
        numbers = in_turn[start:stop]  # [draws of a stream]
        recipe, places = recipes[int(draws.stream[numbers[0]])], numbers.tolist()
        row_ids = recipe.rows.ids_of(draws.row[numbers])
        of_stream = recipe.slots(row_ids, draws.position[numbers].tolist(), draws.epoch[numbers].tolist())
        for slot in of_stream:
            slot.place = places[slot.place]
        planned += of_stream
    planned.sort(key=attrgetter("place"))
    return planned


def walk(share: EpochShare, recipes: Recipes) -> Iterator[PlannedSpan]:
    """Yield what is left of a share, some positions at a time (`planned_together`).

    Args:
        share: The share.
        recipes: How the samples of each stream are made.

    Raises:
        QueryError: The filter of a lazy index keeps no row.
    """
    taken = share.taken
    while True:
        # Asked before: another process may find the end of the epoch at any time, and then more positions than are left count.
        was_counted = is_counted(share.order, share.epoch)
        try:
            share = _settled(share, taken, recipes)
        except SourceError:
            if (known := _known_span(share, taken)) is not None:
                yield known
            raise
        if taken >= share.partition.num_samples:
            return
        num_together = SHUFFLED_TOGETHER if was_counted else PLANNED_TOGETHER
        width = planned_together(len(recipes))
        places, positions = share.planned(taken, num_together)
        fingerprint, draws = share.order.fingerprint, share.order.rows_at(share.epoch, positions)
        start = 0
        while start < max(1, len(places)):
            if share.order.fingerprint != fingerprint:  # weights have changed, for positions that are not yielded
                places, positions = share.planned(taken, num_together)
                fingerprint, draws = share.order.fingerprint, share.order.rows_at(share.epoch, positions)
            stop = _end_of_span(draws, start, width)
            yield PlannedSpan(share, places[start:stop], positions[start:stop], draws.of_positions(start, stop))
            start = stop
        taken += num_together


def _end_of_span(draws: Draws, start: int, width: int) -> int:
    """Return the end of the positions from `start` on that are planned together: at most `width`, and few rows of packs."""
    if draws.is_one_each:
        return start + width
    most = int(draws.starts[min(start, len(draws.starts) - 1)]) + MOST_TOGETHER
    return max(start + 1, min(start + width, int(np.searchsorted(draws.starts, most, side="right")) - 1))


def _known_span(share: EpochShare, taken: int) -> PlannedSpan | None:
    """Return the next positions of a share, up to the first whose row is not known; None: that is the first of them."""
    order, epoch = share.order, share.epoch
    places, positions = share.planned(taken)
    num_known = next(
        (at for at, position in enumerate(positions.tolist()) if not _is_known(order, epoch, position)), len(places)
    )
    if not num_known:
        return None
    known = positions[:num_known]
    return PlannedSpan(share, places[:num_known], known, order.rows_at(epoch, known))


def _is_known(order: Order, epoch: int, position: int) -> bool:
    """Return whether a position has a row that is known.

    The end is asked for last: that a position needs nothing may mean that another process has just found the end before it.
    """
    return not order.needs(epoch, position) and position < order.num_positions(epoch)


def _settled(share: EpochShare, taken: int, recipes: Recipes) -> EpochShare:
    """Count until the rows of the next positions of a share, or the end of its epoch, are known."""
    order, partition = share.order, share.partition
    if not is_counted(order, share.epoch):
        last = partition.num_positions - 1
        positions = partition.positions(taken, taken + PLANNED_TOGETHER)
        if positions.size:  # the end of a step, which may be the last one: it takes part of its positions twice
            last = min(last, (int(positions.max()) // partition.step_size + 1) * partition.step_size - 1)
        while needed := order.needs(share.epoch, last):
            for stream, chunks in needed.items():
                rows = recipes[stream].rows
                if chunks.size:
                    rows.count(_own_first(chunks, partition.world))
                else:  # it is drawn, and has no row
                    rows.check_rows()
    num_positions = order.num_positions(share.epoch)
    if not num_positions:
        for stream in range(len(recipes)):
            recipes[stream].rows.check_rows()
    if partition.num_positions == num_positions or not isinstance(partition, Partition):  # others have no end
        return share
    return replace(share, partition=replace(partition, num_positions=num_positions))


def _own_first(chunks: Int64Array, world: World) -> Int64Array:
    """Return the chunks of a window as one process of a node reads them: each begins with others, and helps out from the end.

    Else all fetch and read the same chunk, where one reads and the others wait for it.
    """
    num_processes = world.local_world_size * world.num_workers
    is_own = np.arange(len(chunks)) % num_processes == world.local_rank * world.num_workers + world.worker  # [n]
    return np.concatenate((chunks[is_own], chunks[~is_own][::-1]))


def announce(share: EpochShare, taken: int, recipes: Recipes) -> None:
    """Announce the rows that this process needs behind a place of its share, after those that are fetched ahead."""
    world = share.partition.world
    for stream, recipe in recipes.known():
        source = recipe.rows
        if not source.num_ahead:
            continue
        # One position for each span: together they soon name all chunks of the next window, and none behind it.
        ahead = taken + source.num_ahead // (world.world_size * world.num_workers)
        positions = share.partition.positions(ahead, ahead + 1)
        if not positions.size:
            continue
        needed = share.order.needs(share.epoch, int(positions[0]))
        if stream in needed:
            source.expect_chunks(_own_first(needed[stream], world))
        elif not needed and int(positions[0]) < share.order.num_positions(share.epoch):  # see `_is_known`
            draws = share.order.rows_at(share.epoch, positions)
            source.expect(draws.row[draws.stream == stream])
