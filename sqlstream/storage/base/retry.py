"""What is tried again, how often, and after how long; plain values, no clock of their own.

Backends make one attempt and have their own retries off, so that tries are counted and bounded here alone.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from sqlstream.errors import AccessDeniedError, ObjectChangedError, ObjectNotFoundError, StorageError, TransientStorageError
from sqlstream.storage.base.protocols import ObjectInfo, Storage
from sqlstream.storage.base.service_errors import BAD_CREDENTIALS, CURES, NO_BUCKET, read_error
from sqlstream.storage.base.urls import redact

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

PROGRESS_BYTES = 1 << 20  # arbitrary: no server gets more than one try for each MiB of an object
PROGRESS_OBJECTS = 1000  # the same of a listing: a page, as S3 has it
_MOST_DOUBLINGS = 64  # arbitrary, beyond any cap: a float has 1023
_SECONDS = re.compile(r"[0-9]{1,9}")  # digits of other scripts are not meant, and longer numbers are no time
_RETRYABLE_STATUS = frozenset({408, 429})  # beside every 5xx: the server says "later"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Capped exponential backoff with full jitter.

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    """

    num_retries: int = 3
    """Tries after the first one."""
    base_seconds: float = 0.1
    """Upper bound of the first pause; as object_store and botocore choose it, within a factor of 3."""
    cap_seconds: float = 20.0
    """Upper bound of any pause that we choose; botocore's."""
    retry_after_cap_seconds: float = 120.0
    """Longest pause that a server may ask for with Retry-After; arbitrary, above what S3 and hubs ask for."""

    def pause_seconds(self, num_failures: int, error: StorageError, uniform: float) -> float:
        """Return how long to wait after the `num_failures`-th failure (from 1), given a random number in [0, 1)."""
        doublings = min(num_failures - 1, _MOST_DOUBLINGS)
        backoff = uniform * min(self.cap_seconds, self.base_seconds * 2.0**doublings)
        asked = error.context.get("retry_after_seconds")
        if not isinstance(asked, (int, float)):
            return backoff
        return max(backoff, min(asked, self.retry_after_cap_seconds))


@dataclass(slots=True)
class RequestCounts:
    """The costs of one operation so far."""

    num_requests: int = 0
    """Number of attempts; each is one request with obstore and urllib3 (fsspec's own requests are not seen here)."""
    num_retries: int = 0
    downloaded_bytes: int = 0
    """Bytes received, those of failed attempts included."""
    pause_seconds: float = 0.0
    """Time between attempts."""
    furthest_bytes: int = 0
    """Bytes of the object that failed attempts have left: the next one continues there."""

    def count_failed(self, error: StorageError) -> None:
        """Count the requests that a failed attempt made beside its first one (redirects), once."""
        num_extra = error.context.pop("num_extra_requests", 0)
        assert isinstance(num_extra, int)
        self.num_requests += num_extra


def with_retries(
    operation: Callable[[], Result], *, policy: RetryPolicy, counts: RequestCounts, wait: Callable[[float], None]
) -> Result:
    """Return `operation()`, tried again while its failures can pass.

    An attempt that took an object `PROGRESS_BYTES` further starts the count of retries anew: a large one may need many.

    Args:
        operation: One attempt.
        policy: How often and how long.
        counts: Counted up, also when the operation fails.
        wait: Sleeps for so many seconds; may raise to give up.

    Raises:
        TransientStorageError: The last failure, when the retries are spent.
        StorageError: A failure that no retry mends.
    """
    num_failures, furthest_bytes = 0, 0
    while True:
        counts.num_requests += 1
        try:
            return _counted(operation, counts)
        except TransientStorageError as error:
            if counts.furthest_bytes >= furthest_bytes + PROGRESS_BYTES:
                num_failures, furthest_bytes = 0, counts.furthest_bytes
            if num_failures >= policy.num_retries:
                raise TransientStorageError(f"{error} (gave up after {counts.num_requests} tries)", **error.context) from error
            num_failures += 1
            counts.num_retries += 1
            pause_seconds = policy.pause_seconds(num_failures, error, random.random())
            _log_retry(error, num_failures, policy, pause_seconds)
            wait(pause_seconds)


def _counted(attempt: Callable[[], Result], counts: RequestCounts) -> Result:
    """Return `attempt()`; if it fails, count the requests that it made beside its first one."""
    try:
        return attempt()
    except StorageError as error:
        counts.count_failed(error)
        raise


def list_with_retries(
    storage: Storage, prefix: str, policy: RetryPolicy, wait: Callable[[float], None]
) -> Iterator[ObjectInfo]:
    """Yield what `Storage.list` yields; a listing that breaks goes on behind the last object that it gave.

    As with objects, progress starts the count of retries anew: a long one may break often, or outlive its credentials.

    Raises:
        TransientStorageError: The last failure, when the retries are spent.
    """
    last, num_given, num_failures, num_before = "", 0, 0, 0
    while True:
        try:
            for info in storage.list(prefix, after=last):
                last, num_given = info.url, num_given + 1
                yield info
        except TransientStorageError as error:
            if num_given >= num_before + PROGRESS_OBJECTS:
                num_failures = 0
            num_before = num_given
            if num_failures >= policy.num_retries:
                raise TransientStorageError(f"{error} (gave up after {num_failures + 1} tries)", **error.context) from error
            num_failures += 1
            pause_seconds = policy.pause_seconds(num_failures, error, random.random())
            _log_retry(error, num_failures, policy, pause_seconds)
            wait(pause_seconds)
        else:
            return


def _log_retry(error: StorageError, num_failures: int, policy: RetryPolicy, pause_seconds: float) -> None:
    _logger.info("%s: retry %d of %d follows in %.1f s", error, num_failures, policy.num_retries, pause_seconds)


def error_for_status(status: int, url: str, *, detail: str = "", retry_after: str | None = None) -> StorageError:
    """Return the error for an HTTP status that is not a success.

    Args:
        status: The HTTP status.
        url: What was asked for.
        detail: The server's words, already redacted, with the body of its answer if that says more.
        retry_after: The Retry-After header: seconds or a date.
    """
    where, own = redact(url), read_error(detail)
    said = f": {own or detail}" if detail else ""
    context: dict[str, object] = {"url": where, "status": status}
    if own is not None:
        context["code"] = own.code
        if own.code in NO_BUCKET:
            cure = "check the URL, and storage_options['endpoint_url']"
            return ObjectNotFoundError(f"the bucket of {where} does not exist (status {status}){said}: {cure}", **context)
    if status in (404, 410):
        return ObjectNotFoundError(f"{where} does not exist (status {status}): check the URL", **context)
    cure = "" if own is None else CURES.get(own.code, "")
    if status in (401, 403, 407) or (own is not None and own.code in BAD_CREDENTIALS):
        cure = cure or "check the credentials (storage_options, environment) and the rights on this object"
        return AccessDeniedError(f"{where} may not be read (status {status}){said}: {cure}", **context)
    if status == 412:
        return ObjectChangedError(f"{where} is not the version that was asked for (status 412)", **context)
    if status in _RETRYABLE_STATUS or status >= 500:
        if (seconds := _retry_after_seconds(retry_after or "", time.time())) is not None:
            context["retry_after_seconds"] = seconds
        return TransientStorageError(f"{where}: the server answers {status}{said}", **context)
    hint = "; set storage_options['region'] or ['endpoint_url']" if status in (301, 307) else ""
    return StorageError(f"{where}: the server answers {status}{said}{hint or (cure and f': {cure}')}", **context)


def _retry_after_seconds(text: str, now: float) -> float | None:
    """Return how long a Retry-After header asks to wait; None when it is no number and no date."""
    if _SECONDS.fullmatch(number := text.strip()):  # which takes more for blanks than `float` does
        return float(number)
    from email.utils import parsedate_to_datetime  # a tenth of a helper's start, and few servers send dates

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, TypeError, IndexError, OverflowError):  # what it raises for what is no date, by version
        return None
