"""A caller of Fetcher.submit, as the cache is one: files with room, a list of events."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest, GrantNeeded

PLENTY = 1 << 40
WAIT_SECONDS = 300.0  # for a machine that does much else


class Downloads:
    """Submits downloads into files of a directory and collects their events; tickets and files begin with `name`."""

    def __init__(self, fetcher: Fetcher, directory: Path, name: str = "") -> None:
        self.fetcher = fetcher
        self.directory = directory
        self.name = name
        self.events: list[FetchEvent] = []
        self.num_calls = 0
        self._condition = threading.Condition()
        self._descriptors: dict[str, int] = {}

    def sink(self, events: Sequence[FetchEvent]) -> None:
        with self._condition:
            self.num_calls += 1
            self.events.extend(events)
            self._condition.notify_all()

    def submit(self, *urls: str, like: FetchRequest | None = None) -> None:
        """Start downloads; their tickets and file names are the name and their positions: "0", "1", …"""
        like = like or FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY)
        requests = []
        for url in urls:
            ticket = f"{self.name}{len(self._descriptors)}"
            fd = os.open(self.directory / ticket, os.O_RDWR | os.O_CREAT)
            self._descriptors[ticket] = fd
            requests.append(like._replace(ticket=ticket, url=url, fd=fd))
        self.fetcher.submit(requests, self.sink)

    def wait_done(self, *tickets: str) -> list[FetchDone]:
        """Return the ends of these downloads (all when none is named), in that order."""
        wanted = tickets or tuple(self._descriptors)
        with self._condition:
            assert self._condition.wait_for(lambda: set(wanted) <= set(self._done()), timeout=WAIT_SECONDS), self.events
            done = self._done()
        for ticket in wanted:
            if (fd := self._descriptors[ticket]) >= 0:
                os.close(fd)
                self._descriptors[ticket] = -1
        return [done[ticket] for ticket in wanted]

    def wait_grants(self, num_grants: int) -> list[GrantNeeded]:
        with self._condition:
            assert self._condition.wait_for(lambda: len(self._grants()) >= num_grants, timeout=WAIT_SECONDS), self.events
            return self._grants()

    def read(self, ticket: str) -> bytes:
        return (self.directory / ticket).read_bytes()

    def _done(self) -> dict[str, FetchDone]:
        return {event.ticket: event for event in self.events if isinstance(event, FetchDone)}

    def _grants(self) -> list[GrantNeeded]:
        return [event for event in self.events if isinstance(event, GrantNeeded)]


def granted(num_bytes: int) -> FetchRequest:
    return FetchRequest(ticket="", url="", fd=-1, granted_bytes=num_bytes)


def wait_for_size(path: Path, num_bytes: int) -> None:
    pause = threading.Event()
    for _ in range(30_000):
        if path.stat().st_size >= num_bytes:
            return
        pause.wait(0.01)
    raise AssertionError(f"{path} has {path.stat().st_size} bytes")
