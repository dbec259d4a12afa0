"""A `collate_fn` whose batches cross from DataLoader workers to the trainer by shared memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate, get_worker_info

from sqlstream.config import check_at_least
from sqlstream.errors import TransformError
from sqlstream.stream.transport.arena import Arena, OpenArenas
from sqlstream.stream.transport.packing import BatchPacker

logger = logging.getLogger(__name__)

NUM_SPARE_SLOTS = 3
"""Slots beside those of waiting batches: the one being written, and those of the last two batches that the trainer took."""
_KEPT_FREE_BYTES = 16 << 20
"""Size of the block that, given back once, has glibc keep up to twice as much of what is freed."""
_DTYPES = {int: np.int64, float: np.float64}
_LISTED = (str, bytes)
_SEARCHED_DEPTH = 4
"""Containers within containers that a message names the parts of; arbitrary."""
_NUMERIC_KINDS = "biufc"
Stack = Callable[[list[torch.Tensor]], torch.Tensor]


def batch_of(samples: list[Any], stack: Stack = default_collate) -> Any:
    """Return what `default_collate` returns.

    Args:
        samples: Samples.
        stack: Stacks the tensors of a field.

    Raises:
        TransformError: Tensors of a field have several shapes.
        KeyError, RuntimeError, TypeError, ValueError: A field is missing, or its values make no batch; a note says which.
    """
    first = samples[0]
    if type(first) is not dict:
        return default_collate(samples)
    batch = {}
    for field in first:
        try:
            values = list(map(itemgetter(field), samples))
            batch[field] = _collated(values, stack)
        except (KeyError, TypeError) as error:
            error.add_note(_why_not_batched(field, samples))
            raise
        except (ValueError, OverflowError) as error:  # integers beyond 2^63, arrays that are read backwards
            error.add_note(
                f"torch does not take what field {field!r} of the batch has: change it by a transform, or give a collate_fn"
            )
            raise
        except RuntimeError as error:
            shapes = [tuple(value.shape) if hasattr(value, "shape") else None for value in values]
            other = next((number for number, shape in enumerate(shapes) if shape != shapes[0]), None)
            if other is None:
                error.add_note(_why_not_batched(field, samples))
                raise
            raise TransformError(
                f"field {field!r} cannot be stacked: it has shape {shapes[0]} in sample 0 of the batch and {shapes[other]} in "
                f"sample {other}. Make them alike with a transform (ResizeToBucket, PadToBucket), have rows that fit share "
                "batches (batches=Buckets(…)), or give collate_fn=sqlstream.PaddingCollate(), which pads the first dimension",
                field=field,
            ) from error
    return batch


def _why_not_batched(field: str, samples: list[dict[str, Any]]) -> str:
    """Return which sample keeps a field out of the batch, and what to do."""
    for number, sample in enumerate(samples):
        which = f"sample {number} of the batch ({sample.get('__sample_key__')!r})"
        if field not in sample:
            return f"{which} has no field {field!r}, and sample 0 has: give it to all, or drop it, by a transform"
        if sample[field] is None:
            return (
                f"field {field!r} of {which} is None: fill it in (none_to_empty_str=True does so for texts) or drop it by a "
                "transform, or give a collate_fn"
            )
    kinds = ", ".join(sorted({type(sample[field]).__name__ for sample in samples}))
    return f"field {field!r} of the batch has values of the types {kinds}: make them alike by a transform, or give a collate_fn"


def collated(collate_fn: Callable[[Any], Any], samples: Any) -> Any:
    """Return what a `collate_fn` returns.

    Raises:
        TransformError: It has raised StopIteration, which a loop over the loader would take for the end of the epoch.
    """
    try:
        return collate_fn(samples)
    except StopIteration as error:
        name = getattr(collate_fn, "__name__", type(collate_fn).__name__)
        raise TransformError(
            f"collate_fn={name} raised StopIteration, which would end the epoch without the samples that are left: ask "
            "iterators for more than they have as next(iterator, None), or catch it there"
        ) from error


def _place_of_unpicklable(value: Any, place: str = "batch", depth: int = _SEARCHED_DEPTH) -> str | None:
    """Return where the first value of a batch lies that cannot be pickled; None: there is none."""
    parts: Iterable[tuple[Any, Any]] = ()
    if depth and isinstance(value, dict):
        parts = value.items()
    elif depth and isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        if (found := _place_of_unpicklable(part, f"{place}[{key!r}]", depth - 1)) is not None:
            return found
    if isinstance(value, torch.Tensor | str | bytes):  # which torch would have in new shared memory
        return None
    try:
        if not parts:
            ForkingPickler.dumps(value)
    except Exception:  # of any kind: methods of the user's own may pickle it
        return place
    return None


def stacked(tensors: list[torch.Tensor]) -> torch.Tensor:  # n × [...] -> [n, ...]
    """Return tensors of one shape as one."""
    return torch.stack(tensors)  # [n, ...]


def _collated(values: list[Any], stack: Stack) -> Any:
    """Return the batch of one field; numpy makes arrays of numbers faster than `torch.tensor`."""
    first = values[0]
    kind = type(first)
    if kind in _LISTED:
        return values
    if kind in _DTYPES and set(map(type, values)) == {kind}:
        try:
            return torch.from_numpy(np.array(values, _DTYPES[kind]))  # [b]
        except OverflowError:  # torch's message is better
            pass
    if kind is torch.Tensor:
        return stack(values)
    if isinstance(first, np.ndarray) and first.dtype.kind in _NUMERIC_KINDS:
        return stack([torch.as_tensor(value) for value in values])
    return default_collate(values)


@cache
def _keep_freed_memory() -> None:
    """Have glibc keep what batches free, up to twice `_KEPT_FREE_BYTES`.

    Else it returns that to the kernel, whose pages the next batch must have anew: 30 µs of the trainer's CPU for a sample of
    47 KB, and 19 so (m; bar: warm-bytes-2). A trainer that has freed a large array (a batch from a pipe) is there by itself.
    Once in a process: the next block would come from what is kept, and be filled with zeros, 20 ms for each epoch (m).
    """
    bytes(_KEPT_FREE_BYTES)


class PackedCollate:
    """Has batches cross from workers to the trainer by shared memory: give it to a torch DataLoader as its `collate_fn`.

    A `StreamingDataLoader` does it by itself. In a process that is no worker, and where there is no memory (one warning), the
    batch is what `collate_fn` returns.

    Args:
        collate_fn: From a list of samples to a batch of any structure; None: torch's default.
        gives_views: A list of `bytes` comes as a `PackedBytes`, which gives them without a copy; False: as a list.
        prefetch_factor: That of the loader.

    Example:
        >>> loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=PackedCollate(list))
    """

    def __init__(
        self, collate_fn: Callable[[list[Any]], Any] | None = None, *, gives_views: bool = False, prefetch_factor: int = 2
    ) -> None:
        check_at_least("prefetch_factor", prefetch_factor, 1)
        self._collate_fn = None if collate_fn is default_collate else collate_fn
        self._gives_views = gives_views
        self._num_slots = prefetch_factor + NUM_SPARE_SLOTS
        self._arenas: OpenArenas | None = OpenArenas()
        self._token = self._arenas.token
        self._maker = os.getpid()
        self._packer: BatchPacker | None = None
        self._packs_in = 0
        """Id of the worker process that has looked for memory."""
        if not gives_views:
            _keep_freed_memory()

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch, in a worker on its way to the trainer."""
        return self.pack(partial(self._batch, samples))

    def pack(self, make: Callable[[Stack], Any]) -> Any:
        """Return what `make` returns, in a worker on its way to the trainer.

        Args:
            make: Takes a function that stacks tensors, where possible in the memory that the trainer gets them from.

        Raises:
            Exception: A value cannot be pickled; a note says which.
        """
        packer = self._packer_of_worker()
        if packer is None:
            return make(default_collate)
        packer.begin()
        batch = make(packer.stack)
        try:
            return packer.pack(batch)
        except Exception as error:
            if (place := _place_of_unpicklable(batch)) is not None:
                error.add_note(
                    f"{place} cannot go from a worker to the trainer: have a transform or the collate_fn take it out, or give "
                    "num_workers=0"
                )
            raise

    def _batch(self, samples: list[Any], stack: Stack) -> Any:
        return batch_of(samples, stack) if self._collate_fn is None else collated(self._collate_fn, samples)

    def _packer_of_worker(self) -> BatchPacker | None:
        """Return what packs the batches of this worker; None: this process is none, or there is no memory."""
        info = get_worker_info()
        if info is None or os.getpid() == self._maker or getattr(info, "worker_method", "") == "thread":
            return None  # the trainer; or made in a worker, for a loader in it that has none
        if self._packs_in != os.getpid():
            self._packs_in, self._packer = os.getpid(), None
            try:
                arena = Arena(self._num_slots, info.num_workers)
                self._packer = BatchPacker(arena, self._token, gives_views=self._gives_views)
            except OSError as error:
                if info.id == 0:
                    logger.warning(
                        "batches of %d workers do not come through shared memory, but as torch sends them: %s. Raise the "
                        "limit, or pass pack_bytes=False",
                        *(info.num_workers, error),
                    )
        return self._packer

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker that is being started, without what belongs to a process."""
        return {**self.__dict__, "_arenas": None, "_packer": None, "_packs_in": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle; a copy in the trainer has workers of its own."""
        self.__dict__.update(state)
        if self._maker == os.getpid():
            self._arenas = OpenArenas()
            self._token = self._arenas.token
