"""Ports for servers that do not tell which one they took."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that Linux gives out by itself: none is taken between the look and the server's start."""


def free_port() -> int:
    """Return a port of 127.0.0.1 that no server listens on.

    Raises:
        OSError: There is none to be found.
    """
    error = OSError("no free port on 127.0.0.1: end some servers")
    for port in random.SystemRandom().sample(_PORTS, 100):  # tests seed the other generator
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as taken:
                error = taken
            else:
                return port
    raise error
