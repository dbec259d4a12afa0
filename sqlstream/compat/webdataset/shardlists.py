"""Lists of shards, and how they are split: the engine deals samples to ranks and workers, so that no shard list has to."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from sqlstream import distributed
from sqlstream.compat.webdataset.stages.base import PipelineStage
from sqlstream.errors import ConfigError
from sqlstream.storage.members.braces import expand

Shard = dict[str, Any]
"""A shard of a list: its URL under `url`."""
_Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def expand_urls(urls: str) -> list[str]:
    """Return the URLs that a text names: split at `::`, then variables, then braces."""
    return expand(urls)


def expand_source(source: _Urls, max_urls: int = int(1e9)) -> list[str]:
    """Return the URLs that a text, a path, or an iterable of them names.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(source, str | os.PathLike):
        return expand(os.fspath(source))
    if not isinstance(source, Iterable):
        raise ConfigError(f"{source!r} names no shards: give a text with their URLs, or a list of such texts")
    return [os.fspath(url) if isinstance(url, os.PathLike) else url for url in islice(source, max_urls)]


class SimpleShardList(IterableDataset[Shard]):
    """A list of shards.

    Args:
        urls: A text with braces, or a list.
        seed: Shuffle them; True: in another way each time.
    """

    def __init__(self, urls: _Urls, seed: int | bool | None = None) -> None:
        super().__init__()
        self.urls = expand_source(urls)
        self.seed = seed
        if not self.urls or not all(isinstance(url, str) for url in self.urls):
            raise ValueError(f"{urls!r} names no shards: give a text with their URLs, or a list of such texts")

    def __repr__(self) -> str:
        """Return the number of shards."""
        return f"SimpleShardList of {len(self.urls)}"

    def __len__(self) -> int:
        """Return the number of shards."""
        return len(self.urls)

    def __iter__(self) -> Iterator[Shard]:
        """Yield the shards."""
        urls = list(self.urls)
        if self.seed is not None:
            random.Random(None if self.seed is True else self.seed).shuffle(urls)
        for url in urls:
            yield {"url": url}


class ResampledShards(IterableDataset[Shard]):
    """Shards without end; the engine takes each as often as the others, in another order each time.

    Args:
        urls: A text with braces, or a list.
        nshards: Number of shards that are yielded.
        seed: Seed of the draws.
        worker_seed: Ignored: the engine deals out what is drawn.
        deterministic: Draw the same in each run.
        max_urls: At most so many URLs of an iterable.
        empty_check: Ignored: a list without shards is an error.
    """

    def __init__(
        self,
        urls: _Urls,
        nshards: int = sys.maxsize,
        seed: int = 0,
        worker_seed: Callable[[], int] | None = None,  # noqa: ARG002 - theirs has it
        deterministic: bool = False,
        max_urls: int = int(1e6),
        empty_check: bool = True,  # noqa: ARG002 - theirs has it
    ) -> None:
        super().__init__()
        self.urls = expand_source(urls, max_urls)
        if not self.urls:
            raise ValueError(f"{urls!r} names no shards: give a text with their URLs, or a list of such texts")
        self.nshards, self.seed, self.deterministic = nshards, seed, deterministic

    def __repr__(self) -> str:
        """Return the number of shards."""
        return f"ResampledShards of {len(self.urls)}"

    def __iter__(self) -> Iterator[Shard]:
        """Yield shards, each drawn from all of them."""
        info, world = get_worker_info(), distributed.read_world()
        rng = random.Random(f"{self.seed}/{world.rank}/{0 if info is None else info.id}" if self.deterministic else None)
        for _ in range(self.nshards):
            yield {"url": rng.choice(self.urls)}


ResampledShardList = ResampledShards


class Resampled(PipelineStage):
    """Draws what it is given again and again."""

    name = "resampled"

    def __init__(self, n: int = sys.maxsize) -> None:
        self.n = n

    def run(self, src: Iterable[Any]) -> Iterator[Any]:
        """Yield draws."""
        items, rng = list(src), random.Random()
        for _ in range(self.n):
            yield rng.choice(items)


def resampled(n: int = sys.maxsize) -> Resampled:
    """Return a stage that draws what it is given again and again."""
    return Resampled(n)


def split_by_node(src: Iterable[Any], group: Any = None) -> Iterator[Any]:  # noqa: ARG001 - theirs has it
    """Return what is this rank's of an iterable; in a pipeline that the engine runs, the engine deals samples."""
    world = distributed.read_world()
    return islice(src, world.rank, None, world.world_size)


def split_by_worker(src: Iterable[Any]) -> Iterator[Any]:
    """Return what is this worker's of an iterable; in a pipeline that the engine runs, the engine deals samples."""
    info = get_worker_info()
    return iter(src) if info is None else islice(src, info.id, None, info.num_workers)


def single_node_only(src: Iterable[Any], group: Any = None) -> Iterator[Any]:  # noqa: ARG001 - theirs has it
    """Return what is this rank's of an iterable, where theirs refuses jobs of several ranks."""
    return split_by_node(src)


def non_empty(src: Iterable[Any]) -> Iterator[Any]:
    """Yield what an iterable has.

    Raises:
        ValueError: It has nothing.
    """
    count = 0
    for some in src:
        yield some
        count += 1
    if not count:
        raise ValueError("a stage had no samples at all, and non_empty says that there are some")


def shardspec(spec: str) -> SimpleShardList:
    """Return the shards that a text names.

    Raises:
        ValueError: It is a YAML file.
    """
    if spec.endswith((".yaml", ".yml")):
        raise ValueError(f"{spec}: YAML lists of shards are not read: name the shards, or mix datasets with RandomMix")
    return SimpleShardList(spec)


SPLITTERS = (split_by_node, split_by_worker, single_node_only)
"""What the engine does itself."""
