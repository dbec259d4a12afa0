"""The global generators of python, numpy and torch: lent to samples while these are made, and put back for the trainer.

To put them back costs 70 µs, most of it numpy's, which copies its 624 words one by one; to seed them, 10. So where nobody else
draws meanwhile they are put back once for several samples: a loader without workers keeps them `OnLoan` while it makes a batch.
In a DataLoader worker nothing is put back: no trainer draws there. Rejected: numpy's `set_bit_generator`, which would swap
states for a microsecond, but forgets the second of a pair of normal numbers.
"""

from __future__ import annotations

import random
import threading
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info


class OnLoan:
    """While it is entered, the first sample made in this thread takes the generators, and its end puts them back."""

    def __init__(self) -> None:
        self._outer: OnLoan | None = None
        self._states: tuple[Any, ...] | None = None

    def take(self) -> None:
        """Remember how the generators are, if they have not been taken."""
        if self._states is None:
            self._states = _states()

    def put_back(self) -> None:
        """Put them back as they were; they may be taken again."""
        if self._states is not None:
            _restore(self._states)
            self._states = None

    def __enter__(self) -> None:
        self._outer, _here.loan = _here.loan, self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _here.loan = self._outer
        self.put_back()


class _Here(threading.local):
    """Of this thread."""

    loan: OnLoan | None = None


_here = _Here()


class GlobalGenerators:
    """The state of the three global generators that belongs to one sample; a context manager that may be entered again.

    Args:
        key: Whose state: (seed, epoch, position, stage).
        watches: Find out whether anything was drawn.
    """

    def __init__(self, key: tuple[int, ...], *, watches: bool = False) -> None:
        self._seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")
        self._own: tuple[Any, ...] | None = None
        self._others: tuple[Any, ...] | None = None
        self._loan: OnLoan | None = None
        self._watches = watches
        self._fresh = ""
        self.goes_on = False
        """It will be entered again: remember how far the generators came."""
        self.was_drawn_from = False

    def __enter__(self) -> None:
        self._loan, _here.loan = _here.loan, None  # a dataset that a transform reads puts back what the transform has
        if self._loan is not None:
            self._loan.take()
        elif get_worker_info() is None:
            self._others = _states()
        if self._own is not None:
            _restore(self._own)
            return
        random.seed(self._seed)
        np.random.seed(self._seed & 0xFFFF_FFFF)  # its seeds have 32 bits
        # The generator itself, not torch.manual_seed: that one queues a call for every GPU, for ever, in a process without one.
        torch.default_generator.manual_seed(self._seed)
        if self._watches:
            self._fresh = _fingerprint()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.goes_on:
            self._own = _states()
        if self._watches:
            self.was_drawn_from = _fingerprint() != self._fresh
        if self._others is not None:
            _restore(self._others)
        _here.loan = self._loan


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _fingerprint() -> str:
    """Return what differs once anything was drawn from one of the three."""
    python, numpy, own = _states()
    state = numpy["state"]
    return repr((hash(python), state["pos"], numpy["has_gauss"], hash(state["key"].tobytes()), hash(own.numpy().tobytes())))


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
