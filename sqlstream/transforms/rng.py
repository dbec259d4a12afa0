"""The random generator of a sample: draws depend on (seed, epoch, position) alone, never on worker identity.

Before a chain runs, it puts (seed, epoch, position, stage) into the private field `__rng_key__` (`base.Chain.run`); transforms
call `rng(sample)` and share one generator, in the field `__rng__`, so that two of them never draw the same numbers;
`base.apply` copies both fields to the dict that a transform returns; the chain removes both. A *stage* separates parts of a
chain: predownload transforms are stage 0, transforms stage 1, and what follows the n-th `CacheTransform` stage 1 + n, so that
draws after a cached point do not depend on whether the sample came out of the cache.

A sample without a key (a transform called by hand, in a notebook or a test) gets a generator seeded by the operating system:
such a call has no position to depend on, and refusing it would break scripts that try a transform on one dict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sqlstream.errors import TransformError

RNG_KEY = "__rng_key__"
"""Private field of a sample: (seed, epoch, position, stage)."""
GENERATOR = "__rng__"
"""Private field of a sample: its generator, once something drew from it."""
PRIVATE_FIELDS = (RNG_KEY, GENERATOR)

_WORD = (1 << 64) - 1
_DOMAIN = 0x73716C73747265616D & _WORD  # "sqlstream": keeps these streams apart from others that a user keys by the same seed


def begin(sample: dict[str, Any], key: Sequence[int], stage: int = 1) -> None:
    """Give `sample` the generator of `key` = (seed, epoch, position) and `stage`, at its start."""
    sample[RNG_KEY] = (key[0], key[1], key[2], stage)
    sample.pop(GENERATOR, None)


def next_stage(sample: dict[str, Any]) -> None:
    """Start the next stage of the sample's generator, whatever was drawn in this one; no effect on a sample without a key."""
    key = sample.get(RNG_KEY)
    if key is not None:
        begin(sample, key, (key[3] if len(key) > 3 else 1) + 1)


def begin_piece(piece: dict[str, Any], key: tuple[int, ...] | None, number: int) -> None:
    """Give the n-th of several samples that a transform made of one a generator of its own.

    Args:
        piece: The sample made.
        key: `__rng_key__` of the sample that it was made of; None: the sample has none, and the piece gets none.
        number: Counts the pieces from 0.
    """
    if key is not None:
        stage = key[3] if len(key) > 3 else 1
        begin(piece, key, (stage << 16) + number + 1)


def end(sample: dict[str, Any]) -> None:
    """Remove the private fields of `sample`."""
    sample.pop(RNG_KEY, None)
    sample.pop(GENERATOR, None)


def rng(sample: dict[str, Any]) -> np.random.Generator:
    """Return the generator of `sample`; of a sample with a key it is the same object at every call.

    Args:
        sample: A sample of a dataset, or any dict (then the generator is seeded by the operating system).

    Raises:
        TransformError: The private field `__rng_key__` holds something else.

    Example:
        >>> sample = {"__rng_key__": (42, 0, 7)}
        >>> bool(0 <= rng(sample).random() < 1)
        True
    """
    key = sample.get(RNG_KEY)
    if key is None:
        return np.random.default_rng()
    generator = sample.get(GENERATOR)
    if generator is None:
        generator = sample[GENERATOR] = generator_of(key)
    return generator


def generator_of(key: tuple[int, ...]) -> np.random.Generator:
    """Return the Philox generator of (seed, epoch, position) or (seed, epoch, position, stage).

    The key is the seed, the upper words of the counter are the rest: streams of different keys never meet, and there is no
    hash to pay for.
    """
    try:
        seed, epoch, position, stage = (int(word) & _WORD for word in (*key, 1)[:4])
    except (TypeError, ValueError):
        raise TransformError(f"{RNG_KEY}={key!r} is not (seed, epoch, position) or (seed, epoch, position, stage)") from None
    counter = np.array([0, stage, position, epoch], dtype=np.uint64)  # [4]
    return np.random.Generator(np.random.Philox(key=np.array([seed, _DOMAIN], dtype=np.uint64), counter=counter))
