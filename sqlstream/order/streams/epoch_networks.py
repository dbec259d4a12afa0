"""The permutations of several streams, each in the epoch that it was in last: rows of all of them without a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sqlstream.order.order import Order
from sqlstream.order.permute import Int64Array, Networks, Permutation


class _Known(NamedTuple):
    """One value, which another one replaces: threads share it."""

    epochs: Int64Array
    """The epoch of each stream whose permutation is known; -1: none: [S]."""
    num_rounds: Int64Array
    """Rounds of that permutation: [S]."""
    networks: Mapping[int, Networks]
    """The permutations of so many rounds, by stream."""


class EpochNetworks:
    """Rows of streams whose orders are single permutations.

    Args:
        orders: The order of each stream.
    """

    def __init__(self, orders: Sequence[Order]) -> None:
        self._orders = orders
        num_streams = len(orders)
        self._known = _Known(np.full(num_streams, -1), np.zeros(num_streams, np.int64), {})
        self._is_given_up = False
        """A stream had an order that is no single permutation: the others are asked by themselves, too."""

    def rows_at(self, stream: Int64Array, epoch: Int64Array, position: Int64Array) -> Int64Array | None:
        """Return the rows at positions of epochs of streams: [n].

        None if one of them is no single permutation, or one stream is in several epochs here: then ask each by itself.
        """
        if self._is_given_up:
            return None
        known = self._known
        if (known.epochs[stream] != epoch).any():
            known = self._learned(known, stream, epoch)
            if (known.epochs[stream] != epoch).any():
                return None
            self._known = known
        if len(known.networks) == 1:
            return next(iter(known.networks.values())).forward(stream, position)
        rows, num_rounds = np.empty_like(position), known.num_rounds[stream]  # [n], [n]
        for number, networks in known.networks.items():
            here = np.flatnonzero(num_rounds == number)  # [m]
            rows[here] = networks.forward(stream[here], position[here])
        return rows

    def _learned(self, known: _Known, stream: Int64Array, epoch: Int64Array) -> _Known:
        """Return what is known with the permutations of other epochs, as far as there are single ones."""
        epochs, num_rounds, networks = known.epochs.copy(), known.num_rounds.copy(), dict(known.networks)  # [S], [S]
        found: dict[int, dict[int, Permutation]] = {}
        for number, own in dict(zip(stream.tolist(), epoch.tolist(), strict=True)).items():
            if epochs[number] != own:
                permutation = self._orders[number].permutation(own)
                if permutation is None or not permutation.size:
                    self._is_given_up = True
                    return known
                epochs[number], num_rounds[number] = own, len(permutation.keys)
                found.setdefault(len(permutation.keys), {})[number] = permutation
        for number, new in found.items():
            before = networks.get(number) or Networks.of([*new.values()][:1] * len(self._orders))
            networks[number] = before.changed([*new], [*new.values()])
        return _Known(epochs, num_rounds, networks)
