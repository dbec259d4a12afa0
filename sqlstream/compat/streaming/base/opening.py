"""Opens what is behind a dataset of MosaicML's: one dataset of ours, or a mixture."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlstream.compat.streaming.base.stream import Stream
from sqlstream.compat.streaming.translation.asked import Asked
from sqlstream.compat.streaming.translation.places import Place
from sqlstream.errors import ConfigError
from sqlstream.index.build.shards import ShardIndex
from sqlstream.index.sources.shards.mds_shard import MdsLayout
from sqlstream.sizes import parse_bytes
from sqlstream.storage.base.urls import is_remote
from sqlstream.storage.members.mds.shards import MdsShard
from sqlstream.stream import dataset as ours
from sqlstream.stream.mixed.dataset import MixedDataset
from sqlstream.stream.mixed.streams import Stream as MixedStream
from sqlstream.transforms.base import Transform

logger = logging.getLogger(__name__)

Inner = ours.StreamingDataset | MixedDataset
_LONGEST_BLOCK = 1 << 20
"""Turns that a mixture keeps in one block, at most."""
_LONGEST_SHUFFLE = 1 << 17
"""The same for a shuffle, of which each process keeps a table of 2 MiB. Beyond it streams take turns evenly."""
_TIMEOUT = 60.0
"""Seconds of silence that a download may have, here as there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedShape:
    """What is known once the streams are open with some number of canonical nodes, and decides their order."""

    window: int | None = None
    """Shards whose samples are mixed; None: our default."""
    num_turns: int | None = None
    """Samples of an epoch in a canonical node, whose streams are mixed at random, or follow one another; None: evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opener:
    """Opens the streams of a dataset, again with another seed or other canonical nodes where a state says so."""

    asked: Asked
    streams: Sequence[Stream]
    places: Sequence[Place]
    transforms: Sequence[Sequence[Transform]]
    """Those of each stream."""

    @property
    def is_mixed(self) -> bool:
        """Several streams, or one that does not come once."""
        return len(self.streams) > 1 or bool(self.streams[0].share)

    def open(self, seed: int | None, num_canonical_nodes: int, shape: OpenedShape | None = None) -> tuple[Inner, OpenedShape]:
        """Return the dataset, or the mixture, and what its order was made of.

        Args:
            seed: Seed of the shuffle; None: no shuffle.
            num_canonical_nodes: Parts of the data that stay on their nodes.
            shape: What an earlier opening with as many canonical nodes has found out; None: it is found out.

        Raises:
            ConfigError: The shards are not MosaicML's, hold pickles that are not allowed, or lack a hash.
        """
        if shape is not None:
            return self._open(seed, num_canonical_nodes, shape), shape
        inner = self._open(seed, num_canonical_nodes, OpenedShape())
        try:
            shards = shards_of(inner)
            for stream, place, found in zip(self.streams, self.places, shards, strict=True):
                self._check(stream, place, found)
            shape = OpenedShape(
                window=self.asked.window_of([shard.samples for found in shards for shard in found]),
                num_turns=self._turns(inner, num_canonical_nodes),
            )
        except BaseException:
            inner.close()
            raise
        if shape == OpenedShape():
            return inner, shape
        inner.close()
        return self._open(seed, num_canonical_nodes, shape), shape

    def _open(self, seed: int | None, num_canonical_nodes: int, shape: OpenedShape) -> Inner:
        asked, options = self.asked, self.asked.stream_options(seed, num_canonical_nodes, shape.window)
        limit, num_caches = parse_bytes(asked.cache_limit, "cache_limit"), len({place.dst for place in self.places})
        options["cache_limit"] = None if limit is None else limit // num_caches
        given = [
            options | self._options_of(stream, place, transforms)
            for stream, place, transforms in zip(self.streams, self.places, self.transforms, strict=True)
        ]
        if not self.is_mixed:
            (place,), (one,) = self.places, given
            return ours.StreamingDataset(place.src, place.dst, **one, **asked.run_options)
        streams = {
            f"stream_{number}": MixedStream(place.src, place.dst, **stream.share, **one)
            for number, (stream, place, one) in enumerate(zip(self.streams, self.places, given, strict=True))
        }
        return MixedDataset(streams, **asked.run_options, **asked.mixture_options(seed, shape.num_turns))

    def _options_of(self, stream: Stream, place: Place, transforms: Sequence[Transform]) -> dict[str, Any]:
        options: dict[str, Any] = {"transforms": transforms, "num_downloading_retries": stream.download_retry}
        timeout = stream.download_timeout
        waits = {} if timeout is None or timeout == _TIMEOUT else {"read_timeout": timeout}
        return options | {"storage_options": waits | place.storage_options}

    def _turns(self, inner: Inner, num_canonical_nodes: int) -> int | None:
        """Return the samples of an epoch in a canonical node, which has turns of its own; see `OpenedShape`."""
        if not self.is_mixed or self.asked.batching_method != "random":
            return None
        num_turns = inner.epoch_size // num_canonical_nodes
        if num_turns <= (_LONGEST_SHUFFLE if self.asked.shuffle else _LONGEST_BLOCK):
            return num_turns
        if not self.asked.shuffle:
            logger.warning(
                "%d samples of %d streams without a shuffle are mixed evenly: stream follows stream up to %d samples",
                *(inner.epoch_size, len(self.streams), num_canonical_nodes * _LONGEST_BLOCK),
            )
        return None

    def _check(self, stream: Stream, place: Place, shards: Sequence[MdsShard]) -> None:
        """Check what the index of a stream says against what was asked for."""
        for columns in {shard.columns for shard in shards}:
            if not self.asked.allow_unsafe_types and (pickled := [c.name for c in columns if c.encoding == "pkl"]):
                raise ConfigError(
                    f"the columns {pickled} of {place.src} are pickles, which may run any code: pass allow_unsafe_types=True "
                    "if you trust who wrote them"
                )
        if stream.validate_hash is None:
            return
        for shard in shards:
            file = shard.zip or shard.raw
            if stream.validate_hash not in file.hashes:
                there = ", ".join(map(repr, sorted(file.hashes))) or "none"
                raise ConfigError(
                    f"validate_hash={stream.validate_hash!r} is no hash of {file.basename} in {place.src}: there are {there}; "
                    "give one of them, or None"
                )
        if is_remote(place.src) and any(shard.zip is None for shard in shards):
            logger.warning(
                "validate_hash=%r of %s: hashes of shards that are not compressed are not compared, only sizes and versions",
                *(stream.validate_hash, place.src),
            )


def shards_of(inner: Inner) -> list[list[MdsShard]]:
    """Return the shards of each stream, as their indexes have them.

    Raises:
        ConfigError: They are not of MosaicML Streaming.
    """
    datasets = list(inner.streams.values()) if isinstance(inner, MixedDataset) else [inner]
    return [_shards_of(dataset) for dataset in datasets]


def _shards_of(dataset: ours.StreamingDataset) -> list[MdsShard]:
    index, found = dataset.index, []
    for number in range(len(index.shard_sizes()) if isinstance(index, ShardIndex) else 0):
        layout = index.shard(number).layout if isinstance(index, ShardIndex) else None
        if isinstance(layout, MdsLayout):
            found.append(layout.shard)
    if not found:
        raise ConfigError(f"{index.src} has no shards of MosaicML Streaming: read it with sqlstream.StreamingDataset")
    return found
