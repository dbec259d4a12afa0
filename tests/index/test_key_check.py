"""Finding keys that come twice, also among hashes that collide."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import SourceError
from sqlstream.index.file.key_check import find_duplicate
from tests.index.sources import build


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


MOMENT = dt.datetime(2024, 1, 1)
LONG = Decimal("12345678901234567.25")  # no float holds it
ONE_KEY: dict[str, tuple[pa.Array[Any], pa.Array[Any]]] = {
    "moments of two units": (pa.array([MOMENT], pa.timestamp("s")), pa.array([MOMENT], pa.timestamp("us"))),
    "the finer unit first": (pa.array([MOMENT], pa.timestamp("ns", "UTC")), pa.array([MOMENT], pa.timestamp("ms", "UTC"))),
    "decimals of two scales": (pa.array([LONG], pa.decimal128(30, 2)), pa.array([LONG], pa.decimal128(30, 4))),
    "the larger scale first": (pa.array([LONG], pa.decimal128(30, 4)), pa.array([LONG], pa.decimal128(30, 2))),
    "lists of two types": (pa.array([[1]]), pa.array([[1.0]])),
}


@pytest.mark.parametrize("files", ONE_KEY.values(), ids=list(ONE_KEY))
def test_a_key_in_two_forms_of_two_files_comes_twice(files: Sequence[pa.Array[Any]], tmp_path: Path) -> None:
    for number, keys in enumerate(files):
        pq.write_table(pa.table({"key": keys, "n": [number]}), tmp_path / f"{number}.parquet")
    for where in (None, "true"):
        with pytest.raises(SourceError, match=r"rows 0 and 1.* have the same value '.*' in the index column 'key'"):
            build(tmp_path, tmp_path / "*.parquet", key_column="key", where=where)
    index = build(tmp_path, tmp_path / "*.parquet", key_column="key", where="n = 1")
    assert (len(index), index.key_column) == (1, "key")


def test_keys_of_a_query_that_are_a_number_and_its_text_come_twice(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "t.parquet")
    query = "SELECT CASE n WHEN 1 THEN 5 ELSE '5' END AS id FROM dataframe"
    with pytest.raises(SourceError, match="rows 0 and 1 have the same value '5'"):
        build(tmp_path, tmp_path / "t.parquet", sql_query=query, key_column="id")
