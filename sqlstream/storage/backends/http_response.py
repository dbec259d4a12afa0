"""Answers of http.client, read so that each ends where its server says: by the deadline, and with nothing behind it."""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import re
import socket
import ssl
import time
from contextvars import ContextVar
from typing import Any

from urllib3.util.response import assert_header_parsing
from urllib3.util.wait import wait_for_read

from sqlstream.storage.backends.http_head import reading_heads

_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?\r?\n")  # RFC 9112, 7.1: blanks before extensions are to be read
_BUFFER_BYTES = 1 << 16  # a small object comes with its head, in one read and one write
_SHOWN_CHARACTERS = 40  # arbitrary: of an answer that is no HTTP
_MAX_INTERIM = 16  # arbitrary: answers 1xx before the answer

deadline_of_request: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""Deadline of this thread's request, by the monotonic clock: urllib3 cannot pass it on to a connection."""


_begin = reading_heads(http.client.HTTPResponse.begin)


class HttpResponse(http.client.HTTPResponse):
    """An answer whose head and body end at the deadline; answers 1xx before it are passed over."""

    def __init__(self, sock: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.has_more = False
        self._socket = sock
        self._reader = _BoundedReader(sock, self.fp.detach(), deadline_of_request.get())
        self.fp: Any = _Lines(self._reader, _BUFFER_BYTES)

    def begin(self) -> None:
        """Read the head; one that is cut, or of which a part cannot be read, is no head: what it lacks may be the coding.

        Raises:
            http.client.HTTPException: It is cut.
            urllib3.exceptions.HeaderParsingError: A part cannot be read.
        """
        _begin(self)
        if self._reader.is_at_end:
            raise http.client.HTTPException("the connection ended in the head of the answer")
        assert_header_parsing(self.headers)
        if self.chunked and self.fp is not None:
            self.fp.has_chunks = True

    def _close_conn(self) -> None:
        """Give the connection free at the end of the body; note bytes behind it, which show that its length is wrong.

        Such a connection is shut down, so that its pool drops it: the next answer there could be what else was left.
        """
        if self.fp is not None and (self.length == 0 or (self.chunked and not self.fp.has_chunks)):
            self.has_more = self._has_more()
            if self.has_more:
                outer = getattr(self._socket, "socket", self._socket)  # of a tunnel in a tunnel
                with contextlib.suppress(OSError):  # it is closed already
                    outer.shutdown(socket.SHUT_RDWR)
        super()._close_conn()  # type: ignore[misc]  # not in typeshed

    def _has_more(self) -> bool:
        self._reader.is_ended = True
        if self.fp.peek(1):
            return True
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.pending() > 0
        if not isinstance(self._socket, socket.socket) or not wait_for_read(self._socket, timeout=0):
            return False  # a tunnel in a tunnel shows nothing
        with contextlib.suppress(OSError):
            return bool(self._socket.recv(1, socket.MSG_PEEK))  # else it was closed
        return False

    def _safe_read(self, amt: int) -> bytes:
        """Read so many bytes: behind a chunk, the end of its line, which http.client throws away whatever it is."""
        is_behind_chunk = self.chunk_left == 0
        data: bytes = super()._safe_read(amt)  # type: ignore[misc]  # not in typeshed
        if is_behind_chunk and data != b"\r\n":
            raise http.client.HTTPException(f"a chunk is longer than its size: {data!r} follows")
        return data

    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(_MAX_INTERIM):
            try:
                version, status, reason = super()._read_status()  # type: ignore[misc]  # not in typeshed
            except http.client.RemoteDisconnected:
                raise
            except http.client.BadStatusLine as error:  # its text is the whole line: up to 64 KiB of whatever the server sent
                begun = str(error.args[0])[:_SHOWN_CHARACTERS].encode("latin-1")
                text = (
                    f"the server does not answer with HTTP: its answer begins with {begun!r}; check scheme and port of the URL"
                )
                raise http.client.HTTPException(text) from None
            if not 100 < status < 200 or status == http.client.SWITCHING_PROTOCOLS:
                return version, status, reason
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException(f"more than {_MAX_INTERIM} answers 1xx")


class _Lines(io.BufferedReader):
    """The bytes of an answer; its lines have no carriage return within, and the size of a chunk is hexadecimal digits.

    Else another server on the way reads another answer, and what is content to the one is a head to the other. Python ends a
    header at a bare carriage return. http.client and urllib3 read a size by `int(…, 16)`, which takes `1_0`, `+10` and ` 0x10`
    for 16, too.
    """

    has_chunks = False
    """A line is the size of a chunk: set behind the head, and taken back by the last chunk, which trailers follow."""

    def readline(self, size: int | None = -1, /) -> bytes:
        """Return a line.

        Raises:
            http.client.HTTPException: It should be the size of a chunk, and is none; or it has a carriage return within.
        """
        line = super().readline(size)
        if b"\r" in line.removesuffix(b"\r\n"):
            raise http.client.HTTPException(f"a carriage return within the line {line[:40]!r}")
        if self.has_chunks and line:
            match = _CHUNK_SIZE.match(line)
            if match is None:
                raise http.client.HTTPException(f"the size of a chunk is {line[:40]!r}")
            self.has_chunks = match[1].strip(b"0") != b""
        return line


class _BoundedReader(io.RawIOBase):
    """The bytes of a socket until a deadline, which bounds each wait for some of them."""

    def __init__(self, sock: Any, raw: Any, deadline: float) -> None:
        super().__init__()
        self._socket = sock
        self._raw = raw
        self._deadline = deadline
        self.is_at_end = False
        """The other side closed the connection."""
        self.is_ended = False
        """The body is read: what follows is none of its bytes."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.is_ended:
            return None  # nothing at the moment
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the timeout of the request is over")
        patience = self._socket.gettimeout()
        if patience is None or left < patience:
            self._socket.settimeout(left)
        num_bytes: int | None = self._raw.readinto(buffer)
        self.is_at_end = num_bytes == 0
        return num_bytes

    def close(self) -> None:
        try:
            self._raw.close()
        finally:
            super().close()
