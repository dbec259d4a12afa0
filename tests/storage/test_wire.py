"""The direct HTTP client against a server that sends what it is told to, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import StorageError, TransientStorageError
from sqlstream.storage.base import ObjectInfo, UnsupportedAnswerError
from sqlstream.storage.direct_backend import DirectHttpStorage
from sqlstream.storage.wire import BUFFER_BYTES

OK = b"HTTP/1.1 200 OK\r\n"
LARGE = bytes(range(256)) * (BUFFER_BYTES // 100)


class RawServer:
    """Answers each request with the next of its answers, in two parts, and counts connections."""

    def __init__(self, *answers: bytes, cut: int = 40) -> None:
        self._answers = list(answers)
        self._cut = cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.num_connections = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/x"

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(300)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while self._answers:
                connection = self._listener.accept()[0]
                self.num_connections += 1
                with connection, contextlib.suppress(OSError):
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while self._answers and self._hears_request(connection):
            answer = self._answers.pop(0)
            for part in (answer[: self._cut], answer[self._cut :]):
                connection.sendall(part)
            if b"Connection: close" in answer:
                return

    def _hears_request(self, connection: socket.socket) -> bool:
        request = b""
        while b"\r\n\r\n" not in request:
            if not (data := connection.recv(4096)):
                return False
            request += data
        return True


@pytest.fixture
def storage() -> Iterator[DirectHttpStorage]:
    storage = DirectHttpStorage(StorageOptions(read_timeout_seconds=20.0))
    yield storage
    storage.close()


def read(storage: DirectHttpStorage, url: str) -> tuple[ObjectInfo, bytes]:
    stream = storage.get(url)
    try:
        return stream.info, b"".join(bytes(chunk) for chunk in stream.chunks())
    finally:
        stream.close()


@pytest.mark.parametrize("body", [b"", b"x", LARGE], ids=["empty", "small", "several buffers"])
@pytest.mark.parametrize("cut", [5, 40, 70], ids=["in the first line", "in the head", "in the body"])
def test_answers_are_read_however_they_are_cut(storage: DirectHttpStorage, body: bytes, cut: int) -> None:
    answer = OK + b'ETag: "1"\r\ncontent-length:%d\r\n\r\n' % len(body) + body
    with RawServer(answer, answer.replace(b"\r\nETag", b"\r\nConnection: close\r\nETag"), answer, cut=cut) as server:
        for num_connections in (1, 1, 2):  # kept, and given up when the server says so
            assert read(storage, server.url) == (ObjectInfo(url=server.url, size_bytes=len(body), etag='"1"'), body)
            assert server.num_connections == num_connections
        storage.close()  # before the server waits for the end of its connection


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"Content-Length: 1\r\n\r\nx",
        b"ICY 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 OK\r\nContent-Length: 1\r\n\r\nx",
        OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\nx",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        OK + b"Content-Length: +1\r\n\r\nx",
        OK + b"Content-Length: -1\r\n\r\nx",
        OK + b"X: folded\r\n over lines\r\nContent-Length: 1\r\n\r\nx",
        OK + b"Content-Length : 1\r\n\r\nx",
        OK + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx",
        OK + b"X: " + b"x" * BUFFER_BYTES + b"\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    ],
)
def test_what_is_not_plain_is_left_to_the_other_client(storage: DirectHttpStorage, answer: bytes) -> None:
    with RawServer(answer) as server, pytest.raises(UnsupportedAnswerError):
        read(storage, server.url)


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: 5\r\nConnection: close\r\n\r\nxxx",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nContent-Range: bytes 0-9/100\r\n\r\nxxxxx",
        b"HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\n\r\nxxxxx",
    ],
    ids=["short", "another range than it says", "no range"],
)
def test_an_answer_that_contradicts_itself_is_tried_again(storage: DirectHttpStorage, answer: bytes) -> None:
    with RawServer(answer, cut=10) as server, pytest.raises(TransientStorageError):
        read(storage, server.url)


def test_a_kept_connection_that_the_server_has_closed_is_not_used(storage: DirectHttpStorage) -> None:
    answer = OK + b"Content-Length: 1\r\n\r\nx"
    with RawServer(answer) as server:
        read(storage, server.url)
        server._thread.join(300)  # it has closed the connection by then
    with pytest.raises(StorageError, match=r"(?i)refused"):
        read(storage, server.url)
