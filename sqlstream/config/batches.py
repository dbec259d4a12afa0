"""Which rows share a batch: `Buckets`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlstream.config.bucket_maps import AspectBuckets, BucketValue, Lengths
from sqlstream.config.checks import check_at_least
from sqlstream.errors import ConfigError

BucketMap: TypeAlias = AspectBuckets | Lengths | Callable[[Any], BucketValue]
"""From the value, or the tuple of values, of `by` to a bucket."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Rows in global batches of one bucket each (docs/batches.md).

    Example:
        >>> Buckets("width, height", into=AspectBuckets.sdxl(), global_batch_size=64, max_crop=0.25).leftovers
        'carry'
    """

    by: str
    """SQL expressions over the row, such as `'width, height'`."""
    into: BucketMap | None = None
    """From their values to a bucket; None: each value is one."""
    global_batch_size: int | None = None
    """Samples of a batch of the whole job, for every bucket: the number of ranks must divide it. It is part of the order, so it
    has to be given."""
    leftovers: str = "carry"
    """What becomes of rows that fill no batch: `'carry'`: they open the bucket's first batch of a later epoch."""
    max_crop: float | None = None
    """Leave out pictures of which more than this share would be cut away; None: none. For `AspectBuckets`."""
    unknown: str = "raise"
    """What becomes of rows where a value of `by` is NULL: `'raise'` or `'drop'`."""

    def __post_init__(self) -> None:
        """Check values."""
        if not isinstance(self.by, str) or not self.by.strip():
            raise ConfigError(f"Buckets: by={self.by!r} is no SQL: give expressions over the row, such as 'width, height'")
        if self.into is not None and not callable(self.into) and not isinstance(self.into, AspectBuckets | Lengths):
            raise ConfigError(
                f"Buckets: into={self.into!r} is none of AspectBuckets, Lengths, a function from values to a bucket"
            )
        if self.global_batch_size is None:
            raise ConfigError(
                "Buckets needs global_batch_size: the samples of a batch of all ranks, which is part of the order"
            )
        check_at_least("Buckets: global_batch_size", self.global_batch_size, 1)
        if self.leftovers != "carry":
            raise ConfigError(f"Buckets: leftovers={self.leftovers!r} cannot be had yet: leave it out, which is 'carry'")
        if self.unknown not in ("raise", "drop"):
            raise ConfigError(f"Buckets: unknown={self.unknown!r} is unknown: give 'raise' or 'drop'")
        if self.max_crop is not None:
            if not isinstance(self.into, AspectBuckets):
                raise ConfigError(
                    f"Buckets: max_crop={self.max_crop!r} is for pictures: give into=AspectBuckets…, or leave it out"
                )
            if not isinstance(self.max_crop, int | float) or not 0 <= self.max_crop < 1:
                raise ConfigError(f"Buckets: max_crop={self.max_crop!r} is out of range: give a share of 0 or more, below 1")

    @property
    def size(self) -> int:
        """Samples of a batch of the whole job."""
        assert self.global_batch_size is not None, "checked"
        return self.global_batch_size
