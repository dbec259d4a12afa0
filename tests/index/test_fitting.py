"""Columns that a query computes under a name of the source's, or renames: no value is cut to the source's type."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sqlite3
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import SchemaError
from sqlstream.index.file.intact import stamp_sqlite

MOMENT = dt.datetime(2020, 1, 1, 12)
ROWS = pa.table(
    {
        "small": pa.array([100, None], pa.int8()),
        "byte": pa.array([200, 1], pa.uint8()),
        "hash64": pa.array([5, 6], pa.uint64()),
        "single": pa.array([0.5, None], pa.float32()),
        "double": pa.array([0.5, None]),
        "price": pa.array([Decimal("1.50"), None], pa.decimal128(4, 2)),
        "made": pa.array([MOMENT, None], pa.timestamp("ms")),
        "zoned": pa.array([MOMENT, None], pa.timestamp("us", "UTC")),
        "at": pa.array([dt.time(12, 30), None], pa.time32("ms")),
    }
)


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "rows.parquet"
    pq.write_table(ROWS, path)
    return str(path)


@pytest.mark.parametrize(
    ("expression", "name", "kind", "first"),
    [
        ("small * 1000", "small", pa.int64(), 100_000),
        ("small + 1", "small", pa.int8(), 101),
        ("-byte", "byte", pa.int64(), -200),
        ("-hash64", "hash64", pa.int64(), -5),
        ("x'0001'", "hash64", pa.binary(), b"\x00\x01"),
        ("single + 0.1", "single", pa.float64(), 0.6),
        ("single * 1e300", "single", pa.float64(), 5e299),
        ("single * 2", "single", pa.float32(), 1.0),
        ("9007199254740993", "double", pa.int64(), 9007199254740993),
        ("iif(small, 9007199254740993, 0.5)", "mixed", pa.string(), 9007199254740993),
        ("price * 1000", "price", pa.decimal128(6, 2), Decimal("1500.00")),
        ("strftime('%Y-%m-%d %H:%M:%f500', made)", "made", pa.timestamp("us"), MOMENT.replace(microsecond=500)),
        ("strftime('%Y-%m-%d %H:%M:%f5', made)", "made", pa.string(), "2020-01-01 12:00:00.0005"),
        ("strftime('%Y-%m-%dT%H:%M:%S', made)", "made", pa.string(), "2020-01-01T12:00:00"),
        ("'2020-01-01 12:00:00.000005'", "made", pa.timestamp("us"), MOMENT.replace(microsecond=5)),
        ("'1200-01-01 12:00:00.000000005'", "made", pa.string(), "1200-01-01 12:00:00.000000005"),
        ("'2020-01-01T12:00:00+05:00'", "zoned", pa.string(), "2020-01-01T12:00:00+05:00"),
        ("strftime('%H', made)", "at", pa.string(), "12"),
        ("'04:05:06+01:00'", "at", pa.string(), "04:05:06+01:00"),
        ("'12:30:00.000001'", "at", pa.time64("us"), dt.time(12, 30, 0, 1)),
    ],
)
def test_a_computed_column_has_a_type_that_holds_its_values(
    source: str, tmp_path: Path, expression: str, name: str, kind: pa.DataType, first: Any
) -> None:
    query = f"SELECT {expression} AS {name} FROM dataframe"
    with StreamingDataset(source, str(tmp_path / "cache"), sql_query=query, columns_to_download=[]) as dataset:
        table = dataset.head(1)
        assert table.schema.field(name).type == kind
        assert dataset[0][name] == first
        assert type(dataset[0][name]) is type(first)
        assert table[name][0].as_py() == (str(first) if kind == pa.string() else first)


BIG = 2**53 + 1
NESTED = pa.table(
    {
        "small": pa.array([[1, 2], None], pa.list_(pa.int16())),
        "large": pa.array([[1], [BIG]], pa.list_(pa.int64())),
        "single": pa.array([[0.5, float("inf")], []], pa.list_(pa.float32())),
        "moments": pa.array([[MOMENT], None], pa.list_(pa.timestamp("us", "UTC"))),
        "struct": pa.array([{"n": 1, "x": 0.5}, None], pa.struct([("n", pa.int8()), ("x", pa.float32())])),
        "map": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int8())),
        "prices": pa.array([[Decimal("1.50")], None], pa.list_(pa.decimal128(4, 2))),
        "blobs": pa.array([[b"a", None], None], pa.list_(pa.binary())),
    }
)
DOUBLES, ANY_JSON = pa.list_(pa.float64()), pa.string()


@pytest.mark.parametrize(
    ("expression", "name", "kind", "first"),
    [
        ("'[3]'", "small", pa.list_(pa.int16()), [3]),
        ("'[100000]'", "small", pa.list_(pa.int64()), [100_000]),
        ("'[1.5, 2]'", "small", DOUBLES, [1.5, 2.0]),
        ("'[true]'", "small", ANY_JSON, [True]),
        ("""'["a"]'""", "small", ANY_JSON, ["a"]),
        ("'[1, [2]]'", "small", ANY_JSON, [1, [2]]),
        ("iif(row, large, '[1.5]')", "large", ANY_JSON, [1.5]),
        ("iif(row, '[2.5]', '[1]')", "large", DOUBLES, [1.0]),
        ("'[9007199254740993, 1.5]'", "large", ANY_JSON, [BIG, 1.5]),
        ("'[1]'", "single", pa.list_(pa.float32()), [1.0]),
        ("'[0.1]'", "single", DOUBLES, [0.1]),
        ("'[9007199254740993]'", "single", ANY_JSON, [BIG]),
        ("""'["noon"]'""", "moments", ANY_JSON, ["noon"]),
        ("""'{"x": 1, "n": 2}'""", "struct", pa.struct([("n", pa.int8()), ("x", pa.float32())]), {"n": 2, "x": 1.0}),
        ("""'{"x": 0.1, "n": 500}'""", "struct", pa.struct([("n", pa.int64()), ("x", pa.float64())]), {"n": 500, "x": 0.1}),
        ("""'{"n": 2}'""", "struct", ANY_JSON, {"n": 2}),
        ("""'{"n": 2, "x": 1.5, "y": 3}'""", "struct", ANY_JSON, {"n": 2, "x": 1.5, "y": 3}),
        ("'[]'", "struct", ANY_JSON, []),
        ("""'[["k", 2.5]]'""", "map", pa.map_(pa.string(), pa.float64()), [("k", 2.5)]),
        ("""'{"k": 2}'""", "map", ANY_JSON, {"k": 2}),
        ("""'["1.555"]'""", "prices", ANY_JSON, ["1.555"]),
        ("""'["a b!"]'""", "blobs", ANY_JSON, ["a b!"]),
        ("'no JSON'", "small", pa.string(), "no JSON"),
    ],
)
def test_lists_and_objects_that_a_query_computes_are_the_same_in_samples_and_in_arrow(
    tmp_path: Path, expression: str, name: str, kind: pa.DataType, first: Any
) -> None:
    pq.write_table(NESTED, tmp_path / "rows.parquet")
    query = f"SELECT {expression} AS {name} FROM dataframe"
    with StreamingDataset(tmp_path / "rows.parquet", tmp_path / "cache", sql_query=query, columns_to_download=[]) as dataset:
        table = dataset.head(1)
        (shown,) = table[name].to_pylist()
        assert table.schema.field(name).type == kind
        assert repr(dataset[0][name]) == repr(first) or isinstance(first, dict)
        assert dataset[0][name] == first
        assert (json.loads(str(shown)) if kind == ANY_JSON and shown != first else shown) == first


def test_a_query_that_keeps_nested_columns_keeps_their_types(tmp_path: Path) -> None:
    pq.write_table(NESTED, tmp_path / "rows.parquet")
    query = "SELECT *, 1 AS one FROM dataframe"
    with StreamingDataset(tmp_path / "rows.parquet", tmp_path / "cache", sql_query=query, columns_to_download=[]) as dataset:
        assert dataset.head(2).drop(["one"]) == NESTED


def test_a_query_that_keeps_columns_keeps_their_types(source: str, tmp_path: Path) -> None:
    query = "SELECT *, 1 AS one FROM dataframe"
    with StreamingDataset(source, str(tmp_path / "cache"), sql_query=query, columns_to_download=[]) as dataset:
        assert dataset.head(2).drop(["one"]) == ROWS


RENAMING = [
    "SELECT {} FROM dataframe",
    "SELECT t.* FROM (SELECT {}, row AS number FROM samples) AS t ORDER BY t.number",
    "WITH t AS (SELECT {} FROM dataframe) SELECT * FROM t",
    "SELECT {} FROM dataframe WHERE row = 0 UNION ALL SELECT {} FROM dataframe WHERE row = 1",
    "SELECT {} FROM dataframe AS a JOIN dataframe AS b ON a.row = b.row",
]


@pytest.mark.parametrize("form", RENAMING)
@pytest.mark.parametrize("rows", [ROWS, NESTED], ids=["plain", "nested"])
def test_a_column_that_a_query_renames_keeps_its_type(rows: pa.Table, form: str, tmp_path: Path) -> None:
    pq.write_table(rows, tmp_path / "rows.parquet")
    table = "a." if "JOIN" in form else ""
    query = form.replace("{}", ", ".join(f"{table}{name.upper()} AS {name}_2" for name in rows.column_names))
    renamed = rows.rename_columns([f"{name}_2" for name in rows.column_names])
    with StreamingDataset(tmp_path / "rows.parquet", tmp_path / "cache", columns_to_download=[]) as dataset:
        assert dataset.query(query).select(renamed.column_names) == renamed
    with StreamingDataset(tmp_path / "rows.parquet", tmp_path / "cache", sql_query=query, columns_to_download=[]) as dataset:
        assert dataset.head(2).select(renamed.column_names) == renamed


def test_columns_that_change_names_with_each_other_keep_their_types(source: str, tmp_path: Path) -> None:
    query = "SELECT made AS small, small AS made, 1 AS flag FROM (SELECT made, small FROM samples)"
    with StreamingDataset(source, tmp_path / "cache", sql_query=query, columns_to_download=[]) as dataset:
        assert [dataset.schema.field(name).type for name in ("small", "made", "flag")] == [
            pa.timestamp("ms"), pa.int8(), pa.int64(),
        ]  # fmt: skip
        assert (dataset[0]["small"], dataset[0]["made"]) == (MOMENT, 100)


def test_a_name_within_a_query_for_what_it_computes_is_no_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [0, 1, 2], "is_odd": [False, True, False]}), tmp_path / "rows.parquet")
    query = "SELECT is_odd AS rest FROM (SELECT n % 2 AS is_odd FROM dataframe)"
    with StreamingDataset(tmp_path / "rows.parquet", tmp_path / "cache", sql_query=query, columns_to_download=[]) as dataset:
        assert [repr(sample["rest"]) for sample in dataset] == ["0", "1", "0"]


def test_a_result_that_an_earlier_version_made_with_other_types_is_made_again(source: str, tmp_path: Path) -> None:
    def first(query: str) -> tuple[Path, Any]:
        with StreamingDataset(source, tmp_path / "cache", sql_query=query, columns_to_download=[]) as dataset:
            return dataset.index.path, dataset[0]["day"]

    path, moment = first("SELECT made AS day FROM dataframe")
    assert moment == MOMENT
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM meta WHERE key = 'tells_renamed'")
        field = pa.schema([pa.field("day", pa.string())]).serialize().to_pybytes()
        connection.execute("UPDATE columns SET arrow_field = ? WHERE name = 'day'", (field,))
    stamp_sqlite(path)
    assert first("SELECT made AS day FROM dataframe") == (path, MOMENT)


def test_negative_numbers_beside_those_of_uint64_stay(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": pa.array([-1], pa.int64())}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"n": pa.array([1 << 63], pa.uint64())}), tmp_path / "1.parquet")
    query = "SELECT *, 1 AS one FROM dataframe"
    with StreamingDataset(
        str(tmp_path / "*.parquet"), str(tmp_path / "cache"), sql_query=query, columns_to_download=[]
    ) as dataset:
        assert [sample["n"] for sample in dataset] == [-1, 1 << 63]
        assert dataset.query("SELECT one FROM dataframe").num_rows == 2
        with pytest.raises(SchemaError, match="'n' has negative integers in some files"):
            dataset.head(2)
        with pytest.raises(SchemaError, match="'n' has negative integers in some files"):
            dataset.query("SELECT n FROM dataframe")


@pytest.mark.parametrize("expression", ["substr(made, 1, 19)", "iif(row, made, substr(made, 1, 19))", "made || '000'"])
def test_moments_that_a_query_computes_are_compared_by_what_they_mean(source: str, tmp_path: Path, expression: str) -> None:
    query = f"SELECT {expression} AS made, small FROM dataframe"
    with StreamingDataset(source, tmp_path / "cache", sql_query=query, columns_to_download=[], cache_limit=None) as dataset:
        found = [
            dataset.query(f"SELECT small FROM dataframe WHERE made {condition}").num_rows
            for condition in (
                "= '2020-01-01T12:00'",
                "<= '2020-01-01 12:00'",
                "< '2020-01-01 12:00:00.001'",
                "> '2020-01-01 12:00'",
            )
        ]
    assert found == [1, 1, 1, 0]
