"""Reads side by side: their order, their number, what ends them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import CacheFullError, FetchCancelledError, SourceError
from sqlstream.index.sources.base.ahead import ReadsAhead
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, RemoteReader
from sqlstream.storage.fetcher import Fetcher

REMOTE = Fetcher(StorageOptions())


class Watched:
    """A read that counts how many are under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.under_way: set[int] = set()
        self.begun: list[int] = []
        self.most = 0

    def __call__(self, thing: int, _: RemoteReader) -> int:
        with self._lock:
            self.under_way.add(thing)
            self.begun.append(thing)
            self.most = max(self.most, len(self.under_way))
        try:
            return self.read(thing)
        finally:
            with self._lock:
                self.under_way.remove(thing)

    def read(self, thing: int) -> int:
        return 10 * thing


class Gated(Watched):
    """One that waits from the fourth thing on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def read(self, thing: int) -> int:
        assert thing < 3 or self.gate.wait(60)
        return super().read(thing)


def wait_until_begun(watched: Watched, num: int) -> None:
    while len(watched.begun) < num:
        time.sleep(0.001)


def test_what_is_found_comes_in_order_and_reads_grow_to_sixteen_at_a_time() -> None:
    gated = Gated()
    with ReadsAhead(gated, range(40), REMOTE) as found:
        assert gated.begun == [], "nothing is read before the first is asked for"
        assert next(found) == 0
        assert set(gated.begun) <= {0, 1}
        assert [next(found), next(found)] == [10, 20]
        taker = threading.Thread(target=lambda: gated.begun.append(next(found)))
        taker.start()
        wait_until_begun(gated, 3 + CALLS_AT_A_TIME)
        assert gated.under_way == set(range(3, 3 + CALLS_AT_A_TIME))
        gated.gate.set()
        taker.join()
        assert list(found) == [10 * thing for thing in range(4, 40)]
    assert gated.most == CALLS_AT_A_TIME


def test_the_first_error_in_order_is_raised_though_a_later_read_fails_first() -> None:
    has_failed = threading.Event()

    def read(thing: int, _: RemoteReader) -> int:
        if thing == 1:
            has_failed.set()
        elif thing == 0:
            assert has_failed.wait(60)
        raise SourceError(f"thing {thing} is damaged")

    with pytest.raises(SourceError, match="thing 0"), ReadsAhead(read, range(8), REMOTE) as found:
        next(found)


def test_reads_that_are_given_up_are_not_waited_for_and_refused_at_their_next_request() -> None:
    gate, refused, begun = threading.Event(), list[Exception](), threading.Event()

    def read(thing: int, remote: RemoteReader) -> int:
        if thing == 0:
            assert begun.wait(60)
            raise SourceError("thing 0 is damaged")
        begun.set()
        assert gate.wait(60)
        for ask in (
            lambda: remote.head("http://localhost/x"),
            lambda: remote.get_ranges("http://localhost/x", [(0, 1)]),
            lambda: remote.download("http://localhost/x", Path("x")),
            lambda: remote.list("http://localhost/"),
        ):
            try:
                ask()
            except FetchCancelledError as error:
                refused.append(error)
        begun.clear()
        return thing

    with pytest.raises(SourceError, match="thing 0"), ReadsAhead(read, range(8), REMOTE) as found:
        next(found)
    gate.set()
    while begun.is_set():
        time.sleep(0.001)
    assert len(refused) == 4


def test_an_end_that_comes_early_begins_nothing_more() -> None:
    watched = Watched()
    with ReadsAhead(watched, range(1000), REMOTE) as found:
        assert [next(found) for _ in range(3)] == [0, 10, 20]
    assert len(watched.begun) <= 3 + 8, "as many as may wait after three were taken"


class Narrow(Watched):
    """One that has no room beside another; the first waits for a second one."""

    def __init__(self, too_large: int | None = None) -> None:
        super().__init__()
        self._too_large, self._both = too_large, threading.Event()
        self.refused: list[int] = []

    def read(self, thing: int) -> int:
        if len(self.under_way) > 1:
            self._both.set()
        elif not self.refused and thing == 0:
            assert self._both.wait(60)
        if thing == self._too_large or not self.refused:
            self.refused.append(thing)
            raise CacheFullError(f"no room for thing {thing}")
        return super().read(thing)


def test_a_read_without_room_begins_again_alone_and_so_do_those_behind_it() -> None:
    narrow = Narrow()
    with ReadsAhead(narrow, range(6), REMOTE) as found:
        first = next(found)
        narrow.most = 0
        assert [first, *found] == [0, 10, 20, 30, 40, 50]
    assert narrow.most == 1
    assert len(narrow.refused) == 1


def test_a_read_that_has_no_room_alone_either_is_the_error() -> None:
    narrow = Narrow(too_large=3)
    with ReadsAhead(narrow, range(6), REMOTE) as found:
        assert [next(found) for _ in range(3)] == [0, 10, 20]
        with pytest.raises(CacheFullError, match="thing 3"):
            next(found)
    assert not narrow.under_way


def test_reads_are_fewer_where_what_they_find_is_large() -> None:
    watched = Watched()
    with ReadsAhead(watched, range(30), REMOTE, size_of=lambda _: 100, most_waiting=350) as found:
        assert next(found) == 0
        watched.most = 0
        assert list(found) == [10 * thing for thing in range(1, 30)]
    assert watched.most <= 3
    alone = Watched()
    with ReadsAhead(alone, range(9), REMOTE, most_at_a_time=lambda _: 1) as found:
        assert len(list(found)) == 9
    assert alone.most == 1
