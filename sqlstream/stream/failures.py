"""Samples that fail: counted, logged, written into the ledger, and too many of them stop the run."""

from __future__ import annotations

import logging

from sqlstream.cache.failures import Failure, record_failures
from sqlstream.cache.ledger import Ledger
from sqlstream.config import SampleOptions
from sqlstream.errors import CacheError, StorageError, TooManyFailuresError
from sqlstream.storage.urls import redact
from sqlstream.stream.rows import Slot

logger = logging.getLogger(__name__)

MIN_SAMPLES = 100
"""A share of failures says something only from so many samples on."""


class FailureLog:
    """What failed in one iteration.

    Args:
        options: How much to log, and how much is too much.
        ledger: Where failures are written down; downloads have counted theirs there, but know no row and step.
        name: Of the dataset.
    """

    def __init__(self, options: SampleOptions, ledger: Ledger, name: str) -> None:
        self._options = options
        self._ledger = ledger
        self._name = name
        self._num_failed = 0
        self.num_seen = 0
        """Samples so far, those that came out well and those that did not; the engine counts the former."""

    def note_failure(self, slot: Slot, error: Exception) -> None:
        """Count, log and write down a failure.

        Raises:
            TooManyFailuresError: More than `max_failure_ratio` of the samples have failed.
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
                self._options.on_error.value,
                error,
                exc_info=error if self._options.print_traceback else None,
            )
        allowed = self._options.max_failure_ratio * self.num_seen
        if self.num_seen >= MIN_SAMPLES and self._num_failed > allowed:
            raise TooManyFailuresError(
                f"{self._num_failed} of {self.num_seen} samples failed, more than max_failure_ratio="
                f"{self._options.max_failure_ratio}; the last one: {error}"
            ) from error

    def _write_down(self, slot: Slot, error: Exception) -> None:
        step = None if slot.share is None else slot.position // slot.share.partition.step_size
        if isinstance(error, StorageError) and slot.refs:
            refs = slot.refs.values()
            failed = [Failure(url=redact(ref.url), error=str(error), row=slot.row_id, step=step, count=0) for ref in refs]
        else:
            text = f"{type(error).__name__}: {error}"
            failed = [Failure(url=f"{self._name} row {slot.row_id}", error=text, row=slot.row_id, step=step)]
        try:
            with self._ledger.transaction() as tx:
                record_failures(tx, failed)
        except CacheError as problem:  # a report is no reason to stop a run that goes on without it
            logger.warning("the failure of row %d of %s could not be written down: %s", slot.row_id, self._name, problem)
