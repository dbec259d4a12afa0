"""MosaicML's `StreamingDataset`: their parameters, samples, sizes and states over a dataset, or a mixture, of ours."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from sqlstream.compat.streaming.base.array import Array
from sqlstream.compat.streaming.base.opening import Inner, Opener, shards_of
from sqlstream.compat.streaming.base.stream import Stream, check_shares, note_shares, with_defaults
from sqlstream.compat.streaming.translation.asked import Asked
from sqlstream.compat.streaming.translation.items import MakeItem, ReadsRows, item_of, methods_of, offered, without_added
from sqlstream.compat.streaming.translation.places import place_of
from sqlstream.compat.streaming.translation.signatures import Refused
from sqlstream.distributed import read_world
from sqlstream.errors import ConfigError
from sqlstream.order.permute import Int64Array
from sqlstream.stream.dataset import StreamingDataset as OurDataset
from sqlstream.stream.iterated import IteratedDataset, prepare
from sqlstream.stream.run.order_options import BatchOptions
from sqlstream.stream.run.shares import EpochShare, ShareProgress

logger = logging.getLogger(__name__)

_NODES = "initial_physical_nodes"
"""A key of MosaicML's states that ours has for scripts that read it."""


class _Resumed(NamedTuple):
    """Where a state had the run go on."""

    epoch: int
    sample_in_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """A shard of a dataset."""

    basename: str
    samples: int
    size: int
    """Bytes of its data, not compressed."""

    def __len__(self) -> int:
        """Return the number of its samples."""
        return self.samples


class StreamingDataset(Array, IteratedDataset):
    """Streams samples of MDS, JSONL and XSV shards, in one order on any number of ranks and workers; `dataset[i]` is sample i.

    What each parameter becomes, and what differs from MosaicML's, is in docs/from-mosaicml.md.

    Args:
        streams: Streams that are mixed; either they, or `remote` and `local`.
        remote: Directory or URL of the shards; None: they are in `local`.
        local: Directory that holds the shards, or in whose `.sqlstream` they are cached; None: the user's cache directory.
        split: Subdirectory of both.
        download_retry: Tries of a download after the first one.
        download_timeout: Seconds of silence of a download.
        validate_hash: A hash that the index must have; hashes of compressed shards are always compared.
        keep_zip: Accepted: only decompressed shards are kept.
        epoch_size: Samples of an epoch, `'100k'` for instance.
        predownload: Samples that each worker plans ahead; None: 256, within 1 GiB.
        cache_limit: Most bytes of cached shards, `'10gb'` for instance; None: no limit.
        sampling_method: `'balanced'`; `'fixed'` where nothing is sampled.
        sampling_granularity: Accepted: samples are drawn one by one.
        partition_algo: Accepted: there is one way.
        num_canonical_nodes: Fixed parts of the data that stay on their nodes; None: nodes of the first start.
        batch_size: Samples of a rank's batch.
        shuffle: Shuffle the samples, anew in each epoch.
        shuffle_algo: `'naive'`: over all samples; others: shards, and the samples of a window of them.
        shuffle_seed: Seed of the shuffle.
        shuffle_block_size: Samples of the shards that are mixed; None: those of 64 shards.
        batching_method: What one stream gives in one turn: a sample (`'random'`, `'stratified'`), a global batch
            (`'per_stream'`), or the batch of a rank (`'device_per_stream'`).
        allow_unsafe_types: Read pickles, which may run any code.
        replication: Number of consecutive ranks that take the same samples.
        stream_name: `'stream'`: there is no registry.
        stream_config: Further parameters of the stream that `remote` and `local` are.

    Raises:
        ConfigError: A parameter is wrong, or has no equal here; it is a ValueError, too.
        SourceError: The shards cannot be read.
    """

    _counts_all_ranks: ClassVar[bool] = False
    prepare_shard = Refused("shards come as their samples are asked for; predownload= says how far ahead")
    evict_shard = Refused("cache_limit= makes room, and `sqlstream cache clear DST` empties a cache")
    evict_coldest_shard = Refused("cache_limit= makes room")
    resample_streams = Refused("which samples an epoch has is computed; set_epoch() chooses the epoch")

    def __init__(
        self,
        *,
        streams: Sequence[Stream] | None = None,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        download_retry: int = 2,
        download_timeout: float = 60.0,
        validate_hash: str | None = None,
        keep_zip: bool = False,
        epoch_size: int | str | None = None,
        predownload: int | None = None,
        cache_limit: int | str | None = None,
        sampling_method: str = "balanced",
        sampling_granularity: int = 1,
        partition_algo: str = "relaxed",
        num_canonical_nodes: int | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        shuffle_algo: str = "py1e",
        shuffle_seed: int = 9176,
        shuffle_block_size: int | None = None,
        batching_method: str = "random",
        allow_unsafe_types: bool = False,
        replication: int | None = None,
        stream_name: str = "stream",
        stream_config: dict[str, Any] | None = None,
    ) -> None:
        if bool(streams) == (bool(remote) or bool(local)):
            raise ConfigError("give either streams=, or remote= and local=")
        if stream_name != "stream":
            raise ConfigError(
                f"stream_name={stream_name!r}: classes of streams cannot be registered here; pass streams=[Stream(…)]"
            )
        self._asked = Asked(
            epoch_size=epoch_size,
            predownload=predownload,
            cache_limit=cache_limit,
            sampling_method=sampling_method,
            sampling_granularity=sampling_granularity,
            partition_algo=partition_algo,
            num_canonical_nodes=num_canonical_nodes,
            batch_size=batch_size,
            shuffle=shuffle,
            shuffle_algo=shuffle_algo,
            shuffle_seed=shuffle_seed,
            shuffle_block_size=shuffle_block_size,
            batching_method=batching_method,
            allow_unsafe_types=allow_unsafe_types,
            replication=replication,
        )
        default = {"split": split, "download_retry": download_retry, "download_timeout": download_timeout}
        default |= {"validate_hash": validate_hash, "keep_zip": keep_zip}
        own = Stream(**{**default, "remote": remote, "local": local, **(stream_config or {})})
        self.streams = [with_defaults(stream, default) for stream in streams] if streams else [own]
        """The streams, with what the dataset says for all of them, and what their shares come to."""
        self._take_over()

    def _take_over(self) -> None:
        """Open the streams."""
        asked, streams = self._asked, self.streams
        check_shares(streams, asked.num_samples)
        is_sampled = asked.num_samples is not None or any(stream.share for stream in streams)
        asked.check_sampling(is_sampled=is_sampled)
        self._has_own_get_item = type(self).get_item is not StreamingDataset.get_item
        self._makes_items = self._has_own_get_item or type(self).__getitem__ is not StreamingDataset.__getitem__
        makers = [MakeItem(self, methods_of(StreamingDataset)) for _ in streams]
        world = read_world().replicated(asked.replication or 1)
        self._opener = Opener(
            asked=asked.in_whole_batches(world) if len(streams) > 1 or streams[0].share else asked,
            streams=streams,
            places=[place_of(stream.remote, stream.local, stream.split) for stream in streams],
            transforms=[[one] for one in makers] if self._makes_items else [[] for _ in streams],
        )
        self._initial_nodes = world.num_nodes
        self._seed = asked.shuffle_seed if asked.shuffle else None
        self._batches: BatchOptions | None = None
        self._resumed: _Resumed | None = None
        inner, self._shape = self._opener.open(self._seed, asked.canonical_nodes(world))
        self._stand_on(inner)
        self.predownload, self.cache_limit = asked.predownload, asked.cache_limit
        self.shuffle, self.batch_size, self.replication = asked.shuffle, asked.batch_size, asked.replication
        self.shuffle_algo, self.shuffle_block_size = asked.shuffle_algo, asked.shuffle_block_size
        self.batching_method = asked.batching_method
        self.sampling_method, self.sampling_granularity = asked.sampling_method, asked.sampling_granularity
        self.partition_algo, self.allow_unsafe_types = asked.partition_algo, asked.allow_unsafe_types
        self._count(inner)
        for one, first in zip(makers, accumulate([0, *self.samples_per_stream.tolist()]), strict=False):
            one.first = first

    def _stand_on(self, inner: Inner) -> None:
        """Make a dataset of ours the one behind this."""
        self._inner = inner
        self._pipeline, self._schedule = inner._pipeline, inner._schedule

    def _count(self, inner: Inner) -> None:
        """Note the numbers of shards and samples, under MosaicML's names."""
        shards = shards_of(inner)
        self.shards = [
            ShardInfo(basename=shard.raw.basename, samples=shard.samples, size=shard.raw.bytes)
            for found in shards
            for shard in found
        ]
        self.num_streams, self.num_shards = len(shards), len(self.shards)
        self.samples_per_shard: Int64Array = np.array([shard.samples for shard in self.shards], np.int64)  # [num_shards]
        self.shards_per_stream: Int64Array = np.array([len(found) for found in shards], np.int64)  # [num_streams]
        self.stream_per_shard: Int64Array = np.repeat(np.arange(len(shards)), self.shards_per_stream)  # [num_shards]
        per_stream = [sum(shard.samples for shard in found) for found in shards]
        self.samples_per_stream: Int64Array = np.array(per_stream, np.int64)  # [num_streams]
        self.num_samples = sum(per_stream)
        note_shares(self.streams, per_stream, self._asked.num_samples)

    # -- samples by number --------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Samples of all streams, each once."""
        return self.num_samples

    def get_item(self, sample_id: int, retry: int = 7) -> Any:  # noqa: ARG002 - downloads have retries of their own
        """Return a sample by its number, a dict of the shard's columns.

        Args:
            sample_id: The number, not negative.
            retry: Accepted: a sample stays in the cache while it is read.

        Raises:
            IndexError: There is no such sample.
            SampleError, StorageError: It cannot be read.
        """
        if not self._makes_items:
            return without_added(self._inner[sample_id])
        found = offered(self, sample_id)
        if found is not None:
            return found
        with ReadsRows():
            return without_added(self._inner[sample_id])

    def __getitem__(self, at: Any) -> Any:
        """Return the sample of a number, negative ones from the end, or a list of those of several; see `Array`."""
        if type(at) is int and 0 <= at < self.num_samples:  # most are
            found = offered(self, at) if self._makes_items and not self._has_own_get_item else None
            return self.get_item(at) if found is None else found
        if isinstance(at, slice) and not self._makes_items and isinstance(self._inner, OurDataset):
            return list(map(without_added, self._inner.__getitems__(range(*at.indices(self.size)))))  # acquired together
        return super().__getitem__(at)

    # -- as a stream --------------------------------------------------------------------------------------------------

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Any]:  # an item is what a subclass makes
            """Return the items of the next epoch."""

    def _iterate(
        self, begun: tuple[ShareProgress, Iterator[EpochShare]] | None, *, are_whole: bool, has_loader: bool
    ) -> Iterator[Any]:
        item: Callable[[Any], Any] = item_of if self._makes_items else without_added
        return map(item, super()._iterate(begun, are_whole=are_whole, has_loader=has_loader))

    def _check_begun(self) -> None:
        self._inner._check_begun()

    def _check_plain_worker(self) -> None:
        self._inner._check_plain_worker()

    def _prepare(self) -> None:
        prepare(self._inner)

    def expect_batches(self, options: BatchOptions) -> None:
        """Learn how a loader takes samples."""
        self._inner.expect_batches(options)
        self._batches = options

    def __len__(self) -> int:
        """Return the samples of this rank in an epoch."""
        num_ranks = self.world.world_size
        return (self.epoch_size + num_ranks - 1) // num_ranks

    @property
    def shuffle_seed(self) -> int:
        """The seed, also where nothing is shuffled."""
        return self._asked.shuffle_seed if self._seed is None else self._seed

    @property
    def num_canonical_nodes(self) -> int:
        """Fixed parts of the data that stay on their nodes."""
        return self._schedule.identity.num_canonical_nodes

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return self.epoch

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def reweight(self, weights: Any, at_step: int | None = None, at_epoch: int | None = None) -> None:
        """Change what comes how often; see `sqlstream.StreamingDataset.reweight`."""
        self._inner.reweight(weights, at_step, at_epoch)

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]  # theirs
        """Return the state of the run: the keys of MosaicML's, and what ours compares when it is loaded.

        Args:
            num_samples: Samples that the whole job has taken.
            from_beginning: They are counted from the start of the epoch; False: from where the run went on within it.
        """
        state = self.state_after(num_samples)
        resumed = self._resumed
        if not from_beginning and resumed is not None and state["epoch"] == resumed.epoch:
            return self.state_after(resumed.sample_in_epoch + num_samples)
        return state

    def state_after(self, num_samples: int | None) -> dict[str, Any]:
        """Return the state after so many samples of the epoch; None: as far as this process, or its loader, knows."""
        return {**self._inner.state_dict(num_samples), _NODES: self._initial_nodes}

    def load_state_dict(self, obj: Mapping[str, Any]) -> None:  # type: ignore[override]  # MosaicML's signature
        """Go on where a state says; call it before iteration starts, on every rank with the same state.

        Seed and canonical nodes are those of the state. Of MosaicML's own states epoch and samples are taken.

        Raises:
            StateError: It is the state of other shards, or of another global batch size.
        """
        state = {key: value for key, value in obj.items() if key != _NODES}
        if state.get("epoch") == -1:  # theirs, of a run that had not begun: whatever samples it has, theirs begins with epoch 0
            state |= {"epoch": 0, "sample_in_epoch": 0}
        if "version" in state:
            self._load(state)
        else:
            if state.get("sample_in_epoch"):  # at the start of an epoch nothing comes twice
                logger.warning(
                    "the state is of MosaicML Streaming: the run goes on after %s samples of epoch %s, in another order, so "
                    "some samples of that epoch come twice and some not at all; later epochs are whole",
                    *(state.get("sample_in_epoch"), state.get("epoch")),
                )
            known: dict[str, object] = {key: state[key] for key in ("epoch", "sample_in_epoch") if key in state}
            self._inner.load_state_dict(known, strict=False)
        self._initial_nodes = obj.get(_NODES, self._initial_nodes)
        self._resumed = _Resumed(int(state["epoch"]), int(state["sample_in_epoch"]))

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load a state of ours, and take over its seed and canonical nodes; one that is refused leaves all as it was."""
        num_nodes, seed = state.get("num_canonical_nodes", self.num_canonical_nodes), state.get("shuffle_seed")
        if "mixture" in state:
            seed = self._seed  # a mixture without a seed has one in its state, of which only the mixture knows
        if (seed is None) != (self._seed is None) or (num_nodes, seed) == (self.num_canonical_nodes, self._seed):
            self._inner.load_state_dict(state)
            return
        known = self._shape if num_nodes == self.num_canonical_nodes else None
        inner, shape = self._opener.open(seed, num_nodes, known)
        try:
            inner._schedule.num_renewed = self._schedule.num_renewed + 1  # workers that run have the order of before
            if self._batches is not None:
                inner.expect_batches(self._batches)
            inner.load_state_dict(state)
        except BaseException:
            inner.close()
            raise
        self._inner.close()
        self._seed, self._shape = seed, shape
        self._stand_on(inner)

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def cache_usage(self) -> int:
        """Bytes in the caches of all streams."""
        return sum(cache.statistics().used_bytes for cache in self._pipeline.engines.caches)

    def close(self) -> None:
        """Give all pins back, end helper process and threads, close all files. Also at the end of a `with` block."""
        self._inner.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.streams))}; {self.num_samples} samples)"
