"""The way of a batch from a worker to the trainer: through memory that both see, not through the pipe between them.

A pipe copies bytes four times, 64 KiB at a time; torch sends tensors in memory that is new for each, whose pages cost more than
the copy. Here a worker writes each batch into a slot of an arena, which the trainer reads, and which is then used again:

    worker   sample ─ gather: long bytes and tensors ─> slot ─ collate: where they lie ─ pipe ─> trainer

Each value goes there as soon as it is made, while the processor has it at hand, and its memory is free for the next one's: to
stack a batch of pictures in the end takes three times as long. What was bytes is a sequence of bytes there (PackedBytes), what
was tensors is a tensor, both in the slot's memory. When all slots are taken (the trainer keeps batches), or a batch is too
large for one, it goes as it does without this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from sqlstream.stream.transport.arena import ALIGNMENT, SLOT_BYTES, Arena, leased_tensor, leased_view
from sqlstream.transforms.base import Sample

logger = logging.getLogger(__name__)

MIN_PACKED_BYTES = 1024
"""Shorter values are cheaper in the message; they go to the slot only beside a longer one of their field."""
MAX_MESSAGE_BYTES = 1 << 16
"""Tensors up to this size go in the message: a file and a socket for each, as torch has it, cost more than their copies."""
MIN_PLACED_BYTES = 1 << 14
"""Tensors from this size on go to the slot one by one; to stack shorter ones in the end takes less than a call for each."""
NUM_SPARE_SLOTS = 3
"""Beside those that wait for the trainer: the one being written, and the last two batches that the trainer took."""


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


class _BytesAt(NamedTuple):
    """Where one value lies in the slot that is being written."""

    start: int
    stop: int


class _TensorStack:
    """Where the tensors of one field of a batch go: one behind the other, as their stack has them."""

    def __init__(self, start: int, stack: torch.Tensor) -> None:  # [b, ...]
        self.start = start
        self._stack = stack
        self._num = 0

    def add(self, value: torch.Tensor) -> torch.Tensor | _TensorRow:  # [...]
        """Return where a copy of a tensor lies now; the tensor itself if it does not fit."""
        stack, number = self._stack, self._num
        if number == len(stack) or value.dtype != stack.dtype or value.shape != stack.shape[1:]:
            return value
        stack[number].copy_(value)
        self._num += 1
        return _TensorRow(self, number)

    def __getitem__(self, number: int) -> torch.Tensor:  # [...]
        return self._stack[number]


class _TensorRow(NamedTuple):
    """Where one tensor lies."""

    rows: _TensorStack
    number: int


class BatchPacker:
    """What the workers of one iteration do for their trainer; in them it is the loader's `collate_fn`.

    Args:
        num_workers: Each has slots of its own.
        prefetch_factor: Batches of a worker that wait for the trainer.
        batch_size: Samples of a batch, as a rule.
    """

    def __init__(self, num_workers: int, prefetch_factor: int, batch_size: int) -> None:
        self._batch_size = batch_size
        self._num_slots = prefetch_factor + NUM_SPARE_SLOTS
        self._arena = Arena(num_workers * self._num_slots)
        self._slot: int | None = None
        self._end = 0
        self._is_used = False
        self._rows: dict[str, _TensorStack | None] = {}
        """Where long tensors of a field go; None: nowhere, they are stacked in the end."""

    @classmethod
    def new(cls, num_workers: int, prefetch_factor: int, batch_size: int) -> BatchPacker | None:
        """Return a new one; None, with a warning, where its memory cannot be had: batches then come as torch sends them."""
        try:
            return cls(num_workers, prefetch_factor, batch_size)
        except OSError as error:
            logger.warning(
                "batches of %d workers do not come through shared memory, but as torch sends them: %s. Raise the limit, or "
                "pass pack_bytes=False",
                *(num_workers, error),
            )
            return None

    def gather(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples with what is long of them in the slot; what it took is free for the next one's."""
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
        """Return where a batch of tensors like the first one may go; None: there is no slot, or no room in it."""
        num_bytes, shape = self._batch_size * first.nbytes, (self._batch_size, *first.shape)
        start = None if num_bytes <= MAX_MESSAGE_BYTES else self._take(num_bytes, ALIGNMENT)
        if start is None or self._slot is None:
            return None
        return _TensorStack(start, self._arena.tensor(self._slot, start, first.dtype, shape))

    def __call__(self, samples: list[Sample]) -> Any:
        """Return the batch as torch's default makes it, but ready to be sent."""
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
        return _PackedBatch(batch) if _is_small(batch) else batch

    def _joined(self, values: list[Any]) -> Any:
        """Return where the values of a field lie, or the values if not all of them do."""
        pieces: list[Any] = [self._put(value) if type(value) is bytes else value for value in values]
        if not all(type(piece) is _BytesAt for piece in pieces):
            return [self._read(piece) if type(piece) is _BytesAt else piece for piece in pieces]
        self._is_used = True
        return _Packed(self._arena.token, self._slot, [piece.start for piece in pieces], [piece.stop for piece in pieces])

    def _stacked(self, tensors: list[torch.Tensor]) -> Any:  # n × [...]
        """Return the stack of tensors: in the slot if it is long, and as torch does if there is no room."""
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
        """Return what the trainer gets as a tensor of the slot."""
        self._is_used = True
        return _PackedTensor(self._arena.token, self._slot, start, dtype, shape)

    def _put(self, data: bytes) -> bytes | _BytesAt:
        """Put a value into the slot; return it as it is when there is no slot, or no room in it."""
        start = self._take(len(data))
        if start is None or self._slot is None:
            return data
        piece, at = _BytesAt(start, start + len(data)), self._arena.start_of(self._slot)
        self._arena.memory[at + piece.start : at + piece.stop] = data
        return piece

    def _take(self, num_bytes: int, alignment: int = 1) -> int | None:
        """Return where in the slot so many bytes may go; None: there is no slot, or no room in it."""
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


class _Packed:
    """A field on its way: the trainer gets PackedBytes."""

    def __init__(self, *place: Any) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._place


def _received(token: str, slot: int, starts: list[int], stops: list[int]) -> PackedBytes:
    return PackedBytes(leased_view(token, slot), starts, stops)


class _PackedTensor:
    """A stack of tensors on its way: the trainer gets a tensor."""

    def __init__(self, *place: Any) -> None:
        self._place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return leased_tensor, self._place


def _is_plain(value: Any) -> bool:
    """Return whether a value is numbers in this process's memory, and nothing else."""
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


class _PackedBatch:
    """A small tensor on its way, as bytes of the message."""

    def __init__(self, value: torch.Tensor) -> None:  # [...]
        self._array = value.numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.from_numpy, (self._array,)
