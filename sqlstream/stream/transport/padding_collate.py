"""A `collate_fn` for fields of several lengths: tensors are padded to the longest of their batch, by a value for each field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from sqlstream.errors import ConfigError, TransformError
from sqlstream.stream.transport.packed_collate import batch_of, stacked

PAD_VALUES: Mapping[str, int] = {"labels": -100}
"""What trainers of language models expect: the loss leaves labels of -100 out, and a mask of 0 all else."""


class PaddingCollate:
    """Stacks tensors; where those of a field differ in their first dimension alone, they are padded to the longest.

    A field that is given a value is padded in each batch, also where its lengths are the same by chance: a multiple, and its
    lengths, are then always there.

    The batch then also has `<field>_lengths`, int64 `[b]`, unless samples have a field of that name. A `StreamingDataLoader`
    takes it by itself where samples of a bucket have several lengths (`Buckets("num_tokens", Lengths(…), …)`).

    Args:
        pad_values: What a field is padded with; all others with 0, and `labels` with -100.
        multiple_of: Lengths are rounded up to a multiple of it.

    Raises:
        ConfigError: `multiple_of` is no number of 1 or more.
        TransformError: In a batch: the type of a field cannot hold what it is padded with.

    Example:
        >>> batch = PaddingCollate()([{"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([3])}])
        >>> batch["ids"].tolist(), batch["ids_lengths"].tolist()
        ([[1, 2], [3, 0]], [2, 1])
    """

    def __init__(self, pad_values: Mapping[str, float] | None = None, *, multiple_of: int = 1) -> None:
        if isinstance(multiple_of, bool) or not isinstance(multiple_of, int) or multiple_of < 1:
            raise ConfigError(f"multiple_of={multiple_of!r} is no whole number of 1 or more")
        self._pad_values = {**PAD_VALUES, **(pad_values or {})}
        self._is_always_padded = frozenset(pad_values or ())
        self._multiple_of = multiple_of

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch."""
        if type(samples[0]) is not dict:
            return default_collate(samples)
        lengths: dict[str, torch.Tensor] = {}  # of each field, [b]
        padded = [dict(sample) for sample in samples]
        for field in samples[0]:
            values = [_tensor(sample.get(field)) for sample in samples]
            if not _are_ragged(values, are_named=field in self._is_always_padded):
                continue
            sizes = [len(value) for value in values if value is not None]
            longest = -(-max(sizes) // self._multiple_of) * self._multiple_of
            for sample, value in zip(padded, values, strict=True):
                assert value is not None, "they are tensors"
                sample[field] = self._padded(field, value, longest)  # [longest, ...]
            lengths[f"{field}_lengths"] = torch.tensor(sizes)  # [b]
        batch = batch_of(padded, stacked)
        return batch | {name: sizes for name, sizes in lengths.items() if name not in batch}

    def _padded(self, field: str, value: torch.Tensor, length: int) -> torch.Tensor:  # [n, ...] -> [length, ...]
        pad = self._pad_values.get(field, 0)
        if not _can_hold(value.dtype, pad):
            raise TransformError(
                f"field {field!r} is padded with {pad}, which {value.dtype} cannot hold: give it another type by a transform, "
                f"or use PaddingCollate({{{field!r}: …}})",
                field=field,
            )
        whole = value.new_full((length, *value.shape[1:]), pad)  # [length, ...]
        whole[: len(value)] = value  # [n, ...]
        return whole


def _can_hold(dtype: torch.dtype, number: float) -> bool:
    """Return whether tensors of a type can have a number, which would become another one else."""
    if dtype.is_floating_point or dtype.is_complex:
        return True
    least, most = (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return number % 1 == 0 and least <= number <= most


def _tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    is_numbers = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return torch.as_tensor(value) if is_numbers else None


def _are_ragged(values: list[torch.Tensor | None], *, are_named: bool) -> bool:  # b × [n, ...]
    """Return whether all are tensors that differ in their first dimension, unless they are named, and in nothing else."""
    tensors = [value for value in values if value is not None]
    if len(tensors) < len(values) or any(not value.ndim for value in tensors):
        return False
    are_alike = len({(value.shape[1:], value.dtype) for value in tensors}) == 1
    return are_alike and (are_named or len({len(value) for value in tensors}) > 1)
