"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, Protocol


class Progress(Protocol):
    """What the body of `progress` reports to."""

    def update(self, count: int, /) -> object:
        """Count `count` more units as done."""
        ...


class _Silent:
    def update(self, count: int, /) -> None:
        """Show nothing."""


def _is_terminal(stream: Any) -> bool:
    """Return whether a standard stream is a terminal.

    It is None where the process was started with it closed, and where a program has put a log in its place, it may have no
    more than `write`.
    """
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # the second one: it was closed
        return False


@contextlib.contextmanager
def progress(total: int | None, unit: str, description: str, show: bool = True) -> Iterator[Progress]:
    """Yield a bar on stderr to `update`; silent when stderr is no terminal or `show` is False.

    Args:
        total: Units in all, or None when it is not known.
        unit: What is counted, such as `" rows"`, or `"B"` for bytes.
        description: Left of the bar.
        show: False keeps it silent.
    """
    if not show or not _is_terminal(sys.stderr):
        yield _Silent()
        return
    from tqdm import tqdm  # only who shows a bar pays for the import

    with tqdm(total=total, unit=unit, desc=description, unit_scale=True, dynamic_ncols=True) as bar:
        yield bar
