"""What the constructor of a dataset takes, checked and turned into frozen values; and the cache and index that they open."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, SupportsIndex

from sqlstream.cache import Cache
from sqlstream.cache.acquire.checksums import VerifyReads
from sqlstream.config import (
    AsItIs,
    IndexOptions,
    LazyOptions,
    OnCacheError,
    OnError,
    SampleOptions,
    StorageOptions,
    check_at_least,
    default_cache_directory,
)
from sqlstream.errors import ConfigError
from sqlstream.index.build.build import open_index
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.lazy_build import open_lazy_index
from sqlstream.index.file.index import Index
from sqlstream.order import BlockLayout, Plan
from sqlstream.storage.base import urls
from sqlstream.stream.engine.lazy_rows import WINDOW_CHUNKS
from sqlstream.stream.run.filtered_plan import FilteredPlan, Orders
from sqlstream.transforms.base import Transform
from sqlstream.transforms.cached import CacheTransform, split_at_points

TORCH_PREFETCH_FACTOR = 2
"""Batches that each worker of a DataLoader makes ahead, unless it is told otherwise."""


def default_name(src: str) -> str:
    """Return the last three parts of `src`, joined by '-', without extension, as in `sds`."""
    bare = urls.redact(src).rstrip("/")
    parts = [part for part in bare.partition("://")[2].split("/") or [bare] if part] or [
        part for part in bare.split("/") if part
    ]
    return "-".join(parts[-3:]).removesuffix(urls.extension(bare)) or "dataset"


def names_of(option: str, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return column names as a tuple.

    Raises:
        ConfigError: A single text was given, whose letters would be taken for names.
    """
    if isinstance(names, str):
        raise ConfigError(f"{option}={names!r} is a text: give a list of column names, [{names!r}]")
    return tuple(names or ())


SOURCE_OPTIONS = (
    "path_prefix",
    "delimiter",
    "quote_char",
    "encoding",
    "label_column",
    "source_version",
    "on_source_change",
    "sql_engine",
)
"""What `source_options` may hold: fields of `config.IndexOptions` that few sources need."""


def source_options_of(options: Mapping[str, Any] | None, samples: SampleOptions, storage: StorageOptions) -> dict[str, Any]:
    """Return how the source is read, and what lists in it may name, as fields of `config.IndexOptions`.

    Raises:
        ConfigError: An unknown key.
    """
    for key in options or ():
        if key not in SOURCE_OPTIONS:
            raise ConfigError(f"source_options[{key!r}] is unknown: give one of {', '.join(SOURCE_OPTIONS)}")
    return {**(options or {}), "allowed_roots": samples.allowed_roots, "credential_hosts": storage.credential_hosts}


def callables(option: str, transforms: Sequence[Transform] | None) -> list[Transform]:
    """Return transforms as a list.

    Raises:
        ConfigError: One of them cannot be called, or is a cache point that cannot be one.
    """
    if callable(transforms):
        raise ConfigError(f"{option}={transforms!r} is a single transform: give a list of them")
    for number, transform in enumerate(transforms or ()):
        if not callable(transform):
            raise ConfigError(f"{option}[{number}]={transform!r} is not callable: give callables from sample to sample")
        if option == "predownload_transforms" and isinstance(transform, CacheTransform):
            raise ConfigError(f"{option}[{number}] is a CacheTransform: rows are not stored, put it into transforms")
    split_at_points(transforms or ())  # what is wrong with a cache point shows here, not in a worker
    return list(transforms or ())


def policy_of(name: str | None, *, is_unaligned: bool) -> str | None:
    """Return the eviction policy to ask for.

    Raises:
        ConfigError: It needs an order that the dataset gives up.
    """
    if name == "belady" and is_unaligned:
        raise ConfigError(
            "eviction_policy='belady' needs one order for all workers, which unaligned_worker_index=True gives up: drop one"
        )
    return name


def check_on_error(value: OnError | str) -> OnError:
    """Return what to do with failing samples.

    Raises:
        ConfigError: An unknown word.
    """
    try:
        return OnError(value)
    except ValueError:
        raise ConfigError(f"on_error={value!r} is unknown: give one of {', '.join(OnError)}") from None


def storage_of(options: Mapping[str, object] | None, num_retries: int, num_threads: int | None) -> StorageOptions:
    """Return how bytes are read."""
    return StorageOptions(
        storage_options=dict(options or {}),
        num_retries=num_retries,
        num_threads="auto" if num_threads is None else num_threads,
    )


def retention_of(options: SampleOptions, retained_samples: int | None, batch_size: int | None) -> SampleOptions:
    """Return `options` that keep the paths of as many samples as the user asks for, or as a plain DataLoader has under way."""
    if retained_samples is None and batch_size is None:
        return options
    if retained_samples is not None:
        check_at_least("retained_samples", retained_samples, 1)
        return replace(options, retained_samples=retained_samples, least_retained=retained_samples, is_retention_known=True)
    under_way = (TORCH_PREFETCH_FACTOR + 1) * (batch_size or 1)
    return replace(options, retained_samples=max(options.retained_samples, under_way), is_retention_known=True)


def lazy_of(chunk_size: int | None, num_threads: int, prefetch_factor: int) -> LazyOptions | None:
    """Return how a lazy index is read, None when none is asked for."""
    if chunk_size is None:
        return None
    return LazyOptions(chunk_rows=chunk_size, num_threads=num_threads, num_ahead=prefetch_factor)


def open_cache(
    directory: str | os.PathLike[str] | None,
    storage: StorageOptions,
    limit: int | str | AsItIs | None,
    policy: str | None,
    on_error: OnCacheError | str,
    min_free_bytes: int | str,
    namespace: str | None,
    verify_reads: VerifyReads | str,
) -> Cache:
    """Return a dataset's cache; in the user's own cache directory when no `directory` is given."""
    return Cache(
        directory or default_cache_directory(),
        limit=limit,
        storage_options=storage,
        eviction_policy=policy,
        on_cache_error=on_error,
        min_free_bytes=min_free_bytes,
        cache_namespace=namespace,
        verify_reads=verify_reads,
    )


def open_any(options: IndexOptions, cache: Cache, *, show_progress: bool) -> Index:
    """Return the index of a source: lazy if `options` say so."""
    opener = open_index if options.lazy is None else open_lazy_index
    return opener(options, cache.path / "index", cache.fetcher, show_progress=show_progress, identity=cache.identity)


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


def from_start(indices: Sequence[SupportsIndex], index: Index) -> list[int]:
    """Return numbers of selected rows, those from the end counted from the start.

    Raises:
        TypeError: One of them is no whole number.
        IndexError: There is no such row. While a lazy index does not know how many it has, whoever fetches finds out.
        UnknownLengthError: It does not know, and a number is counted from the end.
    """
    numbers = [_whole_number(number) for number in indices]
    size = index.known_length if index.known_length is not None or min(numbers, default=0) >= 0 else len(index)
    for number in numbers:
        if size is not None and not -size <= number < size:
            raise IndexError(f"index {number} is out of range: the dataset has {size} samples")
    return [number if number >= 0 else number + (size or 0) for number in numbers]


def _whole_number(number: SupportsIndex) -> int:
    try:
        return operator.index(number)
    except TypeError:
        pass  # torch says only that tensors of integers can be an index
    raise TypeError(
        f"dataset[{number!r}]: a row is a whole number, not {type(number).__name__}; for several rows at once, "
        "dataset.__getitems__([0, 1])"
    )


def checked_seed(seed: int | None) -> int | None:
    """Return `shuffle_seed` as a number of Python.

    Raises:
        ConfigError: It is something else than a whole number.
    """
    if seed is None:
        return None
    if not isinstance(seed, bool):
        with contextlib.suppress(TypeError):
            return operator.index(seed)
    raise ConfigError(f"shuffle_seed={seed!r} is no whole number: give None, -1 for a random seed, or 0 to 2**64 - 1")
