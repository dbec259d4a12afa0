"""SQL databases as sources: a real PostgreSQL, and SQLite."""

from __future__ import annotations

import datetime as dt
import importlib.util
import sqlite3
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from sqlstream.errors import ConfigError, MissingDependencyError, QueryError, SchemaError, SourceError
from sqlstream.index.sources.places import database
from sqlstream.index.types.origins import is_local_database
from tests.index import postgres
from tests.index.sources import all_rows, build, write_csv

COLUMNS = """
    "index" text PRIMARY KEY, n integer, big bigint, x double precision, price numeric(12, 2), ok boolean, raw bytea,
    at timestamptz, day date, doc jsonb, tags text[], id uuid
"""
VALUES = """
    ('a', 1, 9007199254740993, 0.5, 9.99, true, '\\x0001', '2024-02-29 12:30:00+00', '2024-02-29', '{"k": [1, null]}',
     '{x,y}', '12345678-1234-1234-1234-123456789abc'),
    ('b', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    ('c', -3, 2, 'NaN', 1234567890.10, false, '', '1999-12-31 23:59:59.5+00', '1999-12-31', '"text"', '{}', NULL)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pytest.importorskip("psycopg")
    binaries = postgres.find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not on this machine: scripts/install_servers.sh installs it")
    with postgres.running(binaries) as url:
        engine = sqlalchemy.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            connection.exec_driver_sql(f"CREATE TABLE photos ({COLUMNS})")
            connection.exec_driver_sql(f"INSERT INTO photos VALUES {VALUES}")
            late = "CASE WHEN i > 90000 THEN i END AS late"
            query = f"SELECT i AS index, 'photo ' || i AS caption, {late} FROM generate_series(1, 100000) i"
            connection.exec_driver_sql(f"CREATE TABLE many AS {query}")
            connection.exec_driver_sql("CREATE SEQUENCE counted")
        engine.dispose()
        yield url


@pytest.fixture(params=["sqlalchemy", "adbc"])
def url(request: pytest.FixtureRequest, server: str) -> str:
    if request.param == "adbc":
        pytest.importorskip("adbc_driver_postgresql")
        return server
    return server.replace("postgresql:", "postgresql+psycopg:")


def test_values_of_postgres_come_back_as_they_went_in(url: str, tmp_path: Path) -> None:
    index = build(tmp_path, url, sql_query='SELECT * FROM photos ORDER BY "index"')
    a, b, c = all_rows(index)
    assert a["price"] == Decimal("9.99")
    assert a["at"] == dt.datetime(2024, 2, 29, 12, 30, tzinfo=dt.UTC)
    assert (a["n"], a["big"], a["x"], a["ok"], a["raw"], a["day"]) == (1, 2**53 + 1, 0.5, True, b"\0\1", dt.date(2024, 2, 29))
    assert (a["doc"], a["tags"]) == ({"k": [1, None]}, ["x", "y"])
    assert a["id"] == "12345678-1234-1234-1234-123456789abc"
    assert set(b.values()) == {"b", None}
    assert c["x"] != c["x"]
    assert (c["price"], c["raw"], c["doc"], c["tags"]) == (Decimal("1234567890.10"), b"", "text", [])


@pytest.mark.parametrize("value", ["interval '1 month 2 days'", "ARRAY[interval '1 day']"])
def test_intervals_are_refused_by_each_driver(value: str, url: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="'span'"):
        build(tmp_path, url, sql_query=f"SELECT 1 AS n, {value} AS span")
    cast = build(tmp_path, url, sql_query=f"SELECT 1 AS n, ({value})::text AS span")
    assert len(str(all_rows(cast)[0]["span"])) > 4


def test_many_rows_are_streamed_and_typed_by_all_of_them(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    stream = database._stream

    def counted(*arguments: Any) -> Iterator[Any]:
        for batch in stream(*arguments):
            batches.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(database, "_stream", counted)
    query = "SELECT * FROM many WHERE caption LIKE 'photo %' AND caption <> ':none' ORDER BY index"
    index = build(tmp_path, url, sql_query=query, where="late IS NULL OR late >= 99999")
    assert len(index) == 90_000 + 2
    assert index.rows([99_999]) == [{"index": 100_000, "caption": "photo 100000", "late": 100_000}]
    if "+psycopg" in url:
        assert max(batches) < 10_000  # from a server-side cursor, not the whole result
    batches.clear()
    assert len(build(tmp_path, url, sql_query=query)) == 100_000
    assert not batches  # not read again …
    build(tmp_path, url, sql_query=query, source_version="tuesday")
    assert batches  # … until told to


ODD = ["'12:00:00+02'::timetz", "'101'::bit(3)", "'10.0.0.0/8'::inet", "3::money", "ARRAY['101'::bit(3)]"]


@pytest.mark.parametrize("value", ODD)
def test_a_type_that_a_driver_gives_as_bytes_is_text_or_refused(value: str, url: str, tmp_path: Path) -> None:
    query = f"SELECT 'a' AS index, ({value}){{}} AS odd"
    as_text: Any = all_rows(build(tmp_path, url, sql_query=query.format("::text")))[0]["odd"]
    if "+psycopg" in url:
        own = all_rows(build(tmp_path, url, sql_query=query.format("")))[0]["odd"]
        assert own == ([as_text.strip("{}")] if "ARRAY" in value else f"{as_text}:00" if "timetz" in value else as_text)
    else:
        with pytest.raises(SchemaError, match=r"column 'odd' has the type .*(cast it|another type)"):
            build(tmp_path, url, sql_query=query.format(""))


@pytest.mark.parametrize(
    ("value", "cure"),
    [
        ("'infinity'::date", "CASE WHEN isfinite(odd) THEN odd END"),
        ("'-infinity'::timestamptz", "CASE WHEN isfinite(odd) THEN odd END"),
        ("'294276-12-31'::timestamp", "odd::text"),
        ("ARRAY['infinity'::date]", "odd::text"),
        ("ARRAY[[1, 2], [3, 4]]", "to_jsonb(odd)"),
        ("'NaN'::numeric", "CAST(odd AS DOUBLE PRECISION)"),
        ("1e80::numeric", "CAST(odd AS TEXT)"),
        ("ARRAY['\\x00ff'::bytea]", "encode(odd[1], 'hex')"),
    ],
)
def test_a_value_that_would_come_as_another_is_refused_with_its_cure(value: str, cure: str, url: str, tmp_path: Path) -> None:
    rows = f"SELECT i, CASE WHEN i = 9000 THEN {value} END AS odd FROM generate_series(1, 9000) i"
    query = f"SELECT i AS index, {{}} AS odd FROM ({rows}) q"
    comes_whole = ("[[" in value and "+psycopg" in url) or ("bytea" in value and "+psycopg" not in url)
    if comes_whole:
        assert build(tmp_path, url, sql_query=query.format("odd")).rows([8999])[0]["odd"] in ([[1, 2], [3, 4]], [b"\x00\xff"])
    else:
        with pytest.raises((SchemaError, SourceError), match=r"column 'odd' has|too (large|small)|can't parse"):
            build(tmp_path, url, sql_query=query.format("odd"))
    build(tmp_path, url, sql_query=query.format(cure))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("4294967295::oid", 4294967295),
        ("ARRAY[4294967295::oid]", [4294967295]),
        ("ARRAY['12345678-1234-1234-1234-123456789abc'::uuid, NULL]", ["12345678-1234-1234-1234-123456789abc", None]),
        ("'{}'::uuid[]", []),
        ("ARRAY[1, NULL, 3]", [1, None, 3]),
        ("to_jsonb(ARRAY[[1, 2], [3, 4]])", [[1, 2], [3, 4]]),
    ],
)
def test_identifiers_and_arrays_of_postgres_come_back(value: str, expected: object, url: str, tmp_path: Path) -> None:
    column = f'CASE WHEN i > 1 THEN {value} END AS "a ""b"'
    query = f"SELECT i AS index, {column} FROM generate_series(1, 3) i ORDER BY i DESC; -- all"
    rows = all_rows(build(tmp_path, url, sql_query=query))
    assert rows == [{"index": i, 'a "b': expected if i > 1 else None} for i in (3, 2, 1)]


def test_the_password_is_in_no_file_and_no_error(url: str, tmp_path: Path) -> None:
    build(tmp_path, url, sql_query="SELECT index FROM photos")
    for file in (tmp_path / "index").iterdir():
        assert b"geheim" not in file.read_bytes()
    with pytest.raises(QueryError, match=r"refuses the query 'SELECT nothing FROM photos'.*nothing") as caught:
        build(tmp_path, url, sql_query="SELECT nothing FROM photos")
    assert "geheim" not in str(caught.value)
    with pytest.raises(SourceError, match="cannot be read") as lost:
        build(tmp_path, url.replace("geheim", "geheim2"), sql_query="SELECT n, index FROM photos")
    assert "geheim" not in str(lost.value)


def test_postgres_is_only_read(url: str, tmp_path: Path) -> None:
    with pytest.raises((QueryError, SourceError), match=r"read-only|syntax error"):
        build(tmp_path, url, sql_query="DELETE FROM photos RETURNING index")
    with pytest.raises((QueryError, SourceError), match="read-only"):
        build(tmp_path, url, sql_query="SELECT index FROM photos FOR UPDATE")
    assert len(build(tmp_path, url, sql_query="SELECT index FROM photos")) == 3


def test_no_program_runs_on_the_server(url: str, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    tmp_path.chmod(0o777)
    for query in (
        f"COPY (SELECT 1) TO PROGRAM 'touch {proof}'",
        f"COPY photos TO PROGRAM 'touch {proof}'",
        f"SELECT index FROM photos; COPY photos TO PROGRAM 'touch {proof}'",
        f"SELECT index FROM photos /* /* */ */; COPY photos TO PROGRAM 'touch {proof}'",
        f"SELECT index FROM photos) TO PROGRAM 'touch {proof}' --",  # ADBC puts it into COPY (…) TO STDOUT
        "SELECT index INTO stolen FROM photos",
        "WITH gone AS (DELETE FROM photos RETURNING index) SELECT * FROM gone",
    ):
        with pytest.raises(QueryError, match=r"is not sent to postgresql.*give one read-only SELECT") as caught:
            build(tmp_path, url, sql_query=query)
        assert "geheim" not in str(caught.value)
    assert not proof.exists()
    assert len(build(tmp_path, url, sql_query="SELECT index FROM photos;  -- all of them")) == 3


def test_what_a_function_of_the_server_would_write_is_refused_by_the_server(url: str, tmp_path: Path) -> None:
    with pytest.raises((QueryError, SourceError), match="read-only"):
        build(tmp_path, url, sql_query="SELECT 'a' AS index, nextval('counted') AS n")


def test_an_error_after_the_first_rows_is_ours(url: str, tmp_path: Path) -> None:
    query = "SELECT i AS index, 1 / (i - 90000) AS n FROM generate_series(1, 100000) i"
    with pytest.raises(SourceError, match=r"postgresql.*cannot be read: .*division by zero") as caught:
        build(tmp_path, url, sql_query=query)
    assert "geheim" not in str(caught.value)
    assert not [file for file in (tmp_path / "index").iterdir() if file.suffix != ".sqlite"]


def test_which_databases_are_files_of_this_machine() -> None:
    urls = ("sqlite:///x.db", "sqlite+pysqlite:////x.db", "SQLITE:///x.db", "duckdb:///x", "postgresql://h/d", "s3://b/sqlite")
    assert [is_local_database(url) for url in urls] == [True] * 4 + [False] * 2


def test_sqlite_is_a_database_too(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "data.db") as connection:
        connection.execute("CREATE TABLE t (name TEXT, n INTEGER, x)")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [("a", 1, 2), ("b", 2, 2.5), ("c", 3, None)])
    connection.close()
    src = f"sqlite:///{tmp_path / 'data.db'}"
    for attack in ("DELETE FROM t RETURNING name", "PRAGMA user_version = 7", "SELECT 1; DELETE FROM t"):
        with pytest.raises(QueryError, match="is not sent to sqlite"):
            build(tmp_path, src, sql_query=attack, key_column="name")
    index = build(tmp_path, src, sql_query="SELECT * FROM t WHERE n <> 2", key_column="name", path_prefix="s3://bucket/x")
    assert all_rows(index) == [{"name": "a", "n": 1, "x": 2}, {"name": "c", "n": 3, "x": None}]
    assert index.resolve("1.jpg") == "s3://bucket/x/1.jpg"
    with pytest.raises(SourceError, match="has no rows"):
        build(tmp_path, src, sql_query="SELECT * FROM t WHERE 0", key_column="name")


def test_two_databases_of_one_address_are_not_one(tmp_path: Path) -> None:
    address = "postgresql://me:{}@host/db?options=-csearch_path%3D{}"
    one, same, other = (database.identity(address.format(*words)) for words in (("x", "a"), ("y", "a"), ("x", "b")))
    assert one == same != other
    with pytest.raises(ConfigError, match="no URL of a database"):
        build(tmp_path, "postgresql://host:port/db", sql_query="SELECT 1")


def test_a_database_needs_a_query_and_its_driver(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"postgresql://host/db is a database: give sql_query"):
        build(tmp_path, "postgresql://me:geheim@host/db")
    with pytest.raises(MissingDependencyError, match=r"sqlstream-data\[bigquery\]"):
        build(tmp_path, "bigquery://project", sql_query="SELECT 1")
    with pytest.raises(MissingDependencyError, match=r"not installed .*install the SQLAlchemy dialect and driver"):
        build(tmp_path, "mysql+pymysql://host/db", sql_query="SELECT 1")


@pytest.mark.skipif(importlib.util.find_spec("duckdb_engine") is not None, reason="the driver is here")
def test_duckdb_as_a_database_needs_a_driver_that_the_extra_has_not(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"\(Can't load plugin: .*duckdb\): pip install duckdb-engine$"):
        build(tmp_path, f"duckdb:///{write_csv(tmp_path / 'x.duckdb', '')}", sql_query="SELECT 1")


def test_a_database_file_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"the database file .*none\.db does not exist: check the path"):
        build(tmp_path, f"sqlite:///{tmp_path}/none.db", sql_query="SELECT 1 AS n")
    assert not (tmp_path / "none.db").exists()
    for url in ("sqlite:///file:{}?uri=true", "sqlite:///file://{}?uri=true&mode=rwc"):
        with pytest.raises(SourceError, match=r"the database file .*no ne\.db does not exist"):
            build(tmp_path, url.format(tmp_path / "no%20ne.db"), sql_query="SELECT 1")
    sqlite3.connect(tmp_path / "is there.db").close()
    for url in (
        f"sqlite:///file:{tmp_path}/is%20there.db?uri=true&mode=ro",
        "sqlite:///file:name?uri=true&mode=memory",
        "sqlite://",
    ):
        assert len(build(tmp_path, url, sql_query=f"SELECT 1 AS x -- {url}")) == 1
    assert not list(tmp_path.glob("no*"))


def test_text_beside_bytes_in_a_column_of_sqlite_is_an_error(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "t.db") as connection:
        connection.execute("CREATE TABLE t (a)")
        connection.execute("INSERT INTO t VALUES ('x'), (x'ff')")
    connection.close()
    with pytest.raises(SchemaError, match=r"column 'a' has .* several types \(bytes and text\): give it one type, with CAST"):
        build(tmp_path, f"sqlite:///{tmp_path}/t.db", sql_query="SELECT a FROM t")
    index = build(tmp_path, f"sqlite:///{tmp_path}/t.db", sql_query='SELECT CAST("a" AS BLOB) AS "a" FROM t')
    assert [row["a"] for row in all_rows(index)] == [b"x", b"\xff"]


def test_a_module_that_a_driver_needs_for_values_is_named(tmp_path: Path) -> None:
    def fail(*_: object) -> None:  # as DuckDB's driver does, which is not among the packages of the tests
        raise sqlalchemy.exc.ProgrammingError(
            "", None, Exception("Invalid Input Error: Required module 'pytz' failed to import")
        )

    sqlite3.connect(tmp_path / "some.db").close()
    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", fail)
    try:
        with pytest.raises(MissingDependencyError, match=r"needs pytz .*: pip install pytz$"):
            build(tmp_path, f"sqlite:///{tmp_path}/some.db", sql_query="SELECT 1 AS n")
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", fail)
