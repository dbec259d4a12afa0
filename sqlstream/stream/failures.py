"""Samples that fail: counted, logged, and too many of them stop the run."""

from __future__ import annotations

import logging

from sqlstream.config import SampleOptions
from sqlstream.errors import TooManyFailuresError

logger = logging.getLogger(__name__)

MIN_SAMPLES = 100
"""A share of failures says something only from so many samples on."""


class FailureLog:
    """What failed in one iteration.

    Args:
        options: How much to log, and how much is too much.
    """

    def __init__(self, options: SampleOptions) -> None:
        self._options = options
        self._num_failed = 0
        self._num_seen = 0

    def note_success(self) -> None:
        """Count a sample that came out well."""
        self._num_seen += 1

    def note_failure(self, position: int, row_id: int, error: Exception) -> None:
        """Count and log a failure.

        Raises:
            TooManyFailuresError: More than `max_failure_ratio` of the samples have failed.
        """
        self._num_failed += 1
        self._num_seen += 1
        if self._num_failed == 1 or self._options.print_exceptions or self._options.print_traceback:
            logger.warning(
                "sample at position %d (row %d) failed, on_error=%s: %s",
                position,
                row_id,
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
