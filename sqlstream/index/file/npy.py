"""Files of int64 as numpy writes them: row ids of a selection, sums of weights; with a checksum behind the numbers."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sqlstream.index.file.intact import check_plain, npy_trailer

_NPY_HEADER_BYTES = 128  # of format 1.0: room for any count


def npy_header(count: int) -> bytes:
    """Return the header of a .npy file of `count` int64; its length does not depend on the count."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}"
    length = _NPY_HEADER_BYTES - 10
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1).encode() + b"\n"


def finish_npy(file: BinaryIO, count: int) -> None:
    """Write the header of a file whose numbers are all there, and its checksum; bring it to the disk."""
    file.seek(0)
    file.write(npy_header(count))
    file.flush()
    file.seek(0, os.SEEK_END)
    file.write(npy_trailer(Path(file.name)))
    file.flush()
    os.fsync(file.fileno())


def load_npy(path: Path, count: int | None = None) -> np.memmap:
    """Return the int64 of a .npy file, mapped; of any number of them if no `count` is given.

    Raises:
        ValueError: It is damaged, or holds something else; OSError: it cannot be read.
    """
    check_plain(path)
    try:
        found: np.memmap = np.load(path, mmap_mode="r", allow_pickle=False)  # [count]
    except OSError:
        raise
    except Exception as error:  # numpy evaluates the header as Python, whose parser raises many things
        raise ValueError(str(error)) from error
    if found.shape != ((len(found) if count is None else count),) or found.dtype != np.dtype("<i8"):
        raise ValueError(f"it holds numbers of {found.dtype} in the shape {found.shape}, not {count} of int64")
    return found


def unload(mapped: np.ndarray) -> None:
    """Let go of the pages that were touched; the kernel has them still. Else a worker's memory grows with the index."""
    file: mmap.mmap = mapped._mmap  # type: ignore[attr-defined]  # of np.memmap; not typed
    file.madvise(mmap.MADV_DONTNEED)
