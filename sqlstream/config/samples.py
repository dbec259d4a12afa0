"""How rows become samples, and what becomes of failures."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sqlstream.config.checks import check_at_least, flag_of, word_of
from sqlstream.errors import ConfigError


class OnCacheError(StrEnum):
    """What becomes of a step whose cache is broken (not: full)."""

    RAISE = "raise"
    BYPASS = "bypass"
    """Objects are read past the cache, to private files that live as long as they are needed."""


def cache_error_policy(value: OnCacheError | str) -> OnCacheError:
    """Return what `on_cache_error` says.

    Raises:
        ConfigError: An unknown word.
    """
    return word_of("on_cache_error", value, OnCacheError)


class OnError(StrEnum):
    """What becomes of a sample that fails."""

    REPLACE = "replace"
    """Another row stands in, chosen by (seed, epoch, position): all ranks keep their number of steps."""
    RAISE = "raise"
    SKIP = "skip"
    """It is left out: ranks may then make different numbers of steps."""


class ShardUnit(StrEnum):
    """What of a shard is fetched, and kept in the cache."""

    AUTO = "auto"
    """Whichever suits index, order and limit."""
    MEMBERS = "members"
    """The parts that samples want."""
    WHOLE = "whole"
    """The whole shard, whichever of its samples are wanted."""


class MemberForm(StrEnum):
    """What samples have of a part of a shard."""

    BYTES = "bytes"
    """Its content."""
    PATH = "path"
    """The path of a local file with its content, under its extension."""


DEFAULT_RETAINED = 192
"""Samples of a DataLoader worker of which nothing is known: (prefetch_factor 2 + 1) × a batch of 64."""
DEFAULT_PREFETCH = 256
"""Two samples for each thread that a helper has at most: one half of them is under way while the other half is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """How rows become samples."""

    columns_to_download: tuple[str, ...] = ()
    """Columns whose values are URLs or paths; in the sample they hold local paths."""
    content_columns: tuple[str, ...] | None = None
    """Columns of content in Parquet files that samples get; None: all of them."""
    shards: ShardUnit | str = ShardUnit.AUTO
    """What of shards is fetched."""
    members: MemberForm | str = MemberForm.BYTES
    """What samples have of parts of shards."""
    allow_missing_columns: bool = False
    """True: a row without a value in a downloaded column has None there; False: it fails."""
    allowed_roots: tuple[str, ...] = ()
    """Local directories and URL prefixes that a remote index may name, beside objects on servers."""
    none_to_empty_str: bool = False
    """True: a missing value in a text column reads as ''."""
    data_type: str | None = None
    """Put into each sample as `__data_type__` when given."""
    on_error: OnError | str = OnError.REPLACE
    max_failure_ratio: float = 0.1
    """More failed samples than this stop the run; one in ten is no accident any more."""
    prefetch: int = DEFAULT_PREFETCH
    """Samples planned ahead of the one being yielded."""
    prefetch_bytes: int = 1 << 30
    """Bytes acquired ahead, as far as sizes are known; arbitrary, twice what downloads have under way at most."""
    retained_samples: int | None = None
    """Paths of so many yielded samples stay valid in a DataLoader worker; None: of those that its loader has under way."""
    retained_accesses: int = 64
    """Paths of so many samples of random access stay valid."""
    num_random_access_retries: int = 5
    """Tries of `dataset[i]` after the first one, when storage fails; 5 as in `sds`."""
    print_exceptions: bool = False
    """Log each failed sample as a warning, not only the first one."""
    print_traceback: bool = False
    """Log its traceback, too."""
    seed_transforms: bool = True
    """Seed python's, numpy's and torch's global generators by (seed, epoch, position) while a sample's transforms run."""
    takes_new_parts: bool = False
    """Samples of a lazy index of shards have parts that are none of its columns."""

    def __post_init__(self) -> None:
        """Check words, flags and ranges."""
        for name in ("allow_missing_columns", "none_to_empty_str", "print_exceptions", "print_traceback", "seed_transforms"):
            object.__setattr__(self, name, flag_of(name, getattr(self, name)))
        for name, least in (
            ("prefetch", 1),
            ("prefetch_bytes", 1),
            ("num_random_access_retries", 0),
            ("max_failure_ratio", 0.0),
        ):
            object.__setattr__(self, name, check_at_least(name, getattr(self, name), least))
        if self.max_failure_ratio > 1:
            raise ConfigError(f"max_failure_ratio={self.max_failure_ratio} is out of range: give a share from 0 to 1")
        if self.retained_samples is not None:
            object.__setattr__(self, "retained_samples", check_at_least("retained_samples", self.retained_samples, 1))
        object.__setattr__(self, "on_error", word_of("on_error", self.on_error, OnError))
        object.__setattr__(self, "shards", word_of("shards", self.shards, ShardUnit))
        object.__setattr__(self, "members", word_of("members", self.members, MemberForm))
        if self.members is MemberForm.PATH:
            if self.shards is ShardUnit.WHOLE:
                raise ConfigError("members='path' fetches each part as a file, and shards='whole' none: leave one of them out")
            object.__setattr__(self, "shards", ShardUnit.MEMBERS)
