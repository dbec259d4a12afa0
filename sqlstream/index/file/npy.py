"""Files of int64 as numpy writes them: row ids of a selection, sums of weights; with a checksum behind the numbers."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.intact import check_plain, is_intact, npy_trailer
from sqlstream.process import locks


def write_header(file: BinaryIO, count: int) -> None:
    """Write the header of a .npy file of `count` int64; numpy leaves room in it for any count."""
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (count,)})


def finish_npy(file: BinaryIO, count: int) -> None:
    """Write the header of a file whose numbers are all there, and its checksum; bring it to the disk."""
    file.seek(0)
    write_header(file, count)
    file.flush()
    file.seek(0, os.SEEK_END)
    file.write(npy_trailer(Path(file.name)))
    file.flush()
    os.fsync(file.fileno())


def load_npy(path: Path, count: int | None = None) -> np.memmap:
    """Return the int64 of a .npy file, mapped; of any number of them if no `count` is given.

    Raises:
        IndexDatabaseError: It is damaged, holds something else, or cannot be read.
    """
    check_plain(path)
    with locks.uninterrupted():  # what a handler raises in the middle would say that the file is damaged
        try:
            if is_intact(path) is False:
                raise ValueError("its checksum is another one")
            found: np.memmap = np.load(path, mmap_mode="r", allow_pickle=False)  # [count]
            if found.shape != ((len(found) if count is None else count),) or found.dtype != np.dtype("<i8"):
                raise ValueError(f"it holds numbers of {found.dtype} in the shape {found.shape}, not {count} of int64")
        except Exception as error:  # numpy evaluates the header as Python, whose parser raises many things
            raise unreadable(path, error) from error
    return found


def unreadable(path: Path, reason: object) -> IndexDatabaseError:
    """Return the error of a file that is not as it was written."""
    return IndexDatabaseError(f"{path} cannot be read ({reason}): remove it, it is built again")


def unload(mapped: np.ndarray) -> None:
    """Let go of the pages that were touched; the kernel has them still. Else a worker's memory grows with the index."""
    file: mmap.mmap = mapped._mmap  # type: ignore[attr-defined]  # of np.memmap; not typed
    file.madvise(mmap.MADV_DONTNEED)
