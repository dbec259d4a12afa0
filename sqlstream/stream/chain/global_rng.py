"""The global generators of python, numpy and torch: samples use them while they are made; then the trainer's state is restored.

A process has one of each, whatever its number of threads. So samples take turns: from the seed until the trainer's state is
restored one thread has the generators, and other threads that make samples wait. Not guaranteed: a thread of the user that
draws meanwhile, outside of a sample, draws from a sample's numbers.

To restore the state costs several times what a small sample costs (numpy copies its 624 words one by one). So a loader without
workers restores it once for a batch (`GeneratorLoan`), and a DataLoader worker never: no trainer draws there. Rejected: numpy's
`set_bit_generator`, which would swap states in a microsecond, but forgets the second of a pair of normal numbers.
"""

from __future__ import annotations

import logging
import random
import threading
from hashlib import blake2b
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from sqlstream.errors import ConfigError
from sqlstream.process import fork, interrupts, locks

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0
"""Longest wait for one sample of another thread: after it a deadlock is more likely than a slow transform."""


class Turns:
    """Gives the generators to one thread at a time; a sample that is made within another sample's transforms has them, too.

    Args:
        patience_seconds: The longest wait for one sample of another thread.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self.depth = 0
        """Samples that are being made, each within the transforms of the one before."""
        self.lent: tuple[Any, ...] | None = None
        """The trainer's state, until loaders without workers restore it."""
        self._lock = threading.RLock()
        self._num_taken = 0
        self._has_warned = False
        fork.call_in_child(self, fork.Stage.LOCKS)

    def after_fork_in_child(self) -> None:
        """Take the turn away from a thread that the child does not have."""
        if not self.is_ours:
            self._lock, self.depth = threading.RLock(), 0

    @property
    def is_ours(self) -> bool:
        """This thread has the generators."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # what threading.Condition asks, too

    def take(self) -> None:
        """Wait for the generators; inside `locks.uninterrupted()`.

        Raises:
            ConfigError: One sample of another thread has had them for too long: it may wait for this thread.
        """
        if not self._lock.acquire(blocking=False):
            self._wait()
        self.depth += 1
        self._num_taken += 1

    def give_back(self) -> None:
        """Let the next thread have them."""
        self.depth -= 1
        self._lock.release()

    def _wait(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "several threads make samples whose transforms may draw from the global generators of python, numpy or torch: "
                "these transforms run one at a time. Draw from sqlstream.transforms.rng(sample) alone and pass "
                "seed_transforms=False, or use DataLoader workers"
            )
        num_taken = -1
        while num_taken != self._num_taken:
            num_taken = self._num_taken
            if interrupts.acquire(self._lock, self.patience_seconds):
                return
        raise ConfigError(
            f"the transforms of a sample in another thread have had the global generators for {self.patience_seconds:.0f} s: "
            "they may wait for this thread. A transform must not wait for a thread that makes samples, unless the dataset of "
            "that thread draws from sqlstream.transforms.rng(sample) alone and has seed_transforms=False"
        )


_turns = Turns()


class GeneratorLoan:
    """While it is entered, the first sample made in this thread takes the generators; its end restores the trainer's state.

    That state is one for the process: of several loaders in several threads each restores what the trainer had.
    """

    def __init__(self) -> None:
        self._outer: GeneratorLoan | None = None
        self._states: tuple[Any, ...] | None = None
        """State of the outer sample, if this loader makes samples within the transforms of one."""

    def take(self) -> None:
        """Save the state of the generators, if they have not been taken; in this thread's turn."""
        if _turns.depth > 1:
            self._states = self._states or _states()
        elif _turns.lent is None:
            _turns.lent = _states()

    def put_back(self) -> None:
        """Restore the saved state; the generators may be taken again."""
        if self._states is not None:
            _restore(self._states)
            self._states = None
        elif _turns.lent is not None and not _turns.is_ours:
            with locks.uninterrupted():
                _turns.take()
                try:
                    if _turns.lent is not None:
                        _restore(_turns.lent)
                        _turns.lent = None
                finally:
                    _turns.give_back()

    def __enter__(self) -> None:
        self._outer, _here.loan = _here.loan, self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _here.loan = self._outer
        self.put_back()


class _ThreadGenerators(threading.local):
    """The loan of this thread."""

    loan: GeneratorLoan | None = None


_here = _ThreadGenerators()


class GlobalGenerators:
    """The state of the three global generators that belongs to one sample; a context manager that may be entered again.

    Args:
        key: The sample: (seed, epoch, position, stage).
        watches: Set `was_drawn_from`.
    """

    def __init__(self, key: tuple[int, ...], *, watches: bool = False) -> None:
        self._seed = int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little")
        self._own: tuple[Any, ...] | None = None
        self._others: tuple[Any, ...] | None = None
        self._loan: GeneratorLoan | None = None
        self._is_taken = False
        self._watches = watches
        self._fresh = ""
        self.goes_on = False
        """It will be entered again: its end saves the state of the generators."""
        self.was_drawn_from = False

    def __enter__(self) -> None:
        try:
            with locks.uninterrupted():  # a turn that is half taken would stop all other threads
                _turns.take()
                self._is_taken, self._loan = True, _here.loan
                self._begin()
        except BaseException:
            self._give_back()
            raise

    def _begin(self) -> None:
        _here.loan = None  # a dataset that a transform reads restores the state of the transform
        if self._loan is not None:
            self._loan.take()
        elif _turns.depth > 1 or get_worker_info() is None:
            self._others = _states()
        if self._own is not None:
            _restore(self._own)
            return
        random.seed(self._seed)
        np.random.seed(self._seed & 0xFFFF_FFFF)  # its seeds have 32 bits
        # Not torch.manual_seed: in a process without a GPU it queues a call for every GPU, and the queue never ends.
        torch.default_generator.manual_seed(self._seed)
        if self._watches:
            self._fresh = _fingerprint()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with locks.uninterrupted():
                if self.goes_on:
                    self._own = _states()
                if self._watches:
                    self.was_drawn_from = _fingerprint() != self._fresh
                self._end()
        except BaseException:
            self._give_back()
            raise

    def _give_back(self) -> None:
        """Give the turn back after an error, such as that of a signal handler at the begin or end of a section."""
        with locks.uninterrupted():
            if self._is_taken:
                self._end()

    def _end(self) -> None:
        """Restore the state of the trainer or of the outer sample, and give the generators to the next thread."""
        try:
            if self._others is not None:
                _restore(self._others)
                self._others = None
            _here.loan = self._loan
        finally:
            self._is_taken = False
            _turns.give_back()


def _states() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _fingerprint() -> str:
    """Return a text that changes when a number is drawn from one of the three."""
    python, numpy, own = _states()
    state = numpy["state"]
    return repr((hash(python), state["pos"], numpy["has_gauss"], hash(state["key"].tobytes()), hash(own.numpy().tobytes())))


def _restore(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
