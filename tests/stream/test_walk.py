"""The walk over an order whose end becomes known on the way, by this process or by another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from sqlstream.order import Filtered, Int64Array, Order, Shuffled, Steps
from sqlstream.order.packs.windows import Windows
from sqlstream.stream.engine.recipes import Recipes
from sqlstream.stream.engine.walk import announce, walk
from sqlstream.stream.run.shares import EpochShare
from sqlstream.world import World
from tests.order.several import mixed

NUM_CHUNKS, CHUNK_ROWS, WINDOW = 24, 100, 4


@dataclass(slots=True)
class CountedElsewhere:
    """Chunks that this process counts some of, and another process all: before the look of number `at`."""

    at: int
    num_looks: int = 0
    bounds: Int64Array = field(default_factory=lambda: np.arange(NUM_CHUNKS + 1) * CHUNK_ROWS)
    kept: Int64Array = field(default_factory=lambda: np.arange(NUM_CHUNKS) * 31 % 80)
    known: Int64Array = field(default_factory=lambda: np.full(NUM_CHUNKS, -1))

    def sizes(self) -> Int64Array:
        self.num_looks += 1
        return self.kept if self.num_looks > self.at else self.known

    def at_epoch(self, epoch: int) -> None:
        pass


class Rows:
    """The rows of a stream, as far as the walk asks for them."""

    num_ahead = 60

    def __init__(self, chunks: CountedElsewhere) -> None:
        self._chunks = chunks
        self.num_expected = 0
        self.first_counted: list[int] = []

    def count(self, chunks: Int64Array) -> None:
        self.first_counted = self.first_counted or chunks.tolist()
        self._chunks.known = self._chunks.known.copy()
        self._chunks.known[chunks] = self._chunks.kept[chunks]

    def expect(self, rows: Int64Array) -> None:
        self.num_expected += len(rows)

    def expect_chunks(self, chunks: Int64Array) -> None:
        self.num_expected += len(chunks)

    def check_rows(self) -> None:
        raise AssertionError("there are rows")


@dataclass(frozen=True, slots=True)
class Recipe:
    rows: Rows


ORDERS: dict[str, Callable[[Order], Order]] = {
    "rows": lambda order: order,
    "windows of packs": lambda order: Windows(order=order, size=5),
    "a mixture": lambda order: mixed([order, Shuffled(num_rows=50, seed=5)], (2, 1), 3 * NUM_CHUNKS * CHUNK_ROWS),
}


def share_of(chunks: CountedElsewhere, world: World, kind: str) -> EpochShare:
    """What a process takes in an epoch."""
    steps = Steps(order=ORDERS[kind](Filtered(chunks=chunks, window=WINDOW, seed=3)), batch_size=8)
    return EpochShare(epoch=2, steps=steps, partition=steps.partition(2, world), fingerprint=steps.order.fingerprint)


def walked(chunks: CountedElsewhere, world: World, kind: str) -> list[int]:
    """The rows that a process takes in an epoch, while it announces what is behind them."""
    share = share_of(chunks, world, kind)
    recipe = Recipe(Rows(chunks))
    recipes = Recipes([lambda: cast("Any", recipe)] * (2 if kind == "a mixture" else 1))
    assert recipes[0].rows.num_ahead
    rows: list[int] = []
    for span in walk(share, recipes):
        rows += span.draws.row.tolist()
        if span.places.size:
            announce(span.share, int(span.places[0]), recipes)
    assert recipe.rows.num_expected
    return rows


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("kind", ORDERS)
def test_an_end_that_another_process_finds_at_any_moment_changes_no_row(kind: str, num_workers: int) -> None:
    worlds = [World(num_workers=num_workers, worker=worker) for worker in range(num_workers)]
    for world in worlds:
        expected = walked(CountedElsewhere(at=0), world, kind)
        alone = CountedElsewhere(at=1 << 30)
        assert walked(alone, world, kind) == expected
        for at in range(alone.num_looks):
            assert walked(CountedElsewhere(at=at), world, kind) == expected, at


def test_the_processes_of_a_node_begin_a_window_with_chunks_of_their_own() -> None:
    worlds = [
        World(rank=rank, local_rank=rank, world_size=2, local_world_size=2, num_workers=2, worker=worker)
        for rank in range(2)
        for worker in range(2)
    ]
    found = []
    for world in worlds:
        chunks = CountedElsewhere(at=1 << 30)
        recipe = Recipe(Rows(chunks))
        next(walk(share_of(chunks, world, "rows"), Recipes([lambda: cast("Any", recipe)])))  # noqa: B023 - within the turn
        found.append(recipe.rows.first_counted)
    assert len({some[0] for some in found}) == len(worlds) == WINDOW
    assert {tuple(sorted(some)) for some in found} == {tuple(sorted(found[0]))}
