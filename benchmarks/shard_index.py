"""The index of many TAR shards behind a late HTTP server, the first epoch from the constructor on, and a first batch.

    .venv/bin/python -m benchmarks.shard_index [--shards 100] [--samples 100] [--bytes 5000] [--latency 0.02] [--rounds 3]

The first batch is 64 samples, of an index that is built and of a lazy one; its requests are all that were sent by then, those
for what comes next among them.

Each round is a process of its own with an empty cache; the server is another one. Prints a line for each way to read shards,
then one JSON document. Seconds are of this machine; compare ratios within a run. Requests and bytes are exact.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import random
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.index import in_new_process
from sqlstream import StreamingDataset
from sqlstream.testing.faulty import FaultyAnswer, FaultyHttpServer, Request

WAYS: dict[str, dict[str, Any]] = {
    "members": {"shards": "members"},
    "auto": {},
    "first batch, built": {"shuffle_seed": 1},
    "first batch, lazy, unshuffled": {"lazy_index_chunk_size": 1},
    "first batch, lazy, shuffled": {"lazy_index_chunk_size": 1, "shuffle_seed": 1},
}
"""Ways to read shards: options of the dataset."""
FIRST = 64
"""Samples of a first batch."""


class LateServer(FaultyHttpServer):
    """A server each of whose answers begins later."""

    latency_seconds = 0.0

    def next_answer(self, request: Request) -> FaultyAnswer | None:
        """Wait, and record the request."""
        time.sleep(self.latency_seconds)
        return super().next_answer(request)


def make_tar(shard: int, num_samples: int, num_bytes: int) -> bytes:
    """Return an archive of samples with a picture and a class."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for number in range(num_samples):
            content = random.Random(shard << 20 | number).randbytes(num_bytes)
            for extension, part in (("cls", b"%d" % (number % 10)), ("jpg", content)):
                member = tarfile.TarInfo(f"{shard:05}{number:05}.{extension}")
                member.size = len(part)
                archive.addfile(member, io.BytesIO(part))
    return data.getvalue()


def serve(channel: Connection, num_shards: int, num_samples: int, num_bytes: int, latency_seconds: float) -> None:
    """Serve archives until the channel closes; answer each message with the requests and bytes since the last one."""
    with LateServer(
        {f"/s-{number:05}.tar": make_tar(number, num_samples, num_bytes) for number in range(num_shards)}
    ) as server:
        server.latency_seconds = latency_seconds
        channel.send((server.url, sum(map(len, server.objects.values()))))
        seen = 0
        while channel.recv():
            requests = server.requests()
            channel.send((len(requests) - seen, sum(_num_bytes(server, request) for request in requests[seen:])))
            seen = len(requests)


def _num_bytes(server: FaultyHttpServer, request: Request) -> int:
    if request.method == "HEAD":
        return 0
    size = len(server.objects[request.path])
    if request.range is None:
        return size
    start, stop = request.range.removeprefix("bytes=").split("-")
    return min(int(stop) + 1, size) - int(start)


@contextmanager
def served(*shape: float) -> Iterator[tuple[Connection, str, int]]:
    """Give the channel of a server, its URL, and the bytes of its archives."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=serve, args=(theirs, *shape))
    process.start()
    try:
        url, num_bytes = ours.recv()
        yield ours, url, num_bytes
    finally:
        ours.send(None)
        process.join()


def measure(src: str, directory: Path, way: str, num_samples: int) -> dict[str, float]:
    """Open a dataset with an empty cache, and read so many of its samples."""
    started = time.perf_counter()
    with StreamingDataset(src, directory, show_progress=False, cache_limit=None, **WAYS[way]) as dataset:
        opened = time.perf_counter()
        num_read = sum(1 for _ in islice(dataset, num_samples))
        ended = time.perf_counter()
    return {"index": opened - started, "epoch": ended - opened, "both": ended - started, "samples": num_read}


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--bytes", type=int, default=5000)
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="first batches alone")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    shape = (options.shards, options.samples, options.bytes, options.latency)
    with tempfile.TemporaryDirectory() as scratch, served(*shape) as (channel, url, total):
        src = f"{url}/s-{{00000..{options.shards - 1:05}}}.tar"
        ways = [way for way in WAYS if not options.first or way.startswith("first batch")]
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for number in range(options.rounds):
            for way in ways:
                num_samples = FIRST if way.startswith("first batch") else options.shards * options.samples
                found = in_new_process(measure, src, Path(scratch) / f"{way}-{number}", way, num_samples)
                channel.send(True)
                num_requests, num_bytes = channel.recv()
                assert found["samples"] == num_samples
                rounds[way].append({**found, "requests": num_requests, "share_of_bytes": num_bytes / total})
        for way, of_way in rounds.items():
            results[way] = {key: median(one[key] for one in of_way) for key in of_way[0]}
            print(f"{way}: " + ", ".join(f"{key} {value:.3f}" for key, value in results[way].items()), flush=True)
    print(json.dumps({**vars(options), "results": results}))


if __name__ == "__main__":
    main()
