"""Runs one user's query in a process of its own: `python -m sqlstream.index.sql.query_child FD PARENT_PID`."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sqlstream.index.sql.duckdb_compat import has_patterns
from sqlstream.index.sql.query_process import _HEADER_BYTES, Job
from sqlstream.index.sql.sqlite_engine import SqliteEngine

if TYPE_CHECKING:
    from sqlstream.index.sql.duckdb_engine import DuckdbEngine

_LOOK_SECONDS = 1.0  # after which an orphan ends at the latest
_IDLE_SECONDS = 10.0  # between two chunks of a lazy index; a start costs 0.3 s
_SPARE_SECONDS = 10  # of the processor, beyond the owner's limit of time: who is left after a kill of the owner ends by itself


class _QueryServer:
    """Answers the owner, one question at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")
        self._connection = connection
        self._engine: SqliteEngine | DuckdbEngine | None = None
        self._is_between = False
        """The rows of a query have been read: another one may come."""
        self._rows: Iterator[list[tuple[Any, ...]]] = iter(())

    def serve(self) -> None:
        """Answer until the owner is gone."""
        while True:
            what, arguments = self._read()
            self._answer(getattr(self, f"_{what}"), *arguments)

    def _open(self, job: Job) -> None:
        if self._engine is None:
            _import_needs(job)
            _set_limits(job)
        else:
            self._engine.close()
            with _unlimited_memory():
                _import_needs(job)
        _limit_processor(job)
        if job.engine == "duckdb":
            from sqlstream.index.sql.duckdb_engine import DuckdbEngine

            assert job.scratch is not None
            memory, spill = job.limits.memory_bytes // 2, job.limits.result_bytes
            self._engine = DuckdbEngine(
                job.table, job.query, job.statement, job.scratch, memory_bytes=memory, spill_bytes=spill
            )
        else:
            self._engine = SqliteEngine(job.table, job.query, budget_seconds=math.inf, statement=job.statement)

    def _describe(self) -> list[str]:
        assert self._engine is not None
        return self._engine.describe()

    def _result_fields(self) -> dict[str, Any]:
        assert self._engine is not None
        assert not isinstance(self._engine, SqliteEngine)
        return self._engine.result_fields()

    def _run(self, statement: str, count: int) -> list[str]:
        assert self._engine is not None
        names, self._rows = self._engine.run(statement, count)
        return names

    def _next(self) -> list[tuple[Any, ...]] | None:
        rows = next(self._rows, None)
        self._is_between = rows is None
        return rows

    def _answer(self, function: Any, *arguments: Any) -> None:
        try:
            body = pickle.dumps(function(*arguments), pickle.HIGHEST_PROTOCOL)
        except MemoryError:
            body = pickle.dumps(MemoryError())
        except Exception as error:
            body = pickle.dumps(error)
        self._file.write(len(body).to_bytes(_HEADER_BYTES, "little"))
        self._file.write(body)
        self._file.flush()

    def _read(self) -> Any:
        if self._is_between and not select.select([self._connection], [], [], _IDLE_SECONDS)[0]:
            os._exit(0)
        header = self._file.read(_HEADER_BYTES)
        if len(header) < _HEADER_BYTES:
            os._exit(0)
        return pickle.loads(self._file.read(int.from_bytes(header, "little")))


def _import_needs(job: Job) -> None:
    """Import what this query needs before its memory is bounded; Arrow and numpy are most of a start, and few need them."""
    if job.engine == "duckdb":
        importlib.import_module("sqlstream.index.sql.duckdb_engine")
    elif has_patterns(job.statement):
        importlib.import_module("pyarrow.compute")


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@contextlib.contextmanager
def _unlimited_memory() -> Iterator[None]:
    """Take what is imported within for no use of the query; its limit is as far away after it as before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = _used_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    yield
    _set_limit(resource.RLIMIT_AS, soft + _used_bytes() - used)


def _set_limits(job: Job) -> None:
    """Bound memory and files from here on."""
    used = _used_bytes()
    for kind, limit in (
        (resource.RLIMIT_AS, used + job.limits.memory_bytes),
        (resource.RLIMIT_FSIZE, job.limits.result_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _set_limit(kind, limit)


def _limit_processor(job: Job) -> None:
    """Bound the processor's time of the next query."""
    threads = 1 if job.engine == "sqlite" else os.cpu_count() or 1
    _set_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + threads * (job.limits.seconds + _SPARE_SECONDS)))


def _set_limit(kind: int, limit: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _end_with(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_LOOK_SECONDS)
    os._exit(0)


def main() -> None:
    """Serve the owner until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's, which kills us
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=_end_with, args=(parent_pid,), daemon=True).start()
    try:
        _QueryServer(socket.socket(fileno=descriptor)).serve()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


if __name__ == "__main__":
    main()
