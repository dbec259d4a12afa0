"""A table of rows by bucket, for tests of their order."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.order import Int64Array


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
