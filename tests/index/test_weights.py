"""Weights by SQL, by column and by array; what is refused."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.errors import ConfigError, QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.weights import WeightsSpec, WeightTable, open_weights
from sqlstream.order.weights import WeightedRows
from sqlstream.process import locks
from tests.index.sources import all_rows, build, write_csv

TEXT = "index,score,label,my weight\na,7.5,cat,1\nb,6,cat,0\nc,,dog,2.5\nd,9,cat,0.5\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "t.csv", TEXT)


def drawn(index: Index, spec: WeightsSpec, size: int, epoch: int = 0) -> dict[str, int]:
    """Return how often each key comes in an epoch of `size`."""
    table = open_weights(index, spec, index.path.parent)
    rows = WeightedRows(num_rows=table.num_rows, num_positions=size, cumulative=table.cumulative())
    selected = rows.rows_at(1, epoch, np.arange(size))
    keys = [str(row["index"]) for row in index.rows(index.row_ids(selected).tolist())]
    return {key: keys.count(key) for key in sorted(set(keys))}


SPECS: list[tuple[Any, int, dict[str, int]]] = [
    ("1 + 3 * coalesce(score > 6, 0)", 10, {"a": 4, "b": 1, "c": 1, "d": 4}),
    ("my weight", 8, {"a": 2, "c": 5, "d": 1}),
    ("(label = 'cat') / 2 -- half of them", 3, {"a": 1, "b": 1, "d": 1}),
    ("1.0 / count(*) OVER (PARTITION BY label)", 6, {"a": 1, "b": 1, "c": 3, "d": 1}),
    ([0, 0, 1, 3], 4, {"c": 1, "d": 3}),
    (np.array([1, 1, 0, 0], np.float32), 4, {"a": 2, "b": 2}),
]


@pytest.mark.parametrize(("spec", "size", "expected"), SPECS, ids=[str(spec[0]) for spec in SPECS])
def test_rows_come_as_often_as_they_weigh(spec: Any, size: int, expected: dict[str, int], path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    for epoch in range(3):
        assert drawn(index, spec, size, epoch) == expected


def test_weights_see_the_selected_rows_in_their_order(path: Path, tmp_path: Path) -> None:
    query = "SELECT * FROM dataframe WHERE index != 'b' ORDER BY index DESC; -- d, c, a"
    index = build(tmp_path, path, sql_query=query)
    assert drawn(index, "CASE index WHEN 'd' THEN 3 WHEN 'a' THEN 1 ELSE 0 END", 4) == {"a": 1, "d": 3}
    assert drawn(index, "1.0 / count(*) OVER (PARTITION BY label)", 4) == {"a": 1, "c": 2, "d": 1}
    assert drawn(index, [3, 0, 1], 4) == {"a": 1, "d": 3}
    cut = build(tmp_path, path, sql_query=query, max_size=2)
    assert drawn(cut, "count(*) OVER ()", 2) == {"c": 1, "d": 1}
    computed = build(tmp_path, path, sql_query="SELECT index, score * 2 AS double FROM dataframe WHERE score > 6")
    assert drawn(computed, "double", 33) == {"a": 15, "d": 18}
    assert len(all_rows(computed)) == 2


def test_a_table_is_made_once_and_found_again(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    one = open_weights(index, "coalesce(score, 1)", tmp_path / "index")
    before = one.path.read_bytes()
    one.path.write_bytes(before[:128] + np.cumsum([1, 1, 1, 1]).astype("<i8").tobytes())  # would not survive a second making
    two = open_weights(index, "coalesce(score, 1)", tmp_path / "index")
    assert two.cumulative().tolist() == [1, 2, 3, 4]
    assert (two.fingerprint, two.total) == (one.fingerprint, 4)
    assert open_weights(index, "coalesce(score, 2)", tmp_path / "index").fingerprint != one.fingerprint
    assert open_weights(index, [1, 1, 1, 1], tmp_path / "index").fingerprint != one.fingerprint
    assert isinstance(pickle.loads(pickle.dumps(two)).cumulative(), np.memmap)
    one.path.write_bytes(b"garbage")
    assert open_weights(index, "coalesce(score, 1)", tmp_path / "index").total == one.total
    assert one.path.read_bytes() == before


def test_a_table_in_use_is_not_removed_with_the_cache(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    table = open_weights(index, "coalesce(score, 1)", tmp_path / "index")
    fd = locks.open_descriptor(table.path, os.O_RDWR)
    assert not locks.try_lock(fd)  # what `cache clear --index` tries
    index.close()
    assert locks.try_lock(fd)
    locks.close_descriptor(fd)


def test_a_column_of_integers_above_int64_is_one_of_weights(tmp_path: Path) -> None:
    index = build(tmp_path, write_csv(tmp_path / "large.csv", f"index,n\na,{2**62}\nb,{2**63}\nc,{2**62}\n"))
    assert drawn(index, "n", 8) == {"a": 2, "b": 4, "c": 2}


WRONG: list[tuple[Any, type[Exception], str]] = [
    ("score", ConfigError, r"row 2 \(index='c'\) has no value .*coalesce"),
    ("coalesce(score, 0) - 7", ConfigError, r"row 1 \(index='b'\) has -1"),
    ("0", ConfigError, "add up to 0: give at least one row"),
    ("label", ConfigError, "row 0 has 'cat', which is no number"),
    ("1e999", ConfigError, "has inf"),
    ("1, 2", QueryError, "weights='1, 2' is not one SQL expression: it is 2 values a row: give one"),
    ("1) AS x, (2", QueryError, r"not one SQL expression: a bracket '\)' closes none"),
    ("1) FROM dataframe UNION ALL SELECT 'x', (5", QueryError, "not one SQL expression"),
    ("scoer > 6", QueryError, "no such column: scoer.*columns: row, index, score"),
    ("(SELECT count(*) FROM sqlite_master)", QueryError, "only the table"),
    ("1; DROP TABLE rows", QueryError, "more than one statement"),
    ([1, 2, 3], ConfigError, r"shape \(3,\), but 4 rows"),
    ([1, 2, 3, float("nan")], ConfigError, "row 3 .* has no value"),
    ([1, 2, 3, -1], ConfigError, "row 3 .* has -1"),
    ([0, 0, 0, 0], ConfigError, "add up to 0"),
    (["x"], ConfigError, "no numbers"),
    ([1, 2, 10**400, 3], ConfigError, "row 2 of the selected ones has an integer of 1329 bits, .*: give an SQL expression"),
    ([1, 2j, 3, 4], ConfigError, r"row 0 .* has np.complex128\(1\+0j\), which is no real number"),
    (np.ones(4, complex), ConfigError, "no real number"),
    (np.array([1, 2, 3j, 4], object), ConfigError, "row 2 .* has 3j"),
    (np.full(4, "2024-01-01", "datetime64[D]"), ConfigError, "row 0 .*2024-01-01"),
    (np.ones(4, "timedelta64[s]"), ConfigError, "row 0 "),
    ([1, np.timedelta64(1, "s"), None, "x"], ConfigError, "row 1 "),
    ([1, 2, [3], 4], ConfigError, "no numbers"),
    (torch.ones(4, dtype=torch.bfloat16), ConfigError, r"no numbers \(.*BFloat16\): give"),
    (torch.ones(4, requires_grad=True), ConfigError, r"no numbers \(.*requires grad.*\): give"),
    ([1, 2, 3, "4x"], ConfigError, r"^weights \(an array\) are no numbers: row 3 of the selected ones has .*4x"),
    (np.ma.array([1, 2, 3, 4], mask=[False, False, True, False]), ConfigError, "row 2 .* has no value"),
]


@pytest.mark.parametrize(("spec", "error", "message"), WRONG, ids=[str(spec[0])[:60] for spec in WRONG])
def test_weights_that_are_none_are_refused(spec: Any, error: type[Exception], message: str, path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    with pytest.raises(error, match=message):
        open_weights(index, spec, tmp_path / "index")
    assert [found.suffix for found in (tmp_path / "index").iterdir()] == [".sqlite"]


def test_an_integer_that_python_does_not_write_out_is_refused_like_any_other(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 1 of the selected ones has an integer of 33216 bits"):
        open_weights(build(tmp_path, path), [1, -(10**9999), 2, 3], tmp_path / "index")


def test_two_processes_agree_on_every_row(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    spec = "coalesce(score, 0.1)"

    def rows_of(table: WeightTable) -> object:
        rows = WeightedRows(num_rows=4, num_positions=97, cumulative=table.cumulative())
        return rows.rows_at(5, 8, np.arange(97)).tolist()

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        table = pool.apply(open_weights, (index, spec, tmp_path / "index"))
    (tmp_path / "elsewhere").mkdir()
    assert rows_of(table) == rows_of(open_weights(index, spec, tmp_path / "elsewhere"))
