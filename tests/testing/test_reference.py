"""The naive ledger refuses what must not happen."""

from __future__ import annotations

import pytest

from sqlstream.testing.reference import ReferenceLedger


@pytest.fixture
def ledger() -> ReferenceLedger:
    """Two owners; `a` is whole and pinned by the first, `b` is on its way for the second."""
    ledger = ReferenceLedger()
    ledger.join("first", 12_288)
    ledger.join("second", None)
    ledger.reserve("first", "a", 8192)
    ledger.publish("a", 4096)
    ledger.reserve("second", "b", 4096)
    return ledger


def test_it_counts_what_is_there_and_on_its_way_under_the_smallest_limit(ledger: ReferenceLedger) -> None:
    assert (ledger.charged_bytes, ledger.limit_bytes) == (8192, 12_288)
    assert (ledger.ready, ledger.filling) == ({"a": 4096}, {"b": "second"})
    assert ledger.pinned() == {"a", "b"}
    assert ledger.pinned("first") == {"a"}


def test_what_fits_is_what_is_left_beside_the_pinned(ledger: ReferenceLedger) -> None:
    assert ledger.fits({"c": 4096})
    assert not ledger.fits({"c": 8192})
    ledger.unpin("first", ["a"])
    assert ledger.evictable() == {"a"}
    assert ledger.fits({"c": 8192})
    assert not ledger.fits({"a": 4096, "c": 8192})
    ledger.join("first", 1)
    assert ledger.fits({"a": 4096})  # it is here


def test_who_leaves_takes_pins_limit_and_downloads_with_it(ledger: ReferenceLedger) -> None:
    ledger.leave("first")
    ledger.leave("second")
    assert (ledger.limit_bytes, ledger.ready, ledger.filling, ledger.pinned()) == (None, {"a": 4096}, {}, set())


def test_it_refuses_what_must_not_happen(ledger: ReferenceLedger) -> None:
    with pytest.raises(AssertionError, match="no room for c"):
        ledger.reserve("first", "c", 8192)
    with pytest.raises(AssertionError, match="a counts already"):
        ledger.reserve("second", "a", 4096)
    with pytest.raises(AssertionError, match="a is pinned"):
        ledger.evict(["a"])
    with pytest.raises(AssertionError, match="b is pinned, or on its way"):
        ledger.evict(["b"])
    with pytest.raises(AssertionError, match="a is whole already"):
        ledger.publish("a", 4096)
    with pytest.raises(AssertionError, match="b took more than was counted"):
        ledger.publish("b", 8192)
    with pytest.raises(AssertionError, match="third is not alive"):
        ledger.pin("third", ["a"])
    ledger.abandon("b")
    with pytest.raises(KeyError):
        ledger.unpin("first", ["b"])
