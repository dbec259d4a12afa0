"""A table of rows by length, for tests of packs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sqlstream.order import Int64Array


@dataclass(frozen=True, eq=False)
class RowsByLength:
    """Row r is at place r: the first rows are the shortest."""

    lengths: Int64Array
    counts: Int64Array
    digest: str = "table"

    @classmethod
    def of(cls, lengths: list[int]) -> RowsByLength:
        distinct, counts = np.unique(np.array(lengths, np.int64), return_counts=True)  # [L], [L]
        return cls(distinct, counts)

    def rows_at(self, places: Int64Array) -> Int64Array:
        return places.astype(np.int64)

    def lengths_of(self, rows: Int64Array) -> Int64Array:
        return np.repeat(self.lengths, self.counts)[rows]
