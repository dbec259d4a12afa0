"""DuckDB's functions in SQLite, and DuckDB itself."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import pickle
import sys
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.config import Buckets
from sqlstream.errors import MissingDependencyError, QueryError, SchemaError, SourceError
from sqlstream.index.buckets import open_buckets
from sqlstream.index.export import ExportOptions, export
from sqlstream.index.file.index import Index
from sqlstream.index.lengths import open_lengths
from sqlstream.index.sql.sandbox import Sandbox, run_query
from sqlstream.index.weights import open_weights
from tests.index.sources import all_rows, build

TABLE = {
    "index": ["a", "b", "c", "d"],
    "text": ["Hello world", "x-y-z", None, "größe"],
    "n": [4, 1, None, 10],
    "x": [0.5, float("nan"), None, 2.5],
    "tags": [["cat", "dog"], [], None, ["dog"]],
    "moment": pa.array([dt.datetime(2024, 2, 29, 12, 30, 5), None, dt.datetime(1999, 12, 31), None], pa.timestamp("us")),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "t.parquet"
    pq.write_table(pa.table(TABLE), where)
    return where


SAME = [
    "contains(text, 'wor')",
    "starts_with(text, 'Hel')",
    "ends_with(text, 'ld')",
    "suffix(text, 'e')",
    "left(text, 3)",
    "right(text, 3)",
    "right(text, -2)",
    "reverse(text)",
    "split_part(text, '-', 2)",
    "split_part(text, '-', -1)",
    "split_part(text, '-', 9)",
    "concat(text, '!', n)",
    "concat_ws('/', index, text)",
    "strlen(text)",
    "md5(text)",
    "url_encode(text)",
    "url_encode('a b/ü~_.-+%')",
    "url_decode('a%20b+%C3%BC%2F')",
    "unquote_plus('a%20b+%C3%BC%2B')",
    "unquote_plus(text)",
    "lpad(text, 8, '-+')",
    "rpad(text, 8, '-+')",
    "lpad(CAST(n AS VARCHAR), 5, '0')",
    "lpad(text, -1, '0')",
    "strpos(text, 'o')",
    "strpos(text, 'nowhere')",
    "parse_filename('a/b/c.tar.gz')",
    "parse_filename('a/b/c.tar.gz', true)",
    "parse_filename('a/b/')",
    "parse_filename(text)",
    "parse_dirpath('a/b/c.tar.gz')",
    "parse_dirpath('c.tar.gz')",
    "len(text)",
    "len(tags)",
    "len('[' || text || ']')",
    "array_length(tags)",
    "list_contains(tags, 'dog')",
    "regexp_matches(text, 'o+')",
    "regexp_full_match(text, 'H.*d')",
    "regexp_extract(text, '([a-z])-([a-z])', 2)",
    "regexp_extract(text, '[a-z]+')",
    "regexp_replace(text, '[a-z]', '<\\0>')",
    "regexp_replace(text, '-(.)', '\\1', 'g')",
    "text ILIKE 'h%O%'",
    "text NOT ILIKE 'h_llo%'",
    "greatest(n, 5)",
    "least(n, 5, NULL)",
    "year(moment)",
    "month(moment)",
    "day(moment)",
    "hour(moment)",
    "minute(moment)",
    "date_part('year', moment)",
    "date_part('dow', moment)",
    "epoch(moment)",
    "n / 8",
    "n // 3",
    "mod(9223372036854775807 - n, 10)",
    "mod(-9223372036854775807 + n, 10)",
    "mod(n / 8, 0.3)",
]


def test_a_function_gives_in_sqlite_what_it_gives_in_duckdb(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    index = build(tmp_path, path)
    query = f"SELECT {', '.join(SAME)} FROM dataframe ORDER BY row"
    ours = run_query(index, query)[1]
    with contextlib.closing(Sandbox(index, query, engine="duckdb", scratch=tmp_path / "scratch")) as duck:
        theirs = [row for batch in duck.run(duck.statement, 10)[1] for row in batch]
    for expression, mine, its in zip(SAME, zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        assert mine == its, expression


def test_a_text_is_not_filled_without_end_or_from_nothing(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    for call, why in (("lpad('a', 1000000000, 'b')", "at most, not to"), ("rpad('a', 2, '')", "nothing to fill with")):
        with pytest.raises(QueryError, match=why):
            run_query(index, f"SELECT {call} FROM dataframe")


def test_mod_of_integers_is_that_of_the_operator(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    by_function, by_operator = (
        run_query(index, f"SELECT {rest} FROM dataframe")[1] for rest in ("mod(hash(index, 1), 7)", "hash(index, 1) % 7")
    )
    assert by_function == by_operator
    odd = "mod(n, 0), mod(NULL, 2), mod('7', 2), mod('a', 2), mod(x'01', 2)"
    assert run_query(index, f"SELECT {odd} FROM dataframe LIMIT 1")[1] == [(None, None, 1.0, None, None)]


def test_duckdb_takes_text_in_double_quotes_for_a_column_too(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with pytest.raises(QueryError, match=r"text needs single quotes: 'dog'"):
        build(tmp_path, path, where='text = "dog"', sql_engine="duckdb")


def test_aggregates_of_duckdb(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    names = "median(n), stddev(n), variance(n), count_if(n > 3), bool_and(n > 0), bool_or(n > 9), any_value(n), median(NULL)"
    assert run_query(index, f"SELECT {names} FROM dataframe")[1] == [(4, 21**0.5, 21.0, 2, 1, 1, 4, None)]


def test_a_function_that_fails_says_which_and_why(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path)
    with pytest.raises(QueryError, match=r"date_part says .*'century'.*year"):
        run_query(index, "SELECT date_part('century', moment) FROM dataframe")
    with pytest.raises(QueryError, match=r"array_length says"):
        run_query(index, "SELECT array_length(text) FROM dataframe")
    for query in ("SELECT n::TEXT FROM dataframe", "SELECT list_sort(tags) FROM dataframe"):
        with pytest.raises(QueryError, match="sql_engine='duckdb'"):
            run_query(index, query)


def keys(index: Index) -> str:
    return "".join(str(row["index"]) for row in all_rows(index))


DUCKDB = [
    ("SELECT * FROM dataframe WHERE n::DOUBLE > 2", "ad"),
    ("SELECT * FROM samples WHERE list_contains(list_transform(tags, lambda t: upper(t)), 'DOG') ORDER BY n DESC", "da"),
    ("SELECT * FROM dataframe QUALIFY row_number() OVER (ORDER BY n DESC NULLS LAST) <= 2 ORDER BY index", "ad"),
    ("SELECT * FROM dataframe WHERE moment > TIMESTAMP '2000-01-01' -- it\n;", "a"),
    ("SELECT * FROM dataframe WHERE isnan(x); -- the NaN", "b"),
]


@pytest.mark.parametrize(("query", "expected"), DUCKDB, ids=[query for query, _ in DUCKDB])
def test_duckdb_runs_what_sqlite_cannot_and_keeps_positions(query: str, expected: str, path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    index = build(tmp_path, path, sql_query=query, sql_engine="duckdb")
    assert keys(index) == expected
    assert index.selection is not None
    assert not [name for name in os.listdir(tmp_path / "index") if ".tmp" in name]
    table = open_weights(index, "1 + n::INT * 0", tmp_path / "index") if "n::" in query else None
    assert table is None or np.diff(table.cumulative(), prepend=0).tolist() == [table.total // 2] * 2


def test_computed_columns_of_duckdb_have_their_types(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    query = "SELECT index, tags[1] AS first, [n, 2] AS pair, moment::DATE AS day, n::DECIMAL(6, 2) AS price, x FROM dataframe"
    index = build(tmp_path, path, sql_query=query, sql_engine="duckdb", where="price IS NOT NULL")
    assert all_rows(index)[0]["pair"] == [4, 2]
    assert [(row["first"], row["day"], str(row["price"]), row["x"]) for row in all_rows(index)] == [
        ("cat", dt.date(2024, 2, 29), "4.00", 0.5),
        (None, None, "1.00", None),
        ("dog", None, "10.00", 2.5),
    ]


def test_duckdb_runs_all_sql_on_rows_where_no_query_is_given_too(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    index = build(tmp_path, path, sql_engine="duckdb")
    weights = open_weights(
        pickle.loads(pickle.dumps(index)),
        "coalesce(n, 0)::INT + coalesce(list_contains(tags, 'cat'), false)::INT",
        index.path.parent,
    )
    assert np.diff(weights.cumulative(), prepend=0).tolist() == [weights.total * n // 16 for n in (5, 1, 0, 10)]
    assert open_buckets(index, Buckets("n::VARCHAR", global_batch_size=2, unknown="drop"), index.path.parent).values == (
        "1",
        "10",
        "4",
    )
    assert open_lengths(index, "coalesce(n, 1)::INT", index.path.parent).lengths.tolist() == [1, 4, 10]
    sqlite = open_weights(build(tmp_path, path), "coalesce(n, 7) / 2", index.path.parent)
    assert open_weights(index, "coalesce(n, 7) / 2", index.path.parent).path != sqlite.path


UNREAD = {
    "half": pa.array(np.array([0.5, 2.0], np.float16)),
    "halves": pa.array([[0.5], None], pa.list_(pa.float16())),
    "parts": pa.array([{"a": 0.5}, None], pa.struct([("a", pa.float16())])),
    "named": pa.array([[("a", 0.5)], None], pa.map_(pa.string(), pa.float16())),
    "price": pa.array([Decimal("0.5"), None], pa.decimal256(20, 2)),
}


def test_columns_of_types_that_duckdb_does_not_read_are_there_with_their_values(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    rows = pa.table({**UNREAD, "n": [1, 2]})
    condition = "half = 0.5 AND halves[1] = half AND parts.a = half AND named['a'] = half AND price = half"
    (row,) = all_rows(build(tmp_path, rows, where=condition, sql_engine="duckdb"))
    assert row == rows.to_pylist()[0]


def test_a_decimal_of_more_digits_than_duckdb_has_is_refused_by_its_column(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    rows = pa.table({"n": [1], "price": pa.array([Decimal("0.5")], pa.decimal256(40, 2))})
    with pytest.raises(
        SchemaError, match=r"column 'price' has the type decimal256\(40, 2\), .* 38 digits at most: leave it out"
    ):
        build(tmp_path, rows, where="n::INT = 1", sql_engine="duckdb")


def test_a_uuid_stays_one_through_duckdb_and_through_a_file_that_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    ids = [uuid.UUID(int=number << 64) for number in range(3)]
    table = pa.table({"index": ["a", "b", "c"], "id": pa.array([ids[0], ids[1], None], pa.uuid())})
    query = f"SELECT index, id, id AS same, UUID '{ids[2]}' AS other FROM dataframe WHERE id IS NULL OR id = '{ids[1]}'"
    index = build(tmp_path, table, sql_query=query, sql_engine="duckdb")
    wanted = [
        {"index": "b", "id": ids[1], "same": ids[1], "other": ids[2]},
        {"index": "c", "id": None, "same": None, "other": ids[2]},
    ]
    assert all_rows(index) == wanted
    exported = export(index, ExportOptions(), tmp_path)[""].path
    assert all_rows(build(tmp_path, exported)) == wanted


LOSSY = [
    ("TIMETZ '12:00:00+02'", "TIME WITH TIME ZONE"),
    ("'0101'::BITSTRING", "BIT"),
    ("340282366920938463463374607431768211455::UHUGEINT", "UHUGEINT"),
    ("[{'a': TIMETZ '12:00:00+02'}]", r"STRUCT\(a TIME WITH TIME ZONE\)\[\]"),
    ("MAP {'k': ['1'::BIT]::BIT[1]}", r"MAP\(VARCHAR, BIT\[1\]\)"),
]


@pytest.mark.parametrize(("value", "kind"), LOSSY)
def test_a_type_that_duckdb_does_not_give_whole_is_refused_with_the_cure(
    value: str, kind: str, path: Path, tmp_path: Path
) -> None:
    pytest.importorskip("duckdb")
    query = f"SELECT index, {value} AS odd FROM dataframe"
    with pytest.raises(SchemaError, match=rf"column 'odd' has DuckDB's type {kind}, .*CAST\(\"odd\" AS VARCHAR\)"):
        build(tmp_path, path, sql_query=query, sql_engine="duckdb")


@pytest.mark.parametrize("value", [f"{2**127 - 1}::HUGEINT", f"[{2**127 - 1}::HUGEINT]"])
def test_an_integer_of_39_digits_is_refused_with_the_cure(value: str, path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    query = f"SELECT index, {value} AS odd FROM dataframe"
    with pytest.raises(SchemaError, match=r"column 'odd' has an integer of more than 38 digits, .*CAST\(\"odd\" AS VARCHAR\)"):
        build(tmp_path, path, sql_query=query, sql_engine="duckdb")


def test_such_a_type_comes_as_text_with_the_cure(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    values = ", ".join(f"({value})::VARCHAR AS odd_{number}" for number, (value, _) in enumerate(LOSSY))
    as_text = build(tmp_path, path, sql_query=f"SELECT index, {values} FROM dataframe", sql_engine="duckdb")
    assert all(isinstance(all_rows(as_text)[0][f"odd_{number}"], str) for number in range(len(LOSSY)))


DURATIONS = pa.array([dt.timedelta(seconds=1), None, dt.timedelta(microseconds=-5)])


def test_durations_are_intervals_which_a_query_gives_as_numbers_or_texts(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"index": [1, 2, 3], "d": DURATIONS}), path)
    kept = build(tmp_path, path, where="d > INTERVAL '0.5 seconds'", sql_engine="duckdb")
    assert all_rows(kept) == [{"index": 1, "d": dt.timedelta(seconds=1)}]
    query = "SELECT index, d FROM dataframe"
    cure = r"make it a number, epoch_us\(\"d\"\), or cast it in the query, as CAST\(\"d\" AS VARCHAR\)"
    with pytest.raises(SchemaError, match=rf"column 'd' has DuckDB's type INTERVAL, .*: {cure}"):
        build(tmp_path, path, sql_query=query, sql_engine="duckdb")
    with pytest.raises(SchemaError, match=r"type INTERVAL\[\], .*: cast it in the query"):
        build(tmp_path, path, sql_query="SELECT index, [d] AS d FROM dataframe", sql_engine="duckdb")
    numbers = build(tmp_path, path, sql_query='SELECT index, epoch_us("d") AS d FROM dataframe', sql_engine="duckdb")
    assert [row["d"] for row in all_rows(numbers)] == [1_000_000, None, -5]


def test_durations_of_nanoseconds_are_not_cut(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"index": [1, 2, 3], "d": DURATIONS.cast(pa.duration("ns"))}), path)
    assert len(build(tmp_path, path, where="d < INTERVAL '0 seconds'", sql_engine="duckdb")) == 1
    pq.write_table(pa.table({"index": [1, 2, 3], "d": pa.array([1, None, -1], pa.duration("ns"))}), path)
    with pytest.raises(QueryError, match=r"column 'd' has values that DuckDB's type does not hold \(.* would lose data: 1\)"):
        build(tmp_path, path, where="d < INTERVAL '0 seconds'", sql_engine="duckdb")


@pytest.mark.parametrize("value", ["TIME '24:00:00'", "TIME_NS '12:00:00.123456789'"])
def test_a_time_that_no_index_can_hold_is_an_error_of_its_column(value: str, path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with pytest.raises(SourceError, match=r"column 'odd': a value has no exact form in the index \("):
        build(tmp_path, path, sql_query=f"SELECT index, {value} AS odd FROM dataframe", sql_engine="duckdb")


ATTACKS = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM '/etc/passwd'",
    "COPY dataframe TO '{outside}'",
    "ATTACH '{outside}'",
    "SELECT * FROM dataframe; DROP TABLE dataframe",
    "DROP TABLE dataframe",
    "INSERT INTO dataframe SELECT * FROM dataframe",
    "SET lock_configuration = false",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SELECT * FROM glob('/etc/*')",
    "SELECT content FROM read_text('/etc/passwd')",
    "EXPORT DATABASE '{outside}'",
    "PRAGMA version",
    "SELECT nothing FROM dataframe",
    "",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_duckdb_reads_the_rows_and_nothing_else(attack: str, path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    build(tmp_path, path)
    with pytest.raises(QueryError):
        build(tmp_path, path, sql_query=attack.format(outside=tmp_path / "outside"), sql_engine="duckdb")
    assert not (tmp_path / "outside").exists()
    assert len(os.listdir(tmp_path / "index")) == 1


def test_duckdb_that_is_not_installed_is_named(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'sqlstream-data\[duckdb\]'"):
        build(tmp_path, path, where="n > 1", sql_engine="duckdb")


def test_duckdb_has_a_budget_too(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    index: Any = build(tmp_path, path)
    query = "SELECT count(*) AS n FROM range(1000000) a, range(1000000) b WHERE a.range + b.range = 7"
    sandbox = Sandbox(index, query, engine="duckdb", scratch=tmp_path / "scratch", budget_seconds=0.5)
    with pytest.raises(QueryError, match=r"did not end within 0\.5 seconds"):
        sandbox.run(query, 1)
    sandbox.close()


def test_an_error_in_the_middle_of_a_result_is_the_query_s(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    index: Any = build(tmp_path, path)
    query = "SELECT CASE WHEN x > 90000 THEN ('a' || x)::INT ELSE x END AS n FROM range(100000) t(x)"
    sandbox = Sandbox(index, query, engine="duckdb", scratch=tmp_path / "scratch")
    with contextlib.closing(sandbox), pytest.raises(QueryError, match=r"not run in DuckDB: .*Could not convert string 'a9\d+'"):
        list(sandbox.run(query, 1000)[1])


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM dataframe ORDER BY label LIMIT 1000",
        "SELECT label, any_value(n) AS n FROM dataframe GROUP BY label",
        "SELECT *, row_number() OVER (PARTITION BY label) AS place FROM dataframe",
    ],
    ids=["order", "group", "window"],
)
def test_rows_come_in_one_order_in_each_run(query: str, tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    rows = pa.table({"n": range(150_000), "label": [number * 7919 % 503 for number in range(150_000)]})
    found = [
        build(tmp_path, rows, sql_query=f"{query} -- run {run}", sql_engine="duckdb") for run in range(3)
    ]  # a result that was found would tell nothing
    taken = [index.rows(index.row_ids(np.arange(len(index))).tolist()) for index in found]
    assert taken[0] == taken[1] == taken[2]


def test_moments_are_those_of_utc_wherever_the_machine_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb")
    rows = pa.table({"made": pa.array([dt.datetime(2024, 1, 31, 20)], pa.timestamp("us", "UTC"))})
    query = "SELECT hour(made) AS hour, made::DATE AS day, TIMESTAMPTZ '2024-01-31 20:00' = made AS same FROM dataframe"
    for zone in ("Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", zone)  # read by the process of the query
        (row,) = all_rows(build(tmp_path, rows, sql_query=f"{query} -- {zone}", sql_engine="duckdb"))
        assert row == {"hour": 20, "day": dt.date(2024, 1, 31), "same": True}


def test_what_is_no_moment_is_said_with_what_is_one(path: Path, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=r"year says .*'x-y-z' is no day or moment: give one as 2024-01-31 10:00:00"):
        run_query(build(tmp_path, path), "SELECT year(text) FROM dataframe WHERE text LIKE 'x%'")
