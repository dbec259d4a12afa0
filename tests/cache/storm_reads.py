"""What workers of a storm do: reads through a cache, checked byte for byte."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from sqlstream.cache import Cache
from sqlstream.errors import SqlStreamError
from sqlstream.process import locks
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest, Sink
from tests.cache.hostile_server import check_file

PF_EXITING = 0x4
"""Linux's include/linux/sched.h."""
OPTIONS: dict[str, object] = {"connect_timeout": 10, "read_timeout": 10, "timeout": 60}
"""Of the storage: nothing here is slow, but the machine may be."""
NUM_RETRIES = 6
NUM_PROCESSES, NUM_THREADS = 6, 4
LARGEST_BYTES = 60_000
_shield = threading.local()
"""Of each thread; handlers run in the main one."""


def limit_of(sizes: Sequence[int]) -> int:
    """Return the limit of the storm's cache: a twentieth of all, in which every thread can hold one object."""
    return max(sum(sizes) // 20, NUM_PROCESSES * NUM_THREADS * LARGEST_BYTES)


class MarkingFetcher(Fetcher):
    """Holds a lock of its own for each object while it downloads it; one that is held shows a second download."""

    def __init__(self, cache: Cache, marks: Path, troubles: list[str]) -> None:
        super().__init__(cache.storage_options)
        self._marks = marks
        self._troubles = troubles
        self._held: dict[str, int] = {}
        """Descriptors of marks by ticket; a dict's pop is atomic."""

    def submit(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Mark them, and ask for them; no handler raises in between, or a mark would stay without its download."""
        _shield.depth = getattr(_shield, "depth", 0) + 1
        try:
            self._submit_marked(requests, sink)
        finally:
            _shield.depth -= 1

    def _submit_marked(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        for request in requests:
            mark = self._marks / request.url.rpartition("/")[2]
            fd = locks.open_descriptor(mark, os.O_RDWR | os.O_CREAT)
            if not locks.try_lock(fd) and (holder := locks.lock_holder(mark)) is not None and not is_ending(holder):
                self._troubles.append(f"{request.url} is downloaded twice at the same time, here and in process {holder}")
            self._held[request.ticket] = fd

        def pass_on(events: Sequence[FetchEvent]) -> None:
            for event in events:
                if isinstance(event, FetchDone):
                    self._unmark(event.ticket)
            sink(events)

        super().submit(requests, pass_on)

    def cancel(self, tickets: Sequence[str]) -> None:
        """Give downloads up, and their marks: others may begin before we hear that these have ended."""
        super().cancel(tickets)
        for ticket in tickets:
            self._unmark(ticket)

    def _unmark(self, ticket: str) -> None:
        if (fd := self._held.pop(ticket, None)) is not None:
            locks.close_descriptor(fd)


def is_ending(pid: int) -> bool:
    """Whether the kernel is closing a process's files: one after the other, a part's lock perhaps before our mark."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    state, flags = fields[0], int(fields[6])
    return state in "ZX" or bool(flags & PF_EXITING)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all workers know."""

    root: Path
    urls: Sequence[str]
    sizes: Sequence[int]
    draws: Sequence[Sequence[int]]
    """What the transforms of each row draw without any threads."""
    kinds: Sequence[str]
    """What workers do, in turn."""

    @property
    def marks(self) -> Path:
        """Where downloads are marked."""
        return self.root / "marks"

    def draw_numbers(self, rng: random.Random, count: int) -> list[int]:
        """Return so many objects, each once."""
        return rng.sample(range(len(self.urls)), count)

    @property
    def table(self) -> Path:
        """The index of all objects, for datasets."""
        return self.root / "rows.csv"


@dataclass(kw_only=True)
class Told:
    """A worker's last word."""

    troubles: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """How often reads failed, by class."""

    def note_error(self, error: SqlStreamError) -> None:
        """Count a read that failed by an error of ours."""
        self.counts["failed"] += 1
        self.errors[type(error).__name__] += 1


class Alarm(Exception):
    """What a signal handler raises."""


class Reads:
    """Reads of one worker process, checked.

    Args:
        cache: What they go through.
        task: The objects.
        told: Where it is noted what came of them.
    """

    def __init__(self, cache: Cache, task: Task, told: Told) -> None:
        self.cache, self.task, self.told = cache, task, told

    def some(self, numbers: Sequence[int]) -> None:
        """Read objects one after the other; an error of ours is no trouble."""
        for number in numbers:
            try:
                with self.cache.pinned(self.task.urls[number]) as path:
                    self.note(check_file(path, number, self.task.sizes[number]))
                    if random.random() < 0.1:
                        time.sleep(0.01)
                    if not path.exists():
                        self.told.troubles.append(f"{number}: its file vanished while it was pinned")
            except SqlStreamError as error:
                self.told.note_error(error)

    def note(self, wrong: str | None) -> None:
        """Note whether bytes were one version of their object."""
        if wrong is None:
            self.told.counts["right"] += 1
        else:
            self.told.troubles.append(wrong)


Work = Callable[[Sequence[int]], None]


def in_threads(num_threads: int, told: Told, make: Callable[[], tuple[Work, Sequence[int]]]) -> None:
    """Do work on numbers in threads to its end; what it raises is trouble."""

    def run(work: Work, numbers: Sequence[int]) -> None:
        try:
            work(numbers)
        except BaseException:
            told.troubles.append(traceback.format_exc())

    threads = [threading.Thread(target=run, args=make()) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read_with_alarms(reads: Reads, numbers: Sequence[int], rng: random.Random) -> None:
    """Read in the main thread, whose handlers raise at random moments."""
    for number in numbers:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0001 + rng.random() * 0.03)
            reads.some([number])
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Alarm:
            reads.told.counts["interrupts"] += 1


def raise_alarm(number: int, frame: FrameType | None) -> None:
    """Raise, or a little later where a mark is made."""
    if getattr(_shield, "depth", 0):
        signal.setitimer(signal.ITIMER_REAL, 0.002)
    else:
        raise Alarm
