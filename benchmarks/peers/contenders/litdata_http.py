"""Lets LitData's clients talk to a server without TLS: nginx on this machine. They have no option for it."""

from __future__ import annotations

from typing import Any


def allow_http(worker: int = 0) -> None:
    """Change what this process's clients are made with."""
    from litdata.streaming import downloader

    options: dict[str, Any] = downloader._OBSTORE_CLIENT_OPTIONS
    options["allow_http"] = True
