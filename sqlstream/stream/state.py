"""Where a run stands: a small JSON-able dict that is checked when it comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from sqlstream.errors import StateError
from sqlstream.order import PERMUTATION_VERSION

STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Epoch and samples consumed, and what they were counted in.

    `epoch` and `sample_in_epoch` are the keys of `sds`; a state of `sds` loads as far as these go.
    """

    epoch: int
    sample_in_epoch: int
    """Samples of the epoch that the whole job has behind it."""
    fingerprint: str | None = None
    """The index, with its filter."""
    shuffle_seed: int | None = None
    version: int = STATE_VERSION
    permutation_version: int = PERMUTATION_VERSION

    def to_dict(self) -> dict[str, object]:
        """Return it as a plain dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, object]) -> StreamState:
        """Return the state in a dict.

        Raises:
            StateError: Keys are missing or unknown, counts are not counts, or a newer sqlstream wrote it.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(state) - known)
        missing = sorted({"epoch", "sample_in_epoch"} - set(state))
        if unknown or missing:
            raise StateError(f"not a state of this dataset: missing keys {missing}, unknown keys {unknown}")
        for name in ("epoch", "sample_in_epoch"):
            value = state[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise StateError(f"{name}={value!r} in the state is not a count: give 0 or more")
        loaded = cls(**state)  # type: ignore[arg-type]  # names are checked above
        if loaded.version > STATE_VERSION:
            raise StateError(f"the state has version {loaded.version}, this sqlstream knows {STATE_VERSION}: upgrade sqlstream")
        return loaded

    def check(self, current: StreamState) -> None:
        """Raise StateError if this state belongs to another dataset, seed or order than `current`."""
        if self.fingerprint is None:
            return  # of sds: it says nothing of its dataset
        for name in ("fingerprint", "shuffle_seed", "permutation_version"):
            theirs, ours = getattr(self, name), getattr(current, name)
            if theirs != ours:
                raise StateError(
                    f"the state has {name}={theirs!r}, this dataset {ours!r}: resume with the dataset, query and seed "
                    "that the state came from, or load it with strict=False"
                )


class Progress:
    """How far the iteration of this process has come; DataLoader workers have copies that say nothing about the trainer."""

    def __init__(self) -> None:
        self.num_yielded = 0
        """Samples that this process has yielded in the epoch, since it began or was resumed."""
        self._epoch: int | None = None
        self._consumed = 0
        self._world_size = 1
        self._resume: tuple[int, int] | None = None

    def resume_at(self, epoch: int, consumed: int) -> None:
        """Have `epoch` begin after `consumed` samples of the whole job."""
        self._resume = (epoch, consumed)
        self._epoch = None

    def begin(self, epoch: int, world_size: int) -> int:
        """Begin an epoch; return the samples of the whole job that lie behind it already."""
        is_resumed = self._resume is not None and self._resume[0] == epoch
        self._consumed = self._resume[1] if self._resume is not None and is_resumed else 0
        self._epoch, self._world_size, self.num_yielded = epoch, world_size, 0
        return self._consumed

    def position(self, next_epoch: int) -> tuple[int, int]:
        """Return the epoch under way, or the next one, and the samples of the whole job that lie behind it."""
        if self._epoch is None:
            return self._resume or (next_epoch, 0)
        return self._epoch, self._consumed + self.num_yielded * self._world_size
