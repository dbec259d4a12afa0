"""Reads files that samples name. One that the engine has open meanwhile is read there: opening it again costs 16 KB more."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol


class OpenFiles(Protocol):
    """Files that somebody else has open, and closes; then they are no longer in it."""

    @property
    def open_files(self) -> Mapping[str, tuple[int, int]]:
        """Descriptor and size in bytes, by path."""


class _Nothing:
    open_files: Mapping[str, tuple[int, int]] = MappingProxyType({})


class _Lent(threading.local):
    """What is open for the sample that this thread makes."""

    def __init__(self) -> None:
        self.files: OpenFiles = _Nothing()


_lent = _Lent()


def lend(files: OpenFiles) -> None:
    """Have `read_file` in this thread read open files where they are, until others are lent or these are closed."""
    _lent.files = files


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return what a file holds.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    file = _lent.files.open_files.get(os.fspath(path))
    if file is not None:
        fd, size_bytes = file
        data = os.pread(fd, size_bytes, 0)
        if len(data) == size_bytes:  # one read brings 2 GiB at most
            return data
    with open(path, "rb", buffering=0) as unbuffered:  # a buffer, or a Path, costs half as much again as a small file
        return unbuffered.read()
