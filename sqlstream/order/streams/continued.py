"""An order in epochs of another size: each goes on where the one before has ended, over the order's own epochs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order.order import Draws, Order, check_positions
from sqlstream.order.permute import Int64Array
from sqlstream.order.streams.stream_rows import StreamRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The positions of an order, counted over all of its epochs, so many in each epoch here.

    What seeds the generators of a row is what its order says: number and position of its own epoch.
    """

    order: Order
    epoch_size: int
    """Positions of an epoch."""
    num_parts: int = 1
    """Canonical nodes: position p takes the next one of part p mod C."""
    _rows: StreamRows = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the size."""
        check_at_least("epoch_size", self.epoch_size, 1)
        if self.epoch_size % self.num_parts:
            down, up = (
                self.epoch_size // self.num_parts * self.num_parts,
                -(-self.epoch_size // self.num_parts) * self.num_parts,
            )
            raise ConfigError(
                f"epoch_size={self.epoch_size} is no multiple of num_canonical_nodes={self.num_parts}: give {down or up} or "
                f"{up}"
            )
        object.__setattr__(self, "_rows", StreamRows((self.order,)))

    @property
    def fingerprint(self) -> str:
        """A text for the order and the size."""
        return f"epochs of {self.epoch_size}, {self.num_parts} parts, of {self.order.fingerprint}"

    def num_positions(self, epoch: int) -> int:  # noqa: ARG002 - every epoch is the same
        """Return the positions of an epoch."""
        return self.epoch_size

    def rows_at(self, epoch: int, positions: Int64Array) -> Draws:
        """Return the rows at `positions`."""
        check_positions(positions, self.epoch_size)
        return self._rows.rows_of(*self._draws_at(epoch, positions), self.num_parts)

    def positions_of(self, epoch: int, rows: Int64Array) -> None:  # noqa: ARG002 - the same for all
        """Return None: a row may come twice in an epoch, or not at all."""
        return

    def permutation(self, epoch: int) -> None:  # noqa: ARG002 - the same for all
        """Return None: an epoch may have parts of several."""
        return

    def replacements(self, epoch: int, position: int, draw: int = 0) -> Iterator[int]:
        """Yield rows to try instead of a failed one, as the order has them."""
        stream, number, part = self._draws_at(epoch, np.array([position], dtype=np.int64))
        return self._rows.replacements(stream, number, draw, part, self.num_parts)

    def needs(self, epoch: int, position: int) -> Mapping[int, Int64Array]:  # noqa: ARG002 - all is known
        """Return no chunks."""
        return {}

    def _draws_at(self, epoch: int, positions: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the stream of positions, which is the only one, their draws within their parts, and these: [n], [n], [n]."""
        index, part = np.divmod(positions, self.num_parts)
        return np.zeros_like(positions), epoch * (self.epoch_size // self.num_parts) + index, part
