"""Says which hosts are silent: a request that waits for one would else look like a program that hangs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

_logger = logging.getLogger(__name__)
_SILENCE = "%s has sent nothing for %.0f s; requests that wait for it: %d. "
_SERVER = _SILENCE + "storage_options['read_timeout'] and ['connect_timeout'] bound each wait"
_FUNCTION = (
    _SILENCE
    + "The function of a provider knows no timeout of storage_options: have it give up after a time, with a TimeoutError"
)


class Wait(NamedTuple):
    """A request that waits for its next bytes."""

    host: str
    """Scheme and host, the scheme alone of what a provider gives."""
    seconds: float
    """Time since the last bytes, or since the question."""


class StallWatch:
    """Logs each host that has been silent for long, and again whenever its silence has doubled.

    Args:
        threshold_seconds: Shortest silence that is logged.
    """

    def __init__(self, threshold_seconds: float) -> None:
        self._threshold_seconds = threshold_seconds
        self._next_seconds: dict[str, float] = {}
        """Silence at which a host is logged again; those that are silent now."""

    def look(self, waits: Iterable[Wait]) -> None:
        """Log the hosts of requests that have waited for too long.

        Args:
            waits: All requests that are under way.
        """
        stalled: dict[str, list[float]] = {}
        for wait in waits:
            if wait.seconds >= self._threshold_seconds:
                stalled.setdefault(wait.host, []).append(wait.seconds)
        self._next_seconds = {host: seconds for host, seconds in self._next_seconds.items() if host in stalled}
        for host, seconds in stalled.items():
            longest = max(seconds)
            if longest >= self._next_seconds.get(host, self._threshold_seconds):
                self._next_seconds[host] = 2 * longest
                text = _FUNCTION if host.endswith("://") else _SERVER
                _logger.warning(text, host, longest, len(seconds))
