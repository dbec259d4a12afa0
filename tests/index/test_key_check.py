"""Finding keys that come twice, also among hashes that collide."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.index.file.key_check import find_duplicate


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 5))
def test_a_duplicate_is_found_exactly_when_there_is_one(keys: list[int], modulus: int) -> None:
    def fetch(rows: Any) -> list[tuple[int, int]]:
        return [(row, keys[row]) for row in rows]

    hashes = np.array([key % modulus for key in keys], np.int64)  # nearly all collide
    found = find_duplicate(hashes, fetch)
    if len(set(keys)) == len(keys):
        assert found is None
    else:
        assert found is not None
        one, two, key = found
        assert one < two
        assert keys[one] == keys[two] == key
