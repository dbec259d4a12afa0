"""Opens the cache of a dataset and its index, built whole or lazy, and gives its plan the order that fits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace

from sqlstream.cache import Cache
from sqlstream.config import IndexOptions, OnCacheError, StorageOptions, check_at_least, default_cache_directory
from sqlstream.errors import ConfigError
from sqlstream.index.build import open_index
from sqlstream.index.lazy import LazyIndex
from sqlstream.index.lazy_build import open_lazy_index
from sqlstream.index.store import Index
from sqlstream.order import BlockLayout, Plan
from sqlstream.stream.filtered_plan import FilteredPlan, Orders
from sqlstream.stream.lazy_rows import WINDOW_CHUNKS


def open_cache(
    directory: str | os.PathLike[str] | None,
    storage: StorageOptions,
    limit: int | str | None,
    policy: str | None,
    on_error: OnCacheError | str,
    min_free_bytes: int | str,
) -> Cache:
    """Return a dataset's cache; in the user's own cache directory when no `directory` is given."""
    return Cache(
        directory or default_cache_directory(),
        limit=limit,
        storage_options=storage,
        eviction_policy=policy,
        on_cache_error=on_error,
        min_free_bytes=min_free_bytes,
    )


def open_any(options: IndexOptions, cache: Cache, *, show_progress: bool) -> Index:
    """Return the index of a source: lazy if `options` say so."""
    opener = open_index if options.lazy is None else open_lazy_index
    return opener(options, cache.path / "index", cache.fetcher, show_progress=show_progress)


def in_blocks(plan: Plan, index: Index, block_size: int | None, window: int) -> Plan:
    """Return `plan` over blocks of rows: the chunks of a lazy index, or such as the user asks for.

    Args:
        plan: A whole shuffle.
        index: Whose rows.
        block_size: Rows of a block; None: no blocks, unless the index is lazy.
        window: Blocks whose rows are shuffled together.

    Raises:
        ConfigError: These blocks cannot be, or the plan has parts of fixed size, which a lazy filter cannot give.
    """
    if block_size is not None:
        check_at_least("shuffle_block_size", block_size, 1)
        check_at_least("shuffle_window", window, 1)
        if plan.seed is None:
            raise ConfigError(f"shuffle_block_size={block_size} shuffles nothing without a seed: give shuffle_seed")
        if isinstance(index, LazyIndex):
            raise ConfigError("chunks of a lazy index are its blocks: leave shuffle_block_size or lazy_index_chunk_size out")
        return replace(plan, blocks=BlockLayout.of_size(block_size, num_rows=plan.num_samples, window=window))
    if not isinstance(index, LazyIndex):
        return plan
    if index.condition is None:
        return replace(plan, blocks=BlockLayout(bounds=index.bounds, window=WINDOW_CHUNKS))
    if plan.num_canonical_nodes > 1:
        raise ConfigError(
            f"num_canonical_nodes={plan.num_canonical_nodes} needs to know how many rows a filter keeps, which a lazy index "
            "finds out on the way: use 1, or leave the filter or lazy_index_chunk_size out"
        )
    own = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return FilteredPlan(**own, orders=Orders(index, WINDOW_CHUNKS))


def from_start(indices: Sequence[int], index: Index) -> list[int]:
    """Return numbers of selected rows, those from the end counted from the start.

    Raises:
        IndexError: There is no such row. While a lazy index does not know how many it has, whoever fetches finds out.
        UnknownLengthError: It does not know, and a number is counted from the end.
    """
    size = index.known_length if index.known_length is not None or min(indices, default=0) >= 0 else len(index)
    for number in indices:
        if size is not None and not -size <= number < size:
            raise IndexError(f"index {number} is out of range: the dataset has {size} samples")
    return [number if number >= 0 else number + (size or 0) for number in indices]
