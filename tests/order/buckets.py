"""A table of rows by bucket, and weights, for tests of their order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sqlstream.order import Int64Array, WeightsSince


@dataclass(frozen=True)
class Table:
    """Row r is at place r: bucket 0 has the first rows, and so on."""

    sizes: tuple[int, ...]
    digest: str = "table"

    @property
    def values(self) -> tuple[int, ...]:
        return tuple(range(len(self.sizes)))

    def rows_at(self, places: Int64Array) -> Int64Array:
        return places.astype("int64")


class Sums:
    """Weights of the rows of a table, in memory."""

    def __init__(self, weights: list[int]) -> None:
        self._sums = np.cumsum([0, *weights])  # [n + 1]

    def total(self, start: int, stop: int) -> int:
        return int(self._sums[stop] - self._sums[start])

    def places(self, start: int, points: Int64Array) -> Int64Array:
        found: Int64Array = np.searchsorted(self._sums[1:], points + self._sums[start], side="right") - start  # [n]
        return found


@dataclass(frozen=True)
class FixedWeights:
    """Weights that change at known epochs."""

    changes: tuple[WeightsSince, ...]
    version: int = 1
    fingerprint: str = "fixed"

    def since(self) -> tuple[WeightsSince, ...]:
        return self.changes
