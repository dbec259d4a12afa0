"""Threads of the helper that download. How many work at a time for a user may change; one that only waits does not count."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

_MAX_IDLE = 128  # parked threads that are kept: as many as downloads run at a time at most, unless the user says more
_MAX_ASIDE = 1024  # threads beside the limit, each with its open answer; beyond that, waiting ones hold their places

_logger = logging.getLogger(__name__)


class Lane:
    """The queue of one user of the helper: its jobs run in order of arrival, at most `limit` of them at a time.

    Args:
        limit: Jobs at a time; changed with `Workers.resize`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.jobs: deque[Job] = deque()
        self.num_counted = 0
        """Places taken: jobs at work that hold their permit, and those for which a thread is on its way."""

    @property
    def is_busy(self) -> bool:
        """Whether a job of it runs or waits."""
        return bool(self.jobs) or self.num_counted > 0


class WorkPermit:
    """The permit of one running job, which counts against the limit of its lane while it is held."""

    def __init__(self, workers: Workers, lane: Lane) -> None:
        self._workers = workers
        self.lane = lane
        self.is_held = True
        """Changed by `Workers` alone."""

    def step_aside(self) -> None:
        """Let another job start: this one does not wait for the network, or is given up. Safe to call twice."""
        self._workers.leave(self)

    def come_back(self) -> None:
        """Count again; never waits, so that for a while one more than the limit may work."""
        self._workers.enter(self)


Job = Callable[[WorkPermit], None]


class Workers:
    """Threads that run the jobs of all lanes, which take turns.

    Rejected: ThreadPoolExecutor. Its threads stay taken by downloads that wait for a grant or were cancelled in a silent
    network, its size is fixed, and its futures cost more than our whole bookkeeping of a download.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._places: deque[Lane] = deque()
        """A lane for each place that is counted and that no thread has taken yet."""
        self._num_threads = 0
        self._num_aside = 0
        self._num_idle = 0

    def resize(self, lane: Lane, limit: int) -> None:
        """Change the limit of a lane; jobs at work are left alone."""
        with self._condition:
            lane.limit = limit
            self._wake(lane)

    def submit(self, lane: Lane, jobs: list[Job]) -> None:
        """Run these jobs as soon as the limit of their lane allows it."""
        with self._condition:
            lane.jobs.extend(jobs)
            self._wake(lane)

    def enter(self, permit: WorkPermit) -> None:
        """Count a job again; see `WorkPermit.come_back`."""
        with self._condition:
            if not permit.is_held:
                permit.is_held = True
                permit.lane.num_counted += 1
                self._num_aside -= 1

    def leave(self, permit: WorkPermit) -> None:
        """Stop counting a job; see `WorkPermit.step_aside`."""
        with self._condition:
            if permit.is_held and self._num_aside < _MAX_ASIDE:
                permit.is_held = False
                permit.lane.num_counted -= 1
                self._num_aside += 1
                self._wake(permit.lane)

    def _wake(self, lane: Lane) -> None:
        """Have threads take what may start now; the caller holds the lock."""
        for _ in range(min(len(lane.jobs), lane.limit - lane.num_counted)):
            lane.num_counted += 1
            self._places.append(lane)
            if self._num_idle:
                self._num_idle -= 1  # here, not where it wakes up: the next caller must not count on it again
                self._condition.notify()
                continue
            self._num_threads += 1
            try:
                threading.Thread(target=self._run, name="download", daemon=True).start()
            except RuntimeError:  # no more threads for this user, or container
                self._num_threads -= 1
                if not self._num_threads:
                    raise  # no thread would ever take the job; the reading process hears of the helper's end
                return  # those at work take it as they are done

    def _run(self) -> None:
        """Work off jobs; a thread is started, and woken, for a place that is counted already."""
        ended: WorkPermit | None = None
        while (taken := self._next(ended)) is not None:
            ended, job = taken
            try:
                job(ended)
            except BaseException:
                _logger.exception("unexpected error in the helper process")

    def _next(self, ended: WorkPermit | None) -> tuple[WorkPermit, Job] | None:
        """Give back the place of a job that ended; wait for a place and take its job. None: this thread is one too many."""
        with self._condition:
            if ended is not None and ended.is_held:
                ended.is_held = False  # it may still be told to step aside
                self._places.append(ended.lane)  # behind those of other lanes
            elif ended is not None:
                self._num_aside -= 1
            while True:
                while self._places:
                    lane = self._places.popleft()
                    if lane.jobs and lane.num_counted <= lane.limit:
                        return WorkPermit(self, lane), lane.jobs.popleft()
                    lane.num_counted -= 1
                if self._num_idle >= _MAX_IDLE:
                    self._num_threads -= 1
                    return None
                self._num_idle += 1
                self._condition.wait()
