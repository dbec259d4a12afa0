"""Processes that tests start, and what they have open."""

from __future__ import annotations

import atexit
import contextlib
import glob
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path

from tests.starters import keep_starter

ROOT = Path(__file__).parents[1]
"""Of the repository."""
FORKSERVER = multiprocessing.get_context("forkserver")
"""Clean processes, started fast: their server has imported what caches need, and used none of it.

pytest is what modules of tests import. Nothing else: a fork copies the tables of all memory, and tests that kill a process at
each side effect fork thousands of times.
"""
FORKSERVER.set_forkserver_preload(["tests.cache.actors", "sqlstream.cache.ledger.queries", "pytest"])


class Program:
    """One that `Programs` has started."""

    def __init__(
        self, connection: Connection, pid: int, words: Sequence[str], folder: tempfile.TemporaryDirectory[str]
    ) -> None:
        self.pid = pid
        self._connection, self._words, self._folder = connection, words, folder

    def finish(self, timeout_seconds: float = 500) -> subprocess.CompletedProcess[str]:
        """Wait for its end, and return what it wrote."""
        code = self._wait(timeout_seconds)
        if is_late := code is None:
            os.kill(self.pid, signal.SIGKILL)
            code = self._wait(None)
        out, err = ((Path(self._folder.name) / name).read_text() for name in ("stdout", "stderr"))
        self._folder.cleanup()
        assert not is_late, f"{self._words} hangs:\n{out}\n{err}"
        return subprocess.CompletedProcess(self._words, code or 0, out, err)

    def _wait(self, timeout_seconds: float | None) -> int | None:
        self._connection.send((self.pid, timeout_seconds))
        code: int | None = self._connection.recv()
        return code


class Programs:
    """Runs programs, each in a process of its own that has imported what most of them need: a fork of one that did.

    Args:
        modules: What is imported.
    """

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._connection: Connection | None = None

    def run(
        self,
        main: Callable[[list[str]], int],
        *words: str,
        stdin: str = "",
        timeout_seconds: float = 500,
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run the `main` of a program, without the time that an interpreter and its imports take.

        Args:
            main: Takes its words, returns its exit code; found by its name in its module.
            words: What follows the name of the program.
            stdin: What it reads.
            timeout_seconds: How long it may take.
            directory: Where it runs; None: here.
            environment: Its variables; None: ours.
        """
        return self.start(main, *words, stdin=stdin, directory=directory, environment=environment).finish(timeout_seconds)

    def start(
        self,
        main: Callable[[list[str]], int],
        *words: str,
        stdin: str = "",
        directory: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        """Start it, beside others."""
        connection = self._connection or self._connect()
        folder = tempfile.TemporaryDirectory()
        files = [Path(folder.name) / name for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin)
        connection.send((main, words, files, dict(environment or os.environ), str(directory or Path.cwd())))
        return Program(connection, connection.recv(), words, folder)

    def _connect(self) -> Connection:
        self._connection, theirs = FORKSERVER.Pipe()
        FORKSERVER.Process(target=_serve, args=(theirs, self._modules)).start()
        theirs.close()
        # Before this process joins its children, at its end; an end of the pipe may have gone to children of its own.
        Finalize(self, self._connection.send, args=(None,), exitpriority=10)
        return self._connection


COMMANDS = Programs(
    *("sqlstream.cli.main", "sqlstream.cli.top", "sqlstream.cache.ledger.queries"),
    *("sqlstream.index.build.build", "pyarrow.parquet", "pandas"),  # which pyarrow imports when it converts values
)
"""For the command line."""
SCRIPTS = Programs("torch.utils.data", "sqlstream.stream.dataset", "sqlstream.transforms.presets")
"""For scripts that train: PyTorch takes seconds to import."""


def start_script(script: Path, *words: str, environment: Mapping[str, str] | None = None) -> Program:
    """Start a file in its folder, as `python FILE WORDS` does, but for the time that imports take."""
    return SCRIPTS.start(_run_file, script.name, *words, directory=script.parent, environment=environment)


def _run_file(words: list[str]) -> int:
    sys.argv = words
    sys.path.insert(0, os.getcwd())
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _serve(connection: Connection, modules: Sequence[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    keep_starter()
    programs: dict[int | None, BaseProcess] = {}
    with contextlib.suppress(EOFError):
        while (message := connection.recv()) is not None:
            if len(message) > 2:
                program = multiprocessing.get_context("fork").Process(target=_run_main, args=message)
                program.start()
                programs[program.pid] = program
                connection.send(program.pid)
            else:
                pid, timeout_seconds = message
                programs[pid].join(timeout_seconds)
                connection.send(programs[pid].exitcode)


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
    """Every process below `pid`, helpers in groups of their own included; of its grandchildren those that live.

    A helper that has ended is a zombie until the starter that forked it reaps it.
    """
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
            for child in map(int, task.read_text().split()):
                found |= {child, *filter(is_alive, children(child))}
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
