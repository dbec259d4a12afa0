"""Arrow arrays of numbers and texts, made of their buffers.

Arrow's own conversion of Python's and numpy's values imports pandas where that is installed: most of the time that a dataset
of shards takes to open, and 30 MB of each worker that reads a table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64Array = npt.NDArray[np.int64]


def numbers(values: Int64Array, is_missing: npt.NDArray[np.bool_] | None = None) -> pa.Array[Any]:
    """Return whole numbers as Arrow has them.

    Args:
        values: The numbers: [n].
        is_missing: Which of them are NULL: [n]; None: none is.

    Example:
        >>> numbers(np.array([7, 0]), np.array([False, True])).to_pylist()
        [7, None]
    """
    validity = None
    if is_missing is not None and is_missing.any():
        validity = pa.py_buffer(np.packbits(~is_missing, bitorder="little").tobytes())
    return pa.Array.from_buffers(pa.int64(), len(values), [validity, pa.py_buffer(values.tobytes())])


def repeated(number: int, num_rows: int) -> pa.Array[Any]:
    """Return a whole number for each of some rows."""
    return numbers(np.full(num_rows, number, np.int64))


def texts(values: Iterable[str]) -> pa.Array[Any]:
    """Return texts as Arrow has them, 2 GiB at most.

    Example:
        >>> texts(["a", "ü"]).to_pylist()
        ['a', 'ü']
    """
    return _joined((value.encode() for value in values), pa.string())


def joined_texts(data: bytes, ends: Int64Array) -> pa.Array[Any]:
    """Return texts that are encoded one behind another.

    Args:
        data: All of them, 2 GiB at most.
        ends: Where each begins, and the end of the last: [n + 1].
    """
    return _of_buffers(data, ends, pa.string())


def blobs(values: Iterable[bytes]) -> pa.Array[Any]:
    """Return bytes as Arrow has them, 2 GiB at most."""
    return _joined(values, pa.binary())


def _joined(values: Iterable[bytes], kind: pa.DataType) -> pa.Array[Any]:
    found = [*values]
    return _of_buffers(b"".join(found), np.cumsum([0, *map(len, found)], dtype=np.int64), kind)


def _of_buffers(data: bytes, ends: Int64Array, kind: pa.DataType) -> pa.Array[Any]:
    if ends[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{ends[-1]} bytes do not fit one array of Arrow's {kind}")
    buffers = [None, pa.py_buffer(ends.astype(np.int32).tobytes()), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(ends) - 1, buffers)
