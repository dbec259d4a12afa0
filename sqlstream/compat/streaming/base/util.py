"""What users import from `streaming.base.util`."""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlstream.compat.streaming.translation.merge import merge_parts
from sqlstream.compat.streaming.translation.numbers import bytes_to_int, number_abbrev_to_int
from sqlstream.errors import ConfigError

__all__ = [
    "bytes_to_int",
    "clean_stale_shared_memory",
    "get_list_arg",
    "merge_index",
    "number_abbrev_to_int",
    "retry",
    "wait_for_file_to_exist",
]


def get_list_arg(text: str) -> list[str]:
    """Return the parts of a text between commas."""
    return text.split(",") if text else []


def clean_stale_shared_memory() -> None:
    """Do nothing: no shared memory outlives its processes here."""


def merge_index(*args: Any, **kwargs: Any) -> None:
    """Join the indexes of parts: `merge_index(index_file_urls, out, keep_local, download_timeout)`, or without the list.

    Args:
        args: A list of indexes of parts, each a path, a URL or (path, URL), left out: those in the subdirectories of `out`;
            then `out`, a directory, a URL or both; `keep_local`, True: the local index stays beside the stored one; and
            `download_timeout`, which is accepted.
        kwargs: The same, by name.

    Raises:
        ConfigError: The parameters are others, or there is no part.
        SourceError: An index is not there.
    """
    has_list = bool(args and isinstance(args[0], list)) or "index_file_urls" in kwargs
    names = ("index_file_urls", "out", "keep_local", "download_timeout")[0 if has_list else 1 :]
    given = dict(zip(names, args, strict=False)) | kwargs
    if len(args) > len(names) or not given.keys() <= set(names) or "out" not in given:
        raise ConfigError(f"merge_index takes {', '.join(names)}, not {[*args, *kwargs]!r}")
    merge_parts(given.get("index_file_urls"), given["out"], keep_local=given.get("keep_local", True))


def wait_for_file_to_exist(filename: str, poll_interval: float, timeout: float, err_msg: str) -> None:
    """Return once a file is there.

    Raises:
        RuntimeError: It did not come within `timeout` seconds.
    """
    start = time.monotonic()
    while not os.path.exists(filename):
        if time.monotonic() - start > timeout:
            raise RuntimeError(f"{err_msg}{filename} is not there after {timeout:.3f} s")
        time.sleep(poll_interval)


def retry(
    exc_class: Any = Exception,
    clean_up_fn: Callable[[], None] | None = None,
    num_attempts: int = 3,
    initial_backoff: float = 1.0,
    max_jitter: float = 0.5,
) -> Any:
    """Return a decorator that calls a function again when it raises; also usable without parentheses.

    Args:
        exc_class: The class of exceptions, or several of them, after which it is called again.
        clean_up_fn: Called after each failure.
        num_attempts: Calls at most.
        initial_backoff: Seconds before the second call; twice as many before each further one.
        max_jitter: Random seconds at most beside these.

    Raises:
        ConfigError: There would be no call.
    """
    if num_attempts < 1:
        raise ConfigError(f"num_attempts={num_attempts} is no number of calls: give 1 or more")
    is_plain = not isinstance(exc_class, Sequence) and not isinstance(exc_class, type)
    kinds = Exception if is_plain else tuple(exc_class) if isinstance(exc_class, Sequence) else exc_class

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for attempt in range(num_attempts):
                try:
                    return function(*args, **kwargs)
                except kinds:
                    if clean_up_fn is not None:
                        clean_up_fn()
                    if attempt + 1 == num_attempts:
                        raise
                    time.sleep(initial_backoff * 2**attempt + random.random() * max_jitter)
            raise AssertionError("the loop returns or raises")

        return call

    return decorate(exc_class) if is_plain else decorate
