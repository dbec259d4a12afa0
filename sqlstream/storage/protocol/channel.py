"""Messages and open descriptors over a Unix stream socket.

A frame is its length and number of descriptors, then a pickled list. Descriptors ride on the frame's first bytes (SCM_RIGHTS),
so they are here before the frame is whole.
"""

from __future__ import annotations

import contextlib
import errno
import pickle
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

_HEADER = struct.Struct("<QI")  # bytes of the pickle, number of descriptors
MAX_DESCRIPTORS = 200  # of one frame; the kernel takes 253
_READ_BYTES = 1 << 16
_LOOK_SECONDS = 0.01
"""Time between two looks whether others have taken descriptors that are on their way; arbitrary."""


class ChannelClosedError(Exception):
    """The other side is gone."""


class Channel:
    """One end of a socketpair: any thread may send, one thread receives.

    Args:
        connection: A connected AF_UNIX SOCK_STREAM socket; the channel owns it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, messages: Sequence[object], descriptors: Sequence[int] = ()) -> None:
        """Send one frame; blocks while the other side is slow to read.

        Raises:
            ChannelClosedError: The other side is gone, or `detach` was called.
        """
        payload = pickle.dumps(list(messages), protocol=pickle.HIGHEST_PROTOCOL)
        frame = memoryview(_HEADER.pack(len(payload), len(descriptors)) + payload)
        try:
            with self._send_lock:
                num_sent = self._send_descriptors(frame, list(descriptors)) if descriptors else 0
                self._socket.sendall(frame[num_sent:])
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError from error
        except OSError as error:
            if self._socket.fileno() == -1:
                raise ChannelClosedError from error
            raise

    def _send_descriptors(self, frame: memoryview, descriptors: list[int]) -> int:
        """Send descriptors with the start of a frame; return how much of it.

        A user has no more of them on their way, from all of its processes, than this one may open: helpers that start side by
        side, for the workers of a node, have not taken theirs yet.
        """
        while True:
            try:
                return socket.send_fds(self._socket, [frame], descriptors)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    raise
            time.sleep(_LOOK_SECONDS)

    def receive(self, timeout_seconds: float | None = None) -> tuple[list[Any], list[int]]:
        """Wait for a frame; return its messages and its descriptors, which are the caller's from now on.

        Fewer descriptors than were sent come when this process may not open more.

        Raises:
            ChannelClosedError: The other side is gone.
            TimeoutError: Nothing came for `timeout_seconds`; what has come of a frame is kept.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._is_frame_whole():
            # not settimeout: it would bound the sends of other threads too
            if timeout_seconds is not None and not poll.poll(timeout_seconds * 1000):
                raise TimeoutError
            try:
                data, descriptors, _flags, _ = socket.recv_fds(self._socket, _READ_BYTES, 256)
            except ConnectionResetError as error:
                raise ChannelClosedError from error
            if not data:
                raise ChannelClosedError
            self._buffer += data
            self._descriptors.extend(descriptors)
        length, num_descriptors = _HEADER.unpack_from(self._buffer)
        stop = _HEADER.size + length
        messages: list[Any] = pickle.loads(memoryview(self._buffer)[_HEADER.size : stop])
        del self._buffer[:stop]
        return messages, [self._descriptors.popleft() for _ in range(min(num_descriptors, len(self._descriptors)))]

    def shutdown(self) -> None:
        """Have both sides see the end; for a frame that was cut off half way (KeyboardInterrupt)."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def detach(self) -> int:
        """Give up the socket and return its descriptor, once no other thread is sending."""
        with self._send_lock:
            return self._socket.detach()

    def forget(self) -> None:
        """Give up a socket whose descriptor is closed already (in a forked child)."""
        self._socket.detach()

    def _is_frame_whole(self) -> bool:
        if len(self._buffer) < _HEADER.size:
            return False
        length: int = _HEADER.unpack_from(self._buffer)[0]
        return len(self._buffer) >= _HEADER.size + length
