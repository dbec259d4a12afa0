"""Splits of rows by a hash of what names each of them: a row stays in its split, whatever other rows come or go.

    plan_splits({"val": 0.1}) → val: hashes [0, 2^63 / 10), train: the others → a condition in SQL

Of the keys 'a', 'b', … each split gets its share as nearly as chance has it, not to the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sqlstream.errors import ConfigError
from sqlstream.index.file.index import Index
from sqlstream.index.types.models import ROW, quote

REST = "train"
"""The split of the rows that no other one takes."""
_NUM_HASHES = 1 << 63
"""SQL `hash(x, seed)` lies below it."""
_ROUNDING = 1e-9
"""Shares that add up to 1 but for this are meant to: 0.7 + 0.2 + 0.1 is 0.9999999999999999."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A part of all hashes: [start, stop)."""

    name: str
    share: float
    """Its part of all rows, between 0 and 1."""
    start: int
    stop: int

    def condition(self, index: Index, seed: int, engine: str) -> str:
        """Return the SQL condition of the rows in the split, by their key, without one by their number.

        Args:
            index: The rows.
            seed: Another seed makes other splits.
            engine: What runs it. DuckDB's `hash` changes with its version: there MD5 decides, and the splits are others.
        """
        column = next((column for column in index.columns if column.name == index.key_column), None)
        name = ROW if column is None else quote(column.physical)
        if engine == "duckdb":
            value, bounds = f"md5(concat({name}, ':{seed}'))", [f"'{bound * 2:016x}'" for bound in (self.start, self.stop)]
        else:
            value, bounds = f"hash({name}, {seed})", [str(self.start), str(self.stop)]
        parts = [f"{value} >= {bounds[0]}"] * (self.start > 0) + [f"{value} < {bounds[1]}"] * (self.stop < _NUM_HASHES)
        return " AND ".join(parts) or "true"


def plan_splits(shares: Mapping[str, float]) -> tuple[Split, ...]:
    """Return splits of these shares, in their order, and `train` for the rest, if there is one.

    Raises:
        ConfigError: A share is no number between 0 and 1, they add up to more than 1, or `train` is not what is left.

    Example:
        >>> [(split.name, round(split.share, 3)) for split in plan_splits({"val": 0.1, "test": 0.05})]
        [('val', 0.1), ('test', 0.05), ('train', 0.85)]
    """
    if not shares:
        raise ConfigError("split() has no share: give one by its name, such as split(val=0.1)")
    for name, share in shares.items():
        if not name.replace("-", "_").isidentifier():
            raise ConfigError(f"split {name!r} is no name: give letters, digits and '_' ({REST!r} is the rest)")
        if not isinstance(share, int | float | str):  # a float32 of numpy, a Decimal
            raise ConfigError(f"split {name}={share!r} is of the type {type(share).__name__}: give a float, such as 0.1")
        if isinstance(share, bool | str) or not 0 < share <= 1:
            raise ConfigError(f"split {name}={share!r} is out of range: give a share above 0, at most 1")
    total = math.fsum(shares.values())
    if total > 1 + _ROUNDING:
        raise ConfigError(f"splits add up to {total:g}: give 1 at most; the rest is {REST!r}")
    is_whole = total > 1 - _ROUNDING
    if REST in shares and not is_whole:
        raise ConfigError(f"splits add up to {total:g} with {REST!r}, which is the rest: leave {REST}={shares[REST]:g} out")
    sizes = [*shares.items()] if is_whole else [*shares.items(), (REST, 1 - total)]
    planned, start = list[Split](), 0
    for number, (name, share) in enumerate(sizes, start=1):
        ends = math.fsum(share for _, share in sizes[:number])
        stop = _NUM_HASHES if number == len(sizes) else int(ends * _NUM_HASHES)
        planned.append(Split(name=name, share=share, start=start, stop=stop))
        start = stop
    return tuple(planned)
