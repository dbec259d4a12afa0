"""Reads files that samples name; a file that the engine has open is read through its descriptor, without another open."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol


class OpenFiles(Protocol):
    """Files that the engine has open; a file that it closes is no longer in `open_files`."""

    @property
    def open_files(self) -> Mapping[str, tuple[int, int]]:
        """Descriptor and size in bytes, by path."""


class _Nothing:
    open_files: Mapping[str, tuple[int, int]] = MappingProxyType({})


class _Lent(threading.local):
    """Files that are open for the sample that this thread makes."""

    def __init__(self) -> None:
        self.files: OpenFiles = _Nothing()


_lent = _Lent()


def lend(files: OpenFiles) -> None:
    """Make `read_file` in this thread read these open files, until others are lent or these are closed."""
    _lent.files = files


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file.

    Raises:
        OSError, ValueError: It cannot be read.
    """
    file = _lent.files.open_files.get(os.fspath(path))
    if file is not None:
        fd, size_bytes = file
        data = os.pread(fd, size_bytes, 0)
        if len(data) == size_bytes:  # one read gives 2 GiB at most
            return data
    with open(path, "rb", buffering=0) as unbuffered:  # without a buffer: a file is read whole
        return unbuffered.read()
