"""One sample: wait for its objects, keep them in the cache while its transforms run, and release them."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from datetime import date, datetime
from decimal import Decimal
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import torch
from torch.utils.data import get_worker_info

from sqlstream.cache.session import AnyHold, CacheSession
from sqlstream.errors import FetchCancelledError, ObjectChangedError, SampleError, StorageError, TransientStorageError
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.transforms.base import Sample


class _Access(NamedTuple):
    """Samples that were yielded together, and what keeps their paths valid."""

    holds: list[AnyHold]
    session: CacheSession


class LostFileError(StorageError):
    """A transform has failed, and a file of its sample is gone: another program removed it after it was acquired."""


class SampleMaker:
    """Makes samples of slots.

    Args:
        directories: Folders in which their files lie, each with a slash at its end.
        num_retained: Yielded samples whose paths stay valid.
        note_given_up: Called when a sample's paths stop to be valid, since there are more samples than `num_retained`.
    """

    def __init__(
        self,
        directories: tuple[str, ...],
        num_retained: int,
        note_given_up: Callable[[], None] | None = None,
    ) -> None:
        self._directories = directories
        self._num_retained = num_retained
        self._note_given_up = note_given_up
        self._kept: deque[_Access] = deque()
        """Holds of yielded samples with paths, by access; in a stream each sample is an access."""
        self._num_kept = 0
        self._promises = get_worker_info() is not None
        """Samples go to a trainer in another process, after this one has yielded them."""
        self.for_reading = True
        """No sample was yielded with a path in it: objects are only read between claim and release."""

    def make(self, slot: PlannedSample) -> Sample | Iterator[Sample]:
        """Return what transforms make of a slot: a sample, or an iterator of several, which are made when they are asked for.

        Raises:
            LostFileError: A transform has failed, and a file of the sample is gone; made anew, it may succeed.
            SampleError, StorageError: The sample cannot be made.
        """
        if slot.error is not None:
            raise slot.error
        hold, recipe = slot.hold, slot.recipe
        if hold is None or hold.outstanding or hold.error is not None or recipe.has_points:
            self._settle(slot)
            hold = slot.hold
        elif not recipe.session.open(hold):  # the slot is acquired again
            self.give_back(slot)
            self._settle(slot)
            hold = slot.hold
        try:
            sample = slot.sample
            if slot.found is None:
                if hold is not None or slot.content is not None:
                    slot.fill()
                    hold = slot.hold
                if len(slot.refs) < recipe.num_columns:
                    recipe.reader.check_local(slot)
            if recipe.has_points:
                sample = recipe.chain.run_points(slot)
            rest = recipe.chain.rest
            outcome = rest.run(sample, (rest.seed, slot.epoch, slot.position), files=hold)
            if not isinstance(outcome, dict):
                return self._several(slot, outcome)
            slot.is_single = True
            is_kept = hold is not None and holds_path(outcome, self._directories)
        except BaseException as error:
            lost = _lost_file(slot.hold) if isinstance(error, SampleError) else None
            self.give_back(slot)
            if lost is not None:
                raise LostFileError(
                    f"{lost} was removed by another program as it was in use: empty a cache by `sqlstream cache clear` alone "
                    f"({error})"
                ) from error
            raise
        if is_kept:
            self._keep(slot)
        else:
            self.give_back(slot)
        return outcome

    def make_all(self, slot: PlannedSample, num_retries: int = 0) -> list[Sample]:
        """Return all samples of a slot, trying again where storage fails in a way that another try may mend."""
        for num_left in range(num_retries, -1, -1):
            try:
                outcome = self.make(slot)
                return [outcome] if isinstance(outcome, dict) else list(outcome)
            except (TransientStorageError, ObjectChangedError, FetchCancelledError):
                if not num_left:
                    raise
        raise AssertionError("the loop returns or raises")

    def has_path(self, sample: Sample) -> bool:
        """Return whether a sample has the path of a file of the cache in it."""
        return holds_path(sample, self._directories)

    def give_back(self, slot: PlannedSample) -> None:
        """Release a slot's objects."""
        if slot.hold is not None:
            slot.recipe.session.release(slot.hold)
            slot.hold = None

    def release_kept(self) -> None:
        """Keep the paths of yielded samples valid no longer."""
        while self._kept:
            self._release_oldest()

    def keep(self, holds: list[AnyHold], session: CacheSession, *, num_accesses: int = 1) -> None:
        """Keep the paths of an access's samples valid, and release the oldest, but none of the last `num_accesses`."""
        if not holds:
            return
        if self._promises or num_accesses > 1:
            with contextlib.suppress(IndexError):  # another thread has released the oldest
                oldest = self._kept[0]
                if oldest.holds[0].is_released:  # since this process's share of the limit was too small
                    oldest.session.warn_of_paths()
        self._kept.append(_Access(holds, session))
        self._num_kept += len(holds)
        while self._num_kept > self._num_retained and len(self._kept) > num_accesses:
            if self._note_given_up is not None:
                self._note_given_up()
            self._release_oldest()

    def _release_oldest(self) -> None:
        try:
            holds, session = self._kept.popleft()
        except IndexError:  # another thread did
            return
        self._num_kept -= len(holds)
        for hold in holds:
            session.release(hold)

    def _several(self, slot: PlannedSample, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yield samples that are made while they are asked for; the slot's objects are pinned until the last one."""
        is_kept = False
        try:
            for sample in samples:
                is_kept = is_kept or (slot.hold is not None and holds_path(sample, self._directories))
                yield sample
        finally:
            if is_kept:
                self._keep(slot)
            else:
                self.give_back(slot)

    def _settle(self, slot: PlannedSample) -> None:
        """Wait until all that the slot wants is in the cache and claimed; acquire it again when it was revoked or lost."""
        recipe, session, for_reading = slot.recipe, slot.recipe.session, self.for_reading
        if recipe.has_points and recipe.chain.is_found_now(slot):
            self.give_back(slot)
        while wanted := slot.wanted:
            hold = slot.hold
            if hold is None:
                hold = slot.hold = session.acquire_one(wanted, slot.next_use, for_reading=for_reading)
            if hold.outstanding or hold.error is not None:
                hold = slot.hold = session.wait(hold)
                if hold.error is not None:
                    error = slot.with_own_text(hold.error)
                    self.give_back(slot)
                    raise error
            if session.open(hold) and (not recipe.has_points or recipe.chain.read(slot)):
                return
            self.give_back(slot)
            slot.look_up()
            for_reading = False  # the ledger shows what is wrong with the object

    def _keep(self, slot: PlannedSample) -> None:
        """Keep the objects of a slot whose sample has their paths."""
        hold, slot.hold = slot.hold, None
        if hold is None:
            return
        self.for_reading = False
        session = slot.recipe.session
        kept = session.retain(hold)
        if slot.access is None:
            self.keep([kept], session)
        else:
            slot.access.append(kept)


def _lost_file(hold: AnyHold | None) -> str | None:
    """Return a file of a sample that is there no longer; None: all are."""
    return None if hold is None else next((path for path in hold.paths if not os.path.exists(path)), None)


# -- paths in samples ----

_NO_PATHS = frozenset((bytes, int, float, bool, NoneType, torch.Tensor))
"""Types of most values; they are compared first, since every value of every sample is looked at."""
_SEQUENCES = (list, tuple)
_LOOKED_INTO = "OUV"
"""Kinds of numpy's types that may hold text: objects, text, records."""
_NEVER_LOOKED_INTO = (
    *(bytearray, memoryview, complex, date, datetime, Decimal, UUID, np.generic, np.dtype, torch.dtype, torch.device, range),
    *(type, ModuleType, FunctionType, MethodType, BuiltinFunctionType, torch.nn.Module),
)
"""Types that hold no paths which a trainer would open, or that take long to look through."""
MAX_LOOKED_AT = 10_000
"""Containers and objects of a sample; a sample with more counts as one with a path, and its files are kept."""


def holds_path(value: Any, directories: tuple[str, ...]) -> bool:
    """Return whether a value of a sample is, or contains, a path below a directory: in any container, attribute or array."""
    kind = type(value)
    if kind in _NO_PATHS:
        return False
    if kind is str:
        return bool(value.startswith(directories))
    if kind is dict:
        rest = []
        for item in value.values():  # most fields end in this loop, without a call
            kind = type(item)
            if kind is str:
                if item.startswith(directories):
                    return True
            elif kind not in _NO_PATHS:
                if kind is np.ndarray:
                    if item.dtype.kind not in _LOOKED_INTO:
                        continue
                elif kind in _SEQUENCES and set(map(type, item)) <= _NO_PATHS:
                    continue
                rest.append(item)
        return bool(rest) and _any_holds(rest, directories)
    return _any_holds([value], directories)


def _any_holds(values: list[Any], directories: tuple[str, ...]) -> bool:
    """Look through values, and what they contain, without recursion: each container and object once."""
    seen: dict[int, Any] = {}
    while values:
        value = values.pop()
        if isinstance(value, str):
            if value.startswith(directories):
                return True
            continue
        if isinstance(value, _NEVER_LOOKED_INTO) or id(value) in seen:
            continue
        if len(seen) == MAX_LOOKED_AT:
            return True
        seen[id(value)] = value
        items = _items_of(value)
        kinds = set(map(type, items))  # in C: a list may have a million numbers
        if kinds <= _NO_PATHS:
            continue
        if kinds == {str}:
            if any(item.startswith(directories) for item in items):
                return True
            continue
        values += [item for item in items if type(item) not in _NO_PATHS]
    return False


def _items_of(value: Any) -> Iterable[Any]:
    """Return what a value contains; for a path, its text."""
    if isinstance(value, list | tuple | Set | deque):
        return value
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, np.ndarray):
        return value.ravel().tolist() if value.dtype.kind in _LOOKED_INTO else ()
    if isinstance(value, os.PathLike):
        return (os.fsdecode(value),)
    items = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            items.append(getattr(value, f"_{kind.__name__.lstrip('_')}{name}" if is_private else name, None))
    return items
