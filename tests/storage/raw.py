"""A server that sends what a test tells it to, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable


class RawServer:
    """Answers requests with its answers in turn, each in two parts, and counts connections.

    Args:
        answers: Heads and bodies as they go over the wire, or functions that make one from the head of the request. One with
            `Connection: close`, or without the end of its head, ends its connection.
        cut: Bytes of the first part.
        always: Answer when there are no more.
    """

    def __init__(
        self, *answers: bytes | Callable[[str], bytes], cut: int = 40, always: bytes | Callable[[str], bytes] | None = None
    ) -> None:
        self._answers = list(answers)
        self._cut = cut
        self._always = always
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._threads: list[threading.Thread] = []
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self.requests: list[str] = []
        """Heads of the requests so far."""
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/bucket/x"

    @property
    def num_connections(self) -> int:
        """Connections so far."""
        return len(self._connections)

    def __enter__(self) -> RawServer:
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Close all connections and wait for the threads."""
        for open_socket in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                open_socket.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._acceptor, *self._threads):
            thread.join(300)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection = self._listener.accept()[0]
                self._connections.append(connection)
                thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while request := _request(connection):
                with self._lock:
                    self.requests.append(request)
                    following = self._answers.pop(0) if self._answers else self._always
                if following is None:
                    return
                answer = following if isinstance(following, bytes) else following(request)
                for part in (answer[: self._cut], answer[self._cut :]):
                    connection.sendall(part)
                if b"Connection: close" in answer or b"\r\n\r\n" not in answer:
                    return


def _request(connection: socket.socket) -> str:
    """Return the head of the next request, '' at the end."""
    request = b""
    while b"\r\n\r\n" not in request:
        if not (data := connection.recv(4096)):
            return ""
        request += data
    return request.decode("latin-1")
