"""Lightning: of a loader without a length it takes a batch more than the training step was given, which must not count.

Its fetcher looks one batch ahead, to know which one is the last; a loader with a length tells it so. The batch that it holds is
in no step yet when Lightning asks for the loader's state. Rejected: a length for a run that has no end, which would end it.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

_FETCHER = "_PrefetchDataFetcher"
"""The class that looks ahead."""
_MODULES = ("lightning.pytorch.loops.fetchers", "pytorch_lightning.loops.fetchers")


class LookingAhead:
    """What iterates a loader for Lightning, or anything else.

    Args:
        fetcher: Lightning's, which keeps the loader's iterator; None: the caller is another one, which holds nothing back.
    """

    def __init__(self, fetcher: Any = None) -> None:
        self.most_held = int(getattr(fetcher, "prefetch_batches", 0))
        """Batches that it holds at most."""
        self._fetcher = (lambda: None) if fetcher is None else weakref.ref(fetcher)

    @classmethod
    def of_caller(cls) -> LookingAhead:
        """Return the fetcher below which a loader is iterated: its class keeps the loader, and the loader does not know it."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__") in _MODULES:
                fetcher = frame.f_locals.get("self")
                return cls(fetcher if any(kind.__name__ == _FETCHER for kind in type(fetcher).__mro__) else None)
            frame = frame.f_back
        return cls()

    @property
    def num_held(self) -> int:
        """Batches that it holds while it asks for the next one; it knows the loader's length only after it has begun."""
        return self.most_held if getattr(self._fetcher(), "length", 0) is None else 0


class HandedOut:
    """The batches that a loader hands out, which count when the trainer has them.

    Args:
        fetcher: The caller.
    """

    def __init__(self, fetcher: LookingAhead) -> None:
        self.fetcher = fetcher
        self._held: deque[Callable[[], None]] = deque()

    @property
    def has_held(self) -> bool:
        """Some batches are handed out that do not count yet."""
        return bool(self._held)

    def add(self, count: Callable[[], None]) -> None:
        """Hand out a batch, which `count` counts."""
        self._held.append(count)
        self._count(self.fetcher.num_held)

    def end(self) -> None:
        """Count all: no batch follows."""
        self._count(0)

    def _count(self, num_held: int) -> None:
        while len(self._held) > num_held:
            self._held.popleft()()
