"""`ShardListDataset` of wids: the samples of TAR shards by number, over a dataset of ours."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Self

from torch.utils.data import Dataset

from sqlstream import StreamingDataset
from sqlstream.compat.wids.description import described, hash_of, written
from sqlstream.environment import environment
from sqlstream.errors import ConfigError
from sqlstream.transforms.decode_by_extension import DecodeByExtension
from sqlstream.world import World

Transformation = Callable[[dict[str, Any]], Any]


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
        SourceError: The index is no JSON, or names shards that are others.
        StorageError: The index, or a shard, is not there, or cannot be read.
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
        self.spec = described(given, base, options, self.cache_dir)
        is_own = not is_path or base is not None or "shardlist" in (options or {})  # a remote index itself is judged as one
        source = str(written(self.spec, self.cache_dir)) if is_own else given
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
        self.dataset_name = name or hash_of(str(shards))
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
        sample: dict[str, Any] = {f".{name}": io.BytesIO(value) for name, value in row.items() if isinstance(value, bytes)}
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
