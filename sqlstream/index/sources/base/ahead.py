"""Reads side by side, ahead of the one who takes what they find, in the order of what is read."""

from __future__ import annotations

import builtins
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

from sqlstream.errors import CacheFullError, FetchCancelledError
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, DownloadRoom, ObjectInfo, RemoteReader

T = TypeVar("T")
R = TypeVar("R")

_FIRST_AT_A_TIME = 2
"""Reads under way at first; twice as many after each that was taken, since `max_size` may end it soon."""


class ReadsAhead(Generic[T, R]):
    """An iterator over what is found in each of several things; a context, at whose end no further read begins.

    The first error in the order of the things is raised, whichever read failed first; those behind it are given up: what
    is under way then ends with its next request, and is not waited for. A read without room (`CacheFullError`) begins again
    when no other one is under way, and from then on there is one at a time.

    Args:
        read: (thing, reader) → what is found. Runs in threads.
        things: What is read.
        remote: The reader, which refuses requests after the end.
        most_at_a_time: Of a thing, how many reads may be under way with it.
        size_of: Size of what was found.
        most_waiting: Size of all that may be found before it is taken, as far as the largest so far tells it.
    """

    def __init__(
        self,
        read: Callable[[T, RemoteReader], R],
        things: Sequence[T],
        remote: RemoteReader,
        *,
        most_at_a_time: Callable[[T], int] = lambda _: CALLS_AT_A_TIME,
        size_of: Callable[[R], int] = lambda _: 0,
        most_waiting: int = 0,
    ) -> None:
        self._read, self._things = read, things
        self._is_over = threading.Event()
        self._remote = _UntilOver(remote, self._is_over)
        self._most_at_a_time, self._size_of, self._most_waiting = most_at_a_time, size_of, most_waiting
        self._begun: deque[Future[R]] = deque()
        self._num_taken, self._num_wanted, self._largest = 0, _FIRST_AT_A_TIME, 0
        self._is_alone = len(things) == 1
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Return how many things there are."""
        return len(self._things)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        if self._pool is not None:
            self._pool.shutdown(wait=all(future.done() for future in self._begun), cancel_futures=True)

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        """Return what is found in the next thing."""
        if self._num_taken == len(self._things):
            raise StopIteration
        thing = self._things[self._num_taken]
        if not self._begun and self._most(thing) == 1:
            found = self._read(thing, self._remote)  # here, where Ctrl-C ends it
        else:
            self._begin()
            try:
                found = self._begun[0].result()
            except CacheFullError:
                self.go_alone()
                found = self._read(thing, self._remote)
            self._begun.popleft()
        self._num_taken += 1
        self._num_wanted = min(2 * self._num_wanted, CALLS_AT_A_TIME)
        self._largest = max(self._largest, self._size_of(found))
        return found

    def go_alone(self) -> None:
        """Wait for the reads that are under way, and have one at a time from now on."""
        self._is_alone = True
        wait(self._begun)

    def _most(self, thing: T) -> int:
        """Return how many reads there may be, one of them of this thing."""
        most = 1 if self._is_alone else min(self._num_wanted, self._most_at_a_time(thing))
        return min(most, max(1, self._most_waiting // self._largest)) if self._largest else most

    def _begin(self) -> None:
        """Begin reads, as many as there may be."""
        while (number := self._num_taken + len(self._begun)) < len(self._things):
            thing = self._things[number]
            if len(self._begun) >= self._most(thing):
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="ahead")
            self._begun.append(self._pool.submit(self._read, thing, self._remote))


class _UntilOver:
    """A reader that refuses requests after the end.

    Args:
        remote: What reads.
        is_over: The end.
    """

    def __init__(self, remote: RemoteReader, is_over: threading.Event) -> None:
        self._remote, self._is_over = remote, is_over

    def _reader(self) -> RemoteReader:
        if self._is_over.is_set():
            raise FetchCancelledError("what was read ahead is not needed any more")
        return self._remote

    def with_access(self, access: Access) -> RemoteReader:
        """As the reader does, until the end."""
        return _UntilOver(self._remote.with_access(access), self._is_over)

    def head(self, url: str) -> ObjectInfo:
        """As the reader does, until the end."""
        return self._reader().head(url)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the reader does, until the end."""
        return self._reader().list(prefix)

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> builtins.list[bytes]:
        """As the reader does, until the end."""
        return self._reader().get_ranges(url, ranges, size_bytes)

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        """As the reader does, until the end."""
        return self._reader().download(url, path, room)
