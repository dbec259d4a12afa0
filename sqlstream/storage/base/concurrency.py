"""How many downloads at a time: from the size of objects and the latency seen, and the other readers of the node. Pure.

Little's law: to keep a rate of requests going, rate times duration must be under way. The rate that this process can want
is where its CPU ends; more at a time then only makes each slower.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

START_THREADS = 16
"""Threads before any download has ended; `sds` and s3transfer begin in the same range."""
LEAST_THREADS = 8
"""Fewest threads, also for a server nearby, where 4 were enough (m): some downloads wait for the disk."""
MOST_THREADS = 128
"""Most threads of one helper process: at 50 ms 2500 requests/s, about all of one interpreter's CPU; no slower than 16."""
MOST_THREADS_OF_NODE = 256
"""Most threads of all helpers of a node: where LitData starts for small objects; a bucket's prefix takes 5500 requests/s."""
_CPU_SECONDS_PER_REQUEST = 0.3e-3  # (m) of a compiled client, with the write to disk
_CPU_SECONDS_PER_PYTHON_REQUEST = 0.6e-3  # (m) of urllib3, with the write to disk
_CPU_SECONDS_PER_BYTE = 1e-9  # an estimate: a copy out of the socket and one into the page cache
_BYTES_PER_SECOND_OF_STREAM = 50e6  # of one connection to an object store; S3's own guide says 85 to 90 MB/s at best
_BYTES_IN_FLIGHT = 512 << 20  # large objects: do not begin all of them
_CORES = 2.0  # what one helper can use: one core in the interpreter, about one in the client below it
_PYTHON_CORES = 1.0  # the interpreter's alone: threads beyond what it serves only hand its lock to each other


def auto_threads(*, size_bytes: float, latency_seconds: float, num_processes: int = 1, is_python: bool = False) -> int:
    """Return how many downloads one process should have under way.

    Args:
        size_bytes: Mean size of an object.
        latency_seconds: From a request to its first byte, when nothing is in the way.
        num_processes: Processes of this node that read, this one included: they share the node's threads.
        is_python: The client runs in the interpreter.

    Example:
        >>> auto_threads(size_bytes=100_000, latency_seconds=0.05), auto_threads(size_bytes=100_000, latency_seconds=0.0005)
        (128, 12)
        >>> auto_threads(size_bytes=100_000, latency_seconds=0.02, is_python=True)
        31
    """
    cores, request_seconds = (
        (_PYTHON_CORES, _CPU_SECONDS_PER_PYTHON_REQUEST) if is_python else (_CORES, _CPU_SECONDS_PER_REQUEST)
    )
    rate = cores / (request_seconds + size_bytes * _CPU_SECONDS_PER_BYTE)
    wanted = rate * (latency_seconds + size_bytes / _BYTES_PER_SECOND_OF_STREAM)
    in_memory = max(LEAST_THREADS, _BYTES_IN_FLIGHT / max(size_bytes, 1.0))
    of_node = max(1, MOST_THREADS_OF_NODE // max(num_processes, 1))
    return int(max(1, min(max(wanted, LEAST_THREADS), in_memory, MOST_THREADS, of_node)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadTiming:
    """Timing of one download."""

    latency_seconds: float
    """Time from the request to the head of its answer."""
    size_bytes: int
    is_python: bool = False
    """The client runs in the interpreter (urllib3), not in compiled code beside it (obstore)."""


class Observations:
    """The last downloads. One thread writes at a time (the caller's lock).

    The lowest latencies count, not the mean: our own load makes requests slower, and must not ask for more of it.
    """

    def __init__(self, num_kept: int = 128) -> None:
        self._seen: deque[DownloadTiming] = deque(maxlen=num_kept)
        self.num_seen = 0

    def add(self, seen: DownloadTiming) -> None:
        """Note one download."""
        self._seen.append(seen)
        self.num_seen += 1

    def threads(self, num_processes: int) -> int:
        """Return `auto_threads` for what was seen."""
        if not self._seen:
            return min(START_THREADS, max(1, MOST_THREADS_OF_NODE // max(num_processes, 1)))
        size = sum(seen.size_bytes for seen in self._seen) / len(self._seen)
        is_python = self._seen[-1].is_python
        return auto_threads(
            size_bytes=size, latency_seconds=self.latency(0.05), num_processes=num_processes, is_python=is_python
        )

    def latency(self, quantile: float) -> float:
        """Return the latency that so large a share of the downloads stayed below; 0 before there is any."""
        latencies = sorted(seen.latency_seconds for seen in self._seen)
        return latencies[int(quantile * (len(latencies) - 1))] if latencies else 0.0
