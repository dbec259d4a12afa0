"""An HTTP server that misbehaves on cue and counts requests exactly."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that a server has seen."""

    method: str
    path: str
    """Decoded, without the query."""
    range: str | None = None
    """The Range header."""
    headers: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """All headers, names in lower case; the S3 server keeps none."""


class Fault(StrEnum):
    """A fault of one answer."""

    STATUS = "status"
    """Answers with `status`, `headers` (Retry-After, …) and `body`."""
    RESET = "reset"
    """Resets the connection after `after_bytes` of the body (None: before the answer)."""
    TRUNCATE = "truncate"
    """Says the whole length, closes after `after_bytes`."""
    STALL = "stall"
    """Goes silent after `after_bytes` for `seconds` (None: before the answer), then closes."""
    DRIP = "drip"
    """Sends the body in 16 pieces, `seconds` apart."""
    HOLD = "hold"
    """Sends `after_bytes` of the body (None: the head of the answer alone), and the rest when `gate` is set."""
    WRONG_LENGTH = "wrong_length"
    """Sends a whole answer of `after_bytes` bytes only, with a Content-Length that fits them."""
    DAMAGE = "damage"
    """Sends the body with its first byte changed."""
    NO_RANGES = "no_ranges"
    """Ignores a Range header: 200 and the whole object."""
    NO_LENGTH = "no_length"
    """Sends the body in chunks, without a Content-Length."""
    GZIP = "gzip"
    """Sends the body compressed, whatever the client accepts."""
    REDIRECT = "redirect"
    """Answers 302 to `location`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyAnswer:
    """One scripted answer; see `Fault` for what each field means there."""

    fault: Fault
    status: int = 503
    after_bytes: int | None = None
    seconds: float = 0.0
    location: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    gate: threading.Event | None = None
    body: bytes = b""


class FaultyHttpServer:
    """A threaded HTTP server of a dict of objects, with scripted faults per path; every request is recorded.

    Serves GET and HEAD with ranges, ETag and If-Match. It also answers an anonymous S3 client (path style; it lists, too), so
    the same faults hit `s3://` URLs.

    Args:
        objects: Bytes by path (`"/a/b.jpg"`); may be changed at any time.
        certificate: A PEM file with key and certificate: serve https.

    Example:
        with FaultyHttpServer({"/x": b"data"}) as server:
            server.script("/x", FaultyAnswer(fault=Fault.STATUS, status=503))   # once, then all is well
    """

    def __init__(self, objects: Mapping[str, bytes] | None = None, *, certificate: Path | None = None) -> None:
        self._certificate = certificate
        self.objects: dict[str, bytes] = dict(objects or {})
        self.names_versions = True
        """Send ETags, and heed If-Match."""
        self.etag: str | None = None
        """The ETag of all objects; None: the MD5 of each."""
        self.last_modified: str | None = "Mon, 01 Jan 2024 00:00:00 GMT"
        """The time of change of all objects; None: none is sent."""
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._scripts: dict[str, deque[FaultyAnswer]] = {}
        self._always: dict[str, FaultyAnswer] = {}
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self.url = ""

    def __enter__(self) -> Self:
        """Start serving on a free port."""
        self._server = _Server(("127.0.0.1", 0), _FaultyHandler)
        self._server.owner = self
        if self._certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.url = f"{'https' if self._certificate else 'http'}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="faulty-http", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop serving, close every connection, and wait for the threads that answered: tests count threads."""
        assert self._server is not None
        assert self._thread is not None
        self._server.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.close_connections()
        self._server.server_close()
        self._server.wait_answered()

    def script(self, path: str, *answers: FaultyAnswer, always: FaultyAnswer | None = None) -> None:
        """Give the next requests of `path` these answers, one each, and then `always` (None: the object)."""
        with self._lock:
            self._scripts[path] = deque(answers)
            self._always.pop(path, None)
            if always is not None:
                self._always[path] = always

    def requests(self, path: str | None = None) -> list[Request]:
        """Return the requests so far, of one path or of all."""
        with self._lock:
            return [request for request in self._requests if path in (None, request.path)]

    def next_answer(self, request: Request) -> FaultyAnswer | None:
        """Record a request; return how to misbehave, None for not at all."""
        with self._lock:
            self._requests.append(request)
            script = self._scripts.get(request.path)
            return script.popleft() if script else self._always.get(request.path)


class _Server(ThreadingHTTPServer):
    """Remembers its connections: a client that keeps one alive would hold its thread past the end of the test."""

    daemon_threads = True
    request_queue_size = 256
    owner: FaultyHttpServer

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self.stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._answering: list[threading.Thread] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), name="faulty-http-answer", daemon=True
        )
        self._answering = [thread, *(other for other in self._answering if other.is_alive())]
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay quiet: clients that give up are what these servers are for."""

    def close_connections(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def wait_answered(self) -> None:
        for thread in self._answering:
            thread.join()


class _FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # header and small body in one packet

    def do_GET(self) -> None:
        path, query = unquote(urlsplit(self.path).path), dict(parse_qsl(urlsplit(self.path).query))
        answer = self.server.owner.next_answer(
            Request(
                method=self.command,
                path=path,
                range=self.headers.get("Range"),
                headers={name.lower(): value for name, value in self.headers.items()},
            )
        )
        fault = answer.fault if answer else None
        data = self.server.owner.objects.get(path)
        if data is None and query.get("list-type") == "2" and fault is None:
            self._send(200, _listing(self.server.owner.objects, path, query), {"Content-Type": "application/xml"})
        elif answer and fault is Fault.STATUS:
            self._send(answer.status, answer.body, dict(answer.headers))
        elif answer and fault is Fault.REDIRECT:
            self._send(302, b"", {"Location": answer.location})
        elif data is None:
            self._send(404, b"no such object", {})
        elif answer and fault in (Fault.RESET, Fault.STALL) and answer.after_bytes is None:
            self._break_off(answer)
        else:
            self._send_object(data, answer)

    do_HEAD = do_GET  # noqa: N815 - the base class names it so

    def _send_object(self, data: bytes, answer: FaultyAnswer | None) -> None:
        owner, headers = self.server.owner, {"Accept-Ranges": "bytes"}
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"' if owner.etag is None else owner.etag
        if owner.names_versions:
            headers["ETag"] = etag
        if owner.last_modified is not None:
            headers["Last-Modified"] = owner.last_modified
        fault = answer.fault if answer else None
        if answer and fault is Fault.WRONG_LENGTH:
            data = data[: answer.after_bytes]
        status, body = 200, data
        if owner.names_versions and (match := self.headers.get("If-Match")) and match != etag:
            return self._send(412, b"", {})
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted and fault is not Fault.NO_RANGES:
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1 if wanted[2] else len(data), len(data))
            if start >= stop:
                return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            status, body = 206, data[start:stop]
        if fault is Fault.GZIP:
            headers["Content-Encoding"], body = "gzip", gzip.compress(body)
        if fault is Fault.DAMAGE:
            body = bytes([body[0] ^ 1]) + body[1:]
        return self._send(status, body, headers, answer)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], answer: FaultyAnswer | None = None) -> None:
        fault = answer.fault if answer else None
        if "Date" in headers:
            self.send_response_only(status)
        else:
            self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if fault is Fault.NO_LENGTH:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        for number, piece in enumerate(_pieces(body, answer)):
            if answer and number and fault in (Fault.DRIP, Fault.HOLD):
                self.wfile.flush()
                self._pause(answer)
            if fault is Fault.NO_LENGTH:
                piece = b"%x\r\n%s\r\n" % (len(piece), piece)  # noqa: PLW2901
            self.wfile.write(piece)
        if fault is Fault.NO_LENGTH:
            self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()
        if answer and fault in (Fault.RESET, Fault.TRUNCATE, Fault.STALL):
            self._break_off(answer)

    def _pause(self, answer: FaultyAnswer) -> None:
        if answer.gate is None:
            self.server.stopping.wait(answer.seconds)
        while answer.gate is not None and not answer.gate.wait(0.02) and not self.server.stopping.is_set():
            pass

    def _break_off(self, answer: FaultyAnswer) -> None:
        if answer.fault is Fault.STALL:
            self.server.stopping.wait(answer.seconds)
        if answer.fault is Fault.RESET:  # linger 0: close sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.server._open.discard(self.connection)
            self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet."""


def _listing(objects: Mapping[str, bytes], bucket: str, query: Mapping[str, str]) -> bytes:
    """Return what S3 answers to ListObjectsV2, in one page."""
    start, delimiter = f"{bucket.rstrip('/')}/", query.get("delimiter", "")
    prefix, contents, folders = query.get("prefix", ""), "", set()
    for path, data in sorted(objects.items()):
        key = path.removeprefix(start)
        if not path.startswith(start + prefix):
            continue
        below = key[len(prefix) :]
        if delimiter and delimiter in below:
            folders.add(prefix + below.partition(delimiter)[0] + delimiter)
            continue
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        contents += (
            f"<Contents><Key>{escape(key)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{etag}&quot;</ETag><Size>{len(data)}</Size></Contents>"
        )
    prefixes = "".join(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>" for folder in sorted(folders))
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{contents}{prefixes}</ListBucketResult>".encode()


def _pieces(body: bytes, answer: FaultyAnswer | None) -> Iterator[bytes]:
    """Cut the body as the fault wants it sent."""
    fault = answer.fault if answer else None
    if answer and fault in (Fault.RESET, Fault.TRUNCATE, Fault.STALL):
        yield body[: answer.after_bytes]
    elif answer and fault is Fault.HOLD:
        yield body[: answer.after_bytes or 0]
        yield body[answer.after_bytes or 0 :]
    elif fault in (Fault.DRIP, Fault.NO_LENGTH):
        step = max(1, len(body) // 16)
        yield from (body[i : i + step] for i in range(0, len(body), step))
    else:
        yield body
