"""Memory of a DataLoader worker that its trainer maps: slots, each for one batch, used again and again.

    a slot   free ─ written, sealed by the worker ─> taken ─ the trainer's last lease of it is gone ─> free

New memory costs more than the copy into it (page faults), so slots are used again. A slot has one writer at a time: the worker
while it is free, and the trainer, which frees it, while it is taken. A child that the trainer forks keeps the batches that were
leased then: their slots are free after the child has ended.

The memory has no name in the file system, so it ends with its processes. The worker makes it, and the trainer opens it by the
worker's descriptor in /proc when the first batch comes; so it serves every loader and every way to start workers. Rejected: to
send the descriptor, as torch does for each tensor: the worker's thread that sends it waits for the interpreter.
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
from typing import Any, NamedTuple

import torch

from sqlstream.errors import ConfigError
from sqlstream.process import fork

SLOT_BYTES = 64 << 20
"""Most bytes of a batch; address space, not memory: pages that were never written take none."""
ALIGNMENT = 64
"""Alignment of tensors in bytes: a cache line, as torch has it."""
LIMITED_SHARE = 4
"""The memory of all workers takes at most one part in so many of a limited address space (`ulimit -v`)."""
MAX_SLOTS = mmap.PAGESIZE
"""Most slots of an arena: the flags of all, a byte each, are its first page."""
_SLOTS_AT = mmap.PAGESIZE


class ArenaName(NamedTuple):
    """Where another process finds an arena."""

    pid: int
    """The worker."""
    fd: int
    """Its descriptor of the memory."""
    inode: int
    """Tells the memory from another process's, if the worker has ended and its number is used again."""


class Arena:
    """The slots of a worker, in the worker.

    Args:
        num_slots: Number of batches that lie in it at a time; of more than `MAX_SLOTS`, so many.
        num_workers: Number of workers that have one each.

    Raises:
        OSError: There is not enough memory or address space, or no /proc.
    """

    def __init__(self, num_slots: int, num_workers: int = 1) -> None:
        num_slots = min(num_slots, MAX_SLOTS)
        num_bytes = _SLOTS_AT + num_slots * SLOT_BYTES
        most_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most_bytes != resource.RLIM_INFINITY and num_workers * num_bytes > most_bytes // LIMITED_SHARE:
            raise OSError(errno.ENOMEM, f"the address space of this process is limited to {most_bytes} bytes (RLIMIT_AS)")
        self.num_slots = num_slots
        self._fd = os.memfd_create("sqlstream-batches")
        weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, num_bytes)
        self.memory = mmap.mmap(self._fd, num_bytes)
        self._address = tensor_in(self.memory, 0, torch.uint8, (1,)).data_ptr()
        self.name = ArenaName(os.getpid(), self._fd, os.stat(_path(os.getpid(), self._fd)).st_ino)

    def find_free(self) -> int | None:
        """Return the first free slot, so that as few pages as possible are ever touched; None: all are taken."""
        return next((slot for slot in range(self.num_slots) if not self.memory[slot]), None)

    def write(self, slot: int, start: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes to a place of a free slot."""
        at = _start_of(slot) + start
        self.memory[at : at + len(data)] = data

    def tensor(
        self, slot: int, start: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None
    ) -> torch.Tensor:  # [...]
        """Return a tensor in a free slot, to be written."""
        return tensor_in(self.memory, _start_of(slot) + start, dtype, shape, strides)

    def place_of(self, slot: int, tensor: torch.Tensor) -> int | None:  # [...]
        """Return where a tensor lies in a slot; None: it lies elsewhere."""
        start = tensor.data_ptr() - self._address - _start_of(slot)
        return start if 0 <= start < SLOT_BYTES else None

    def seal(self, slot: int) -> None:
        """Hand a written slot over: it is taken as long as the trainer has a lease of it."""
        self.memory[slot] = 1


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


class OpenArena:
    """The slots of a worker, in the trainer. They stay mapped as long as this object, or a lease of one of them.

    Args:
        name: Where it is.

    Raises:
        ConfigError: It cannot be opened.
    """

    def __init__(self, name: ArenaName) -> None:
        self.name = name
        try:
            fd = os.open(_path(name.pid, name.fd), os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_ino != name.inode:
                    raise FileNotFoundError(errno.ENOENT, "the worker has ended")
                self._memory = mmap.mmap(fd, 0)
            finally:
                os.close(fd)
        except OSError as error:
            raise ConfigError(
                f"a batch lies in memory of the DataLoader worker {name.pid} that cannot be opened: {error}. If the worker was "
                "not killed, pass StreamingDataLoader(pack_bytes=False)"
            ) from error
        self._leases: weakref.WeakValueDictionary[int, _Cells] = weakref.WeakValueDictionary()
        self._inherited: list[_Lease] = []

    def lease(self, slot: int) -> _Cells:
        """Return a taken slot's memory; the slot is free again when the last object that keeps this one is gone."""
        for inherited in [inherited for inherited in self._inherited if inherited.is_over()]:
            self._inherited.remove(inherited)
            self._memory[inherited.slot] = 0
        cells = self._leases.get(slot)
        if cells is None:
            cells = self._leases[slot] = _Cells.from_buffer(self._memory, _start_of(slot))
            cells.children = []
            lease = _Lease(slot, cells.children)
            weakref.finalize(cells, _free, self._memory, lease, os.getpid(), self._inherited).atexit = False
        return cells

    def lease_to(self, child: _ForkedChild) -> None:
        """Keep the slots that are leased now until a child has ended, too."""
        for cells in list(self._leases.values()):
            cells.children.append(child)

    @property
    def is_orphaned(self) -> bool:
        """Its worker has ended."""
        return not os.path.exists(_path(self.name.pid, self.name.fd))


class OpenArenas:
    """The arenas of a loader's workers in the trainer, each from its first batch until its worker ends or this object does."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        """What batches name it by."""
        self._of: dict[ArenaName, OpenArena] = {}
        _of_loaders[self.token] = self

    def add(self, arena: OpenArena) -> None:
        """Keep an arena open, and none of workers that have ended."""
        self._of = {name: old for name, old in self._of.items() if not old.is_orphaned} | {arena.name: arena}


_of_loaders: weakref.WeakValueDictionary[str, OpenArenas] = weakref.WeakValueDictionary()
_arenas: weakref.WeakValueDictionary[ArenaName, OpenArena] = weakref.WeakValueDictionary()


def leased_memory(token: str, name: ArenaName, slot: int) -> memoryview:
    """Return a taken slot; it is free again when the last view of it is gone.

    Args:
        token: `OpenArenas` of the loader; where they are gone, the arena is closed with its last lease.
        name: The arena.
        slot: The slot.

    Raises:
        ConfigError: It cannot be opened.
    """
    arena = _arenas.get(name)
    if arena is None:
        arena = _arenas[name] = OpenArena(name)
        if (arenas := _of_loaders.get(token)) is not None:
            arenas.add(arena)
    return memoryview(arena.lease(slot)).cast("B")


class _Lease(NamedTuple):
    """A slot, and the children that were forked while it was leased."""

    slot: int
    children: list[_ForkedChild]

    def is_over(self) -> bool:
        return all(child.is_gone() for child in self.children)


def _free(memory: mmap.mmap, lease: _Lease, pid: int, inherited: list[_Lease]) -> None:
    if os.getpid() != pid:  # a forked child must not free the slot of its parent
        return
    if lease.is_over():
        memory[lease.slot] = 0
    else:
        inherited.append(lease)


def tensor_in(
    memory: Any, start: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] | None = None
) -> torch.Tensor:  # [...]
    """Return a tensor in memory.

    Args:
        memory: A buffer.
        start: Its first byte.
        dtype: Its type.
        shape: Its shape.
        strides: Its strides, in elements; dense, so that they lie within as many elements as it has. None: in rows.
    """
    if not prod(shape):  # torch makes no empty tensor from a buffer
        return torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start)  # [n]
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _start_of(slot: int) -> int:
    return _SLOTS_AT + slot * SLOT_BYTES


def _path(pid: int, fd: int) -> str:
    return f"/proc/{pid}/fd/{fd}"


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
