"""What goes into an index comes out: by example for every type, by property for names and values."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import gc
import json
import math
import pickle
import tempfile
import uuid
import zoneinfo
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import SchemaError, SourceError
from sqlstream.index.export import ExportOptions, export
from sqlstream.index.file.index import Index
from sqlstream.index.sql.sandbox import run_query
from sqlstream.index.types.arrow import arrays_of
from sqlstream.index.types.values import columns_of
from sqlstream.sample_types import SAMPLE_FIELDS
from tests.index.sources import all_rows, build

MOMENT = dt.datetime(2024, 2, 29, 12, 30, 1, 250_000)
CASES: dict[str, tuple[Any, list[Any]]] = {
    "bool": (pa.bool_(), [True, False, None]),
    "int8": (pa.int8(), [-128, 127, None]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1, None, 0]),
    "uint64": (pa.uint64(), [0, 2**63 - 1, 2**63, 2**64 - 1, None]),
    "float16": (pa.float16(), [np.float16(1.5), None]),
    "float32": (pa.float32(), [0.5, None, math.inf]),
    "float64": (pa.float64(), [0.1, -1e300, math.inf, -math.inf, None, 2.0]),
    "string": (pa.string(), ["", "a'b\"c", "x\0y", "日本 🎈", None]),
    "large_string": (pa.large_string(), ["a", None]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["a", "b", None, "a"]),
    "binary": (pa.binary(), [b"", b"\0\xff", None]),
    "fixed_binary": (pa.binary(2), [b"ab", None]),
    "date": (pa.date32(), [dt.date(1, 1, 1), dt.date(9999, 12, 31), None]),
    "date64": (pa.date64(), [dt.date(2024, 2, 29), None]),
    "time": (pa.time64("us"), [dt.time(23, 59, 59, 999_999), None]),
    "time32": (pa.time32("s"), [dt.time(1, 2, 3), None]),
    "timestamp_s": (pa.timestamp("s"), [dt.datetime(1969, 12, 31, 23, 59, 59), None]),
    "timestamp_us": (pa.timestamp("us"), [MOMENT, dt.datetime.min, dt.datetime.max, None]),
    "timestamp_tz": (pa.timestamp("us", "Europe/Berlin"), [MOMENT.replace(tzinfo=dt.UTC), None]),
    "duration": (pa.duration("ms"), [dt.timedelta(days=-3, milliseconds=7), None]),
    "decimal": (pa.decimal128(38, 10), [Decimal("0.1000000000"), Decimal("1234567890123456789012345678.0123456789"), None]),
    "decimal_scale0": (pa.decimal128(20, 0), [Decimal(10**19), Decimal(-5), None]),
    "list": (pa.list_(pa.int64()), [[1, None, 2**62], [], None]),
    "fixed_list": (pa.list_(pa.float32(), 2), [[0.5, -1.0], None]),
    "list_special": (pa.list_(pa.float64()), [[math.inf, None, 1.0], [0.25]]),
    "list_bytes": (pa.list_(pa.binary()), [[b"\0", None]]),
    "struct": (
        pa.struct(
            [("a", pa.int32()), ("when", pa.timestamp("us", "UTC")), ("d", pa.decimal128(5, 2)), ("l", pa.list_(pa.date32()))]
        ),
        [{"a": 1, "when": MOMENT.replace(tzinfo=dt.UTC), "d": Decimal("1.50"), "l": [dt.date(2024, 1, 1), None]}, None],
    ),
    "map": (pa.map_(pa.string(), pa.float64()), [[("a", 1.0), ("b", None)], [], None]),
    "null": (pa.null(), [None, None]),
    "uuid": (pa.uuid(), [uuid.UUID(int=2**127 + 5), uuid.UUID(int=0), None]),
}


def roundtrip(directory: Path, kind: Any, values: list[Any], name: str = "value") -> list[Any]:
    directory.mkdir(exist_ok=True)
    path = directory / "table.parquet"
    keys = pa.array(range(len(values)))
    column = values if kind is None else pa.array(values, kind)
    pq.write_table(pa.table([keys, column], names=["index", name]), path)
    index = build(directory, path)
    result = [row[name] for row in all_rows(index)]
    index.close()
    return result


@pytest.mark.parametrize("name", CASES)
def test_values_of_every_type_come_back_as_they_went_in(name: str, tmp_path: Path) -> None:
    kind, values = CASES[name]
    result = roundtrip(tmp_path, kind, values)
    assert result == values
    assert [type(value) for value in result if not isinstance(value, float)] == [
        type(value) for value in values if not isinstance(value, (float, np.float16))
    ]


def test_a_nan_stays_a_nan_and_a_null_stays_none_but_both_read_as_null_in_sql(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"index": [0, 1, 2], "x": [math.nan, None, 1.0]}), path)
    index = build(tmp_path, path)
    first, second, third = (row["x"] for row in all_rows(index))
    assert isinstance(first, float)
    assert math.isnan(first)
    assert (second, third) == (None, 1.0)
    assert run_query(index, "SELECT count(x), sum(x), sum(x > 0.5) FROM dataframe")[1] == [(1, 1.0, 1)]


def test_nanoseconds_that_datetime_cannot_hold_come_back_as_numpy(tmp_path: Path) -> None:
    values = [np.datetime64("2024-01-01T00:00:00.123456789", "ns"), np.datetime64("2024-01-01T00:00:00.123456000", "ns")]
    assert roundtrip(tmp_path, pa.timestamp("ns"), values) == [values[0], dt.datetime(2024, 1, 1, 0, 0, 0, 123456)]


def test_nanoseconds_keep_their_zone_and_every_digit(tmp_path: Path) -> None:
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    stored = pa.array([1_700_000_000_123_456_789, 1_700_000_000_123_456_000, None, -1], pa.timestamp("ns", "Europe/Berlin"))
    first, second, none, early = roundtrip(tmp_path, stored.type, stored)  # type: ignore[arg-type]
    assert isinstance(first, dt.datetime)
    assert (str(first), first.tzinfo) == ("2023-11-14 23:13:20.123456789+01:00", zone)
    assert (second, none) == (dt.datetime(2023, 11, 14, 23, 13, 20, 123456, zone), None)
    assert str(early) == "1970-01-01 00:59:59.999999999+01:00"
    assert first != second
    assert pickle.loads(pickle.dumps(first)) == copy.copy(first) == first
    assert pickle.loads(pickle.dumps(first)).nanosecond == 789
    assert first not in (None, "2024", 789)
    whole = first.replace(microsecond=0)
    assert whole != "2024"
    assert {whole: 1}[dt.datetime.fromisoformat(whole.isoformat())] == 1
    index = Index(next((tmp_path / "index").glob("*.sqlite")))
    exported = arrays_of(index.columns, index.stored_rows([0, 1, 2, 3]))
    assert exported[1].equals(stored)


def test_bytes_that_stand_for_truth_come_back_as_bool(tmp_path: Path) -> None:
    truths = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([2, 0, None], pa.int8()))
    lists = pa.ListArray.from_arrays([0, 2, 3, 3], truths)
    assert roundtrip(tmp_path, None, truths) == [True, False, None]  # type: ignore[arg-type]
    assert roundtrip(tmp_path / "lists", None, lists) == [[True, False], [None], []]  # type: ignore[arg-type]


LIST_VIEWS: dict[str, tuple[Any, list[Any]]] = {
    "texts": (pa.list_view(pa.string_view()), [["a", None], None, [], ["b" * 20]]),
    "moments": (pa.large_list_view(pa.timestamp("ns")), [[MOMENT, None], None, [], [dt.datetime(1970, 1, 1)]]),
    "within": (pa.list_view(pa.list_view(pa.time64("ns"))), [[[dt.time(1)], None], None, [[]], [[dt.time(2)]]]),
    "structs": (pa.struct([("a", pa.list_view(pa.string_view()))]), [{"a": ["a"]}, None, {"a": None}, {"a": ["b"]}]),
}


@pytest.mark.parametrize("name", LIST_VIEWS)
def test_list_views_come_back_whole(name: str, tmp_path: Path) -> None:
    """Arrow's casts of them lose rows."""
    kind, values = LIST_VIEWS[name]
    table = pa.table({"index": ["a", "b", "c", "d"], "value": pa.array(values, kind)})
    assert [row["value"] for row in all_rows(build(tmp_path, table))] == values
    assert [row["value"] for row in all_rows(build(tmp_path, table.slice(1)))] == values[1:]


def test_list_views_that_lie_in_another_order_come_back_in_theirs(tmp_path: Path) -> None:
    days = pa.array([dt.datetime(2024, 1, day) for day in (1, 2, 3)], pa.timestamp("ns"))
    arrow: Any = pa  # its stubs know arrays alone
    views = arrow.ListViewArray.from_arrays([2, 0, 1], [1, 2, 0], days)
    rows = all_rows(build(tmp_path, pa.table({"index": ["a", "b", "c"], "value": views})))
    assert [row["value"] for row in rows] == [[dt.datetime(2024, 1, 3)], [dt.datetime(2024, 1, 1), dt.datetime(2024, 1, 2)], []]


def test_a_moment_that_stands_for_no_time_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"'value'.*stands for no time"):
        roundtrip(tmp_path, pa.timestamp("us", "UTC"), pa.array([-(2**63)], pa.timestamp("us", "UTC")))  # type: ignore[arg-type]


def test_a_day_beyond_datetime_comes_back_as_numpy_and_a_time_beyond_a_day_is_refused(tmp_path: Path) -> None:
    days = pa.array([2**31 - 1, 0, None], pa.int32()).cast(pa.date32())
    rows = all_rows(build(tmp_path, pa.table({"index": ["a", "b", "c"], "day": days})))
    assert [row["day"] for row in rows] == [np.datetime64(2**31 - 1, "D"), dt.date(1970, 1, 1), None]
    rows = all_rows(
        build(tmp_path, pa.table({"index": ["a", "b", "c"], "day": days}), sql_query="SELECT *, 1 AS one FROM dataframe")
    )
    assert [row["day"] for row in rows] == [np.datetime64(2**31 - 1, "D"), dt.date(1970, 1, 1), None], "beside computed columns"
    query = "SELECT index, CAST(strftime('%Y%m%d', day) AS TEXT) AS day FROM dataframe WHERE index = 'b'"
    rows = all_rows(build(tmp_path, pa.table({"index": ["a", "b", "c"], "day": days}), sql_query=query))
    assert [row["day"] for row in rows] == ["19700101"], "a text of its own"
    late = pa.array([86_400_000_000], pa.int64()).cast(pa.time64("us"))
    with pytest.raises(SourceError, match=r"column 'at': .*86400000000 us after midnight is no time of a day"):
        build(tmp_path, pa.table({"index": ["a"], "at": late}))


def test_bytes_whose_type_arrow_cannot_say_are_refused(tmp_path: Path) -> None:
    odd: Any = pa.opaque(pa.binary(), "inet", "PostgreSQL")
    own = pa.ExtensionArray.from_storage(odd, pa.array([b"x"]))
    for values in (own, pa.ListArray.from_arrays([0, 1], own)):
        with pytest.raises(SchemaError, match=r"column 'odd' has the type .*inet"):
            build(tmp_path, pa.table({"index": ["a"], "odd": values}))
    text: Any = pa.opaque(pa.string(), "numeric", "PostgreSQL")
    rows = all_rows(build(tmp_path, pa.table({"index": ["a"], "n": pa.ExtensionArray.from_storage(text, pa.array(["0.10"]))})))
    assert rows[0]["n"] == "0.10"


def test_a_file_cannot_claim_how_its_values_are_encoded(tmp_path: Path) -> None:
    field: Any = pa.field("t", pa.string(), metadata={"sqlstream.encoding": "json", "PARQUET:field_id": "7"})
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table([pa.array([1]), pa.array(["no json"])], schema=pa.schema([pa.field("index", pa.int64()), field])), path
    )
    index = build(tmp_path, path)
    assert all_rows(index) == [{"index": 1, "t": "no json"}]
    assert [column.type for column in index.columns] == ["int64", "string"]


def test_years_beyond_datetime_come_back_as_numpy(tmp_path: Path) -> None:
    seconds = [int(np.datetime64("12024-01-01", "s").astype("int64")), int(np.datetime64("90000-01-01", "s").astype("int64"))]
    result = roundtrip(tmp_path, pa.timestamp("s"), pa.array(seconds, pa.int64()).cast(pa.timestamp("s")))  # type: ignore[arg-type]
    assert result == [np.datetime64("12024-01-01", "s"), np.datetime64("90000-01-01", "s")]


def test_times_compare_as_text_and_decimals_as_numbers_in_sql(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = {
        "index": pa.array([0, 1, 2]),
        "day": pa.array([dt.date(2023, 5, 1), dt.date(2024, 5, 1), None]),
        "price": pa.array([Decimal("9.99"), Decimal("10.50"), Decimal("100.00")], pa.decimal128(10, 2)),
        "tags": pa.array([["cat"], ["dog", "cat"], None]),
    }
    pq.write_table(pa.table(table), path)
    index = build(tmp_path, path)
    assert run_query(index, "SELECT row FROM dataframe WHERE day > '2023-12-31'")[1] == [(1,)]
    assert run_query(index, "SELECT row FROM dataframe WHERE price > 10")[1] == [(1,), (2,)]
    assert run_query(index, "SELECT row FROM dataframe, json_each(tags) WHERE value = 'dog'")[1] == [(1,)]


def test_a_type_that_cannot_be_stored_is_refused_by_name_and_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow.parquet"
    pq.write_table(pa.table({"index": [1], "t": pa.array([[1]], pa.list_(pa.duration("ns")))}), path)
    values = pa.array([[1]], pa.list_(pa.time64("ns")))
    pq.write_table(pa.table({"index": [1], "t": values}), path)
    with pytest.raises(SourceError, match="'t'"):
        build(tmp_path, path)
    assert all_rows(build(tmp_path, path, columns_to_keep=())) == [{"index": 1}]


def test_more_columns_than_sqlite_has_is_an_error_with_a_cure(tmp_path: Path) -> None:
    path = tmp_path / "wide.parquet"
    pq.write_table(pa.table({"index": [1], **{f"c{i}": [1] for i in range(2100)}}), path)
    with pytest.raises(SchemaError, match="index_cols_to_keep"):
        build(tmp_path, path)
    assert all_rows(build(tmp_path, path, columns_to_keep=("c7",))) == [{"index": 1, "c7": 1}]


names = st.lists(
    st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda name: name not in SAMPLE_FIELDS),
    min_size=1,
    max_size=6,
    unique=True,
)


@settings(max_examples=40, deadline=None)
@given(names)
def test_any_column_names_are_kept_apart_and_come_back(columns: list[str]) -> None:
    columns = ["index", "row", "ROW", "Index", *(name for name in columns if name not in ("index", "row", "ROW", "Index"))]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "t.parquet")
        pq.write_table(pa.table([pa.array([at]) for at in range(len(columns))], names=columns), path)
        index = build(Path(directory), path)
        assert all_rows(index) == [{name: at for at, name in enumerate(columns)}]
        assert run_query(index, "SELECT * FROM dataframe")[1] == [(0, *range(len(columns)))]
        index.close()


nested = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats() | st.none(), max_size=5), st.lists(nested, min_size=1, max_size=5))
def test_any_floats_and_any_json_come_back(floats: list[float | None], objects: list[Any]) -> None:
    rows = [
        {"index": at, "value": [value], "x": x}
        for at, (value, x) in enumerate(zip(objects, [*floats, *[None] * 5], strict=False))
    ]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "t.jsonl")
        path.write_text("\n".join(json.dumps(row) for row in rows))
        index = build(Path(directory), path)
        assert repr(all_rows(index)) == repr(rows)  # repr: NaN, -0.0 and 1 against 1.0
        index.close()


@pytest.mark.parametrize(
    "listed", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 1)], ids=["list", "large_list", "fixed_size"]
)
@pytest.mark.parametrize(
    "kind", [pa.timestamp("ns"), pa.time64("ns"), pa.duration("ns")], ids=["timestamp", "time", "duration"]
)
def test_nanoseconds_within_a_list_of_any_kind_are_refused_and_never_cut(listed: Any, kind: Any, tmp_path: Path) -> None:
    whole = pa.array([[1000]], pa.list_(pa.int64())).cast(pa.list_(kind)).cast(listed(kind))
    cut = pa.array([[1001]], pa.list_(pa.int64())).cast(pa.list_(kind)).cast(listed(kind))
    (microsecond,) = roundtrip(tmp_path, listed(kind), whole)  # type: ignore[arg-type]
    assert str(microsecond[0]).endswith("00:00.000001") or microsecond[0] == dt.timedelta(microseconds=1)
    with pytest.raises(SourceError, match="no exact form"):
        roundtrip(tmp_path, listed(kind), cut)  # type: ignore[arg-type]


def test_nanoseconds_within_a_dictionary_of_a_struct_are_refused_and_never_cut(tmp_path: Path) -> None:
    for number, is_cut in ((1_700_000_000_123_456_000, False), (1_700_000_000_123_456_789, True)):
        moments = pa.array([number, None], pa.timestamp("ns")).dictionary_encode()
        structs = pa.StructArray.from_arrays([moments], ["at"])
        with pytest.raises(SourceError, match="no exact form") if is_cut else contextlib.nullcontext():
            got = roundtrip(tmp_path, None, structs)  # type: ignore[arg-type]
            assert got == [{"at": dt.datetime(2023, 11, 14, 22, 13, 20, 123456)}, {"at": None}]


@pytest.mark.parametrize("zone", ["America/New_York", "Asia/Tokyo", "UTC"])
def test_the_first_and_the_last_moment_come_back_in_every_zone(zone: str, tmp_path: Path) -> None:
    first, last = dt.datetime.min, dt.datetime.max
    values = pa.array([first, last], pa.timestamp("us")).cast(pa.timestamp("us", zone))
    got: list[Any] = roundtrip(tmp_path, pa.timestamp("us", zone), values)  # type: ignore[arg-type]
    naive = [at if isinstance(at, np.datetime64) else np.datetime64(at.astimezone(dt.UTC).replace(tzinfo=None)) for at in got]
    assert naive == [np.datetime64(first), np.datetime64(last)]


def test_a_duration_beyond_timedelta_comes_back_as_numpy(tmp_path: Path) -> None:
    values = pa.array([10**15, 1], pa.int64()).cast(pa.duration("s"))
    got = roundtrip(tmp_path, pa.duration("s"), values)  # type: ignore[arg-type]
    assert got == [np.timedelta64(10**15, "s"), dt.timedelta(seconds=1)]


@pytest.mark.parametrize("names", [["text"], ["text", "n"]], ids=["alone", "beside"])
@pytest.mark.parametrize("extension", [".csv", ".jsonl", ".parquet", ".arrow"])
def test_texts_come_back_from_an_exported_file(extension: str, names: list[str], tmp_path: Path) -> None:
    texts = ["", None, "a\rb", "a\nb\r", "\r", 'say "x"', '"', "a,b", " x ", "NULL", "ü\u2028"]
    table = pa.table({"n": range(len(texts)), "text": texts}).select(names)
    path = export(build(tmp_path, table), ExportOptions(extension=extension), tmp_path)[""].path
    wanted = texts if len(names) > 1 or extension != ".csv" else [text or "" for text in texts]  # a blank line is no row
    assert [row["text"] for row in all_rows(build(tmp_path, path))] == wanted


def test_columns_of_rows_are_made_without_an_object_for_each_row() -> None:
    rows = [(number, str(number)) for number in range(5000)]
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        columns = columns_of(rows)
        num_made = gc.get_count()[0] - before
    finally:
        gc.enable()
    assert num_made < 100
    assert columns == list(zip(*rows, strict=True))
    assert columns_of([]) == []


def test_uuids_within_lists_are_refused_by_their_type(tmp_path: Path) -> None:
    ids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([uuid.UUID(int=7).bytes], pa.binary(16)))
    lists = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), ids)
    for array in (lists, pa.StructArray.from_arrays([lists], ["in"])):
        with pytest.raises(
            SchemaError, match=r"'ids' has the type .*uuid.*, which an index cannot hold: .*write it as another type"
        ):
            build(tmp_path, pa.table({"ids": array}))
