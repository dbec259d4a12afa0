"""Packs as values: what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sqlstream.config import OnLong, Packs
from sqlstream.errors import ConfigError

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Packs("", 8), r"length='' is no SQL.*`sqlstream index measure`"),
    (lambda: Packs(7, 8), "length=7 is no SQL and no function"),  # type: ignore[arg-type]  # what a user may do
    (lambda: Packs("n", 8, lookahead=9), "lookahead=9 with length='n': packs of lengths in SQL are planned over all rows"),
    (lambda: Packs(None, 8, lookahead=0), "Packs: lookahead=0"),
    (lambda: Packs(None, 8, pack_fn=dict), "length=None with pack_fn=<class 'dict'>, which does not say how long a row is"),
    (lambda: Packs("n", 0), "Packs: capacity=0"),
    (lambda: Packs("n", 8, max_rows=0), "Packs: max_rows=0"),
    (lambda: Packs("n", 8, on_long="cut"), "Packs: on_long='cut' is unknown: give one of raise, drop, truncate, split"),
    (lambda: Packs("n", 8, pack_fn=3), "pack_fn=3 cannot be called"),  # type: ignore[arg-type]  # what a user may do
]


@pytest.mark.parametrize(("make", "problem"), WRONG, ids=[problem for _, problem in WRONG])
def test_wrong_packs_are_refused_with_their_value(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        make()


def test_what_becomes_of_long_rows_is_given_as_a_word() -> None:
    assert Packs("n", 8, on_long="split").on_long is OnLong.SPLIT
