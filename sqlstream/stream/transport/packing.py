"""Sends a batch of any structure from a worker to the trainer through memory that both have mapped, instead of a pipe.

A pipe copies bytes four times, 64 KiB at a time; torch sends each tensor in new memory, whose pages cost more than the copy.
Here the worker pickles the batch, and whatever is long in it goes to a slot of its arena in place of the message:

    worker   batch ─ pickle ─> message: structure, short values, places ─ pipe ─> trainer: unpickles, and finds the places
                          └──> slot: long bytes, texts, tensors, arrays, buffers of protocol 5 ──┘

Tensors and arrays come out in the slot's memory, `bytes` and `str` as copies; all with the types that they went in with. When
all slots are taken (the trainer keeps batches), or a batch is too large for one, values go as torch sends them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple, SupportsIndex, overload

import numpy as np
import torch
from torch.utils.data import default_collate

from sqlstream.stream.transport.arena import ALIGNMENT, SLOT_BYTES, Arena, ArenaName, leased_memory, tensor_in

MIN_PACKED_BYTES = 1024
"""Shorter bytes and texts are sent in the message."""
MAX_MESSAGE_BYTES = 1 << 16
"""Tensors and arrays up to this size are sent in the message: a label that the trainer keeps keeps no slot."""


class PackedBytes(Sequence[bytes]):
    """A list of bytes in shared memory: a sequence of `bytes`, each made when it is asked for.

    Args:
        memory: The memory of the values.
        starts: Start of each value in it.
        stops: End of each value in it.
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


class SlotName(NamedTuple):
    """Where the trainer finds the slot of a batch."""

    token: str
    """The loader's `OpenArenas`."""
    arena: ArenaName
    slot: int


class PackedBatch:
    """A batch on its way: the trainer gets the batch itself as it unpickles this.

    Args:
        message: The pickled batch, with numbers of values that are not in it.
        slot: Where those lie; None: there are none.
        values: What makes each of them: a function of the slot's memory, and its other arguments.
        buffers: Start, end, and whether it may be written, of each buffer of protocol 5.
    """

    def __init__(
        self, message: bytes, slot: SlotName | None, values: list[tuple[Any, ...]], buffers: list[tuple[int, int, bool]]
    ) -> None:
        self._parts = (message, slot, values, buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, self._parts


class BatchPacker:
    """Packs the batches of a worker, one after the other.

    Args:
        arena: The worker's own.
        token: The loader's `OpenArenas`.
        gives_views: Lists of bytes become a `PackedBytes`, else they are lists of bytes.
    """

    def __init__(self, arena: Arena, token: str, *, gives_views: bool = False) -> None:
        self._arena = arena
        self._token = token
        self.gives_views = gives_views
        self._slot: int | None = None
        self._end = 0
        self._values: list[tuple[Any, ...]] = []
        self._buffers: list[tuple[int, int, bool]] = []
        self._numbers: dict[int, tuple[int, Any]] = {}
        """Number of each value by its id, and the value, so that no other one gets this id."""
        self._kept_lists: dict[int, list[Any]] = {}

    def begin(self) -> None:
        """Begin a batch."""
        self._slot, self._end = None, 0
        self._values, self._buffers, self._numbers, self._kept_lists = [], [], {}, {}

    def stack(self, tensors: list[torch.Tensor]) -> torch.Tensor:  # n × [...] -> [n, ...]
        """Return the stack of tensors: where the trainer gets it from, if it is long and there is room.

        Raises:
            RuntimeError, TypeError: They cannot be stacked.
        """
        first = tensors[0]  # [...]
        if not all(map(_is_plain, tensors)):
            return default_collate(tensors)  # type: ignore[no-any-return]  # a tensor
        shape, num_bytes = (len(tensors), *first.shape), len(tensors) * first.nbytes
        start = self._take(num_bytes, ALIGNMENT) if num_bytes > MAX_MESSAGE_BYTES else None
        if start is None or self._slot is None:
            stack = first.new_empty(shape)  # [n, ...]
        else:
            stack = self._arena.tensor(self._slot, start, first.dtype, shape)  # [n, ...]
        return torch.stack(tensors, out=stack)  # [n, ...]

    def pack(self, batch: Any) -> PackedBatch:
        """Return a batch on its way; what `stack` returned since `begin` may be in it.

        Raises:
            Exception: Something in it cannot be pickled.
        """
        try:
            file = BytesIO()
            (_ViewsPickler if self.gives_views else _BatchPickler)(file, self).dump(batch)
            slot = None
            if self._slot is not None and self._end:
                self._arena.seal(self._slot)
                slot = SlotName(self._token, self._arena.name, self._slot)
            return PackedBatch(file.getvalue(), slot, self._values, self._buffers)
        finally:
            self.begin()

    def number_of(self, value: Any) -> int | None:
        """Return the number of a value that is not in the message; None: it goes there."""
        kind = type(value)
        if kind in _PLAIN:
            if len(value) < MIN_PACKED_BYTES:
                return None
        elif kind is list:
            if not (self.gives_views and id(value) not in self._kept_lists and _is_packable(value)):
                return None
        elif not _is_plain(value):
            return None
        known = self._numbers.get(id(value))
        if known is not None:
            return known[0]
        if kind in _PLAIN:
            made = self._bytes_at(value, kind)
        elif kind is list:
            made = self._list_at(value)
        else:
            made = self._tensor_at(value)
        if made is None:
            return None
        number = len(self._values)
        self._values.append(made)
        self._numbers[id(value)] = (number, value)
        return number

    def keep_list(self, values: list[Any]) -> None:
        """Leave a list as it is: what unpickles the object that it is a part of takes nothing else."""
        self._kept_lists[id(values)] = values

    def keep_in_message(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer of protocol 5 goes into the message; else it has been copied."""
        data = buffer.raw()
        start = self._put(data, ALIGNMENT) if data.nbytes > MAX_MESSAGE_BYTES else None
        if start is None:
            return True
        self._buffers.append((start, start + data.nbytes, not data.readonly))
        return False

    def _bytes_at(self, value: Any, kind: type[Any]) -> tuple[Any, ...] | None:
        start = self._put(data := value.encode(errors="surrogatepass") if kind is str else value)
        return None if start is None else (_PLAIN[kind], start, start + len(data))

    def _list_at(self, values: list[bytes]) -> tuple[Any, ...] | None:
        """Return what makes the list in the trainer; None: not all of it fits."""
        end = self._end
        starts = [start for value in values if (start := self._put(value)) is not None]
        if len(starts) < len(values):
            self._end = end
            return None
        return _packed, starts, [start + len(value) for start, value in zip(starts, values, strict=True)]

    def _tensor_at(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:  # [...]
        """Return what makes the tensor in the trainer; None: torch sends it."""
        if tensor.is_conj() or tensor.is_neg():  # torch sends the memory, and not that it is to be conjugated or negated
            plain = tensor.resolve_conj().resolve_neg()  # [...]
            return self._tensor_at(plain) or (_as_sent, plain)
        if tensor.nbytes <= MAX_MESSAGE_BYTES and tensor.dtype in _NUMPY_DTYPES:
            return _from_array, tensor.numpy()
        strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        start = None if self._slot is None else self._arena.place_of(self._slot, tensor)
        if start is None or strides != tensor.stride():
            if tensor.untyped_storage().nbytes() < tensor.nbytes:  # expanded
                return None
            start = self._take(tensor.nbytes, ALIGNMENT)
            if start is None or self._slot is None:
                return None
            try:
                self._arena.tensor(self._slot, start, tensor.dtype, tensor.shape, strides).copy_(tensor)
            except NotImplementedError:  # of numbers of less than a byte, which torch has no operations for
                return None
        return tensor_in, start, tensor.dtype, tuple(tensor.shape), strides

    def _put(self, data: bytes | bytearray | memoryview, alignment: int = 1) -> int | None:
        """Copy bytes into the slot and return their start; None: there is no slot, or no room in it."""
        start = self._take(len(data), alignment)
        if start is not None and self._slot is not None:
            self._arena.write(self._slot, start, data)
        return start

    def _take(self, num_bytes: int, alignment: int = 1) -> int | None:
        """Reserve bytes in the slot and return their start; None: there is no slot, or no room in it."""
        if self._slot is None:
            self._slot = self._arena.find_free()
        start = -(-self._end // alignment) * alignment
        if self._slot is None or start + num_bytes > SLOT_BYTES:
            return None
        self._end = start + num_bytes
        return start


class _BatchPickler(ForkingPickler):
    """Pickles a batch as a queue of torch does, but for what the packer takes."""

    def __init__(self, file: BytesIO, packer: BatchPacker) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, True, packer.keep_in_message)
        self._packer = packer

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a value that is not in the message."""
        return self._packer.number_of(value) if type(value) in _PACKED_TYPES else None


class _ViewsPickler(_BatchPickler):
    """Pickles a batch whose lists of bytes become views, but for those that are the inside of an array."""

    def reducer_override(self, value: Any) -> Any:
        """Return how an array of objects is pickled (numpy makes it from a list), and nothing of any other object."""
        if not isinstance(value, np.ndarray) or type(value).__reduce__ is not np.ndarray.__reduce__:
            return NotImplemented
        if not value.dtype.hasobject:
            return NotImplemented
        reduced = value.__reduce__()
        for part in reduced[2]:
            if type(part) is list:
                self._packer.keep_list(part)
        return reduced


class _BatchUnpickler(pickle.Unpickler):
    """Unpickles a batch in the trainer."""

    def __init__(
        self, message: bytes, memory: memoryview | None, values: list[tuple[Any, ...]], buffers: list[memoryview]
    ) -> None:
        super().__init__(BytesIO(message), buffers=buffers)
        self._memory = memory
        self._values = values
        self._made: dict[int, Any] = {}

    def persistent_load(self, number: int) -> Any:
        """Return a value that is not in the message: each is made once, however often the batch has it."""
        if number not in self._made:
            make, *arguments = self._values[number]
            self._made[number] = make(self._memory, *arguments)
        return self._made[number]


def _unpacked(
    message: bytes, slot: SlotName | None, values: list[tuple[Any, ...]], buffers: list[tuple[int, int, bool]]
) -> Any:
    memory = None if slot is None else leased_memory(*slot)
    views = []
    for start, stop, is_writable in buffers:
        assert memory is not None
        views.append(memory[start:stop] if is_writable else memory[start:stop].toreadonly())
    return _BatchUnpickler(message, memory, values, views).load()


def _bytes(memory: memoryview, start: int, stop: int) -> bytes:
    return bytes(memory[start:stop])


def _bytearray(memory: memoryview, start: int, stop: int) -> bytearray:
    return bytearray(memory[start:stop])


def _text(memory: memoryview, start: int, stop: int) -> str:
    return str(memory[start:stop], "utf-8", "surrogatepass")


def _packed(memory: memoryview, starts: list[int], stops: list[int]) -> PackedBytes:
    return PackedBytes(memory.toreadonly(), starts, stops)


def _from_array(_: memoryview | None, array: np.ndarray[Any, Any]) -> torch.Tensor:  # [...]
    return torch.from_numpy(array)


def _as_sent(_: memoryview | None, tensor: torch.Tensor) -> torch.Tensor:  # [...]
    return tensor


def _is_packable(values: list[Any]) -> bool:
    """Return whether a list is one of bytes, of which at least one is long."""
    return set(map(type, values)) == {bytes} and max(map(len, values)) >= MIN_PACKED_BYTES


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor of plain numbers in this process's memory."""
    return (
        type(value) is torch.Tensor
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and not (value.requires_grad or value.is_quantized or value.is_nested)
    )


_PLAIN: dict[type[Any], Callable[[memoryview, int, int], Any]] = {bytes: _bytes, bytearray: _bytearray, str: _text}
_PACKED_TYPES = frozenset((*_PLAIN, list, torch.Tensor))
_NUMPY_DTYPES = frozenset(
    (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
)
