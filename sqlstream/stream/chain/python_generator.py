"""The state of Python's global generator, copied as the memory that it is.

`random.getstate` makes 625 objects of it, which takes longer than all else that a sample of a small file costs. What is copied
here is what the C type `_random.Random` has behind the head of an object: an index and 624 words. A Python that lays it out
otherwise is told by a comparison, once, and is asked for its state by `getstate`.
"""

from __future__ import annotations

import _random  # what `random.Random` adds methods to
import ctypes
import random
import struct
import sys
from typing import Any, NamedTuple

_STATE_BYTES = _random.Random.__basicsize__ - object.__basicsize__


class PythonState(NamedTuple):
    """The state of a generator."""

    words: Any
    """Its memory; of a Python with another layout, what `getstate` gives."""
    second: float | None
    """The second of a pair of normal numbers, if it was not drawn yet."""


class PythonGenerator:
    """A generator of `random`, whose state is copied often.

    Args:
        generator: Which one; it is kept alive.
        as_memory: Copy its state as memory, whose layout is known; False: as `getstate` does.
    """

    def __init__(self, generator: random.Random, *, as_memory: bool) -> None:
        self._generator: Any = generator  # its `gauss_next` has no type
        self._memory = _memory_of(generator) if as_memory else None

    def seed(self, number: int) -> None:
        """Do what `random.seed` does with a whole number."""
        _random.Random.seed(self._generator, number)
        self._generator.gauss_next = None

    def state(self) -> PythonState:
        """Return a copy of the state."""
        memory = self._memory
        return PythonState(self._generator.getstate() if memory is None else memory.raw, self._generator.gauss_next)

    def restore(self, state: PythonState) -> None:
        """Go on from a state that `state` has returned."""
        if self._memory is None:
            self._generator.setstate(state.words)
        else:
            self._memory.raw = state.words
        self._generator.gauss_next = state.second


def _memory_of(generator: random.Random) -> Any:
    """Return what the C type has of a generator, to be read and written."""
    return (ctypes.c_char * _STATE_BYTES).from_address(id(generator) + object.__basicsize__)


def has_known_layout() -> bool:
    """Return whether the memory of a generator is its index and its words, and nothing more."""
    if sys.implementation.name != "cpython":  # the id of an object is its address there
        return False
    generator = random.Random(1)
    generator.random()
    *words, index = generator.getstate()[1]
    known = struct.pack(f"={1 + len(words)}I", index, *words)
    return bool(_memory_of(generator).raw[: len(known)] == known)


PYTHON = PythonGenerator(random._inst, as_memory=has_known_layout())  # whose methods the functions of `random` are
"""What the functions of `random` draw from."""
