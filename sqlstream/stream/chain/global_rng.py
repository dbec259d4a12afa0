"""The global generators of python, numpy and torch: samples use them while they are made; then the trainer's state is restored.

A process has one of each, whatever its number of threads. So samples take turns: from the seed until the trainer's state is
restored one thread has the generators, and other threads that make samples wait. Not guaranteed: a thread of the user that
draws meanwhile, outside of a sample, draws from a sample's numbers.

Whether a transform draws is known when it has drawn, so each sample of a foreign transform is seeded. What else is paid for:
- the main thread of a worker process restores nothing, since no trainer draws there;
- a loader without workers saves and restores once for a batch (`GeneratorLoan`);
- other samples save and restore: python's and torch's states are copied as memory (`python_generator`); numpy's generator is
  exchanged, for a copy of its state takes longer than the sample (624 words, one by one). What numpy keeps beside its
  generator, the second of a pair of normal numbers, is read and written through a generator without words.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from hashlib import blake2b
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import get_worker_info

from sqlstream.errors import ConfigError
from sqlstream.process import fork, interrupts, locks
from sqlstream.stream.chain.python_generator import PYTHON, PythonState

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 300.0
"""Longest wait for one sample of another thread: after it a deadlock is more likely than a slow transform."""
Made = TypeVar("Made")


class GeneratorTurns:
    """Gives the generators to one thread at a time; a sample that is made within another sample's transforms has them, too.

    Args:
        patience_seconds: The longest wait for one sample of another thread.
    """

    def __init__(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.patience_seconds = patience_seconds
        self.lock = threading.RLock()
        """Taken by `with`, after `wait`: Python looks for signals nowhere between the lock and what follows."""
        self.is_taken = False
        """A thread has them, as far as is known without a lock."""
        self.lent: _States | None = None
        """The trainer's state, until loaders without workers restore it."""
        self.spare: np.random.BitGenerator | None = None
        """A generator that is not in use: to make one takes longer than a sample."""
        self._num_taken = 0
        self._has_warned = False
        fork.call_in_child(self, fork.Stage.LOCKS)

    def after_fork_in_child(self) -> None:
        """Take the turn away from a thread that the child does not have."""
        if not self.is_ours:
            self.lock, self.is_taken = threading.RLock(), False

    @property
    def is_ours(self) -> bool:
        """This thread has the generators."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # what threading.Condition asks, too

    def wait(self) -> None:
        """Wait until another thread has given the generators back.

        Raises:
            ConfigError: One sample of another thread has had them for too long: it may wait for this thread.
        """
        while self.is_taken and not self.is_ours:
            with locks.uninterrupted():
                if not self.lock.acquire(blocking=False):
                    self._wait()
                self.is_taken = False  # else a signal handler of the other thread has raised in its last step
                self.lock.release()

    def begin(self) -> None:
        """Note that this thread has them, and began a sample."""
        self.is_taken = True
        self._num_taken += 1

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
            if interrupts.acquire(self.lock, self.patience_seconds):
                return
        raise ConfigError(
            f"the transforms of a sample in another thread have had the global generators for {self.patience_seconds:.0f} s: "
            "they may wait for this thread. A transform must not wait for a thread that makes samples, unless the dataset of "
            "that thread draws from sqlstream.transforms.rng(sample) alone and has seed_transforms=False"
        )


_turns = GeneratorTurns()


class GeneratorLoan:
    """While it is entered, the first sample made in this thread takes the generators; its end restores the trainer's state.

    That state is one for the process: of several loaders in several threads each restores what the trainer had.
    """

    def __init__(self) -> None:
        self._outer: GeneratorLoan | None = None
        self._states: _States | None = None
        """State of the outer sample, if this loader makes samples within the transforms of one."""

    def has_taken(self, *, is_nested: bool) -> bool:
        """Return whether the state is saved; in this thread's turn."""
        return (self._states if is_nested else _turns.lent) is not None

    def take(self, *, is_nested: bool) -> None:
        """Save the state of the generators; in this thread's turn, in a section: what is saved counts as exchanged."""
        if is_nested:
            self._states = _States.saved().exchange()
        else:
            _turns.lent = _States.saved().exchange()

    def put_back(self) -> None:
        """Restore the saved state; the generators may be taken again."""
        if self._states is not None:
            with locks.uninterrupted():
                self._states.restore()
                self._states = None
        elif _turns.lent is not None and not _turns.is_ours:
            _turns.wait()
            with _turns.lock, locks.uninterrupted():
                if _turns.lent is not None:
                    _turns.lent.restore()
                    _turns.lent = None

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
    """The state of the three global generators that belongs to one sample.

    Args:
        key: The sample: (seed, epoch, position, stage).
        watches: Set `was_drawn_from`.
    """

    __slots__ = ("_fresh", "_own", "_seed", "_watches", "was_drawn_from")

    def __init__(self, key: tuple[int, ...], *, watches: bool = False) -> None:
        text = b"(%d, %d, %d, %d)" % key  # as `repr` has it, which takes longer
        self._seed = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        self._own: tuple[Any, ...] | None = None
        self._watches = watches
        self._fresh = ""
        self.was_drawn_from = False
        """The transforms drew from them."""

    def run(self, make: Callable[[], Made], goes_on: Callable[[Made], bool]) -> Made:
        """Return what `make` returns; it draws from the generators of this sample.

        Args:
            make: Runs the transforms, or goes on with them.
            goes_on: Given what `make` returned, says whether they go on: then the next run draws from where this one ends.

        Raises:
            ConfigError: One sample of another thread has had the generators for too long.
        """
        turns = _turns
        if turns.is_taken:
            turns.wait()
        is_nested, loan = turns.is_ours, _here.loan
        with turns.lock:
            others: _States | None = None
            try:
                turns.begin()
                if loan is not None:
                    _here.loan = None  # a dataset that a transform reads restores the state of the transform
                    if not loan.has_taken(is_nested=is_nested):
                        with locks.uninterrupted():
                            loan.take(is_nested=is_nested)
                elif is_nested or not _is_workers():
                    others = _States.saved()
                    others.exchange()
                self._begin()
                made = make()
                if goes_on(made):
                    self._own = _copied()
                if self._watches:
                    self.was_drawn_from = _fingerprint() != self._fresh
                return made
            finally:
                if loan is not None:
                    _here.loan = loan
                turns.is_taken = is_nested
                if others is not None:
                    try:
                        others.restore()
                    except BaseException:  # of a handler in the middle; a section for every sample would take longer than this
                        with locks.uninterrupted():
                            others.restore()
                        raise

    def _begin(self) -> None:
        if self._own is not None:
            _restore(self._own)
            return
        PYTHON.seed(self._seed)
        np.random.seed(self._seed & 0xFFFF_FFFF)  # its seeds have 32 bits
        # Not torch.manual_seed: in a process without a GPU it queues a call for every GPU, and the queue never ends.
        torch.default_generator.manual_seed(self._seed)
        if self._watches:
            self._fresh = _fingerprint()


class _States(NamedTuple):
    """The states of the trainer's generators, or of those of the sample around one.

    A signal handler may run between any two steps of these methods, and make samples itself: it leaves the generators as it
    found them. One that raises leaves states that can be restored.
    """

    python: PythonState
    torch: torch.Tensor  # [n]
    numpy: np.random.BitGenerator
    beside: dict[str, Any]
    """What numpy keeps beside its generator."""

    @classmethod
    def saved(cls) -> _States:
        """Return the states."""
        numpy = _numpy_generator()
        return cls(PYTHON.state(), torch.default_generator.get_state(), numpy, _state_beside(numpy))

    def exchange(self) -> _States:
        """Give numpy another generator; return these states."""
        spare, _turns.spare = _turns.spare, None
        np.random.mtrand.set_bit_generator(spare or np.random.MT19937())
        return self

    def restore(self) -> None:
        """Restore them; a second time changes nothing."""
        PYTHON.restore(self.python)
        torch.default_generator.set_state(self.torch)
        if (spare := _numpy_generator()) is not self.numpy:
            np.random.mtrand.set_bit_generator(self.numpy)  # which leaves no second number of a pair
            _turns.spare = spare if isinstance(spare, np.random.MT19937) else None
        if self.beside["has_gauss"] or spare is self.numpy:
            _restore_beside(self.numpy, self.beside)


class _WithoutWords:
    """Stands in for numpy's global generator while its state is read or written: numpy asks it for that alone."""

    state: dict[str, Any]
    generator: np.random.BitGenerator
    """What it stands in for."""


_numpy: Any = np.random.mtrand._rand
_without_words = _WithoutWords()


def _numpy_generator() -> np.random.BitGenerator:
    """Return numpy's global generator, also to a signal handler that runs while another one stands in for it."""
    generator: Any = np.random.mtrand.get_bit_generator()
    found: np.random.BitGenerator = _without_words.generator if generator is _without_words else generator
    return found


def _state_beside(generator: np.random.BitGenerator) -> dict[str, Any]:
    """Return what numpy keeps beside `generator`, its global one."""
    _without_words.generator = generator
    _without_words.state = {"bit_generator": "MT19937", "state": {}}  # a new one: numpy writes into it, and returns it
    try:
        _numpy._bit_generator = _without_words
        beside: dict[str, Any] = _numpy.get_state(legacy=False)
    finally:
        _numpy._bit_generator = generator
    return beside


def _restore_beside(generator: np.random.BitGenerator, beside: dict[str, Any]) -> None:
    """Restore what numpy keeps beside `generator`, its global one."""
    _without_words.generator = generator
    try:
        _numpy._bit_generator = _without_words
        _numpy.set_state(beside)
    finally:
        _numpy._bit_generator = generator


def _is_workers() -> bool:
    """Return whether this is the main thread of a DataLoader's worker process, where no trainer draws."""
    return get_worker_info() is not None and interrupts.here.section.is_main


def _copied() -> tuple[Any, ...]:
    return PYTHON.state(), np.random.get_state(legacy=False), torch.default_generator.get_state()


def _fingerprint() -> str:
    """Return a text that changes when a number is drawn from one of the three."""
    python, numpy, own = _copied()
    state = numpy["state"]
    return repr((hash(python), state["pos"], numpy["has_gauss"], hash(state["key"].tobytes()), hash(own.numpy().tobytes())))


def _restore(states: tuple[Any, ...]) -> None:
    PYTHON.restore(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])
