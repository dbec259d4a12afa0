"""What tests ask of processes that live and die, and of servers that are asked."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from sqlstream.testing.servers import FaultyHttpServer

PATIENCE_SECONDS = 300  # for a machine that does much else


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_dead(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


def in_forked_child(work: object) -> int:
    """Run `work` in a forked child; return its exit status, 99 when it hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(PATIENCE_SECONDS)  # a hang ends with SIGALRM
            assert callable(work)
            work()
        except BaseException as error:
            sys.stderr.write(f"in the child: {error!r}\n")
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def wait_for_requests(server: FaultyHttpServer, num_requests: int, path: str = "/x") -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(server.requests(path)) < num_requests:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counted() -> tuple[int, int]:
    """Open descriptors and threads of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def has_more_than(before: tuple[int, int]) -> bool:
    """Whether this process has more of either than it had; fewer where a thread of an earlier test has ended."""
    return any(now > then for now, then in zip(counted(), before, strict=True))
