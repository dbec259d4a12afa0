"""The starter of this process as those see it who want a helper: this process, and the ones that are forked from it."""

from __future__ import annotations

import logging
import os
import pickle
import select
import socket
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from sqlstream.process import fork, locks
from sqlstream.process.children import ForkedChild, forget_child, start_child
from sqlstream.storage.protocol.messages import ForkHelper

_logger = logging.getLogger(__name__)


class ForkedHelper(NamedTuple):
    """A helper that is being forked, and our end of its channel."""

    process: ForkedChild
    ours: socket.socket


class _Owner(NamedTuple):
    """What a forked helper has from its starter, and cannot take from its reader."""

    environment: Mapping[str, str]
    user: int
    group: int


class Starter:
    """At most one starter process, which lives while anyone has asked for it that has not left; thread safe, fork aware.

    A forked child keeps the socket: it may ask, too, and starts no other. Linux alone has what this needs (pidfds).
    """

    def __init__(self) -> None:
        self._lock = locks.StateLock()
        self._users: set[object] = set()
        self._process: subprocess.Popen[bytes] | None = None
        """None in a child that was forked since."""
        self._socket: socket.socket | None = None
        self._owner: _Owner | None = None
        self._is_trusted = hasattr(os, "pidfd_open")
        """False: helpers are started with the interpreter."""
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Keep the socket, which is open in both; the process is the parent's."""
        if self._process is not None:
            forget_child(self._process)
        self._users, self._process = set(), None

    @property
    def pid(self) -> int | None:
        """Process id of the starter that this process has started."""
        return None if self._process is None else self._process.pid

    def keep(self, user: object, environment: Mapping[str, str]) -> None:
        """Have a starter for this user, until it leaves; without effect where none can be had."""
        with self._lock:
            if self._is_trusted and self._socket is None:
                try:
                    with locks.uninterrupted(), locks.fork_guard():
                        module, kind = "sqlstream.storage.worker.starter", socket.SOCK_SEQPACKET
                        self._process, self._socket = start_child(module, environment, kind)
                        locks.share_descriptor(self._socket.fileno())
                except OSError as error:
                    self._distrust(str(error))
                self._owner = _Owner(environment, os.geteuid(), os.getegid())
            if self._socket is not None:
                self._users.add(user)

    def leave(self, user: object) -> None:
        """End the starter if this was its last user in the process that started it."""
        with self._lock:
            self._users.discard(user)
            if not self._users and self._process is not None:
                self._end()

    def fork_helper(self, environment: Mapping[str, str]) -> ForkedHelper | None:
        """Ask for a helper; None where it must be started with the interpreter."""
        with self._lock, locks.uninterrupted(), locks.fork_guard():
            if self._socket is None or self._owner != _Owner(environment, os.geteuid(), os.getegid()):
                return None
            lent: list[int] = []
            try:
                ours, theirs = socket.socketpair()
                lent.append(locks.adopt_descriptor(theirs.detach()))
                locks.adopt_descriptor(ours.fileno())
            except OSError:
                return None
            try:
                lent.append(locks.adopt_descriptor(os.pidfd_open(os.getpid())))
                lent.append(locks.adopt_descriptor(os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)))
                channel, myself, place = lent
                request = pickle.dumps(ForkHelper(reader=os.getpid()))
                socket.send_fds(self._socket, [request], [channel, myself, 2, place], socket.MSG_DONTWAIT)
            except OSError as error:
                locks.close_descriptor(ours.detach())
                self._note_refusal(error)
                return None
            finally:
                locks.close_descriptors(lent)
        return ForkedHelper(ForkedChild(), ours)

    def distrust(self) -> None:
        """Note that a helper that it forked died before its first word: others are started with the interpreter.

        A forked child is not told when the owner ends the starter, and its request is lost with it: that is no fault.
        """
        with self._lock:
            if self._process is None and self._socket is not None and _is_hung_up(self._socket):
                self._end()
            else:
                self._distrust("a helper that it forked died at once")

    def _note_refusal(self, error: OSError) -> None:
        """End a starter that takes no requests; one that has ended because it was idle may be followed by another."""
        if self._process is not None and self._process.poll() == 0:
            self._end()
        elif self._process is not None:
            self._distrust(str(error))
        else:
            self._end()

    def _distrust(self, reason: str) -> None:
        if self._is_trusted:
            _logger.warning("the process that forks helpers is of no use (%s): helpers are started anew", reason)
        self._is_trusted = False
        self._end()

    def _end(self) -> None:
        """Let the process go; the caller holds the lock."""
        process, self._process = self._process, None
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        if process is not None:
            process.kill()
            process.wait()


def _is_hung_up(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(0))


STARTER = Starter()
"""Of this process."""
