"""Sends a batch from a worker to the trainer through memory that both have mapped, instead of the pipe between them.

A pipe copies bytes four times, 64 KiB at a time; torch sends each tensor in new memory, whose pages cost more than the copy.
Here a worker writes each batch into a slot of an arena; the trainer reads the slot, which is then used again:

    worker   sample ─ gather: long bytes and tensors ─> slot ─ collate: where they lie ─ pipe ─> trainer

Each value is copied as soon as it is made, while it is in the processor's cache. The trainer gets tensors as a tensor in the
slot's memory, and bytes as a list of bytes or, where it asks for views, as `PackedBytes` in that memory. When all slots are
taken (the trainer keeps batches), or a batch is too large for one, torch sends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from sqlstream.stream.transport.arena import ALIGNMENT, SLOT_BYTES, Arena, leased_tensor, leased_view
from sqlstream.transforms.base import Sample

logger = logging.getLogger(__name__)

MIN_PACKED_BYTES = 1024
"""Shorter values are sent in the message; they go to the slot only beside a longer one of their field."""
MAX_MESSAGE_BYTES = 1 << 16
"""Tensors up to this size are sent in the message: torch's file and socket for each cost more than their copies."""
MIN_PLACED_BYTES = 1 << 14
"""Tensors from this size on are copied to the slot one by one; shorter ones are stacked at the end."""
KEPT_FREE_BYTES = 16 << 20
"""A block of this size, taken and given back, has glibc keep up to twice as much of what batches free.

Else it returns that to the kernel, whose pages the next batch must have anew: 30 µs of the trainer's CPU for a sample of 47 KB,
and 19 so (m; bar: warm-bytes-2). A trainer that has freed a large array (a batch from a pipe) is there by itself.
"""
NUM_SPARE_SLOTS = 3
"""Slots beside those of waiting batches: the one being written, and those of the last two batches that the trainer took."""


class PackedBytes(Sequence[bytes]):
    """One field of a batch in shared memory: a sequence of `bytes`, each made when it is asked for.

    Args:
        memory: The memory of the values.
        starts: Start of each value in it.
        stops: End of each value in it.
    """

    def __init__(self, memory: memoryview, starts: Sequence[int], stops: Sequence[int]) -> None:
        self._memory = memory
        self._starts = starts
        self._stops = stops

    @classmethod
    def received(cls, token: str, slot: int, starts: list[int], stops: list[int]) -> PackedBytes:
        """Return the values in a slot of an arena, in the trainer."""
        return cls(leased_view(token, slot), starts, stops)

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
        """Return all values without a copy; each of them keeps the batch's memory."""
        return [self._memory[start:stop] for start, stop in zip(self._starts, self._stops, strict=True)]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | PackedBytes) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __repr__(self) -> str:
        return f"PackedBytes of {len(self)} values"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a list of bytes, since the memory is this process's."""
        return list, (list(self),)


class _BytesAt(NamedTuple):
    """Place of one value in the slot that is being written."""

    start: int
    stop: int


class _TensorStack:
    """Memory for the tensors of one field of a batch: one behind the other, as their stack has them."""

    def __init__(self, start: int, stack: torch.Tensor) -> None:  # [b, ...]
        self.start = start
        self._stack = stack
        self._num = 0

    def add(self, value: torch.Tensor) -> torch.Tensor | _TensorRow:  # [...]
        """Copy a tensor and return its place; return the tensor itself if it does not fit."""
        stack, number = self._stack, self._num
        if number == len(stack) or value.dtype != stack.dtype or value.shape != stack.shape[1:]:
            return value
        stack[number].copy_(value)
        self._num += 1
        return _TensorRow(self, number)

    def __getitem__(self, number: int) -> torch.Tensor:  # [...]
        return self._stack[number]


class _TensorRow(NamedTuple):
    """Place of one tensor in a stack."""

    rows: _TensorStack
    number: int


class BatchPacker:
    """Packs the batches of one iteration; in the workers it is the loader's `collate_fn`.

    Args:
        num_workers: Number of workers; each has slots of its own.
        prefetch_factor: Batches of a worker that wait for the trainer.
        batch_size: Samples of a whole batch.
        gives_views: Fields of bytes become a `PackedBytes`, else a list of bytes.
    """

    def __init__(self, num_workers: int, prefetch_factor: int, batch_size: int, *, gives_views: bool = False) -> None:
        self._batch_size = batch_size
        self._receive = PackedBytes.received if gives_views else _received
        self._num_slots = prefetch_factor + NUM_SPARE_SLOTS
        self._arena = Arena(num_workers * self._num_slots)
        self._slot: int | None = None
        self._end = 0
        self._is_used = False
        self._rows: dict[str, _TensorStack | None] = {}
        """Memory for long tensors, by field; None: they are stacked at the end."""

    @classmethod
    def new(cls, num_workers: int, prefetch_factor: int, batch_size: int, *, gives_views: bool) -> BatchPacker | None:
        """Return a new one; None, with a warning, if there is no memory for it: then torch sends the batches."""
        try:
            if not gives_views:
                bytes(KEPT_FREE_BYTES)
            return cls(num_workers, prefetch_factor, batch_size, gives_views=gives_views)
        except OSError as error:
            logger.warning(
                "batches of %d workers do not come through shared memory, but as torch sends them: %s. Raise the limit, or "
                "pass pack_bytes=False",
                *(num_workers, error),
            )
            return None

    def gather(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples whose long values are copied to the slot."""
        self._begin()
        for sample in samples:
            yield self._gathered(sample)

    def _begin(self) -> None:
        """Begin a batch."""
        self._slot = None
        self._rows = {}

    def _gathered(self, sample: Sample) -> Sample:
        gathered: Sample = {}
        for field, value in sample.items():
            kind = type(value)
            if kind is bytes and len(value) >= MIN_PACKED_BYTES:
                gathered[field] = self._put(value)
            elif kind is torch.Tensor and _is_plain(value) and value.nbytes >= MIN_PLACED_BYTES:
                if field not in self._rows:
                    self._rows[field] = self._room_for(value)
                if (rows := self._rows[field]) is not None:
                    gathered[field] = rows.add(value)
        return {**sample, **gathered} if gathered else sample  # never in place: it may be a transform's own

    def _room_for(self, first: torch.Tensor) -> _TensorStack | None:  # [...]
        """Return memory for a batch of tensors like the first one; None: there is no slot, or no room in it."""
        num_bytes, shape = self._batch_size * first.nbytes, (self._batch_size, *first.shape)
        start = None if num_bytes <= MAX_MESSAGE_BYTES else self._take(num_bytes, ALIGNMENT)
        if start is None or self._slot is None:
            return None
        return _TensorStack(start, self._arena.tensor(self._slot, start, first.dtype, shape))

    def __call__(self, samples: list[Sample]) -> Any:
        """Return the batch of torch's default, with packed fields that become values in the trainer."""
        self._is_used = False
        try:
            batch = {field: self._collated([sample[field] for sample in samples]) for field in samples[0]}
            if self._is_used and self._slot is not None:
                self._arena.seal(self._slot)
            return batch
        finally:
            self._begin()

    def _collated(self, values: list[Any]) -> Any:
        """Return one field of the batch."""
        rows = [value for value in values if type(value) is _TensorRow]
        if rows:
            first = rows[0].rows[0]  # [...]
            if [row.number for row in rows] == list(range(len(values))):
                return self._sent(rows[0].rows.start, first.dtype, (len(values), *first.shape))
            values = [value.rows[value.number].clone() if type(value) is _TensorRow else value for value in values]
        if any(type(value) is _BytesAt for value in values):
            return self._joined(values)
        first = values[0]
        if isinstance(first, np.ndarray) and first.dtype.kind in _NUMERIC_KINDS:
            values = [torch.as_tensor(value) for value in values]
        batch = self._stacked(values) if all(map(_is_plain, values)) else default_collate(values)
        return _Unpickled(torch.from_numpy, batch.numpy()) if _is_small(batch) else batch

    def _joined(self, values: list[Any]) -> Any:
        """Return the packed field, or a list of its values if not all of them fit into the slot."""
        pieces: list[Any] = [self._put(value) if type(value) is bytes else value for value in values]
        if not all(type(piece) is _BytesAt for piece in pieces):
            return [self._read(piece) if type(piece) is _BytesAt else piece for piece in pieces]
        self._is_used = True
        return _Unpickled(
            self._receive, self._arena.token, self._slot, [piece.start for piece in pieces], [piece.stop for piece in pieces]
        )

    def _stacked(self, tensors: list[torch.Tensor]) -> Any:  # n × [...]
        """Return the stack of tensors: in the slot if it is long; torch's own if there is no room."""
        first = tensors[0]  # [...]
        shape, num_bytes = (len(tensors), *first.shape), len(tensors) * first.nbytes
        if num_bytes <= MAX_MESSAGE_BYTES:
            return torch.stack(tensors, out=first.new_empty(shape))
        start = self._take(num_bytes, ALIGNMENT)
        if start is None or self._slot is None:
            return default_collate(tensors)
        torch.stack(tensors, out=self._arena.tensor(self._slot, start, first.dtype, shape))
        return self._sent(start, first.dtype, shape)

    def _sent(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Any:
        """Return the packed tensor at a place of the slot."""
        self._is_used = True
        return _Unpickled(leased_tensor, self._arena.token, self._slot, start, dtype, shape)

    def _put(self, data: bytes) -> bytes | _BytesAt:
        """Copy a value into the slot and return its place; return the value if there is no slot, or no room in it."""
        start = self._take(len(data))
        if start is None or self._slot is None:
            return data
        piece, at = _BytesAt(start, start + len(data)), self._arena.start_of(self._slot)
        self._arena.memory[at + piece.start : at + piece.stop] = data
        return piece

    def _take(self, num_bytes: int, alignment: int = 1) -> int | None:
        """Reserve bytes in the slot and return their start; None: there is no slot, or no room in it."""
        if self._slot is None:
            info = get_worker_info()
            first = 0 if info is None else info.id * self._num_slots
            self._slot, self._end = self._arena.find_free(range(first, first + self._num_slots)), 0
        start = -(-self._end // alignment) * alignment
        if self._slot is None or start + num_bytes > SLOT_BYTES:
            return None
        self._end = start + num_bytes
        return start

    def _read(self, piece: _BytesAt) -> bytes:
        assert self._slot is not None
        start = self._arena.start_of(self._slot)
        return self._arena.memory[start + piece.start : start + piece.stop]


class _Unpickled:
    """A value of the message that the trainer makes as it unpickles the batch: `make(*arguments)`."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        self._make = make
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._make, self._arguments


def _received(token: str, slot: int, starts: list[int], stops: list[int]) -> list[bytes]:
    return list(PackedBytes.received(token, slot, starts, stops))


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of plain numbers in this process's memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.is_nested or value.is_conj() or value.is_neg())
    )


def _is_small(value: Any) -> bool:
    return _is_plain(value) and value.nbytes <= MAX_MESSAGE_BYTES and value.dtype in _NUMPY_DTYPES


_NUMERIC_KINDS = "biufc"
_NUMPY_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
)
