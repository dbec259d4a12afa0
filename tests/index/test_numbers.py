"""Numbers that SQLite has no number for: a query that computes with them is refused, and never gives other rows."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.config import IndexOptions
from sqlstream.errors import QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import stamp_sqlite
from sqlstream.index.query import query_rows
from sqlstream.index.sql.sandbox import run_query
from sqlstream.index.types.models import ANY, ENCODING
from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import all_rows, build

SMALL, LARGE = Decimal("0.123456789012345678"), Decimal("-12345678901234567.89")
WRONG = [
    "price < 1",
    "0 > price",
    "(price) BETWEEN 0 AND 1",
    "price IN (5, 6)",
    "coalesce(price, 0) > 1",
    "max(price, 0) = 0",
    "hash64 % 100 = 0",
    "hash64 & 1 = 1",
    "hash64 = 18446744073709551615",
    "hash64 < 18446744073709551615",
    "CAST(hash64 AS INTEGER) > 5",
    "hash64",
    "n > 0 AND -hash64 < 0",
]
RIGHT = {
    "n > 0": [1, 2, 3],
    "price IS NULL": [2],
    "price * 2 < 1 AND price * 2 > 0": [0],
    "CAST(price AS REAL) < 1": [0, 1],
    "abs(price) < 1": [0],
    "hash64 > 5": [0, 1, 3],
    "hash64 IN (17, -1)": [3],
    "hash64 IS NOT NULL": [0, 1, 3],
    "hash(hash64, 1) >= 0 AND hash(price, 1) >= 0": [0, 1, 2, 3],
    "label = 'price > 5'": [1],
}


def write(directory: Path) -> Path:
    path = directory / "t.parquet"
    table = {
        "index": ["a", "b", "c", "d"],
        "n": [0, 1, 2, 3],
        "label": ["x", "price > 5", None, ""],
        "price": pa.array([SMALL, LARGE, None, Decimal(5)], pa.decimal128(38, 18)),
        "hash64": pa.array([2**63, 2**64 - 1, None, 17], pa.uint64()),
        "cost": pa.array([Decimal("1.5"), Decimal("-1"), None, Decimal("12345678901234.5")], pa.decimal128(38, 2)),
        "count64": pa.array([5, 2**63 - 1, None, 0], pa.uint64()),
    }
    pq.write_table(pa.table(table), path, row_group_size=2)
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory = tmp_path_factory.mktemp("numbers")
    return build(directory, write(directory))


@pytest.mark.parametrize("condition", WRONG)
def test_a_query_that_would_take_other_rows_is_refused_with_the_row_and_the_cure(condition: str, index: Index) -> None:
    column = "price" if "price" in condition else "hash64"
    row = 0
    with pytest.raises(QueryError, match=rf"'{column}', of which row {row} is no number to SQLite.*sql_engine='duckdb'"):
        run_query(index, f"SELECT row FROM dataframe WHERE {condition}")


@pytest.mark.parametrize("condition", RIGHT)
def test_what_is_right_for_such_values_goes_on(condition: str, index: Index) -> None:
    found = run_query(index, f"SELECT row FROM dataframe WHERE {condition}")[1]
    assert [row for (row,) in found] == RIGHT[condition]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM dataframe ORDER BY price",
        "SELECT * FROM (SELECT *, price AS p FROM dataframe) WHERE p > 1",
        "SELECT sum(hash64) FROM dataframe",
        "SELECT a.* FROM dataframe a JOIN dataframe b ON a.price = b.price",
    ],
)
def test_it_is_seen_wherever_in_a_query_it_is(query: str, index: Index) -> None:
    with pytest.raises(QueryError, match="is no number to SQLite"):
        run_query(index, query)


def test_columns_whose_values_are_all_numbers_are_compared_as_ever(index: Index) -> None:
    found = run_query(index, "SELECT row FROM dataframe WHERE cost > 1 AND count64 % 5 = 0 ORDER BY cost")[1]
    assert found == [(0,), (3,)]
    assert run_query(index, "SELECT row FROM dataframe ORDER BY hash64 DESC, price IS NULL")[1] == [(1,), (0,), (3,), (2,)]


HASHES = pa.table(
    {"n": [0, 1, 2, 3], "hash64": pa.array([2**63, 17, None, 2**64 - 1], pa.uint64()), "own": [b"\xff" * 8, b"", None, b"x"]}
)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT n, hash64 AS other FROM dataframe", [2**63, 17, None, 2**64 - 1]),
        ("SELECT *, hash64 AS other FROM dataframe", [2**63, 17, None, 2**64 - 1]),
        ("SELECT n, hash64 AS other FROM dataframe WHERE n IN (0, 3)", [2**63, 2**64 - 1]),
        ("SELECT max(hash64) AS other FROM dataframe", [2**64 - 1]),
        ("SELECT own AS other, hash64 FROM dataframe WHERE n = 0", [b"\xff" * 8]),
        ("SELECT own AS other FROM dataframe", [b"\xff" * 8, b"", None, b"x"]),
    ],
)
def test_an_unsigned_integer_stays_one_under_another_name(query: str, expected: list[Any], tmp_path: Path) -> None:
    computed = build(tmp_path, HASHES, sql_query=query)
    assert [row["other"] for row in all_rows(computed)] == expected
    plain = build(tmp_path, HASHES)
    options = IndexOptions(src="memory")
    assert query_rows(plain, query, options, tmp_path / "index").column("other").to_pylist() == expected


def test_a_result_that_an_earlier_version_made_with_bytes_for_integers_is_made_again(tmp_path: Path) -> None:
    query = "SELECT n, hash64 AS other FROM dataframe"
    path = build(tmp_path, HASHES, sql_query=query).path
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM meta WHERE key = 'tells_numbers'")
        field = pa.schema([pa.field("other", pa.string(), metadata={ENCODING: ANY})]).serialize().to_pybytes()
        connection.execute("UPDATE columns SET arrow_field = ? WHERE name = 'other'", (field,))
    stamp_sqlite(path)
    assert [row["other"] for row in all_rows(build(tmp_path, HASHES, sql_query=query))] == [2**63, 17, None, 2**64 - 1]


def test_the_chunks_of_a_lazy_index_are_asked_one_by_one(tmp_path: Path) -> None:
    index = open_lazily(tmp_path, write(tmp_path), chunk_rows=2, where="hash64 % 2 = 1")
    with pytest.raises(QueryError, match="row 0 is no number to SQLite"):
        rows_of(index)
    assert [row["n"] for row in index.read(1, []).rows(index.read(1, []).row_ids)] == [3]


def test_duckdb_computes_with_them(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    taken = build(tmp_path, write(tmp_path), where="price < 1 OR hash64 % 10 = 7", sql_engine="duckdb")
    assert [row["n"] for row in all_rows(taken)] == [0, 1, 3]


TEXTS = pa.table({"index": ["a", "b", "c"], "size": ["9", "10", "none"], "n": [9.6, 10.0, None], "day": ["2024-01-31"] * 3})


@pytest.mark.parametrize("wrong", ["size > 8", "size >= -1.5", "8 < size", "n > 1 AND t.size BETWEEN 1 AND 9"])
def test_texts_are_not_ordered_with_numbers(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=r"'10' comes before '9' among texts: write CAST\(.size. AS REAL\)"):
        build(tmp_path, TEXTS, sql_query=f"SELECT * FROM dataframe t WHERE {wrong}")


DAYS = pa.table(
    {"n": [1, 2], "day": [dt.date(2024, 1, 30), dt.date(2024, 2, 1)], "at": [dt.datetime(2024, 1, 30, n) for n in (1, 2)]}
)


@pytest.mark.parametrize(
    ("wrong", "why"),
    {
        "at > 1700000000": "'at', which are texts, are more or less than a number",
        "d.day BETWEEN 20240130 AND 20240201": "'day', which are texts, are more or less than a number",
        "day + 1 > '2024-02-01'": "it computes with 'day'",
        "n > 0 AND 5 < n - d.at": "it computes with 'at'",
        "(d.at) > '2024-01-01' OR at / 86400 > 0": "it computes with 'at'",
        "strftime(day, '%Y') = '2024'": "write strftime('%Y', x)",
        "n = 1 OR strftime(date(at, '+1 day'), '%m') = '01'": "write strftime('%m', x)",
    }.items(),
)
def test_moments_and_days_are_no_numbers(wrong: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=re.escape(why)):
        build(tmp_path, DAYS, sql_query=f"SELECT * FROM dataframe d WHERE {wrong}")


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        ("SELECT * FROM dataframe WHERE date(day, '+1 day') < '2024-02-01' AND n*1 > 0", [1]),
        ("SELECT *, day AS d, n * 2 AS m, -n AS o FROM dataframe", [1, 2]),
        (
            "SELECT n, julianday(day) - 5 AS j, epoch(at) / 60 AS e, at FROM dataframe WHERE strftime('%Y', day) = '2024'",
            [1, 2],
        ),
        ("SELECT count(*) AS n, day FROM dataframe GROUP BY day", [1, 1]),
        ("SELECT n FROM (SELECT n, julianday(day) AS day FROM dataframe) WHERE day - 1 > 2460340", [2]),
    ],
)
def test_what_is_a_number_of_moments_may_be_computed_with(query: str, numbers: list[int], tmp_path: Path) -> None:
    assert [row["n"] for row in all_rows(build(tmp_path, DAYS, sql_query=query))] == numbers


@pytest.mark.parametrize(
    ("condition", "keys"),
    [
        ("CAST(size AS REAL) > 8", "ab"),
        ("size = 9 OR size IN (10)", "ab"),
        ("size > '8'", "ac"),
        ("length(size) > 1", "bc"),
        ("CAST(size AS STRING) = '10'", "b"),
        ("CAST(n AS DOUBLE) > 9.7 OR CAST(CAST(n AS DECIMAL(3, 1)) AS VARCHAR(9)) = '9.6'", "ab"),
    ],
)
def test_casts_and_texts_mean_what_they_say(condition: str, keys: str, tmp_path: Path) -> None:
    assert "".join(str(row["index"]) for row in all_rows(build(tmp_path, TEXTS, where=condition))) == keys


def test_a_number_that_is_computed_under_the_name_of_a_text_is_one(tmp_path: Path) -> None:
    index = build(tmp_path, TEXTS, sql_query='SELECT "index", length(size) AS size FROM dataframe', where="size > 1")
    assert [row["size"] for row in all_rows(index)] == [2, 4]


@pytest.mark.parametrize("kind", ["DATE", "timestamp with time zone", "BOOLEAN", "UUID", "INTERVAL"])
def test_a_cast_that_sqlite_would_take_for_one_to_a_number_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=f"has a CAST to {kind.upper()}, of which SQLite makes a number"):
        build(tmp_path, TEXTS, where=f"n > 0 AND CAST((day) AS {kind}) > 1")


@pytest.mark.parametrize("scales", [(18, 20), (20, 18), (18, 20, 30)], ids=str)
def test_decimals_of_files_with_other_scales_are_equal(tmp_path: Path, scales: tuple[int, ...]) -> None:
    prices = [SMALL, LARGE, Decimal("0.5"), None]
    for number, scale in enumerate(scales):
        pq.write_table(pa.table({"price": pa.array(prices, pa.decimal256(60, scale))}), tmp_path / f"{number}.parquet")
        if number == 1:  # the third file is added to the index of two
            build(tmp_path, tmp_path / "*.parquet")
    index = build(tmp_path, tmp_path / "*.parquet")
    found = run_query(index, "SELECT price, count(*), count(DISTINCT hash(price, 1)) FROM dataframe GROUP BY price")[1]
    assert [count for _, count, _ in found] == [len(scales)] * 4
    assert [row["price"] for row in all_rows(index)] == prices * len(scales)
    lazily = rows_of(open_lazily(tmp_path, tmp_path / "*.parquet", where="hash(price, 1) % 2 = 0"))
    built = all_rows(build(tmp_path, tmp_path / "*.parquet", sql_query="SELECT * FROM dataframe WHERE hash(price, 1) % 2 = 0"))
    assert lazily == built
