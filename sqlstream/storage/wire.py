"""HTTP/1.1 on a socket, as far as a plain answer goes: a status, a few headers, a body of known length.

Reason: a request through obstore wakes its own runtime's threads and then ours, one through urllib3 takes three times the CPU
(m); and obstore follows redirects without asking. Whatever is not plain is left to urllib3: here nothing is guessed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

from sqlstream.config import StorageOptions
from sqlstream.storage.routes import tls_context
from sqlstream.storage.settings import network_settings

BUFFER_BYTES = 1 << 18
"""Read and written at a time; fits the second level cache, and holds a usual image whole."""
_MAX_HEAD_BYTES = 1 << 16  # as nginx and http.client have it, roughly
_MAX_IDLE = 256  # connections to one server that are kept; as many as downloads can run at a time
_TIMEVAL = struct.Struct("ll")  # of setsockopt


class UnusualAnswerError(Exception):
    """This is HTTP, or nearly, but not the part of it that is spoken here."""


class Origin(NamedTuple):
    """Where connections go to."""

    is_tls: bool
    host: str
    port: int


class Head(NamedTuple):
    """What comes before the body."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """By name in lower case."""

    @property
    def keeps_connection(self) -> bool:
        """Whether another request may follow."""
        return self.headers.get("connection", "keep-alive").lower() == "keep-alive"

    @property
    def length_bytes(self) -> int:
        """Bytes of the body.

        Raises:
            UnusualAnswerError: It is not said plainly.
        """
        length = self.headers.get("content-length", "")
        if "transfer-encoding" in self.headers or not (length.isascii() and length.isdigit()):
            raise UnusualAnswerError(f"no plain length: {length!r}")
        return int(length)


class Connection:
    """A connection that is kept; one thread at a time uses it.

    Args:
        origin: Where to.
        options: Timeouts.
        context: For TLS.

    Raises:
        OSError: It is not reached (`ssl.SSLError`: or not trusted).
    """

    def __init__(self, origin: Origin, options: StorageOptions, context: ssl.SSLContext | None) -> None:
        self.origin = origin
        self._socket = socket.create_connection((origin.host, origin.port), timeout=options.connect_timeout_seconds)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._stop = 0  # bytes in the buffer that nobody has taken
        self._flags = int(socket.MSG_WAITALL)
        self._broken: OSError | None = None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        silence = options.read_timeout_seconds
        try:
            if context is not None:
                self._flags = 0
                self._socket = context.wrap_socket(self._socket, server_hostname=origin.host)
                self._socket.settimeout(silence)
            else:  # the kernel's timeout: Python's own costs a poll before each call
                self._socket.settimeout(None)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(silence), int(silence % 1 * 1e6)))
        except BaseException:
            self._socket.close()
            raise

    @property
    def is_idle(self) -> bool:
        """Whether nothing came since the last answer: what comes unasked is the end."""
        return self._start == self._stop and not self._poll.poll(0)

    def ask(self, request: bytes) -> Head:
        """Send a request; return the head of its answer.

        Raises:
            OSError: The connection broke, or stayed silent too long.
            UnusualAnswerError: No head that is understood here.
        """
        self._socket.sendall(request)
        self._start = self._stop = 0
        while (end := self._buffer.find(b"\r\n\r\n", 0, self._stop)) < 0:
            if self._stop >= _MAX_HEAD_BYTES:
                raise UnusualAnswerError("the head of the answer does not end")
            self._receive(self._view[self._stop :], 0)
        self._start = end + 4
        return _parse(self._buffer[:end].decode("latin-1"))

    def read(self, num_bytes: int) -> memoryview:
        """Return the next bytes of the body, at least one and at most so many; they are valid until the next call.

        Raises:
            OSError: The connection broke, or stayed silent too long.
        """
        if self._broken is not None:
            raise self._broken
        if self._start == self._stop:
            self._start = self._stop = 0
        wanted = min(num_bytes, len(self._buffer) - self._start)
        if (missing := wanted - (self._stop - self._start)) > 0:
            try:
                self._receive(self._view[self._stop : self._stop + missing], self._flags)
            except OSError as error:
                if self._start == self._stop:
                    raise
                self._broken = error  # first what has come
        start, self._start = self._start, min(self._stop, self._start + wanted)
        return self._view[start : self._start]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive(self, into: memoryview, flags: int) -> None:
        try:
            num_bytes = self._socket.recv_into(into, 0, flags)
        except BlockingIOError:  # how the kernel says that its timeout is over
            raise TimeoutError("the server is silent") from None
        if not num_bytes:
            raise ConnectionResetError("the server closed the connection in the middle")
        self._stop += num_bytes


class Connections:
    """Opens connections and keeps the idle ones; thread safe."""

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._idle: dict[Origin, deque[Connection]] = {}
        self._lock = threading.Lock()

    def take(self, origin: Origin) -> Connection:
        """Return a connection, the one used last if there is an idle one."""
        idle = self._idle.get(origin, deque())
        with contextlib.suppress(IndexError):
            while True:
                connection = idle.pop()
                if connection.is_idle:
                    return connection
                connection.close()
        return Connection(origin, self._options, self._context if origin.is_tls else None)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end."""
        with self._lock:
            idle = self._idle.setdefault(connection.origin, deque())
        if len(idle) < _MAX_IDLE:
            idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return tls_context(network_settings(self._options.storage_options))


def _parse(text: str) -> Head:
    """Return what the text of a head says."""
    first, *lines = text.split("\r\n")
    version, _, rest = first.partition(" ")
    status, _, reason = rest.partition(" ")
    if version != "HTTP/1.1" or not (status.isascii() and status.isdigit()):
        raise UnusualAnswerError(f"the answer begins with {first[:40]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name, value = name.lower(), value.strip()
        if not colon or name != name.strip() or (name == "content-length" and headers.get(name, value) != value):
            raise UnusualAnswerError(f"the answer has the header {line[:40]!r}")
        headers[name] = value
    return Head(status=int(status), reason=reason, headers=headers)
