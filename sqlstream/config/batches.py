"""Which rows share a batch: `Buckets`, and how many of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeAlias

from sqlstream.config.bucket_maps import AspectBuckets, BucketValue, Lengths, VideoBuckets
from sqlstream.config.checks import check_at_least, is_word
from sqlstream.errors import ConfigError

BucketMap: TypeAlias = AspectBuckets | Lengths | VideoBuckets | Callable[[Any], BucketValue]
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
    global_batch_size: int | Mapping[BucketValue, int] | None = None
    """Samples of a batch of the whole job, for every bucket or by bucket: the number of ranks must divide them. They are part
    of the order, so they, or `global_batch_tokens`, have to be given."""
    global_batch_tokens: int | None = None
    """Tokens of a batch of the whole job at most: a bucket's batch has as many samples as fit into it."""
    leftovers: str = "carry"
    """What becomes of rows that fill no batch: `'carry'`: they open the bucket's first batch of a later epoch; `'repeat'`: rows
    of the bucket come twice in the epoch to fill it; `'drop'`: the epoch is without them, other ones in each."""
    sync: str = "step"
    """What has one bucket: `'step'`: the batches of all ranks in a step; `'lane'`: each of as many lanes of a step as
    `rank_multiple` says, which ranks divide: with one lane a rank, ranks have batches of other buckets at the same time. With
    `global_batch_tokens`, so that all lanes cost alike."""
    rank_multiple: int | None = None
    """Batches of `global_batch_tokens` are multiples of it, so that any number of ranks that divides it can take them; with
    `sync='lane'` the lanes of a step. None: the number of ranks at the first start, which states carry."""
    max_crop: float | None = None
    """Leave out pictures of which more than this share would be cut away; None: none. For `AspectBuckets` and
    `VideoBuckets`."""
    unknown: str = "raise"
    """What becomes of rows where a value of `by` is NULL: `'raise'` or `'drop'`."""
    tokens: Callable[[Any], int] | None = None
    """Tokens of a sample of a bucket, for `global_batch_tokens`; None: the patches of 16 x 16 pixels of a
    picture, or of the latent frames of a clip, or the length. For a budget of pixels: `lambda size: size[0] * size[1]`."""

    def __post_init__(self) -> None:
        """Check values."""
        if not isinstance(self.by, str) or not self.by.strip():
            raise ConfigError(f"Buckets: by={self.by!r} is no SQL: give expressions over the row, such as 'width, height'")
        is_map = callable(self.into) or isinstance(self.into, AspectBuckets | Lengths | VideoBuckets)
        if self.into is not None and not is_map:
            raise ConfigError(
                f"Buckets: into={self.into!r} is none of AspectBuckets, Lengths, VideoBuckets, a function from values to a "
                "bucket"
            )
        self._check_sizes()
        if not is_word(self.leftovers, "carry", "repeat", "drop"):
            short = "; a short batch would be of a size that ranks do not divide" if is_word(self.leftovers, "short") else ""
            raise ConfigError(f"Buckets: leftovers={self.leftovers!r} is unknown: give 'carry', 'repeat' or 'drop'{short}")
        if not is_word(self.sync, "step", "lane"):
            raise ConfigError(
                f"Buckets: sync={self.sync!r} is unknown: give 'step', one bucket for all ranks, or 'lane', one for each"
            )
        if self.sync == "lane" and self.global_batch_tokens is None:
            raise ConfigError(
                "Buckets: sync='lane' gives ranks batches of several buckets at a time, and all wait for the slowest: give "
                "global_batch_tokens, the budget of a step, so that they cost alike (tokens=lambda bucket: 1 counts samples)"
            )
        if not is_word(self.unknown, "raise", "drop"):
            raise ConfigError(f"Buckets: unknown={self.unknown!r} is unknown: give 'raise' or 'drop'")
        if self.max_crop is not None:
            if not isinstance(self.into, AspectBuckets | VideoBuckets):
                raise ConfigError(
                    f"Buckets: max_crop={self.max_crop!r} is for pictures: give into=AspectBuckets…, or leave it out"
                )
            object.__setattr__(self, "max_crop", check_at_least("Buckets: max_crop", self.max_crop, 0.0))
            if self.max_crop >= 1:
                raise ConfigError(f"Buckets: max_crop={self.max_crop!r} is out of range: give a share of 0 or more, below 1")

    def _check_sizes(self) -> None:
        """Raise ConfigError if it is not clear how large batches are."""
        size, tokens = self.global_batch_size, self.global_batch_tokens
        if (size is None) == (tokens is None):
            raise ConfigError(
                "Buckets needs global_batch_size, the samples of a batch of all ranks, or global_batch_tokens, their tokens: "
                f"give one of them (they are {size!r} and {tokens!r}), which is part of the order"
            )
        if tokens is not None:
            object.__setattr__(self, "global_batch_tokens", check_at_least("Buckets: global_batch_tokens", tokens, 1))
        elif isinstance(size, Mapping):
            sizes = {
                bucket: check_at_least(f"Buckets: global_batch_size of {bucket!r}", own, 1) for bucket, own in size.items()
            }
            object.__setattr__(self, "global_batch_size", sizes)
        elif size is not None:
            object.__setattr__(self, "global_batch_size", check_at_least("Buckets: global_batch_size", size, 1))
        for name, value in (("rank_multiple", self.rank_multiple), ("tokens", self.tokens)):
            if value is not None and tokens is None:
                raise ConfigError(f"Buckets: {name}= is for a budget: give global_batch_tokens, or leave it out")
        if self.tokens is not None and not callable(self.tokens):
            raise ConfigError(f"Buckets: tokens={self.tokens!r} cannot be called: give a function from a bucket to its tokens")
        if self.rank_multiple is not None:
            object.__setattr__(self, "rank_multiple", check_at_least("Buckets: rank_multiple", self.rank_multiple, 1))

    @property
    def pads(self) -> bool:
        """Samples of a bucket have tensors of several lengths: nothing has scaled them to a size."""
        return not isinstance(self.into, AspectBuckets | VideoBuckets)

    @property
    def follows_ranks(self) -> bool:
        """The sizes of batches, or the lanes of a step, depend on the number of ranks at the first start."""
        return self.global_batch_tokens is not None and self.rank_multiple is None

    def sizes_of(self, buckets: Sequence[BucketValue], num_ranks: int) -> tuple[int, ...]:
        """Return the samples of a global batch of each bucket; those of all lanes of a step, if each had this bucket.

        Args:
            buckets: What names them.
            num_ranks: Ranks of the first start, for budgets without `rank_multiple`.

        Raises:
            ConfigError: A bucket has no size, or no tokens that are known.
        """
        size, budget = self.global_batch_size, self.global_batch_tokens
        if budget is not None:
            return tuple(self._fitting(bucket, budget, self.rank_multiple or num_ranks) for bucket in buckets)
        if not isinstance(size, Mapping):
            assert size is not None, "checked"
            return (size,) * len(buckets)
        if missing := [bucket for bucket in buckets if bucket not in size]:
            raise ConfigError(
                f"Buckets: global_batch_size has no size of {', '.join(map(repr, missing[:4]))}: give one of each of the "
                f"{len(buckets)} buckets"
            )
        return tuple(size[bucket] for bucket in buckets)

    def _fitting(self, bucket: BucketValue, budget: int, multiple: int) -> int:
        """Return how many samples of a bucket fit into a budget: a multiple of the ranks, and at least so many."""
        tokens = self.tokens_of(bucket)
        return max(multiple, budget // tokens // multiple * multiple)

    def tokens_of(self, bucket: BucketValue) -> int:
        """Return the tokens of a sample of a bucket.

        Raises:
            ConfigError: They are not known.
        """
        found: Any
        if self.tokens is not None:
            found = self.tokens(bucket)
        elif isinstance(self.into, AspectBuckets | VideoBuckets):
            found = self.into.tokens_of(bucket)
        else:
            found = bucket if isinstance(bucket, int) else 0
        if isinstance(found, bool) or not isinstance(found, Integral) or found < 1:
            raise ConfigError(
                f"Buckets: the tokens of a sample of bucket {bucket!r} are {found!r}, no whole number of 1 or more: give "
                "tokens=, a function from a bucket to its number, or global_batch_size"
            )
        return int(found)
