"""The fluid interface: `WebDataset` and `WebLoader`."""

from __future__ import annotations

import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Self

from sqlstream.compat.webdataset import filters
from sqlstream.compat.webdataset.autodecode import Decoder, ImageHandler
from sqlstream.compat.webdataset.handlers import Handler, reraise_exception
from sqlstream.compat.webdataset.pipeline import DataPipeline
from sqlstream.compat.webdataset.shardlists import ResampledShards, SimpleShardList, single_node_only, split_by_worker
from sqlstream.compat.webdataset.stages.all_samples import Shuffle, default_collation_fn
from sqlstream.compat.webdataset.tariterators import TarfileToSamples
from sqlstream.compat.webdataset.translation import Settings, check_empty, name_of
from sqlstream.errors import ConfigError


def pipe_cleaner(spec: str) -> str:
    """Return the URL in a command; it names no file here, where files are named by a hash."""
    return next((word for word in spec.removeprefix("pipe:").split() if "://" in word), spec)


class FluidInterface:
    """Stages as methods: each returns a pipeline with one more."""

    @abstractmethod
    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages."""

    def batched(self, batchsize: int, collation_fn: Any = default_collation_fn, partial: bool = True) -> Self:
        """Make batches."""
        return self.compose(filters.batched(batchsize, collation_fn=collation_fn, partial=partial))

    def unbatched(self) -> Self:
        """Make samples of batches."""
        return self.compose(filters.unbatched())

    def listed(self, batchsize: int, partial: bool = True) -> Self:
        """Make lists of samples."""
        return self.compose(filters.batched(batchsize, collation_fn=None, partial=partial))

    def unlisted(self) -> Self:
        """Make samples of lists."""
        return self.compose(filters.unlisted())

    def log_keys(self, logfile: str | None = None) -> Self:
        """Write the key of each sample to a file."""
        return self.compose(filters.log_keys(logfile))

    def shuffle(self, size: int, **kw: Any) -> Self:
        """Mix samples; 0: not."""
        return self if size < 1 else self.compose(filters.shuffle(size, **kw))

    def map(self, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Self:
        """Call a function for each sample."""
        return self.compose(filters.map(f, handler=handler))

    def decode(
        self,
        *args: Any,
        pre: list[Any] | None = None,
        post: list[Any] | None = None,
        only: str | Sequence[str] | None = None,
        partial: bool = False,
        handler: Handler = reraise_exception,
    ) -> Self:
        """Decode fields: names of image formats, and functions of (key, data)."""
        handlers = [ImageHandler(some) if isinstance(some, str) else some for some in args]
        return self.map(Decoder(handlers, pre=pre, post=post, only=only, partial=partial), handler=handler)

    def map_dict(self, handler: Handler = reraise_exception, **kw: Any) -> Self:
        """Call functions for fields."""
        return self.compose(filters.map_dict(handler=handler, **kw))

    def select(self, predicate: Callable[[Any], Any], **kw: Any) -> Self:
        """Drop samples."""
        return self.compose(filters.select(predicate, **kw))

    def to_tuple(self, *args: Any, **kw: Any) -> Self:
        """Make tuples of fields."""
        return self.compose(filters.to_tuple(*args, **kw))

    def map_tuple(self, *args: Any, handler: Handler = reraise_exception) -> Self:
        """Call functions for the values of tuples."""
        return self.compose(filters.map_tuple(*args, handler=handler))

    def slice(self, *args: int | None) -> Self:
        """Take samples by place."""
        return self.compose(filters.slice(*args))

    def rename(self, **kw: Any) -> Self:
        """Rename fields."""
        return self.compose(filters.rename(**kw))

    def rsample(self, p: float = 0.5) -> Self:
        """Keep samples by chance."""
        return self.compose(filters.rsample(p))

    def rename_keys(self, *args: Any, **kw: Any) -> Self:
        """Rename fields by patterns."""
        return self.compose(filters.rename_keys(*args, **kw))

    def extract_keys(self, *args: Any, **kw: Any) -> Self:
        """Make tuples of fields by patterns."""
        return self.compose(filters.extract_keys(*args, **kw))

    def xdecode(self, *args: Any, **kw: Any) -> Self:
        """Decode fields by patterns."""
        return self.compose(filters.xdecode(*args, **kw))

    def mcached(self) -> Self:
        """Keep the samples of the first iteration in memory."""
        return self.compose(filters.Cached())

    def lmdb_cached(self, *args: Any, **kw: Any) -> Self:  # noqa: ARG002 - theirs takes them
        """Refuse: samples are stored by `sqlstream.transforms.CacheTransform`, or not at all.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "lmdb_cached(): shards are in the cache of this node after the first epoch, so leave it out; what transforms make "
            "is stored by a CacheTransform of a StreamingDataset"
        )


class WebDataset(DataPipeline, FluidInterface):
    """Samples of TAR shards: one `StreamingDataset`, with the stages that follow.

    Args:
        urls: A text with braces, or a list; also what `StreamingDataset` takes for shards (`s3://`, wildcards).
        handler: What becomes of shards and samples that cannot be read.
        mode: `'resampled'`, or None.
        resampled: Samples come without end.
        repeat: Ignored, as theirs is.
        shardshuffle: Shuffle shards: a number, or True; None and False: not.
        cache_size: Most bytes of the cache; -1: as it is, of a new directory half of the free space; 0: as without `cache_dir`.
        cache_dir: The cache; None: the user's own.
        url_to_name: Ignored: files of the cache are named by a hash.
        detshuffle: Ignored: every order is a function of seed and epoch.
        nodesplitter: Ours is the engine's, for all that they have; None: each rank takes all samples. Any other runs once.
        workersplitter: Ours is the engine's, for all that they have and for None.
        select_files: Says for the name of a member whether it is wanted.
        rename_files: Returns another name of a member.
        empty_check: That `select_files` keeps nothing is an error; shards without samples always are.
        verbose: Print the URLs.
        seed: Seed of the order; None: `WDS_SEED`, else 0.
    """

    def __init__(
        self,
        urls: Any,
        handler: Handler = reraise_exception,
        mode: str | None = None,
        resampled: bool = False,
        repeat: bool = False,  # noqa: ARG002 - theirs has it, and ignores it
        shardshuffle: int | bool | None = None,
        cache_size: int = -1,
        cache_dir: str | None = None,
        url_to_name: Callable[[str], str] = pipe_cleaner,  # noqa: ARG002
        detshuffle: bool = False,  # noqa: ARG002
        nodesplitter: Any = single_node_only,
        workersplitter: Any = split_by_worker,
        select_files: Callable[[str], Any] | None = None,
        rename_files: Callable[[str], str] | None = None,
        empty_check: bool = True,
        verbose: bool = False,
        seed: int | None = None,
    ) -> None:
        if mode not in (None, "resampled"):
            raise ConfigError(f"WebDataset(mode={mode!r}) is not there: give 'resampled', or leave it out")
        if workersplitter not in (None, split_by_worker):
            raise ConfigError(
                f"WebDataset(workersplitter={name_of(workersplitter)}): the engine deals samples to workers: leave it out"
            )
        is_resampled = resampled or mode == "resampled"
        if is_resampled and shardshuffle not in (False, None):
            warnings.warn("WebDataset(shardshuffle=…) is ignored for resampled datasets", stacklevel=2)
        shards = _shards_of(urls, is_resampled=is_resampled)
        self._settings = Settings.given(cache_dir, cache_size, seed, is_verbose=verbose)
        is_shuffled = bool(shardshuffle) and not is_resampled
        reader = TarfileToSamples(handler, select_files, rename_files)
        reader.options = {"dst": self._settings.dst, "cache_limit": self._settings.limit}
        super().__init__(
            shards,
            nodesplitter,
            workersplitter,
            Shuffle(100 if shardshuffle is True else int(shardshuffle or 0)) if is_shuffled else None,
            reader,
            check_empty if empty_check else None,
        )


def _shards_of(urls: Any, *, is_resampled: bool) -> SimpleShardList | ResampledShards:
    """Return the list of shards that a dataset is given.

    Raises:
        ConfigError: It is none.
    """
    urls = os.fspath(urls) if isinstance(urls, os.PathLike) else urls
    is_text = isinstance(urls, str)
    if isinstance(urls, dict) or (is_text and urls.endswith((".yaml", ".yml"))):
        raise ConfigError(f"{urls!r}: YAML lists of shards are not read: name the shards, or mix datasets with RandomMix")
    if is_text and urls.endswith(".json"):
        raise ConfigError(f"{urls!r}: theirs reads no JSON here, either: give it to sqlstream.compat.wids.ShardListDataset")
    if is_text and urls.endswith("/"):
        raise ConfigError(f"{urls!r} is a directory, which theirs empties as it reads: name its shards, {urls + '*.tar'!r}")
    return ResampledShards(urls) if is_resampled else SimpleShardList(urls)


class FluidWrapper(DataPipeline, FluidInterface):
    """Any iterable with the fluid interface."""

    def __init__(self, initial: Any) -> None:
        super().__init__()
        self.append(initial)
