"""How each stream of a MultiStreamDataLoader is batched and mixed, and what its batches say of themselves: the names of `sds`.

StreamOptions and Batch have the names and parameters of sds 7d9051e (`sds.dataloader`), in its order; what is added comes last.

Nothing here needs torch or a process group: the world size is given, or read as everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from sqlstream.config import check_at_least, flag_of, list_of, plain_number, word_of
from sqlstream.distributed import read_world
from sqlstream.errors import ConfigError
from sqlstream.order import whole_weights
from sqlstream.sample_types import DataSampleType


class MixingStrategy(StrEnum):
    """Which streams may meet in one step."""

    NO_MIXING = "no_mixing"
    """Each stream is a group: all ranks have the same stream in a step."""
    MIX_ALL = "mix_all"
    """All streams are one group: ranks have different streams in a step."""
    CUSTOM = "custom"
    """Each stream names its group, `mixing_group_id`."""


class BatchInfo(NamedTuple):
    """The batch sizes of a stream."""

    batch_size: int
    """Samples of all ranks in a step."""
    batch_gpu: int
    """Samples of a rank in a round."""
    num_accum_rounds: int
    """Rounds in a step."""


class Batch(dict[str, Any]):
    """A collated batch, and where it belongs: what a trainer needs to weigh its loss and to know when to step.

    Args:
        raw_batch: Fields of the batch.
        stream_name: Stream that gave it.
        num_accum_rounds_left: Rounds of the step after this one; the optimiser steps at 0.
        data_type: Main kind of data of the stream.
        step: Step of the run.
        weight: Factor of the loss that makes the mean over ranks the mean over samples: this batch's samples x ranks /
            samples of all ranks in the round. It is 1 where all ranks have batches of one size.
        num_samples_in_step: Samples of all ranks and rounds of the step.

    Raises:
        ConfigError: The batch is no dict.

    Example:
        >>> batch = Batch({"image": [1, 2]}, stream_name="av", num_accum_rounds_left=3)
        >>> batch["image"], batch.stream_name, batch.num_accum_rounds_left
        ([1, 2], 'av', 3)
    """

    def __init__(
        self,
        raw_batch: Mapping[str, Any],
        stream_name: str | None = None,
        num_accum_rounds_left: int = 0,
        data_type: DataSampleType | None = None,
        *,
        step: int | None = None,
        weight: float = 1.0,
        num_samples_in_step: int | None = None,
    ) -> None:
        if not isinstance(raw_batch, Mapping):
            raise ConfigError(
                f"a batch of stream {stream_name!r} is a {type(raw_batch).__name__}: give a collate_fn that returns a dict"
            )
        super().__init__(raw_batch)
        self.stream_name = stream_name
        self.num_accum_rounds_left = num_accum_rounds_left
        self.data_type = data_type
        self.step = step
        self.weight = weight
        self.num_samples_in_step = num_samples_in_step


@dataclass(frozen=True)
class StreamOptions:
    """How one stream is batched and mixed.

    Example:
        >>> options = StreamOptions.init_group([{"name": "av", "ratio": 3, "batch_gpu": 2}, {"ratio": 1, "batch_gpu": 8}])
        >>> [(stream.name, stream.ratio, stream.mixing_group_id) for stream in options]
        [('av', 0.75, 0), ('stream_001', 0.25, 1)]
    """

    name: str
    """Name, unique in the loader: states know streams by it."""
    ratio: float
    """Share of the steps, in proportion to those of the other streams; 0: not drawn."""
    mixing_group_id: int
    """Streams with the same number may meet in a step, on different ranks."""
    dataloader_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of its own for the DataLoader, such as `collate_fn`."""
    is_main: bool = False
    """The stream for visualisations and statistics."""
    batch_size: int | None = None
    """Samples of all ranks in a step."""
    batch_gpu: int | None = None
    """Largest number of samples of a rank in a round."""
    num_accum_rounds: int = 1
    """Rounds of gradient accumulation in a step."""
    is_batch_size_inferred: bool = field(default=False, compare=False)
    """`batch_size` was worked out from `batch_gpu` and the number of ranks; a state then says how many samples a step has."""

    @staticmethod
    def infer_batch_info(
        batch_size: int | None = None,
        batch_gpu: int | None = None,
        num_accum_rounds: int | None = None,
        *,
        world_size: int | None = None,
    ) -> BatchInfo:
        """Return all batch sizes from those that are given.

        Args:
            batch_size: Samples of all ranks in a step; the rounds follow from it, and `num_accum_rounds` is not read.
            batch_gpu: Samples of a rank in a round; None: all of them.
            num_accum_rounds: Rounds of a step, where `batch_size` is None; None: 1.
            world_size: Ranks; None: those of this job.

        Raises:
            ConfigError: Neither size is given, one is negative, or they do not divide.
        """
        ranks = read_world().world_size if world_size is None else world_size
        sizes = {"batch_size": batch_size, "batch_gpu": batch_gpu, "num_accum_rounds": num_accum_rounds}
        for name, value in sizes.items():
            if value is not None:
                check_at_least(name, value, 0)
        if batch_size is None:
            if batch_gpu is None:
                raise ConfigError("a stream has no batch size: give it batch_size= (of all ranks) or batch_gpu= (of one)")
            rounds = 1 if num_accum_rounds is None else int(num_accum_rounds)
            return BatchInfo(int(batch_gpu) * ranks * rounds, int(batch_gpu), rounds)
        _check_divides("batch_size", int(batch_size), ranks, f"world_size={ranks}")
        of_rank = int(batch_size) // ranks
        micro = of_rank if batch_gpu is None else int(batch_gpu)
        if of_rank and not micro:
            raise ConfigError(f"batch_size={batch_size} with batch_gpu=0: give batch_gpu=1 or more, or batch_size=0")
        if micro:
            _check_divides("batch_size", int(batch_size), ranks * micro, f"world_size={ranks} x batch_gpu={micro}")
        return BatchInfo(int(batch_size), micro, of_rank // micro if micro else 0)

    @staticmethod
    def init_group(
        raw_stream_configs: Sequence[Mapping[str, Any]], drop_unused: bool = False, mixing_strategy: str = "no_mixing"
    ) -> list[StreamOptions]:
        """Return the options of streams that belong together: ratios add up to 1, names and batch sizes are filled in.

        Args:
            raw_stream_configs: For each stream some of the fields of StreamOptions; what else is there is not read.
            drop_unused: Leave out streams of ratio 0.
            mixing_strategy: `no_mixing`, `mix_all`, or `custom` by `mixing_group_id`.

        Raises:
            ConfigError: Ratios for some streams only, or that are none; names twice; groups that contradict the strategy;
                batch sizes that do not divide.
        """
        strategy = word_of("mixing_strategy", mixing_strategy, MixingStrategy)
        configs = _checked_configs(raw_stream_configs)
        groups, ratios = _groups(configs, strategy), _ratios(configs)
        names = [config.get("name") or f"stream_{index:03d}" for index, config in enumerate(configs)]
        check_names(names)
        options = []
        for name, ratio, group, config in zip(names, ratios, groups, configs, strict=True):
            sizes = {key: config.get(key) for key in BatchInfo._fields}
            try:
                info = StreamOptions.infer_batch_info(**sizes)
            except ConfigError as error:
                raise ConfigError(f"stream {name!r}: {error}") from error
            options.append(
                StreamOptions(
                    name=name,
                    ratio=ratio,
                    mixing_group_id=group,
                    dataloader_kwargs=dict(config.get("dataloader_kwargs") or {}),
                    is_main=flag_of("is_main", config.get("is_main", False)),
                    is_batch_size_inferred=sizes["batch_size"] is None,
                    **info._asdict(),
                )
            )
        return [stream for stream in options if stream.ratio > 0] if drop_unused else options

    def inferred(self, world_size: int) -> StreamOptions:
        """Return the options with all batch sizes, for a number of ranks.

        Raises:
            ConfigError: No batch size is given, sizes do not divide, or `dataloader_kwargs` say another one.
        """
        is_inferred = self.batch_size is None or self.is_batch_size_inferred
        given = None if is_inferred else self.batch_size
        try:
            info = self.infer_batch_info(given, self.batch_gpu, self.num_accum_rounds, world_size=world_size)
        except ConfigError as error:
            raise ConfigError(f"stream {self.name!r}: {error}") from error
        other = self.dataloader_kwargs.get("batch_size", info.batch_gpu)
        if other != info.batch_gpu:
            raise ConfigError(
                f"stream {self.name!r}: dataloader_kwargs has batch_size={other}, but batch_gpu={info.batch_gpu}: leave it out"
            )
        return replace(self, is_batch_size_inferred=is_inferred, **info._asdict())


def _checked_configs(given: object) -> list[Mapping[str, Any]]:
    """Return configs of streams as a list.

    Raises:
        ConfigError: They are no list of dicts, or there is none; or what one has for its DataLoader is no dict.
    """
    configs = [given] if isinstance(given, Mapping) else list_of("stream configs", given, "give one of dicts")
    if not configs:
        raise ConfigError("stream configs are empty: give at least one")
    for config in configs:
        if config is given or not isinstance(config, Mapping):
            raise ConfigError(f"stream configs={given!r} are no list of dicts: give [{{'name': 'web', 'batch_gpu': 2}}, …]")
        if not isinstance(own := config.get("dataloader_kwargs"), Mapping | None):
            raise ConfigError(f"dataloader_kwargs={own!r} are no dict: give arguments of the DataLoader by name")
    return configs


def check_names(names: Sequence[str]) -> None:
    """Raise ConfigError if a name is no text, or occurs twice."""
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise ConfigError(f"a stream has the name {wrong[0]!r}, which is no text: states know streams by name")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"stream names {twice} occur twice: states know streams by name, give each its own")


def group_indices(streams: Sequence[StreamOptions]) -> tuple[int, ...]:
    """Return for each stream the index of its mixing group, in the order in which groups first come."""
    indices: dict[int, int] = {}
    return tuple(indices.setdefault(stream.mixing_group_id, len(indices)) for stream in streams)


def main_stream_index(streams: Sequence[StreamOptions]) -> int:
    """Return the index of the first drawn stream that `is_main`, else of the first with the largest ratio."""
    drawn = [index for index, stream in enumerate(streams) if stream.ratio > 0]
    main = [index for index in drawn if streams[index].is_main]
    return main[0] if main else max(drawn, key=lambda index: (streams[index].ratio, -index))


def _check_divides(name: str, value: int, unit: int, what: str) -> None:
    """Raise ConfigError unless a batch size is a multiple of `unit`."""
    if value % unit:
        below = value // unit * unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        raise ConfigError(f"{name}={value} is not divisible by {what}: give {name}={nearest}")


def _groups(configs: Sequence[Mapping[str, Any]], strategy: MixingStrategy) -> list[int]:
    """Return the mixing group of each stream."""
    given = [config.get("mixing_group_id") for config in configs]
    has_any, num_different = any(group is not None for group in given), len(set(given))
    if strategy is MixingStrategy.CUSTOM:
        if None in given:
            raise ConfigError(f"mixing_group_id={given} with mixing_strategy='custom': give one to every stream")
        groups = [plain_number(group) for group in given]
        if wrong := [group for group in groups if not isinstance(group, int)]:
            raise ConfigError(f"mixing_group_id={wrong[0]!r} is no whole number: give streams that may meet the same one")
        return groups
    if has_any and num_different != (len(given) if strategy is MixingStrategy.NO_MIXING else 1):
        raise ConfigError(
            f"mixing_group_id={given} contradicts mixing_strategy='{strategy}': leave it out, or give mixing_strategy='custom'"
        )
    return list(range(len(given))) if strategy is MixingStrategy.NO_MIXING else [0] * len(given)


def _ratios(configs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the ratio of each stream, as parts of 1; equal ones where none is given."""
    given = [config.get("ratio") for config in configs]
    ratios = [ratio for ratio in given if ratio is not None]
    if not ratios:
        return [1 / len(given)] * len(given)
    if len(ratios) < len(given):
        raise ConfigError(f"ratio={given}: give every stream a ratio, or none of them")
    try:
        whole_weights(ratios)
    except ConfigError as error:
        raise ConfigError(f"ratio={given}: {error}") from None
    total = sum(ratios)
    return [float(ratio / total) for ratio in ratios]
