"""`where` and `weights` are one expression each, whatever their text is."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sqlstream.errors import QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.sql.expressions import condition_of, one_expression, one_select
from sqlstream.index.sql.sandbox import run_query
from sqlstream.index.sql.sqlite_engine import SqliteEngine
from sqlstream.index.sql.syntax_trees import given_names, judges_rows, keeps_rows
from sqlstream.index.sql.table import QueriedTable
from sqlstream.index.weights import open_weights
from tests.index.sources import all_rows, build, write_csv

NOT_ONE = [
    "1) FROM dataframe UNION ALL SELECT 'x', (5",
    "1) FROM dataframe UNION ALL SELECT row + 1000, (5",
    "n) OR (1",
    "(n",
    "n)",
    "1; DROP TABLE rows",
    "1;;SELECT 2",
    "1, 2",
    "1 FROM dataframe",
    "1 WHERE n",
    "n ORDER BY n",
    "n LIMIT 1",
    "n INTO x",
    "n UNION SELECT 1",
    "DISTINCT n",
    "SELECT 1",
    "WITH x AS (SELECT 1) SELECT 2",
    "VALUES (1)",
    "*",
    "dataframe.*",
    "n AS m",
    "n m",
    "",
    " ",
    ";",
    "-- n",
    "n /* without an end",
    "/*/ n",
    "/* /* */ n) UNION SELECT (1 */",
    "/* /* */ ; SELECT 1 -- */",
    "'without an end",
    '"without an end',
    "n = 'a' 'b",
    "\0",
    "n {# ) #}; (",
    "n {# 1 #}",
    "ATTACH 'x' AS y",
    "PRAGMA user_version",
]
ONE = [
    "n > 6",
    "n > 6; -- all of them",
    "n > 6 /* ) */",
    "n > 6 -- )",
    "n // 2 = 3 AND n / 2 > 2.9",
    "'a)' != ';' AND n > 6",
    "index ILIKE 'K7%'",
    "left(index, 1) = 'k' AND update > 5",
    "replace(index, 'k', '') > '6'",
    "`n` > 6 OR [n] < 0",
    '"n" > 6',
    "n IN (SELECT max(n) FROM dataframe)",
    "n = 7 COLLATE NOCASE",
    "hash(index, 1) % 10 < 5",
    "CASE WHEN n > 6 THEN 1 ELSE 0 END",
    "n ISNULL OR n NOT NULL",
    "x'ab' = 1 OR 0x07 = n",
    "strftime('%Y', '2024-02-29') = '2024'",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("expressions")


@pytest.fixture(scope="module")
def path(place: Path) -> Path:
    return write_csv(place / "t.csv", "index,n,update\n" + "".join(f"k{at},{at},{at}\n" for at in range(9)))


@pytest.fixture(scope="module")
def index(path: Path, place: Path) -> Index:
    return build(place, path)


@pytest.mark.parametrize("text", NOT_ONE, ids=repr)
def test_what_is_not_one_expression_is_refused(text: str, path: Path, index: Index, place: Path) -> None:
    with pytest.raises(QueryError, match=r"(?s)^where=.* is not one SQL expression: .*: give one expression"):
        build(place, path, where=text)
    with pytest.raises(QueryError, match=r"(?s)^weights=.* is not one SQL expression"):
        open_weights(index, text, place / "index")
    with pytest.raises(QueryError):
        condition_of(None, text)
    for engine in ("sqlite", "duckdb"):
        with pytest.raises(QueryError) as refused:
            one_expression("where", text, engine)
        assert str(refused.value).count("is not one SQL expression") == 1


@pytest.mark.parametrize("text", ONE)
def test_one_expression_goes_through_with_its_meaning(text: str, path: Path, index: Index, place: Path) -> None:
    condition = one_expression("where", text)
    expected = [row for (row,) in run_query(index, f"SELECT row FROM dataframe WHERE ({condition})")[1]]
    selected = build(place, path, where=text)
    assert [row["n"] for row in all_rows(selected)] == expected
    assert expected


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM dataframe) UNION ALL SELECT * FROM (SELECT * FROM dataframe",
        "SELECT * FROM dataframe WHERE n > 1) -- (",
        "SELECT * FROM dataframe /* all of it",
    ],
)
def test_a_query_cannot_leave_the_brackets_that_it_is_put_into(query: str, path: Path, place: Path) -> None:
    for where in (None, "n > 1"):
        with pytest.raises(QueryError, match="no single SELECT: "):
            build(place, path, sql_query=query, where=where)


FRAGMENTS = r"""
n n n 1 'a' "n" `n` [n] ( ) ( ) , ; -- /* */ ' " ` [ ] + - * / // || = < > :: . : @ # $1 ? \\ {# #} {{ }} $$ ~ x'ab' 1e3
AND OR NOT IS NULL IN LIKE COLLATE OVER FILTER CASE WHEN END FROM dataframe WHERE UNION ALL SELECT row AS w LIMIT VALUES WITH
""".split()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from([*FRAGMENTS, "\n", "\0", "\u00a0"]), max_size=9),
    st.sampled_from(["", "1) ", "n) FROM dataframe UNION ALL SELECT 99, (", "1 -- ", "/* /* */ "]),
    st.sampled_from(["", " "]),
)
def test_no_text_that_is_taken_leaves_its_brackets(index: Index, words: list[str], start: str, between: str) -> None:
    try:
        text = one_expression("weights", start + between.join(words))
    except QueryError:
        return
    with contextlib.suppress(QueryError):
        engine = SqliteEngine(QueriedTable.of(index), f"SELECT row, ({text}) AS weight FROM dataframe", budget_seconds=600)
        with contextlib.closing(engine):
            names, batches = engine.run(engine.statement, 100)
            rows = [row for batch in batches for (row, _) in batch]
        assert names == ["row", "weight"]
        assert len(rows) == len(set(rows))
        assert set(rows) <= set(range(9))


def test_a_query_that_fakes_row_ids_makes_no_weights(path: Path, index: Index, place: Path) -> None:
    faked = build(place, path, sql_query="SELECT * FROM dataframe ORDER BY n")
    assert faked.selection is not None
    for fake in ("'x' AS row", "row + 1000 AS row", "-1 AS row"):
        object.__setattr__(faked.selection, "query", f"SELECT {fake}, n FROM dataframe")
        object.__setattr__(faked.selection, "fingerprint", fake)
        with pytest.raises(QueryError, match="holds no row ids"):
            open_weights(Index(index.path, selection=faked.selection), "1 + n", place / "index")


@pytest.mark.parametrize(
    ("statement", "judges"),
    [
        ("SELECT * FROM dataframe", True),
        ("SELECT * FROM (SELECT * FROM dataframe WHERE n > 6 LIMIT 9) WHERE (n > 6)", True),
        ("SELECT row, (1 + n) AS weight FROM samples", True),
        ("SELECT * FROM dataframe ORDER BY n", False),
        ("SELECT DISTINCT * FROM dataframe", False),
        ("SELECT * FROM dataframe, dataframe", False),
        ("SELECT * FROM dataframe WHERE n IN (SELECT 1)", False),
        ("SELECT * FROM dataframe WHERE n IN dataframe", False),
        ("SELECT count(*) FROM dataframe", False),
        ("SELECT row_number() OVER () FROM dataframe", False),
        ("SELECT * FROM dataframe UNION ALL SELECT * FROM dataframe", False),
        ("WITH x AS (SELECT 1) SELECT * FROM dataframe", False),
        ("SELECT * FROM json_each('[1]')", False),
        ("SELECT 1", False),
        ("SELECT (", False),
    ],
)
def test_it_is_known_which_statements_judge_rows_alone(statement: str, judges: bool) -> None:
    assert judges_rows(statement) is judges


@pytest.mark.parametrize(
    ("query", "dialect"),
    [
        ("COPY (SELECT 1) TO PROGRAM 'touch x'", "postgresql"),
        ("COPY t TO PROGRAM 'touch x'", "postgresql"),
        ("COPY t FROM PROGRAM 'touch x'", "postgresql"),
        ("SELECT 1; COPY t TO PROGRAM 'touch x'", "postgresql"),
        ("SELECT 1 /* /* */ */; COPY t TO PROGRAM 'touch x'", "postgresql"),
        ("WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x", "postgresql"),
        ("WITH x AS (INSERT INTO t VALUES (1) RETURNING *) SELECT * FROM x", "redshift"),
        ("WITH x AS (UPDATE t SET a = 1 RETURNING *) SELECT * FROM x", "cockroachdb"),
        ("SELECT * INTO u FROM t", "mssql"),
        ("SELECT 1 FROM t INTO OUTFILE '/tmp/x'", "mysql"),
        ("SELECT 1 /*!50000 INTO OUTFILE '/tmp/x' */", "mariadb"),
        ("SELECT * FROM t FOR UPDATE", "oracle"),
        ("DO $$ BEGIN PERFORM 1; END $$", "postgresql"),
        ("CALL p()", "mysql"),
        ("EXPLAIN ANALYZE DELETE FROM t", "postgresql"),
        ("EXECUTE p", "postgresql"),
        ("CREATE TABLE x AS SELECT 1", "snowflake"),
        ("EXPORT DATA OPTIONS (uri='gs://b/*') AS SELECT 1", "bigquery"),
        ("SET x = 1", "postgresql"),
        ("PRAGMA writable_schema = 1", "sqlite"),
        ("ATTACH 'x' AS y", "sqlite"),
        ("VACUUM INTO 'x'", "sqlite"),
        ("", "postgresql"),
        ("SELECT '", "db2"),
    ],
)
def test_a_database_gets_one_select_and_nothing_else(query: str, dialect: str) -> None:
    with pytest.raises(QueryError, match=r"is not sent to db: .*: give one read-only SELECT"):
        one_select(query, dialect, "db")


@pytest.mark.parametrize(
    ("query", "dialect"),
    [
        ("SELECT * FROM t WHERE a->>'x' = 'COPY t TO PROGRAM' AND b @> '{1}' ORDER BY 1; -- it", "postgresql"),
        ("WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 9) SELECT i::text FROM n", "postgresql"),
        ("SELECT $$it's$$, E'it\\'s', DATE '2024-01-01', x[1], ARRAY[1, 2], now() - interval '3 days' FROM t", "postgresql"),
        ("SELECT a FROM t UNION ALL (SELECT b FROM u LIMIT 3)", "mysql"),
        ("SELECT `a`, REGEXP_CONTAINS(b, r'^x') FROM `p.d.t` TABLESAMPLE SYSTEM (1 PERCENT), UNNEST(c) AS d", "bigquery"),
        ("SELECT TOP 10 [a b] FROM dbo.t WITH (NOLOCK)", "mssql"),
        ("SELECT a FROM t QUALIFY ROW_NUMBER() OVER (PARTITION BY b ORDER BY c) = 1", "snowflake"),
        ("SELECT a FROM t FETCH FIRST 3 ROWS ONLY", "db2"),
        ("SELECT json_extract(a, '$.b') FROM t WHERE a GLOB 'x*'", "sqlite"),
        ("SELECT a FROM t FINAL PREWHERE b > 1", "clickhouse"),
    ],
)
def test_selects_of_many_databases_are_taken_for_such(query: str, dialect: str) -> None:
    assert one_select(query, dialect, "db") == query.partition("; -- it")[0]


KEPT = [
    "SELECT * FROM dataframe",
    "select  *  from samples where n > 1 order by n limit 5; -- x",
    "SELECT * FROM dataframe WHERE n IN (SELECT n FROM samples)",
    "SELECT * FROM (SELECT * FROM dataframe WHERE n > 1) WHERE (m)",
    "SELECT * FROM dataframe UNION ALL SELECT * FROM samples WHERE n > 5",
    "SELECT d.* FROM dataframe d, json_each(d.tags) j WHERE j.value = 'cat'",
    "WITH a AS (SELECT avg(n) m FROM dataframe) SELECT dataframe.* FROM dataframe, a WHERE n > m",
    "WITH a AS (SELECT * FROM dataframe) SELECT DISTINCT * FROM a",
    "SELECT * FROM dataframe d ORDER BY row_number() OVER (ORDER BY n)",
]
KEPT_BY_DUCKDB = [
    "FROM dataframe WHERE n > 1",
    "SELECT * FROM dataframe USING SAMPLE 10",
    "SELECT * FROM dataframe QUALIFY row_number() OVER (PARTITION BY n) = 1",
]
NOT_KEPT = [
    "SELECT row, n + 1 AS n FROM dataframe",
    "SELECT * FROM dataframe a NATURAL JOIN dataframe b",
    "SELECT * FROM dataframe UNION ALL SELECT row, a AS b FROM dataframe",
    "SELECT * FROM dataframe WHERE n UNION SELECT row, -n FROM samples",
    "SELECT * FROM dataframe UNION ALL VALUES (1, 2)",
    "SELECT b.* FROM dataframe a JOIN (SELECT row, -n AS n FROM dataframe) b",
    "WITH a AS (SELECT row, -n AS n FROM dataframe), dataframe AS (SELECT * FROM a) SELECT * FROM dataframe",
    "WITH w(row, b, a) AS (SELECT * FROM samples) SELECT * FROM w",
    "SELECT * FROM json_each('[1]')",
    "SELECT (2",
]
NOT_KEPT_BY_DUCKDB = [
    "SELECT * REPLACE (upper(url) AS url) FROM dataframe",
    "SELECT * RENAME (url AS txt, txt AS url) FROM dataframe",
    "SELECT COLUMNS(*) FROM dataframe",
    "SELECT d.* REPLACE (1 AS n) FROM dataframe d",
    "SELECT * FROM (FROM dataframe SELECT row, n + 1 AS n)",
    "SELECT * FROM dataframe AS d(row, b, a)",
    "SELECT * FROM dataframe PIVOT (count(*) FOR n IN (1, 2))",
    "SELECT * FROM query('SELECT 1')",
]


@pytest.mark.parametrize("query", KEPT)
def test_a_query_that_only_chooses_rows_keeps_them(query: str) -> None:
    assert keeps_rows(query)
    assert keeps_rows(query, "duckdb")


@pytest.mark.parametrize("query", NOT_KEPT)
def test_a_query_that_may_compute_a_column_does_not_keep_rows(query: str) -> None:
    assert not keeps_rows(query)
    assert not keeps_rows(query, "duckdb")


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("SELECT * FROM dataframe", ""),
        ('SELECT n, n + 1 AS m, a b, "c" AS "D" FROM dataframe', "D b m"),
        ("SELECT * FROM (SELECT *, a AS within FROM dataframe) AS t WHERE (within)", "within"),
        ("WITH w AS (SELECT a AS one FROM dataframe) SELECT *, a AS two FROM w", "one two"),
        ("SELECT a AS one FROM dataframe UNION ALL SELECT b AS two FROM dataframe", "one two"),
        ("SELECT (2", ""),
    ],
)
def test_it_is_known_which_names_a_query_gives(query: str, names: str) -> None:
    assert given_names(query) == given_names(query, "duckdb") == frozenset(names.split())


def test_duckdb_chooses_and_computes_in_ways_of_its_own() -> None:
    assert [query for query in KEPT_BY_DUCKDB if not keeps_rows(query, "duckdb")] == []
    assert [query for query in NOT_KEPT_BY_DUCKDB if keeps_rows(query, "duckdb")] == []


FORK_BESIDE_AN_IMPORT = """
import os, signal, sys, threading, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "sqlglot":
            inside.set()
            forking.wait(60)
            time.sleep(0.3)  # a fork that does not wait is over by then

inside, forking = threading.Event(), threading.Event()
from sqlstream.index.sql.dialect import tokens
assert "sqlglot" not in sys.modules
sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=tokens, args=("a > 1",))
thread.start()
inside.wait(60)
forking.set()
if not (pid := os.fork()):
    signal.alarm(60)  # for a child that would wait for ever
    os._exit(len(tokens("b > 1")) != 3)
thread.join()
sys.exit(os.waitpid(pid, 0)[1])
"""


def test_a_fork_waits_for_the_first_import_of_sqlglot_by_another_thread() -> None:
    """Its child would wait for Python's lock of the module."""
    assert subprocess.run([sys.executable, "-c", FORK_BESIDE_AN_IMPORT], check=False).returncode == 0
