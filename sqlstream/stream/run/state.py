"""The state of a run: a small JSON-able dict that is checked when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from sqlstream.errors import StateError
from sqlstream.index.types.content import Content
from sqlstream.order import PERMUTATION_VERSION
from sqlstream.stream.run.mixture_state import MixturePart
from sqlstream.stream.run.partial_steps import DeliveredAhead, TakenAlone, check_counts, check_is_state

STATE_VERSION = 6
"""The newest version that is read. What is written has the first version that has all its keys, which older programs read."""
CHANGE_KEYS = frozenset(("epoch", "sample", "expression", "fingerprint"))
"""Keys of a change of weights in a state."""
COMPARED = (
    *("shuffle_seed", "permutation_version", "epoch_size", "first_weights"),
    *("num_canonical_nodes", "blocks", "global_batch_size"),
)
"""Fields that must be equal for the rest of the run to be the same, beside the rows and what selects them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What decides which samples of a dataset come when, beside the size of a batch and changes of weights."""

    fingerprint: str
    """Name of the index, with its filter: the same rows at another place have another one."""
    shuffle_seed: int | None
    num_canonical_nodes: int
    blocks: str | None
    """Fingerprint of the layout of a block shuffle."""
    epoch_size: int
    """Positions of an epoch; of a lazy index with a filter, rows that are filtered."""
    content: Content | None = None
    """The rows and what selects them, wherever they lie, since version 3; None: an earlier version built the index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """What the state of a mixture says of one stream, beside its name."""

    identity: RunIdentity
    drawn: int
    """Samples that the stream has given to the whole job, over all its epochs."""
    weights: tuple[Mapping[str, object], ...] = ()
    """Changes of its rows' weights."""

    def to_dict(self) -> dict[str, object]:
        """Return it as JSON would give it back."""
        identity = {field.name: getattr(self.identity, field.name) for field in fields(RunIdentity)}
        return _plain(identity) | {"drawn": self.drawn, "weights": list(self.weights)}

    @classmethod
    def from_dict(cls, name: str, part: object) -> StreamPart:
        """Return the part in a dict.

        Raises:
            StateError: It has other keys, or values that are no counts.
        """
        names = {field.name for field in fields(RunIdentity)} - {"content"}
        if not isinstance(part, Mapping) or set(part) - {"content"} != names | {"drawn", "weights"}:
            raise StateError(
                f"stream {name!r} in the state is {part!r}, no dict of {', '.join(sorted(names | {'drawn', 'weights'}))}"
            )
        check_counts(f"stream {name!r} of the state", ("drawn", "epoch_size", "num_canonical_nodes"), part)
        own = {key: value for key, value in part.items() if key in names}
        identity = RunIdentity(**own, content=_content(part.get("content"), f"stream {name!r} in the state"))
        return cls(identity=identity, drawn=part["drawn"], weights=_checked_weights(part["weights"]))

    def check(self, name: str, current: StreamPart) -> None:
        """Raise StateError if this is a stream of another dataset, seed or order than `current`."""
        _check_rows(self.identity, current.identity, name)
        for field in fields(RunIdentity):
            if field.name in ("fingerprint", "content"):
                continue
            theirs, ours = getattr(self.identity, field.name), getattr(current.identity, field.name)
            if theirs != ours:
                raise StateError(
                    f"the state has {field.name}={theirs!r} of stream {name!r}, this run {ours!r}: resume with the dataset, "
                    "query and seed that the state came from, or load it with strict=False"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Epoch and samples consumed, and the order in which they were counted.

    `epoch` and `sample_in_epoch` are the keys of `sds`: a state of `sds` loads, without the checks that need the others.
    """

    epoch: int
    sample_in_epoch: int
    """Samples of the epoch that the whole job has taken."""
    fingerprint: str | None = None
    """Name of the index, with its filter."""
    content: Content | None = None
    """The rows and what selects them, since version 3; None: an earlier version built the index."""
    shuffle_seed: int | None = None
    global_batch_size: int | None = None
    """Samples of a step of the whole job; None: the dataset did not know it."""
    num_canonical_nodes: int = 1
    blocks: str | None = None
    """Fingerprint of the layout of a block shuffle."""
    epoch_size: int | None = None
    """Positions of an epoch."""
    weights: tuple[Mapping[str, object], ...] = ()
    """Changes of the rows' weights: epoch and sample from which on each holds, its expression and fingerprint."""
    share: TakenAlone | None = None
    """Set by a process within a step, or by one that knows only its own share (a worker of torchdata's loader)."""
    beyond: DeliveredAhead | None = None
    """Set where rows give no sample, or several: what this rank has delivered behind `sample_in_epoch`."""
    streams: Mapping[str, StreamPart] | None = None
    """The streams of a mixture by name, since version 2; None: a single dataset."""
    mixture: MixturePart | None = None
    """How they are mixed, since version 4, and since 6 at which step other streams came; None: a single dataset."""
    rank_multiple: int | None = None
    """What the sizes of batches are multiples of, since version 5: the ranks on which a run with a budget of tokens began."""
    permutation_version: int = PERMUTATION_VERSION

    @property
    def version(self) -> int:
        """The first version that has all keys of this state."""
        if self.mixture is not None and self.mixture.counts_steps:
            return 6
        if self.rank_multiple is not None:
            return 5
        if self.mixture is not None:
            return 4
        parts = [] if self.streams is None else [part.identity.content for part in self.streams.values()]
        if any(content is not None for content in (self.content, *parts)):
            return 3
        return 1 if self.streams is None else 2

    @property
    def first_weights(self) -> object:
        """Fingerprint of the weights that the dataset was made with; None: without weights."""
        return self._weights_at_start[0]

    @property
    def _weights_at_start(self) -> list[object]:
        """Fingerprints of the weights at the run's first sample: those that the dataset was made with, and what replaced them.

        Earlier versions kept the last of them alone.
        """
        return [change["fingerprint"] for change in self.weights if (change["epoch"], change["sample"]) == (0, 0)] or [None]

    def to_dict(self) -> dict[str, object]:
        """Return it as a plain dict."""
        whole = _plain({field.name: getattr(self, field.name) for field in fields(self)})
        whole |= {"version": self.version, "weights": list(self.weights)}
        whole["share"] = None if self.share is None else asdict(self.share)
        whole["beyond"] = None if self.beyond is None else self.beyond.to_dict()
        if self.streams is None:
            del whole["streams"]
        else:
            whole["streams"] = {name: part.to_dict() for name, part in self.streams.items()}
        if self.mixture is None:
            del whole["mixture"]
        else:
            whole["mixture"] = self.mixture.to_dict()
        if self.rank_multiple is None:
            del whole["rank_multiple"]
        return whole

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> StreamState:
        """Return the state in a dict.

        Raises:
            StateError: Keys are missing or unknown, counts are not counts, or a newer sqlstream wrote it.
        """
        check_is_state(state)
        version = state.get("version", 1)
        if not isinstance(version, int) or version > STATE_VERSION:
            raise StateError(f"the state has version {version!r}, this sqlstream knows {STATE_VERSION}: upgrade sqlstream")
        later = {"streams": 2, "content": 3, "mixture": 4, "rank_multiple": 5}
        known = {"version", *(field.name for field in fields(cls))} - {name for name, first in later.items() if version < first}
        unknown = sorted(set(state) - known)
        missing = sorted({"epoch", "sample_in_epoch"} - set(state))
        if "multi_stream" in state:
            raise StateError("the state is of a MultiStreamDataLoader, whose streams have batches of their own: load it there")
        if unknown or missing:
            raise StateError(f"not a state of this dataset: missing keys {missing}, unknown keys {unknown}")
        counts = ("epoch", "sample_in_epoch", *(("rank_multiple",) if state.get("rank_multiple") is not None else ()))
        check_counts("the state", counts, state)
        share, beyond, streams, mixture = (state.get(name) for name in ("share", "beyond", "streams", "mixture"))
        if streams is not None and not isinstance(streams, Mapping):
            raise StateError(f"streams={streams!r} in the state is not a dict of streams by name")
        parts = {
            "content": _content(state.get("content"), "the state"),
            "share": None if share is None else TakenAlone.from_dict(share),
            "beyond": None if beyond is None else DeliveredAhead.from_dict(beyond),
            "weights": _checked_weights(state.get("weights", ())),
            "mixture": None if mixture is None else MixturePart.from_dict(mixture),
            "streams": None if streams is None else {name: StreamPart.from_dict(name, part) for name, part in streams.items()},
        }
        return cls(**{**{name: state[name] for name in set(state) - {"version"}}, **parts})  # type: ignore[arg-type]  # checked above

    def check(self, current: StreamState) -> None:
        """Raise StateError if this state belongs to another dataset, seed, batch or order than `current`."""
        if self.streams is not None or current.streams is not None:
            self._check_streams(current)
        elif self.fingerprint is None:
            return  # a state of sds, which has nothing to compare
        else:
            _check_rows(self, current)
        for name in COMPARED:
            theirs, ours = getattr(self, name), getattr(current, name)
            if name == "global_batch_size" and (theirs is None or ours is None):
                continue  # a loader sets it later, and the partition then checks the position
            if name == "first_weights" and set(self._weights_at_start) & set(current._weights_at_start):
                continue
            if theirs != ours:
                raise StateError(
                    f"the state has {name}={theirs!r}, this dataset {ours!r}: resume with the dataset, query, weights, seed "
                    "and global batch size (batch size x ranks) that the state came from, or load it with strict=False"
                )

    def _check_streams(self, current: StreamState) -> None:
        theirs, ours = ("a single dataset" if of is None else f"streams {sorted(of)}" for of in (self.streams, current.streams))
        if theirs != ours:
            raise StateError(f"the state is of {theirs}, this run has {ours}: resume with what the state came from")
        for name, part in (self.streams or {}).items():
            part.check(name, (current.streams or {})[name])


def _check_rows(theirs: StreamState | RunIdentity, ours: StreamState | RunIdentity, stream: str = "") -> None:
    """Raise StateError if a state is of other rows than ours, or of rows that are selected otherwise.

    Args:
        theirs: What the state says.
        ours: What this run says.
        stream: Name of the stream; empty: it is a single dataset.
    """
    of, run = (f" of stream {stream!r}", "this run") if stream else ("", "this dataset")
    cure = "or load it with strict=False, which takes epoch and samples alone"
    if theirs.content is None or ours.content is None:
        if theirs.fingerprint == ours.fingerprint:
            return
        sizes = (theirs.epoch_size, ours.epoch_size)
        size = "" if sizes[0] == sizes[1] else f" (epoch_size was {sizes[0]}, and is {sizes[1]})"
        raise StateError(
            f"the state has fingerprint={theirs.fingerprint!r}{of}, {run} {ours.fingerprint!r}{size}. An earlier version wrote "
            "the state, or built the index, and tells tables apart by place, size and time stamp: resume with the dataset and "
            f"the query that the state came from, at the same place, {cure}"
        )
    is_same_file = theirs.fingerprint == ours.fingerprint  # of one version, by an sqlstream that copies content and by one that
    if is_same_file and theirs.content.is_in_place != ours.content.is_in_place:  # leaves it in place
        return
    if listed := "; ".join(theirs.content.differences(ours.content)):
        raise StateError(
            f"the state is of other rows{of}. What differs: {listed}. Resume with the table, "
            f"the query and the max_size that the state came from, {cure}"
        )


def _plain(values: dict[str, object]) -> dict[str, object]:
    """Return the values of a state with content as JSON has it, and without one that is not known: it is new in version 3."""
    content = values.pop("content")
    return values if not isinstance(content, Content) else values | {"content": content.to_dict()}


def _content(found: object, where: str) -> Content | None:
    """Return content after JSON.

    Raises:
        StateError: It is none.
    """
    try:
        return None if found is None else Content.from_dict(found)
    except ValueError as error:
        raise StateError(f"content={found!r} of {where} is {error}") from None


def _checked_weights(weights: object) -> tuple[Mapping[str, object], ...]:
    """Return changes of weights.

    Raises:
        StateError: They are none.
    """
    if not isinstance(weights, list | tuple) or any(
        not isinstance(change, Mapping) or set(change) != CHANGE_KEYS for change in weights
    ):
        raise StateError(f"weights={weights!r} in the state is not a list of dicts with {', '.join(sorted(CHANGE_KEYS))}")
    for change in weights:
        check_counts("weights of the state", ("epoch", "sample"), change)
        if wrong := [name for name in ("expression", "fingerprint") if not isinstance(change[name], str | None)]:
            raise StateError(f"{wrong[0]}={change[wrong[0]]!r} in weights of the state is no text")
    return tuple(weights)
