"""Shares of splits that are none."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from sqlstream.errors import ConfigError
from sqlstream.index.splits import plan_splits


@pytest.mark.parametrize(
    ("share", "why"),
    [
        (np.float32(0.1), "is of the type float32: give a float, such as 0.1"),
        (Decimal("0.1"), "is of the type Decimal: give a float"),
        (None, "is of the type NoneType"),
        ("0.1", "is out of range: give a share above 0, at most 1"),
        (1.5, "is out of range: give a share above 0, at most 1"),
        (float("nan"), "is out of range"),
    ],
)
def test_a_share_that_is_none_is_refused_by_what_is_wrong_with_it(share: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=f"^split val=.* {why}"):
        plan_splits({"val": share})


def test_a_double_of_numpy_is_a_float() -> None:
    assert plan_splits({"val": np.float64(0.25)}) == plan_splits({"val": 0.25})
