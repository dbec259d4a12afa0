"""The start of iterations, one at a time in a process."""

from __future__ import annotations

import threading
from typing import Any

from sqlstream.process import fork


class IterationStart:
    """Lets one thread at a time start an iteration, which sets for torch's call what only this iteration may find.

    A pickled copy is free, and so is one in a forked child, unless the thread that forks has it, to start workers.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Taken by `with`: Python looks for signals nowhere between the lock and what follows."""
        fork.call_in_child(self, fork.Stage.LOCKS)

    def after_fork_in_child(self) -> None:
        """Another thread of the parent may have it."""
        if not self.lock._is_owned():  # type: ignore[attr-defined]  # what threading.Condition asks, too
            self.lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker."""
        return IterationStart, ()
