"""Times and thresholds of a cache, in one value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTuning:
    """What users need not set, and tests do; the same for all caches of a process in one directory."""

    room_timeout_seconds: float = 120.0
    """Longest wait for others to give room back: longer than the transforms of most batches."""
    queue_patience_seconds: float = 2.0
    """After so long in line for room, older waiters are no longer let through first: one of them may be stopped."""
    num_hits_a_look: int = 256
    """Hits between two looks at limit and policy: some windows, or many single ones; one that looks takes twice as long (m)."""
    full_disk_pauses_seconds: tuple[float, ...] = (0.05, 0.2, 0.8)
    """Between looks at a full disk: what was removed keeps its room until the helper process has closed it. Arbitrary."""
    allocate_from_bytes: int = 128 << 10
    """Reservations from here on take their room on the disk before the download, so that a full one shows at once. Below, that
    costs as much as writing the file (m); a full disk shows at the write."""
