"""The samples of a shard that lie before its damage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from sqlstream.errors import DamagedShardError

Sample = TypeVar("Sample")


class BeforeDamage(NamedTuple, Generic[Sample]):
    """What of a shard is good."""

    samples: list[Sample]
    damage: DamagedShardError | None
    """What is wrong behind them; None: nothing, they are all."""


def before_damage(samples: Iterable[Sample]) -> BeforeDamage[Sample]:
    """Return the samples of one shard up to its damage, and the damage.

    Give samples that are grouped already: the group that the damage ends is never among them, since parts of it may lie behind
    the damage.

    Args:
        samples: Of one shard; raises DamagedShardError where the shard is damaged.
    """
    found: list[Sample] = []
    try:
        found.extend(samples)  # one by one: those before an error stay
    except DamagedShardError as error:
        return BeforeDamage(found, error)
    return BeforeDamage(found, None)
