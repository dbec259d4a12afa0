"""Rows of several streams, looked up together, are those of each stream by itself."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from sqlstream.order import Shuffled
from sqlstream.order.order import Order
from sqlstream.order.permute import Int64Array
from sqlstream.order.streams.epoch_networks import EpochNetworks

SIZES = (70_000, 100_003, 40, 1 << 20)


def apart(orders: list[Order], stream: Int64Array, epoch: Int64Array, position: Int64Array) -> list[int]:
    places = zip(stream.tolist(), epoch.tolist(), position.tolist(), strict=True)
    return [int(orders[s].rows_at(e, np.array([p])).row[0]) for s, e, p in places]


def test_rows_of_streams_together_are_those_of_each_by_itself_as_their_epochs_go_on() -> None:
    orders: list[Order] = [Shuffled(num_rows=size, seed=seed) for seed, size in enumerate(SIZES)]
    networks, rng = EpochNetworks(orders), np.random.default_rng(3)
    for _ in range(8):
        stream = rng.integers(0, len(SIZES), 64)  # [n]
        epoch = rng.integers(0, 3, len(SIZES))[stream]  # [n]
        position = rng.integers(0, np.array(SIZES)[stream])  # [n]
        rows = networks.rows_at(stream, epoch, position)
        assert rows is not None
        expected = apart(orders, stream, epoch, position)
        assert rows.tolist() == expected
    again = pickle.loads(pickle.dumps(networks)).rows_at(stream, epoch, position)
    assert again is not None
    assert again.tolist() == expected


@pytest.mark.parametrize(
    "other",
    [Shuffled(num_rows=70_000, seed=None), Shuffled(num_rows=70_000, seed=7, num_canonical_nodes=2)],
    ids=["as written", "by parts"],
)
def test_streams_with_one_that_is_no_permutation_are_asked_by_themselves(other: Order) -> None:
    networks = EpochNetworks([Shuffled(num_rows=70_000, seed=1), other])
    zeros = np.zeros(2, np.int64)  # [n]
    assert networks.rows_at(np.array([0, 1]), zeros, zeros) is None
    assert networks.rows_at(zeros, zeros, zeros) is None


def test_one_stream_in_two_epochs_is_asked_by_itself() -> None:
    networks = EpochNetworks([Shuffled(num_rows=70_000, seed=1)])
    assert networks.rows_at(np.zeros(2, np.int64), np.array([0, 1]), np.array([69_999, 0])) is None
