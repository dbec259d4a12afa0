"""Users' SQL reads the rows and nothing else."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import sqlglot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqlstream.errors import QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.sql.dialect import to_sqlite
from sqlstream.index.sql.sandbox import run_query
from tests.index.sources import build, write_csv

ATTACKS = [
    "SELECT * FROM dataframe; DROP TABLE rows",
    "DROP TABLE rows",
    "INSERT INTO rows VALUES (99)",
    "UPDATE rows SET row = 7",
    "DELETE FROM rows",
    "SELECT * FROM dataframe WHERE 1=1 UNION SELECT key, value, 1 FROM meta --",
    "SELECT * FROM sqlite_master",
    "SELECT count(*) FROM sqlite_schema",
    "SELECT * FROM columns",
    "SELECT * FROM rows",
    "SELECT (SELECT value FROM meta LIMIT 1) FROM dataframe",
    "SELECT * FROM dataframe JOIN sources",
    "ATTACH '{outside}' AS other",
    "WITH x AS (SELECT 1) SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_table_info('rows')",
    "SELECT load_extension('{outside}') FROM dataframe",
    "SELECT readfile('/etc/passwd') FROM dataframe",
    "SELECT writefile('{outside}', 'x') FROM dataframe",
    "VACUUM INTO '{outside}'",
    "PRAGMA query_only = 0",
    "PRAGMA journal_mode = DELETE",
    "CREATE TABLE evil (x)",
    "CREATE TEMP TABLE evil AS SELECT * FROM dataframe",
    "REINDEX",
    "ANALYZE",
    "BEGIN IMMEDIATE",
    "EXPLAIN SELECT * FROM dataframe",
    "SELECT randomblob(1000000000) FROM dataframe",
    "SELECT zeroblob(1000000000) FROM dataframe",
    "SELECT length(printf('%.*c', 1000000000, 'x')) FROM dataframe",
    "SELECT length(format('%1000000000d', 1)) FROM dataframe",
    "SELECT random() FROM dataframe",
    "SELECT * FROM dataframe WHERE index > date('now')",
    "SELECT sqlite_version() FROM dataframe",
    "SELECT fts3_tokenizer('x') FROM dataframe",
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "SELECT * FROM generate_series(1, 1000000000)",
    "SELECT * FROM dbstat",
    "SELECT * FROM main.rows",
    "SELECT * FROM temp.sqlite_master",
    "SELECT ? FROM dataframe",
    "SELECT " + "(" * 500 + "1" + ")" * 500 + " FROM dataframe",
    "SELECT * FROM dataframe WHERE n = " + "1 + " * 5000 + "1",
    "SELECT * FROM dataframe WHERE n IN (" + "1," * 200_000 + "1)",
    "SELECT * FROM dataframe WHERE index LIKE '" + "%a" * 5000 + "'",
    "SELECT 'x",
    "",
    ";",
    "\0",
]


FRAGMENTS = r"""
SELECT FROM WHERE UNION ALL * ( ) , ; -- /* */ ' " ` [ ] . = || -> :: ? \0 1 n row index dataframe samples rows meta
columns sources sqlite_master sqlite_schema temp main pragma_table_info('rows') pragma_database_list ATTACH DETACH
'outside' AS x INTO VACUUM PRAGMA writable_schema=1 INSERT UPDATE DELETE DROP TABLE rows WITH RECURSIVE c(i) VALUES
JOIN ON EXISTS LIMIT 9 ORDER BY GROUP HAVING CASE WHEN THEN END CAST LIKE GLOB MATCH REGEXP IN NOT NULL
load_extension('outside') readfile('/etc/passwd') writefile('outside','x') randomblob(9999999) zeroblob(9999999)
printf('%9999999d',1) json_each('[1]') json_tree('[1]') value key left(n,2) concat(n,n)
regexp_replace(n,'(.*)','\1\1') hash(n,1) count(*) OVER
""".split()


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return build(tmp_path, write_csv(tmp_path / "t.csv", "index,n\n" + "".join(f"k{at},{at}\n" for at in range(300))))


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack[:60] for attack in ATTACKS])
def test_an_attack_is_refused_and_changes_nothing(attack: str, index: Index, tmp_path: Path) -> None:
    outside = tmp_path / "outside.sqlite"
    before, names = index.path.read_bytes(), sorted(os.listdir(tmp_path / "index"))
    with pytest.raises(QueryError):
        run_query(index, attack.format(outside=outside) if "{outside}" in attack else attack)
    assert index.path.read_bytes() == before
    assert sorted(os.listdir(tmp_path / "index")) == names
    assert not outside.exists()


def test_a_text_that_is_too_long_is_refused_before_it_is_read(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any, **options: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(sqlglot, "tokenize", read)
    with pytest.raises(QueryError, match="it has 200035 characters, and at most 200000 are read"):
        run_query(index, "SELECT * FROM dataframe WHERE n = 1".ljust(200_035))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.sampled_from(["", "SELECT * FROM dataframe WHERE ", "SELECT n, "]))
def test_no_text_reads_or_writes_anything_else(index: Index, tmp_path: Path, words: list[str], start: str) -> None:
    place = tmp_path / "index"
    before = index.path.read_bytes()
    started = time.process_time()  # our own work: other processes may keep us waiting for long
    try:
        found = repr(run_query(index, start + " ".join(words), 50, budget_seconds=1))
    except QueryError:
        found = ""
    assert time.process_time() - started < 20
    for secret in ("created_at", "fingerprint", "CREATE TABLE", "root:", str(index.path.parent)):
        assert secret not in found
    assert index.path.read_bytes() == before
    assert [path.name for path in place.iterdir()] == [index.path.name]
    assert not Path("outside").exists()


def test_a_query_that_takes_too_long_is_stopped(index: Index) -> None:
    started = time.process_time()
    with pytest.raises(QueryError, match=r"did not end within 0\.2 seconds"):
        run_query(index, "SELECT count(*) FROM dataframe a, dataframe b, dataframe c, dataframe d", budget_seconds=0.2)
    assert time.process_time() - started < 10


def test_a_regular_expression_takes_no_exponential_time(index: Index, tmp_path: Path) -> None:
    bomb = build(tmp_path, write_csv(tmp_path / "b.csv", "index\n" + "a" * 5000 + "b\n"))
    assert run_query(bomb, "SELECT count(*) FROM dataframe WHERE index REGEXP '^(a+)+$'", budget_seconds=300)[1] == [(0,)]
    with pytest.raises(QueryError, match="patterns of 1000"):
        run_query(index, f"SELECT * FROM dataframe WHERE index REGEXP '{'a' * 2000}'")
    with pytest.raises(QueryError, match=r"REGEXP says .*missing"):
        run_query(index, "SELECT * FROM dataframe WHERE index REGEXP '('")


def test_an_error_shows_the_query_and_the_columns_at_hand(index: Index) -> None:
    with pytest.raises(QueryError, match=r"'SELECT m FROM dataframe'.*no such column: m.*columns: row, index, n"):
        run_query(index, "SELECT m FROM dataframe")
    with pytest.raises(QueryError, match="no such column"):  # SQLite alone takes it for a text, and all rows
        run_query(index, 'SELECT * FROM dataframe WHERE "m" > 5')
    with pytest.raises(QueryError, match=r"random_uniform\(row, seed\)"):
        run_query(index, "SELECT random() FROM dataframe")
    with pytest.raises(QueryError, match=r"printf\(\) is not allowed: use .*lpad\(number, width, '0'\)"):
        run_query(index, "SELECT printf('%03d', n) FROM dataframe")
    assert run_query(index, "SELECT lpad(7, 3, '0') FROM dataframe LIMIT 1")[1] == [("007",)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT rowid FROM dataframe",
        "SELECT * FROM dataframe WHERE ROWID = 1",
        "SELECT d.oid FROM samples d",
        'SELECT "_rowid_" FROM dataframe',
        "SELECT n FROM (SELECT * FROM dataframe) WHERE [rowid] < 9",
        "SELECT n AS rowid FROM dataframe ORDER BY rowid",
    ],
)
def test_sqlites_own_row_numbers_are_refused_with_ours_as_the_cure(query: str, index: Index) -> None:
    with pytest.raises(QueryError, match=r"(?i)reads .*(rowid|oid).* which is no column here: the number of a row is 'row'"):
        run_query(index, query)


def test_a_column_and_a_result_may_be_called_like_sqlites_row_numbers(index: Index, tmp_path: Path) -> None:
    assert run_query(index, "SELECT n + 5 AS rowid, 'oid' AS x FROM dataframe LIMIT 1") == (["rowid", "x"], [(5, "oid")])
    own = build(tmp_path, write_csv(tmp_path / "own.csv", "index,RowId\na,7\nb,8\n"))
    assert run_query(own, "SELECT rowid FROM dataframe WHERE rowid > 7")[1] == [(8,)]
    with pytest.raises(QueryError, match="reads 'oid'"):
        run_query(own, "SELECT oid FROM dataframe")


def test_names_and_rows_come_with_a_limit(index: Index) -> None:
    names, rows = run_query(index, "SELECT n, n AS n, row FROM dataframe WHERE n > 5", 2)
    assert names == ["n", "n", "row"]
    assert rows == [(6, 6, 6), (7, 7, 7)]
    assert len(run_query(index, "SELECT * FROM dataframe")[1]) == 300
    assert run_query(index, "SELECT n FROM dataframe WHERE 0") == (["n"], [])
    assert run_query(index, "SELECT n FROM dataframe", 0) == (["n"], [])


def test_a_kept_connection_would_not_help_either(index: Index) -> None:
    """The mode alone: even without the authorizer the file is not writable."""
    connection = sqlite3.connect(f"file:{index.path}?mode=ro&immutable=1", uri=True)
    with pytest.raises(sqlite3.OperationalError):
        connection.execute("CREATE TABLE x (y)")
    connection.close()


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("select a/b from t", "select a*1.0/b from t"),
        ("select 'a/b', \"x/y\", [p/q], a//b -- c/d", "select 'a/b', `x/y`, `p/q`, a/b"),
        ('select /* ; */ index, "a`b""c" from t ;; ', 'select   `index`, `a``b"c` from t'),
        ("select update from t", "select update from t"),
    ],
)
def test_only_what_means_something_else_in_sqlite_is_rewritten(query: str, expected: str) -> None:
    assert to_sqlite(query, ["Index", "a"]) == expected
