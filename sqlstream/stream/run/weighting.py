"""The weights of a run, in memory that trainer and workers share.

An order shuffles slots (`order/weighted.py`); without weights, and with as many positions as rows, a slot is a row. Changes of
weights belong to the run, as its seed does: each holds from a place (epoch, position) on. Workers that run already read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sqlstream.errors import ConfigError, StateError
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.file.index import Index
from sqlstream.index.file.sums import BucketSumsFile, SumsFile
from sqlstream.index.lengths import LengthTable
from sqlstream.index.weights import WeightsSpec, WeightTable, open_weights
from sqlstream.order import WeightedLengths, WeightsFrom, WeightsSince
from sqlstream.order.order import check_size
from sqlstream.order.weights import WeightedRows
from sqlstream.stream.run.shared.text import SharedText

TEXT_BYTES = 1 << 16
"""Room for some two hundred changes; arbitrary, more than a run is expected to need."""
OPEN_TABLES = 8
"""Tables that stay open, the last ones: each takes a descriptor and 1 MiB. More changes in one epoch are rare."""
_START = (0, 0)
"""Epoch and position at which a run begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A table of weights that holds from a place of the run on."""

    epoch: int
    sample: int
    """Position of the epoch."""
    expression: str | None
    """The expression that was given; None: an array, which a state cannot hold, or no weights any more."""
    fingerprint: str | None
    """Fingerprint of index and weights; None: all rows weigh the same."""
    path: str | None
    """Path of the table on this node."""
    digest: str | None = None
    """Digest of the weights alone: equal weights of the same rows at another place have the same."""

    def to_state(self, *, by_content: bool = False) -> dict[str, object]:
        """Return the fields that are the same on every node; `by_content`: of the weights alone, whatever the index."""
        plain = {name: getattr(self, name) for name in ("epoch", "sample", "expression", "fingerprint")}
        return plain | {"fingerprint": self.digest} if by_content else plain


class Weighting:
    """The weights of a run: which table holds from where on.

    Args:
        num_rows: Selected rows.
        num_positions: Positions of an epoch.
        weigh: Makes the table of an expression or an array.
        weights: Weights of the rows from the start; None: all the same.
    """

    def __init__(
        self, num_rows: int, num_positions: int, weigh: Callable[[WeightsSpec], WeightTable], weights: WeightsSpec | None
    ) -> None:
        self._num_rows = num_rows
        self.num_positions = num_positions
        """Positions of an epoch."""
        self._weigh = weigh
        self._shared = SharedText(TEXT_BYTES)
        self._read: tuple[int, tuple[Change, ...]] = (0, ())
        self._tables: dict[str | None, WeightedRows] = {}
        """The tables that this process has opened, by path."""
        self._made_with = self._change(*_START, weights)
        if weights is not None:
            self._write((self._made_with,))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, with the memory that it shares."""
        return {**self.__dict__, "_tables": {}}

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._shared.version

    @property
    def fingerprint(self) -> str:
        """A text for all changes so far."""
        changes = self.to_state()
        return hashlib.blake2b(json.dumps(changes).encode(), digest_size=8).hexdigest() if changes else "none"

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changes so far, also those that the trainer makes while this worker runs."""
        if self._shared.version != self._read[0]:
            version, text = self._shared.read()
            self._read = (version, tuple(Change(**change) for change in json.loads(text)))
        return self._read[1]

    def add(self, epoch: int, sample: int, weights: WeightsSpec | None) -> None:
        """Make rows weigh `weights` from position `sample` of `epoch` on; changes for later places are dropped.

        What the run was made with stays, also where nothing of it holds: a state is compared with that.

        Raises:
            ConfigError: `weights` are not weights, or these are too many changes.
        """
        earlier = [change for change in self.changes if (change.epoch, change.sample) < (epoch, sample)]
        if (epoch, sample) == _START:
            earlier = [self._made_with]
        self._write((*earlier, self._change(epoch, sample, weights)))

    def of_epoch(self, epoch: int) -> list[WeightsFrom]:
        """Return the weights of an epoch, in the order of their positions."""
        changes = self.changes
        before = [change.path for change in changes if (change.epoch, change.sample) <= (epoch, 0)]
        late = [change for change in changes if change.epoch == epoch and change.sample > 0]
        first = WeightsFrom(0, self._rows_of(before[-1] if before else None))
        return [first, *(WeightsFrom(change.sample, self._rows_of(change.path)) for change in late)]

    # -- in a state ---------------------------------------------------------------------------------------------------

    def to_state(self, *, by_content: bool = False) -> list[dict[str, object]]:
        """Return all changes, JSON-able; see `Change.to_state`."""
        return [change.to_state(by_content=by_content) for change in self.changes]

    def restored(self, state: Sequence[Mapping[str, Any]]) -> tuple[Change, ...]:
        """Return the changes of a state, for `take`; tables that are not on this node are made.

        Raises:
            StateError: One was given as an array, and the dataset was made without it.
        """
        if list(state) in (self.to_state(), self.to_state(by_content=True)):
            return self.changes
        known = {name: change for change in self.changes for name in (change.fingerprint, change.digest)}
        restored = []
        for entry in state:
            place, fingerprint, expression = (entry["epoch"], entry["sample"]), entry["fingerprint"], entry["expression"]
            if fingerprint in known:
                restored.append(replace(known[fingerprint], epoch=place[0], sample=place[1], expression=expression))
            elif fingerprint is None:
                restored.append(self._change(*place, None))
            else:
                if expression is None:
                    raise StateError(
                        f"the state has weights {fingerprint} from epoch {place[0]} on that were given as an array, which is "
                        "not in it: make the dataset with the same weights="
                    )
                restored.append(self._change(*place, expression))
        late = [change for change in restored if (change.epoch, change.sample) > _START]
        if (begun := restored[: len(restored) - len(late)]) and begun[-1].fingerprint != self._made_with.fingerprint:
            late.insert(0, begun[-1])
        return (self._made_with, *late) if begun else tuple(late)

    def take(self, changes: tuple[Change, ...]) -> None:
        """Replace all changes by those of a state."""
        if changes != self.changes:
            self._write(changes)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _change(self, epoch: int, sample: int, weights: WeightsSpec | None) -> Change:
        table = None if weights is None else self._weigh(weights)
        return Change(
            epoch=epoch,
            sample=sample,
            expression=weights if isinstance(weights, str) else None,
            fingerprint=None if table is None else table.fingerprint,
            path=None if table is None else str(table.path),
            digest=None if table is None else table.digest,
        )

    def _write(self, changes: tuple[Change, ...]) -> None:
        text = json.dumps([asdict(change) for change in changes]).encode()
        if len(text) > TEXT_BYTES:
            raise ConfigError(f"{len(changes)} changes of weights are too many for one run ({len(text)} bytes): begin another")
        self._shared.write(text)

    def _rows_of(self, path: str | None) -> WeightedRows | None:
        """Return the rows of slots by the table at a path; None: a slot is a row."""
        if path is None and self.num_positions == self._num_rows:
            return None
        if (table := self._tables.get(path)) is None:
            cumulative = None if path is None else SumsFile(Path(path))
            table = WeightedRows(num_rows=self._num_rows, num_positions=self.num_positions, cumulative=cumulative)
            self._tables = {**dict(list(self._tables.items())[1 - OPEN_TABLES :]), path: table}
        return table


class BucketWeighting:
    """What an order of buckets reads of the weights of a run, in memory that trainer and workers share.

    Args:
        weighting: The weights of the run; its tables are of rows in the order of the buckets.
        sizes: Rows of each bucket.
    """

    def __init__(self, weighting: Weighting, sizes: tuple[int, ...]) -> None:
        self._weighting = weighting
        self._sizes = sizes
        self._tables: dict[str, BucketSumsFile] = {}
        """The tables that this process has opened, by path."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, which opens tables itself."""
        return {**self.__dict__, "_tables": {}}

    @property
    def version(self) -> int:
        """Grows with every change."""
        return self._weighting.version

    @property
    def fingerprint(self) -> str:
        """A text for all changes of the run."""
        return self._weighting.fingerprint

    def since(self) -> list[WeightsSince]:
        """Return all weights of the run, in the order of their epochs."""
        changes = {change.epoch: change.path for change in self._weighting.changes}
        found = {0: None} | {epoch: None if path is None else self._opened(path) for epoch, path in changes.items()}
        return [WeightsSince(epoch, sums) for epoch, sums in sorted(found.items(), key=lambda entry: entry[0])]

    def _opened(self, path: str) -> BucketSumsFile:
        table = self._tables.get(path)
        if table is None:
            table = BucketSumsFile(Path(path), self._sizes)
            self._tables = {**dict(list(self._tables.items())[1 - OPEN_TABLES :]), path: table}
        return table


class PackWeighting:
    """The weights of a run as packs take them: how often rows of each length come in an epoch.

    Args:
        weighting: The weights, in tables whose rows are sorted by length.
        lengths: These rows.
    """

    def __init__(self, weighting: Weighting, lengths: LengthTable) -> None:
        self._weighting = weighting
        self._lengths = lengths
        self._made: list[WeightedLengths] = []
        """Those of the last tables."""

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, which opens the tables itself."""
        return {**self.__dict__, "_made": []}

    @property
    def fingerprint(self) -> str:
        """A text for all changes so far."""
        return self._weighting.fingerprint

    def of_epoch(self, epoch: int) -> WeightedLengths | None:
        """Return the weights of an epoch; None: each row comes once."""
        rows = self._weighting.of_epoch(epoch)[0].rows
        if rows is None:
            return None
        if (found := next((made for made in self._made if made.rows is rows), None)) is None:
            assert isinstance(rows.cumulative, SumsFile), "there are as many slots as rows, so it is a table"
            found = WeightedLengths(rows, rows.cumulative.at(np.cumsum(self._lengths.counts) - 1))
            self._made = [*self._made[1 - OPEN_TABLES :], found]
        return found


def pack_weighting_of(index: Index, directory: Path, lengths: LengthTable, weights: WeightsSpec | None) -> Weighting:
    """Return the weighting of a dataset of packs, in tables whose rows are sorted by length."""
    weigh = partial(open_weights, index, directory=directory, sequence=lengths)
    return Weighting(len(index), len(index), weigh, weights)


def weighting_of(index: Index, directory: Path, epoch_size: int | None, weights: WeightsSpec | None) -> Weighting:
    """Return the weighting of a dataset.

    Args:
        index: Its rows.
        directory: Where tables of weights are kept.
        epoch_size: Positions of an epoch; None: as many as rows.
        weights: Weights of the rows; None: all the same.

    Raises:
        ConfigError: The epoch has no position or no row, or `weights` are not weights.
    """
    if isinstance(index, LazyIndex):
        if weights is not None or epoch_size is not None:
            _refuse_weights(weights)
        return Weighting(index.num_rows, index.num_rows, _refuse_weights, None)
    num_rows = len(index)
    if epoch_size is not None and num_rows == 0:
        raise ConfigError(f"epoch_size={epoch_size} needs rows, but the index has none that the query keeps")
    check_size("epoch_size", epoch_size or num_rows)
    return Weighting(num_rows, epoch_size or num_rows, partial(open_weights, index, directory=directory), weights)


def _refuse_weights(_weights: WeightsSpec | None) -> WeightTable:
    raise ConfigError("weights and epoch_size need all rows, which a lazy index does not have: leave lazy_index_chunk_size out")
