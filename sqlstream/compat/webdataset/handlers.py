"""What becomes of a sample whose stage fails: a handler returns True to go on without it, False to end the iteration."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NoReturn

Handler = Callable[[Exception], object]


def reraise_exception(exn: Exception) -> NoReturn:
    """Raise the exception."""
    raise exn


def ignore_and_continue(exn: Exception) -> bool:  # noqa: ARG001 - theirs has it
    """Go on without the sample."""
    return True


def warn_and_continue(exn: Exception) -> bool:
    """Warn, and go on without the sample. Theirs sleeps half a second each time; the warnings are the same."""
    warnings.warn(repr(exn), stacklevel=2)
    return True


def ignore_and_stop(exn: Exception) -> bool:  # noqa: ARG001 - theirs has it
    """End the iteration."""
    return False


def warn_and_stop(exn: Exception) -> bool:
    """Warn, and end the iteration."""
    warnings.warn(repr(exn), stacklevel=2)
    return False


_ALL = (reraise_exception, ignore_and_continue, warn_and_continue, ignore_and_stop, warn_and_stop)


def is_known(handler: Handler) -> bool:
    """Return whether a handler is one of these, and not the user's."""
    return any(handler is known for known in _ALL)
