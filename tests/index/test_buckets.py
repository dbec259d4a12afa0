"""The table of rows by bucket: what is in it, that it is made once, and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream.config import AspectBuckets, Buckets, Lengths
from sqlstream.errors import ConfigError, QueryError
from sqlstream.index.buckets import BucketTable, BucketTuning, open_buckets
from sqlstream.index.file.index import Index
from tests.index.sources import build, write_csv

TEXT = "index,width,height,label\na,640,480,x\nb,480,640,y\nc,1000,1000,x\nd,1920,1080,y\ne,641,480,x\nf,3000,300,z\n"
SIZES = AspectBuckets.of([(8, 6), (6, 8), (8, 8)])


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return build(tmp_path, write_csv(tmp_path / "t.csv", TEXT))


def opened(index: Index, by: str, into: Any = None, **options: Any) -> BucketTable:
    return open_buckets(index, Buckets(by, into, global_batch_size=1, **options), index.path.parent)


def keys_in(index: Index, table: BucketTable) -> dict[Any, str]:
    """The keys of the rows of each bucket, in the order of the table."""
    rows = index.rows(index.row_ids(table.rows_at(np.arange(table.num_rows))).tolist())
    keys = "".join(str(row["index"]) for row in rows)
    ends = np.cumsum(table.sizes).tolist()
    return {value: keys[end - size : end] for value, size, end in zip(table.values, table.sizes, ends, strict=True)}


def test_rows_are_sorted_by_bucket_and_within_it_as_they_are_selected(index: Index) -> None:
    assert keys_in(index, opened(index, "label")) == {"x": "ace", "y": "bd", "z": "f"}
    assert keys_in(index, opened(index, "width > 1000")) == {0: "abce", 1: "df"}
    assert keys_in(index, opened(index, "width, height", SIZES)) == {(6, 8): "b", (8, 6): "adef", (8, 8): "c"}
    assert keys_in(index, opened(index, "max(width, height)", Lengths((640, 1000, 3000)))) == {
        640: "ab",
        1000: "ce",
        3000: "df",
    }
    assert keys_in(index, opened(index, "label, width / 1000 > 1")) == {
        ("x", 0): "ace",
        ("y", 0): "b",
        ("y", 1): "d",
        ("z", 1): "f",
    }


def test_a_row_says_its_bucket_by_its_id(index: Index) -> None:
    table = opened(index, "width, height", SIZES, max_crop=0.5)
    assert table.values_of([5, 1, 0, 2]) == [None, (6, 8), (8, 6), (8, 8)]
    assert keys_in(index, table)[(8, 6)] == "ade", "the picture of which more would be cut away is left out"


def test_buckets_see_the_selected_rows_in_their_order(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", TEXT)
    index = build(tmp_path, path, sql_query="SELECT * FROM dataframe WHERE label != 'z' ORDER BY index DESC")
    assert keys_in(index, opened(index, "label")) == {"x": "eca", "y": "db"}
    twice = build(tmp_path, path, sql_query="SELECT index, width * 2 AS w FROM dataframe WHERE label = 'y'")
    assert keys_in(twice, opened(twice, "w")) == {960: "b", 3840: "d"}


def test_chunks_give_what_one_walk_gives(index: Index, tmp_path: Path) -> None:
    whole = keys_in(index, opened(index, "label"))
    other = open_buckets(index, Buckets("label", global_batch_size=1), tmp_path, tuning=BucketTuning(rows_at_a_time=2))
    assert other.path.parent == tmp_path
    assert keys_in(index, other) == whole


def test_a_table_is_made_once_and_found_again(index: Index) -> None:
    one = opened(index, "label")
    made = one.path.stat()
    two = opened(index, "label")
    assert (two.path, two.path.stat().st_ino, two.digest) == (one.path, made.st_ino, one.digest)
    assert opened(index, "label", unknown="drop").digest != one.digest
    assert opened(index, "width, height", SIZES).path != opened(index, "width, height", AspectBuckets.sdxl()).path
    sent = pickle.loads(pickle.dumps(one))
    assert (sent.values, sent.sizes, sent.rows_at(np.arange(6)).tolist()) == (one.values, one.sizes, [0, 2, 4, 1, 3, 5])
    assert len(pickle.dumps(one)) < 1000
    assert not list(one.path.parent.glob("*.tmp")), "nothing is left of the making"


def test_a_function_is_asked_once_for_each_distinct_value_and_what_it_says_names_the_table(index: Index) -> None:
    asked: list[Any] = []

    def by_side(side: int) -> int:
        asked.append(side)
        return side // 1000

    table = opened(index, "max(width, height)", by_side)
    assert sorted(asked) == [640, 641, 1000, 1920, 3000], "640 is that of two rows"
    assert keys_in(index, table) == {0: "abe", 1: "cd", 3: "f"}
    assert opened(index, "max(width, height)", lambda side: side // 1000).path == table.path
    assert opened(index, "max(width, height)", lambda side: side // 1001).path != table.path


def test_a_function_may_give_numbers_of_numpy(index: Index) -> None:
    plain = opened(index, "width", lambda width: (width > 640, width // 64))
    given = opened(index, "width", lambda width: (np.bool_(width > 640), np.int64(width // 64)))
    assert (given.values, given.sizes, given.path) == (plain.values, plain.sizes, plain.path)


def test_values_above_int64_are_the_integers_that_the_file_has(tmp_path: Path) -> None:
    index = build(tmp_path, write_csv(tmp_path / "large.csv", f"index,n\na,5\nb,{2**63 + 5}\nc,5\n"))
    assert keys_in(index, opened(index, "n")) == {5: "ac", 2**63 + 5: "b"}
    assert keys_in(index, opened(index, "n", lambda n: n.bit_length())) == {3: "ac", 64: "b"}


def test_unknown_values_are_an_error_or_left_out(tmp_path: Path) -> None:
    index = build(tmp_path, write_csv(tmp_path / "t.csv", "index,n\na,1\nb,\nc,1\n"))
    with pytest.raises(ConfigError, match=r"batches by 'n': row 1 has None.*unknown='drop'.*or find the values.*index measure"):
        opened(index, "n")
    table = opened(index, "n", unknown="drop")
    assert keys_in(index, table) == {1: "ac"}
    assert table.values_of([1]) == [None]


REFUSED: list[tuple[str, Any, str]] = [
    ("label, width", SIZES, "has .*, which is no size: AspectBuckets takes width and height"),
    ("label", SIZES, "row 0 has 'x', which is no size"),
    ("0 * width, height", SIZES, "which is no size"),
    ("label", Lengths((4,)), "which is no length"),
    ("width", Lengths((1000,)), "row 3 has 1920, which is beyond the last bound, 1000"),
    ("width", lambda _: None, "whose bucket is None: a bucket is a number"),
]


@pytest.mark.parametrize(
    ("by", "into", "problem"), REFUSED, ids=[f"{by} {number}" for number, (by, _, _) in enumerate(REFUSED)]
)
def test_values_without_a_bucket_are_an_error_that_names_the_row(by: str, into: Any, problem: str, index: Index) -> None:
    with pytest.raises(ConfigError, match=problem):
        opened(index, by, into)
    assert not list(index.path.parent.glob("*.tmp"))


def test_a_function_that_fails_is_an_error_that_names_the_value(index: Index) -> None:
    with pytest.raises(ConfigError, match=r"batches by 'width': into= failed on 641: ZeroDivisionError.*leave such rows out"):
        opened(index, "width", lambda width: 1 // (641 - width))


@pytest.mark.parametrize("by", ["width; DROP TABLE rows", "width,", "(SELECT 1", "width AS w", "nothing_such"])
def test_what_is_no_expression_is_refused(by: str, index: Index) -> None:
    with pytest.raises(QueryError):
        opened(index, by)


def test_too_many_buckets_and_no_row_are_refused(index: Index) -> None:
    few, directory = BucketTuning(max_buckets=2), index.path.parent
    with pytest.raises(ConfigError, match=r"more than 2 buckets.*into="):
        open_buckets(index, Buckets("label", global_batch_size=1), directory, tuning=few)
    with pytest.raises(ConfigError, match="leave out all 6 rows"):
        opened(index, "nullif(width, width)", unknown="drop")
