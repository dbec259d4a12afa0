"""From what users say of a mixture to whole weights, and to the positions of an epoch. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TypeAlias

from sqlstream.config import check_at_least, list_of
from sqlstream.errors import ConfigError
from sqlstream.order import (
    ENDLESS,
    Mixture,
    TurnLayout,
    absolute_choose,
    all_exhausted,
    first_exhausted,
    ramp,
    relative_choose,
    temperature_weights,
    token_weights,
    whole_weights,
)
from sqlstream.order.streams.whole_weights import Number, exact
from sqlstream.stream.mixture.mixing import MixtureRule, NamedWeights, check_named

Scheduled: TypeAlias = tuple[int, NamedWeights]
"""A step, and the weights from it on."""
MixtureWeights: TypeAlias = NamedWeights | Sequence[Number] | Sequence[Scheduled]
"""By name; in the order of the streams; or by steps from which they hold."""


class Stop(StrEnum):
    """Where an epoch of a mixture ends."""

    NEVER = "never"
    """It goes on and on."""
    FIRST_EXHAUSTED = "first_exhausted"
    """Before a stream would have to begin again."""
    ALL_EXHAUSTED = "all_exhausted"
    """When each stream was drawn whole; others have begun again by then."""
    EACH_ONCE = "each_once"
    """When each was drawn whole, and none more: weights are the sizes."""


class MixtureUnit(StrEnum):
    """What one stream gives in one turn."""

    SAMPLE = "sample"
    """A sample."""
    BATCH = "batch"
    """A global batch."""
    RANK = "rank"
    """The batch of one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShare:
    """What is known and asked of one stream."""

    name: str
    size: int | None
    """Positions of an epoch of it alone; None: a filter hides it."""
    proportion: Number | None = None
    repeat: Number | None = None
    choose: int | None = None
    num_rows: int = 0
    """Rows whose tokens are counted; 0: no tokens are asked for."""
    num_tokens: int = 0
    group: str = ""
    """The name that weights are given for: its own, or that of the mixture that it is a stream of."""
    within: Fraction = Fraction(1)
    """Share of it in that mixture."""

    def __post_init__(self) -> None:
        """Weights are given for the stream itself, unless there is a group."""
        object.__setattr__(self, "group", self.group or self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMixture:
    """The weights of a run, and how many positions an epoch has."""

    names: tuple[str, ...]
    sizes: tuple[int | None, ...]
    weights: tuple[int, ...]
    """Whole weights from the start, in the order of the streams."""
    changes: tuple[tuple[int, tuple[int, ...]], ...]
    """Steps after the first, and whole weights from each on."""
    num_chosen: int | None
    """Positions of an epoch, as far as nothing else says it; None: they are not known."""
    epoch_size: int | None
    """What the user has given."""
    stop: Stop | None

    def layout(self, rule: MixtureRule, turn_size: int, num_parts: int) -> TurnLayout:
        """Return the positions of an epoch in turns; a size that was not given is rounded up to whole turns.

        Args:
            rule: The schedule.
            turn_size: Positions of a turn.
            num_parts: Canonical nodes.

        Raises:
            ConfigError: The epoch has no whole number of turns, or nothing says where it ends.
        """
        together = math.lcm(turn_size, num_parts)
        if self.epoch_size is not None:
            return TurnLayout(epoch_size=self.epoch_size, turn_size=turn_size, num_parts=num_parts)
        if self.stop is Stop.NEVER:
            size = ENDLESS
        elif self.stop in (Stop.FIRST_EXHAUSTED, Stop.ALL_EXHAUSTED):
            size = self._exhausted(rule, max(1, turn_size // num_parts), num_parts)
        elif self.num_chosen is None:
            hidden = [name for name, size in zip(self.names, self.sizes, strict=True) if size is None]
            raise ConfigError(
                f"how many rows the filter of {_list(hidden)} keeps is not known, so an epoch of the mixture has no end: give "
                "epoch_size= or stop='never', or build the index (no lazy_index_chunk_size)"
            )
        else:
            size = self.num_chosen
        return TurnLayout(epoch_size=-(-size // together) * together, turn_size=turn_size, num_parts=num_parts)

    def _exhausted(self, rule: MixtureRule, part_turn: int, num_parts: int) -> int:
        """Return the positions after which a stream, or each of them, was drawn whole."""
        if self.changes:
            raise ConfigError(f"stop={str(self.stop)!r} is not known with weights that change by step: give epoch_size=")
        if None in self.sizes:
            hidden = [name for name, size in zip(self.names, self.sizes, strict=True) if size is None]
            raise ConfigError(
                f"stop={str(self.stop)!r} needs to know how many rows the filter of {_list(hidden)} keeps: give epoch_size="
            )
        sizes = [size or 0 for size in self.sizes]
        mixture = Mixture(
            num_streams=len(sizes),
            changes=((0, self.weights),),
            schedule=rule.schedule,
            seed=rule.seed,
            block=rule.block,
        )
        if self.stop is Stop.FIRST_EXHAUSTED:
            num_turns = first_exhausted(mixture, [size // num_parts // part_turn for size in sizes])  # of the smallest part
        else:
            num_turns = all_exhausted(mixture, [-(-size // (num_parts * part_turn)) for size in sizes])  # of the largest one
        if not num_turns:
            raise ConfigError(f"stop={str(self.stop)!r} ends before the first turn of {part_turn * num_parts} samples")
        return num_turns * part_turn * num_parts


def plan_mixture(
    shares: Sequence[StreamShare],
    *,
    weights: MixtureWeights | None,
    temperature: float | None,
    by_tokens: bool,
    stop: Stop | None,
    epoch_size: int | None,
) -> PlannedMixture:
    """Return the weights of a mixture.

    Args:
        shares: The streams.
        weights: What the user has given for all of them.
        temperature: Weights are sizes to the power of 1 / temperature.
        by_tokens: Weights are shares of tokens.
        stop: Where an epoch ends.
        epoch_size: Positions of an epoch.

    Raises:
        ConfigError: What is given contradicts itself; the message names the streams.
    """
    _check(shares, weights=weights, temperature=temperature, stop=stop)
    if epoch_size is not None:
        epoch_size = check_at_least("epoch_size", epoch_size, 1)
    names, sizes = tuple(share.name for share in shares), tuple(share.size for share in shares)
    known_size = None if None in sizes else sum(size or 0 for size in sizes)
    changes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    num_chosen = known_size
    proportions = [share.proportion for share in shares]
    if weights is not None:
        (_, first), *later = scheduled(weights, _groups(shares))
        whole = whole_of(first, shares, by_tokens=by_tokens)
        changes = tuple((step, whole_of(named, shares, by_tokens=by_tokens)) for step, named in later)
    elif proportions[0] is not None:
        given = [proportion for proportion in proportions if proportion is not None]
        if by_tokens or (total := epoch_size or known_size) is None or stop is not None:
            groups = {share.group: number for share, number in zip(shares, given, strict=True)}
            whole = whole_of(groups, shares, by_tokens=by_tokens)
        else:
            whole = relative_choose([_times(share, number) for share, number in zip(shares, given, strict=True)], total)
    else:
        chosen = [_chosen(share) for share in shares]
        hidden = [share.name for share, number in zip(shares, chosen, strict=True) if number is None]
        if hidden:
            raise ConfigError(
                f"how many rows the filter of {_list(hidden)} keeps is not known, so they are no weights: give weights="
            )
        numbers = [number or 0 for number in chosen]
        num_chosen = sum(numbers)
        if temperature is not None:
            whole = temperature_weights(numbers, temperature)
        elif by_tokens:
            whole = token_weights([1] * len(shares), *_tokens(shares))
        else:
            whole = tuple(numbers)
    _check_sizes(shares, whole)
    return PlannedMixture(
        names=names, sizes=sizes, weights=whole, changes=changes, num_chosen=num_chosen, epoch_size=epoch_size, stop=stop
    )


def scheduled(weights: MixtureWeights, names: Sequence[str]) -> list[Scheduled]:
    """Return weights by the steps from which they hold, and by name.

    Raises:
        ConfigError: They are for other streams, or their steps do not begin at 0 and rise.
    """
    if isinstance(weights, Mapping):
        return [(0, _named(weights, names))]
    items = list_of("weights", weights, "give a weight for each stream, in a list or by name")
    if not all(isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[1], Mapping) for item in items):
        if len(items) != len(names):
            raise ConfigError(f"weights={items} are {len(items)} for {len(names)} streams ({_list(names)}): give one for each")
        return [(0, dict(zip(names, items, strict=True)))]
    steps: list[Scheduled] = [(step, _named(named, names)) for step, named in items]
    steps = [(check_at_least("step of weights", step, 0), named) for step, named in steps]
    starts = [step for step, _ in steps]
    if starts[:1] != [0] or sorted(set(starts)) != starts:
        raise ConfigError(f"weights by step at {starts}: the first must be at 0, and each later than the one before")
    return steps


def whole_of(weights: NamedWeights, shares: Sequence[StreamShare], *, by_tokens: bool) -> tuple[int, ...]:
    """Return whole weights of named ones, in the order of the streams.

    Raises:
        ConfigError: They are not weights of all streams.
    """
    named = _named(weights, _groups(shares))
    try:
        own = [_times(share, named[share.group]) for share in shares]
        return token_weights(own, *_tokens(shares)) if by_tokens else whole_weights(own)
    except ConfigError as error:
        raise ConfigError(f"weights of the streams {_list(list(named))}: {error}") from None


def weight_ramp(start: int, stop: int, first: NamedWeights, last: NamedWeights) -> list[Scheduled]:
    """Return weights by step that go from `first` to `last`, for `weights=`: a staircase of at most 64.

    Args:
        start: Step from which `first` holds.
        stop: Step from which `last` holds.
        first: Weights at the start, by name.
        last: Weights at the end, of the same streams.

    Example:
        >>> weight_ramp(0, 2, {"a": 1, "b": 1}, {"a": 3, "b": 1})
        [(0, {'a': 1, 'b': 1}), (1, {'a': 5, 'b': 3}), (2, {'a': 3, 'b': 1})]
    """
    check_named(first)
    names = list(first)
    later = _named(last, names)
    changes = ramp(start, stop, [first[name] for name in names], [later[name] for name in names])
    return [(step, dict(zip(names, weights, strict=True))) for step, weights in changes]


def _groups(shares: Sequence[StreamShare]) -> list[str]:
    """Return the names that weights are given for."""
    return list(dict.fromkeys(share.group for share in shares))


def _chosen(share: StreamShare) -> int | None:
    if share.choose is not None:
        return check_at_least(f"choose of stream {share.name!r}", share.choose, 0)
    return share.size if share.repeat is None or share.size is None else absolute_choose(share.repeat, share.size)


def _times(share: StreamShare, weight: Number) -> Number:
    """Return the weight of a stream of that of its group."""
    return weight if share.within == 1 else exact(f"weights[{share.group!r}]", weight) * share.within


def _tokens(shares: Sequence[StreamShare]) -> tuple[list[int], list[int]]:
    return [share.num_rows for share in shares], [share.num_tokens for share in shares]


def _named(weights: Mapping[str, Number], names: Sequence[str]) -> dict[str, Number]:
    check_named(weights)
    unknown, missing = [name for name in weights if name not in names], [name for name in names if name not in weights]
    if unknown or missing:
        raise ConfigError(
            f"weights for {_list(list(weights))}, but the streams are {_list(names)}: name each of them, with 0 for one that "
            "pauses"
        )
    return {name: weights[name] for name in names}


def _check(
    shares: Sequence[StreamShare], *, weights: MixtureWeights | None, temperature: float | None, stop: Stop | None
) -> None:
    names = [share.name for share in shares]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"streams named twice: {_list(twice)}; give each a name= of its own, or a dict of streams by name")
    relative = [share.name for share in shares if share.proportion is not None]
    absolute = [share.name for share in shares if share.repeat is not None or share.choose is not None]
    both = [share.name for share in shares if share.repeat is not None and share.choose is not None]
    others = [name for name in names if name not in relative]
    kinds = [*relative, *absolute]
    for is_wrong, problem in (
        (both, f"streams {_list(both)} have repeat and choose: give one of them"),
        (
            relative and absolute,
            f"streams {_list(relative)} have a proportion, {_list(absolute)} repeat or choose: give one kind",
        ),
        (relative and others, f"streams {_list(relative)} have a proportion, {_list(others)} have none: give it to all"),
        (weights is not None and kinds, f"weights= are given, and streams {_list(kinds)} say it, too: give one of them"),
        (
            temperature is not None and (weights is not None or relative),
            "temperature= makes the weights: leave out weights= and proportion=",
        ),
        (
            stop is Stop.EACH_ONCE and (weights is not None or kinds or temperature is not None),
            "stop='each_once' makes the weights, which are the sizes: leave out what else says it",
        ),
        (
            weights is None and not relative and any(share.group != share.name for share in shares),
            "a mixture within a mixture has no size: give weights=",
        ),
    ):
        if is_wrong:
            raise ConfigError(problem)


def _check_sizes(shares: Sequence[StreamShare], whole: Sequence[int]) -> None:
    if not any(whole):
        raise ConfigError(
            f"all weights are 0 (streams {_list([share.name for share in shares])}): give at least one more than 0"
        )
    empty = [share.name for share, weight in zip(shares, whole, strict=True) if weight and share.size == 0]
    if empty:
        raise ConfigError(f"streams {_list(empty)} have no row, but a weight above 0: check their sql_query or where")


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
