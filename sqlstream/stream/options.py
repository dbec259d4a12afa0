"""What the constructor of a dataset takes, checked and turned into frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlstream.config import LazyOptions, OnError, StorageOptions
from sqlstream.errors import ConfigError
from sqlstream.storage import urls
from sqlstream.transforms.base import Transform
from sqlstream.transforms.cached import CacheTransform, split_at_points


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


def source_options_of(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how the source is read, as fields of `config.IndexOptions`.

    Raises:
        ConfigError: An unknown key.
    """
    for key in options or ():
        if key not in SOURCE_OPTIONS:
            raise ConfigError(f"source_options[{key!r}] is unknown: give one of {', '.join(SOURCE_OPTIONS)}")
    return dict(options or {})


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


def lazy_of(chunk_size: int | None, num_threads: int, prefetch_factor: int) -> LazyOptions | None:
    """Return how a lazy index is read, None when none is asked for."""
    if chunk_size is None:
        return None
    return LazyOptions(chunk_rows=chunk_size, num_threads=num_threads, num_ahead=prefetch_factor)
