"""How transforms read the files that samples name: where the engine has them open, they are not opened again."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from sqlstream.errors import DecodeError


class DescriptorOwner(Protocol):
    """What closes a descriptor when it is dropped."""

    def fileno(self) -> int:
        """Return the descriptor."""


class OpenFile(Protocol):
    """A file that the engine has open."""

    @property
    def owners(self) -> Sequence[DescriptorOwner]:
        """The owner of its descriptor; none in a forked child."""

    @property
    def size_bytes(self) -> int:
        """Its size."""


class OpenFiles(Protocol):
    """Files that the engine has open; a file that it closes is no longer in `open_files`."""

    @property
    def open_files(self) -> Mapping[str, OpenFile]:
        """Those of a sample, by path."""


class _Nothing:
    open_files: Mapping[str, OpenFile] = MappingProxyType({})


class _Lent(threading.local):
    """Files that are open for the sample that this thread makes."""

    files: OpenFiles = _Nothing()


LENT = _Lent()
"""Set by the chain that runs in this thread."""


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file; one that is lent to this thread's sample is read through its descriptor.

    Raises:
        DecodeError: It cannot be read.
    """
    file = LENT.files.open_files.get(os.fspath(path))
    try:
        if file is not None and file.owners:
            data = os.pread(file.owners[0].fileno(), file.size_bytes, 0)
            if len(data) == file.size_bytes:  # one read gives 2 GiB at most
                return data
        with open(path, "rb", buffering=0) as unbuffered:  # without a buffer: a file is read whole
            return unbuffered.read()
    except (OSError, ValueError) as error:
        check_there(os.fspath(path))
        raise DecodeError(f"{os.fspath(path)!r} cannot be read: {error}") from error


def check_there(path: str) -> None:
    """Raise DecodeError for a URL, or a relative path that is no file: the text of a column that was not downloaded.

    What was downloaded has an absolute path.
    """
    if not os.path.isabs(path) and not os.path.exists(path):
        raise DecodeError(
            f"{path!r} cannot be read: there is no such local file. If it is what the table names, put its column into "
            "columns_to_download: samples then hold the path of the file that was downloaded"
        )
