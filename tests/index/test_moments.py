"""Conditions on moments take the rows that any database would take, however the moment is written."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.config import JoinOptions
from sqlstream.errors import QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.sql.functions import changes
from sqlstream.index.sql.moments import with_whole_moments
from sqlstream.index.sql.sandbox import Sandbox, run_query
from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import all_rows, build

UNITS: list[Any] = ["s", "ms", "us", "ns"]
MOMENTS = [
    dt.datetime(2024, 1, 30, 23, 59, 59),
    dt.datetime(2024, 1, 31),
    dt.datetime(2024, 1, 31, 9),
    dt.datetime(2024, 1, 31, 10, 0, 1),
    dt.datetime(2024, 2, 1),
    None,
]
CONDITIONS = {
    "{} > '2024-01-31'": [2, 3, 4],
    "{} >= '2024-01-31'": [1, 2, 3, 4],
    "{} <= '2024-01-31'": [0, 1],
    "{} = '2024-01-31'": [1],
    "'2024-01-31' == {}": [1],
    "{} <> '2024-01-31T00:00' AND n < 4": [0, 2, 3],
    "{} > '2024-01-31T08:59:59.5'": [2, 3, 4],
    "{} <= '2024-01-31T10:00:00' AND NOT {} < '2024-01-31T09:00'": [2],
    "({} BETWEEN '2024-01-31' AND '2024-02-01')": [1, 2, 3, 4],
    "{} NOT BETWEEN '2024-01-31T00:00:00' AND '2024-01-31 10:00:01'": [0, 4],
    "{} IN ('2024-01-31', '2024-02-01 00:00:00.000')": [1, 4],
    "t.{} NOT IN ('2024-01-31 00:00') AND n <> 2": [0, 3, 4],
    "CASE WHEN {} = '2024-01-31' THEN 1 ELSE 0 END": [1],
    "day = '2024-01-31' AND label = '2024-01-31'": [1, 2, 3],
    "date({}) = '2024-01-31'": [1, 2, 3],
}


def write(directory: Path) -> Path:
    path, numbers = directory / "t.parquet", range(len(MOMENTS))
    days = [None if moment is None else moment.date() for moment in MOMENTS]
    table = {"index": [str(n) for n in numbers], "n": list(numbers), "day": days, "label": [str(day) for day in days]}
    columns = {unit: pa.array(MOMENTS, pa.timestamp(unit)) for unit in UNITS}
    zoned = {f"{unit}_tz": pa.array(MOMENTS, pa.timestamp(unit)).cast(pa.timestamp(unit, "Asia/Tokyo")) for unit in UNITS}
    pq.write_table(pa.table(table | columns | zoned), path, row_group_size=2)
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Index:
    directory = tmp_path_factory.mktemp("moments")
    return build(directory, write(directory))


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_moment_is_compared_as_a_moment_in_every_unit(condition: str, index: Index) -> None:
    columns = [column.name for column in index.columns if column.type.startswith("timestamp")]
    queries = [f"SELECT '{name}', n FROM dataframe t WHERE {condition.format(*[name] * 2)}" for name in columns]
    found = run_query(index, " UNION ALL ".join(queries))[1]  # at once: a process runs it
    assert {name: sorted(n for of, n in found if of == name) for name in columns} == dict.fromkeys(
        columns, CONDITIONS[condition]
    )


def test_a_zone_is_counted_where_the_column_has_one(index: Index) -> None:
    query = "SELECT n FROM dataframe WHERE us_tz = '2024-01-31T11:00+02:00' OR us_tz = '2024-02-01T00:00:00Z'"
    assert run_query(index, query)[1] == [(2,), (4,)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT n, {} = '2024-01-31' AS midnight FROM dataframe",
        "SELECT n, '2024-01-31' = {} FROM dataframe",
        "SELECT n, {} IN ('2024-01-31') AS midnight FROM dataframe ORDER BY {} = '2024-01-31' DESC, {} IS NULL",
        "SELECT DISTINCT n, {} BETWEEN '2024-01-31' AND '2024-01-31T00:00' AS midnight FROM dataframe",
        "SELECT DISTINCT {} = '2024-01-31' AS midnight, n FROM dataframe",
        "SELECT a.n, a.{} = '2024-01-31' FROM dataframe a LEFT JOIN dataframe b ON b.{} = '2024-01-31' JOIN "
        "dataframe c ON c.n = 1",
    ],
)
def test_so_is_one_in_a_column_that_is_computed_a_join_or_an_order(query: str, index: Index) -> None:
    names, rows = run_query(index, query.replace("{}", "us"))
    at = names.index("n")
    assert {row[at] for row in rows if row[1 - at]} == {1}
    assert len(rows) == len(MOMENTS)
    assert rows[0][at] == 1 or "DESC" not in query


def test_a_time_of_a_day_has_its_parts(tmp_path: Path) -> None:
    times = pa.table({"at": pa.array([dt.time(9, 30), dt.time(23, 59, 58, 7), None], pa.time64("us"))})
    index = build(tmp_path, times)
    query = "SELECT hour(at), minute(at), second(at), date_part('hour', at) FROM dataframe ORDER BY row"
    assert run_query(index, query)[1] == [(9, 30, 0, 9), (23, 59, 58, 23), (None,) * 4]
    with pytest.raises(QueryError, match="year says"):
        run_query(index, "SELECT year(at) FROM dataframe")


def test_a_lazy_index_and_weights_compare_alike(tmp_path: Path) -> None:
    lazy = open_lazily(tmp_path, write(tmp_path), chunk_rows=2, where="us > '2024-01-31' AND us <= '2024-02-01'")
    assert [row["n"] for row in rows_of(lazy)] == [2, 3, 4]


@pytest.mark.parametrize(
    "kept",
    [
        "SELECT * FROM dataframe WHERE us > 'soon'",
        "SELECT * FROM dataframe WHERE us || 'x' = '2024-01-31'",
        "SELECT * FROM dataframe WHERE us = '2024-01-31' || 'x'",
        "SELECT '2024-01-31' AS us FROM dataframe",
        "SELECT CAST(us AS label) FROM dataframe WHERE label = '2024-01-31'",
        "SELECT * FROM dataframe WHERE us = '2024-01-31T10:00+02:00'",
        "SELECT * FROM dataframe WHERE us = '2024-02-31'",
    ],
)
def test_what_is_no_comparison_with_a_moment_stays_as_it_is(kept: str, index: Index) -> None:
    assert with_whole_moments(kept, index.columns) == kept


def other_types(directory: Path) -> Path:
    """Write days, times of a day and truths, and moments of several units."""
    path = directory / "o.parquet"
    days = [dt.date(2024, 1, 30), dt.date(2024, 1, 31), dt.date(2024, 2, 1), None]
    times = pa.array([dt.time(9), dt.time(10), dt.time(10, 0, 0, 500_000), None], pa.time32("ms"))
    begun = [dt.datetime(2024, 1, 30), dt.datetime(2024, 1, 31), dt.datetime(2024, 1, 31, 10), None]
    ended = [dt.datetime(2024, 1, 30), dt.datetime(2024, 1, 31, 0, 0, 0, 1), dt.datetime(2024, 1, 31), None]
    moments = {"begun": pa.array(begun, pa.timestamp("s")), "ended": pa.array(ended, pa.timestamp("us"))}
    pq.write_table(pa.table({"n": range(4), "day": days, "time": times, "ok": [True, False, None, True], **moments}), path)
    return path


@pytest.mark.parametrize(
    ("condition", "kept"),
    {
        "day = '2024-01-31 00:00'": [1],
        "day >= '2024-01-31T00:00:00'": [1, 2],
        "'2024-01-31 00:00:00.000' <= day": [1, 2],
        "day < '2024-01-31 10:00'": [0, 1],
        "day IN ('2024-01-30T00:00', '2024-02-01')": [0, 2],
        "time = '10:00'": [1],
        "time <= '10:00:00'": [0, 1],
        "time BETWEEN '09:00' AND '10:00:00.5'": [0, 1, 2],
        "ok = 'true'": [0, 3],
        "ok != 'True'": [1],
        "begun = ended": [0],
        "d.begun <= d.ended": [0, 1],
        "begun > ended OR ended IS NULL": [2, 3],
        "ended >= begun": [0, 1],
        "day = begun": [0, 1],
        "NOT ended > day": [0, 2],
        "ended BETWEEN begun AND '2024-02-01'": [0, 1],
    }.items(),
)
def test_days_times_truths_and_columns_of_other_units_are_compared_by_what_they_mean(
    condition: str, kept: list[int], tmp_path: Path
) -> None:
    path = other_types(tmp_path)
    assert [row["n"] for row in all_rows(build(tmp_path, path, sql_query=f"SELECT * FROM samples d WHERE {condition}"))] == kept
    if "d." not in condition:
        assert [row["n"] for row in rows_of(open_lazily(tmp_path, path, where=condition))] == kept


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ("SELECT * FROM (SELECT n, date(begun) AS begun FROM dataframe WHERE begun > '2024-01-30')", "begun = '2024-01-31'"),
        ("WITH d AS (SELECT n, date(begun) AS begun FROM dataframe WHERE n < 4) SELECT * FROM d", "begun = '2024-01-31'"),
        ("SELECT n, date(begun) AS begun FROM dataframe", "'2024-01-31' = begun"),
        ("SELECT n, begun AS start FROM dataframe", "start BETWEEN '2024-01-31T00:00' AND '2024-01-31T10:00'"),
        ("SELECT n, d.begun AS begun FROM dataframe d", "begun >= '2024-01-31T00:00'"),
    ],
)
def test_a_name_stands_for_what_a_query_within_computes(query: str, where: str, tmp_path: Path) -> None:
    assert [row["n"] for row in all_rows(build(tmp_path, other_types(tmp_path), sql_query=query, where=where))] == [1, 2]


def mixed(n: int, unit: Any) -> pa.Table:
    return pa.table({"n": [n, n + 1], "m": pa.array([dt.datetime(2024, 1, 31), dt.datetime(2024, 2, 1)], pa.timestamp(unit))})


def equal_and_later(index: Index) -> list[list[int]]:
    conditions = ("m = '2024-01-31'", "m >= '2024-02-01' AND n IN (SELECT max(n) FROM dataframe GROUP BY m)")
    return [[n for (n,) in run_query(index, f"SELECT n FROM dataframe WHERE {where} ORDER BY n")[1]] for where in conditions]


@pytest.mark.parametrize("units", [("s", "us"), ("ns", "s"), ("ms", "ns")], ids="-".join)
def test_files_of_other_units_are_compared_by_the_moment(units: tuple[str, str], tmp_path: Path) -> None:
    index = build(tmp_path, [mixed(0, units[0]), mixed(2, units[1])])
    assert equal_and_later(index) == [[0, 2], [3]]
    assert [row["m"] for row in all_rows(index)] == [dt.datetime(2024, 1, 31), dt.datetime(2024, 2, 1)] * 2


def test_so_are_those_of_a_source_that_grew_of_a_lazy_index_and_of_a_joined_table(tmp_path: Path) -> None:
    for n, unit in ((0, "ms"), (2, "us")):
        pq.write_table(mixed(n, unit), tmp_path / f"{n}.parquet")
        grown = build(tmp_path, tmp_path / "*.parquet")
    assert equal_and_later(grown) == [[0, 2], [3]]
    lazy = open_lazily(tmp_path, tmp_path / "*.parquet", where="m = '2024-01-31'")
    assert [row["n"] for row in rows_of(lazy)] == [0, 2]
    own = pa.table({"n": range(4)})
    join = JoinOptions(tables={"moments": str(tmp_path / "*.parquet")}, on="n")
    assert equal_and_later(build(tmp_path, own, join=join)) == [[0, 2], [3]]


def numbers_and_others(directory: Path) -> Path:
    """Write columns that have no type in the file, and moments."""
    path, ids = directory / "n.parquet", [uuid.UUID(int=n << 100 | 7) for n in range(5)]
    prices = [Decimal("0.50"), Decimal(1), Decimal("2.50"), None, Decimal("-10.25")]
    numbers = {"price": pa.array(prices, pa.decimal128(10, 2)), "wide": pa.array(prices, pa.decimal128(38, 4))}
    others = {"count": pa.array([5, 10, 9, None, 2**62], pa.uint64()), "id": pa.array([one.bytes for one in ids], pa.uuid())}
    moments = {"us": pa.array(MOMENTS[:5], pa.timestamp("us")), "s": pa.array([*MOMENTS[:4], None], pa.timestamp("s"))}
    pq.write_table(pa.table({"n": range(5), "ok": [True, False, None, True, False], **numbers, **others, **moments}), path)
    return path


OF_ANY_TYPE = [
    "{} = {text}",
    "{text} <> {}",
    "{} < {text}",
    "{text}<={}",
    "t.{}>{text}AND n >= 0",
    "{} >= {text} OR {text} = {}",
    "{} BETWEEN {text} AND {text}",
    "{} IN ({text}, {text})",
    "{} NOT IN ({text})",
    "{} IS NOT DISTINCT FROM {text}",
    "{} IS DISTINCT FROM {text}",
    "{text} IS NOT DISTINCT FROM {}",
    "{text} IS DISTINCT FROM t.{}",
    "CASE {} WHEN {text} THEN 1 ELSE 0 END = 1",
    "CASE WHEN n > 9 THEN 2 ELSE CASE t.{} WHEN NULL THEN 1 WHEN {text} THEN n + 3 END END > 2",
]
TEXTS = {
    "price": "1 2.50 2.5 1e1 +1 .5 -10.25 9".split(),
    "wide": "1 2.50 -10.2500".split(),
    "count": "10 9 +5".split(),
    "id": ["00000010-0000-0000-0000-000000000007", "00000020000000000000000000000007"],
    "ok": ["true", "f"],
    "us": ["2024-01-31", "2024-01-31T09:00"],
}


def test_a_text_is_compared_as_duckdb_compares_it_beside_a_column_of_any_type(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    index, path = build(tmp_path, numbers_and_others(tmp_path)), tmp_path / "scratch"
    conditions = [form.format(*[name] * 2, text=f"'{t}'") for name in TEXTS for t in TEXTS[name] for form in OF_ANY_TYPE]
    conditions += ["us IS NOT DISTINCT FROM s", "s IS DISTINCT FROM us", "CASE us WHEN s THEN true ELSE false END"]
    found = dict[str, list[list[Any]]]()
    for engine in ("sqlite", "duckdb"):
        parts = [conditions[at : at + 90] for at in range(0, len(conditions), 90)]
        queries = [f"SELECT {', '.join(part)} FROM dataframe t ORDER BY row" for part in parts]
        found[engine] = []
        for query in queries:
            with contextlib.closing(Sandbox(index, query, engine=engine, scratch=path)) as sandbox:
                rows = [row for batch in sandbox.run(sandbox.statement, 9)[1] for row in batch]
            found[engine] += map(list, zip(*rows, strict=True))
    wrong = [one for one, mine, its in zip(conditions, *found.values(), strict=True) if mine != its]
    assert not wrong
    assert len({str(values) for values in found["sqlite"]}) > 20


@pytest.mark.parametrize(
    ("query", "kept"),
    {
        "SELECT label, max(us) FROM dataframe GROUP BY label HAVING max(us) <= '2024-01-31'": ["2024-01-30"],
        "SELECT label, t.n FROM dataframe t GROUP BY label HAVING '2024-01-31' = min(t.us)": ["2024-01-31"],
        "SELECT label FROM (SELECT label, max(day) AS last FROM dataframe GROUP BY label) WHERE last > '2024-01-31 00:00'": [
            "2024-02-01"
        ],
        "SELECT label, max(us) AS m FROM dataframe GROUP BY label HAVING m = '2024-02-01T00:00'": ["2024-02-01"],
    }.items(),
)
def test_the_first_and_the_last_moment_are_compared_as_moments(query: str, kept: list[str], index: Index) -> None:
    assert [row[0] for row in run_query(index, query)[1]] == kept


def test_the_largest_of_texts_is_no_number(index: Index) -> None:
    with pytest.raises(QueryError, match="'label', which are texts, are more or less than a number"):
        run_query(index, "SELECT n FROM dataframe GROUP BY n HAVING max(label) > 5")


def test_long_lists_of_texts_beside_moments_take_no_time(tmp_path: Path) -> None:
    index = build(tmp_path, write(tmp_path))
    labels = ", ".join(f"'{n:06}'" for n in range(18_000))
    start = time.process_time()
    statement = with_whole_moments(f"SELECT n FROM dataframe WHERE label IN ({labels}) OR us = '2024-01-31'", index.columns)
    assert time.process_time() - start < 8  # 25 s of a walk back over the list from each of its texts
    assert statement.endswith("us =  '2024-01-31 00:00:00.000000'")


def test_what_an_earlier_version_kept_of_such_a_comparison_is_made_again(tmp_path: Path) -> None:
    columns = build(tmp_path, numbers_and_others(tmp_path)).columns
    anew = ["price < '1'", "n = 1 AND '1' = t.count", "CASE us WHEN '2024-01-31' THEN 2 END", "us IS NOT DISTINCT FROM s"]
    anew.append("n IN (SELECT n FROM dataframe GROUP BY n HAVING max(us) = '2024-01-31')")
    same = ["price < 1", "us > '2024-01-31'", "price > 1 AND us IN ('2024-01-31')", "us IS NULL", "n < '1'", "price = 'a", "id"]
    assert [changes(sql, "sqlite", columns) for sql in anew] == [{"texts": "spelled"}] * len(anew)
    assert [changes(sql, "sqlite", columns) for sql in same] == [{}] * len(same)
    assert changes(anew[0], "duckdb", columns) == {}
