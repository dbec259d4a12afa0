"""Reads files that samples name. One that the engine has open meanwhile is read there: opening it again costs 16 KB more."""

from __future__ import annotations

import os
import threading
from typing import Protocol


class OpenFile(Protocol):
    """A file that somebody else has open, and closes."""

    path: str
    size_bytes: int

    def fileno(self) -> int:
        """Return its descriptor."""


class _Lent(threading.local):
    """What is open for the samples that this thread makes, by path."""

    def __init__(self) -> None:
        self.files: dict[str, OpenFile] = {}


_lent = _Lent()


def lend(file: OpenFile) -> None:
    """Have `read_file` in this thread read an open file where it is; whoever lends it keeps it open until `take_back`."""
    _lent.files[file.path] = file


def take_back() -> None:
    """Have files be opened by whoever reads them."""
    _lent.files.clear()


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return what a file holds.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    file = _lent.files.get(os.fspath(path))
    if file is not None:
        data = os.pread(file.fileno(), file.size_bytes, 0)
        if len(data) == file.size_bytes:  # one read brings 2 GiB at most
            return data
    with open(path, "rb", buffering=0) as unbuffered:  # a buffer, or a Path, costs half as much again as a small file
        return unbuffered.read()
