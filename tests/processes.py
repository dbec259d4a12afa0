"""Processes that tests start, and what they have open."""

from __future__ import annotations

import atexit
import contextlib
import glob
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""Of the repository."""
FORKSERVER = multiprocessing.get_context("forkserver")
"""Clean processes, started fast: their server has imported what they need, and used none of it."""
FORKSERVER.set_forkserver_preload(
    [
        *("tests.cache.actors", "sqlstream.cli.main", "sqlstream.cli.top", "sqlstream.cache.ledger.queries"),
        *("sqlstream.index.build.build", "pyarrow.parquet", "pandas"),  # pyarrow imports pandas when it converts values
    ]
)


def run_main(
    main: Callable[[list[str]], int], *words: str, stdin: str = "", timeout_seconds: float = 500
) -> subprocess.CompletedProcess[str]:
    """Run the `main` of a program in a process of its own, without the time that an interpreter and its imports take.

    Args:
        main: Takes its words, returns its exit code; found by its name in its module.
        words: What follows the name of the program.
        stdin: What it reads.
        timeout_seconds: How long it may take.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("stdin", "stdout", "stderr")}
        files["stdin"].write_text(stdin)
        arguments = (main, words, list(files.values()), dict(os.environ), os.getcwd())
        process = FORKSERVER.Process(target=_run_main, args=arguments)
        process.start()
        process.join(timeout_seconds)
        is_over = process.exitcode is not None
        if not is_over:
            process.kill()
            process.join()
        out, err = (files[name].read_text() for name in ("stdout", "stderr"))
        assert is_over, f"{words} hangs:\n{out}\n{err}"
        return subprocess.CompletedProcess(words, process.exitcode or 0, out, err)


def _run_main(
    main: Callable[[list[str]], int], words: Sequence[str], files: Sequence[Path], environment: dict[str, str], directory: str
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    for number, (path, mode) in enumerate(
        zip(files, (os.O_RDONLY, os.O_WRONLY | os.O_CREAT, os.O_WRONLY | os.O_CREAT), strict=True)
    ):
        fd = os.open(path, mode)
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    try:
        code = main(list(words))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    atexit._run_exitfuncs()  # which a process of multiprocessing leaves out
    sys.exit(code)


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
