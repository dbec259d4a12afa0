"""Death or an error at the n-th side effect: how a test walks through every step of the protocol.

A side effect is a call that changes a file or commits a transaction. `SideEffects` counts those of the modules that touch a
cache directory, and acts before the n-th of them; what ran before it is real.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from sqlstream.cache.acquire import put
from sqlstream.cache.files import disk, layout, locked_files
from sqlstream.cache.ledger import database, write_lock
from sqlstream.process import locks

_MODULES: tuple[ModuleType, ...] = (locks, write_lock, database, disk, locked_files, layout, put)
_CHANGES = frozenset("unlink rename replace link mkdir rmdir ftruncate posix_fallocate pwrite chmod fsync".split())


class SideEffects:
    """Counts side effects; calls `action` before the one number `at`, and before each later one if `lasts`.

    Args:
        at: Which one, from 1; 0: none, only count.
        action: What happens there: `os._exit`, a kill, or an exception such as `OSError(ENOSPC, …)`.
        lasts: The fault stays (a full disk) instead of coming once.
        only: Names of side effects that count; None: all. A commit is called `COMMIT`, an open that creates `create`.

    Example:
        with SideEffects(3, lambda: os._exit(9)).installed():
            cache.clear()
    """

    def __init__(
        self, at: int, action: Callable[[str], object], *, lasts: bool = False, only: frozenset[str] | None = None
    ) -> None:
        self.num_seen = 0
        """Side effects so far."""
        self._at = at
        self._action = action
        self._lasts = lasts
        self._only = only

    def note(self, name: str) -> None:
        """A side effect of this name comes next."""
        if self._only is None or name in self._only:
            self.num_seen += 1
            if self._at and (self.num_seen == self._at or (self._lasts and self.num_seen > self._at)):
                self._action(name)

    @contextlib.contextmanager
    def installed(self) -> Iterator[SideEffects]:
        """Count and act while the body runs; connections opened before are not seen."""
        saved = [(module, module.__dict__["os"]) for module in _MODULES]
        sqlite3 = database.__dict__["sqlite3"]
        try:
            for module in _MODULES:
                module.__dict__["os"] = _Os(self)
            database.__dict__["sqlite3"] = _Sqlite(self, sqlite3)
            yield self
        finally:
            for module, original in saved:
                module.__dict__["os"] = original
            database.__dict__["sqlite3"] = sqlite3


class _Os:
    """`os`, whose changing calls are noted."""

    def __init__(self, effects: SideEffects) -> None:
        self._effects = effects

    def __getattr__(self, name: str) -> Any:
        return self._noting(name) if name in _CHANGES or name == "open" else getattr(os, name)

    def _noting(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name != "open":
                self._effects.note(name)
            elif arguments[1] & os.O_CREAT:
                self._effects.note("create")
            return getattr(os, name)(*arguments, **options)

        return call


class _Sqlite:
    """`sqlite3`, whose connections note their commits."""

    def __init__(self, effects: SideEffects, sqlite3: ModuleType) -> None:
        self._effects = effects
        self._sqlite3 = sqlite3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sqlite3, name)

    def connect(self, *arguments: Any, **options: Any) -> Any:
        effects = self._effects

        class Connection(self._sqlite3.Connection):  # type: ignore[name-defined, misc]  # a class of a module held as a value
            def execute(self, sql: str, *parameters: Any) -> Any:
                if sql.startswith(("COMMIT", "PRAGMA wal_checkpoint")):
                    effects.note(sql.partition(" ")[0])
                return super().execute(sql, *parameters)

            def commit(self) -> None:  # as SQLAlchemy commits, of a migration
                effects.note("COMMIT")
                super().commit()

        return self._sqlite3.connect(*arguments, factory=Connection, **options)
