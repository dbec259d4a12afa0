"""Rows of a lazy index: downloads chunks through the cache like any other object, some of them before they are needed.

A chunk is pinned while it is read into memory, and evictable afterwards; its bytes obey the cache's limit. The chunks of two
windows are in memory, those of the current window of an epoch and of the next one, and of others those that were used last, for
accesses by number: together `KEPT_BYTES`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from sqlstream.cache import Cache
from sqlstream.cache.session import AnyHold, ObjectRef
from sqlstream.config import LazyOptions
from sqlstream.errors import EmptySelectionError, FetchCancelledError, SourceError, StorageError
from sqlstream.index.build.chunks import drop_oldest
from sqlstream.index.build.lazy import ChunkRows, LazyIndex
from sqlstream.order import Int64Array
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME
from sqlstream.stream.engine.content.chunk_objects import ChunkObjects

WINDOW_CHUNKS = 4
"""Row groups whose rows are shuffled together: the first sample waits for all of them, and each process holds two windows."""
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWalk:
    """How an order comes by the chunks of a lazy index, and what is fetched of them."""

    window: int = WINDOW_CHUNKS
    """Chunks whose rows are mixed."""
    is_in_order: bool = False
    """Chunks come as they are numbered."""
    in_ranges: bool = False
    """Of chunks what says which rows they have is read in ranges, by the index itself: they are not fetched."""


class LazyRows:
    """The rows of a lazy index, in this process. Threads that access rows share it: what it keeps changes in single steps.

    Args:
        index: The index of the chunks.
        cache: The cache of their bytes.
        options: Number of chunks under way.
        dataset: Id of the dataset in the ledger.
        walk: How the order comes by chunks.
    """

    def __init__(
        self, index: LazyIndex, cache: Cache, options: LazyOptions, dataset: int | None, walk: ChunkWalk | None = None
    ) -> None:
        self._index = index
        self._walk = walk or ChunkWalk()
        self._num_ahead_chunks = options.num_ahead if walk is None else max(options.num_ahead, walk.window)
        self._cache = cache
        self._session = cache.session
        self._options = options
        self._objects = ChunkObjects(cache, dataset)
        self._loaded: OrderedDict[int, ChunkRows] = OrderedDict()
        self._ahead: dict[int, AnyHold] = {}
        self._num_ahead: int | None = None
        """What `num_ahead` is once all chunks are counted."""
        self._starts: Int64Array | None = None
        """What `_counted` returns once all chunks are counted."""
        self.ids_are_numbers = not index.learns_sizes

    @property
    def known_length(self) -> int | None:
        """Selected rows; None while a filter has not been run on all chunks."""
        starts = self._counted()
        return None if self._starts is None else int(starts[-1])

    def __len__(self) -> int:
        return len(self._index)

    # -- what comes next ----------------------------------------------------------------------------------------------

    @property
    def num_ahead(self) -> int:
        """The kept rows of as many chunks as are fetched ahead, by the mean of those that are counted."""
        if self._num_ahead is not None:
            return self._num_ahead
        sizes = self._index.sizes()
        counted = sizes[sizes >= 0]
        found = int(counted.sum()) * self._num_ahead_chunks // len(counted) if len(counted) else 0
        if len(counted) == len(sizes):
            self._num_ahead = found
        return found

    def expect(self, numbers: Int64Array) -> None:
        """Begin to fetch the chunks of rows."""
        self._fetch(self._chunks_of(numbers))

    def expect_chunks(self, chunks: Int64Array) -> None:
        """Begin to fetch chunks, and those that follow where they come in order; what has come is read, and released."""
        wanted: list[int] = chunks.tolist()
        if self._walk.is_in_order and wanted:
            first = min(wanted)
            wanted = [*range(first, min(first + self._num_ahead_chunks, len(self._index.bounds) - 1))]
        if self._walk.window > WINDOW_CHUNKS:
            self._read_settled()
        self._fetch(wanted)

    def count(self, chunks: Int64Array) -> None:
        """Run the filter on chunks, and release those that another process has found empty."""
        sizes = self._index.sizes()
        for chunk in [chunk for chunk in list(self._ahead) if sizes[chunk] == 0]:
            if (hold := self._ahead.pop(chunk, None)) is not None:  # another thread may have taken it
                self._session.release(hold)
        unknown = self._index.to_count(chunks.tolist())
        for number, chunk in enumerate(unknown):
            if not self._walk.in_ranges:
                self._fetch(unknown[number:])
            elif number % CALLS_AT_A_TIME == 0:
                self._look_up(unknown[number : number + CALLS_AT_A_TIME])
            self._load(chunk)

    def check_rows(self) -> None:
        """Raise EmptySelectionError if the filter keeps no row."""
        if self._index.learns_sizes and not self._index.sizes().any():
            if self._index.condition is None:
                raise EmptySelectionError(f"{self._index.src} has no rows: an epoch needs one at least")
            raise EmptySelectionError(f"the filter {self._index.condition} keeps no row of {self._index.src}: loosen it")

    # -- rows ---------------------------------------------------------------------------------------------------------

    def ids_of(self, numbers: Int64Array) -> list[int]:
        """Return the ids of rows as the order numbers them (`order/filtered.py`)."""
        if self._index.condition is None:
            found: list[int] = numbers.tolist()
            return found
        row_ids = np.empty(len(numbers), np.int64)  # [n]
        chunks = np.array(self._places(numbers))  # [n]
        for chunk in self._chunks_of(numbers):
            mine = chunks == chunk
            row_ids[mine] = self._load(chunk).row_ids[numbers[mine] - self._index.bounds[chunk]]
        return row_ids.tolist()

    def ids_at(self, selected: Sequence[int]) -> list[int]:
        """Return the ids of selected rows; with a filter, chunks up to them are counted, from the first on.

        Raises:
            IndexError: There are not so many.
        """
        while len(selected) and max(selected) >= (starts := self._counted())[-1]:
            if self._starts is not None:
                raise IndexError(f"index {max(selected)} is out of range: the dataset has {starts[-1]} samples")
            self._load(len(starts) - 1)
        starts = self._counted()
        chunks = starts.searchsorted(selected, side="right") - 1  # [n]
        return self.ids_of(self._index.bounds[chunks] + selected - starts[chunks])

    def _counted(self) -> Int64Array:
        """Return how many selected rows are before each chunk of those that are counted, from the first on: [num_known + 1]."""
        if self._starts is not None:
            return self._starts
        sizes = self._index.sizes()
        num_known = int(np.argmax(sizes < 0)) if (sizes < 0).any() else len(sizes)
        starts = np.concatenate(([0], np.cumsum(sizes[:num_known])))  # [num_known + 1]
        if num_known == len(sizes):
            self._starts = starts
        return starts

    def rows(self, row_ids: Sequence[int]) -> list[dict[str, object]]:
        """Return rows, in the order asked."""
        return self._read_rows(row_ids, ChunkRows.rows)

    def stored_rows(self, row_ids: Sequence[int]) -> list[tuple[Any, ...]]:
        """Return rows as an index file has them, in the order asked."""
        return self._read_rows(row_ids, ChunkRows.stored_rows)

    def _read_rows(self, row_ids: Sequence[int], read: Callable[[ChunkRows, Sequence[int]], list[R]]) -> list[R]:
        by_chunk: dict[int, list[int]] = {}
        for at, chunk in enumerate(self._places(row_ids)):
            by_chunk.setdefault(chunk, []).append(at)
        found: dict[int, R] = {}
        chunks = [*by_chunk]
        for number, (chunk, mine) in enumerate(by_chunk.items()):
            self._fetch(chunks[number:])
            found.update(zip(mine, read(self._load(chunk), [row_ids[at] for at in mine]), strict=True))
        return [found[at] for at in range(len(row_ids))]

    def close(self) -> None:
        """Release what was fetched for later."""
        for hold in list(self._ahead.values()):
            self._session.release(hold)
        self._ahead.clear()

    # -- chunks -------------------------------------------------------------------------------------------------------

    def _places(self, numbers: Sequence[int] | Int64Array) -> list[int]:
        """Return the chunk of each row."""
        found: list[int] = (self._index.bounds.searchsorted(numbers, side="right") - 1).tolist()
        return found

    def _chunks_of(self, numbers: Int64Array) -> list[int]:
        """Return the chunks that rows lie in, each once, in the order of their first row."""
        return [*dict.fromkeys(self._places(numbers))]

    def _refs(self, chunk: int) -> list[ObjectRef]:
        return self._objects.refs(self._index.place_of(chunk))

    def _fetch(self, chunks: Sequence[int]) -> None:
        """Begin to download chunks that are not in memory, as many as may be under way; does not wait for them."""
        if self._walk.in_ranges:
            return
        wanted = [chunk for chunk in chunks if chunk not in self._loaded and chunk not in self._ahead]
        for number, chunk in enumerate(wanted):
            num_under_way = sum(not hold.is_settled for hold in list(self._ahead.values()))
            if num_under_way >= self._options.num_threads or len(self._ahead) >= WINDOW_CHUNKS + self._options.num_ahead:
                return
            if number % CALLS_AT_A_TIME == 0:
                self._look_up(wanted[number : number + CALLS_AT_A_TIME])
            if not (refs := self._refs(chunk)):
                continue
            for hold in self._session.acquire([refs]):
                if self._ahead.setdefault(chunk, hold) is not hold:
                    self._session.release(hold)

    def _look_up(self, chunks: Sequence[int]) -> None:
        """Learn what must be known before chunks are fetched; waits for it."""
        while True:
            with contextlib.suppress(FetchCancelledError):  # an iteration of another thread has ended: asked again
                return self._index.look_up(chunks, self._cache.fetcher, in_ranges=self._walk.in_ranges)

    def _read_settled(self) -> None:
        """Take chunks into memory that have come; what is wrong with one is said where its rows are needed."""
        for chunk, hold in list(self._ahead.items()):
            if hold.is_settled and hold.error is None and chunk not in self._loaded:
                with contextlib.suppress(SourceError, StorageError):
                    self._load(chunk)

    def _load(self, chunk: int) -> ChunkRows:
        """Return a chunk, in memory."""
        if (rows := self._loaded.get(chunk)) is None:
            rows = self._loaded[chunk] = self._read(chunk)
            drop_oldest(self._loaded, num_least=2 * self._walk.window)
        with contextlib.suppress(KeyError):  # another thread has dropped it
            self._loaded.move_to_end(chunk)
        return rows

    def _read(self, chunk: int) -> ChunkRows:
        self._look_up([chunk])
        try:
            with self._objects.fetched(self._index.place_of(chunk), self._refs(chunk)) as files:
                return self._index.read(chunk, files)
        finally:
            if (ahead := self._ahead.pop(chunk, None)) is not None:
                self._session.release(ahead)
