"""Samples that fail: counted, logged, written into the ledger, and too many of them stop the run.

Each process counts its own. While an epoch runs, more than `ALWAYS_TOLERATED` failures that are also more than their share stop
it; at its end the share alone decides, but for a single failure, which is a large share of few samples.
"""

from __future__ import annotations

import logging

from sqlstream.cache.session import Failure
from sqlstream.config import OnError
from sqlstream.errors import CacheError, ObjectNotFoundError, StorageError, TooManyFailuresError
from sqlstream.storage.base.urls import redact
from sqlstream.stream.engine.slots import PlannedSample, Recipe

logger = logging.getLogger(__name__)

ALWAYS_TOLERATED = 3
"""Failures that never stop a process before its epoch ends: their share of few samples says little."""
NAMED = 3
"""Failures that an error names: the first ones, which are the cause more often than later ones."""


class FailureLog:
    """The failures of one dataset in one iteration.

    Args:
        recipe: How its samples are made: what is logged, how many failures are too many, and the cache where they are written
            down; downloads have counted theirs there, but know no row and step.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._options = recipe.options
        self._session = recipe.session
        self._name = recipe.name
        self._directory = recipe.cache.path
        self.num_seen = 0
        """Samples of the epoch so far, failed ones included; the engine counts those that did not fail."""
        self._begin()

    def _begin(self) -> None:
        self._num_failed = self.num_seen = 0
        self._first: list[str] = []

    def note_failure(self, slot: PlannedSample, error: Exception) -> None:
        """Count, log and write down a failure.

        Raises:
            TooManyFailuresError: More than three samples and more than `max_failure_ratio` of them have failed.
        """
        self._num_failed += 1
        self.num_seen += 1
        self._write_down(slot, error)
        if self._num_failed == 1 or self._options.print_exceptions or self._options.print_traceback:
            logger.warning(
                "sample at position %d of epoch %d (row %d) failed, on_error=%s: %s",
                slot.position,
                slot.epoch,
                slot.row_id,
                self._options.on_error,
                error,
                exc_info=error if self._options.print_traceback else None,
            )
        if len(self._first) < NAMED:
            self._first.append(f"row {slot.row_id}: {error}")
        if self._num_failed > max(ALWAYS_TOLERATED, self._allowed):
            raise self._too_many(f"more than max_failure_ratio={self._options.max_failure_ratio}") from error

    def no_replacement(self, slot: PlannedSample) -> TooManyFailuresError:
        """Return the error for a sample all of whose replacements have failed."""
        return self._too_many(f"and none could stand in for position {slot.position} of epoch {slot.epoch}")

    def end_epoch(self) -> None:
        """Log how many failed, and begin to count anew.

        Raises:
            TooManyFailuresError: More than `max_failure_ratio` of the epoch's samples have failed.
        """
        if not self._num_failed:
            self._begin()
            return
        ending = " and were replaced" if self._options.on_error is OnError.REPLACE else ""
        logger.warning(
            "%d of %d samples of %s failed%s in this epoch and process; sqlstream cache failures %s",
            *(self._num_failed, self.num_seen, self._name, ending, self._directory),
        )
        if self._num_failed > self._allowed and (self._num_failed > 1 or not self._options.max_failure_ratio):
            raise self._too_many(f"more than max_failure_ratio={self._options.max_failure_ratio}")
        self._begin()

    @property
    def _allowed(self) -> float:
        return self._options.max_failure_ratio * self.num_seen

    def _too_many(self, reason: str) -> TooManyFailuresError:
        first = "; ".join(self._first)
        return TooManyFailuresError(
            f"{self._num_failed} of {self.num_seen} samples of {self._name} failed in this process, {reason}. "
            f"The first failures: {first}. List them with `sqlstream cache failures {self._directory}`, mend the data, "
            "or raise max_failure_ratio"
        )

    def _write_down(self, slot: PlannedSample, error: Exception) -> None:
        step = None if slot.share is None else slot.share_position // slot.share.partition.step_size
        if isinstance(error, StorageError) and slot.refs:
            refs = slot.refs.values()
            text = str(error.__cause__ if isinstance(error.__cause__, ObjectNotFoundError) else error)
            failed = [Failure(url=redact(ref.url), error=text, row=slot.row_id, step=step, count=0) for ref in refs]
        else:
            text = f"{type(error).__name__}: {error}"
            failed = [Failure(url=f"{slot.recipe.name} row {slot.row_id}", error=text, row=slot.row_id, step=step)]
        try:
            self._session.note_failures(failed)
        except CacheError as problem:  # a run goes on without the report
            logger.warning("the failure of row %d of %s could not be written down: %s", slot.row_id, slot.recipe.name, problem)
