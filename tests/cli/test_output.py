"""Text for people: aligned, whole, and harmless."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sqlstream.cli.output import Size, percent, print_facts, print_json, print_table, printable


@dataclasses.dataclass(frozen=True)
class Inner:
    bytes: int


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    inner: tuple[Inner, ...]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KB"),
        (1536, "1.5 KB"),
        (10 * 1024**3, "10.0 GB"),
        (5000 * 1024**4, "5000.0 TB"),
    ],
)
def test_size_prints_with_the_units_that_limits_are_written_in(num_bytes: int, text: str) -> None:
    assert str(Size(num_bytes)) == text


def test_percent_of_nothing_is_nothing() -> None:
    assert percent(0, 0) == "0 %"
    assert percent(5, 6) == "83 %"


def test_table_aligns_numbers_to_the_right_and_text_to_the_left(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["name", "bytes", "share"], [["a", Size(5), 0.5], ["longer", Size(2048), None]])
    assert capsys.readouterr().out.splitlines() == [
        "name     bytes  share",
        "a          5 B  0.5",
        "longer  2.0 KB",
    ]


def test_table_without_rows_prints_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["kind", "url"], [])
    assert capsys.readouterr().out == "kind  url\n"


def test_facts_stand_under_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_facts([("limit", "none"), ("pinned entries", "3")])
    assert capsys.readouterr().out.splitlines() == ["limit           none", "pinned entries  3"]


def test_control_characters_of_data_never_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("s3://b/\x1b[2J\r\nä") == "s3://b/\\x1b[2J\\r\\nä"
    print_table(["na\nme"], [["\x1b]0;title\x07"]])
    assert not any(ord(c) < 32 and c != "\n" for c in capsys.readouterr().out)


def test_json_takes_dataclasses_bytes_and_what_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"outer": Outer("ä", (Inner(1), Inner(2))), "key": b"\x01\xff", "many": 2**60})
    assert json.loads(capsys.readouterr().out) == {
        "outer": {"name": "ä", "inner": [{"bytes": 1}, {"bytes": 2}]},
        "key": "01ff",
        "many": 2**60,
    }
