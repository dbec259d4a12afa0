"""A text in memory that a trainer and its workers share: the trainer writes it anew, and workers that run already read it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import torch

from sqlstream.order import Int64Array
from sqlstream.process import fork
from sqlstream.stream.run.shared.memory import as_shared, is_shared, shared_bytes
from sqlstream.stream.run.shared.owned import OwnedMemory

_HEADER = 24
"""Bytes before the texts: a version, and two lengths."""


class Version(NamedTuple):
    """A text, and how many were written up to it."""

    number: int
    text: bytes


class SharedText(OwnedMemory[Version]):
    """The text that was written last; the trainer writes, any number of its workers read.

    Args:
        num_bytes: Longest text.
    """

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self._num_bytes = num_bytes
        self._take_memory()

    def _take_memory(self) -> None:
        """Make new memory to share with workers."""
        self._shared = shared_bytes(_HEADER + 2 * self._num_bytes)  # [bytes]
        self._look()

    def _look(self) -> None:
        """Make the array through which the head of the shared memory is read and written."""
        # A version, and the length of each of the two texts.
        self._numbers: Int64Array = self._shared[:_HEADER].view(torch.int64).numpy()  # [3]

    def _held(self) -> Version:
        while True:
            version = int(self._numbers[0])
            text = self._text_of(version).numpy().tobytes()
            if self._numbers[0] == version:  # else the version after the next one may have been written over it meanwhile
                return Version(version, text)

    def _begin_with(self, held: Version) -> None:
        self._take_memory()
        self._put(*held)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, with the memory that it shares."""
        self._own()
        kept = {name: value for name, value in self.__dict__.items() if name != "_numbers"}
        return {**kept, "_inherited": self._held()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not is_shared(self._shared):  # a copy that is no worker's
            self._shared, self._trainer = as_shared(self._shared), os.getpid()  # [bytes]
        self._look()
        fork.enclose(self, fork.Stage.MEMORY)

    @property
    def version(self) -> int:
        """Grows with every text; 0: none was written."""
        self._own()
        return int(self._numbers[0])

    def read(self) -> Version:
        """Return the last text."""
        self._own()
        return self._held()

    def write(self, text: bytes) -> None:
        """Replace the text."""
        assert len(text) <= self._num_bytes, "the writer checks it"
        self._put(self.version + 1, text)

    def _put(self, version: int, text: bytes) -> None:
        self._numbers[1 + version % 2] = len(text)
        self._text_of(version)[:] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())  # [bytes]
        self._numbers[0] = version  # last: a worker that reads the new version finds the whole text

    def _text_of(self, version: int) -> torch.Tensor:
        """Return the memory of a version's text, in which the version before the last one was: [bytes]."""
        start = _HEADER + version % 2 * self._num_bytes
        return self._shared[start : start + int(self._numbers[1 + version % 2])]
