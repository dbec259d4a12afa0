"""The table of rows by length: what is in it, that it is made once, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from sqlstream.errors import ConfigError, QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.lengths import LengthTable, LengthTuning, open_lengths
from tests.index.sources import build, write_csv

TEXT = "index,n,text\na,7,one two\nb,3,x\nc,7,\nd,70000,y\ne,3,z\nf,1,w\n"


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return build(tmp_path, write_csv(tmp_path / "t.csv", TEXT))


def opened(index: Index, length: str = "n", rows_at_a_time: int = 65_536) -> LengthTable:
    return open_lengths(index, length, index.path.parent, tuning=LengthTuning(rows_at_a_time=rows_at_a_time))


def rows_of(table: LengthTable) -> dict[int, list[int]]:
    """The rows of each length, in the order of the table."""
    rows, ends = table.rows_at(np.arange(table.num_rows)).tolist(), np.cumsum(table.counts).tolist()
    bounds = zip(table.lengths.tolist(), table.counts.tolist(), ends, strict=True)
    return {length: rows[end - count : end] for length, count, end in bounds}


def test_rows_are_sorted_by_length_and_within_it_as_they_are_selected(index: Index) -> None:
    table = opened(index)
    assert rows_of(table) == {1: [5], 3: [1, 4], 7: [0, 2], 70_000: [3]}
    assert table.numbers_of([3, 0, 5]) == [70_000, 7, 1]
    assert rows_of(opened(index, "min(n, 5) * 2")) == {2: [5], 6: [1, 4], 10: [0, 2, 3]}
    assert rows_of(opened(index, "length(coalesce(text, '')) + 1.0")) == {1: [2], 2: [1, 3, 4, 5], 8: [0]}


def test_chunks_give_what_one_walk_gives(tmp_path: Path) -> None:
    for rows_at_a_time in (2, 4):
        folder = tmp_path / str(rows_at_a_time)
        folder.mkdir()
        index = build(folder, write_csv(folder / "t.csv", TEXT))
        assert rows_of(opened(index, rows_at_a_time=rows_at_a_time)) == {1: [5], 3: [1, 4], 7: [0, 2], 70_000: [3]}


def test_lengths_see_the_selected_rows_in_their_order(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", TEXT)
    index = build(tmp_path, path, sql_query="SELECT * FROM dataframe WHERE n < 100 ORDER BY index DESC")
    table = opened(index)
    assert rows_of(table) == {1: [0], 3: [1, 3], 7: [2, 4]}
    rows = index.rows(index.row_ids(table.rows_at(np.arange(table.num_rows))).tolist())
    assert [row["index"] for row in rows] == ["f", "e", "b", "c", "a"]
    assert table.num_rows == 5


def test_a_table_is_made_once_whatever_the_packs_and_found_again(index: Index) -> None:
    one = opened(index)
    made = one.path.stat()
    two = opened(index)
    assert (two.path, two.path.stat().st_ino, two.digest) == (one.path, made.st_ino, one.digest)
    assert opened(index, "n + 0").digest != one.digest
    sent: LengthTable = pickle.loads(pickle.dumps(one))
    assert rows_of(sent) == rows_of(one)
    assert len(pickle.dumps(one)) < 1000
    assert not list(one.path.parent.glob("*.tmp")), "nothing is left of the making"


REFUSED = [
    ("nullif(n, 3)", "row 1 has None: measure such rows once by `sqlstream index measure`"),
    ("n - 1", "row 5 has 0: a length is a whole number of 1 or more"),
    ("n / 2.0", r"row 0 has 3\.5: a length"),
    ("text", "row 0 has 'one two': a length"),
    ("n * 100000", "row 3 has 7000000000: a length is a whole number of 1 or more, and 4294967295 at most: "),
]


@pytest.mark.parametrize(("length", "problem"), REFUSED, ids=[length for length, _ in REFUSED])
def test_values_that_are_no_lengths_are_an_error_that_names_the_row(length: str, problem: str, index: Index) -> None:
    with pytest.raises(ConfigError, match=problem):
        opened(index, length)
    assert not list(index.path.parent.glob("*.tmp"))


def test_a_length_above_int64_is_named_as_it_is_written(tmp_path: Path) -> None:
    index = build(tmp_path, write_csv(tmp_path / "large.csv", f"index,n\na,5\nb,{2**63 + 5}\n"))
    with pytest.raises(ConfigError, match="row 1 has 9223372036854775813: a length"):
        opened(index)


def test_what_is_no_expression_and_too_many_lengths_are_refused(index: Index) -> None:
    for length in ("n, n", "n; DROP TABLE rows", "nothing_such"):
        with pytest.raises(QueryError):
            opened(index, length)
    with pytest.raises(ConfigError, match="more than 3 distinct lengths: round them up"):
        open_lengths(index, "n", index.path.parent, tuning=LengthTuning(max_lengths=3))
