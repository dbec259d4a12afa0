"""The start of iterations, one at a time in a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from sqlstream.process import fork
from sqlstream.stream.run.shares import EpochShare, ShareProgress

BegunIteration = tuple[ShareProgress, Iterator[EpochShare]]
"""Its progress, and its shares of the epoch and of those that follow."""


class IterationStart:
    """Lets one thread at a time start an iteration, which sets for torch's call what only this iteration may find.

    A pickled copy is free, and so is one in a forked child, unless the thread that forks has it, to start workers.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Taken by `with`: Python looks for signals nowhere between the lock and what follows."""
        self._here = _Here()
        fork.call_in_child(self, fork.Stage.LOCKS)

    def take_late(self) -> BegunIteration | None:
        """Return the iteration that a loader has begun for this thread, once; None: there is none."""
        return None if self._here.late is None else self._here.late.take()

    def exchange_late(self, late: LateStart | None) -> LateStart | None:
        """Set what has been begun for this thread, and return what was set before."""
        outer, self._here.late = self._here.late, late
        return outer

    def after_fork_in_child(self) -> None:
        """Another thread of the parent may have it."""
        if not self.lock._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks, too
            self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker."""
        return IterationStart, ()


class _Here(threading.local):
    late: LateStart | None = None


class LateStart:
    """An iteration that a loader has begun for a generator of a subclass, whose code runs with the first sample only.

    While it is entered, it is the next iteration that begins in this thread.

    Args:
        start: Of the dataset.
        begun: The iteration.
    """

    def __init__(self, start: IterationStart, begun: BegunIteration) -> None:
        self._start = start
        self._begun: BegunIteration | None = begun
        self._outer: LateStart | None = None

    def take(self) -> BegunIteration | None:
        """Return the iteration, once."""
        begun, self._begun = self._begun, None
        return begun

    def __enter__(self) -> None:
        self._outer = self._start.exchange_late(self)

    def __exit__(self, *exception: object) -> None:
        self._start.exchange_late(self._outer)
