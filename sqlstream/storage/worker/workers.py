"""Threads of the helper that download; how many work at a time may change, and one that only waits does not count."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_MAX_IDLE = 128  # parked threads that are kept: as many as downloads run at a time at most, unless the user says more
_MAX_ASIDE = 1024  # threads beside the limit, each with its open answer; beyond that, waiting ones hold their places

_logger = logging.getLogger(__name__)


class WorkPermit:
    """The permit of one running job, which counts against the limit while it is held."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._is_held = True

    def step_aside(self) -> None:
        """Let another job start: this one does not wait for the network, or is given up. Safe to call twice."""
        self._workers.leave(self, is_end=False)

    def come_back(self) -> None:
        """Count again; never waits, so that for a while one more than the limit may work."""
        self._workers.enter(self)


Job = Callable[[WorkPermit], None]


class Workers:
    """Runs jobs in order of arrival, at most `limit` of them at a time.

    Rejected: ThreadPoolExecutor. Its threads stay taken by downloads that wait for a grant or were cancelled in a silent
    network, its size is fixed, and its futures cost more than our whole bookkeeping of a download.

    Args:
        limit: Jobs at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._condition = threading.Condition(threading.Lock())
        self._jobs: deque[Job] = deque()
        self._num_counted = 0
        self._num_aside = 0
        self._num_idle = 0

    @property
    def limit(self) -> int:
        """Jobs at a time."""
        return self._limit

    def resize(self, limit: int) -> None:
        """Change the limit; jobs at work are left alone."""
        with self._condition:
            self._limit = limit
            self._wake()

    def submit(self, jobs: list[Job]) -> None:
        """Run these jobs as soon as the limit allows it."""
        with self._condition:
            self._jobs.extend(jobs)
            self._wake()

    def enter(self, permit: WorkPermit) -> None:
        """Count a job again; see `WorkPermit.come_back`."""
        with self._condition:
            if not permit._is_held:
                permit._is_held = True
                self._num_counted += 1
                self._num_aside -= 1

    def leave(self, permit: WorkPermit, *, is_end: bool) -> None:
        """Stop counting a job; see `WorkPermit.step_aside`."""
        with self._condition:
            if permit._is_held and (is_end or self._num_aside < _MAX_ASIDE):
                permit._is_held = False
                self._num_counted -= 1
                self._num_aside += not is_end
                self._wake()
            elif is_end and not permit._is_held:
                self._num_aside -= 1

    def _wake(self) -> None:
        """Have threads take what may start now; the caller holds the lock."""
        for _ in range(min(len(self._jobs), self._limit - self._num_counted)):
            if self._num_idle:
                self._num_idle -= 1  # here, not where it wakes up: the next caller must not count on it again
                self._condition.notify()
                self._num_counted += 1
            else:
                self._num_counted += 1
                try:
                    threading.Thread(target=self._run, name="download", daemon=True).start()
                except RuntimeError:  # no more threads for this user, or container
                    self._num_counted -= 1
                    if not self._num_counted and not self._num_aside:
                        raise  # no thread would ever take the job; the reading process hears of the helper's end
                    return  # those at work take it as they are done

    def _run(self) -> None:
        """Work off jobs; a thread is started, and woken, with a place already counted for it."""
        while True:
            with self._condition:
                if not self._jobs or self._num_counted > self._limit:
                    self._num_counted -= 1
                    if self._num_idle >= _MAX_IDLE:
                        return
                    self._num_idle += 1
                    self._condition.wait()
                    continue
                job = self._jobs.popleft()
            permit = WorkPermit(self)
            try:
                job(permit)
            except Exception:
                _logger.exception("unexpected error in the helper process")
            with self._condition:  # take the next job in the place of this one
                if permit._is_held:
                    permit._is_held = False
                    continue
            self.leave(permit, is_end=True)
            with self._condition:
                self._num_counted += 1  # as `_run` expects; given back at once if there is nothing to do
