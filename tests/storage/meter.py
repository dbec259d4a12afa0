"""Jobs for the helper's threads that count how many run at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlstream.storage.worker.workers import WorkPermit

WAIT_SECONDS = 300.0


class Meter:
    """How many jobs run at a time; jobs run until they are let go."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.num_running = self.num_done = self.most = 0
        self.slots: list[WorkPermit] = []
        self.gate = threading.Event()

    def job(self, slot: WorkPermit) -> None:
        with self.condition:
            self.slots.append(slot)
            self.num_running += 1
            self.most = max(self.most, self.num_running)
            self.condition.notify_all()
        assert self.gate.wait(WAIT_SECONDS)
        with self.condition:
            self.num_running -= 1
            self.num_done += 1
            self.condition.notify_all()

    def wait(self, claim: Callable[[], bool]) -> None:
        with self.condition:
            assert self.condition.wait_for(claim, WAIT_SECONDS), vars(self)
