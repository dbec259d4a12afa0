"""Rows that share a sample: `Packs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from sqlstream.config.checks import check_at_least, word_of
from sqlstream.errors import ConfigError

PackFunction: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""From a pack (`parts`: the samples of its rows) to the sample that it becomes."""
LengthFunction: TypeAlias = Callable[[dict[str, Any]], int]
"""From the sample of a row, after its transforms, to how many values it has."""
DEFAULT_LOOKAHEAD = 256
"""Rows that are packed together where the index has no lengths: as many as are planned ahead, and 97 to 99 % full packs."""


class OnLong(StrEnum):
    """What becomes of a row that is longer than a pack."""

    RAISE = "raise"
    """It is an error when the dataset is made."""
    DROP = "drop"
    """It is left out."""
    TRUNCATE = "truncate"
    """Its first values, as many as the capacity, are taken."""
    SPLIT = "split"
    """It comes in several parts, all but the last one of which fill a pack each."""


@dataclass(frozen=True, slots=True)
class Packs:
    """Rows in packs of at most `capacity` values, each row once an epoch (docs/batches.md).

    Example:
        >>> Packs("num_tokens", capacity=8192).on_long
        <OnLong.RAISE: 'raise'>
        >>> Packs(lambda sample: len(sample["input_ids"]), capacity=8192).is_planned
        False
    """

    length: str | LengthFunction | None
    """How many values a row has: SQL over the row, such as `'num_tokens'`. Where the index does not know it: a function of the
    sample after its transforms; None: the values of the sequence that `PackTokens` takes. Packs are then made on the way."""
    capacity: int
    """Values of a pack at most."""
    max_rows: int | None = None
    """Rows of a pack at most; None: as many as fit."""
    on_long: OnLong | str = OnLong.RAISE
    """What becomes of rows that are longer than a pack: `'raise'`, `'drop'`, `'truncate'` or `'split'`."""
    pack_fn: PackFunction | None = None
    """What makes a sample of a pack; None: `sqlstream.transforms.presets.PackTokens()`."""
    lookahead: int | None = None
    """Rows that are packed among themselves where the index has no lengths; None: 256."""

    def __post_init__(self) -> None:
        """Check values."""
        is_sql = isinstance(self.length, str) and self.length.strip()
        if not is_sql and self.length is not None and not callable(self.length):
            raise ConfigError(
                f"Packs: length={self.length!r} is no SQL and no function: give an expression over the row, such as "
                "'num_tokens', which `sqlstream index measure` makes once where rows have none, or a function from the sample "
                "of a row to its length"
            )
        if self.lookahead is not None:
            object.__setattr__(self, "lookahead", check_at_least("Packs: lookahead", self.lookahead, 1))
            if is_sql:
                raise ConfigError(
                    f"Packs: lookahead={self.lookahead} with length={self.length!r}: packs of lengths in SQL are planned over "
                    "all rows; leave lookahead out"
                )
        object.__setattr__(self, "capacity", check_at_least("Packs: capacity", self.capacity, 1))
        if self.max_rows is not None:
            object.__setattr__(self, "max_rows", check_at_least("Packs: max_rows", self.max_rows, 1))
        object.__setattr__(self, "on_long", word_of("Packs: on_long", self.on_long, OnLong))
        if self.pack_fn is not None and not callable(self.pack_fn):
            raise ConfigError(f"Packs: pack_fn={self.pack_fn!r} cannot be called: give a function from a pack to a sample")
        if self.length is None and self.pack_fn is not None and not hasattr(self.pack_fn, "length_of"):
            raise ConfigError(
                f"Packs: length=None with pack_fn={self.pack_fn!r}, which does not say how long a row is: give length=, SQL "
                "over the row, or a function from the sample of a row to its length"
            )

    @property
    def is_planned(self) -> bool:
        """The index knows the lengths: which rows share a pack follows from all of them, before any row is made."""
        return isinstance(self.length, str)

    @property
    def window_rows(self) -> int:
        """Rows that are packed among themselves where packs are not planned."""
        return self.lookahead or DEFAULT_LOOKAHEAD
