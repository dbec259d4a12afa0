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
    """

    length: str
    """SQL expression over the row: how many values it has, such as `'num_tokens'`."""
    capacity: int
    """Values of a pack at most."""
    max_rows: int | None = None
    """Rows of a pack at most; None: as many as fit."""
    on_long: OnLong | str = OnLong.RAISE
    """What becomes of rows that are longer than a pack: `'raise'`, `'drop'`, `'truncate'` or `'split'`."""
    pack_fn: PackFunction | None = None
    """What makes a sample of a pack; None: `sqlstream.transforms.presets.PackTokens()`."""

    def __post_init__(self) -> None:
        """Check values."""
        if not isinstance(self.length, str) or not self.length.strip():
            raise ConfigError(
                f"Packs: length={self.length!r} is no SQL: give an expression over the row, such as 'num_tokens'; rows "
                "without one are measured once by `sqlstream index measure`"
            )
        check_at_least("Packs: capacity", self.capacity, 1)
        if self.max_rows is not None:
            check_at_least("Packs: max_rows", self.max_rows, 1)
        object.__setattr__(self, "on_long", word_of("Packs: on_long", self.on_long, OnLong))
        if self.pack_fn is not None and not callable(self.pack_fn):
            raise ConfigError(f"Packs: pack_fn={self.pack_fn!r} cannot be called: give a function from a pack to a sample")
