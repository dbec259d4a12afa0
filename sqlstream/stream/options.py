"""What the constructor of a dataset takes, as frozen values, and the cache that it opens."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlstream.cache import Cache
from sqlstream.cache.session import VerifyReads
from sqlstream.config import (
    DEFAULT_RETAINED,
    AsItIs,
    Buckets,
    IndexOptions,
    OnCacheError,
    SampleOptions,
    StorageOptions,
    default_cache_directory,
    flag_of,
    is_word,
    list_of,
)
from sqlstream.errors import ConfigError
from sqlstream.index.sources.plan.plan import source_items
from sqlstream.index.sources.shards.by_name import shard_urls
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import check_providers
from sqlstream.storage.base.settings import check_options_of_sources
from sqlstream.stream.run.order_options import TORCH_PREFETCH_FACTOR, BatchOptions, OrderOptions
from sqlstream.transforms.base import Transform
from sqlstream.transforms.cached import CacheTransform, split_at_points


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Which cache a dataset uses, and how: the parameters of `Cache`, beside those of storage."""

    directory: str | os.PathLike[str] | None
    """None: the user's own cache directory."""
    limit: int | str | AsItIs | None
    eviction_policy: str | None
    on_error: OnCacheError | str
    min_free_bytes: int | str
    namespace: str | None
    verify_reads: VerifyReads | str
    max_age: str | float | None = None

    def open(self, storage: StorageOptions) -> Cache:
        """Return the cache."""
        return Cache(
            default_cache_directory() if self.directory is None else self.directory,
            limit=self.limit,
            storage_options=storage,
            eviction_policy=self.eviction_policy,
            on_cache_error=self.on_error,
            min_free_bytes=self.min_free_bytes,
            cache_namespace=self.namespace,
            verify_reads=self.verify_reads,
            max_age=self.max_age,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasetOptions:
    """The parameters of a dataset, checked, each beside those that the same part reads."""

    name: str | None
    """None: the last three parts of the source."""
    show_progress: bool
    """Show a bar on a terminal while the index is built."""
    transforms: Sequence[Transform]
    predownload_transforms: Sequence[Transform]
    storage: StorageOptions
    index: IndexOptions
    samples: SampleOptions
    cache: CacheOptions
    order: OrderOptions
    index_store: str | None = None
    """Where nodes share built indexes; None: nowhere."""
    refresh: str | None = None
    """`'epoch'`: the source is looked at again as each epoch begins; None: when the dataset is made."""

    def __post_init__(self) -> None:
        """Check the name, the transforms, and what concerns two parts."""
        object.__setattr__(self, "show_progress", flag_of("show_progress", self.show_progress))
        if self.name is not None:
            _check_name(self.name)
        for option in ("transforms", "predownload_transforms"):
            object.__setattr__(self, option, _checked_transforms(option, getattr(self, option)))
        split_at_points(self.transforms)  # what is wrong with a cache point shows here, not in a worker
        check_providers(self.storage.providers)
        tables = [self.index.src, *({} if self.index.join is None else self.index.join.tables).values()]
        read = [item for table in tables for item in source_items(table)]
        read += [] if self.index_store is None else [self.index_store]
        schemes = [scheme for item in read for scheme in _schemes(item)]
        check_options_of_sources(schemes, self.storage.storage_options)
        self._check_refresh()
        if self.order.planned_batches is not None and self.index.lazy is not None:
            cure = ", or have Packs measure the rows on the way, by length= a function" if self.order.is_packed else ""
            raise ConfigError(
                f"batches= needs all rows, which a lazy index does not have: leave lazy_index_chunk_size out{cure}"
            )
        if is_word(self.cache.eviction_policy, "belady") and self.order.is_unaligned:
            raise ConfigError(
                "eviction_policy='belady' needs one order for all workers, which unaligned_worker_index=True gives up: drop one"
            )

    def naming_source(self, name: str) -> DatasetOptions:
        """Return these options with the name of a source in place of rows: a worker opens the index, and is not sent them."""
        src, join = self.index.src, self.index.join
        if _is_text(src) and (join is None or all(map(_is_text, join.tables.values()))):
            return self
        if join is not None:
            tables = {table_name: table if _is_text(table) else table_name for table_name, table in join.tables.items()}
            join = replace(join, tables=tables)
        return replace(self, index=replace(self.index, src=src if _is_text(src) else name, join=join))

    def _check_refresh(self) -> None:
        """Raise ConfigError for options that do not go with rows that change."""
        if self.refresh is None:
            return
        if not is_word(self.refresh, "epoch"):
            raise ConfigError(f"refresh={self.refresh!r} is unknown: give 'epoch', or None")
        join = {} if self.index.join is None else self.index.join.tables
        for is_wrong, problem in (
            (
                not all(map(_is_text, (self.index.src, *join.values()))),
                "looks at a source by its name: give paths or URLs, no rows and no function, or make the dataset again",
            ),
            (
                isinstance(self.order.batches, Buckets),
                "takes rows that change, which batches= carries over epochs: leave one of them out",
            ),
            (self.order.is_endless, "begins no epoch anew with infinite_iteration=True: leave one of them out"),
            (self.index.on_source_change == "raise", "takes what on_source_change='raise' refuses: leave one of them out"),
            (
                not isinstance(self.order.weights, str | None),
                "needs weights that fit any rows: give an expression or a column, no numbers of the rows of now",
            ),
        ):
            if is_wrong:
                raise ConfigError(f"refresh='epoch' {problem}")

    def num_retained(self, batches: BatchOptions | None) -> int | None:
        """Return how many samples of a worker keep their paths valid; None: how many are under way is not known.

        Args:
            batches: How a loader takes samples; None: no loader has said it.
        """
        asked, batch_size = self.samples.retained_samples, self.order.batch_size
        if batches is not None:
            return max(batches.num_under_way, asked or 1)
        if asked is not None or batch_size is None:
            return asked
        return max(DEFAULT_RETAINED, (TORCH_PREFETCH_FACTOR + 1) * batch_size)


def _is_text(src: object) -> bool:
    return all(isinstance(item, str) for item in source_items(src))


def _check_name(name: str) -> None:
    """Raise ConfigError for a name that a ledger cannot have: SQLite's error would be taken for one of the ledger's file."""
    if not isinstance(name, str) or name.encode(errors="replace").decode() != name:
        raise ConfigError(f"name={name!r} is no text: give one that tells this dataset from others, or leave it out")


def _checked_transforms(option: str, transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Return transforms as a tuple.

    Raises:
        ConfigError: One of them cannot be called, or is a cache point where there can be none.
    """
    if callable(transforms):
        raise ConfigError(f"{option}={transforms!r} is a single transform: give a list of them")
    found = list_of(option, transforms, "give one of callables from sample to sample")
    for number, transform in enumerate(found):
        if not callable(transform):
            raise ConfigError(f"{option}[{number}]={transform!r} is not callable: give callables from sample to sample")
        if option == "predownload_transforms" and isinstance(transform, CacheTransform):
            raise ConfigError(f"{option}[{number}] is a CacheTransform: rows are not stored, put it into transforms")
    return tuple(found)


def _schemes(item: object) -> list[str]:
    """Return the schemes of a source: of shards that a text names, of each."""
    if not isinstance(item, str):
        return ["file"]
    return [*{urls.scheme(url) for url in shard_urls(item, allow_pipes=True) or [item]}]  # the plan asks whether it may be run


def default_name(src: str) -> str:
    """Return the last three parts of `src`, joined by '-', without extension, as in `sds`."""
    bare = urls.redact(src).rstrip("/")
    parts = [part for part in bare.partition("://")[2].split("/") or [bare] if part] or [
        part for part in bare.split("/") if part
    ]
    return "-".join(parts[-3:]).removesuffix(urls.extension(bare)) or "dataset"
