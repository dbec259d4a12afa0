"""Memory that the workers of a loader share with their trainer: slots, each for one batch, used again and again.

    a slot   free ─ claimed, written, sealed by its worker ─> taken ─ the trainer's last lease of it is gone ─> free

New memory costs more than the copy into it (page faults), so slots are used again. A slot has one writer at a time: its worker
while it is free, and the trainer, which frees it, while it is taken. A child that the trainer forks keeps the batches that were
leased then: their slots are free after the child has ended. The memory has no name in the file system, so it ends with its
processes.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
import uuid
import weakref
from collections.abc import Sequence
from ctypes import c_ubyte
from math import prod
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple

import torch

from sqlstream.process import fork

SLOT_BYTES = 64 << 20
"""Most bytes of a batch; address space, not memory: pages that were never written take none."""
ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, as torch has it."""
LIMITED_SHARE = 4
"""The memory takes at most one part in so many of a limited address space (`ulimit -v`): the trainer needs the rest."""


class _ForkedChild:
    """A child that the trainer has forked; it runs as long as it has the other end of a pipe."""

    def __init__(self) -> None:
        self._ours, self._its = os.pipe()
        os.set_blocking(self._ours, False)
        weakref.finalize(self, os.close, self._ours).atexit = False

    def close_its_end(self) -> None:
        """Close the child's end in the parent, so that the child alone has it."""
        os.close(self._its)

    def is_gone(self) -> bool:
        """Return whether the child has ended, with all that it has forked, or runs another program."""
        try:
            return not os.read(self._ours, 1)
        except BlockingIOError:
            return False


class _Cells(c_ubyte * SLOT_BYTES):  # type: ignore[misc]  # ctypes makes the base
    """A slot's memory in the trainer."""

    children: list[_ForkedChild]


class Arena:
    """The memory of the workers of one iteration: a page of flags, then slots. It ends with the last batch that lies in it.

    Args:
        num_slots: Slots of all workers together.
        fd: Descriptor of the memory; None: new memory.
        token: Its name among the arenas of this process.

    Raises:
        OSError: There is not enough memory or address space.
    """

    def __init__(self, num_slots: int, fd: int | None = None, token: str | None = None) -> None:
        self.num_slots = num_slots
        self.token = token or uuid.uuid4().hex
        self._slots_at = -(-num_slots // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = self._slots_at + num_slots * SLOT_BYTES
        most_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
        if fd is None and most_bytes != resource.RLIM_INFINITY and num_bytes > most_bytes // LIMITED_SHARE:
            raise OSError(errno.ENOMEM, f"the address space of this process is limited to {most_bytes} bytes (RLIMIT_AS)")
        if fd is None:
            fd = os.memfd_create("sqlstream-batches")
            os.ftruncate(fd, num_bytes)
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self.memory = mmap.mmap(fd, num_bytes)
        self._leases: weakref.WeakValueDictionary[int, _Cells] = weakref.WeakValueDictionary()
        self._inherited: list[_Lease] = []
        _arenas[self.token] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle for a worker that is being started."""
        if get_spawning_popen() is None:
            raise TypeError("the memory of a running loader goes to its own workers only: pickle the dataset by itself")
        return _attached, (self.num_slots, DupFd(self._fd), self.token)

    # -- in a worker --------------------------------------------------------------------------------------------------

    def find_free(self, slots: range) -> int | None:
        """Return the first free one of a worker's slots: so as few pages as possible are ever touched."""
        return next((slot for slot in slots if not self.memory[slot]), None)

    def start_of(self, slot: int) -> int:
        """Return where a slot begins."""
        return self._slots_at + slot * SLOT_BYTES

    def seal(self, slot: int) -> None:
        """Hand a written slot over: it is taken as long as the trainer has a lease of it."""
        self.memory[slot] = 1

    def tensor(self, slot: int, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:  # [...]
        """Return a tensor in a free slot, to be written."""
        return _tensor_in(self.memory, self.start_of(slot) + start, dtype, shape)

    # -- in the trainer -----------------------------------------------------------------------------------------------

    def lease(self, slot: int) -> _Cells:
        """Return a taken slot's memory; the slot is free again when the last object that keeps this one is gone."""
        for inherited in [inherited for inherited in self._inherited if inherited.is_over()]:
            self._inherited.remove(inherited)
            self.memory[inherited.slot] = 0
        cells = self._leases.get(slot)
        if cells is None:
            cells = self._leases[slot] = _Cells.from_buffer(self.memory, self.start_of(slot))
            cells.children = []
            lease = _Lease(slot, cells.children)
            weakref.finalize(cells, _free, self.memory, lease, os.getpid(), self._inherited).atexit = False
        return cells

    def lease_to(self, child: _ForkedChild) -> None:
        """Keep the slots that are leased now until a child has ended, too."""
        for cells in list(self._leases.values()):
            cells.children.append(child)


class _Lease(NamedTuple):
    """A slot, and the children that were forked while it was leased."""

    slot: int
    children: list[_ForkedChild]

    def is_over(self) -> bool:
        return all(child.is_gone() for child in self.children)


_arenas: weakref.WeakValueDictionary[str, Arena] = weakref.WeakValueDictionary()


def _attached(num_slots: int, fd: Any, token: str) -> Arena:
    return Arena(num_slots, fd.detach(), token)


def _free(memory: mmap.mmap, lease: _Lease, pid: int, inherited: list[_Lease]) -> None:
    if os.getpid() != pid:  # a forked child must not free the slot of its parent
        return
    if lease.is_over():
        memory[lease.slot] = 0
    else:
        inherited.append(lease)


def leased_view(token: str, slot: int) -> memoryview:
    """Return a slot of the arena of that name, to be read."""
    return memoryview(_arenas[token].lease(slot)).cast("B").toreadonly()


def leased_tensor(token: str, slot: int, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:  # [...]
    """Return a tensor in a slot of the arena of that name; the trainer may write into it."""
    return _tensor_in(_arenas[token].lease(slot), start, dtype, shape)


def _tensor_in(memory: Any, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:  # [...]
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).view(shape)


class _Forks:
    """What happens when this process forks while batches may be leased."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _ForkedChild | None = None
        fork.enclose(self, fork.Stage.LEASES)

    def before_fork(self) -> None:
        """Open the pipe to the child; other threads that fork wait, so that their children have no end of it."""
        self._lock.acquire()
        self._child = _ForkedChild() if _arenas else None

    def after_fork(self, *, is_child: bool) -> None:
        """Keep what is leased for the child, too; in the child, keep the other end open."""
        child, self._child = self._child, None
        self._lock.release()
        if child is not None and not is_child:
            child.close_its_end()
            for arena in list(_arenas.values()):
                arena.lease_to(child)


_forks = _Forks()
