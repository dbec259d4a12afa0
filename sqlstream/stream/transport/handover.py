"""Keeps paths of batches valid that are under way when their worker has ended: its pins go to the trainer.

A worker is one owner of the cache; the owner's pins hold as long as a process has its locked file open. As the worker ends, it
sends a duplicate of that descriptor into a socket that the trainer has had since the dataset was made. The trainer need not
read it: the kernel keeps a descriptor in a socket open, and closes it with the socket, however the trainer ends. So this serves
every kind of loader and every start method, and no code runs in the trainer. The workers of the next iteration close what those
of earlier ones have sent; so does the trainer when the dataset is closed or collected. Each StreamingDataLoader has a socket of
its own; torch's own loaders of a dataset share one, since a worker cannot tell them apart.

A worker that is killed sends nothing: its batches are lost, too. Rejected: to hand pins over in the ledger, to an owner of the
trainer's, which has none in an iteration; and a read lock for each file, which takes a descriptor each.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import get_worker_info

from sqlstream.cache.session import CacheSession
from sqlstream.process import locks

logger = logging.getLogger(__name__)

_ITERATION = struct.Struct("<q")
_PRIORITY = 20
"""Priority among the finalizers of a worker: before multiprocessing waits for the thread that sends its last batches."""


class Handover:
    """The socket into which workers of a dataset send their pins as they end; made in the trainer, copied into each worker.

    Args:
        fds: The trainer's two ends of a socket, the one to send and the one to receive; None: this process is the trainer.
    """

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        trainer = os.getpid() if fds is None else None
        if fds is None:
            sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (sender, receiver):
                end.setblocking(False)
            receiver.send(b"\0")  # the other direction serves `may_warn` alone
            fds = sender.detach(), receiver.detach()
        self._fds = fds
        self._worker = 0
        """Id of the worker process that has called `begin`."""
        self._asked = 0
        """Id of the process that has called `may_warn`."""
        self._close = weakref.finalize(self, _end, fds, trainer)

    @classmethod
    def new(cls) -> Handover | None:
        """Return a new one; None, with a warning, where there are no descriptors left."""
        try:
            return cls()
        except OSError as error:
            logger.warning("paths in samples stay valid only as long as their DataLoader worker runs: %s", error)
            return None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker that is being started; any other copy has a socket of its own."""
        if get_spawning_popen() is None or not self._close.alive:
            return (Handover, ())
        return (_attached, tuple(map(DupFd, self._fds)))

    def begin(self, sessions: Sequence[CacheSession]) -> None:
        """In a worker, at its first sample: release what earlier iterations left; send this one's pins as it ends."""
        info = get_worker_info()
        if info is None or self._worker == os.getpid() or not self._close.alive:
            return
        self._worker = os.getpid()
        iteration = (info.seed - info.id) % (1 << 63)  # torch draws a seed for each iterator
        with locks.uninterrupted(), locks.fork_guard():
            for number, fd in list(_left_in(self._fds[1])):
                if number == iteration:  # of a worker of the same iteration, which has ended already
                    self._send(number, fd)
                os.close(fd)
        for session in sessions:
            end = Finalize(None, session.hand_over, args=(lambda fd: self._send(iteration, fd),), exitpriority=_PRIORITY)
            atexit.register(end)  # Python 3.13 has a spawned worker end like a program, in which caches close before `end` runs

    def may_warn(self) -> bool:
        """Return True to one process of the dataset, once: workers of later iterations know nothing of earlier ones.

        The process that takes the trainer's one byte out of the socket gets True.
        """
        if self._asked == os.getpid() or not self._close.alive:
            return False
        self._asked = os.getpid()
        try:
            with _socket(self._fds[0]) as sender:
                return bool(sender.recv(1))
        except BlockingIOError:
            return False
        except OSError:  # no descriptors are left: warn, perhaps a second time
            return True

    def _send(self, iteration: int, fd: int) -> None:
        """Send a descriptor to the trainer."""
        try:
            with _socket(self._fds[0]) as sender:
                socket.send_fds(sender, [_ITERATION.pack(iteration)], [fd])
        except OSError as error:
            logger.warning("paths of batches under way are not kept any more, since their worker has ended: %s", error)

    def close(self) -> None:
        """Release all pins that ended workers have sent."""
        self._close()


class LoaderHandovers:
    """One `Handover` for each StreamingDataLoader of a dataset: the workers of one release no pins of another's.

    The handover of a collected loader stays until the next iteration of any loader: its last batch may be in hand.
    """

    def __init__(self) -> None:
        self._of: list[tuple[weakref.ref[object], Handover]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the handovers: a worker has its own loader's in the pipeline."""
        return (LoaderHandovers, ())

    def of(self, loader: object) -> Handover | None:
        """Return the handover of a loader that begins an iteration; None: there are no descriptors left."""
        living: list[tuple[weakref.ref[object], Handover]] = []
        for reference, handover in self._of:
            if reference() is None:
                handover.close()
            else:
                living.append((reference, handover))
        self._of = living
        found = next((handover for reference, handover in living if reference() is loader), None)
        if found is None and (found := Handover.new()) is not None:
            living.append((weakref.ref(loader), found))
        return found

    def close(self) -> None:
        """Release all pins that ended workers have sent."""
        while self._of:
            self._of.pop()[1].close()


def _attached(sender: Any, receiver: Any) -> Handover:
    return Handover((sender.detach(), receiver.detach()))


def _socket(fd: int) -> socket.socket:
    """Return a duplicate of a descriptor as a socket that never waits; a default timeout of sockets does not count."""
    duplicate = socket.socket(fileno=os.dup(fd))
    duplicate.setblocking(False)
    return duplicate


def _left_in(receiver: int) -> Iterator[tuple[int, int]]:
    """Take out what lies in the socket: iterations, and descriptors, which the caller closes."""
    with _socket(receiver) as end, contextlib.suppress(BlockingIOError):
        while True:
            message, fds, _, _ = socket.recv_fds(end, _ITERATION.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            for fd in fds:
                yield _ITERATION.unpack(message)[0], fd


def _end(fds: tuple[int, int], trainer: int | None) -> None:
    """Close the socket; the trainer empties it before, since its children may have it open, too."""
    with contextlib.suppress(OSError):
        if os.getpid() == trainer:
            for _, fd in _left_in(fds[1]):
                os.close(fd)
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
