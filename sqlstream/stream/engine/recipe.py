"""How the samples of one dataset are made; the slots of a window may have several recipes, one for each stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlstream.stream.engine.row_source import RowSource
from sqlstream.stream.engine.slots import PlannedSample, RowReader
from sqlstream.stream.engine.stored_samples import CachedChain


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """Where the rows of a dataset come from, and what is made of them."""

    name: str
    """Name of the dataset, in the report of failures."""
    rows: RowSource
    reader: RowReader
    """From rows to slots, and from slots to what transforms see."""
    chain: CachedChain
    """The transforms of every sample."""
    has_points: bool = field(init=False)
    """The chain stores samples."""

    def __post_init__(self) -> None:
        """Ask the chain once, not for every sample."""
        object.__setattr__(self, "has_points", self.chain.has_points)

    def slots(self, row_ids: Sequence[int], positions: Sequence[int], epochs: Sequence[int]) -> list[PlannedSample]:
        """Return the slots of rows by id, in the order asked; `place` is that of a slot's row among them.

        Args:
            row_ids: The rows.
            positions: Position of each in its dataset.
            epochs: Epoch of each; both seed its generators.
        """
        planned = self.reader.slots(self.rows.rows(row_ids), row_ids, positions, epochs, self)
        if self.has_points:
            self.chain.look_up(planned)
        return planned
