"""Starts Python processes of our own, which speak with their owner over a socket pair, and ends those of others with theirs."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

from sqlstream.process import locks

_LOOK_SECONDS = 1.0
"""Interval in which a process looks whether it has another parent. Arbitrary."""


def start_child(
    module: str, environment: Mapping[str, str], kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module DESCRIPTOR PARENT_PID`; return the process and our end of the socket pair.

    Forked children close our end, which is a recorded descriptor. A process group of its own keeps Ctrl-C and other signals to
    the terminal's group away from the child.

    Args:
        module: Its `main` takes the descriptor and the parent's process id from the command line.
        environment: All of its environment variables (`config.child_environment`).
        kind: Of the sockets.

    Raises:
        OSError: No more processes or descriptors.
    """
    with locks.uninterrupted(), locks.fork_guard():
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        locks.adopt_descriptor(ours.fileno())
        locks.adopt_descriptor(theirs.fileno())
        try:
            process = subprocess.Popen(
                # -P: neither the script's nor the working directory may shadow a module
                [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # standard error stays: a crash of the interpreter is written there
                env=environment,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )
        except OSError:
            locks.close_descriptor(ours.detach())
            raise
        finally:
            locks.close_descriptor(theirs.detach())
    return process, ours


def forget_child(process: subprocess.Popen[bytes]) -> None:
    """Drop, in a forked child, a process of the parent: else Popen warns, and waits for a process that is no child of ours."""
    process.returncode = 0


def end_with_parent() -> None:
    """Have this process, if `multiprocessing` has started it, end as soon as the one is gone that it was started for; once.

    Torch's workers look for that between batches only, and compare with the parent that they have as they begin: one whose
    trainer was killed before that would wait for work for ever, with its pins.
    """
    _watch(os.getpid())


@functools.cache
def _watch(_pid: int) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.pid, parent.sentinel), name="parent", daemon=True).start()


def _end_with(parent_pid: int | None, sentinel: int) -> None:
    is_child = os.getppid() == parent_pid  # a forkserver has others
    while not multiprocessing.connection.wait([sentinel], _LOOK_SECONDS):  # siblings that were forked later keep it open, too
        if is_child and os.getppid() != parent_pid:
            break
    os._exit(1)


class ForkedChild:
    """A process that another process of ours forked for this one; known by a pidfd, which arrives after it has started."""

    def __init__(self) -> None:
        self.pid = 0
        """Process id; 0 until it is known."""
        self._pidfd = -1
        self._is_unwanted = False
        self._is_known = threading.Event()

    def note(self, pid: int, pidfd: int) -> None:
        """Note who it is; its descriptor is ours from now on."""
        with locks.uninterrupted(), locks.fork_guard():
            self.pid, self._pidfd = pid, locks.adopt_descriptor(pidfd)
        self._is_known.set()
        if self._is_unwanted:
            self.kill()

    def kill(self) -> bool:
        """End it, now or as soon as it is known; return False in that case: the end of its socket ends it, too."""
        self._is_unwanted = True
        with locks.uninterrupted(), locks.fork_guard():
            if self._pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return self._is_known.is_set()

    def wait_known(self) -> int:
        """Wait until it is known, or is to be none; return its process id, 0 for none."""
        self._is_known.wait()
        return self.pid

    def wait(self) -> None:
        """Wait until it has ended; its parent reaps it."""
        if self._pidfd >= 0:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll()
            with locks.uninterrupted(), locks.fork_guard():
                locks.close_descriptor(self._pidfd)
                self._pidfd = -1
        self._is_known.set()

    def forget(self) -> None:
        """Drop what a forked child inherited; the descriptor is closed already."""
        self._pidfd = -1
