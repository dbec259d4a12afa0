"""Providers as users write them; what they do shows in files, since they run in another process."""

from __future__ import annotations

import io
import os
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

PLACE = "PROVIDED_BY_A_TEST"
"""Environment variable with the directory of the test."""
NO_FUNCTION = 5
LARGE_BYTES = 4 << 20


class Noted(io.RawIOBase):
    """A file without a known length, which notes that it was closed.

    Args:
        size: Bytes that it gives.
    """

    def __init__(self, size: int) -> None:
        self._left = size

    def readable(self) -> bool:
        """Return True."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Return up to `size` bytes."""
        size = min(size, self._left)
        self._left -= size
        return b"x" * size

    def close(self) -> None:
        """Note it."""
        if not self.closed:
            note("closed")
        super().close()


def note(word: str) -> int:
    """Write a line into the test's log; return how many such lines there are."""
    log = Path(os.environ[PLACE]) / "log"
    with log.open("a") as file:
        file.write(f"{word}\n")
    return log.read_text().splitlines().count(word)


def num_noted(directory: Path, word: str) -> int:
    """Return how often functions noted something."""
    log = directory / "log"
    return log.read_text().splitlines().count(word) if log.exists() else 0


def wait_noted(directory: Path, word: str, count: int) -> None:
    """Wait until functions have noted something so often."""
    pause = threading.Event()
    for _ in range(30_000):
        if num_noted(directory, word) >= count:
            return
        pause.wait(0.01)
    raise AssertionError(f"{word!r} was noted {num_noted(directory, word)} times")


def name_of(url: str) -> str:
    """Return the last part of a URL."""
    return url.rpartition("/")[2]


def content(url: str) -> bytes:
    """Return bytes made of the name."""
    note(name_of(url))
    return b"content of " + name_of(url).encode()


def table(url: str) -> bytes:
    """Return a table of two objects."""
    return b"".join(b'{"index": "%s", "file": "asset://photos/%s"}\n' % (name, name) for name in (b"a", b"b"))


def other(url: str) -> bytes:
    """Return other bytes."""
    return b"other content of " + name_of(url).encode()


def large(url: str) -> Noted:
    """Return a file of some MiB."""
    note("opened")
    return Noted(LARGE_BYTES)


def third_time(url: str) -> bytes:
    """Return bytes when it is asked for the third time."""
    if note("tried") < 3:
        raise TimeoutError(f"no answer for {url}, password=hidden")
    return b"at last"


def gone(url: str) -> bytes:
    """Raise: there is nothing."""
    note("asked")
    raise FileNotFoundError("no such asset")


def beside(url: str) -> str:
    """Return the path of a file of the test."""
    return str(Path(os.environ[PLACE]) / name_of(url))


def web(url: str) -> object:
    """Return an answer of the server that the URL names."""
    return urllib.request.urlopen(url.replace("asset://", "http://"))


ANSWER: Callable[[str], object] = content
"""What `answer` does, in the process of the test."""


def answer(url: str) -> object:
    """Return what the test says."""
    return ANSWER(url)
