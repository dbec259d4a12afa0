"""Memory that a trainer and its workers share, and that any other process which they start leaves for one of its own."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from torch.utils.data import get_worker_info

from sqlstream.process import fork

Held = TypeVar("Held")


class OwnedMemory(ABC, Generic[Held]):
    """What a trainer writes and its workers read. A process of another kind goes on from what held when it was made.

    It leaves the memory when it needs it, or before it forks or pickles: its own workers, which may be the first to need it,
    would have that of the trainer that this process comes from.
    """

    def __init__(self) -> None:
        self._trainer = os.getpid()
        self._inherited: Held | None = None
        fork.enclose(self, fork.Stage.MEMORY)

    @abstractmethod
    def _held(self) -> Held:
        """Return a copy of what the memory holds for a process that is made now."""

    @abstractmethod
    def _begin_with(self, held: Held) -> None:
        """Take new memory, with what an earlier one held."""

    def before_fork(self) -> None:
        """Keep what holds now for the child, which may be a trainer of its own: by the time that it runs, this one goes on."""
        self._own()
        if self._trainer == os.getpid():
            self._inherited = self._held()

    def after_fork(self, *, is_child: bool) -> None:
        """Forget it in the trainer."""
        if not is_child and self._trainer == os.getpid():
            self._inherited = None

    def _own(self) -> None:
        """Leave the memory of another trainer, in a process that is none of its workers."""
        if self._trainer != os.getpid() and get_worker_info() is None:
            held = self._held() if self._inherited is None else self._inherited
            self._trainer = os.getpid()
            self._begin_with(held)
