"""Whether this process may start threads: code in C++ that starts them, as Arrow's does, may wait for ever where it may not."""

from __future__ import annotations

import threading

from sqlstream.errors import StorageError

_NUM_THREADS = 2
"""As many as read a table: Arrow's reader of CSV waits for ever where its second does not start."""


def check_threads(purpose: str) -> None:
    """Start as many threads at once as reading a table takes, and end them.

    Args:
        purpose: What they are for, as it follows "to" in the message.

    Raises:
        StorageError: They do not start.
    """
    is_over = threading.Event()
    started = []
    try:
        for _ in range(_NUM_THREADS):
            thread = threading.Thread(target=is_over.wait, name="sqlstream-check", daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        raise no_thread(purpose, error) from error
    finally:
        is_over.set()
        for thread in started:
            thread.join()


def no_thread(purpose: str, error: Exception) -> StorageError:
    """Return the error of a thread that does not start; see `check_threads`."""
    return StorageError(f"no thread can be started to {purpose} ({error}): raise `ulimit -u`")
