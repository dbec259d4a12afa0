"""Requests per second of the storage floor, against raw obstore and s3fs, behind nginx on the same machine.

    python benchmarks/storage.py                      # all of it
    python benchmarks/storage.py --rounds 1 --num-objects 1000 --schemes s3

Each contender gets every object into a file of its own, in as many threads, and runs in a process of its own:

- raw: `obstore.get`, written to a file, renamed.
- submit: `Fetcher.submit` alone; its caller opens, closes and renames files.
- cache: through the ledger, in windows, as the engine does it.
- s3fs: `cat_file` in threads, written to a file, renamed.

Wall times move with whatever else the machine does: contenders take turns, ratios are taken within a round, and the median of
the rounds counts; CPU per request (start and imports included) moves less. Then the same with latency added by the server: as
many requests per second as threads / latency are possible there, until CPU is the limit; `auto` finds how many threads to use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlstream.cache.directory import close_store, open_store
from sqlstream.cache.ledger_session import LedgerSession
from sqlstream.cache.session import ObjectRef
from sqlstream.config import StorageOptions
from sqlstream.storage.fetcher import FetchDone, Fetcher, FetchEvent, FetchRequest
from sqlstream.testing.nginx import Nginx

WINDOW = 64  # of `submit`
AUTO = 0  # threads: as many as the helper finds to be right
DATASET_WINDOW = 256  # what a dataset has ahead by itself
BUCKET = "bench"
S3FS_SHARE = 4  # s3fs gets a quarter of the objects: it is slow, and its rate is the same


class Job:
    """What one contender is asked to do."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        self.endpoint: str = args.endpoint
        self.scheme: str = args.scheme
        self.threads: int = args.threads
        self.directory = directory
        self.names = [f"{i:06}.bin" for i in range(args.num_objects)]

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}" if self.scheme == "s3" else f"{self.endpoint}/{BUCKET}/{name}"

    @property
    def options(self) -> dict[str, object]:
        return {"anon": True, "endpoint_url": self.endpoint, "region": "us-east-1"} if self.scheme == "s3" else {}

    def fetcher(self) -> Fetcher:
        num_threads: int | Literal["auto"] = self.threads if self.threads != AUTO else "auto"
        fetcher = Fetcher(StorageOptions(storage_options=self.options, num_threads=num_threads))
        fetcher.head(self.url(self.names[0]))
        return fetcher


def written(path: Path, data: Any) -> None:
    """Write a part and rename it."""
    part = f"{path}.part"
    with open(part, "wb", buffering=0) as file:
        file.write(data)
    os.rename(part, path)


def in_threads(job: Job, names: Sequence[str], get: Callable[[str], None]) -> float:
    with ThreadPoolExecutor(job.threads) as pool:
        get(names[0])
        started = time.perf_counter()
        list(pool.map(get, names))
        return len(names) / (time.perf_counter() - started)


def raw(job: Job) -> float:
    import obstore
    from obstore.store import HTTPStore, S3Store

    store: Any
    if job.scheme == "s3":
        config: Any = {"endpoint": job.endpoint, "skip_signature": True, "region": "us-east-1"}
        store = S3Store(BUCKET, config=config, client_options={"allow_http": True})
    else:
        store = HTTPStore(f"{job.endpoint}/{BUCKET}", client_options={"allow_http": True})
    return in_threads(job, job.names, lambda name: written(job.directory / name, obstore.get(store, name).bytes()))


def s3fs(job: Job) -> float:
    import s3fs as package

    system = package.S3FileSystem(anon=True, endpoint_url=job.endpoint, client_kwargs={"region_name": "us-east-1"})
    names = job.names[: len(job.names) // S3FS_SHARE]
    return in_threads(job, names, lambda name: written(job.directory / name, system.cat_file(f"{BUCKET}/{name}")))


def submit(job: Job) -> float:
    fetcher = job.fetcher()
    room, over = threading.Semaphore(max(2 * job.threads, WINDOW)), threading.Event()
    descriptors: dict[str, int] = {}
    num_left = len(job.names)

    def sink(events: Sequence[FetchEvent]) -> None:
        nonlocal num_left
        for event in events:
            assert isinstance(event, FetchDone)
            assert event.error is None, event.error
            os.close(descriptors.pop(event.ticket))
            os.rename(job.directory / f"{event.ticket}.part", job.directory / event.ticket)
        num_left -= len(events)
        room.release(len(events))
        if not num_left:
            over.set()

    started = time.perf_counter()
    for start in range(0, len(job.names), WINDOW // 2):
        requests = []
        for name in job.names[start : start + WINDOW // 2]:
            room.acquire()
            fd = descriptors[name] = os.open(job.directory / f"{name}.part", os.O_RDWR | os.O_CREAT)
            requests.append(FetchRequest(ticket=name, url=job.url(name), fd=fd, granted_bytes=1 << 30))
        fetcher.submit(requests, sink)
    over.wait()
    rate = len(job.names) / (time.perf_counter() - started)
    fetcher.stop()
    return rate


def cache(job: Job) -> float:
    fetcher = job.fetcher()
    store = open_store(job.directory / "cache", create=True, allow_network_fs=True)
    session = LedgerSession(store, fetcher, verifies_reads=False)
    planned = deque([ObjectRef.of(job.url(name))] for name in job.names)
    window = DATASET_WINDOW
    ahead: deque[Any] = deque()
    started = time.perf_counter()
    while planned or ahead:
        if len(ahead) <= window // 2 and planned:
            groups = [planned.popleft() for _ in range(min(window - len(ahead), len(planned)))]
            ahead.extend(session.acquire(groups))
        hold = ahead.popleft()
        session.wait(hold)
        assert hold.error is None, hold.error
        session.open(hold)
        session.release(hold)
    rate = len(job.names) / (time.perf_counter() - started)
    close_store(store)
    fetcher.stop()
    return rate


CONTENDERS: dict[str, Callable[[Job], float]] = {"raw": raw, "submit": submit, "cache": cache, "s3fs": s3fs}


def compete(args: argparse.Namespace) -> None:
    """Be one contender; print what came out."""
    directory = Path(tempfile.mkdtemp(dir=args.directory))
    try:
        rate = CONTENDERS[args.contender](Job(args, directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    num_objects = args.num_objects // S3FS_SHARE if args.contender == "s3fs" else args.num_objects
    print(json.dumps({"rate": rate, "cpu_ms": 1000 * seconds / num_objects}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one contender did."""

    rate: float
    """Requests per second."""
    cpu_ms: float
    """For each object, of the contender and its children."""


def contend(args: argparse.Namespace, contender: str, scheme: str, endpoint: str, threads: int, num_objects: int) -> Outcome:
    """Run one contender."""
    command = [sys.executable, __file__, "--contender", contender, "--scheme", scheme, "--endpoint", endpoint]
    command += ["--threads", str(threads), "--num-objects", str(num_objects), "--directory", str(args.directory)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return Outcome(**json.loads(answer.splitlines()[-1]))


async def serve_late(root: Path, latency_seconds: float) -> None:
    """Serve files as plain HTTP, each answer so much later; end with standard input."""
    bodies = {f"/{path.relative_to(root)}": path.read_bytes() for path in root.rglob("*.bin")}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while header := await reader.readuntil(b"\r\n\r\n"):
            method, path = header.split(b" ", 2)[:2]
            due = asyncio.get_running_loop().time() + latency_seconds
            body = bodies[path.decode()]
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            answer = (
                b'HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: "1"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n\r\n'
            )
            writer.write(answer % len(body) + (b"" if method == b"HEAD" else body))
            await writer.drain()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


def report_rates(args: argparse.Namespace, scheme: str, endpoint: str) -> None:
    contenders = ["raw", "submit", "cache", *(["s3fs"] if scheme == "s3" else [])]
    rounds = []
    for _ in range(args.rounds):
        order = random.sample(contenders, len(contenders))
        rounds.append({name: contend(args, name, scheme, endpoint, args.threads, args.num_objects) for name in order})
    print(f"\n{scheme}: {args.num_objects} objects of {args.size_bytes} bytes, {args.threads} threads, {args.rounds} rounds")
    for name in contenders:
        rates = [outcomes[name].rate for outcomes in rounds]
        cpu_ms = statistics.median(outcomes[name].cpu_ms for outcomes in rounds)
        spread = f"({min(rates):.0f} to {max(rates):.0f})"
        print(f"  {name:7} {statistics.median(rates):8.0f} requests/s   {spread}, {cpu_ms:.2f} ms of CPU each")
    for name, other, aim in (("submit", "raw", None), ("cache", "raw", 0.6), ("cache", "s3fs", 5.0)):
        if other in contenders:
            ratios = [outcomes[name].rate / outcomes[other].rate for outcomes in rounds]
            wanted = f"   wanted: at least {aim}" if aim else ""
            print(f"  {name} / {other}: {statistics.median(ratios):.2f}   ({min(ratios):.2f} to {max(ratios):.2f}){wanted}")


def report_latency(args: argparse.Namespace, scheme: str, root: Path) -> None:
    command = [sys.executable, __file__, "--serve-late", str(root), "--latency", str(args.latency)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        print(f"\n{scheme}, with {args.latency * 1000:.0f} ms of latency (wanted: at least 0.9 until CPU is the limit)")
        for threads in (8, args.threads, 4 * args.threads):
            possible = threads / args.latency
            num_objects = min(args.num_objects, int(possible * 4))
            for name in ("raw", "submit", "cache"):
                rate = contend(args, name, scheme, endpoint, threads, num_objects).rate
                print(f"  {threads:3} threads, {name:7} {rate:7.0f} of {possible:.0f} requests/s: {rate / possible:.2f}")
        outcome = contend(args, "cache", scheme, endpoint, AUTO, args.num_objects)
        print(f"  auto threads, cache  {outcome.rate:7.0f} requests/s, {outcome.cpu_ms:.2f} ms of CPU")
        server.kill()


def main() -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-objects", type=int, default=4000)
    parser.add_argument("--size-bytes", type=int, default=100_000)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds")
    parser.add_argument("--schemes", nargs="+", default=["s3", "http"], choices=["s3", "http"])
    parser.add_argument("--directory", default=memory, help="where files are written; a disk that is slow sets all rates")
    for hidden in ("--contender", "--scheme", "--endpoint", "--serve-late"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contender:
        return compete(args)
    if args.serve_late:
        return asyncio.run(serve_late(Path(args.serve_late), args.latency))
    subprocess.run([Path(__file__).parents[1] / "scripts/install_servers.sh"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / BUCKET).mkdir()
        for i in range(args.num_objects):
            (root / BUCKET / f"{i:06}.bin").write_bytes(random.randbytes(args.size_bytes))
        with Nginx(root) as nginx:
            for scheme in args.schemes:
                report_rates(args, scheme, nginx.url)
        for scheme in args.schemes:
            report_latency(args, scheme, root)
    return None


if __name__ == "__main__":
    main()
