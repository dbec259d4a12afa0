"""The streams of a mixture: what a user gives for each, the dataset that it is, and what is checked of them together."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, TypeAlias

from sqlstream.config import list_of
from sqlstream.errors import ConfigError, EmptySelectionError
from sqlstream.order import is_counted
from sqlstream.order.streams.whole_weights import Number
from sqlstream.stream.dataset import StreamingDataset
from sqlstream.stream.iterated import IteratedDataset
from sqlstream.stream.mixture.mixture_plan import StreamShare
from sqlstream.transforms.stream_name import STREAM


class Stream:
    """A dataset of a mixture, opened with it; for scripts that name sources and their shares.

    Args:
        src: See `StreamingDataset`.
        dst: See `StreamingDataset`; None: the directory of the mixture, or the user's cache.
        name: Name in the mixture; None: that of the dataset, the last three parts of `src`.
        weight: The same as `proportion`.
        proportion: Share of the samples; give it to all streams, or to none.
        repeat: How often each row comes in an epoch of the mixture: 0.5 is every second row.
        choose: Samples in an epoch of the mixture.
        options: Further parameters of `StreamingDataset`; `shuffle_seed` left out: that of the mixture.

    Raises:
        ConfigError: `weight` and `proportion` are both given.
    """

    def __init__(
        self,
        src: Any,
        dst: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        weight: Number | None = None,
        proportion: Number | None = None,
        repeat: Number | None = None,
        choose: int | None = None,
        **options: Any,
    ) -> None:
        if weight is not None and proportion is not None:
            raise ConfigError(f"weight={weight} and proportion={proportion} of {name or src!r} are the same: give one of them")
        self.src = src
        self.dst = dst
        self.name = name
        self.proportion = weight if proportion is None else proportion
        self.repeat = repeat
        self.choose = choose
        self.options = options

    def __repr__(self) -> str:
        """Return source and share."""
        share = {"proportion": self.proportion, "repeat": self.repeat, "choose": self.choose}
        given = "".join(f", {name}={value!r}" for name, value in share.items() if value is not None)
        return f"Stream({self.src!r}{given})"

    def open(self, dst: str | os.PathLike[str] | None, shuffle_seed: int | None) -> StreamingDataset:
        """Return the dataset, with what the mixture has for streams that say nothing."""
        options = {"shuffle_seed": shuffle_seed} | self.options
        return StreamingDataset(self.src, dst if self.dst is None else self.dst, name=self.name, **options)


class Streams(Protocol):
    """A mixture that is a stream of another one."""

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Its streams."""

    @property
    def shares_within(self) -> Sequence[Fraction]:
        """The share of each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Leaf:
    """A dataset of a mixture, and what its user asks for."""

    name: str
    group: str
    """The name that weights are given for: that of the mixture that it comes from, or its own."""
    within: Fraction
    """Its share in that mixture."""
    dataset: StreamingDataset
    proportion: Number | None = None
    repeat: Number | None = None
    choose: int | None = None

    def share(self, tokens: str | None) -> StreamShare:
        """Return what the weights are made of.

        Args:
            tokens: A column, or an SQL expression, with the tokens of a row; None: they are not asked for.
        """
        order, num_rows, num_tokens = self.dataset.schedule.steps.order, 0, 0
        if tokens is not None:
            if not isinstance(tokens, str):
                raise ConfigError(f"tokens={tokens!r} is no text: give a column, or SQL, with the tokens of a row")
            asked = self.dataset._pipeline.options.order
            if asked.weights is not None:
                raise ConfigError(
                    f"stream {self.name!r} has weights, which tokens={tokens!r} would have to weigh: leave one of them out, or "
                    "give weights= of the mixture by rows"
                )
            counted = self.dataset.query(f"SELECT count(*) AS num_rows, sum({tokens}) AS num_tokens FROM dataframe").to_pylist()
            num_rows, total = counted[0]["num_rows"], counted[0]["num_tokens"] or 0
            if not math.isfinite(total):
                raise ConfigError(
                    f"tokens={tokens!r} of stream {self.name!r} add up to {total}: leave such rows out, or mend them"
                )
            num_tokens = int(total)
            if asked.is_packed:
                num_rows = order.num_positions(0)  # what is drawn are packs
        return StreamShare(
            name=self.name,
            size=order.num_positions(0) if is_counted(order, 0) else None,
            proportion=self.proportion,
            repeat=self.repeat,
            choose=self.choose,
            num_rows=num_rows,
            num_tokens=num_tokens,
            group=self.group,
            within=self.within,
        )


StreamSpec: TypeAlias = "StreamingDataset | Stream | Streams"


def open_leaves(
    streams: Sequence[StreamSpec] | Mapping[str, StreamSpec],
    *,
    dst: str | os.PathLike[str] | None,
    shuffle_seed: int | None,
    opened: list[StreamingDataset],
) -> list[Leaf]:
    """Return the datasets of all streams, those of mixtures among them in their place.

    Args:
        streams: In their order, or by name.
        dst: Cache directory of streams that have none.
        shuffle_seed: Seed of streams that have none.
        opened: Takes the datasets that are opened here, also when a later one cannot be.

    Raises:
        ConfigError: There is none, one is no stream, or one has no row.
    """
    named = _named(streams)
    leaves: list[Leaf] = []
    for number, (name, stream) in enumerate(named):
        if isinstance(stream, Stream):
            dataset = _open(stream, name, dst, shuffle_seed)
            opened.append(dataset)
            own = name or stream.name or dataset.name
            leaves.append(_leaf(own, dataset, proportion=stream.proportion, repeat=stream.repeat, choose=stream.choose))
        elif isinstance(stream, StreamingDataset):
            leaves.append(_leaf(name or stream.name, stream))
        elif hasattr(stream, "leaves") and hasattr(stream, "shares_within"):
            group = name or f"mixture_{number}"
            for leaf, within in zip(stream.leaves, stream.shares_within, strict=True):
                leaves.append(Leaf(name=f"{group}/{leaf.name}", group=group, within=within, dataset=leaf.dataset))
        else:
            raise ConfigError(
                f"stream {name or number!r} is {stream!r}: give a StreamingDataset, a Stream or a MixedDataset of "
                "sqlstream itself"
            )
    _check_together(leaves)
    return leaves


def _named(streams: Sequence[StreamSpec] | Mapping[str, StreamSpec]) -> list[tuple[str | None, StreamSpec]]:
    """Return streams with the names of a dict, or None.

    Raises:
        ConfigError: They are no list and no dict, or there is none.
    """
    given: Any = streams
    cure = "give datasets, in a list or in a dict by name"
    if isinstance(given, IteratedDataset):  # it gives samples
        raise ConfigError(f"streams={given!r} is no list: {cure}")
    named: list[tuple[str | None, StreamSpec]]
    is_named = isinstance(given, Mapping)
    named = list(given.items()) if is_named else [(None, stream) for stream in list_of("streams", given, cure)]
    if not named:
        raise ConfigError(f"streams={given!r}: give at least one")
    if wrong := [name for name, _ in named if not isinstance(name, str | None)]:
        raise ConfigError(f"streams have the name {wrong[0]!r}, which is no text: states know streams by name")
    return named


def _open(stream: Stream, name: str | None, dst: str | os.PathLike[str] | None, shuffle_seed: int | None) -> StreamingDataset:
    try:
        return stream.open(dst, shuffle_seed)
    except EmptySelectionError as error:  # which of the streams it is, the query alone does not say
        raise ConfigError(f"stream {name or stream.name or stream.src!r} is empty: {error}, or leave the stream out") from error


def _leaf(name: str, dataset: StreamingDataset, **asked: Any) -> Leaf:
    return Leaf(name=name, group=name, within=Fraction(1), dataset=dataset, **asked)


def _check_together(leaves: Sequence[Leaf]) -> None:
    """Check what concerns the run, which is the mixture's.

    Raises:
        ConfigError: A stream says it for itself, or streams contradict each other.
    """
    numbers = {leaf.name: leaf.dataset.schedule.identity.num_canonical_nodes for leaf in leaves}
    if len(set(numbers.values())) > 1:
        raise ConfigError(f"num_canonical_nodes of the streams differ: {numbers}; give all of them the same")
    for leaf in leaves:
        if STREAM in leaf.dataset.columns:
            raise ConfigError(
                f"stream {leaf.name!r} has a column {STREAM!r}, in which samples of a mixture name their stream: give it "
                f"another name, such as sql_query='SELECT \"{STREAM}\" AS origin, … FROM dataframe'"
            )
        options = leaf.dataset._pipeline.options
        order = options.order
        for name, is_given in (
            ("world", order.layout.world is not None),
            ("replication", order.layout.replication != 1),
            ("batch_size", order.batch_size is not None),
            ("drop_last", order.drop_last),
            ("infinite_iteration", order.is_endless),
        ):
            if is_given:
                raise ConfigError(f"stream {leaf.name!r} has {name}, which concerns the whole run: give it to the MixedDataset")
        for name, is_given in (
            ("unaligned_worker_index", order.is_unaligned),
            ("refresh", options.refresh is not None),
            ("packs of rows without a length in SQL", order.window_packs is not None),
        ):
            if is_given:
                raise ConfigError(f"stream {leaf.name!r} has {name}, which a mixture cannot have: leave it out")
