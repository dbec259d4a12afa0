"""Servers that replace objects, cut bodies, send them coded and lie about ranges: what a whole object is, is in its bytes.

Every object is a repetition of its number and its version, so any mixture of two versions, any hole and any shift shows. A file
is right when it equals one version that there was, from its first to its last byte.
"""

from __future__ import annotations

import contextlib
import gzip
import random
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

UNIT = re.compile(rb"(\d{6})\.(\d{6}) ")
UNIT_BYTES = 14
FIRST_DATE = 1_700_000_000
FAULTS = {  # weights; the rest of the answers is as it should be
    "cut": 8,
    "cut, and replaced": 8,
    "gzip": 2,
    "gzip, cut": 4,
    "br": 3,
    "chunks, cut": 3,
    "a range to one who asked for all": 2,
    "early hints": 2,
    "503": 2,
}
RANGE_FAULTS = {"later": 6, "earlier": 4, "all of it": 4, "cut": 4}
"""To one who asked for a range."""
FINE = 60
REPLACED = 0.03
"""Share of the requests before which an object is replaced."""


def body(number: int, version: int, smallest: int) -> bytes:
    """Return the bytes of one version of an object; half of the objects keep their size."""
    size = smallest + (0 if number % 2 else version % 5 * 777)
    unit = b"%06d.%06d " % (number, version)
    return (unit * (size // UNIT_BYTES + 1))[:size]


def trouble_with(data: bytes, number: int, smallest: int) -> str | None:
    """Return what is wrong with the bytes of an object, or None."""
    first = UNIT.match(data)
    if first is None or int(first[1]) != number:
        return f"object {number} begins with {data[:20]!r}, and has {len(data)} bytes"
    version = int(first[2])
    right = body(number, version, smallest)
    if data == right:
        return None
    differs = next((at for at, (a, b) in enumerate(zip(data, right, strict=False)) if a != b), min(len(data), len(right)))
    seen = data[differs // UNIT_BYTES * UNIT_BYTES :][:UNIT_BYTES]
    return f"object {number}, version {version}: {len(data)} bytes, not {len(right)}; from {differs} on they are {seen!r}"


def check_file(path: Path, number: int, smallest: int) -> str | None:
    """Return what is wrong with a file, or None."""
    return trouble_with(path.read_bytes(), number, smallest)


class HostileServers:
    """Many hosts, each a port of 127.0.0.1, with one set of objects.

    Args:
        sizes: The smallest size of each object.
        num_hosts: Object i is on host i modulo this.
        seed: Of what goes wrong when.
    """

    def __init__(self, sizes: list[int], num_hosts: int, seed: int) -> None:
        self.sizes = sizes
        self.versions = [1] * len(sizes)
        self.num_requests: Counter[str] = Counter()
        """By what was answered."""
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._servers = [_Server(("127.0.0.1", 0), _Handler) for _ in range(num_hosts)]
        for server in self._servers:
            server.owner = self
            threading.Thread(target=server.serve_forever, args=(0.5,), daemon=True).start()

    @property
    def urls(self) -> list[str]:
        """Where each object is."""
        ports = [server.server_address[1] for server in self._servers]
        return [f"http://127.0.0.1:{ports[i % len(ports)]}/o/{i}.bin" for i in range(len(self.sizes))]

    def replace(self, number: int) -> None:
        """Give an object its next version."""
        with self._lock:
            self.versions[number] += 1

    def next_answer(self, number: int, *, is_range: bool) -> tuple[str, int]:
        """Return what happens to a request, and the version that it is about."""
        with self._lock:
            if self._rng.random() < REPLACED:
                self.versions[number] += 1
            faults = {**FAULTS, **RANGE_FAULTS} if is_range else FAULTS
            names = ["fine", *faults]
            (chosen,) = self._rng.choices(names, [FINE, *(faults[name] for name in names[1:])])
            self.num_requests[chosen] += 1
            return chosen, self.versions[number]

    def fraction(self) -> float:
        """Return where a body is cut."""
        with self._lock:
            return self._rng.random()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: HostileServers

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay quiet: clients are killed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_HEAD(self) -> None:
        """Say what there is."""
        number = int(self.path.rpartition("/")[2].partition(".")[0])
        version = self.server.owner.versions[number]
        data = body(number, version, self.server.owner.sizes[number])
        self._send(200, data, self._validators(number, version))

    def do_GET(self) -> None:
        """Answer as the dice say."""
        owner, number = self.server.owner, int(self.path.rpartition("/")[2].partition(".")[0])
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        chosen, version = owner.next_answer(number, is_range=wanted is not None)
        data, headers = body(number, version, owner.sizes[number]), self._validators(number, version)
        if chosen == "503":
            return self._send(503, b"", {"Retry-After": "0"})
        if self._refuses(number, headers):
            return self._send(412, b"", {})
        if wanted is not None and chosen != "all of it" and self._is_same(number, headers):
            start = int(wanted[1])
            stop = min(int(wanted[2]) + 1, len(data)) if wanted[2] else len(data)
            if start >= stop:
                return self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            start += {"later": UNIT_BYTES, "earlier": -UNIT_BYTES}.get(chosen, 0)
            start = max(0, min(start, stop - 1))
            return self._send_part(data, (start, stop), headers, chosen, number)
        if chosen == "a range to one who asked for all" and wanted is None:
            return self._send_part(data, (len(data) // 3, len(data)), headers, chosen, number)
        return self._send_coded(data, headers, chosen, number)

    def _validators(self, number: int, version: int) -> dict[str, str]:
        """Return what tells versions apart: a strong tag, a weak one, a date, or nothing."""
        date = formatdate(FIRST_DATE + version, usegmt=True)
        kinds: tuple[dict[str, str], ...] = (
            {"ETag": f'"{number}-{version}"'},
            {"Last-Modified": date},
            {},
            {"ETag": f'W/"{number}-{version}"', "Last-Modified": date},
        )
        return kinds[number // 2 % 4]

    def _is_honest(self, number: int) -> bool:
        """Two of three objects are served with regard to If-Match and If-Range."""
        return number % 3 != 0

    def _refuses(self, number: int, headers: Mapping[str, str]) -> bool:
        match = self.headers.get("If-Match")
        return match is not None and self._is_honest(number) and match != headers.get("ETag")

    def _is_same(self, number: int, headers: Mapping[str, str]) -> bool:
        condition = self.headers.get("If-Range")
        return condition is None or not self._is_honest(number) or condition in headers.values()

    def _send_part(self, data: bytes, span: tuple[int, int], headers: Mapping[str, str], chosen: str, number: int) -> None:
        start, stop = span
        total = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        self._send(206, data[start:stop], {**headers, **total}, self._cut_of(chosen, stop - start, number))

    def _send_coded(self, data: bytes, headers: Mapping[str, str], chosen: str, number: int) -> None:
        if chosen.startswith("gzip"):
            packed = gzip.compress(data)
            packed = packed[: int(len(packed) * self.server.owner.fraction())] if chosen.endswith("cut") else packed
            return self._send(200, packed, {**headers, "Content-Encoding": "gzip"})
        if chosen == "br":
            return self._send(200, data[::-1], {**headers, "Content-Encoding": "br"})
        if chosen == "chunks, cut":
            return self._send_chunks(data[: int(len(data) * self.server.owner.fraction())], headers)
        if chosen == "early hints":
            self.wfile.write(b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>; rel=preload\r\n\r\n")
        return self._send(200, data, headers, self._cut_of(chosen, len(data), number))

    def _cut_of(self, chosen: str, size: int, number: int) -> int | None:
        """Return after how many bytes the connection breaks off; the object may be another one from then on."""
        if not chosen.startswith("cut"):
            return None
        if chosen.endswith("replaced"):
            self.server.owner.replace(number)
        return int(size * self.server.owner.fraction())

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Accept-Ranges": "bytes", **headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(data if cut is None else data[:cut])
        if cut is not None:
            self._break_off(is_reset=cut % 2 == 0)

    def _send_chunks(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Send the body in chunks, without the one that says that it is whole."""
        self.send_response(200)
        for name, value in {**headers, "Transfer-Encoding": "chunked"}.items():
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(data), 8192):
            piece = data[start : start + 8192]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self._break_off(is_reset=False)

    def _break_off(self, *, is_reset: bool) -> None:
        self.wfile.flush()
        if is_reset:  # linger 0: close sends RST
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet."""


@contextlib.contextmanager
def hostile_servers(sizes: list[int], num_hosts: int, seed: int) -> Iterator[HostileServers]:
    """Serve until the end of the block."""
    servers = HostileServers(sizes, num_hosts, seed)
    try:
        yield servers
    finally:
        for server in servers._servers:
            server.shutdown()
            server.server_close()
