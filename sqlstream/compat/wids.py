"""The names of wids, over those of `sqlstream`: TAR shards with an index, as a map-style dataset, and its samplers."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch.distributed
from torch.utils.data import Dataset, Sampler

from sqlstream import Cache, StreamingDataset
from sqlstream.config import default_cache_directory
from sqlstream.environment import environment
from sqlstream.errors import ConfigError
from sqlstream.index.sources.base.access import stat_file
from sqlstream.index.sources.base.byte_source import bytes_of
from sqlstream.storage.base.urls import is_remote, local_path, redact
from sqlstream.transforms.decode_by_extension import DecodeByExtension
from sqlstream.world import World

Transformation = Callable[[dict[str, Any]], Any]
_EPOCH_STEP = 1289738273
"""Difference of the seeds of two epochs, as theirs has it: the orders are the same."""


class _Decode:
    """Decodes the fields of a sample, as theirs does by default; what it leaves are streams.

    Args:
        images: Form of images.
    """

    def __init__(self, images: str) -> None:
        self._decode = DecodeByExtension(images)

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return a sample with its fields decoded."""
        for name, value in sample.items():
            if isinstance(value, io.BytesIO):
                sample[name] = value.getvalue()
        return _with_streams(self._decode(sample))


def _with_streams(sample: dict[str, Any]) -> dict[str, Any]:
    for name, value in sample.items():
        if name[:1] == "." and isinstance(value, bytes):
            sample[name] = io.BytesIO(value)
    return sample


def interpret_transformations(transformations: Any) -> list[Transformation]:
    """Return functions from sample to sample: of `"PIL"` and `"numpy"` the decoder.

    Raises:
        ConfigError: One is neither.
    """
    given = transformations if isinstance(transformations, list) else [transformations]
    named: dict[str, Any] = {"PIL": _Decode("wids-pil"), "numpy": _Decode("wids-numpy")}
    found: list[Any] = [named.get(some, some) if isinstance(some, str) else some for some in given]
    if wrong := [some for some in found if not callable(some)]:
        raise ConfigError(f"transformations={wrong[0]!r}: give 'PIL', 'numpy', functions from sample to sample, or []")
    return found


class ShardListDataset(Dataset[Any]):
    """The samples of TAR shards by number: shards come as they are needed, into a cache with one limit.

    Args:
        shards: Path or URL of an index (`sqlstream shards index --wids`, widsindex), or a list of `{"url": …, "nsamples": …}`.
        cache_size: Ignored, as theirs is; the limit of the cache is that of its directory.
        cache_dir: The cache; None: `WIDS_CACHE`, else the user's own.
        lru_size: Ignored: the engine keeps what is open within its bounds.
        dataset_name: Name of a dataset of a list.
        localname: Refused: files of the cache are named by a hash.
        transformations: `"PIL"`, `"numpy"`, functions, or a list of them.
        keep: Ignored: what is in the cache stays as long as there is room.
        base: Where relative URLs of shards start; None: where the index is.
        options: Values in place of those of the index.

    Raises:
        ConfigError: An option is wrong.
        SourceError: The index cannot be read.
    """

    def __init__(
        self,
        shards: Any,
        *,
        cache_size: int = int(1e12),  # noqa: ARG002 - theirs has it, and ignores it
        cache_dir: str | None = None,
        lru_size: int = 10,  # noqa: ARG002
        dataset_name: str | None = None,
        localname: Callable[[str], str] | None = None,
        transformations: Any = "PIL",
        keep: bool = False,  # noqa: ARG002
        base: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if localname is not None:
            raise ConfigError("localname= names files of the cache, which are named by a hash here: give cache_dir=")
        self.transformations = interpret_transformations(transformations)
        self.cache_dir = cache_dir or environment("WIDS_CACHE").get("WIDS_CACHE")
        self.base = base
        is_path = isinstance(shards, str | os.PathLike)
        given = os.fspath(shards) if is_path else shards
        self.spec = _described(given, base, options, self.cache_dir)
        source = given if is_path and base is None and not options else str(_written(self.spec, self.cache_dir))
        self._dataset = StreamingDataset(
            source,
            self.cache_dir,
            lazy_index_chunk_size=1,
            show_progress=False,
            source_options={"new_parts": "take"},
            world=World(),
        )
        self.shards: list[dict[str, Any]] = self.spec["shardlist"]
        name = dataset_name if not is_path else self.spec.get("name")
        self.dataset_name = name or _hash_of(str(shards))
        self.lengths = [int(shard["nsamples"]) for shard in self.shards]
        self.cum_lengths = [*accumulate(self.lengths)]
        self.total_length = self.cum_lengths[-1] if self.cum_lengths else 0

    @property
    def streaming(self) -> StreamingDataset:
        """The dataset of ours: rows in the order of the shards."""
        return self._dataset

    def add_transform(self, transform: Transformation) -> Self:
        """Add a function from sample to sample behind the others."""
        self.transformations.append(transform)
        return self

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.total_length

    def __getitem__(self, index: int) -> Any:
        """Return a sample by its number, a negative one from the end.

        Raises:
            IndexError: There is none.
        """
        return self._sample(index, self._dataset[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, whose shards are downloaded together."""
        return [self._sample(*found) for found in zip(indices, self._dataset.__getitems__(indices), strict=True)]

    def _sample(self, index: int, row: Mapping[str, Any]) -> Any:
        number = row["__shard__"]
        shard = self.shards[number]
        place = index + self.total_length if index < 0 else index
        sample: dict[str, Any] = {
            f".{name}": io.BytesIO(value) for name, value in row.items() if name[:2] != "__" and value is not None
        }
        sample["__key__"] = row["__key__"]
        sample["__dataset__"] = shard.get("dataset")
        sample["__index__"] = place
        sample["__shard__"] = shard["url"]
        sample["__shardindex__"] = place - (self.cum_lengths[number - 1] if number else 0)
        made: Any = sample
        for transform in self.transformations:
            made = transform(made)
        return made

    def get_stats(self) -> tuple[int, int]:
        """Return the uses of the cache, and those that it had not; see `sqlstream cache stats` for more."""
        statistics = self._dataset.cache.statistics()
        return statistics.hits + statistics.misses, statistics.misses

    def check_cache_misses(self) -> None:
        """Do nothing: `sqlstream cache stats` shows how many there are."""

    def get_shard(self, index: int) -> Any:
        """Refuse: shards are not handed out.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"get_shard({index}): the engine reads shards; dataset[{index}] is the sample")

    def close(self) -> None:
        """Close index and cache."""
        self._dataset.close()


def _described(shards: Any, base: str | None, options: Mapping[str, Any] | None, cache_dir: str | None) -> dict[str, Any]:
    """Return an index as a dict, its shards with URLs that do not depend on its place.

    Raises:
        ConfigError: It names other indexes, or is none.
    """
    if isinstance(shards, str):
        document, start = _read(shards, cache_dir), shards.rpartition("/")[0]
    else:
        document, start = {"wids_version": 1, "shardlist": list(shards)}, ""
    document |= dict(options or {})
    if "datasets" in document and not document.get("shardlist"):
        raise ConfigError(f"{shards!r} names other indexes (datasets): open each, and join them with torch's ConcatDataset")
    start = document.get("base", start) if base is None else base
    found = document.get("shardlist")
    if not found or not all(isinstance(some, Mapping) and {"url", "nsamples"} <= some.keys() for some in found):
        raise ConfigError(f"{str(shards)[:200]!r} is no index of wids: it has no shardlist of url and nsamples")
    return {**document, "shardlist": [{**shard, "url": _joined(start, shard["url"])} for shard in found]}


def _read(path: str, cache_dir: str | None) -> dict[str, Any]:
    """Return the document of an index.

    Raises:
        ConfigError: It is no object of JSON.
    """
    if is_remote(path):
        with Cache(cache_dir or default_cache_directory()) as cache:
            source = bytes_of(stat_file(path, cache.fetcher), cache.fetcher)
            data = source.read_at(0, source.size_bytes)
    else:
        data = Path(local_path(path)).read_bytes()
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ConfigError(f"{redact(path)} is no index of wids: it has a {type(document).__name__} and no object")
    return document


def _joined(start: str, url: str) -> str:
    return url if is_remote(url) or url.startswith(("/", "pipe:", "file:")) or not start else f"{start.rstrip('/')}/{url}"


def _written(document: dict[str, Any], cache_dir: str | None) -> Path:
    """Return the path of an index with a document, beside the cache: named by its content."""
    text = json.dumps({**document, "wids_version": 1}, sort_keys=True)
    cache = Path(cache_dir or default_cache_directory())
    folder = cache.with_name(f"{cache.name}-wids")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{_hash_of(text)}.json"
    if not path.exists():
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(text)
        aside.rename(path)
    return path


def _hash_of(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest())[:16].decode()


# -- samplers ---------------------------------------------------------------------------------------------------------


def _shuffled(
    ranges: Sequence[range], rng: random.Random, *, shuffles_samples: bool = True, shuffles_ranges: bool = True
) -> Iterator[int]:
    """Yield the numbers of ranges, one range after the other."""
    order = list(range(len(ranges)))
    if shuffles_ranges:
        rng.shuffle(order)
    for place in order:
        numbers = list(ranges[place])
        if shuffles_samples:
            rng.shuffle(numbers)
        yield from numbers


class ShardListSampler(Sampler[int]):
    """The samples of one shard after the other, shards and samples shuffled; the shards of the first epoch are in order.

    Args:
        dataset: A `ShardListDataset`.
        lengths: Samples of each shard; None: those of the dataset.
        seed: Seed of the order.
        shufflefirst: Shuffle the shards of the first epoch, too.
    """

    def __init__(
        self, dataset: Any, *, lengths: Sequence[int] | None = None, seed: int = 0, shufflefirst: bool = False
    ) -> None:
        ends = [*accumulate(dataset.lengths if lengths is None else lengths)]
        self.ranges = [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        self.seed, self.shufflefirst, self.epoch = seed, shufflefirst, 0

    def __len__(self) -> int:
        """Return the number of samples."""
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of an epoch."""
        rng = random.Random(self.seed + _EPOCH_STEP * self.epoch)
        yield from _shuffled(self.ranges, rng, shuffles_ranges=self.shufflefirst or self.epoch > 0)
        self.epoch += 1


ShardedSampler = ShardListSampler


class ChunkedSampler(Sampler[int]):
    """The samples of one chunk of the numbers after the other, chunks and samples shuffled.

    Args:
        dataset: A dataset with a length.
        dslength_per_replica: What `len()` returns; -1: the number of samples.
        num_samples: How many of the first samples, or first and last; None: all.
        chunksize: Samples of a chunk.
        seed: Seed of the order.
        shuffle: Shuffle chunks and samples.
        shufflefirst: Shuffle the chunks of the first epoch, too.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        dslength_per_replica: int = -1,
        num_samples: int | tuple[int, int] | None = None,
        chunksize: int = 2000,
        seed: int = 0,
        shuffle: bool = True,
        shufflefirst: bool = False,
    ) -> None:
        low, high = num_samples if isinstance(num_samples, tuple) else (0, len(dataset) if num_samples is None else num_samples)
        self.dslength_per_replica = dslength_per_replica if dslength_per_replica > 0 else high - low
        self.ranges = [range(start, min(start + chunksize, high)) for start in range(low, high, chunksize)]
        self.seed, self.shuffle, self.shufflefirst, self.epoch = seed, shuffle, shufflefirst, 0

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of an epoch."""
        rng = random.Random(self.seed + _EPOCH_STEP * self.epoch)
        shuffles_ranges = self.shuffle and (self.shufflefirst or self.epoch > 0)
        yield from _shuffled(self.ranges, rng, shuffles_samples=self.shuffle, shuffles_ranges=shuffles_ranges)
        self.epoch += 1

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.dslength_per_replica


def DistributedChunkedSampler(  # noqa: N802 - theirs
    dataset: Any,
    *,
    num_replicas: int | None = None,
    num_samples: int | None = None,
    rank: int | None = None,
    shuffle: bool = True,
    shufflefirst: bool = False,
    seed: int = 0,
    drop_last: bool | None = None,
    chunksize: int = 1000000,
) -> ChunkedSampler:
    """Return a sampler of this rank's part of the numbers, which is the same in each epoch.

    Args:
        dataset: A dataset with a length.
        num_replicas: Number of ranks; None: those of torch.distributed.
        num_samples: How many of the first samples; None: all.
        rank: This rank; None: that of torch.distributed.
        shuffle: Shuffle chunks and samples.
        shufflefirst: Shuffle the chunks of the first epoch, too.
        seed: Seed of the order.
        drop_last: Ignored, as theirs is, with a warning.
        chunksize: Samples of a chunk.

    Raises:
        ConfigError: The rank is not one of the ranks.
    """
    if drop_last is not None:
        warnings.warn("DistributedChunkedSampler ignores drop_last", stacklevel=2)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        num_replicas = num_replicas or torch.distributed.get_world_size()
        rank = torch.distributed.get_rank() if rank is None else rank
    elif num_replicas is None or rank is None:
        warnings.warn(
            "DistributedChunkedSampler: torch.distributed is not initialised; a single process is assumed", stacklevel=2
        )
        num_replicas, rank = 1, 0
    if not 0 <= rank < num_replicas:
        raise ConfigError(f"rank={rank} is not one of num_replicas={num_replicas}: ranks count from 0")
    num_samples = num_samples or len(dataset)
    share = -(-num_samples // num_replicas)
    return ChunkedSampler(
        dataset,
        dslength_per_replica=math.ceil(len(dataset) / num_replicas),
        num_samples=(min(rank * share, num_samples), min((rank + 1) * share, num_samples)),
        chunksize=chunksize,
        seed=seed,
        shuffle=shuffle,
        shufflefirst=shufflefirst,
    )


__all__ = ["ChunkedSampler", "DistributedChunkedSampler", "ShardListDataset", "ShardListSampler", "ShardedSampler"]
