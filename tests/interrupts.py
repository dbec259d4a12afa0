"""Ctrl-C in the middle of anything."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable


def interrupted(action: Callable[[], None], num_interrupts: int, *, within_seconds: float, seed: int) -> int:
    """Call `action` again and again under one Ctrl-C at a time, each at another moment; return the number of calls.

    For processes of their own: an error in `action` leaves interrupts on their way.
    """
    ready = threading.Event()

    def interrupt() -> None:
        rng = random.Random(seed)
        for _ in range(num_interrupts):
            ready.wait()
            ready.clear()
            time.sleep(rng.random() * within_seconds)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    num_calls = 0
    for _ in range(num_interrupts):
        with contextlib.suppress(KeyboardInterrupt):
            ready.set()
            while True:
                num_calls += 1
                action()
    thread.join()
    return num_calls
