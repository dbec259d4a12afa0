"""Packs of rows as trainers take them: one sequence, with what keeps its parts from seeing each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import NoneType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sqlstream.errors import SampleError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.stream_name import STREAM

PARTS = "parts"
"""Field of a pack: the samples of its rows."""
ROWS = "__rows__"
"""Field of a pack: the numbers of its rows."""
SPAN = "__span__"
"""Field of a part: the first value of its row that it takes, and the end, by the length that the index has."""
LENGTH = "__length__"
"""Field of a part: how long its row is, as the index has it."""
_ARRAYS = (np.ndarray, torch.Tensor)
_NUMBERS = (int, float, np.integer, np.floating)
_SINGLE = frozenset((str, int, float, bool, bytes, NoneType))
"""Types of most values that are no sequence of numbers."""
_OF_PARTS = frozenset((SPAN, LENGTH, STREAM, "__row__", "__epoch__", "__sample_key__"))
"""Fields of parts that a pack says for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTokens:
    """Makes one sequence of the rows of a pack; the default of `Packs`.

    Values that are no sequences become lists, with an entry for each part. Fields that it adds, with T values, P parts, padding
    at the end being a part of its own:

    - `labels` [T]: those of the rows, or their tokens; `ignore_index` at the first token of each part and in the padding.
    - `position_ids` [T]: from 0 in each part. `document_ids` int32 [T]: number of the part; equal ids may see each other.
    - `cu_seqlens` int32 [P + 1]: where parts begin, and the end. `seq_lengths` int32 [P], `max_seqlen`: the longest part.

    Labels are not shifted. docs/batches.md has the names that trainers want.

    Source: the names and types are those of Transformers' `DataCollatorWithFlattening`, FlashAttention and TRL.
    """

    tokens: str = "input_ids"
    """Field with the tokens of a row; other fields with as many values are sequences, too."""
    pad_token_id: int = 0
    """Token of the padding."""
    is_padded: bool = True
    """All packs have the capacity as their length: other lengths would fragment a GPU's memory."""
    ignore_index: int = -100
    """Label of tokens that are not predicted."""

    def length_of(self, sample: Sample) -> int:
        """Return how many tokens a row has.

        Raises:
            SampleError: It has no sequence of them.
        """
        values: Any = sample.get(self.tokens)
        if not is_sequence(values):
            fields = ", ".join(sorted(field for field in sample if not field.startswith("__"))) or "none"
            raise SampleError(
                f"row {sample['__row__']} has no sequence in field {self.tokens!r} (fields: {fields}), of which packs are "
                "made: give transforms that make one, PackTokens(tokens=…), or Packs(pack_fn=…)"
            )
        return len(values)

    def check(self, sample: Sample) -> None:
        """Raise SampleError if a row is longer than the index, or what measures it, says: its pack would be, too."""
        if (num_values := self.length_of(sample)) > sample[LENGTH]:
            raise SampleError(
                f"row {sample['__row__']} has {num_values} values in {self.tokens!r}, and its length in the index is "
                f"{sample[LENGTH]}: give Packs the length of what the transforms make"
            )

    def __call__(self, pack: Sample) -> Sample:
        """Return the sample of a pack."""
        parts, capacity = pack.pop(PARTS), pack.pop("capacity")
        sizes, columns = list[int](), dict[str, list[Any]]()
        for sample in parts:
            start, stop = sample[SPAN]
            length = len(sample[self.tokens])
            if (size := min(stop, length) - start) > 0:  # a row may be shorter than the index says
                sizes.append(size)
            for name, value in sample.items():
                if name not in _OF_PARTS:
                    is_one = is_sequence(value) and len(value) == length
                    columns.setdefault(name, []).append(np.asarray(value[start:stop]) if is_one else value)
        total = sum(sizes)
        if self.is_padded and total < capacity:
            sizes.append(capacity - total)
        num_values = sum(sizes)
        for name, values in columns.items():
            pack[name] = values
            if len(values) == len(parts) and all(isinstance(value, np.ndarray) and value.ndim == 1 for value in values):
                padding = {self.tokens: self.pad_token_id, "labels": self.ignore_index}.get(name, 0)
                pack[name] = torch.from_numpy(_joined(values, num_values, padding))  # [T]
        self._add_places(pack, np.array(sizes, np.int64), total)
        return pack

    def _add_places(self, pack: Sample, sizes: NDArray[np.int64], total: int) -> None:
        """Add what says where the parts are; by numpy: torch's operations start threads for a few thousand values.

        Args:
            pack: What has the sequences.
            sizes: Values of each part: [P].
            total: Values that are no padding.
        """
        ends = np.cumsum(sizes)  # [P]
        starts = ends - sizes  # [P]
        given = pack.get("labels", pack[self.tokens])
        if isinstance(given, torch.Tensor):
            labels = given.numpy().copy()  # [T]
            labels[starts] = self.ignore_index
            labels[total:] = self.ignore_index
            pack["labels"] = torch.from_numpy(labels)  # [T]
        counted = _counted(1 << int(sizes.max(initial=0)).bit_length())  # [at least the longest part]
        positions = [counted[:size] for size in sizes.tolist()] or [counted[:0]]
        pack["position_ids"] = torch.from_numpy(np.concatenate(positions))  # [T]
        pack["document_ids"] = torch.from_numpy(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))  # [T]
        pack["cu_seqlens"] = torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32))  # [P + 1]
        pack["seq_lengths"] = torch.from_numpy(sizes.astype(np.int32))  # [P]
        pack["max_seqlen"] = int(sizes.max(initial=0))


def is_sequence(value: Any) -> bool:
    """Return whether a value is one of numbers, without dimensions but its length."""
    kind = type(value)
    if kind is np.ndarray:  # asked for each field of each row; isinstance of a tensor takes longer
        return bool(value.ndim == 1)
    if kind in _SINGLE:
        return False
    if isinstance(value, _ARRAYS):
        return bool(value.ndim == 1)
    return isinstance(value, list | tuple) and all(isinstance(one, _NUMBERS) for one in value)


def _joined(values: Sequence[NDArray[Any]], num_values: int, padding: int) -> NDArray[Any]:
    """Return sequences one after the other, padded, in one pass over their values: [num_values]."""
    values = [one for one in values if len(one)] or values  # an empty list would make it floats
    dtype = np.result_type(*values)
    joined = np.empty(num_values, np.int64 if dtype.kind in "iu" else dtype)  # [num_values]
    total = sum(map(len, values))
    np.concatenate(values, out=joined[:total], casting="same_kind")
    joined[total:] = padding
    return joined


@lru_cache(maxsize=4)
def _counted(num_values: int) -> NDArray[np.int64]:
    """Return the numbers from 0 on, of which positions are copied: [num_values]."""
    numbers = np.arange(num_values)  # [num_values]
    numbers.setflags(write=False)
    return numbers


def collate_packs(packs: Sequence[Sample]) -> Sample:
    """Return a batch of packs that `PackTokens` made.

    Sequences are stacked to [b, T]; those that are not padded are joined to [1, sum of T]. `cu_seqlens` counts through the
    batch, as FlashAttention takes it for the flattened sequences; `max_seqlen` is that of the batch. Other fields become lists.
    """
    batch: Sample = {}
    for name, first in packs[0].items():
        values = [pack[name] for pack in packs]
        if name == "cu_seqlens":
            ends = list(accumulate(int(value[-1]) for value in values))
            later = [value[1:] + start for value, start in zip(values[1:], ends[:-1], strict=True)]
            batch[name] = torch.cat([values[0], *later])  # [P + 1]
        elif name == "max_seqlen":
            batch[name] = max(values)
        elif name == "seq_lengths":
            batch[name] = torch.cat(values)  # [P]
        elif isinstance(first, torch.Tensor):
            is_even = len({value.shape for value in values}) == 1
            batch[name] = torch.stack(values) if is_even else torch.cat(values)[None]  # [b, t] or [1, n]
        else:
            batch[name] = values
    return batch
