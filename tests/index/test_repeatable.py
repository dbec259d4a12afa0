"""Queries that would give other rows at another moment, or on another node, are refused; those that only look so are not."""

from __future__ import annotations

import pytest

from sqlstream.errors import QueryError
from sqlstream.index.sql.dialect import check_repeatable

SQLITE = {
    "now": "SELECT * FROM dataframe WHERE day > date('now', '-7 days')",
    "now-in-capitals": "SELECT * FROM dataframe WHERE t > unixepoch('NOW') - 60",
    "now-by-default": "SELECT * FROM dataframe WHERE day = date()",
    "format-alone": "SELECT * FROM dataframe WHERE year = strftime('%Y')",
    "nested": "SELECT * FROM dataframe WHERE t > julianday(coalesce(NULL, 'now'))",
}
DUCKDB = {
    "random": "SELECT * FROM dataframe WHERE random() < 0.5",
    "sample": "SELECT * FROM dataframe USING SAMPLE 10%",
    "tablesample": "SELECT * FROM dataframe TABLESAMPLE 10%",
    "word": "SELECT * FROM dataframe WHERE day > CURRENT_DATE - 7",
    "now": "SELECT * FROM dataframe WHERE t > now()",
    "uuid": "SELECT *, uuid() AS name FROM dataframe",
}


@pytest.mark.parametrize("query", SQLITE.values(), ids=SQLITE)
def test_sqlite_may_not_ask_what_time_it_is(query: str) -> None:
    with pytest.raises(QueryError, match=r"depends on the moment or on chance.*hash"):
        check_repeatable(query, ["day", "t", "year"])


@pytest.mark.parametrize("zone", ["localtime", "utc", "LocalTime"])
def test_sqlite_may_not_ask_in_which_time_zone_it_is(zone: str) -> None:
    query = f"SELECT *, strftime('%H', day, '+1 hour', '{zone}') AS hour FROM dataframe WHERE note <> 'localtime'"
    with pytest.raises(QueryError, match="goes by the time zone of the machine"):
        check_repeatable(query, ["day", "note"])


@pytest.mark.parametrize("query", DUCKDB.values(), ids=DUCKDB)
def test_duckdb_may_not_draw_or_ask_what_time_it_is(query: str) -> None:
    with pytest.raises(QueryError, match="depends on the moment or on chance"):
        check_repeatable(query, ["day", "t"], "duckdb")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM dataframe WHERE date(day) = '2026-01-01' AND note != 'now' AND note != 'localtime'",
        "SELECT * FROM dataframe WHERE strftime('%Y', day) = '2026' AND date > 3 AND \"date\" < 9",
        "SELECT * FROM dataframe WHERE hash(random, 5) % 10 < 3 AND now > 1 AND t.current_date > 2 /* now() */",
    ],
    ids=["texts", "columns-and-dates", "names-of-functions"],
)
def test_columns_and_texts_of_these_names_are_no_functions(query: str) -> None:
    check_repeatable(query, ["date", "random", "now"])
    check_repeatable(query, ["date", "random", "now"], "duckdb")
