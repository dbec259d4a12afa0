"""What a process and its children have used, read from /proc."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")

PR_SET_CHILD_SUBREAPER = 36
"""Of <linux/prctl.h>."""


def keep_orphans() -> None:
    """Become the parent of processes whose parent ends: what the helpers of ended workers have used counts like all else."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> Iterator[int]:
    """Yield all that descend from a process, and live."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return
    for task in tasks:
        try:
            pids = [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        except OSError:
            continue
        for child in pids:
            yield child
            yield from children_of(child)


def cpu_seconds_of(pid: int) -> float:
    """Return what one process has used, with the children that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) * TICK_SECONDS


def cpu_seconds() -> float:
    """Return what this process and all below it have used, the dead included."""
    pid = os.getpid()
    return cpu_seconds_of(pid) + sum(cpu_seconds_of(child) for child in children_of(pid))


def memory_bytes(pid: int, name: str) -> int:
    """Return a line of `smaps_rollup`, e.g. `'Rss'` or `'Pss'`."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def command_of(pid: int) -> str:
    """Return a process's command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
