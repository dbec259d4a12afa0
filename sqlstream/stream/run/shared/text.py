"""A text in memory that a trainer and its workers share: the trainer writes it anew, and workers that run already read it."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from sqlstream.order import Int64Array
from sqlstream.stream.run.shared.memory import as_shared, shared_bytes

_HEADER = 24
"""Bytes before the texts: a version, and two lengths."""


class Version(NamedTuple):
    """A text, and how many were written up to it."""

    number: int
    text: bytes


class SharedText:
    """The text that was written last; one process writes, any number read.

    Args:
        num_bytes: Longest text.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._shared = shared_bytes(_HEADER + 2 * num_bytes)  # [bytes]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, with the memory that it shares."""
        return {name: value for name, value in self.__dict__.items() if name != "_numbers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared = as_shared(self._shared)  # [bytes]

    @cached_property
    def _numbers(self) -> Int64Array:
        """Version, and length of each of the two texts: [3]."""
        numbers: Int64Array = self._shared[:_HEADER].view(torch.int64).numpy()
        return numbers

    @property
    def version(self) -> int:
        """Grows with every text; 0: none was written."""
        return int(self._numbers[0])

    def read(self) -> Version:
        """Return the last text."""
        while True:
            version = self.version
            text = self._text_of(version).numpy().tobytes()
            if self.version == version:  # else the version after the next one may have been written over it meanwhile
                return Version(version, text)

    def write(self, text: bytes) -> None:
        """Replace the text."""
        assert len(text) <= self._num_bytes, "the writer checks it"
        version = self.version + 1
        self._numbers[1 + version % 2] = len(text)
        self._text_of(version)[:] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())  # [bytes]
        self._numbers[0] = version  # last: a worker that reads the new version finds the whole text

    def _text_of(self, version: int) -> torch.Tensor:
        """Return the memory of a version's text, in which the version before the last one was: [bytes]."""
        start = _HEADER + version % 2 * self._num_bytes
        return self._shared[start : start + int(self._numbers[1 + version % 2])]
