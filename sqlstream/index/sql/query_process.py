"""A user's query in a process of its own, as its owner sees it: started, read from, and killed when its time is over.

Nothing within a process ends one call of a function (`replace` on two texts of 8 MB takes a minute, without a look at Ctrl-C),
bounds what SQLite or Arrow allocate, or survives what they abort. A process can be killed, and has limits of its own.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlstream.environment import child_environment
from sqlstream.errors import QueryError
from sqlstream.index.file.connection import size_of
from sqlstream.index.sql.dialect import does_not_run
from sqlstream.index.sql.table import QueriedTable
from sqlstream.process import fork, locks
from sqlstream.process.children import forget_child, start_child

_START_SECONDS = 300.0  # an interpreter takes 0.3 s
_LEAST_ROWS_A_SECOND = 20_000  # that DuckDB copies: a tenth of what it does
_HEADER_BYTES = 8
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Threads that the child does not need reserve memory, and Arrow's own pool ends a process where the system's says no."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """What one query may use."""

    seconds: float = 600.0
    """Longest time to wait for it; SQLite filters about 10^7 rows a second (m), so this is for 10^9, not for a cross join."""
    memory_bytes: int = 0
    """Memory of its process beside what an empty one has; 0: a quarter of the machine's or container's, at least 1 GiB."""
    result_bytes: int = 0
    """Its result, and its temporary files; 0: four times the index file, and 1 GiB."""

    def of(self, table: QueriedTable) -> QueryLimits:
        """Return the limits in numbers."""
        memory = max(1 << 30, _memory_bytes() // 4)
        result = (1 << 30) + 4 * size_of(table.path)
        return QueryLimits(
            seconds=self.seconds, memory_bytes=self.memory_bytes or memory, result_bytes=self.result_bytes or result
        )


def _memory_bytes() -> int:
    """Return the memory of the machine, or of the container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/memory.max") as file:  # "max" is no number
        total = min(total, int(file.read()))
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the process is started for."""

    table: QueriedTable
    query: str
    """As the user wrote it, for errors."""
    statement: str
    """As the engine must read it."""
    engine: str
    """`"sqlite"` or `"duckdb"`."""
    scratch: Path | None
    """Path of DuckDB's file."""
    limits: QueryLimits


class QueryProcess:
    """One run of `sqlstream.index.sql.query_child`. A forked child leaves it to its parent, and is told so if it asks.

    Args:
        job: Index, query and limits in numbers.

    Raises:
        QueryError: The engine refuses the query.
        OSError: No more processes or descriptors.
    """

    def __init__(self, job: Job) -> None:
        with locks.uninterrupted():
            self._process, self._socket = start_child("sqlstream.index.sql.query_child", child_environment() | _ONE_THREAD)
            self._is_inherited = False
            fork.call_in_child(self, fork.Stage.MEMORY)
        try:
            self.open(job)
        except BaseException:
            self.close()
            raise

    def open(self, job: Job) -> None:
        """Begin another query of the same engine, with the memory that the first one was given.

        Raises:
            QueryError: The engine refuses it, or the process is gone: it ends when it is not used for some seconds.
        """
        self._job, self._seconds_left, self._bytes_left = job, job.limits.seconds, job.limits.result_bytes
        self._send(("open", (job,)))
        self._receive("the start of", _START_SECONDS + job.table.num_rows / _LEAST_ROWS_A_SECOND)

    def is_alive(self) -> bool:
        """Return False once it has ended."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def describe(self) -> list[str]:
        """Return the names of the query's result columns."""
        names: list[str] = self._ask("describe")
        return names

    def result_fields(self) -> dict[str, Any]:
        """Return the Arrow fields of the query's result by name."""
        fields: dict[str, Any] = self._ask("result_fields")
        return fields

    def run(self, statement: str, count: int) -> tuple[list[str], Iterator[list[tuple[Any, ...]]]]:
        """Return the names of the result of `statement`, and its rows, at most `count` at a time."""
        return self._ask("run", statement, count), self._batches()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        with locks.uninterrupted(), locks.fork_guard():
            if self._socket.fileno() >= 0:
                locks.close_descriptor(self._socket.detach())
        if self._job.scratch is not None and not self._is_inherited:
            remove_scratch(self._job.scratch)

    def after_fork_in_child(self) -> None:
        """Drop what is the parent's: the process; its socket is closed already, and other files get the number that it had."""
        self._is_inherited = True
        forget_child(self._process)
        self._socket.detach()

    def _batches(self) -> Iterator[list[tuple[Any, ...]]]:
        while (rows := self._ask("next")) is not None:
            yield rows

    def _ask(self, what: str, *arguments: object) -> Any:
        self._send((what, arguments))
        started = time.monotonic()
        try:
            return self._receive("", self._seconds_left)
        finally:
            self._seconds_left -= time.monotonic() - started

    def _send(self, message: object) -> None:
        body = pickle.dumps(message)
        with self._errors_of_forks(), contextlib.suppress(BrokenPipeError, ConnectionResetError):  # dead: what is left says why
            self._socket.settimeout(None)
            self._socket.sendall(len(body).to_bytes(_HEADER_BYTES, "little") + body)

    @contextlib.contextmanager
    def _errors_of_forks(self) -> Iterator[None]:
        """Raise QueryError where this process is a child that was forked within the query, by a signal handler for instance."""
        locks.notice_fork()
        try:
            yield
        except OSError as error:  # the socket is closed
            if not self._is_inherited:
                raise
            raise self._error("this process was forked while it ran, and its parent goes on with it: run it again") from error

    def _receive(self, what: str, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        try:
            size = int.from_bytes(self._read(_HEADER_BYTES, deadline), "little")
            self._bytes_left -= size
            if self._bytes_left < 0:
                limit = self._job.limits.result_bytes
                raise self._error(f"its result is more than {limit >> 20} MiB; select fewer rows, or shorter columns")
            value = pickle.loads(self._read(size, deadline))
        except TimeoutError as error:
            within = seconds if what else self._job.limits.seconds
            raise self._error(f"{what + ' ' if what else ''}it did not end within {within:g} seconds") from error
        except (EOFError, ConnectionError) as error:
            raise self._error(self._end()) from error
        if isinstance(value, MemoryError):
            raise self._error(self._needs_memory())
        if isinstance(value, Exception):
            raise value
        return value

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        view, start = memoryview(data), 0
        while start < size:
            with self._errors_of_forks():
                self._socket.settimeout(max(1e-3, deadline - time.monotonic()))
                count = self._socket.recv_into(view[start:])
            if not count:
                raise EOFError
            start += count
        return data

    def _end(self) -> str:
        """Return what became of the process."""
        self._process.kill()
        code = self._process.wait()
        if code in (-signal.SIGABRT, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGBUS):
            return f"{self._needs_memory()} (its process ended by {signal.Signals(-code).name})"
        if code == -signal.SIGXCPU:
            return f"it did not end within {self._job.limits.seconds:g} seconds of the processor"
        return f"its process ended with {code}, see standard error"

    def _needs_memory(self) -> str:
        return f"it needs more than {self._job.limits.memory_bytes >> 20} MiB of memory"

    def _error(self, why: str) -> QueryError:
        engine = " in DuckDB" if self._job.engine == "duckdb" else ""
        return does_not_run(self._job.query, why, self._job.table.columns, engine)


def remove_scratch(scratch: Path) -> None:
    """Remove DuckDB's file and what it keeps beside it."""
    for path in (scratch, Path(f"{scratch}.wal")):
        path.unlink(missing_ok=True)
    shutil.rmtree(f"{scratch}.d", ignore_errors=True)
