"""Rows that the user's code gives: each with its own values, and none that Arrow takes for another one."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sqlstream.errors import SchemaError
from tests.index.sources import all_rows, build


def pandas() -> Any:
    """Return pandas, or skip the test: few machines that train have it."""
    return pytest.importorskip("pandas")


NAIVE = dt.datetime(2020, 1, 1)
AWARE = dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=5)))
DAY, MOMENT = dt.date(2020, 1, 1), dt.datetime(2020, 1, 1, 5)


def one_dict() -> Iterator[Any]:
    row: dict[str, int] = {}
    for number in range(3):
        row["x"] = number
        yield row


def one_list() -> Iterator[Any]:
    values = [{"n": 0}]
    for number in range(3):
        values[0]["n"] = number
        yield {"x": values}


def one_array() -> Iterator[Any]:
    values = np.zeros(2)  # [2]
    for number in range(3):
        values[:] = number  # [2]
        yield {"x": values}


def one_buffer() -> Iterator[Any]:
    buffer = bytearray(1)
    for number in range(3):
        buffer[0] = 65 + number
        yield {"x": memoryview(buffer)}


def one_batch() -> Iterator[Any]:
    values = np.zeros(1)  # [1]
    for number in range(3):
        values[:] = number  # [1]
        yield pa.record_batch({"x": pa.array(values)})


def one_frame() -> Iterator[Any]:
    frame = pandas().DataFrame({"x": [0.0]})
    for number in range(3):
        frame.loc[0, "x"] = float(number)
        yield frame


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        (one_dict, [0, 1, 2]),
        (one_list, [[{"n": 0}], [{"n": 1}], [{"n": 2}]]),
        (one_array, [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]),
        (one_buffer, [b"A", b"B", b"C"]),
        (one_batch, [0.0, 1.0, 2.0]),
        (one_frame, [0.0, 1.0, 2.0]),
    ],
)
def test_a_generator_may_fill_one_object_again_for_each_row(
    rows: Callable[[], Iterator[Any]], found: list[object], tmp_path: Path
) -> None:
    assert [row["x"] for row in all_rows(build(tmp_path, rows))] == found


MIXED = {
    "zones": (NAIVE, AWARE),
    "zones, the other way": (AWARE, NAIVE),
    "a moment after a day": (DAY, MOMENT),
    "text and bytes": ("a", b"b"),
    "within lists": ([DAY], [MOMENT]),
    "within arrays of objects": (np.array([DAY], dtype=object), np.array([MOMENT], dtype=object)),
    "within dicts": ({"a": [NAIVE]}, {"b": 1, "a": [AWARE]}),
}


@pytest.mark.parametrize("values", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("is_frame", [False, True], ids=["dicts", "frame"])
def test_values_that_arrow_takes_for_others_are_refused(values: tuple[object, object], is_frame: bool, tmp_path: Path) -> None:
    rows: Any = [{"x": None}, *({"x": value} for value in values)]
    if is_frame:
        rows = pandas().DataFrame({"x": pandas().Series([None, *values], dtype=object)})
    with pytest.raises(SchemaError, match=r"'x' has values of several types \(.* and .*\): give it one type"):
        build(tmp_path, rows)


@pytest.mark.parametrize(
    ("early", "late"),
    [(Decimal("0.123456789012345678"), 0.5), (0.5, Decimal("0.123456789012345678")), ("a", b"b"), ([b"b"], ["a"])],
)
def test_a_later_part_does_not_turn_decimals_into_floats_or_text_into_bytes(
    early: object, late: object, tmp_path: Path
) -> None:
    with pytest.raises(SchemaError, match=r"Field x has incompatible types.*give each column one type"):
        build(tmp_path, lambda: [pa.table({"x": [x]}) for x in (early, late)])


def test_nanoseconds_of_samples_are_those_of_rows_that_are_made_of_them(tmp_path: Path) -> None:
    table = pa.table({"at": pa.array([123, 0], pa.timestamp("ns", "UTC")), "day": pa.array([-1, 1000], pa.timestamp("ns"))})
    rows = all_rows(build(tmp_path, table))
    again = build(tmp_path, rows)
    assert [column.type for column in again.columns] == ["timestamp[ns, tz=UTC]", "timestamp[ns]"]
    assert all_rows(again) == rows
    far = {"at": None, "day": np.datetime64("20000-01-01", "s")}
    assert all_rows(build(tmp_path, [rows[1], far])) == [rows[1], far]


def test_a_moment_of_numpy_has_no_zone_and_is_refused_beside_one_that_has(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"'x' has .* \(moments with a zone and moments without a zone\): give it one type"):
        build(tmp_path, [{"x": AWARE}, {"x": np.datetime64("2020-01-01T00:00:00")}])


def test_a_year_that_microseconds_do_not_reach_is_not_another_one_beside_other_moments(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="column 'at'"):
        build(tmp_path, [{"at": np.datetime64("600000-01-01T00:00:00")}, {"at": NAIVE}])


def test_what_is_missing_is_no_type_of_its_own(tmp_path: Path) -> None:
    pd = pandas()
    frame = pd.DataFrame({"at": pd.Series([AWARE, pd.NaT], dtype=object), "x": pd.Series(["a", float("nan")], dtype=object)})
    assert all_rows(build(tmp_path, frame)) == [{"at": AWARE, "x": "a"}, {"at": None, "x": None}]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"x": np.ma.masked_array([1, 2], mask=[False, True])}], "'x' has masked arrays"),
        ([{1: "a", "1": "b"}], "the keys '1' and 1, which name one column"),
        ([{"x": "\ud800"}], "surrogates not allowed"),
    ],
)
def test_rows_that_are_no_table_are_an_error_of_ours(rows: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=f"the rows of .*{said}"):
        build(tmp_path, rows)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda pd: pd.DataFrame({"x": ["\ud800"]}, dtype=object), "surrogates not allowed"),
        (lambda pd: pd.DataFrame({"x": [1, "a"]}), "Conversion failed for column x"),
        (lambda pd: pd.DataFrame({"x": [2**64, 1]}, dtype=object), "too large"),
        (lambda pd: pd.DataFrame([[1, 2]], columns=["x", "x"]), "Duplicate column names"),
        (lambda pd: pd.DataFrame({"x": [1]}, index=pd.Index([1], name="x")), "cannot insert x"),
    ],
    ids=["surrogate", "types", "large", "twice", "index"],
)
def test_frames_that_are_no_table_are_an_error_of_ours(make: Callable[[Any], object], said: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=f"the rows of src cannot be taken as a table .*{said}"):
        build(tmp_path, make(pandas()))
