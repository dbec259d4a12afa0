"""The import of sqlglot, beside forks."""

from __future__ import annotations

from sqlstream.process import locks

_importing = locks.ForkLock()
_loaded: set[str] = set()


def load_sqlglot(dialect: str) -> None:
    """Import sqlglot, and what it imports itself for a dialect when it is first used, while no other thread forks.

    The child would wait for ever for Python's lock of a module that the thread was importing. It is not imported with this
    package: that takes 0.3 s, and most programs never parse SQL.

    Args:
        dialect: As sqlglot calls it; '' is what all have in common.
    """
    if dialect in _loaded:
        return
    with _importing:
        import sqlglot

        sqlglot.parse_one("SELECT 1", read=dialect)
        _loaded.add(dialect)
