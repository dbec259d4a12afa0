"""Servers on 127.0.0.1 for tests, the demo and bug reports: an S3 that behaves, and an HTTP server that misbehaves on cue.

Both count requests exactly, so that a test can say "requested once" instead of measuring time.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from sqlstream.errors import MissingDependencyError

_COUNTS_PATH = "/_sqlstream/requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that a server has seen."""

    method: str
    path: str
    """Decoded, without the query."""
    range: str | None = None
    """The Range header."""


class LocalS3:
    """An S3-compatible server (moto) in a process of its own, on a free port of 127.0.0.1.

    Example:
        with LocalS3() as s3:
            url = s3.put("bucket/a/photo.jpg", data)
            dataset = StreamingDataset(..., storage_options=s3.storage_options)
            assert s3.num_gets(url) == 1
    """

    def __init__(self) -> None:
        self.endpoint_url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None
        self._buckets: set[str] = set()

    @property
    def storage_options(self) -> dict[str, str]:
        """What a dataset needs to read from here; moto takes any key."""
        return {"key": "testing", "secret": "testing", "endpoint_url": self.endpoint_url}

    def __enter__(self) -> Self:
        """Start the server and wait until it answers.

        Raises:
            MissingDependencyError: moto is not installed.
        """
        try:
            import boto3
            import moto.server  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError("LocalS3 needs moto: pip install 'sqlstream[demo]'") from error
        command = [sys.executable, "-m", "sqlstream.testing.servers"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise RuntimeError("the local S3 server did not start: its error is above")
        self.endpoint_url = f"http://127.0.0.1:{int(line)}"
        self._client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",  # noqa: S106 - moto takes any
            region_name="us-east-1",
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the server; its objects are gone."""
        self.stop()

    def stop(self) -> None:
        """End the server process and wait for it."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def put(self, path: str, data: bytes) -> str:
        """Store `data` at `"bucket/key"`, making the bucket (at least 3 characters) if needed; return its `s3://` URL."""
        bucket, _, key = path.partition("/")
        if bucket not in self._buckets:
            self._client.create_bucket(Bucket=bucket)
            self._buckets.add(bucket)
        self._client.put_object(Bucket=bucket, Key=key, Body=data)
        return f"s3://{path}"

    def delete(self, url: str) -> None:
        """Remove the object at an `s3://` URL."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        self._client.delete_object(Bucket=bucket, Key=key)

    def requests(self) -> list[Request]:
        """Return every request so far, in the order of arrival."""
        with urllib.request.urlopen(self.endpoint_url + _COUNTS_PATH) as answer:  # noqa: S310 - our own server
            return [Request(**record) for record in json.load(answer)]

    def num_gets(self, url: str) -> int:
        """Return how often the object at an `s3://` URL was asked for with GET."""
        path = "/" + url.removeprefix("s3://")
        return sum(1 for request in self.requests() if (request.method, request.path) == ("GET", path))

    def gets_by_url(self) -> dict[str, int]:
        """Return the number of GETs of every object that was asked for, by its `s3://` URL."""
        counts: dict[str, int] = {}
        for request in self.requests():
            if request.method == "GET" and request.path.count("/") > 1:
                url = "s3:/" + request.path
                counts[url] = counts.get(url, 0) + 1
        return counts


class Fault(StrEnum):
    """What goes wrong with one request."""

    STATUS = "status"
    """Answers with `status`, and with `headers` (Retry-After, …)."""
    RESET = "reset"
    """Resets the connection after `after_bytes` of the body (None: before the answer)."""
    TRUNCATE = "truncate"
    """Says the whole length, closes after `after_bytes`."""
    STALL = "stall"
    """Goes silent after `after_bytes` for `seconds` (None: before the answer), then closes."""
    DRIP = "drip"
    """Sends the body in 16 pieces, `seconds` apart."""
    WRONG_LENGTH = "wrong_length"
    """Sends a whole answer of `after_bytes` bytes only, with a Content-Length that fits them."""
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


class FaultyHttpServer:
    """A threaded HTTP server of a dict of objects, with scripted faults per path; every request is recorded.

    Serves GET and HEAD with ranges, ETag and If-Match. It also answers an anonymous S3 client (path style), so the
    same faults hit `s3://` URLs.

    Args:
        objects: Bytes by path (`"/a/b.jpg"`); may be changed at any time.

    Example:
        with FaultyHttpServer({"/x": b"data"}) as server:
            server.script("/x", FaultyAnswer(fault=Fault.STATUS, status=503))   # once, then all is well
    """

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects: dict[str, bytes] = dict(objects or {})
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
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="faulty-http", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop serving and close every connection."""
        assert self._server is not None
        assert self._thread is not None
        self._server.stopping.set()
        self._server.shutdown()
        self._thread.join()
        self._server.close_connections()
        self._server.server_close()

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

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay quiet: clients that give up are what these servers are for."""

    def close_connections(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # header and small body in one packet

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        answer = self.server.owner.next_answer(Request(method=self.command, path=path, range=self.headers.get("Range")))
        fault = answer.fault if answer else None
        data = self.server.owner.objects.get(path)
        if answer and fault is Fault.STATUS:
            self._send(answer.status, b"", dict(answer.headers))
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
        headers = {"ETag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"', "Accept-Ranges": "bytes"}
        headers["Last-Modified"] = "Mon, 01 Jan 2024 00:00:00 GMT"
        fault = answer.fault if answer else None
        status, body = 200, data
        if (match := self.headers.get("If-Match")) and match != headers["ETag"]:
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
        if answer and fault is Fault.WRONG_LENGTH:
            body = body[: answer.after_bytes]
        return self._send(status, body, headers, answer)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str], answer: FaultyAnswer | None = None) -> None:
        fault = answer.fault if answer else None
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
        for piece in _pieces(body, answer):
            if fault is Fault.NO_LENGTH:
                piece = b"%x\r\n%s\r\n" % (len(piece), piece)  # noqa: PLW2901
            self.wfile.write(piece)
            if answer and fault is Fault.DRIP:
                self.wfile.flush()
                time.sleep(answer.seconds)
        if fault is Fault.NO_LENGTH:
            self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()
        if answer and fault in (Fault.RESET, Fault.TRUNCATE, Fault.STALL):
            self._break_off(answer)

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


def _pieces(body: bytes, answer: FaultyAnswer | None) -> Iterator[bytes]:
    """Cut the body as the fault wants it sent."""
    fault = answer.fault if answer else None
    if answer and fault in (Fault.RESET, Fault.TRUNCATE, Fault.STALL):
        yield body[: answer.after_bytes]
    elif fault in (Fault.DRIP, Fault.NO_LENGTH):
        step = max(1, len(body) // 16)
        yield from (body[i : i + step] for i in range(0, len(body), step))
    else:
        yield body


def serve_moto() -> None:
    """Serve moto's S3 on a free port until standard input ends; print the port. The program of `LocalS3`."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    application = DomainDispatcherApplication(create_backend_app)
    seen: list[dict[str, str | None]] = []  # list.append is atomic

    def counting(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
        if path == _COUNTS_PATH:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(seen).encode()]
        seen.append({"method": environ["REQUEST_METHOD"], "path": path, "range": environ.get("HTTP_RANGE")})
        return application(environ, start_response)

    class QuietHandler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Stay quiet."""

    server = make_server("127.0.0.1", 0, counting, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    sys.stdin.read()  # ends with our owner, whatever it died of


if __name__ == "__main__":
    serve_moto()
