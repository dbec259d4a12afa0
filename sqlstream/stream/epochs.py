"""Which epoch an iteration is, agreed by the DataLoader workers of one iteration without a lock or a message.

A DataLoader asks every worker for an iterator once per iteration; workers of one iteration share its seed. The first that
starts takes the next epoch and writes it down in shared memory; the others find it there, or, starting at the same moment,
work out the same number from the same past. Rejected: a counter in each worker (workers that are new in each epoch start
again at 0), and a lock (a semaphore would bring multiprocessing's resource tracker process).
"""

from __future__ import annotations

import os

import torch
from torch.utils.data import get_worker_info

_SLOTS = 256
"""Workers that can write at once; more share slots, which is harmless as long as they do not start in the same instant."""


class EpochCounter:
    """The next epoch of a dataset, shared by its trainer process and its workers (fork and spawn)."""

    def __init__(self) -> None:
        # Per slot: identity of the iteration (seed, count in that worker) and its epoch + 1; slot 0 is the trainer's.
        self._table = torch.zeros((_SLOTS, 3), dtype=torch.int64)  # [slots, 3]
        self._next = torch.zeros(1, dtype=torch.int64)  # [1]
        for tensor in (self._table, self._next):  # [*]
            tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch annotates it not
        self._num_started = 0
        self._pid = os.getpid()

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return int(self._next[0])

    def set_next(self, epoch: int) -> None:
        """Make the next iteration `epoch`."""
        self._next[0] = epoch
        self._table.zero_()

    def start(self) -> int:
        """Return the epoch of the iteration that starts now."""
        info = get_worker_info()
        if info is None:
            epoch = self.next_epoch
            self._next[0] = epoch + 1
            return epoch
        if self._pid != os.getpid():  # a worker that was forked or spawned: it has started nothing yet
            self._pid, self._num_started = os.getpid(), 0
        self._num_started += 1
        candidate = self.next_epoch  # read before the table: whoever moved it has written its slot
        seed, count = info.seed - info.id, self._num_started
        same = (self._table[:, 0] == seed) & (self._table[:, 1] == count) & (self._table[:, 2] > 0)  # [slots]
        known = self._table[same, 2]  # [n]
        epoch = int(known[0]) - 1 if len(known) else candidate
        slot = 1 + info.id % (_SLOTS - 1)
        self._table[slot, 2] = 0  # not valid while it is being written
        self._table[slot, 0], self._table[slot, 1] = seed, count
        self._table[slot, 2] = epoch + 1
        self._next[0] = max(self.next_epoch, epoch + 1)
        return epoch
