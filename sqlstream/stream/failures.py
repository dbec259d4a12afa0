"""Samples that fail: counted, logged, written into the ledger, and too many of them stop the run."""

from __future__ import annotations

import logging

from sqlstream.cache.failures import Failure, record_failures
from sqlstream.cache.ledger import Ledger
from sqlstream.config import SampleOptions
from sqlstream.errors import CacheError, SampleError, TooManyFailuresError
from sqlstream.stream.rows import Slot

logger = logging.getLogger(__name__)

MIN_SAMPLES = 100
"""A share of failures says something only from so many samples on."""


class FailureLog:
    """What failed in one iteration.

    Args:
        options: How much to log, and how much is too much.
        ledger: Where failures of samples are written down; those of downloads are there already.
        name: Of the dataset.
    """

    def __init__(self, options: SampleOptions, ledger: Ledger, name: str) -> None:
        self._options = options
        self._ledger = ledger
        self._name = name
        self._num_failed = 0
        self._num_seen = 0

    def note_success(self) -> None:
        """Count a sample that came out well."""
        self._num_seen += 1

    def note_failure(self, slot: Slot, error: Exception) -> None:
        """Count, log and write down a failure.

        Raises:
            TooManyFailuresError: More than `max_failure_ratio` of the samples have failed.
        """
        self._num_failed += 1
        self._num_seen += 1
        if isinstance(error, SampleError):
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
        allowed = self._options.max_failure_ratio * self._num_seen
        if self._num_seen >= MIN_SAMPLES and self._num_failed > allowed:
            raise TooManyFailuresError(
                f"{self._num_failed} of {self._num_seen} samples failed, more than max_failure_ratio="
                f"{self._options.max_failure_ratio}; the last one: {error}"
            ) from error

    def _write_down(self, slot: Slot, error: SampleError) -> None:
        try:
            with self._ledger.transaction() as tx:
                failure = Failure(
                    url=f"{self._name} row {slot.row_id}", error=f"{type(error).__name__}: {error}", row=slot.row_id
                )
                record_failures(tx, [failure])
        except CacheError as problem:  # a report is no reason to stop a run that goes on without it
            logger.warning("the failure of row %d of %s could not be written down: %s", slot.row_id, self._name, problem)
