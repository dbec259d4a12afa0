"""How many reads hit: by naive simulations, and through a real ledger with its files."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.order import Plan
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.session import Session

OBJECT_BYTES = 4096
WINDOW = 16
"""Objects acquired at a time, as the engine does with half of its prefetch window."""


def lru_hits(order: Sequence[int], capacity: int) -> int:
    """How many reads of `order` an exact LRU cache of `capacity` objects answers."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in order:
        hits += row in cached
        cached[row] = None
        cached.move_to_end(row)
        if len(cached) > capacity:
            cached.popitem(last=False)
    return hits


def belady_hits(order: Sequence[int], capacity: int) -> int:
    """The same of a cache that knows the future: what is needed again latest goes; what is read now must stay."""
    next_uses = next_uses_of(order)
    cached: dict[int, float] = {}
    hits = 0
    for place, row in enumerate(order):
        hits += row in cached
        if row not in cached and len(cached) == capacity:
            del cached[max(cached, key=cached.__getitem__)]
        cached[row] = place + (next_uses[place] or float("inf"))
    return hits


def next_uses_of(order: Sequence[int]) -> list[int | None]:
    """After how many further reads each one's row is read again; None: never."""
    distances: list[int | None] = [None] * len(order)
    for _, places in groupby(sorted(range(len(order)), key=lambda place: (order[place], place)), key=order.__getitem__):
        ordered = list(places)
        for place, following in pairwise(ordered):
            distances[place] = following - place
    return distances


def epochs(num_rows: int, num_epochs: int, seed: int = 3) -> list[int]:
    """The rows of shuffled epochs, one after the other."""
    plan = Plan(num_samples=num_rows, seed=seed, batch_size=None)
    return [row for epoch in range(num_epochs) for row in plan.rows(epoch, 0, num_rows).tolist()]


def ledger_hits(
    directory: Path,
    order: Sequence[int],
    capacity: int,
    policy: str,
    window: int = WINDOW,
    *,
    has_forecast: bool = True,
    for_reading: bool = False,
) -> int:
    """The same of a real cache: its ledger, its files, windows of objects acquired together, all held until they are read."""
    distances = next_uses_of(order) if has_forecast else [None] * len(order)
    urls = [f"http://nowhere/{row}" for row in order]
    reads = [(ObjectRef.of(url, size_bytes=OBJECT_BYTES), distance) for url, distance in zip(urls, distances, strict=True)]
    with Cache(directory, limit=capacity * OBJECT_BYTES, eviction_policy=policy) as cache:
        cache.fetcher = fetcher = ScriptedFetcher(dict.fromkeys(urls, bytes(OBJECT_BYTES)))
        session = Session(cache)
        for start in range(0, len(order), window):
            todo = reads[start : start + window]
            while todo:
                groups, next_uses = [[ref] for ref, _ in todo], [next_use for _, next_use in todo]
                holds = session.acquire(groups, next_uses, for_reading=for_reading)
                holds = holds or [session.acquire_one(groups[0], next_uses[0])]
                again = []
                for read, hold in zip(todo, holds, strict=False):
                    session.wait(hold)
                    if not session.claim(hold):
                        again.append(read)
                    session.release(hold)
                todo = [*again, *todo[len(holds) :]]
    return len(order) - fetcher.num_gets.total()
