"""The way of a batch from a worker to the trainer: bytes through memory that both see, not through the pipe between them.

A pipe copies bytes four times, 64 KiB at a time. Here a worker copies each sample's bytes once, as soon as the sample is made,
into a slot of memory that it shares with the trainer; the trainer reads them there.

    worker   sample ─ gather ─> slot ─ collate ─> where its bytes lie ─ pipe ─> trainer: PackedBytes, a sequence of bytes
    a slot   free ─ sealed with a batch ─> taken ─ the trainer's last view of it is gone ─> free

Slots are used again, since new memory costs more than the copy (page faults). A slot has one writer at a time: the worker while
it is free, and the trainer, who frees it, while it is taken. When all are taken (the trainer keeps batches), or a batch is too
large for one, bytes cross the pipe as they do without this. The memory has no name in the file system: nothing stays behind.
"""

from __future__ import annotations

import mmap
import os
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from ctypes import Array, c_ubyte
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, SupportsIndex, overload

import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from sqlstream.transforms.base import Sample

SLOT_BYTES = 64 << 20
"""Most bytes of a batch; address space, not memory: pages that were never written take none."""
MIN_PACKED_BYTES = 1024
"""Shorter values are cheaper in the message; they go to the slot only beside a longer one of their field."""
MAX_MESSAGE_BYTES = 1 << 16
"""Tensors up to this size go in the message: torch opens a file and a socket for each tensor that it shares."""
NUM_SPARE_SLOTS = 3
"""Beside those that wait for the trainer: the one being written, and the last two batches that the trainer took."""
_Cells = c_ubyte * SLOT_BYTES


class PackedBytes(Sequence[bytes]):
    """One field of a batch, where its worker has put it: a sequence of `bytes`, each made when it is asked for.

    Args:
        memory: What the values lie in.
        starts: Where each begins.
        stops: Where each ends.
    """

    def __init__(self, memory: memoryview, starts: Sequence[int], stops: Sequence[int]) -> None:
        self._memory = memory
        self._starts = starts
        self._stops = stops

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: SupportsIndex) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> bytes | list[bytes]:
        """Return a copy of one value, or a list of some."""
        if isinstance(index, slice):
            return [bytes(view) for view in self.views()[index]]
        number = index.__index__()
        return bytes(self._memory[self._starts[number] : self._stops[number]])

    def __iter__(self) -> Iterator[bytes]:
        return map(bytes, self.views())

    def views(self) -> list[memoryview]:
        """Return all values without a copy; the batch's memory is kept for as long as one of them is."""
        return [self._memory[start:stop] for start, stop in zip(self._starts, self._stops, strict=True)]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | PackedBytes) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return f"PackedBytes of {len(self)} values"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the list that it stands for: the memory is this process's."""
        return list, (list(self),)


class Arena:
    """The memory of the workers of one iteration: a page of flags, then slots. It ends with the last batch that lies in it.

    Args:
        num_slots: Of all workers together.
        fd: The memory; None: new memory.
        token: Its name among the arenas of this process.
    """

    def __init__(self, num_slots: int, fd: int | None = None, token: str | None = None) -> None:
        self.num_slots = num_slots
        self.token = token or uuid.uuid4().hex
        self._slots_at = -(-num_slots // mmap.PAGESIZE) * mmap.PAGESIZE
        num_bytes = self._slots_at + num_slots * SLOT_BYTES
        if fd is None:
            fd = os.memfd_create("sqlstream-batches")
            os.ftruncate(fd, num_bytes)
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self.memory = mmap.mmap(fd, num_bytes)
        self._leases: weakref.WeakValueDictionary[int, Array[c_ubyte]] = weakref.WeakValueDictionary()
        _arenas[self.token] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to a worker that is being started."""
        if get_spawning_popen() is None:
            raise TypeError("the memory of a running loader goes to its own workers only: pickle the dataset by itself")
        return _attached, (self.num_slots, DupFd(self._fd), self.token)

    def start_of(self, slot: int) -> int:
        """Return where a slot begins."""
        return self._slots_at + slot * SLOT_BYTES

    def lease(self, slot: int) -> memoryview:
        """Return a taken slot's memory, to be read; the slot is free again when the last view of it is gone."""
        cells = self._leases.get(slot)
        if cells is None:
            cells = self._leases[slot] = _Cells.from_buffer(self.memory, self.start_of(slot))
            weakref.finalize(cells, _free, self.memory, slot, os.getpid()).atexit = False
        return memoryview(cells).cast("B").toreadonly()


_arenas: weakref.WeakValueDictionary[str, Arena] = weakref.WeakValueDictionary()


def _attached(num_slots: int, fd: Any, token: str) -> Arena:
    return Arena(num_slots, fd.detach(), token)


def _free(memory: mmap.mmap, slot: int, pid: int) -> None:
    if os.getpid() == pid:  # a child that was forked later has a copy of the batch, and no say
        memory[slot] = 0


class _Piece(NamedTuple):
    """Where one value lies in the slot that is being written."""

    start: int
    stop: int


class Packing:
    """What the workers of one iteration do for their trainer; in them it is the loader's `collate_fn`.

    Args:
        num_workers: Each has slots of its own.
        prefetch_factor: Batches of a worker that wait for the trainer.
    """

    def __init__(self, num_workers: int, prefetch_factor: int) -> None:
        self._num_slots = prefetch_factor + NUM_SPARE_SLOTS
        self._arena = Arena(num_workers * self._num_slots)
        self._slot: int | None = None
        self._end = 0

    def gather(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples with their long bytes in the slot; what they took is free for the next one's."""
        self._slot = None
        for sample in samples:
            gathered = {
                field: self._put(value)
                for field, value in sample.items()
                if type(value) is bytes and len(value) >= MIN_PACKED_BYTES
            }
            if gathered:
                sample = {**sample, **gathered}  # noqa: PLW2901 - the old one may be a transform's own; it is let go of here
            yield sample

    def __call__(self, samples: list[Sample]) -> Any:
        """Return the batch as torch's default makes it, but ready to be sent."""
        joins: dict[Any, Any] = dict.fromkeys((bytes, str, _Piece), self._join)
        batch = collate(samples, collate_fn_map={**default_collate_fn_map, **joins})
        slot, self._slot = self._slot, None
        if slot is not None and any(isinstance(value, _Packed) for value in batch.values()):
            self._arena.memory[slot] = 1
        return {field: _Message(value) if _is_small(value) else value for field, value in batch.items()}

    def _join(self, values: list[Any], *, collate_fn_map: Any) -> Any:  # noqa: ARG002 - torch's signature
        """Return one field of the batch: where its values lie, or the values if not all of them do."""
        if not any(type(value) is _Piece for value in values):
            return values
        pieces: list[Any] = [self._put(value) if type(value) is bytes else value for value in values]
        if not all(type(piece) is _Piece for piece in pieces):
            return [self._read(piece) if type(piece) is _Piece else piece for piece in pieces]
        assert self._slot is not None
        return _Packed(self._arena.token, self._slot, [piece.start for piece in pieces], [piece.stop for piece in pieces])

    def _put(self, data: bytes) -> bytes | _Piece:
        """Put a value into the slot; return it as it is when there is no slot, or no room in it."""
        if self._slot is None:
            info = get_worker_info()
            first = 0 if info is None else info.id * self._num_slots
            own = range(first, first + self._num_slots)
            self._slot, self._end = next((slot for slot in own if not self._arena.memory[slot]), None), 0
        piece = _Piece(self._end, self._end + len(data))
        if self._slot is None or piece.stop > SLOT_BYTES:
            return data
        start = self._arena.start_of(self._slot)
        self._arena.memory[start + piece.start : start + piece.stop] = data
        self._end = piece.stop
        return piece

    def _read(self, piece: _Piece) -> bytes:
        assert self._slot is not None
        start = self._arena.start_of(self._slot)
        return self._arena.memory[start + piece.start : start + piece.stop]


class _Packed:
    """A field on its way: the trainer gets PackedBytes."""

    def __init__(self, *place: Any) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._place


def _received(token: str, slot: int, starts: list[int], stops: list[int]) -> PackedBytes:
    return PackedBytes(_arenas[token].lease(slot), starts, stops)


def _is_small(value: Any) -> bool:
    is_plain = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
    return is_plain and value.nbytes <= MAX_MESSAGE_BYTES and not value.requires_grad and value.dtype in _NUMPY_DTYPES


_NUMPY_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
)


class _Message:
    """A small tensor on its way, as bytes of the message."""

    def __init__(self, value: torch.Tensor) -> None:  # [...]
        self._array = value.numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.from_numpy, (self._array,)
