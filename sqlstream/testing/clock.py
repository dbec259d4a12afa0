"""A clock that moves only when it is told to, for whatever in the cache reads the time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class MockClock:
    """Stands in for the module `time` in the modules of `sqlstream.cache`, as trio's does for its loop.

    Waits in the kernel (locks, conditions) stay real; how long the cache thinks they took is the clock's word.

    Args:
        start: Seconds since 1970.
        rate: Seconds of this clock in one real second: 0 stands still, 100 lets a time limit of two minutes pass in a moment.

    Example:
        clock = MockClock(rate=1000)
        with clock.installed(), pytest.raises(CacheFullError):  # after two minutes, say the clocks of the cache
            cache.acquire_many([url])
    """

    def __init__(self, start: float = 1_000_000_000.0, *, rate: float = 0.0) -> None:
        self._wall = start
        self._passed = 0.0
        self._rate = rate
        self._real_start = time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        assert seconds >= 0, "time only goes on; a clock that is set back is `step`"
        self._passed += seconds

    def step(self, seconds: float) -> None:
        """Set the wall clock, forth or back, as NTP or a person does: no time passes."""
        self._wall += seconds

    def monotonic(self) -> float:
        """Return what has passed; no step changes it."""
        return self._passed + self._rate * (time.monotonic() - self._real_start)

    def time(self) -> float:
        """Return seconds since 1970, as the wall clock has it."""
        return self._wall + self.monotonic()

    @contextlib.contextmanager
    def installed(self) -> Iterator[MockClock]:
        """Be the time of the cache while the body runs."""
        readers = clock_readers()
        try:
            for module in readers:
                module.__dict__["time"] = _Time(self)
            yield self
        finally:
            for module in readers:
                module.__dict__["time"] = time


def clock_readers() -> list[ModuleType]:
    """Return the loaded modules of the cache that read the time."""
    names = sorted(name for name in sys.modules if name.startswith("sqlstream.cache."))
    return [module for name in names if (module := sys.modules[name]).__dict__.get("time") is time]


class _Time:
    """`time`, whose clocks are another's."""

    def __init__(self, clock: MockClock) -> None:
        self.time = clock.time
        self.monotonic = clock.monotonic

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)
