"""The helper process as its owner sees it: started, talked to, killed, reaped."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping

from sqlstream.config import StorageOptions
from sqlstream.process import locks
from sqlstream.process.children import forget_child, start_child
from sqlstream.storage.protocol.channel import Channel, ChannelClosedError
from sqlstream.storage.protocol.messages import HelperTiming, StartHelper


class HelperProcess:
    """One run of `sqlstream.storage.worker.helper`.

    Raises:
        OSError: No more processes or descriptors.
    """

    def __init__(self, options: StorageOptions, timing: HelperTiming, environment: Mapping[str, str]) -> None:
        self.is_stopping = False
        """Its end is wanted, and no sign of a fault."""
        self.is_dead = False
        """It is reaped."""
        with locks.uninterrupted():
            self._process, ours = start_child("sqlstream.storage.worker.helper", environment)
            self.channel = Channel(ours)
        with contextlib.suppress(ChannelClosedError):  # dead already: its reader will see that
            self.channel.send([StartHelper(options=options, timing=timing, search_path=_search_path(options))])

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now, since it is not needed; a reader of the channel sees the end."""
        self.is_stopping = True
        self.end()

    def end(self) -> None:
        """End it now, since it does not answer."""
        self._process.kill()

    def close(self) -> None:
        """Make sure that it is dead, reap it, and close the channel."""
        self._process.kill()  # it may have closed its socket and live on
        self._process.wait()
        self.is_dead = True
        with locks.uninterrupted(), locks.fork_guard():
            locks.close_descriptor(self.channel.detach())

    def forget(self) -> None:
        """Drop what a forked child inherited: the process is the parent's, the socket is closed already."""
        forget_child(self._process)
        self.channel.forget()


def _search_path(options: StorageOptions) -> tuple[str, ...]:
    """Return where a helper looks for the functions that options name, as this process does."""
    has_function = options.storage_options.get("credentials") is not None or bool(options.providers)
    return tuple(place or os.getcwd() for place in sys.path) if has_function else ()
