"""The state of a run: a small JSON-able dict that is checked when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from sqlstream.errors import StateError
from sqlstream.order import PERMUTATION_VERSION
from sqlstream.stream.run.partial_steps import DeliveredAhead, TakenAlone, check_counts

STATE_VERSION = 2
"""The newest version that is read. What is written has the first version that has all its keys, which older programs read."""
CHANGE_KEYS = frozenset(("epoch", "sample", "expression", "fingerprint"))
"""Keys of a change of weights in a state."""
COMPARED = (
    *("fingerprint", "shuffle_seed", "permutation_version", "epoch_size", "first_weights"),
    *("num_canonical_nodes", "blocks", "global_batch_size"),
)
"""Fields that must be equal for the rest of the run to be the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """What decides which samples of a dataset come when, beside the size of a batch and changes of weights."""

    fingerprint: str
    """Fingerprint of the index, with its filter."""
    shuffle_seed: int | None
    num_canonical_nodes: int
    blocks: str | None
    """Fingerprint of the layout of a block shuffle."""
    epoch_size: int
    """Positions of an epoch; of a lazy index with a filter, rows that are filtered."""


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
        return asdict(self.identity) | {"drawn": self.drawn, "weights": list(self.weights)}

    @classmethod
    def from_dict(cls, name: str, part: object) -> StreamPart:
        """Return the part in a dict.

        Raises:
            StateError: It has other keys, or values that are no counts.
        """
        names = {field.name for field in fields(RunIdentity)}
        if not isinstance(part, Mapping) or set(part) != names | {"drawn", "weights"}:
            raise StateError(
                f"stream {name!r} in the state is {part!r}, no dict of {', '.join(sorted(names | {'drawn', 'weights'}))}"
            )
        check_counts(f"stream {name!r} of the state", ("drawn", "epoch_size", "num_canonical_nodes"), part)
        identity = RunIdentity(**{key: value for key, value in part.items() if key in names})
        return cls(identity=identity, drawn=part["drawn"], weights=_checked_weights(part["weights"]))

    def check(self, name: str, current: StreamPart) -> None:
        """Raise StateError if this is a stream of another dataset, seed or order than `current`."""
        for field in fields(RunIdentity):
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
    """Fingerprint of the index, with its filter."""
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
    permutation_version: int = PERMUTATION_VERSION

    @property
    def version(self) -> int:
        """The first version that has all keys of this state."""
        return 1 if self.streams is None else 2

    @property
    def first_weights(self) -> object:
        """Fingerprint of the weights that the run began with; None: it began without weights."""
        begins = bool(self.weights) and (self.weights[0]["epoch"], self.weights[0]["sample"]) == (0, 0)
        return self.weights[0]["fingerprint"] if begins else None

    def to_dict(self) -> dict[str, object]:
        """Return it as a plain dict."""
        whole: dict[str, object] = {field.name: getattr(self, field.name) for field in fields(self)}
        whole |= {"version": self.version, "weights": list(self.weights)}
        whole["share"] = None if self.share is None else asdict(self.share)
        whole["beyond"] = None if self.beyond is None else self.beyond.to_dict()
        if self.streams is None:
            del whole["streams"]
        else:
            whole["streams"] = {name: part.to_dict() for name, part in self.streams.items()}
        return whole

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> StreamState:
        """Return the state in a dict.

        Raises:
            StateError: Keys are missing or unknown, counts are not counts, or a newer sqlstream wrote it.
        """
        version = state.get("version", 1)
        if not isinstance(version, int) or version > STATE_VERSION:
            raise StateError(f"the state has version {version!r}, this sqlstream knows {STATE_VERSION}: upgrade sqlstream")
        known = {"version", *(field.name for field in fields(cls))} - ({"streams"} if version < 2 else set())
        unknown = sorted(set(state) - known)
        missing = sorted({"epoch", "sample_in_epoch"} - set(state))
        if unknown or missing:
            raise StateError(f"not a state of this dataset: missing keys {missing}, unknown keys {unknown}")
        check_counts("the state", ("epoch", "sample_in_epoch"), state)
        share, beyond, streams = (state.get(name) for name in ("share", "beyond", "streams"))
        if streams is not None and not isinstance(streams, Mapping):
            raise StateError(f"streams={streams!r} in the state is not a dict of streams by name")
        parts = {
            "share": None if share is None else TakenAlone.from_dict(share),
            "beyond": None if beyond is None else DeliveredAhead.from_dict(beyond),
            "weights": _checked_weights(state.get("weights", ())),
            "streams": None if streams is None else {name: StreamPart.from_dict(name, part) for name, part in streams.items()},
        }
        return cls(**{**{name: state[name] for name in set(state) - {"version"}}, **parts})  # type: ignore[arg-type]  # checked above

    def check(self, current: StreamState) -> None:
        """Raise StateError if this state belongs to another dataset, seed, batch or order than `current`."""
        if self.streams is not None or current.streams is not None:
            self._check_streams(current)
        elif self.fingerprint is None:
            return  # a state of sds, which has nothing to compare
        for name in COMPARED:
            theirs, ours = getattr(self, name), getattr(current, name)
            if name == "global_batch_size" and (theirs is None or ours is None):
                continue  # a loader sets it later, and the partition then checks the position
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


def _checked_weights(weights: object) -> tuple[Mapping[str, object], ...]:
    """Return changes of weights.

    Raises:
        StateError: They are none.
    """
    if not isinstance(weights, list | tuple) or any(
        not isinstance(change, Mapping) or set(change) != CHANGE_KEYS for change in weights
    ):
        raise StateError(f"weights={weights!r} in the state is not a list of dicts with {', '.join(sorted(CHANGE_KEYS))}")
    return tuple(weights)
