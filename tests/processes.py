"""Processes that tests start, and what they have open."""

from __future__ import annotations

import contextlib
import glob
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Of the repository."""


def answer_of_forked_child(action: Callable[[], str]) -> str:
    """What `action` returns in a child made by a plain fork; the child does nothing else and always ends."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, action().encode())
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


def open_files(directory: Path) -> list[str]:
    """What this process has open of a cache directory."""
    paths = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in paths if path.startswith(str(directory)))


def wait_until(condition: Callable[[], bool], seconds: float = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def children(pid: int) -> set[int]:
    """Every living process below `pid`, helpers in groups of their own included."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            for child in map(int, task.read_text().split()):
                found |= {child, *children(child)}
    return found


def is_alive(pid: int) -> bool:
    """Whether a thread of it runs: the others may hold its files and locks when the first one is a zombie already."""
    for stat in glob.glob(f"/proc/{pid}/task/*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            if Path(stat).read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                return True
    return False


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a forked child that does `work`; 0 when it got through."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            try:
                work()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
