"""The import of pandas, where it is installed, beside forks."""

from __future__ import annotations

import pyarrow as pa

from sqlstream.process import locks


class _Import:
    """Whether Arrow has looked for pandas."""

    def __init__(self) -> None:
        self.lock = locks.ForkLock()
        self.is_done = False


_import = _Import()


def load_pandas() -> None:
    """Have Arrow import pandas, or see that it is not installed, while no other thread forks.

    Arrow does so at its first conversion from or to values of Python or numpy (`pa.array`, `pa.scalar`, `to_numpy`, `take` by
    an array of numpy), holding a lock of its own. A child that was forked meanwhile, which takes half a second, would wait for
    ever at its own first conversion. So this is called before such a conversion, and only there: Parquet, TAR and MDS are
    indexed without it.
    """
    if _import.is_done:
        return
    with _import.lock:
        pa.array([], pa.null())
        _import.is_done = True
