"""Gathers the helper's messages into frames: a frame wakes the reading process, which then writes its ledger once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sqlstream.storage.protocol.messages import FetchDone, ToReader

LINGER_SECONDS = 0.003
"""Wait this long for further ends of downloads while more are under way. Measured with 100 KB objects from the same machine:
a sixth of the frames and of the ledger's transactions, a fifth less CPU in the reader; an object alone does not wait."""
_FRAME_MESSAGES = 256  # of one frame at most; arbitrary


class Outbox:
    """Posts messages from any thread; one thread sends them, in order.

    Args:
        send: Sends one frame; blocks while the reader is slow.
        may_linger: Returns True while more downloads are under way, so that it pays to wait.
        linger_seconds: Longest wait.
    """

    def __init__(
        self, send: Callable[[Sequence[ToReader]], None], may_linger: Callable[[], bool], linger_seconds: float = LINGER_SECONDS
    ) -> None:
        self._send = send
        self._may_linger = may_linger
        self._linger_seconds = linger_seconds
        self._messages: list[ToReader] = []
        self._lock = threading.Lock()
        self._something = threading.Event()
        self._urgent = threading.Event()

    def post(self, message: ToReader) -> None:
        """Send a message soon; never blocks."""
        with self._lock:
            self._messages.append(message)
            is_first = len(self._messages) == 1
        if is_first:
            self._something.set()
        if not isinstance(message, FetchDone) or not self._may_linger():
            self._urgent.set()  # the reader waits for this very message

    def run(self) -> None:
        """Send until the channel closes (its error comes out of here)."""
        while True:
            self._something.wait()
            self._urgent.wait(self._linger_seconds)
            with self._lock:
                messages, self._messages = self._messages, []
                self._something.clear()
                self._urgent.clear()
            for start in range(0, len(messages), _FRAME_MESSAGES):
                self._send(messages[start : start + _FRAME_MESSAGES])
