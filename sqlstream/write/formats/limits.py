"""When a shard of an archive is full, and what shards are called."""

from __future__ import annotations

import re
from typing import Any

from sqlstream.config import check_at_least, parse_bytes
from sqlstream.errors import ConfigError


class ShardLimits:
    """When a shard of an archive is full.

    Args:
        size_limit: Most bytes of a shard; None: no limit.
        max_samples: Most samples of a shard; None: no limit.

    Raises:
        ConfigError: One of them is wrong.
    """

    def __init__(self, size_limit: int | str | None, max_samples: int | None) -> None:
        self._bytes = parse_bytes(size_limit, "size_limit") or None
        if max_samples is not None:
            check_at_least("max_samples", max_samples, 1)
        self._samples = max_samples

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the bytes."""
        return {"size_limit": self._bytes, "max_samples": self._samples}

    def takes(self, num_samples: int, num_bytes: int) -> bool:
        """Return whether a shard may have so many samples and bytes; the first sample always fits."""
        if num_samples == 1:
            return True
        return (self._bytes is None or num_bytes <= self._bytes) and (self._samples is None or num_samples <= self._samples)


def checked_pattern(pattern: str, extension: str) -> str:
    """Return a pattern of names of shards.

    Raises:
        ConfigError: It has no number, names a directory, or lacks the extension.
    """
    is_right = isinstance(pattern, str) and re.fullmatch(r"[^%/\\]*%0?\d*d[^%/\\]*", pattern) is not None
    if not is_right or not pattern.endswith(extension) or pattern.startswith("."):
        raise ConfigError(f"pattern={pattern!r}: give a name with one number, such as 'shard-%06d{extension}'")
    return pattern
