"""A dataset's samples by the number of their row, in no order of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlstream.stream.engine.engine import Engine
from sqlstream.stream.frameworks.plain_loader import warn_of_ranks
from sqlstream.stream.options import from_start
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.run.schedule import Schedule


class ByRow:
    """The part of a dataset's interface that takes row numbers."""

    _schedule: Schedule
    _pipeline: Pipeline
    _random_access: Engine | None = None

    def __len__(self) -> int:
        """Return the number of selected rows; UnknownLengthError while a lazy index does not know how many its filter keeps.

        These are the rows of all ranks: `num_steps` counts the batches of one.
        """
        warn_of_ranks(lambda: self._schedule.world)
        return len(self._pipeline.index)

    def __getitem__(self, index: int) -> Any:
        """Return the sample of selected row `index` (negative from the end), after transforms; a list if they make several.

        The paths in it stay valid for the next 64 accesses of this process.

        Raises:
            IndexError: There is no such row.
            SampleError, StorageError: It cannot be made; never another row's sample.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of several selected rows, in the order asked; their objects come together."""
        self._pipeline.cache.check_open()
        selected = from_start(indices, self._pipeline.index)
        if self._random_access is None:
            self._random_access = self._pipeline.make_engine(self._pipeline.options.retained_accesses)
        return self._random_access.rows(selected, self._schedule.counter.next.epoch)
