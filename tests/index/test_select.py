"""Filters: which rows, which order, which columns."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.errors import QueryError, SchemaError
from sqlstream.index.sql.sandbox import run_query
from tests.index.lazily import open_lazily
from tests.index.sources import all_rows, build, write_csv

TABLE = {
    "index": ["a", "b", "c", "d"],
    "width": [640, 480, 1920, 100],
    "height": [480, 640, 1080, 100],
    "Label": ["cat", "Cat", "dog", None],
    "tags": [["x"], [], None, ["x", "y"]],
    "day": [dt.date(2024, 1, 1), dt.date(2024, 6, 1), None, dt.date(2023, 1, 1)],
    "price": pa.array([Decimal("9.99"), Decimal("10.00"), None, Decimal("100.50")], pa.decimal128(10, 2)),
    "ok": [True, False, None, True],
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    where = tmp_path / "t.parquet"
    pq.write_table(pa.table(TABLE), where)
    return where


SAME_NAMES = [
    ("SELECT row, \"index\", n, url || '#x' AS url FROM dataframe", [(1, "a#x"), (2, "b#x"), (3, "c#x")]),
    ('SELECT * FROM (SELECT row, "index", -n AS n, url FROM dataframe) WHERE n < -1', [(-2, "b"), (-3, "c")]),
    (
        'SELECT a.row, a."index", a.n, b.url FROM dataframe a JOIN dataframe b ON b.row = 2 - a.row',
        [(1, "c"), (2, "b"), (3, "a")],
    ),
    (
        'WITH dataframe AS (SELECT row, "index", 7 AS n, url FROM samples) SELECT * FROM dataframe',
        [(7, "a"), (7, "b"), (7, "c")],
    ),
    (
        'WITH w(row, "index", n, url) AS (SELECT row, "index", -n, url FROM samples) SELECT * FROM w',
        [(-1, "a"), (-2, "b"), (-3, "c")],
    ),
]


@pytest.mark.parametrize(("query", "expected"), SAME_NAMES, ids=[query for query, _ in SAME_NAMES])
def test_a_column_that_is_computed_under_the_name_of_the_source_is_never_the_source_s(
    query: str, expected: list[tuple[int, str]], tmp_path: Path
) -> None:
    src = write_csv(tmp_path / "t.csv", "index,n,url\n0,1,a\n1,2,b\n2,3,c\n")
    for _ in range(2):  # found again
        assert [(row["n"], row["url"]) for row in all_rows(build(tmp_path, src, sql_query=query))] == expected


def test_positions_that_were_kept_for_computed_columns_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = write_csv(tmp_path / "t.csv", "index,n\n0,0\n1,1\n2,2\n")
    query = 'SELECT row, "index", n + 1 AS n FROM dataframe'
    with monkeypatch.context() as patched:
        patched.setattr("sqlstream.index.build.select.keeps_rows", lambda *_: True)  # as versions before this rule did
        assert [row["n"] for row in all_rows(build(tmp_path, src, sql_query=query))] == [0, 1, 2]
    assert [row["n"] for row in all_rows(build(tmp_path, src, sql_query=query))] == [1, 2, 3]


FILTERS = [
    ("SELECT * FROM dataframe", "abcd"),
    ("select * from samples", "abcd"),
    ("SELECT * FROM dataframe WHERE width / height > 1.4", "c"),
    ("SELECT * FROM dataframe WHERE width / height > 1.3;", "ac"),
    ("SELECT * FROM dataframe WHERE width // height = 1", "acd"),
    ("SELECT * FROM dataframe WHERE label LIKE 'c%'", "a"),
    ("SELECT * FROM dataframe WHERE label REGEXP '^[cC]at$'", "ab"),
    ("SELECT * FROM dataframe WHERE index IN ('d', 'b') ORDER BY index DESC", "db"),
    ("SELECT * FROM dataframe WHERE \"index\" = 'a' -- it", "a"),
    ("SELECT d.* FROM dataframe AS d ORDER BY d.width LIMIT 2", "db"),
    ("SELECT * FROM dataframe WHERE row % 2 = 0", "ac"),
    ("SELECT * FROM dataframe WHERE ok", "ad"),
    ("SELECT * FROM dataframe WHERE day >= '2024-01-01'", "ab"),
    ("SELECT * FROM dataframe WHERE price > 9.995", "bd"),
    ("SELECT * FROM dataframe WHERE EXISTS (SELECT 1 FROM json_each(tags) WHERE value = 'y')", "d"),
    ("WITH wide AS (SELECT * FROM samples WHERE width > 500) SELECT * FROM wide", "ac"),
    ("SELECT * FROM dataframe WHERE width > (SELECT avg(width) FROM dataframe)", "c"),
    ("SELECT * FROM dataframe UNION ALL SELECT * FROM dataframe WHERE index = 'a'", "abcda"),
    ("SELECT * FROM dataframe WHERE index != ';' /* ; */ LIMIT 1 OFFSET 1", "b"),
]


@pytest.mark.parametrize(("query", "keys"), FILTERS, ids=[query for query, _ in FILTERS])
def test_a_filter_keeps_these_rows_in_this_order(query: str, keys: str, path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path, sql_query=query)
    assert "".join(str(row["index"]) for row in all_rows(index)) == keys
    assert index.selection is not None  # positions only: the rows are in the file already


def test_max_size_cuts_the_selection_from_its_start(path: Path, tmp_path: Path) -> None:
    for query in ("SELECT * FROM dataframe ORDER BY width", "SELECT index, width FROM dataframe ORDER BY width"):
        index = build(tmp_path, path, sql_query=query, max_size=2)
        assert [row["index"] for row in all_rows(index)] == ["d", "b"]


def test_columns_of_the_source_keep_their_types_in_a_computed_table(path: Path, tmp_path: Path) -> None:
    query = "SELECT index, label, tags, day, price, ok, width, width * height AS area, upper(label) AS name FROM dataframe"
    index = build(tmp_path, path, sql_query=query)
    source = build(tmp_path, path)
    for row, was in zip(all_rows(index), all_rows(source), strict=True):
        label: Any = was["Label"]
        assert row == {
            **{name: was[name] for name in ("index", "Label", "tags", "day", "price", "ok", "width")},
            "area": was["width"] * was["height"],  # type: ignore[operator]  # numbers in TABLE
            "name": label and label.upper(),
        }
    assert run_query(index, "SELECT sum(area), max(price) FROM dataframe")[1] == [(640 * 480 * 2 + 1920 * 1080 + 10000, 100.5)]


def test_a_computed_column_that_only_bears_a_sources_name_has_its_own_type(path: Path, tmp_path: Path) -> None:
    columns = "index, length(label) AS label, json_array_length(tags) AS tags, ok + 5 AS ok, strftime('%Y', day) AS day"
    rows = all_rows(build(tmp_path, path, sql_query=f"SELECT {columns} FROM samples"))
    assert rows[0] == {"index": "a", "Label": 3, "tags": 1, "ok": 6, "day": "2024"}
    assert rows[2] == {"index": "c", "Label": 3, "tags": None, "ok": None, "day": None}


def test_a_star_with_more_columns_gives_both_and_no_row_ids(path: Path, tmp_path: Path) -> None:
    index = build(tmp_path, path, sql_query="SELECT *, width + 1 AS more FROM dataframe WHERE width > 500")
    assert [row["more"] for row in all_rows(index)] == [641, 1921]
    assert [column.name for column in index.columns] == [*TABLE, "more"]
    assert index.selection is None


def test_a_computed_table_needs_the_key_and_the_columns_to_download(path: Path, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="gives no 'index', which is the index column"):
        build(tmp_path, path, sql_query="SELECT width FROM dataframe", key_column="index")
    with pytest.raises(SchemaError, match="gives no 'Label', which is a column of columns_to_download"):
        build(tmp_path, path, sql_query="SELECT index FROM dataframe", columns_to_download=("Label",))
    options: dict[str, Any] = {"columns_to_download": ("Label",), "allow_missing_columns": True}
    assert all_rows(build(tmp_path, path, sql_query="SELECT index FROM dataframe LIMIT 1", **options)) == [
        {"index": "a", "Label": None}
    ]


def test_a_filter_that_keeps_nothing_is_an_error_and_leaves_nothing(path: Path, tmp_path: Path) -> None:
    for query in ("SELECT * FROM dataframe WHERE width > 9999", "SELECT index FROM dataframe WHERE 0"):
        with pytest.raises(QueryError, match="keeps no row"):
            build(tmp_path, path, sql_query=query)
    assert len(list((tmp_path / "index").iterdir())) == 1


def test_names_that_come_twice_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="'index' more than once"):
        build(tmp_path, path, sql_query="SELECT index, upper(index) AS index FROM dataframe")


def test_a_text_in_double_quotes_is_told_from_a_column_that_is_not_there(path: Path, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=r"no such column: cat \(text needs single quotes: 'cat'\)"):
        build(tmp_path, path, where='label = "cat"')
    with pytest.raises(QueryError, match=r"no such column: cat\. "):
        build(tmp_path, path, where="label = cat")


def test_a_query_that_fakes_row_ids_is_refused(path: Path, tmp_path: Path) -> None:
    columns = ", ".join(f'"{name}"' for name in TABLE)
    with pytest.raises(QueryError, match="no row ids"):
        build(tmp_path, path, sql_query=f"SELECT row + 100 AS row, {columns} FROM dataframe")


def test_a_sources_column_called_row_is_not_shadowed(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index,row\na,7\nb,8\n")
    index = build(tmp_path, path, sql_query="SELECT * FROM dataframe WHERE row_1 = 8 AND row = 1")
    assert all_rows(index) == [{"index": "b", "row": 8}]


def test_columns_that_are_called_like_truth_values_can_be_filtered_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = pa.table({"index": ["a", "b"], "true": [7, 8], "FALSE": [9, 10]})
    index = build(tmp_path, table, sql_query="SELECT * FROM dataframe WHERE true_1 = 8 AND FALSE_1 > 9")
    assert all_rows(index) == [{"index": "b", "true": 8, "FALSE": 10}]
    assert index.selection is not None
    build(tmp_path, table, sql_query="SELECT * FROM dataframe WHERE true_1 = 8 OR true")
    assert "names 'true', which is a truth value in SQL" in caplog.text


def test_a_query_keeps_names_that_differ_in_the_case_of_other_letters(tmp_path: Path) -> None:
    table = pa.table({"Ä": [7, 8], "ä": [9, 10]})
    index = build(tmp_path, table, sql_query='SELECT "Ä", "ä" + 1 AS "ä" FROM dataframe WHERE "ä" > 9')
    assert all_rows(index) == [{"Ä": 8, "ä": 11}]


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_a_sources_column_called_row_stays_beside_computed_ones(engine: str, tmp_path: Path) -> None:
    if engine == "duckdb":
        pytest.importorskip("duckdb")
    table = pa.table({"index": ["a", "b"], "row": [True, None], "Row": ["x", "y"]})
    index = build(tmp_path, table, sql_query="SELECT *, 1 AS one FROM dataframe", sql_engine=engine)
    assert all_rows(index) == [
        {"index": "a", "row": True, "Row": "x", "one": 1},
        {"index": "b", "row": None, "Row": "y", "one": 1},
    ]


@pytest.mark.parametrize(("name", "what"), [("row", "the number of a row"), ("a", "another column")])
def test_a_name_that_means_something_else_in_sql_is_said(
    name: str, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"row": [5, 6], "A": [0, 1], "a": [3, 4]}), path)
    for opened in (build, open_lazily):
        caplog.clear()
        opened(tmp_path, path, where=f"{name} = 0 OR A = 7")
        assert [f"names '{name}', which is {what} in SQL" in text for text in caplog.messages] == [True]
        opened(tmp_path, path, where=f"{name}_1 = 3 OR {name}_1 = 5")
        assert len(caplog.messages) == 1


DOUBLE = {"id": [1, 1, 2], "x": ["a", "a", "b"]}


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
@pytest.mark.parametrize(
    "query",
    [
        "SELECT DISTINCT * FROM dataframe",
        "SELECT * FROM (SELECT DISTINCT d.*, id + 1 AS more FROM samples d) WHERE id < 3",
        "WITH w AS (SELECT * FROM dataframe) SELECT DISTINCT * FROM w",
        "SELECT DISTINCT * FROM (SELECT row, id FROM dataframe UNION ALL SELECT row, id FROM dataframe)",
    ],
)
def test_distinct_rows_that_their_numbers_tell_apart_are_refused(query: str, engine: str, tmp_path: Path) -> None:
    if engine == "duckdb":
        pytest.importorskip("duckdb")
    with pytest.raises(QueryError, match=r"DISTINCT \*, which leaves no row out"):
        build(tmp_path, pa.table(DOUBLE), sql_query=query, sql_engine=engine)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT DISTINCT id, x FROM dataframe",
        "SELECT DISTINCT * FROM (SELECT id, x FROM dataframe)",
        "WITH w AS (SELECT id, x FROM dataframe) SELECT DISTINCT * FROM w WHERE id IN (SELECT id FROM dataframe)",
        "SELECT * FROM dataframe WHERE row IN (SELECT min(row) FROM dataframe GROUP BY id, x)",
    ],
)
def test_rows_that_come_twice_are_left_out_by_their_columns(query: str, tmp_path: Path) -> None:
    index = build(tmp_path, pa.table(DOUBLE), sql_query=query)
    assert sorted(map(str, all_rows(index))) == ["{'id': 1, 'x': 'a'}", "{'id': 2, 'x': 'b'}"]


def test_case_is_changed_in_every_script(tmp_path: Path) -> None:
    table = pa.table({"name": ["ÄPFEL", "Ωmega", "straße", None], "n": range(4)})
    index = build(tmp_path, table, sql_query="SELECT lower(name) AS low, upper(name) AS up, lower(n) AS n FROM dataframe")
    assert [tuple(row.values()) for row in all_rows(index)] == [
        ("äpfel", "ÄPFEL", "0"),
        ("ωmega", "ΩMEGA", "1"),
        ("straße", "STRAßE", "2"),
        (None, None, "3"),
    ]


def test_random_functions_are_spread_evenly_and_always_the_same(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index\n" + "".join(f"k{at}\n" for at in range(2000)))
    one = build(tmp_path, path, sql_query="SELECT * FROM dataframe WHERE random_uniform(row, 1) < 0.25")
    two = build(tmp_path, path, sql_query="SELECT * FROM dataframe WHERE random_uniform(row, 2) < 0.25")
    assert 400 < len(one) < 600
    assert {str(row) for row in all_rows(one)} != {str(row) for row in all_rows(two)}
    hashed = run_query(one, "SELECT hash('a', 0), hash(1, 0), hash(NULL, 0), hash('a', 1) FROM dataframe LIMIT 1")[1]
    assert hashed == [(6365277735214394648, 6752321105783186942, 5626291380463579492, 1376013599004323324)]
