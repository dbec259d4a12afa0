"""What every order promises, however it is composed."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from sqlstream.order import (
    MAX_REPLACEMENTS,
    BlockLayout,
    Blocks,
    Bucketed,
    Continued,
    Draws,
    Filtered,
    Mixed,
    Order,
    Shuffled,
    Steps,
    Weighted,
    WeightsFrom,
    is_counted,
)
from sqlstream.order.weights import WeightedRows
from sqlstream.world import World
from tests.order.buckets import Table
from tests.order.several import NUM_ROWS, Counted, Packed, mixed


@dataclass
class Weighing:
    """Weights, by the epoch and position from which they hold."""

    changes: dict[tuple[int, int], WeightedRows | None]

    @property
    def fingerprint(self) -> str:
        return str(sorted(self.changes))

    def of_epoch(self, epoch: int) -> Sequence[WeightsFrom]:
        before = [rows for (since, _), rows in sorted(self.changes.items()) if since < epoch]
        here = [WeightsFrom(position, rows) for (since, position), rows in sorted(self.changes.items()) if since == epoch]
        return here if here and here[0].position == 0 else [WeightsFrom(0, before[-1] if before else None), *here]


def weights(sums: Sequence[int]) -> WeightedRows:
    return WeightedRows(num_rows=len(sums), num_positions=NUM_ROWS, cumulative=np.array(sums))


SHUFFLED = Shuffled(num_rows=NUM_ROWS, seed=3)
ORDERS: dict[str, Order] = {
    "as written": Shuffled(num_rows=NUM_ROWS, seed=None),
    "shuffled": SHUFFLED,
    "parts": Shuffled(num_rows=NUM_ROWS, seed=3, num_canonical_nodes=4),
    "blocks": Blocks(layout=BlockLayout.of_size(7, num_rows=NUM_ROWS, window=3), seed=3),
    "parts of blocks": Blocks(layout=BlockLayout.of_size(7, num_rows=NUM_ROWS, window=3), seed=3, num_canonical_nodes=2),
    "without weights": Weighted(order=SHUFFLED, weights=Weighing({}), seed=3),
    "weights": Weighted(order=SHUFFLED, weights=Weighing({(0, 0): weights([1, 1, 5, 9])}), seed=3),
    "filtered": Filtered(chunks=Counted(np.array([4, 0, 10, 1, 9, 3])), window=2, seed=3),
    "buckets": Bucketed(rows=Table((30, 23, 7)), batch_size=5, seed=3),
    "continued": Continued(order=SHUFFLED, epoch_size=90),
    "parts, continued": Continued(order=Shuffled(num_rows=NUM_ROWS, seed=3, num_canonical_nodes=2), epoch_size=90, num_parts=2),
    "mixed": mixed([SHUFFLED, Shuffled(num_rows=7, seed=5)], (2, 1), 180),
    "mixed batches": mixed([SHUFFLED, Shuffled(num_rows=7, seed=5)], (2, 1), 180, turn_size=4),
    "parts of a mixture": mixed(
        [Shuffled(num_rows=rows, seed=5, num_canonical_nodes=2) for rows in (NUM_ROWS, 7)],
        (2, 1),
        180,
        turn_size=4,
        num_parts=2,
    ),
}
UNIQUE = ("as written", "shuffled", "parts", "blocks", "parts of blocks", "without weights")


@pytest.fixture(params=ORDERS)
def order(request: pytest.FixtureRequest) -> Order:
    return ORDERS[request.param]


def rows_of(order: Order, epoch: int) -> list[int]:
    found: list[int] = order.rows_at(epoch, np.arange(order.num_positions(epoch))).row.tolist()
    return found


def test_draws_name_stream_epoch_and_position_that_seed_the_generators(order: Order) -> None:
    positions = np.array([5, 2, 2])
    draws = order.rows_at(7, positions)
    assert draws.starts.tolist() == [0, 1, 2, 3]
    assert draws.is_one_each
    if not isinstance(order, Mixed | Bucketed | Continued):  # streams, and buckets, count epochs of their own
        assert (draws.stream.tolist(), draws.epoch.tolist()) == ([0] * 3, [7] * 3)
        assert draws.position.tolist() == positions.tolist()
    assert draws.row[1] == draws.row[2]


def test_draws_cannot_be_written_to_and_leave_the_positions_that_were_given_alone(order: Order) -> None:
    positions = np.arange(4)
    draws = order.rows_at(0, positions)
    arrays = [array for field in fields(Draws) if (array := getattr(draws, field.name)) is not None]  # `part` is that of packs
    assert not any(array.flags.writeable for array in arrays)
    assert positions.flags.writeable


def test_any_positions_give_what_they_give_in_the_whole_epoch(order: Order) -> None:
    for epoch in (0, 3):
        whole, some = rows_of(order, epoch), np.array([11, 0, 26])
        assert order.rows_at(epoch, some).row.tolist() == [whole[position] for position in some.tolist()]
        with pytest.raises(IndexError):
            order.rows_at(epoch, np.array([order.num_positions(epoch)]))


def test_a_worker_that_gets_it_pickled_has_the_same_order(order: Order) -> None:
    sent: Order = pickle.loads(pickle.dumps(order))
    assert rows_of(sent, 2) == rows_of(order, 2)
    assert sent.fingerprint == order.fingerprint


@pytest.mark.parametrize("name", ["shuffled", "parts", "blocks", "parts of blocks", "filtered", "buckets"])
def test_another_seed_gives_another_order_with_another_fingerprint(name: str) -> None:
    order: Any = ORDERS[name]
    other = replace(order, seed=4)
    assert rows_of(other, 0) != rows_of(order, 0)
    assert other.fingerprint != order.fingerprint


@pytest.mark.parametrize("name", ORDERS)
def test_rows_have_positions_only_where_each_comes_once(name: str) -> None:
    order = ORDERS[name]
    rows = order.rows_at(1, np.arange(order.num_positions(1))).row
    positions = order.positions_of(1, rows)
    assert (positions is not None) == (name in UNIQUE)
    if positions is not None:
        assert positions.tolist() == list(range(NUM_ROWS))


def test_replacements_are_other_rows_each_once(order: Order) -> None:
    for position in range(order.num_positions(2)):
        others = list(order.replacements(2, position))
        assert others == list(order.replacements(2, position))
        assert int(order.rows_at(2, np.array([position])).row[0]) not in others
        assert len(others) <= MAX_REPLACEMENTS
        assert set(others) <= set(rows_of(order, 2))


def test_a_pack_has_the_draws_of_its_rows() -> None:
    packed = Packed(order=SHUFFLED)
    draws = packed.rows_at(1, np.array([4, 0]))
    assert draws.starts.tolist() == [0, 2, 4]
    assert draws.position.tolist() == [8, 9, 0, 1]
    assert draws.row.tolist() == SHUFFLED.rows_at(1, np.array([8, 9, 0, 1])).row.tolist()
    assert list(packed.replacements(1, 4, 1)) == list(SHUFFLED.replacements(1, 9))


def test_what_is_counted_needs_no_chunks(order: Order) -> None:
    assert is_counted(order, 0)
    assert not order.needs(0, 0)


def test_a_filter_names_the_chunks_that_must_be_counted_and_never_changes_what_it_has_said() -> None:
    kept = np.array([4, 0, 10, 1, 9, 3])
    whole = rows_of(ORDERS["filtered"], 5)
    chunks = Counted(np.full(6, -1))
    order = Filtered(chunks=chunks, window=2, seed=3)
    known = 0
    while needed := order.needs(5, NUM_ROWS - 1):
        assert not is_counted(order, 5)
        assert order.num_positions(5) == NUM_ROWS, "a bound"
        with pytest.raises(IndexError):
            order.rows_at(5, np.array([known]))
        assert list(needed) == [0]
        assert len(needed[0]) == 2, "a window"
        chunks.kept = chunks.kept.copy()
        chunks.kept[needed[0]] = kept[needed[0]]
        known += int(kept[needed[0]].sum())
        assert not order.needs(5, known - 1)
        assert order.rows_at(5, np.arange(known)).row.tolist() == whole[:known]
    assert is_counted(order, 5)
    assert order.num_positions(5) == known == 27
    assert rows_of(order, 5) == whole


def test_weights_that_change_within_an_epoch_hold_from_their_position_on() -> None:
    first, second = weights([9, 10]), weights([1, 10])
    weighing = Weighing({(0, 0): first})
    order = Weighted(order=SHUFFLED, weights=weighing, seed=3)
    before, fingerprint = rows_of(order, 1), order.fingerprint
    weighing.changes[1, 20] = second
    assert order.fingerprint != fingerprint
    assert rows_of(order, 1)[:20] == before[:20]
    assert rows_of(order, 1)[20:] == rows_of(replace(order, weights=Weighing({(0, 0): second})), 1)[20:] != before[20:]
    weighing.changes[2, 0] = None
    assert rows_of(order, 2) == rows_of(SHUFFLED, 2)
    assert order.positions_of(2, np.array([4])) is not None
    assert order.positions_of(1, np.array([4])) is None


def test_draws_of_some_positions_keep_all_draws_of_each() -> None:
    row = np.arange(10, 16)
    draws = Draws(starts=np.array([0, 2, 3, 6]), stream=row % 2, epoch=row, position=row, row=row)
    assert not draws.is_one_each
    some = draws.of_positions(1, 9)
    assert (some.starts.tolist(), some.row.tolist()) == ([0, 1, 4], [12, 13, 14, 15])
    assert draws.of_positions(0, 1).row.tolist() == [10, 11]
    assert draws.of_positions(3, 4).starts.tolist() == [0]


def test_steps_take_the_number_of_positions_from_the_order() -> None:
    chunks = Counted(np.array([4, 0, 10, -1, 9, 3]))
    steps = Steps(order=Filtered(chunks=chunks, window=2, seed=3), batch_size=4)
    assert steps.partition(0, World()).num_positions == NUM_ROWS
    chunks.kept = np.array([4, 0, 10, 1, 9, 3])
    assert steps.partition(0, World()).num_positions == 27
