"""The helper process as its owner sees it: started, talked to, killed, reaped."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import sqlstream
from sqlstream.config import StorageOptions, child_environment
from sqlstream.process import locks
from sqlstream.storage.protocol.channel import Channel, ChannelClosedError
from sqlstream.storage.protocol.messages import HelperTiming, StartHelper


class HelperProcess:
    """One run of `sqlstream.storage.worker.helper`.

    A process group of its own keeps Ctrl-C and other signals to the terminal's group away from it.

    Raises:
        OSError: No more processes or descriptors.
    """

    def __init__(self, options: StorageOptions, timing: HelperTiming) -> None:
        self.is_stopping = False
        """Its end is wanted: what it was asked ends with it."""
        self.is_dead = False
        """It is reaped."""
        with locks.uninterrupted(), locks.fork_guard():
            ours, theirs = socket.socketpair()
            locks.adopt_descriptor(ours.fileno())
            locks.adopt_descriptor(theirs.fileno())
            try:
                self._process = self._start(theirs.fileno())
            except OSError:
                locks.close_descriptor(ours.detach())
                raise
            finally:
                locks.close_descriptor(theirs.detach())
        self.channel = Channel(ours)
        with contextlib.suppress(ChannelClosedError):  # dead already: its reader will see that
            self.channel.send([StartHelper(options=options, timing=timing)])

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now, and with it what it was asked; whoever reads the channel sees the end."""
        self.is_stopping = True
        self.end()

    def end(self) -> None:
        """End it now; another one gets its requests."""
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
        self._process.returncode = 0  # else Popen warns, and waits for a process that is no child of ours
        self.channel.forget()

    @staticmethod
    def _start(descriptor: int) -> subprocess.Popen[bytes]:
        # -P: neither the script's nor the working directory may shadow a module; the environment says where sqlstream is
        command = [sys.executable, "-P", "-m", "sqlstream.storage.worker.helper", str(descriptor), str(os.getpid())]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # standard error stays: a crash of the interpreter is written there
            env=child_environment(Path(sqlstream.__file__).resolve().parents[1]),
            pass_fds=[descriptor],
            process_group=0,
        )
