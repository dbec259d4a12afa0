"""What a user asks of a dataset in MosaicML's words, checked, and translated to ours."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlstream.compat.streaming.translation.numbers import number_abbrev_to_int
from sqlstream.config.checks import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.world import World

logger = logging.getLogger(__name__)

_CHOICES = {
    "sampling_method": ("balanced", "fixed"),
    "partition_algo": ("orig", "relaxed"),
    "shuffle_algo": ("py1s", "py2s", "py1br", "py1e", "naive"),
    "batching_method": ("random", "stratified", "per_stream", "device_per_stream"),
}
_UNITS = {"random": "sample", "stratified": "sample", "per_stream": "batch", "device_per_stream": "rank"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The parameters of a dataset beside its streams."""

    epoch_size: int | str | None
    predownload: int | None
    cache_limit: int | str | None
    sampling_method: str
    sampling_granularity: int
    partition_algo: str
    num_canonical_nodes: int | None
    batch_size: int | None
    shuffle: bool
    shuffle_algo: str
    shuffle_seed: int
    shuffle_block_size: int | None
    batching_method: str
    allow_unsafe_types: bool
    replication: int | None

    def __post_init__(self) -> None:
        """Check words and ranges."""
        for name, choices in _CHOICES.items():
            if (word := getattr(self, name)) not in choices:
                raise ConfigError(f"{name}={word!r} is unknown: give one of {', '.join(map(repr, choices))}")
        for name, least in (
            ("sampling_granularity", 1),
            ("shuffle_seed", 0),
            ("shuffle_block_size", 1),
            ("num_canonical_nodes", 1),
            ("batch_size", 1),
            ("replication", 1),
            ("predownload", 0),
        ):
            if (number := getattr(self, name)) is not None:
                check_at_least(name, number, least)
        size = None if not self.epoch_size else number_abbrev_to_int(self.epoch_size)
        if size is not None and size < 1:
            raise ConfigError(f"epoch_size={self.epoch_size!r} is no number of samples: give 1 or more, or None")
        object.__setattr__(self, "epoch_size", size)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch, as given."""
        assert not isinstance(self.epoch_size, str), "it is parsed"
        return self.epoch_size

    def in_whole_batches(self, world: World) -> Asked:
        """Return them with an epoch of as many whole batches as hold its samples, where one stream gives all of a batch."""
        if self.num_samples is None or self.batch_size is None or _UNITS[self.batching_method] == "sample":
            return self
        step_size = self.batch_size * world.world_size
        return replace(self, epoch_size=-(-self.num_samples // step_size) * step_size)

    def check_sampling(self, *, is_sampled: bool) -> None:
        """Check what becomes of samples that come more or less often than once.

        Args:
            is_sampled: Some do.

        Raises:
            ConfigError: The same ones are to be left out in every epoch.
        """
        if is_sampled and self.sampling_method == "fixed":
            raise ConfigError(
                "sampling_method='fixed' takes the same part of a stream in every epoch, which is a smaller data set: write "
                "one, or take some rows with sqlstream.StreamingDataset(…, where=…); or use 'balanced', in which all samples "
                "come equally often"
            )

    def canonical_nodes(self, world: World) -> int:
        """Return the fixed parts of the data: where it is not said, one a node; 1 where each rank has streams of its own."""
        if self.num_canonical_nodes is not None:
            return self.num_canonical_nodes
        return world.num_nodes if world.is_even and _UNITS[self.batching_method] != "rank" else 1

    def stream_options(self, seed: int | None, num_canonical_nodes: int, window: int | None) -> dict[str, Any]:
        """Return the parameters of `sqlstream.StreamingDataset` for each stream.

        Args:
            seed: Seed of the shuffle; None: no shuffle.
            num_canonical_nodes: Parts of the data that stay on their nodes.
            window: Shards whose samples are mixed; None: our default.
        """
        options: dict[str, Any] = {
            "shuffle_seed": seed,
            "num_canonical_nodes": num_canonical_nodes,
            "source_options": {"allow_pickle": self.allow_unsafe_types},
            "on_error": "raise",
        }
        if seed is not None and self.shuffle_algo == "naive":
            options["shuffle_block_size"] = None
        elif window is not None:
            options["shuffle_window"] = window
        return options

    @property
    def prefetch(self) -> int | None:
        """Samples that a worker plans ahead; None: ours."""
        return None if self.predownload is None else max(1, self.predownload)

    @property
    def run_options(self) -> dict[str, Any]:
        """The parameters that a dataset and a mixture have in common."""
        return {
            "epoch_size": self.num_samples,
            "batch_size": self.batch_size,
            "prefetch": self.prefetch,
            "replication": self.replication or 1,
        }

    def mixture_options(self, seed: int | None, num_turns: int | None) -> dict[str, Any]:
        """Return the parameters of `sqlstream.MixedDataset` that say whose turn it is.

        Args:
            seed: Seed of the shuffle; None: no shuffle.
            num_turns: Samples of an epoch in a canonical node, which are a block of turns, so that an epoch ends with the
                proportions; None: turns are spread evenly.
        """
        options: dict[str, Any] = {"unit": _UNITS[self.batching_method], "shuffle_seed": seed}
        if num_turns is None:
            return options
        return options | {"schedule": "consecutive" if seed is None else "random_order", "block": num_turns}

    def window_of(self, samples_per_shard: Sequence[int]) -> int | None:
        """Return how many shards have `shuffle_block_size` samples together; None: it is not given."""
        if self.shuffle_block_size is None or not self.shuffle:
            return None
        total = sum(samples_per_shard)
        return max(1, min(len(samples_per_shard), -(-self.shuffle_block_size * len(samples_per_shard) // max(1, total))))
