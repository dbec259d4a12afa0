"""The epoch of an iteration, and where in it the iteration begins, in memory that trainer and workers share (fork and spawn).

Any other process that the trainer forks or spawns is a trainer of its own, a rank for instance: it goes on from what held when
it was made, in other memory. If ranks shared it, the first one that begins an epoch would move the others to the next one.

A StreamingDataLoader decides in the trainer, and its workers read what it announced. A plain DataLoader does not decide: it
asks every worker for an iterator once per iteration, and the workers of one iteration share its seed. The first worker that
starts takes the next epoch and writes it into the memory; the others read it there, or, if they start at the same moment,
compute the same from the same numbers. Rejected: a counter in each worker (workers that are new in each epoch start again at
0), and a lock (a semaphore would start multiprocessing's resource tracker process).
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import get_worker_info

from sqlstream.order import Int64Array
from sqlstream.process import fork
from sqlstream.stream.run.positions import JobPosition
from sqlstream.stream.run.shared.memory import as_shared, is_shared, shared_bytes
from sqlstream.stream.run.shared.owned import OwnedMemory

_SLOTS = 256
"""Workers that can write at once; more share slots, which is harmless as long as they do not start in the same instant."""
_ANNOUNCEMENTS = 64
"""Iterations whose workers can be about to read where they begin; one takes milliseconds. Arbitrary."""


class EpochCounter(OwnedMemory[Int64Array]):
    """The position at which the next iteration of a dataset begins."""

    def __init__(self) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._num_started = 0
        self._num_announced = 0
        self._take_memory()

    def _take_memory(self) -> None:
        """Make new memory to share with workers."""
        shape = (3 + _ANNOUNCEMENTS + _SLOTS, 4)
        self._shared = shared_bytes(8 * shape[0] * shape[1]).view(torch.int64).view(shape)  # [3, announcements and slots, 4]
        self._look()

    def _look(self) -> None:
        """Make the arrays through which the shared memory is read and written."""
        numbers: Int64Array = self._shared.numpy()  # [3, announcements and slots, 4]
        # next: epoch and consumed of the next iteration.
        # flags: the epoch + 1 that workers have started by themselves, 0 if none; 1 if a position gave no sample, or several.
        # set: how often the user has set a position; 1 if the last one was a state with more than a job; its epoch, consumed.
        self._next, self._flags, self._set = numbers[:3]  # [4]
        self.next_epoch = self._next[0, ...]  # []
        """The epoch of the next iteration: a view of the shared memory, which every access to a row reads."""
        # Each slot: the iteration by its seed and by its count in that worker, its epoch + 1, what is consumed of it.
        self._table = numbers[3 + _ANNOUNCEMENTS :]  # [slots, 4]
        # Each: epoch and consumed of an iteration that the trainer has announced.
        self._announced = numbers[3 : 3 + _ANNOUNCEMENTS]  # [announcements, 4]

    def _held(self) -> Int64Array:  # [3, 4]
        return self._shared.numpy()[:3].copy()

    def _begin_with(self, held: Int64Array) -> None:  # [3, 4]
        self._take_memory()
        self._shared.numpy()[:3] = held  # [3, 4]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, with the memory that it shares."""
        self._own()
        names = ("_shared", "_num_started", "_num_announced", "_pid", "_trainer")
        return {**{name: self.__dict__[name] for name in names}, "_inherited": self._held()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not is_shared(self._shared):  # a copy that is no worker's
            self._shared, self._trainer = as_shared(self._shared), os.getpid()  # [3, announcements and slots, 4]
        self._look()
        fork.enclose(self, fork.Stage.MEMORY)

    @property
    def next(self) -> JobPosition:
        """Where the next iteration begins."""
        self._own()
        return JobPosition(*self._next[:2].tolist())

    def new_announcement(self) -> int:
        """Return a number, never 0, under which the trainer announces to workers that are about to start, and while they last.

        Several loaders of one dataset, or threads, may announce at the same time: their workers must not read each other's.
        """
        self._num_announced = self._num_announced % (_ANNOUNCEMENTS - 1) + 1
        return self._num_announced

    def announced(self, announcement: int) -> JobPosition:
        """Return where the iteration begins that the trainer announced last under a number."""
        return JobPosition(*self._announced[announcement, :2].tolist())

    @property
    def epoch_of_workers(self) -> int | None:
        """The epoch that workers have started by themselves; None: the trainer announces epochs."""
        return int(self._flags[0]) - 1 if self._flags[0] else None

    def set_next(self, job: JobPosition) -> None:
        """Make the next iteration begin at `job`."""
        self._own()
        self._next[1] = job.consumed
        self._next[0] = job.epoch
        self._table[:] = 0
        self._flags[0] = 0

    @property
    def serial(self) -> int:
        """Number of positions that the user has set: a state holds until the next one is set."""
        return int(self._set[0])

    def has_more(self, job: JobPosition) -> bool:
        """Return whether the last state that was set is at `job` and has more than it: other processes lack the rest."""
        return bool(self._set[1]) and job == JobPosition(int(self._set[2]), int(self._set[3]))

    def set_from_outside(self, job: JobPosition, *, has_more: bool) -> None:
        """Make the next iteration begin at `job`, as the user says."""
        self._own()
        self._set[2:] = job
        self._set[1] = has_more
        self._set[0] += 1
        self.set_next(job)

    def announce(self, announcement: int) -> JobPosition:
        """Begin an iteration in the trainer, for the workers that it is about to ask, which know the number."""
        job = self.next  # in memory of its own from here on
        self._announced[announcement, :2] = job
        self.set_next(JobPosition(job.epoch + 1, 0))
        return job

    def start(self) -> JobPosition:
        """Return where the iteration begins that this process, trainer or worker, starts now."""
        info = get_worker_info()
        if info is None:
            job = self.next
            self.set_next(JobPosition(job.epoch + 1, 0))
            return job
        if self._pid != os.getpid():  # a worker that was forked or spawned: it has started nothing yet
            self._pid, self._num_started = os.getpid(), 0
        self._num_started += 1
        candidate = self.next  # read before the table: a worker that moved it has written its slot before
        seed, count = info.seed - info.id, self._num_started
        same = (self._table[:, 0] == seed) & (self._table[:, 1] == count) & (self._table[:, 2] > 0)  # [slots]
        known = self._table[same]  # [n, 4]
        job = JobPosition(int(known[0, 2]) - 1, int(known[0, 3])) if len(known) else candidate
        slot = 1 + info.id % (_SLOTS - 1)
        self._table[slot, 2] = 0  # not valid while it is being written
        self._table[slot, 0], self._table[slot, 1], self._table[slot, 3] = seed, count, job.consumed
        self._table[slot, 2] = job.epoch + 1
        self.skip_to(job.epoch)
        return job

    def skip_to(self, epoch: int) -> None:
        """Note that the iteration of this process is `epoch`: the next iteration is the epoch after it."""
        self._own()
        if get_worker_info() is not None:
            self._flags[0] = epoch + 1
        if self._next[0] <= epoch:
            self._next[1] = 0
            self._next[0] = epoch + 1

    @property
    def has_several(self) -> bool:
        """Some position gave no sample, or several: batches are no steps."""
        return bool(self._flags[1])

    def note_several(self) -> bool:
        """Note that a position gave no sample, or several; return True to the first process (to two, at the same moment)."""
        is_first = not self._flags[1]
        self._flags[1] = 1
        return is_first
