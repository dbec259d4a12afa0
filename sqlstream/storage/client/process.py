"""The helper process as its owner sees it: started, talked to, killed, reaped."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping

from sqlstream.config import StorageOptions
from sqlstream.process import locks
from sqlstream.process.children import ForkedChild, forget_child, start_child
from sqlstream.storage.client.starter import STARTER
from sqlstream.storage.protocol.channel import Channel, ChannelClosedError
from sqlstream.storage.protocol.messages import HelperTiming, Started, StartHelper, ToReader


class HelperProcess:
    """One run of `sqlstream.storage.worker.helper`, forked by this process's starter where there is one.

    Raises:
        OSError: No more processes or descriptors.
    """

    def __init__(self, options: StorageOptions, timing: HelperTiming, environment: Mapping[str, str]) -> None:
        self.is_stopping = False
        """Its end is wanted, and no sign of a fault."""
        self.is_dead = False
        """It is reaped."""
        self._process: subprocess.Popen[bytes] | ForkedChild
        with locks.uninterrupted():
            if (forked := STARTER.fork_helper(environment)) is not None:
                self._process, ours = forked
            else:
                self._process, ours = start_child("sqlstream.storage.worker.helper", environment)
            self.channel = Channel(ours)
        with contextlib.suppress(ChannelClosedError):  # dead already: its reader will see that
            self.channel.send([StartHelper(options=options, timing=timing, search_path=_search_path(options))])

    @property
    def pid(self) -> int:
        """Process id; 0 of one that is being forked."""
        return self._process.pid

    @property
    def is_forked(self) -> bool:
        """Whether a starter forks it."""
        return isinstance(self._process, ForkedChild)

    def wait_pid(self) -> int:
        """Return the process id, once it is known; 0 of one that died before."""
        return self._process.wait_known() if isinstance(self._process, ForkedChild) else self._process.pid

    def receive(self, timeout_seconds: float) -> list[ToReader]:
        """Wait for a frame; return its messages, none where it says only who the helper is.

        Raises:
            ChannelClosedError: The helper is gone.
            TimeoutError: Nothing came in time.
        """
        messages, descriptors = self.channel.receive(timeout_seconds)
        if messages and isinstance(messages[0], Started):
            assert isinstance(self._process, ForkedChild)
            self._process.note(messages[0].pid, *descriptors)
            return []
        return messages

    def kill(self) -> None:
        """End it now, since it is not needed; a reader of the channel sees the end."""
        self.is_stopping = True
        self.end()

    def end(self) -> None:
        """End it now, since it does not answer."""
        if self._process.kill() is False:
            self.channel.shutdown()

    def close(self) -> None:
        """Make sure that it is dead, reap it, and close the channel."""
        self._process.kill()  # it may have closed its socket and live on
        self._process.wait()
        self.is_dead = True
        with locks.uninterrupted(), locks.fork_guard():
            locks.close_descriptor(self.channel.detach())

    def forget(self) -> None:
        """Drop what a forked child inherited: the process is the parent's, the socket is closed already."""
        if isinstance(self._process, ForkedChild):
            self._process.forget()
        else:
            forget_child(self._process)
        self.channel.forget()


def _search_path(options: StorageOptions) -> tuple[str, ...]:
    """Return where a helper looks for the functions that options name, as this process does."""
    has_function = options.storage_options.get("credentials") is not None or bool(options.providers)
    return tuple(place or os.getcwd() for place in sys.path) if has_function else ()
