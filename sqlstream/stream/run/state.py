"""The state of a run: a small JSON-able dict that is checked when it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from sqlstream.errors import StateError
from sqlstream.order import PERMUTATION_VERSION
from sqlstream.stream.run.partial_steps import DeliveredAhead, TakenAlone, check_counts

STATE_VERSION = 1
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
    version: int = STATE_VERSION
    permutation_version: int = PERMUTATION_VERSION

    @property
    def first_weights(self) -> object:
        """Fingerprint of the weights that the run began with; None: it began without weights."""
        begins = bool(self.weights) and (self.weights[0]["epoch"], self.weights[0]["sample"]) == (0, 0)
        return self.weights[0]["fingerprint"] if begins else None

    def to_dict(self) -> dict[str, object]:
        """Return it as a plain dict."""
        beyond = None if self.beyond is None else self.beyond.to_dict()
        return asdict(self) | {"weights": list(self.weights), "beyond": beyond}

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> StreamState:
        """Return the state in a dict.

        Raises:
            StateError: Keys are missing or unknown, counts are not counts, or a newer sqlstream wrote it.
        """
        version = state.get("version", STATE_VERSION)
        if not isinstance(version, int) or version > STATE_VERSION:
            raise StateError(f"the state has version {version!r}, this sqlstream knows {STATE_VERSION}: upgrade sqlstream")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(state) - known)
        missing = sorted({"epoch", "sample_in_epoch"} - set(state))
        if unknown or missing:
            raise StateError(f"not a state of this dataset: missing keys {missing}, unknown keys {unknown}")
        check_counts("the state", ("epoch", "sample_in_epoch"), state)
        share, weights = state.get("share"), state.get("weights", ())
        if not isinstance(weights, list | tuple) or any(set(change) != CHANGE_KEYS for change in weights):
            raise StateError(f"weights={weights!r} in the state is not a list of dicts with {', '.join(sorted(CHANGE_KEYS))}")
        beyond = state.get("beyond")
        parts = {
            "share": None if share is None else TakenAlone.from_dict(share),
            "beyond": None if beyond is None else DeliveredAhead.from_dict(beyond),
            "weights": tuple(weights),
        }
        return cls(**{**state, **parts})  # type: ignore[arg-type]  # checked above

    def check(self, current: StreamState) -> None:
        """Raise StateError if this state belongs to another dataset, seed, batch or order than `current`."""
        if self.fingerprint is None:
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
