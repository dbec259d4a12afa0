"""A thread that does what nobody comes by to do: give back, write what was deferred, while the trainer thinks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlstream import locks

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.025
"""How often the keeper looks while there is anything to do."""
FAILED_SECONDS = 1.0
"""How long it leaves a cache alone that failed."""
IDLE_SECONDS = 0.3
"""Without anything to do for so long, its thread ends: a loop that was left must leave no thread behind."""


class Keeper:
    """Calls `work` every tick from `wake()` on, until it returns False.

    Args:
        work: Returns whether there is more to do.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = work
        self.after_fork_in_child()
        locks.call_after_fork(self)

    def after_fork_in_child(self) -> None:
        """The thread stays with the parent."""
        self._thread: threading.Thread | None = None
        self._is_awake = threading.Event()
        self.is_woken = False
        """The same, but for the moment after it is cleared: to ask the event costs a hit 0.3 us."""
        self._is_over = threading.Event()

    def wake(self) -> None:
        """There is something to do."""
        if self.is_woken:
            return
        with locks.fork_guard():
            self._is_awake.set()
            self.is_woken = True
            if self._thread is None and not self._is_over.is_set():
                self._thread = threading.Thread(target=self._run, name="sqlstream-cache-keeper", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it; not to be called under the guard, which the thread may want."""
        self._is_over.set()
        self._is_awake.set()
        if (thread := self._thread) is not None:
            thread.join()
        self.is_woken = True  # nothing wakes it any more

    def _run(self) -> None:
        is_over, is_awake = self._is_over, self._is_awake
        said = ""
        while not is_over.wait(TICK_SECONDS):
            is_awake.clear()  # before the work: what comes from now on sets it again
            self.is_woken = False  # after the event: else a wake in between would be lost
            if is_over.is_set():  # `stop` may have set both just before the clear
                return
            try:
                if self._work():
                    is_awake.set()
            except Exception as error:
                if str(error) != said:
                    said = str(error)
                    logger.exception("the cache's keeper failed; it tries again every %g s", FAILED_SECONDS)
                is_over.wait(FAILED_SECONDS)
            if not is_awake.wait(IDLE_SECONDS) and self._ends():
                return

    def _ends(self) -> bool:
        """Return whether nobody has woken us: the thread ends, and the next wake starts another one."""
        with locks.fork_guard():
            if self._is_awake.is_set():
                return False
            self._thread = None
            return True
