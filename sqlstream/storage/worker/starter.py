"""The starter: `python -P -m sqlstream.storage.worker.starter SOCKET_FD PARENT_PID`; forks helpers that have imported all.

A helper that is started with the interpreter imports for 0.2 s of CPU before its first request (m), in each worker. This
process imports once, never starts a thread and makes no request, so that its forks are sound, and does nothing else. Started,
asked and ended by `storage.client.starter`; ends by itself when all who may ask are gone, when its parent is, and after
`IDLE_SECONDS` without a request while none of its helpers runs.

A request (`ForkHelper`) is one datagram. There is no answer but the helper's own first frame (`Started`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence

from sqlstream.storage.protocol.channel import Channel, ChannelClosedError
from sqlstream.storage.protocol.messages import NUM_FORK_DESCRIPTORS, ForkHelper, Started
from sqlstream.storage.worker.helper import has_ended, serve

IDLE_SECONDS = 600.0
"""Time without a request after which it ends; arbitrary, longer than most programs take from a dataset to its workers."""
_REQUEST_BYTES = 4096  # more than any request has


class ForkServer:
    """State of the starter process.

    Args:
        requests: Datagrams of those who want a helper.
        parent: A pidfd of the process that started this one.
    """

    def __init__(self, requests: socket.socket, parent: int) -> None:
        self._requests = requests
        self._parent = parent
        self._num_helpers = 0
        self._ends, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # else no byte is written to the pipe

    def run(self) -> None:
        """Fork until no process may ask any more."""
        poll = select.poll()
        for descriptor in (self._requests.fileno(), self._parent, self._ends):
            poll.register(descriptor, select.POLLIN)
        is_ready = False
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(IDLE_SECONDS * 1000 if is_ready else 0)}
            if self._ends in ready:
                os.read(self._ends, 4096)
                self._reap()
            if self._parent in ready:
                return
            if self._requests.fileno() in ready:
                if not self._take():
                    return
            elif not is_ready:  # the first helper did not have to wait for what it may not need
                _import_clients()
                gc.freeze()
                is_ready = True
            elif not ready and not self._num_helpers:
                return

    def _take(self) -> bool:
        """Fork a helper for the next request; return False if there can be no other."""
        data, descriptors, *_ = socket.recv_fds(self._requests, _REQUEST_BYTES, NUM_FORK_DESCRIPTORS)
        try:
            if (
                len(descriptors) == NUM_FORK_DESCRIPTORS
            ):  # else this process may not open more: the reader sees a channel that ends
                assert len(os.listdir("/proc/self/task")) == 1, "a client has started a thread, which a fork would not have"
                if os.fork() == 0:
                    self._be_helper(pickle.loads(data), descriptors)
                self._num_helpers += 1
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return bool(data)

    def _be_helper(self, request: ForkHelper, descriptors: Sequence[int]) -> None:
        """Be what the reader's own child would be, and serve it; never returns."""
        try:
            channel, reader_alive, errors, place = descriptors
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._requests.close()
            for descriptor in (self._parent, self._ends, self._wake):
                os.close(descriptor)
            os.setpgid(0, 0)
            os.dup2(errors, 2)
            os.fchdir(place)
            os.close(errors)
            os.close(place)
            _take_limits(request.reader)
            ours = Channel(socket.socket(fileno=channel))
            myself = os.pidfd_open(os.getpid())
            ours.send([Started(pid=os.getpid())], [myself])
            os.close(myself)
            serve(ours, lambda: not has_ended(reader_alive))
        except ChannelClosedError:
            pass  # who asked for it has ended, and nothing else reads this channel
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                self._num_helpers -= 1


def _import_clients() -> None:
    """Import what requests need; neither starts a thread before its first request (m)."""
    with contextlib.suppress(ImportError):
        import sqlstream.storage.backends.http
    with contextlib.suppress(ImportError):
        import sqlstream.storage.backends.obstore  # noqa: F401 - for the forks


def _take_limits(reader: int) -> None:
    """Take the limits and processors of the reader, as its child would have them; it may be gone already."""
    for name in dir(resource):
        if name.startswith("RLIMIT_"):
            with contextlib.suppress(OSError, ValueError):
                limit = getattr(resource, name)
                resource.setrlimit(limit, resource.prlimit(reader, limit))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(reader))


def main() -> None:
    """Serve until no process may ask any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests, parent_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    with contextlib.suppress(ProcessLookupError):
        parent = os.pidfd_open(parent_pid)
        if os.getppid() == parent_pid:
            ForkServer(requests, parent).run()
    os._exit(0)


if __name__ == "__main__":
    main()
