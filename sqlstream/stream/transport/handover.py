"""Paths of batches that are still under way when their worker has ended: its pins go to the trainer.

A worker pins what it gave away, as one owner of the cache, which lives for as long as a process has its locked file open. As it
ends, it sends a duplicate of that descriptor into a socket that the trainer has had since the dataset was made. The trainer
need not read it: the kernel keeps what lies in the socket open, and closes it with the socket, whatever the trainer dies of. So
one way serves every kind of loader and start of workers, and nothing of the trainer's runs. The workers of the next iteration
throw away what those of earlier ones have sent; so does the trainer when the dataset is closed or forgotten. Each
StreamingDataLoader has a socket of its own; torch's own loaders of a dataset share one, since a worker cannot tell them apart.

A worker that is killed sends nothing: its batches are lost, too. Rejected: to hand pins over in the ledger, to an owner of the
trainer's, which has none in an iteration; and a read lock for each file, which takes a descriptor each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import weakref
from collections.abc import Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from multiprocessing.util import Finalize
from typing import Any

from torch.utils.data import get_worker_info

from sqlstream.cache.acquire.acquirer import Acquirer
from sqlstream.process import locks

logger = logging.getLogger(__name__)

_ITERATION = struct.Struct("<q")
_PRIORITY = 20
"""Of what multiprocessing does as a worker ends: before the thread that sends its last batches is waited for."""


class Handover:
    """Where the workers of a dataset leave their pins as they end; made in the trainer, copied into each worker.

    Args:
        fds: The trainer's two ends of a socket, the one to send and the one to receive; None: this process is the trainer.
    """

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        trainer = os.getpid() if fds is None else None
        if fds is None:
            sender, receiver = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (sender, receiver):
                end.setblocking(False)
            receiver.send(b"\0")  # the other way, which nothing else takes: `may_warn`
            fds = sender.detach(), receiver.detach()
        self._fds = fds
        self._worker = 0
        """The worker process that has begun here."""
        self._asked = 0
        """The process that has asked whether it may warn."""
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
        """Go to a worker that is being started; a copy that is pickled otherwise begins anew."""
        if get_spawning_popen() is None or not self._close.alive:
            return (Handover, ())
        return (_attached, tuple(map(DupFd, self._fds)))

    def begin(self, acquirer: Acquirer) -> None:
        """In a worker, at its first sample: let go what earlier iterations left, and leave this process's pins as it ends."""
        info = get_worker_info()
        if info is None or self._worker == os.getpid() or not self._close.alive:
            return
        self._worker = os.getpid()
        iteration = (info.seed - info.id) % (1 << 63)  # torch draws a seed for each iterator
        with locks.uninterrupted(), locks.fork_guard():
            for number, fd in list(_left_in(self._fds[1])):
                if number == iteration:  # of a worker beside this one, which had little to do
                    self._send(number, fd)
                os.close(fd)
        Finalize(None, acquirer.hand_over, args=(lambda fd: self._send(iteration, fd),), exitpriority=_PRIORITY)

    def may_warn(self) -> bool:
        """Return True to one of all processes of the dataset, once: workers of later iterations know nothing of earlier ones.

        The one byte that the trainer has put into the socket goes to who takes it first.
        """
        if self._asked == os.getpid() or not self._close.alive:
            return False
        self._asked = os.getpid()
        try:
            with _socket(self._fds[0]) as sender:
                return bool(sender.recv(1))
        except BlockingIOError:
            return False
        except OSError:  # no descriptors are left: better twice than never
            return True

    def _send(self, iteration: int, fd: int) -> None:
        """Leave a descriptor to the trainer."""
        try:
            with _socket(self._fds[0]) as sender:
                socket.send_fds(sender, [_ITERATION.pack(iteration)], [fd])
        except OSError as error:
            logger.warning("paths of batches under way are not kept any more, since their worker has ended: %s", error)

    def close(self) -> None:
        """Let all go that ended workers have left."""
        self._close()


class LoaderHandovers:
    """One `Handover` for each loader of a dataset that says which it is: the workers of one let nothing of another's go.

    That of a loader which was forgotten stays until the next iteration of any: its last batch may be in hand.
    """

    def __init__(self) -> None:
        self._of: list[tuple[weakref.ref[object], Handover]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers have the one that they leave their pins in."""
        return (LoaderHandovers, ())

    def of(self, loader: object) -> Handover | None:
        """Return a loader's, as it begins an iteration; None where there are no descriptors left."""
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
        """Let all go that ended workers have left."""
        while self._of:
            self._of.pop()[1].close()


def _attached(sender: Any, receiver: Any) -> Handover:
    return Handover((sender.detach(), receiver.detach()))


def _socket(fd: int) -> socket.socket:
    """Return a duplicate of a descriptor as a socket that never waits, whatever timeout the program has set for sockets."""
    duplicate = socket.socket(fileno=os.dup(fd))
    duplicate.setblocking(False)
    return duplicate


def _left_in(receiver: int) -> Iterator[tuple[int, int]]:
    """Take what lies in the socket: the iteration, and the descriptor, to be closed by the caller or here."""
    with _socket(receiver) as end, contextlib.suppress(BlockingIOError):
        while True:
            message, fds, _, _ = socket.recv_fds(end, _ITERATION.size, 1, socket.MSG_CMSG_CLOEXEC)
            if not message:
                return
            for fd in fds:
                yield _ITERATION.unpack(message)[0], fd


def _end(fds: tuple[int, int], trainer: int | None) -> None:
    """Close the socket; the trainer, whose children may have it, too, takes out first what lies in it."""
    with contextlib.suppress(OSError):
        if os.getpid() == trainer:
            for _, fd in _left_in(fds[1]):
                os.close(fd)
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
