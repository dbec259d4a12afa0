"""A thousand samples cost no more than they did: a count may fall, and rises only with a reason that stands here."""

from __future__ import annotations

import pytest

from tests.pins import counts
from tests.pins.pinned import pinned

SLACK = 1.1
"""A tenth more: counts are the same in every run, but a mended fault may cost a call or two."""
CHECKS = "rows are checked to be whole numbers, use after close is an error, threads take turns at the global generators"
SECTIONS = (
    "what objects keep in memory has a lock of its own, in a section that no signal handler interrupts; before, one lock of "
    "the process was held through whole transactions, for all caches"
)
HANDLERS = (
    "a handler that raises as a section begins or ends leaves no other signal put off, and no descriptor open in what looks at "
    "the lock of a file"
)
RISEN: dict[tuple[str, str], tuple[float, str]] = {
    ("1000 samples, bytes, hit", "transactions"): (3, "schema 5 writes the limit in force, and when entries were last used"),
    ("1000 samples, bytes, miss", "calls"): (137_000, SECTIONS),
    ("1000 samples, paths, miss", "calls"): (151_000, f"{SECTIONS}; {HANDLERS}"),
    ("1000 samples, paths, hit", "calls"): (59_000, f"{SECTIONS}; {HANDLERS}"),
    ("one access, bytes", "calls"): (106, f"{CHECKS}; {HANDLERS}"),
    ("one access, paths", "calls"): (182, f"{SECTIONS}; {CHECKS}; {HANDLERS}"),
    ("1000 samples, bytes, squeeze", "calls"): (209_000, f"{SECTIONS}; {HANDLERS}"),
    ("one pinned object", "calls"): (112, SECTIONS),
}
"""(what, count): the new bound, and why it had to rise."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    now: dict[str, dict[str, float]] = counts.compute(tmp_path_factory.mktemp("counts"))["counts"]
    return now


@pytest.mark.parametrize("what", pinned("counts")["counts"])
def test_samples_cost_no_more_than_they_did(what: str, found: dict[str, dict[str, float]]) -> None:
    before = pinned("counts")["counts"][what]
    bounds = {name: RISEN.get((what, name), (number * SLACK, ""))[0] for name, number in before.items()}
    risen = {name: (number, found[what][name]) for name, number in before.items() if found[what][name] > bounds[name]}
    assert risen == {}, f"{what}: (before, now) of each count that has risen"
