"""What becomes of the samples of a damaged shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from sqlstream.config import DamagedShards
from sqlstream.errors import SourceError

Sample = TypeVar("Sample")


def usable(samples: Iterable[Sample], damaged: DamagedShards, note: Callable[[SourceError], None]) -> Iterator[Sample]:
    """Yield the samples of one shard that may be used, and note its damage.

    Of `until_damage`, give samples that are grouped already: the group that the damage ends is never yielded, since parts of it
    may lie behind the damage.

    Args:
        samples: Of one shard; raises SourceError where the shard is damaged.
        damaged: The rule.
        note: Is given the damage, where it is not raised.

    Raises:
        SourceError: The shard is damaged, and the rule is to raise.
    """
    try:
        yield from list(samples) if damaged == DamagedShards.SKIP else samples
    except SourceError as error:
        if damaged == DamagedShards.RAISE:
            raise
        note(error)
