from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sqlstream.errors import (
    AccessDeniedError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from sqlstream.storage.base.protocols import ObjectInfo, Storage
from sqlstream.storage.base.retry import RequestCounts, RetryPolicy, error_for_status, list_with_retries, with_retries


class Pauses(list[float]):
    """Records the pauses in place of sleeping."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def run(script: list[StorageError | str], num_retries: int = 3) -> tuple[str, RequestCounts, Pauses]:
    """Play the script, one entry an attempt."""
    tally, pauses = RequestCounts(), Pauses()

    def attempt() -> str:
        step = script.pop(0)
        if isinstance(step, StorageError):
            raise step
        return step

    try:
        policy = RetryPolicy(num_retries=num_retries)
        result = with_retries(attempt, policy=policy, counts=tally, wait=pauses)
    except StorageError as error:
        result = f"{type(error).__name__}: {error}"
    return result, tally, pauses


def test_transient_failures_are_tried_again_and_counted() -> None:
    result, tally, pauses = run([TransientStorageError("a"), TransientStorageError("b"), "fine"])
    assert (result, tally.num_requests, tally.num_retries, len(pauses)) == ("fine", 3, 2, 2)


def test_retries_are_bounded_and_the_last_failure_says_so() -> None:
    result, tally, _ = run([TransientStorageError("down")] * 9, num_retries=2)
    assert result == "TransientStorageError: down (gave up after 3 tries)"
    assert (tally.num_requests, tally.num_retries) == (3, 2)


@pytest.mark.parametrize(
    "error", [ObjectNotFoundError("no"), AccessDeniedError("no"), ObjectChangedError("no"), StorageError("no")]
)
def test_failures_that_stay_are_not_tried_again(error: StorageError) -> None:
    _, tally, pauses = run([error, "never"])
    assert (tally.num_requests, list(pauses)) == (1, [])


def test_pauses_grow_to_the_cap_and_jitter_is_full() -> None:
    policy, error = RetryPolicy(base_seconds=0.1, cap_seconds=1.0), TransientStorageError("x")
    assert [policy.pause_seconds(n, error, 1.0) for n in (1, 2, 3, 4, 5, 50, 5000)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert policy.pause_seconds(3, error, 0.0) == 0.0
    assert policy.pause_seconds(3, error, 0.5) == 0.2


def test_retry_after_is_honoured_up_to_its_cap() -> None:
    policy = RetryPolicy(retry_after_cap_seconds=30.0)
    assert policy.pause_seconds(1, error_for_status(429, "http://h/x", retry_after="7"), 0.5) == 7
    assert policy.pause_seconds(1, error_for_status(429, "http://h/x", retry_after="7000"), 0.5) == 30.0
    assert policy.pause_seconds(1, error_for_status(429, "http://h/x", retry_after="Wed, 21 Oct 2026"), 0.0) == 0.0


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, StorageError),
        (401, AccessDeniedError),
        (403, AccessDeniedError),
        (404, ObjectNotFoundError),
        (408, TransientStorageError),
        (410, ObjectNotFoundError),
        (412, ObjectChangedError),
        (416, StorageError),
        (429, TransientStorageError),
        (500, TransientStorageError),
        (502, TransientStorageError),
        (503, TransientStorageError),
        (504, TransientStorageError),
    ],
)
def test_each_status_has_its_error(status: int, kind: type[StorageError]) -> None:
    error = error_for_status(status, "https://u:p@h/x?sig=secret")
    assert type(error) is kind
    assert str(status) in str(error)
    assert "secret" not in str(error) + str(error.context)


class BreakingListing:
    """Lists names; each of the first listings breaks after some of them."""

    def __init__(self, num_objects: int, num_breaks: int, each: int) -> None:
        self._num_objects, self._num_breaks, self._each = num_objects, num_breaks, each
        self.afters: list[str] = []

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.afters.append(after.removeprefix(prefix))
        start = int(self.afters[-1]) + 1 if after else 0
        for i in range(start, self._num_objects):
            if i == start + self._each and len(self.afters) <= self._num_breaks:
                raise TransientStorageError("reset")
            yield ObjectInfo(url=f"{prefix}{i}", size_bytes=i, etag=None)


def test_a_listing_that_breaks_goes_on_where_it_was() -> None:
    storage = BreakingListing(10, num_breaks=2, each=4)
    found = list(list_with_retries(cast(Storage, storage), "s3://b/", RetryPolicy(), Pauses()))
    assert [info.size_bytes for info in found] == list(range(10))
    assert storage.afters == ["", "3", "7"]


def test_a_long_listing_may_break_more_often_than_there_are_retries_and_one_that_gets_nowhere_may_not() -> None:
    storage = BreakingListing(20_000, num_breaks=18, each=1000)
    assert len(list(list_with_retries(cast(Storage, storage), "s3://b/", RetryPolicy(), Pauses()))) == 20_000
    storage = BreakingListing(20_000, num_breaks=18, each=0)
    with pytest.raises(TransientStorageError, match=r"reset \(gave up after 4 tries\)"):
        list(list_with_retries(cast(Storage, storage), "s3://b/", RetryPolicy(), Pauses()))


@pytest.mark.parametrize("seconds", [0, 7, 3600])
def test_retry_after_may_be_a_date(seconds: int) -> None:
    before = time.time()
    date = email.utils.formatdate(before + seconds, usegmt=True)
    asked = error_for_status(503, "https://h/x", retry_after=date).context["retry_after_seconds"]
    assert isinstance(asked, float)
    late_seconds = 1 + time.time() - before  # a date has no fractions of a second, and this machine may be slow
    assert max(0, seconds - late_seconds) <= asked <= seconds


@pytest.mark.parametrize("text", ["", "soon", "-5", None, "²", "٣", "nan", "inf", "1e3", "9" * 5000, "Wed, 99 Oct 9999", "0,"])
def test_a_retry_after_that_is_neither_number_nor_date_is_no_wish(text: str | None) -> None:
    assert "retry_after_seconds" not in error_for_status(503, "https://h/x", retry_after=text).context


@given(st.text())
@example("0\x1f")
def test_any_text_as_retry_after_is_a_time_or_none(text: str) -> None:
    asked = error_for_status(503, "https://h/x", retry_after=text).context.get("retry_after_seconds", 0.0)
    assert isinstance(asked, float)
    assert 0.0 <= RetryPolicy().pause_seconds(1, error_for_status(503, "https://h/x", retry_after=text), 0.5) <= 120.0
