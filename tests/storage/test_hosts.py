"""Many hosts and buckets, and servers that are slow on purpose: what is open is bounded, and so is the time of a request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import StorageError
from sqlstream.storage.backends.fsspec.file_systems import MAX_FILE_SYSTEMS, FileSystems
from sqlstream.storage.backends.http import HttpStorage
from sqlstream.storage.backends.http_pools import Pools
from sqlstream.storage.fetcher import Fetcher
from tests.storage.downloads import Downloads

DRIP_SECONDS = 0.05
NUM_DRIPS = 2000
"""A drip that takes 100 s, of which no wait is longer than a read timeout."""

MANY_HOSTS = """
import os, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from sqlstream.config import StorageOptions
from sqlstream.storage.fetcher import Fetcher
from tests.storage.downloads import Downloads

directory, kind, *ports = sys.argv[1:]
endpoint = f"http://127.0.0.1:{ports[0]}"
options = {"anon": True, "endpoint_url": endpoint, "region": "r"} if kind == "s3" else {}
urls = [f"s3://bucket-{i}/x" if kind == "s3" else f"http://127.0.0.1:{port}/{i}" for i, port in enumerate(ports)]
fetcher = Fetcher(StorageOptions(storage_options=options, num_threads=8))
downloads = Downloads(fetcher, Path(directory))
most = 0
for start in range(0, len(urls), 16):
    downloads.submit(*urls[start : start + 16])
    tickets = [str(i) for i in range(start, min(start + 16, len(urls)))]
    for i, done in zip(tickets, downloads.wait_done(*tickets)):
        assert done.error is None, done.error
        assert downloads.read(i) == (b"/bucket-%b/x" if kind == "s3" else b"/%b") % i.encode(), i
    most = max(most, len(os.listdir(f"/proc/{fetcher.helper_pid}/fd")))
fetcher.stop()
print(most)
"""

Handler = Callable[[str], Iterator[tuple[bytes, float]]]
"""From the head of a request to what is sent, each piece with the seconds after it; an answer ends with its pieces."""


class Ports:
    """Serves many ports of 127.0.0.1 from one thread; connections are kept alive."""

    def __init__(self, num_ports: int, handler: Handler) -> None:
        self._num_ports = num_ports
        self._handler = handler
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.ports: list[int] = []
        self.num_open = 0
        self.most_open = 0

    def __enter__(self) -> Ports:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    @property
    def url(self) -> str:
        """URL of the first port."""
        return f"http://127.0.0.1:{self.ports[0]}"

    async def _start(self) -> None:
        self._servers = [await asyncio.start_server(self._serve, "127.0.0.1", 0) for _ in range(self._num_ports)]
        self.ports = [server.sockets[0].getsockname()[1] for server in self._servers]

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            while True:
                request = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                for piece, seconds in self._handler(request):
                    writer.write(piece)
                    await writer.drain()
                    if seconds:
                        await asyncio.sleep(seconds)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.num_open -= 1
            self._tasks.discard(task)
            writer.close()


def echo(request: str) -> Iterator[tuple[bytes, float]]:
    """Answer with the path, as a part if a range is asked for."""
    body = request.split(" ")[1].encode()
    status = b"200 OK"
    if "range: bytes=0-" in request.lower():
        status = b"206 Partial Content\r\nContent-Range: bytes 0-%d/%d" % (len(body) - 1, len(body))
    dated = b"Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT"
    yield b"HTTP/1.1 %b\r\n%b\r\nContent-Length: %d\r\n\r\n%b" % (status, dated, len(body), body), 0.0


def slow_head(request: str) -> Iterator[tuple[bytes, float]]:
    yield b"HTTP/1.1 200 OK\r\nX-Slow: ", 0.0
    yield from ((b"x", DRIP_SECONDS) for _ in range(NUM_DRIPS))


def slow_hints(request: str) -> Iterator[tuple[bytes, float]]:
    yield from ((b"HTTP/1.1 100 Continue\r\n\r\n", DRIP_SECONDS) for _ in range(NUM_DRIPS))


def slow_body(request: str) -> Iterator[tuple[bytes, float]]:
    dated = b"Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n"
    yield b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1999/2000\r\n" + dated + b"Content-Length: 2000\r\n\r\n", 0.0
    yield from ((b"x", DRIP_SECONDS) for _ in range(NUM_DRIPS))


def slow_chunks(request: str) -> Iterator[tuple[bytes, float]]:
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1", 0.0
    yield from ((b";", DRIP_SECONDS) for _ in range(NUM_DRIPS))


@pytest.mark.parametrize(("kind", "num_hosts"), [("http", 300), ("s3", 100)])
def test_descriptors_do_not_grow_with_the_hosts(tmp_path: Path, kind: str, num_hosts: int) -> None:
    """Under a limit of 256, in batches of 16; the objects are all right."""
    with Ports(1 if kind == "s3" else num_hosts, echo) as servers:
        ports = map(str, servers.ports * (num_hosts if kind == "s3" else 1))
        command = [sys.executable, "-c", MANY_HOSTS, str(tmp_path), kind, *ports]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 110  # 64 idle ones, and what is under way


def test_idle_connections_are_bounded_over_all_hosts_and_those_used_last_are_kept() -> None:
    with Ports(20, echo) as servers:
        pools = Pools(StorageOptions(), max_idle=5)
        for port in [*servers.ports, *servers.ports[-5:] * 10]:
            answer = pools.request("GET", f"http://127.0.0.1:{port}/x", {}, deadline=time.monotonic() + 60)
            assert answer.read() == b"/x"
            answer.release_conn()
        wait_until(lambda: servers.num_open == 5)
        assert servers.most_open <= 20


def test_a_kept_connection_is_used_again() -> None:
    with Ports(1, echo) as servers:
        storage = HttpStorage(StorageOptions())
        for _ in range(5):
            stream = storage.get(f"{servers.url}/x")
            assert b"".join(stream.chunks()) == b"/x"
            stream.close()
            assert storage.head(f"{servers.url}/x").size_bytes == 2
        assert servers.most_open == 1


SLOW = {"head": slow_head, "body": slow_body, "chunks": slow_chunks, "hints": slow_hints}


@pytest.mark.parametrize("client", ["http", "s3", "fsspec"])
def test_the_timeout_bounds_the_head_and_the_body_of_a_request(tmp_path: Path, client: str) -> None:
    """The server is never silent for long, and would need 100 s for each of two tries."""
    with Ports(1, lambda request: SLOW[request.split(" ")[1].rpartition("/")[2]](request)) as servers:
        where: dict[str, object] = {"anon": True, "endpoint_url": servers.url} if client != "http" else {}
        where |= {"region": "r"} if client == "s3" else {"backend": "fsspec"}
        options = {**where, "timeout": 0.6, "read_timeout": 0.4, "connect_timeout": 5}
        fetcher = Fetcher(StorageOptions(storage_options=options, num_retries=1))
        downloads = Downloads(fetcher, tmp_path)
        root = f"{servers.url}/bucket" if client == "http" else "s3://bucket"
        downloads.submit(*[f"{root}/{name}" for name in SLOW])
        for done in downloads.wait_done():
            assert isinstance(done.error, StorageError)
            assert done.seconds < NUM_DRIPS * DRIP_SECONDS / 2
        fetcher.stop()


def test_file_systems_of_many_hosts_are_not_all_kept() -> None:
    file_systems = FileSystems(StorageOptions())
    kind = fsspec.get_filesystem_class("webhdfs")
    kind.clear_instance_cache()
    for i in range(2 * MAX_FILE_SYSTEMS):
        with file_systems.opened(f"webhdfs://host-{i}:1/x"):
            pass
    assert len(kind._cache) == MAX_FILE_SYSTEMS
    kind.clear_instance_cache()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)
