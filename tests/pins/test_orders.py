"""Runs give the rows and the random numbers that they gave with an earlier version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.pins import orders
from tests.pins.pinned import pinned

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.mark.parametrize("kind", ["plans", "shares", "weighted", "replacements"])
def test_the_arithmetic_of_orders_gives_the_same_rows(kind: str) -> None:
    compute: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "plans": orders.plans,
        "shares": orders.shares,
        "weighted": orders.weighted,
        "replacements": orders.replacements,
    }
    assert dict(compute[kind]()) == pinned("orders")[kind]


def test_whole_epochs_give_the_same_rows_and_draws(tmp_path: Path) -> None:
    before = pinned("orders")["datasets"]
    for name, found in orders.datasets(tmp_path):
        assert found == before.pop(name), name
    assert before == {}


def test_random_access_draws_the_same(tmp_path: Path) -> None:
    assert orders.random_access(tmp_path) == pinned("orders")["random access"]
