"""A keyed permutation of `[0, size)` that computes any element alone: no table, no state.

A generalised Feistel network: a number is written as two digits (left, right) of a mixed radix, each round adds a keyed
hash of one digit to the other, and what falls outside `[0, size)` goes round again (cycle walking). The radices are near
the square root of the size, so the domain is at most one radix larger than the size and hardly anything walks; with two
halves of bits, as in the textbook, the domain is up to twice the size and a vector of 64 walks about 8 times.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), and `grain`, which showed that an index cipher is
all that a shuffle needs. It is a shuffle, not a cipher: it hides nothing.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_128
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sqlstream.errors import ConfigError

Int64Array: TypeAlias = NDArray[np.int64]
_UInt64Array: TypeAlias = NDArray[np.uint64]

PERMUTATION_VERSION = 1
"""Changes whenever any order would change; states carry it, golden values in the tests guard it."""
MAX_SIZE = 1 << 48
"""Digits then have at most 24 bits, which leaves the bits above for a tweak, and no sum below overflows 64 bits."""
NUM_ROUNDS = 6
"""Two more than theory asks for (Luby and Rackoff: 4); each costs about 3 µs a call, however short the vector."""
NUM_ROUNDS_SMALL = 16
"""Digits of few values mix slowly: with 12 rounds the 720 orders of 6 elements are not yet equally likely, with 16 they are."""
SMALL_SIZE = 1 << 16
"""Below this size the extra rounds are run: 10^6 draws tell 6 rounds from chance at 121 elements, 2 * 10^7 not at 2^14."""
_KEPT = 4096
"""Permutations whose keys are kept: an order of buckets has one for each, and thousands of buckets. Up to 8 MB."""
_FEW = 16
"""So many numbers walk on one by one: a pass of numpy over them takes as long as some ten of them."""


def _constant(number: int) -> _UInt64Array:
    """Return a number as an array without dimensions: numpy converts a scalar anew at every call."""
    return np.array(number, dtype=np.uint64)


_TWEAK_SHIFT = _constant(24)
# Odd constants of splitmix64 (Steele, Lea, Flood 2014): well tested multipliers, no other meaning.
_FACTOR_1, _FACTOR_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MULTIPLIER_1, _MULTIPLIER_2 = _constant(_FACTOR_1), _constant(_FACTOR_2)
_MASK = (1 << 64) - 1
_SHIFT_1, _SHIFT_2 = _constant(32), _constant(16)


class _Rounds(NamedTuple):
    """Keys and radices of one permutation's network, or of one for each number: [] or [n] each."""

    keys: tuple[_UInt64Array, ...]
    radices: tuple[_UInt64Array, _UInt64Array]

    def of(self, numbers: Int64Array) -> _Rounds:
        """Return those of some numbers, of as many networks as numbers: [m]."""
        return _Rounds(tuple(key[numbers] for key in self.keys), (self.radices[0][numbers], self.radices[1][numbers]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Permutation:
    """One permutation of `[0, size)`, chosen by its keys."""

    size: int
    """How many numbers are permuted, at most `MAX_SIZE`."""
    keys: tuple[int, ...]
    """One 64-bit key a round; `keyed` derives them."""

    def __post_init__(self) -> None:
        """Check the size."""
        if not 0 <= self.size <= MAX_SIZE:
            raise ConfigError(f"size={self.size} is out of range: a permutation covers 0 to 2**48 = {MAX_SIZE} numbers")

    @classmethod
    def keyed(cls, size: int, *key: int) -> Permutation:
        """Return the permutation of `[0, size)` that belongs to `key`, any integers below 2**127 in magnitude.

        Example:
            >>> Permutation.keyed(5, 42).forward(np.arange(5)).tolist()
            [3, 2, 4, 1, 0]
        """
        return cls(size=size, keys=_derive_keys(NUM_ROUNDS_SMALL if size < SMALL_SIZE else NUM_ROUNDS, key))

    def forward(self, numbers: Int64Array, tweak: Int64Array | None = None, sizes: Int64Array | None = None) -> Int64Array:
        """Return the images of `numbers`, all within `[0, size)`.

        Args:
            numbers: Numbers to permute; the caller keeps them in range.
            tweak: For each number, which of 2**40 independent permutations is applied; None: 0.
            sizes: For each number the size of that permutation, at most `size`; None: `size`.
        """
        return self._walk(numbers, tweak, sizes, is_inverse=False)

    def image(self, number: int) -> int:
        """Return what `forward` gives for a single number, in a tenth of the time: no array is made."""
        radices = _radices(self.size)
        while True:
            digits = list(divmod(number, radices[1]))
            for turn, key in enumerate(self.keys):
                changed = turn % 2
                mixed = (digits[1 - changed] ^ key) * _FACTOR_1 & _MASK
                mixed = ((mixed ^ mixed >> 32) * _FACTOR_2 & _MASK) >> 16
                digits[changed] = (digits[changed] + mixed) % radices[changed]
            number = digits[0] * radices[1] + digits[1]
            if number < self.size:
                return number

    def inverse(self, images: Int64Array, tweak: Int64Array | None = None, sizes: Int64Array | None = None) -> Int64Array:
        """Return the numbers whose `forward` images are `images`, with the same `tweak` and `sizes`."""
        return self._walk(images, tweak, sizes, is_inverse=True)

    def _walk(self, numbers: Int64Array, tweak: Int64Array | None, sizes: Int64Array | None, *, is_inverse: bool) -> Int64Array:
        """Apply the network until every number is back in range; each pass is a bijection, so the walk ends."""
        if self.size == 0:
            return np.empty(0, dtype=np.int64)
        bounds = _constant(self.size) if sizes is None else sizes.astype(np.uint64)
        offsets = None if tweak is None else tweak.astype(np.uint64) << _TWEAK_SHIFT
        rounds = _rounds(self.size, self.keys)
        images = _network(rounds, numbers.astype(np.uint64), offsets, is_inverse=is_inverse)
        is_outside = images >= bounds
        while np.count_nonzero(is_outside):
            outside = np.flatnonzero(is_outside)
            images[outside] = _network(
                rounds, images[outside], None if offsets is None else offsets[outside], is_inverse=is_inverse
            )
            is_outside = images >= bounds
        return images.view(np.int64)


class Networks:
    """Permutations of as many rounds each, by number, stacked: their images are worked out together. It does not change.

    Args:
        columns: Of each permutation its size, which is not 0, its two radices, and the keys of its rounds: [3 + rounds, p].
    """

    def __init__(self, columns: _UInt64Array) -> None:
        self._columns = columns

    @classmethod
    def of(cls, permutations: Sequence[Permutation]) -> Networks:
        """Return permutations of as many rounds each, stacked."""
        columns = [(one.size, *_radices(one.size), *one.keys) for one in permutations]
        return cls(np.array(columns, np.uint64).T.copy())  # [3 + rounds, p]

    def changed(self, numbers: Sequence[int], permutations: Sequence[Permutation]) -> Networks:
        """Return these with others, of as many rounds, in the place of some."""
        columns = self._columns.copy()  # [3 + rounds, p]
        columns[:, list(numbers)] = Networks.of(permutations)._columns
        return Networks(columns)

    def forward(self, which: Int64Array, numbers: Int64Array) -> Int64Array:
        """Return the image of each number under a permutation of its own, as `Permutation.forward` gives it.

        Args:
            which: Permutation of each number: [n].
            numbers: Numbers below the size of their permutation: [n].
        """
        bounds, left, right, *keys = self._columns.take(which, axis=1)  # [n] each
        rounds = _Rounds(tuple(keys), (left, right))
        found = _network(rounds, numbers.astype(np.uint64), None, is_inverse=False)  # [n]
        outside = np.flatnonzero(found >= bounds)  # [o]
        while outside.size > _FEW:
            found[outside] = _network(rounds.of(outside), found[outside], None, is_inverse=False)
            outside = outside[found[outside] >= bounds[outside]]  # [o]
        for at in outside.tolist():
            own = Permutation(size=int(bounds[at]), keys=tuple(self._columns[3:, which[at]].tolist()))
            found[at] = own.image(int(found[at]))
        return found.view(np.int64)


def forward_each(permutations: Sequence[Permutation], which: Int64Array, numbers: Int64Array) -> Int64Array:
    """Return the image of each number under a permutation of its own, as `forward` gives it, but all at once.

    Numbers that belong to many permutations, a few to each, cost little more than as many of one.

    Args:
        permutations: The permutations, none of them of nothing.
        which: Index of the permutation of each number: [n].
        numbers: Numbers below the size of their permutation: [n].
    """
    lengths = np.array([len(permutation.keys) for permutation in permutations])  # [p]
    if (lengths == lengths[0]).all():
        return Networks.of(permutations).forward(which, numbers)
    images = np.empty(len(numbers), np.int64)  # [n]
    for num_rounds in set(lengths.tolist()):
        alike = np.flatnonzero(lengths == num_rounds)  # [q]
        here = np.flatnonzero(lengths[which] == num_rounds)  # [m]
        own = np.searchsorted(alike, which[here])  # [m]
        images[here] = Networks.of([permutations[index] for index in alike.tolist()]).forward(own, numbers[here])
    return images


def _network(rounds: _Rounds, numbers: _UInt64Array, offsets: _UInt64Array | None, *, is_inverse: bool) -> _UInt64Array:
    """Run all rounds once over `numbers` of the domain `[0, left radix x right radix)`; into few arrays, for speed."""
    keys, radices = rounds
    left = numbers // radices[1]
    digits = (left, numbers - left * radices[1])
    mixed, shifted = np.empty_like(numbers), np.empty_like(numbers)
    for i in range(len(keys) - 1, -1, -1) if is_inverse else range(len(keys)):
        changed, other, radix = digits[i % 2], digits[1 - i % 2], radices[i % 2]
        if offsets is None:
            np.bitwise_xor(other, keys[i], mixed)
        else:
            np.add(other, offsets, mixed)
            np.bitwise_xor(mixed, keys[i], mixed)
        np.multiply(mixed, _MULTIPLIER_1, mixed)
        np.right_shift(mixed, _SHIFT_1, shifted)
        np.bitwise_xor(mixed, shifted, mixed)
        np.multiply(mixed, _MULTIPLIER_2, mixed)
        np.right_shift(mixed, _SHIFT_2, mixed)  # 48 well mixed bits of the other digit under the key
        if is_inverse:
            np.remainder(mixed, radix, mixed)
            np.subtract(radix, mixed, mixed)
        np.add(changed, mixed, changed)
        np.remainder(changed, radix, changed)
    left, right = digits
    left *= radices[1]
    left += right
    return left


@lru_cache(maxsize=_KEPT)
def _derive_keys(num_rounds: int, key: tuple[int, ...]) -> tuple[int, ...]:
    text = b"".join(part.to_bytes(16, "little", signed=True) for part in key)
    digest = shake_128(b"sqlstream order 1" + text).digest(8 * num_rounds)
    return struct.unpack(f"<{num_rounds}Q", digest)


@lru_cache(maxsize=_KEPT)
def _rounds(size: int, keys: tuple[int, ...]) -> _Rounds:
    numbers = np.array((*_radices(size), *keys), dtype=np.uint64)  # [2 + rounds]
    left, right, *own = (numbers[index, ...] for index in range(len(numbers)))  # [] each; a view costs less than an array
    return _Rounds(tuple(own), (left, right))


def _radices(size: int) -> tuple[int, int]:
    """Return the radices of the two digits of numbers of `[0, size)`."""
    left = math.isqrt(size - 1) + 1
    left += left % 2  # even: with two odd radices every reachable order would be an even permutation
    return left, -(-size // left)
